"""A support desk to crash, and a story that begins now with Dagster's folder."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from omnisupport_ingest.runtime.dagster_home import dagster_environment, write_dagster_home
from omnisupport_ingest_tests.layers import story as stories
from omnisupport_ingest_tests.layers.story import Story
from omnisupport_ingest_tests.recovery.crash import CrashDesk
from omnisupport_ingest_tests.sources.postgres.conftest import source as source
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest


@pytest.fixture
def crash_desk(kept_in: str | None, source: SourceUnderTest, tmp_path: Path, warm: str) -> CrashDesk:
    """A filled support desk with one contracted table; nothing of it captured yet. Its home keeps landing and
    lake in folders, and once more in a bucket."""
    source.overrides["storage"] = kept_in
    return CrashDesk.made(source, tmp_path / "desk", warm)


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
