"""Landing and raw of files are given up by age: what comes later is judged as if they were there."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from omnisupport_ingest.contracts.documents import program_file
from omnisupport_ingest.home import Home
from omnisupport_ingest.layers.removed import LANDING, RAW, WindowSealed, refuse_sealed
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.retention.keeping import NET_CHANGES
from omnisupport_ingest.retention.plan import plan_retention
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.sources.debezium.handling import BY_ARRIVAL, Handling
from omnisupport_ingest.sources.manifests.land import Inlet, land
from omnisupport_ingest.windows import KEY_FORMAT, OUT_OF_RANGE
from omnisupport_ingest_tests.retention.given_up import (
    KEPT,
    give_up,
    made_again,
    reasons,
    sealed,
    shown,
    take_all,
)
from omnisupport_ingest_tests.sources.debezium.recorded import SOURCE, Recorder
from omnisupport_ingest_tests.sources.debezium.told import TS, customer, envelope, flat
from omnisupport_ingest_tests.sources.manifests.deliveries import GRID, NOW, delivery, ticket

HOUR = 3_600_000
DAY = 24 * HOUR
FIRST, SECOND, LIVE = "2026-11-20T1600", "2026-11-20T1700", "2026-12-01T1600"
FILES = "omnisupport_files"


def giving_up(recorder: Recorder, **more: str) -> Recorder:
    """``recorder`` with contracts that give up landing and raw, and ``more`` layers, three weeks on."""
    path = recorder.folder / "contracts" / "customers.json"
    document = json.loads(path.read_text())
    document["x-cdc"]["retention"] = KEPT | more
    path.write_text(json.dumps(document))
    recorder.workspace = Workspace.open(recorder.workspace.settings)
    recorder.now += timedelta(days=21)
    return recorder


def told(order: str, id: int, hours: float, *, op: str = "u", lsn: int = 0, **values: Any) -> dict[str, Any]:
    """An event of a customer, so many hours after 16:00, in a source of that ``order``."""
    ts = TS + int(hours * HOUR)
    if order == "transaction":
        return envelope(op, customer(id, **values), lsn=lsn or 1000 + int(hours * 100), order=1, ts=ts)
    return flat(op, customer(id, **values), ts=ts)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["transaction", "time", "arrival"])
def test_files_of_events_are_judged_as_before_once_their_windows_are_given_up(
    tmp_path: Path, spark: SparkSession, order: str
) -> None:
    handling = Handling(order=BY_ARRIVAL) if order == "arrival" else None
    recorder = giving_up(Recorder(tmp_path, "customers", handling=handling))
    old = [told(order, 1, 0, op="c", name="first"), told(order, 2, 1, op="c", name="second")]
    recorder.land_values("old.jsonl", *old)
    recorder.land_values("live.jsonl", told(order, 1, 264, name="later"))
    at = recorder.workspace
    take_all(at, SOURCE, spark)
    before = shown(at, SOURCE)
    planned = give_up(at, SOURCE)
    assert {(each.layer, each.window) for each in planned.doomed} == {
        (layer, window) for layer in (LANDING, RAW) for window in (FIRST, SECOND)
    }
    assert planned.refused == ()
    assert shown(at, SOURCE) == before

    # (a) The same content lands nothing, and no copy of an event changes anything.
    assert recorder.land_values("again.jsonl", *old).already_landed
    if order != "arrival":
        # By arrival a copy in another file is a later event, whatever is given up.
        recorder.land_values("copies.jsonl", *old, told(order, 1, 264, name="later"))
        take_all(at, SOURCE, spark)
        assert shown(at, SOURCE) == before

    # (b) An event of a live window goes in.
    recorder.land_values("new.jsonl", told(order, 2, 264.5, name="newer"))
    take_all(at, SOURCE, spark)
    rows = recorder.state(spark, "customers")
    assert [(rows[id,]["name"], "email" in rows[id,]["_cdc_unresolved"]) for id in (1, 2)] == [
        ("later", False),
        ("newer", False),
    ]

    # (c) One of a sealed window waits: a row that was read, too, which is otherwise never too late.
    counted = reasons(at, SOURCE)[FIRST, "too_late_arrival"]
    recorder.land_values("late.jsonl", told(order, 3, 0.1, op="r" if order == "transaction" else "c"))
    take_all(at, SOURCE, spark)
    assert reasons(at, SOURCE)[FIRST, "too_late_arrival"] == counted + 1
    assert "email" in recorder.state(spark, "customers")[3,]["_cdc_unresolved"]

    # (d) A replay is refused; (e) what is made again is the same.
    with pytest.raises(WindowSealed, match=FIRST):
        refuse_sealed(at, SOURCE, [FIRST])
    assert sealed(at, SOURCE) == {FIRST, SECOND}
    before = shown(at, SOURCE)
    assert made_again(at, SOURCE, spark) == before


@pytest.mark.slow
def test_a_position_of_a_window_that_was_given_up_is_known_whatever_time_it_comes_with(
    tmp_path: Path, spark: SparkSession
) -> None:
    """It lands where it landed first: in a window without landing it collides, in a sealed one it waits."""
    recorder = giving_up(Recorder(tmp_path, "customers"))
    at = recorder.workspace
    recorder.land_values("old.jsonl", told("transaction", 1, 0, op="c", lsn=1000, name="first"))
    recorder.land_values("young.jsonl", told("transaction", 2, 60, op="c", lsn=2000, name="second"))
    recorder.land_values("live.jsonl", told("transaction", 3, 264, op="c", lsn=9000, name="third"))
    take_all(at, SOURCE, spark)
    planned = give_up(at, SOURCE)
    trimmed = "2026-11-23T0400"
    assert {each.window for each in planned.of(LANDING)} == {FIRST, trimmed}
    assert {each.window for each in planned.of(RAW)} == {FIRST}

    landing = recorder.land_values(
        "twice.jsonl",
        told("transaction", 1, 265, lsn=1000, name="another"),
        told("transaction", 2, 265, op="c", lsn=2000, name="another"),
        told("transaction", 3, 265, lsn=9100, name="a change"),
    )
    assert landing.manifest.windows == (FIRST, trimmed, "2026-12-01T1700")
    take_all(at, SOURCE, spark)
    judged = at.deduped(SOURCE).open()
    found = {window: judged.state(window) for window in (FIRST, trimmed)}
    assert all(found.values())
    scenarios = {window: dict(state.checkpoint.scenarios) for window, state in found.items() if state}
    assert scenarios[FIRST]["too_late_arrival"] == 1
    assert scenarios[trimmed]["collision"] == 2
    rows = recorder.state(spark, "customers")
    assert rows[3,]["name"] == "a change"
    assert rows[1,]["name"] == "first"


@pytest.mark.slow
def test_no_net_change_of_files_of_events_leaves_and_the_plan_says_why(
    tmp_path: Path, spark: SparkSession
) -> None:
    """No contract tells them from whole deliveries: what has landed does."""
    recorder = giving_up(Recorder(tmp_path, "customers"), net_changes="P10D")
    at = recorder.workspace
    for number, hours in enumerate((0, 1, 264)):
        recorder.land_values(f"{number}.jsonl", told("transaction", 1, hours, op="r", name=f"{number}"))
    take_all(at, SOURCE, spark)
    give_up(at, SOURCE)
    planned = plan_retention(Workspace.open(at.settings), SOURCE)
    assert planned.rows == () and sealed(at, SOURCE) == {FIRST, SECOND}
    assert {(each.layer, each.window, each.why) for each in planned.refused} == {
        (
            NET_CHANGES,
            window,
            "an event may still land between two that have landed, and ask for a row that left "
            "(public.customers)",
        )
        for window in (FIRST, SECOND)
    }


class Deliveries:
    """A home that takes deliveries of tickets, whose contract gives up landing and raw."""

    def __init__(self, folder: Path) -> None:
        contracts = folder / "contracts"
        contracts.mkdir()
        document = json.loads(program_file("contracts/data/omnisupport_tickets.json").read_text())
        document["x-cdc"]["retention"] = KEPT
        (contracts / "omnisupport_tickets.json").write_text(json.dumps(document))
        settings = Settings(home=folder / "home", contracts_dir=contracts, _env_file=None)
        Home.open(settings.home, GRID.size, now=GRID.first + timedelta(minutes=1))
        self.workspace, self.folder = Workspace.open(settings), folder

    def load(self, name: str, mode: str, rows: list[dict[str, Any]], as_of: str | None = None):  # type: ignore[no-untyped-def]
        told = delivery(self.folder, mode, rows, name=name, **({} if as_of is None else {"as_of": as_of}))
        clock = NOW + timedelta(days=40)
        store = self.workspace.landing(FILES)
        return land(told, Inlet(store, self.workspace.grid, clock=lambda: clock))

    def rows(self, spark: SparkSession) -> dict[int, tuple[str | None, bool]]:
        """Status of each ticket, and whether all of its columns are known."""
        (contract,) = self.workspace.contracts.of_source(FILES)
        snapshot = self.workspace.dimension(contract).open()
        found = snapshot.read(spark, snapshot.files("")).collect()
        return {int(row["ticket_id"][-6:]): (row["status"], not row["_cdc_unresolved"]) for row in found}


@pytest.mark.slow
def test_deliveries_by_cursor_are_judged_as_before_once_their_windows_are_given_up(
    tmp_path: Path, spark: SparkSession
) -> None:
    home = Deliveries(tmp_path)
    at, mode = home.workspace, "incremental_cursor"
    old = [ticket(1), ticket(2, "2026-04-18 11:00:00+00"), ticket(3, "2026-04-01 00:10:00+00")]
    home.load("old.jsonl", mode, old, "2026-04-19T00:00:00Z")
    home.load("live.jsonl", mode, [ticket(4, "2026-05-18 10:00:00+00")], "2026-05-19T00:00:00Z")
    take_all(at, FILES, spark)
    before = shown(at, FILES)
    planned = give_up(at, FILES)
    first, second, third = at.grid.first.strftime(KEY_FORMAT), "2026-04-18T1000", "2026-04-18T1100"
    assert {each.window for each in planned.of(LANDING)} == {first, second, third}
    assert {each.window for each in planned.of(RAW)} == {second, third}
    ((window, why),) = {(each.window, each.why) for each in planned.refused}
    assert window == first and "land in the first window" in why

    assert home.load("old.jsonl", mode, old, "2026-04-19T00:00:00Z").already_landed
    home.load("copy.jsonl", "backfill", old[1:2])
    take_all(at, FILES, spark)
    assert shown(at, FILES) == before

    home.load("new.jsonl", mode, [ticket(1, "2026-05-18 11:00:00+00", status="resolved")])
    home.load("late.jsonl", "backfill", [ticket(9, "2026-04-18 10:30:00+00")])
    # Older than a version that is known, in a window that nothing had landed in.
    home.load("older.jsonl", "backfill", [ticket(4, "2026-04-20 10:00:00+00", status="pending")])
    take_all(at, FILES, spark)
    rows = home.rows(spark)
    assert rows[1] == ("resolved", True) and rows[4] == ("open", True)
    assert not rows[9][1]
    assert reasons(at, FILES) == {(second, "too_late_arrival"): 1, (third, "too_late_arrival"): 1}
    with pytest.raises(WindowSealed, match=second):
        refuse_sealed(at, FILES, [second])
    before = shown(at, FILES)
    assert made_again(at, FILES, spark) == before
    assert OUT_OF_RANGE not in at.landing(FILES).windows()


@pytest.mark.slow
def test_a_snapshot_by_cursor_of_a_sealed_window_is_not_held_back(
    tmp_path: Path, spark: SparkSession
) -> None:
    home = Deliveries(tmp_path)
    at, mode = home.workspace, "full_snapshot"
    home.load("old.jsonl", mode, [ticket(1), ticket(2)], "2026-04-18T11:00:00Z")
    home.load("live.jsonl", mode, [ticket(1), ticket(3)], "2026-05-19T00:30:00Z")
    take_all(at, FILES, spark)
    planned = give_up(at, FILES)
    assert {each.window for each in planned.of(RAW)} == {"2026-04-18T1100"} == sealed(at, FILES)
    before = {1: ("open", True), 2: ("open", True), 3: ("open", True)}
    assert home.rows(spark) == before

    # Of a moment between the two: its own rows are below the newest snapshot, which had not got them.
    older = home.load("older.jsonl", mode, [ticket(1), ticket(4)], "2026-04-18T11:30:00Z")
    assert older.batches[0].windows == ("2026-05-19T0000",)
    home.load("next.jsonl", mode, [ticket(1, status="resolved"), ticket(3)], "2026-05-20T00:30:00Z")
    take_all(at, FILES, spark)
    assert home.rows(spark) == before | {1: ("resolved", True), 4: ("open", True)}
    assert reasons(at, FILES) == {}
    before = shown(at, FILES)
    assert made_again(at, FILES, spark) == before


def test_a_source_without_a_watermark_grows_nothing_old(tmp_path: Path) -> None:
    """Rows of which nothing says up to when they are complete do not tell how far their source is."""
    home = Deliveries(tmp_path)
    home.load("rows.jsonl", "backfill", [ticket(1)])
    planned = plan_retention(home.workspace, FILES)
    assert planned.watermark is None and planned.doomed == () and planned.keep[LANDING] == timedelta(days=7)
