"""A story that begins now, and Dagster's folder in its home as the services write it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from omnisupport_ingest.runtime.dagster_home import dagster_environment, write_dagster_home
from omnisupport_ingest_tests.sources.postgres.conftest import source as source
from omnisupport_ingest_tests.stages import story as stories
from omnisupport_ingest_tests.stages.story import Story


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "recent"


@pytest.fixture
def recent(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Story:
    """A story that begins ten minutes ago: Dagster counts every window since the first one."""
    start = datetime.now(UTC).replace(second=0, microsecond=0) - timedelta(minutes=10)
    monkeypatch.setattr(stories, "START", start)
    story = Story(folder)
    write_dagster_home(story.workspace.settings, story.workspace.home)
    for name, value in dagster_environment(story.workspace.settings, story.workspace.home).items():
        monkeypatch.setenv(name, value)
    return story
