"""A told story of batches, and the definitions of its home."""

from __future__ import annotations

from pathlib import Path

import dagster as dg
import pytest

from omnisupport_ingest.definitions import build_definitions
from omnisupport_ingest_tests.stages.story import Story


@pytest.fixture
def story(tmp_path: Path) -> Story:
    return Story(tmp_path)


@pytest.fixture
def definitions(story: Story) -> dg.Definitions:
    return build_definitions(story.workspace)
