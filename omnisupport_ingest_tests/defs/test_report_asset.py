"""The report as an asset of Dagster."""

from __future__ import annotations

from pathlib import Path

import dagster as dg
import pytest

from omnisupport_ingest.definitions import build_definitions
from omnisupport_ingest_tests.layers.story import SOURCE, Change, Commit, Story


@pytest.mark.quick
def test_its_job_writes_the_page_to_the_home(story: Story) -> None:
    story.land(Commit(10, 1, [Change("c", 1, {"title": "one"})]))
    definitions = build_definitions(story.workspace)
    assert [each.name for each in definitions.schedules or () if each.name == "hourly_report"]
    with dg.DagsterInstance.ephemeral() as instance:
        run = definitions.resolve_job_def("write_report").execute_in_process(instance=instance)
        shown = instance.get_latest_materialization_event(dg.AssetKey("report"))
    assert run.success
    assert shown is not None
    materialization = shown.asset_materialization
    assert materialization is not None
    page = Path(str(materialization.metadata["page"].value))
    assert page == story.workspace.home.path / "report.html"
    assert SOURCE in page.read_text()
    assert page.stat().st_mode & 0o077 == 0
