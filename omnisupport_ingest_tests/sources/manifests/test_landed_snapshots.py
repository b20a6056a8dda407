"""Whole deliveries of rows without a cursor move the watermark, and none lands in a window that it has
passed."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnisupport_ingest.contracts.documents import program_file
from omnisupport_ingest.contracts.load import Contracts, load_contracts
from omnisupport_ingest.landing.manifest import Manifest
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.sources.manifests.land import Inlet, SeedRefused, land
from omnisupport_ingest.sources.manifests.landed_snapshots import LandedSnapshots, window_of_snapshot
from omnisupport_ingest.sources.manifests.seed_manifest import load_manifest
from omnisupport_ingest.windows import WindowGrid, WindowSize
from omnisupport_ingest_tests.sources.manifests.deliveries import (
    as_before,
    content,
    delivery,
    events,
    inlet,
    ticket,
)

SOURCE = "support_files"
GRID = WindowGrid(WindowSize(60), datetime(2026, 11, 1, tzinfo=UTC))
LEGACY, SECOND = "files.legacy_tickets", "files.second_tickets"


def at(day: int, hour: int = 3, minute: int = 20) -> datetime:
    return datetime(2026, 11, day, hour, minute, tzinfo=UTC)


class Desk:
    """A source of two tables without a cursor, and who delivers them."""

    def __init__(self, folder: Path, tables: tuple[str, ...] = (LEGACY,)) -> None:
        self.folder, self.tables, self.now, self.number = folder, tables, at(30), 0
        self.store = LandingStore(folder / "landing", SOURCE)
        self.contracts = self._contracts()

    def _contracts(self) -> Contracts:
        folder = self.folder / "contracts"
        folder.mkdir()
        first = json.loads(program_file("contracts/data/legacy_tickets.json").read_text())
        (folder / "legacy_tickets.json").write_text(json.dumps(first))
        first["x-cdc"]["table"] = "second_tickets"
        (folder / "second_tickets.json").write_text(json.dumps(first))
        return load_contracts(folder)

    def deliver(
        self, *numbers: int, as_of: datetime | None = None, table: str = LEGACY, **more: Any
    ) -> Manifest:
        """Land rows ``numbers`` as all of ``table``. ``more``: members of the manifest."""
        self.number += 1
        data = self.folder / f"{self.number}.jsonl"
        data.write_bytes(content([_row(each) for each in numbers], ".jsonl"))
        document = json.loads(program_file("data/seed_manifests/legacy_tickets_2025.json").read_text())
        document["contract"]["table"] = table.removeprefix("files.")
        gates = document["gates"] | {"checksum": "accept"} | more.pop("gates", {})
        document["files"][0] |= {"path": data.name, "rows": len(numbers)}
        document["files"] += more.pop("files", [])
        document |= more | {"gates": gates}
        if as_of is not None:
            document["as_of"] = as_of.isoformat()
        path = self.folder / f"{self.number}.json"
        path.write_text(json.dumps(document))
        inlet = Inlet(self.store, GRID, clock=lambda: self.now, tables=self.tables)
        (batch,) = land(load_manifest(path, self.contracts), inlet).batches
        return batch

    @property
    def watermark(self) -> datetime | None:
        return LandingStore(self.folder / "landing", SOURCE).landed().watermark


def _row(number: int) -> dict[str, Any]:
    return {"ticket_ref": f"HD-2025-{number:05d}", "subject": "s", "escalated": False}


def test_a_whole_delivery_moves_the_watermark_to_the_moment_it_states(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    first = desk.deliver(1, as_of=at(10))
    assert (first.arrival.watermark_before, first.arrival.watermark) == (None, at(10))
    assert first.file is not None and first.file.snapshots == {LEGACY: at(10)}
    second = desk.deliver(1, 2, as_of=at(11))
    assert (second.arrival.watermark_before, second.arrival.watermark) == (at(10), at(11))
    assert second.windows == ("2026-11-11T0300",)
    assert desk.watermark == at(11)


def test_one_that_states_no_moment_counts_as_of_its_landing(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    assert desk.deliver(1).arrival.watermark == desk.now == at(30)


def test_one_ahead_of_the_clock_moves_it_to_the_landing_only(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    batch = desk.deliver(1, as_of=desk.now + timedelta(hours=2))
    assert batch.arrival.watermark == desk.now and batch.windows == ("2026-11-30T0500",)


def test_an_older_delivery_that_lands_later_moves_nothing_back_and_lands_where_nothing_is_sealed(
    tmp_path: Path,
) -> None:
    desk = Desk(tmp_path)
    newest = desk.deliver(1, as_of=at(20))
    older = desk.deliver(1, 2, as_of=at(5))
    assert (older.arrival.watermark_before, older.arrival.watermark) == (at(20), at(20))
    assert older.windows == newest.windows
    # The order of deliveries counts, so it stands above; its rows keep the moment that they are of.
    assert older.files[0].first > newest.files[0].last
    assert older.file is not None and older.file.snapshots == {LEGACY: at(20)}


def test_a_clock_that_is_set_back_moves_nothing_back(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.deliver(1)
    desk.now -= timedelta(days=9)
    for number in (2, 3):
        batch = desk.deliver(1, number)
        assert batch.windows == ("2026-11-30T0300",)
        assert (batch.arrival.watermark_before, batch.arrival.watermark) == (at(30), at(30))
    desk.now = at(30, 7)
    assert desk.deliver(1, 4).arrival.watermark == at(30, 7) == desk.watermark


def test_one_within_the_window_of_the_watermark_stays_there(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.deliver(1, as_of=at(20, 3, 40))
    batch = desk.deliver(2, as_of=at(20, 3, 10))
    assert batch.windows == ("2026-11-20T0300",) and batch.arrival.watermark == at(20, 3, 40)


def test_the_same_delivery_again_changes_nothing(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    first = desk.deliver(1)
    desk.now += timedelta(hours=5)
    assert desk.deliver(1) == first and desk.watermark == at(30)
    # That the table is again what it was is news only with a moment.
    assert desk.deliver(1, as_of=at(30, 5)).arrival.watermark == at(30, 5)


def test_of_two_tables_the_one_that_is_delivered_seldom_holds_the_watermark(tmp_path: Path) -> None:
    desk = Desk(tmp_path, (LEGACY, SECOND))
    assert desk.deliver(1, as_of=at(10)).arrival.watermark is None
    assert desk.deliver(1, as_of=at(8), table=SECOND).arrival.watermark == at(8)
    # Every night the one:
    for day in range(11, 15):
        batch = desk.deliver(1, as_of=at(day))
        assert batch.arrival.watermark == at(8) and batch.windows == (f"2026-11-{day}T0300",)
    # Below what the other has reached, above the watermark: in its own window.
    monthly = desk.deliver(2, as_of=at(13), table=SECOND)
    assert monthly.windows == ("2026-11-13T0300",) and monthly.arrival.watermark == at(13)
    assert monthly.file is not None and monthly.file.snapshots == {LEGACY: at(14), SECOND: at(13)}


def test_a_table_that_the_source_gets_later_holds_the_watermark_until_its_first_delivery(
    tmp_path: Path,
) -> None:
    desk = Desk(tmp_path)
    desk.deliver(1, as_of=at(10))
    desk.tables = (LEGACY, SECOND)
    assert desk.deliver(1, as_of=at(12)).arrival.watermark == at(10)
    late = desk.deliver(1, as_of=at(4), table=SECOND)
    assert late.windows == ("2026-11-10T0300",) and late.arrival.watermark == at(10)
    assert desk.deliver(2, as_of=at(11), table=SECOND).arrival.watermark == at(11)
    # Withdrawn, it holds nothing any more.
    desk.tables = (LEGACY,)
    assert desk.deliver(2, as_of=at(13)).arrival.watermark == at(13)


@pytest.mark.parametrize(
    "fault",
    [
        {
            "files": [{"path": "gone.jsonl", "sha256": "0" * 64, "rows": 1}],
            "gates": {"missing_file": "accept"},
        },
        {"gates": {"checksum": "quarantine"}},
    ],
)
def test_one_that_is_not_whole_does_not_move_it(tmp_path: Path, fault: dict[str, Any]) -> None:
    desk = Desk(tmp_path)
    desk.deliver(1, as_of=at(10))
    batch = desk.deliver(2, as_of=at(12), **fault)
    assert batch.arrival.watermark == at(10)
    # What is known of the tables stays.
    assert batch.file is not None and batch.file.snapshots == {LEGACY: at(10)}
    assert desk.deliver(3, as_of=at(13)).arrival.watermark == at(13)


def test_an_empty_table_moves_it_too(tmp_path: Path) -> None:
    assert Desk(tmp_path).deliver(as_of=at(10)).arrival.watermark == at(10)


def test_one_before_the_home_is_refused_as_before(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.deliver(1, as_of=at(10))
    with pytest.raises(SeedRefused, match="in no window of this home"):
        desk.deliver(2, as_of=datetime(2026, 10, 1, tzinfo=UTC))


def test_batches_of_an_earlier_version_have_no_watermark_until_the_next_delivery(tmp_path: Path) -> None:
    desk = Desk(tmp_path, (LEGACY, SECOND))
    for table in desk.tables:
        as_before(desk.store.folder, desk.deliver(1, as_of=at(10), table=table))
        desk.store = LandingStore(desk.folder / "landing", SOURCE)
    assert desk.watermark is None
    first = desk.deliver(2, as_of=at(11))
    # What an earlier version has landed says nothing of the second table.
    assert (first.arrival.watermark_before, first.arrival.watermark) == (None, None)
    assert first.files[0].first.ordinal > -(1 << 62)
    assert desk.deliver(2, as_of=at(12), table=SECOND).arrival.watermark == at(11)


moments = st.datetimes(datetime(2026, 11, 1), datetime(2026, 12, 1), timezones=st.just(UTC))
deliveries = st.lists(st.tuples(st.sampled_from([LEGACY, SECOND]), moments), max_size=12)


@given(deliveries)
def test_whatever_comes_in_whatever_order_no_delivery_lands_in_a_window_that_has_ended(
    delivered: list[tuple[str, datetime]],
) -> None:
    landed, tables, before = LandedSnapshots(), (LEGACY, SECOND), None
    latest: dict[str, datetime] = {}
    for table, moment in delivered:
        window = window_of_snapshot(moment, before, GRID) or GRID.key_of(moment, moment)
        assert before is None or GRID.end_of(window) > before
        assert GRID.start_of(window) >= GRID.truncate(moment)
        landed = landed.with_one(table, moment)
        latest[table] = max(latest.get(table, moment), moment)
        complete = landed.complete(tables)
        assert complete == (min(latest.values()) if len(latest) == 2 else None)
        assert before is None or complete is None or complete >= before
        before = complete or before


def test_a_snapshot_of_a_table_with_a_cursor_moves_the_watermark_if_it_states_its_moment(
    tmp_path: Path,
) -> None:
    into = inlet(tmp_path)

    def snapshot(name: str, *rows: dict[str, Any], **more: Any) -> Manifest:
        (batch,) = land(delivery(tmp_path, "full_snapshot", list(rows), name=name, **more), into).batches
        return batch

    assert snapshot("unsaid.jsonl", ticket(1)).arrival.watermark is None
    first = snapshot("first.jsonl", ticket(1), as_of="2026-04-19T00:00:00Z")
    assert first.arrival.watermark == datetime(2026, 4, 19, tzinfo=UTC)
    assert first.windows == ("2026-04-19T0000",)
    assert first.file is not None and first.file.snapshots is None
    # An older one stands below it, as its moment says, in a window that takes it in.
    older = snapshot("older.jsonl", ticket(2), ticket(3), as_of="2026-04-17T00:00:00Z")
    assert older.windows == ("2026-04-19T0000",) and older.arrival.watermark == first.arrival.watermark
    assert older.files[0].last < first.files[0].first
    later = snapshot("later.jsonl", ticket(1), ticket(2), as_of="2026-04-20T00:00:00Z")
    assert later.windows == ("2026-04-20T0000",)
    # Another delivery of its moment meets positions of that moment where they have landed first.
    again = snapshot("again.jsonl", ticket(2, status="resolved"), ticket(5), as_of="2026-04-17T00:00:00Z")
    assert again.windows == ("2026-04-19T0000", "2026-04-20T0000")
    windows: dict[tuple[int, str], set[str]] = {}
    for event in events(into):
        windows.setdefault((event["ordinal"], event["identity"]), set()).add(event["window"])
    assert all(len(each) == 1 for each in windows.values())


@pytest.mark.parametrize("why", ["of several tables", "not whole"])
def test_a_snapshot_that_does_not_say_all_of_its_source_moves_nothing(tmp_path: Path, why: str) -> None:
    into = inlet(tmp_path, alone=why == "not whole")
    rows = [ticket(1), ticket(2) | ({"ticket_id": None} if why == "not whole" else {})]
    more = {"as_of": "2026-04-19T00:00:00Z", "gates": {"schema": "quarantine"}}
    (batch,) = land(delivery(tmp_path, "full_snapshot", rows, **more), into).batches
    assert batch.arrival.watermark is None
