"""When source and lake are compared by themselves: not before anybody asks, and never on an empty landing."""

from __future__ import annotations

from pathlib import Path

import dagster as dg
import pytest

from omnisupport_ingest.contracts.load import load_contracts
from omnisupport_ingest.definitions import build_definitions
from omnisupport_ingest.defs.equality import CHECK
from omnisupport_ingest.home import Home
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.windows import WindowSize

CONTRACTS = Path(__file__).parents[2] / "contracts" / "data"
SCHEDULE = "verify_support_desk_often"


def workspace_in(folder: Path, minutes: int | None) -> Workspace:
    settings = Settings(home=folder / "home", verify_minutes=minutes, _env_file=None)
    return Workspace(settings, Home.open(settings.home, WindowSize(60)), load_contracts(CONTRACTS))


@pytest.mark.parametrize(
    ("minutes", "cron", "running"),
    [(None, "*/5 * * * *", False), (1, "*/1 * * * *", True), (60, "0 * * * *", True)],
)
def test_the_schedule_is_off_until_a_setting_says_how_often(
    tmp_path: Path, minutes: int | None, cron: str, running: bool
) -> None:
    repository = build_definitions(workspace_in(tmp_path, minutes)).get_repository_def()
    schedule = repository.get_schedule_def(SCHEDULE)
    assert schedule.cron_schedule == cron
    assert (schedule.default_status is dg.DefaultScheduleStatus.RUNNING) is running


def test_nothing_is_asked_for_where_nothing_has_landed(tmp_path: Path) -> None:
    workspace = workspace_in(tmp_path, 5)
    schedule = build_definitions(workspace).get_repository_def().get_schedule_def(SCHEDULE)
    with dg.DagsterInstance.ephemeral() as instance:
        context = dg.build_schedule_context(instance, resources={"workspace": workspace})
        tick = schedule.evaluate_tick(context)
    assert tick.run_requests == [] and "has landed" in (tick.skip_message or "")


def test_just_the_dimensions_of_logs_have_the_check_and_no_ingest_run_makes_it(tmp_path: Path) -> None:
    definitions = build_definitions(workspace_in(tmp_path, 5))
    graph = definitions.resolve_asset_graph()
    checked = {key.asset_key.path[0] for key in graph.asset_check_keys if key.name == CHECK}
    assert checked == {"support_desk"}
    ingest = definitions.resolve_job_def("ingest_support_desk").asset_layer.asset_graph
    assert CHECK not in {key.name for key in ingest.asset_check_keys}
