"""A told story of batches, and the definitions of its home."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import dagster as dg
import pytest

from omnisupport_ingest.definitions import build_definitions
from omnisupport_ingest.defs import sensors
from omnisupport_ingest_tests.layers import story as stories
from omnisupport_ingest_tests.layers.story import Story


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ticks that find nothing do not wait for a batch that no test lands meanwhile."""
    monkeypatch.setattr(sensors, "PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(sensors, "FILES_PATIENCE_SECONDS", 0.0)


@pytest.fixture
def story(tmp_path: Path) -> Story:
    return Story(tmp_path)


@pytest.fixture
def definitions(story: Story) -> dg.Definitions:
    return build_definitions(story.workspace)


@pytest.fixture
def recent_story(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Story:
    """A story that begins ten minutes ago: Dagster counts every window since the first one."""
    start = datetime.now(UTC).replace(second=0, microsecond=0) - timedelta(minutes=10)
    monkeypatch.setattr(stories, "START", start)
    return Story(tmp_path / "recent")
