"""Each load mode from its files to the dimension, on real layers; and what order they come in."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from omnisupport_ingest.home import Home
from omnisupport_ingest.layers.dimension import dimensions
from omnisupport_ingest.layers.events import deduped, raw
from omnisupport_ingest.layers.lateness import Lateness
from omnisupport_ingest.layers.reviews import ReviewLedger
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.review.quarantined import quarantined
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.sources.debezium.land import Inlet as EventInlet
from omnisupport_ingest.sources.manifests.events import land_events
from omnisupport_ingest.sources.manifests.examine import windows_of_batches
from omnisupport_ingest.sources.manifests.land import Delivery, Inlet, land
from omnisupport_ingest.sources.manifests.seed_manifest import load_manifest
from omnisupport_ingest.windows import without_sentinel
from omnisupport_ingest_tests.sources.manifests.deliveries import (
    CONTRACTS,
    GRID,
    MANIFESTS,
    NOW,
    delivery,
    ticket,
)


class Lake:
    """A home that takes deliveries, with all of its layers."""

    def __init__(self, folder: Path, spark: SparkSession) -> None:
        settings = Settings(home=folder / "home", _env_file=None)
        home = Home.open(settings.home, GRID.size, now=GRID.first + timedelta(minutes=1))
        self.workspace, self.spark = Workspace(settings, home, CONTRACTS), spark

    def load(self, name: str) -> Delivery:
        seed = load_manifest(MANIFESTS / f"{name}.json", CONTRACTS)
        store = self.workspace.landing(seed.contract.source)
        if seed.load_mode == "cdc":
            into = EventInlet(store, self.workspace.grid, CONTRACTS, "support_desk", clock=lambda: NOW)
            return land_events(seed, into)
        return land(seed, Inlet(store, self.workspace.grid, clock=lambda: NOW))

    def fold(self, source: str, windows: list[str] | None = None) -> None:
        batches = self.workspace.landing(source).manifests()
        windows = windows or sorted({each for batch in batches for each in without_sentinel(batch.windows)})
        raw.materialize(self.workspace, self.spark, source, windows, "run")
        deduped.materialize(self.workspace, self.spark, source, windows, "run")
        for contract in CONTRACTS.of_source(source):
            dimensions.materialize(self.workspace, self.spark, contract, windows, "run")

    def rows(self, source: str) -> dict[str, tuple[str, str]]:
        """Status and time of the last change of each row of the source's table that is alive."""
        (contract,) = CONTRACTS.of_source(source)
        snapshot = self.workspace.dimension(contract).open()
        frame = snapshot.read(self.spark, snapshot.files("")).where("not _cdc_is_deleted")
        names = [*contract.key, "status", "updated_at"]
        found = frame.selectExpr(*(f"cast({name} as string)" for name in names)).collect()
        return {row[0]: (row[1], row[2]) for row in found}


@pytest.mark.slow
def test_the_manifests_of_the_repository_in_every_mode_end_in_the_dimension(
    tmp_path: Path, spark: SparkSession
) -> None:
    lake, source = Lake(tmp_path, spark), "omnisupport_files"
    lake.load("omnisupport_tickets_full")
    lake.fold(source)
    whole = lake.rows(source)
    assert len(whole) == 40

    lake.load("omnisupport_tickets_changes")
    lake.fold(source)
    changed = lake.rows(source)
    assert len(changed) == 50
    assert {key for key in whole if changed[key] != whole[key]} == {
        f"TKT-20260417-{n:06d}" for n in range(1, 6)
    }

    late = lake.load("omnisupport_tickets_late")
    store = lake.workspace.landing(source)
    mine = late.batches[0]
    parts = [
        part for window in mine.windows for part in store.parts(window) if part.batch_id == mine.batch_id
    ]
    lateness = Lateness.of(lake.workspace, source)
    assert {each.window for each in lateness.late_parts(parts)} == set(mine.windows)
    lake.fold(source)
    # Tickets of the 16th are older than the snapshot, which had not got them: they had ended by then.
    assert lake.rows(source) == changed

    again = load_manifest(MANIFESTS / "omnisupport_tickets_again.json", CONTRACTS)
    windows, faults = windows_of_batches(again, store)
    assert windows == list(late.batches[0].windows) and faults == []
    lake.fold(source, windows)
    assert lake.rows(source) == changed

    for name in ("full", "changes", "late"):
        assert lake.load(f"omnisupport_tickets_{name}").already_landed


@pytest.mark.slow
def test_rows_that_a_gate_keeps_out_wait_in_quarantine_and_the_rest_is_in_the_dimension(
    tmp_path: Path, spark: SparkSession
) -> None:
    lake, source = Lake(tmp_path, spark), "omnisupport_files"
    rows = [
        ticket(1),
        ticket(2) | {"novel": "x"},
        ticket(3, status="solved"),
        ticket(4) | {"ticket_id": None},
        ticket(5) | {"ticket_id": None, "novel": "x"},
        ticket(6) | {"ticket_id": None, "novel": "y"},
    ]
    seed = delivery(tmp_path, "incremental_cursor", rows, gates={"unknown_column": "quarantine"})
    land(seed, Inlet(lake.workspace.landing(source), lake.workspace.grid, clock=lambda: NOW))
    lake.fold(source)
    assert "TKT-20260417-000001" in lake.rows(source)
    snapshot = lake.workspace.quarantine(source).open()
    files = [path for window in snapshot.windows() for path in snapshot.files(window)]
    found = snapshot.read(spark, files).select("file_row", "file_name", "reason", "rules").collect()
    assert {(row["file_row"], row["file_name"], row["reason"], *(row["rules"] or ())) for row in found} == {
        (2, "tickets.jsonl", "malformed_image"),
        (3, "tickets.jsonl", "row_rule", "status:enum"),
        (4, "tickets.jsonl", "malformed_image"),
        (5, "tickets.jsonl", "malformed_image"),
        (6, "tickets.jsonl", "malformed_image"),
    }
    # Each has an id of its own, so a person decides on one line, not on lines that nobody saw.
    ledger = ReviewLedger.open(lake.workspace, source)
    assert len({row.event for row in quarantined(lake.workspace, source, ledger)}) == 5


@pytest.mark.slow
def test_a_column_that_a_file_does_not_have_is_unresolved_in_the_dimension(
    tmp_path: Path, spark: SparkSession
) -> None:
    lake, source = Lake(tmp_path, spark), "omnisupport_files"
    into = Inlet(lake.workspace.landing(source), lake.workspace.grid, clock=lambda: NOW)
    row, whole = ticket(2), ticket(1, resolved_at="2026-04-18 09:00:00+00")
    del row["resolved_at"]
    land(delivery(tmp_path, "incremental_cursor", [whole], name="whole.csv"), into)
    land(delivery(tmp_path, "incremental_cursor", [row], name="narrow.csv"), into)
    lake.fold(source)
    (contract,) = CONTRACTS.of_source(source)
    snapshot = lake.workspace.dimension(contract).open()
    found = snapshot.read(spark, snapshot.files("")).orderBy("ticket_id").collect()
    assert [(each["resolved_at"] is None, each["_cdc_unresolved"]) for each in found] == [
        (False, []),
        (True, ["resolved_at"]),
    ]
