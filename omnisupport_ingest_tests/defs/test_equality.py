"""When source and lake are compared by themselves: not before anybody asks, and never on an empty landing."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import dagster as dg
import pytest

from omnisupport_ingest.contracts.load import load_contracts
from omnisupport_ingest.contracts.model import DelayedMerge
from omnisupport_ingest.contracts.pii_policies import HASH
from omnisupport_ingest.contracts.sources import sources_in_force
from omnisupport_ingest.definitions import build_definitions
from omnisupport_ingest.defs.equality import CHECK, _result, build_equality
from omnisupport_ingest.equality.bisecting import Differing
from omnisupport_ingest.equality.checking import Checked, CheckOptions, _Round, not_comparable
from omnisupport_ingest.equality.known_ranges import KnownRange, KnownRanges
from omnisupport_ingest.home import Home
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.read.verified import (
    DIFFERS,
    NOT_COMPARABLE,
    PART_EQUAL,
    Moment,
    Verified,
    write_verified,
)
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.windows import WindowSize

CONTRACTS = Path(__file__).parents[2] / "contracts" / "data"
SCHEDULE = "verify_support_desk_often"
NOW = datetime(2026, 11, 24, tzinfo=UTC)


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


def test_a_table_whose_key_is_protected_has_no_check_that_could_only_warn(tmp_path: Path) -> None:
    workspace = workspace_in(tmp_path, 5)
    definition = sources_in_force(workspace.settings, workspace.contracts).find("support_desk")
    one, other = workspace.contracts.of_source("support_desk")[:2]
    hashed = [replace(each, pii=HASH) if each.name in other.key else each for each in other.columns]
    protected = replace(other, columns=tuple(hashed))
    for contracts, checked in (([one, protected], 1), ([protected], 0)):
        made = build_equality(workspace.settings, definition, contracts)
        assert sum(len(list(each.check_specs)) for each in made.asset_checks or ()) == checked


def test_a_table_that_differs_names_the_command_for_its_source(tmp_path: Path) -> None:
    (contract, *_) = workspace_in(tmp_path, 5).contracts.of_source("support_desk")
    note = Verified(contract.name, DIFFERS, NOW, why="1 key differs", differing=1)
    result = _result(Checked(contract, note), NOW)
    assert result is not None and not result.passed
    assert (result.description or "").endswith("omnisupport-ingest verify support_desk --repair")


@pytest.mark.parametrize("state", [PART_EQUAL, NOT_COMPARABLE])
def test_a_known_difference_stays_an_error_until_a_comparison_finds_it_equal(
    tmp_path: Path, state: str
) -> None:
    workspace = workspace_in(tmp_path, 5)
    (contract, *_) = workspace.contracts.of_source("support_desk")
    write_verified(
        workspace.home, contract, Verified(contract.name, DIFFERS, NOW, why="differs", differing=2)
    )
    checks, moment = _Round(workspace, CheckOptions(), {}), Moment(1, Lsn(9), NOW)
    differed = KnownRange(None, 5, equal=moment, tried=Lsn(8), differed=True)
    equal = KnownRange("5", 5, equal=moment)
    note = not_comparable(workspace, contract, "batches wait").note
    if state == PART_EQUAL:
        note = checks._note(contract, state, moment, KnownRanges("", (differed, equal)), Differing(5))
    assert (note.state, note.differs, note.differing, note.differs_since) == (state, True, 2, NOW)
    late = replace(note, waits_since=NOW - timedelta(hours=2))
    result = _result(Checked(contract, late), NOW)
    assert result is not None and not result.passed and result.severity is dg.AssetCheckSeverity.ERROR
    assert (result.description or "").endswith("omnisupport-ingest verify support_desk --repair")
    write_verified(workspace.home, contract, note)
    mended = KnownRanges("", (replace(differed, differed=False, tried=None), equal))
    assert not checks._note(contract, PART_EQUAL, moment, mended, Differing(5)).differs
    unknown = KnownRanges("", (KnownRange(None, 5), equal))
    assert checks._note(contract, PART_EQUAL, moment, unknown, Differing(5)).differs


@pytest.mark.parametrize(
    ("delay", "minutes", "warns"), [(None, 59, False), (None, 61, True), (2, 179, False), (2, 181, True)]
)
def test_a_table_that_was_not_compared_has_no_result_and_a_warning_when_it_lasts(
    tmp_path: Path, delay: int | None, minutes: int, warns: bool
) -> None:
    (contract, *_) = workspace_in(tmp_path, 5).contracts.of_source("support_desk")
    if delay is not None:
        contract = replace(contract, delayed_merge=DelayedMerge(timedelta(hours=delay), 0.1))
    since = NOW - timedelta(minutes=minutes)
    note = Verified(contract.name, NOT_COMPARABLE, NOW, why="batches wait", waits_since=since)
    for through in (None, Moment(1, Lsn(1), since)):
        result = _result(Checked(contract, replace(note, through=through)), NOW)
        assert (result is not None) is warns
        if result is not None:
            assert (result.passed, result.severity) == (False, dg.AssetCheckSeverity.WARN)
            assert (result.description or "").startswith("Not compared with the source for ")
            assert "batches wait" in (result.description or "")
