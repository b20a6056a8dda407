"""Which tables an ingest run visits: those with news in its windows, and all of them when a window closes."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from omnisupport_ingest.contracts.decision_table import DUPLICATE_WRITE, REPLAY_WINDOW, load_decision_table
from omnisupport_ingest.lake.layout import WHOLE_TABLE
from omnisupport_ingest.layers.dimension import dimensions, keyed_update
from omnisupport_ingest.layers.dimension.table_news import SourceLayers, TableLayer
from omnisupport_ingest.layers.events.quarantine_files import QuarantineFiles
from omnisupport_ingest.layers.scheduling.pending import Pending, pending_windows
from omnisupport_ingest.layers.versions import of_contract
from omnisupport_ingest.read.overview import overview
from omnisupport_ingest_tests.contracts.decision_tables import write_decision
from omnisupport_ingest_tests.layers.story import FIRST, SECOND, SOURCE, START
from omnisupport_ingest_tests.layers.three_tables import TABLES, ThreeTables, commit

pytestmark = pytest.mark.quick


@pytest.fixture
def desk(tmp_path: Path) -> ThreeTables:
    """Three tables whose first window holds a batch of all of them, committed everywhere."""
    desk = ThreeTables(tmp_path)
    desk.land_of(1, *TABLES)
    desk.take_in(FIRST)
    assert pending_windows(desk.workspace, SOURCE).nothing
    return desk


def asked(desk: ThreeTables) -> Pending:
    """What a look asks for that remembers earlier ones, and one that remembers nothing."""
    found = pending_windows(desk.workspace, SOURCE)
    desk.reopen()
    assert pending_windows(desk.workspace, SOURCE) == found
    return found


def edited(desk: ThreeTables, table: str, window: str, **other: object) -> None:
    """Commit another state of ``window`` to the net changes of ``table``."""
    net_changes = desk.workspace.net_changes(desk.of(table))
    state = net_changes.open().state(window)
    assert state is not None
    commit(net_changes, [replace(state, **other)])
    desk.show(desk.of(table))


def test_a_batch_is_news_of_the_tables_that_it_names_alone(desk: ThreeTables) -> None:
    desk.land_of(5, "notes")
    found = asked(desk)
    assert (found.windows, found.batches, found.tables) == ((FIRST,), 1, ("notes",))
    desk.take_in(FIRST, tables=["notes"])
    assert asked(desk).nothing


@pytest.mark.parametrize("op", ["t", "d", "b"])
def test_whatever_event_of_a_table_has_landed_is_news_of_it(desk: ThreeTables, op: str) -> None:
    """A truncate and the end of a snapshot are events without a key."""
    desk.land_of(5, "tags", op=op)
    assert asked(desk).tables == ("tags",)


def test_a_table_that_was_left_out_waits_for_nothing_in_an_open_window(desk: ThreeTables) -> None:
    for second in (61, 62, 63):
        desk.land_of(second, "notes")
    desk.take_in(SECOND, tables=["notes"])
    assert asked(desk).nothing
    desk.land_of(64, "labels")
    found = asked(desk)
    assert (found.windows, found.batches, found.tables) == ((SECOND,), 1, ("labels",))


def test_a_batch_that_names_no_table_of_a_contract_asks_for_no_dimension(desk: ThreeTables) -> None:
    desk.land_of(5, "elsewhere")
    found = asked(desk)
    assert (found.windows, found.tables) == ((FIRST,), ())
    desk.take_in(FIRST, tables=[])
    assert asked(desk).nothing


def test_events_that_a_run_took_without_their_table_are_news_of_it(desk: ThreeTables) -> None:
    desk.land_of(5, "notes", "tags")
    desk.take_in(FIRST, tables=["tags"])
    found = asked(desk)
    assert (found.windows, found.tables) == ((FIRST,), ("notes",))


def test_a_closing_window_is_asked_for_with_every_table_once(desk: ThreeTables) -> None:
    """An hour of lateness: the batch that closes the first window lands in one an hour later."""
    desk.clock = START + timedelta(hours=2)
    later = "2026-01-01T1305"
    desk.land_of(65 * 60, "notes")
    found = asked(desk)
    assert (found.windows, found.tables) == ((FIRST, later), TABLES)
    desk.take_in(later, tables=["notes"])
    assert asked(desk).windows == (FIRST,)
    # The run dies after its first table: the others are those that have the window open yet.
    desk.take_in(FIRST, tables=["labels"], closed=True)
    found = asked(desk)
    assert (found.windows, found.tables) == ((FIRST,), ("notes", "tags"))
    desk.take_in(FIRST, events=False, closed=True)
    assert asked(desk).nothing


def test_a_closed_window_that_a_table_has_never_seen_is_asked_for_with_that_table(desk: ThreeTables) -> None:
    desk.clock = START + timedelta(hours=2)
    desk.land_of(61, "notes")
    desk.land_of(66 * 60, "notes")
    desk.take_in(FIRST, SECOND, closed=True, tables=["notes"])
    desk.take_in(FIRST, closed=True)
    desk.take_in("2026-01-01T1306", tables=["notes"])
    found = asked(desk)
    assert (found.windows, found.tables) == ((SECOND,), ("labels", "tags"))


def test_a_changed_contract_has_its_own_table_visited_in_windows_with_events_of_it(
    desk: ThreeTables,
) -> None:
    """No verdict on events of other tables depends on it (``test_versions``)."""
    desk.land_of(61, "notes")
    desk.take_in(SECOND, tables=["notes"])
    desk.put_contract("tags", version="2.0.0", lateness={"allowed": "PT2H", "max": "P7D"})
    desk.reopen()
    found = asked(desk)
    assert (found.windows, found.tables) == ((FIRST,), ("tags",))


def test_a_changed_contract_has_all_tables_note_the_new_quarantine_files(desk: ThreeTables) -> None:
    """Their inputs name these files, of whatever tables the events are."""
    deduped = desk.workspace.deduped(SOURCE)
    state = deduped.open().state(FIRST)
    assert state is not None
    commit(deduped, [replace(state, companions=("a file",))])
    desk.put_contract("tags", version="2.0.0", lateness={"allowed": "PT2H", "max": "P7D"})
    desk.reopen()
    assert asked(desk).tables == TABLES


def test_a_table_that_is_added_has_news_though_nothing_names_it(desk: ThreeTables) -> None:
    desk.put_contract("colours")
    desk.reopen()
    assert "colours" in asked(desk).tables


def test_a_table_that_is_not_there_has_news_with_the_first_batch_of_any(tmp_path: Path) -> None:
    desk = ThreeTables(tmp_path)
    desk.land_of(1, "notes")
    assert asked(desk).tables == TABLES


def test_events_that_are_others_now_are_news_of_the_table_that_was_made_from_them(desk: ThreeTables) -> None:
    """A review, an erasure or a duplicate has a window judged again: its files have other names then."""
    edited(desk, "tags", FIRST, inputs=("a file that was replaced",))
    found = asked(desk)
    assert (found.windows, found.batches, found.tables) == ((FIRST,), 0, ("tags",))
    edited(desk, "tags", FIRST, inputs=(), upstream_table_id="another table")
    assert asked(desk).tables == ("tags",)


def test_a_window_that_is_judged_again_has_every_table_visited(desk: ThreeTables) -> None:
    deduped = desk.workspace.deduped(SOURCE)
    state = deduped.open().state(FIRST)
    assert state is not None
    commit(deduped, [replace(state, versions=("by an earlier decision",))])
    assert asked(desk).tables == TABLES


def test_a_run_that_makes_its_windows_again_visits_every_table(tmp_path: Path) -> None:
    """Else it would leave the others folded from what it replaced, and a run for these would do it to it."""
    desk = ThreeTables(tmp_path)
    decisions = write_decision(tmp_path / "decisions.csv", DUPLICATE_WRITE, REPLAY_WINDOW)
    desk.workspace = replace(desk.workspace, decisions=load_decision_table(decisions))
    desk.land_of(1, *TABLES)
    desk.take_in(FIRST)
    assert pending_windows(desk.workspace, SOURCE).nothing
    desk.land_of(5, "notes")
    assert pending_windows(desk.workspace, SOURCE).tables == TABLES


def test_withheld_events_are_news_of_the_tables_that_they_may_be_of(desk: ThreeTables) -> None:
    """Footers tell which tables a file of the quarantine may have events of."""
    quarantine = desk.workspace.quarantine(SOURCE).folder
    for name, tables in {"one": ["notes"], "two": ["labels", "notes"]}.items():
        pq.write_table(pa.table({"source_table": tables}), quarantine / name)

    def half_done(*companions: str) -> set[str]:
        deduped = desk.workspace.deduped(SOURCE)
        state = deduped.open().state(FIRST)
        assert state is not None
        commit(deduped, [replace(state, companions=companions)])
        decisions = desk.workspace.decisions
        tables = [
            TableLayer(each, desk.workspace.net_changes(each).open(), decisions)
            for each in map(desk.of, TABLES)
        ]
        files = QuarantineFiles.newest(desk.workspace, SOURCE)
        assert files is not None
        layers = SourceLayers(events=(tables[0], tables[0]), tables=tuple(tables), parked=())
        return set(layers.half_done(FIRST, files))

    assert half_done() == set()
    assert half_done("one") == {"notes"}
    assert half_done("one", "two") == {"labels", "notes"}
    assert half_done("gone") == set(TABLES), "what it held is not known"


def test_net_changes_that_are_not_merged_ride_along_with_news_of_others(desk: ThreeTables) -> None:
    contract = desk.of("tags")
    desk.land_of(5, "tags")
    desk.take_in(FIRST, tables=[])
    folded = desk.workspace.net_changes(contract)
    state = folded.open().state(FIRST)
    assert state is not None
    above = desk.workspace.deduped(SOURCE).open().table_id
    commit(folded, [desk.state(FIRST, of_contract(contract), above, False)])
    shutil.rmtree(desk.workspace.dimension(contract).folder)
    desk.land_of(61, "notes")
    found = asked(desk)
    assert (found.windows, found.tables) == ((SECOND,), ("notes", "tags"))


def test_rows_that_are_to_be_purged_are_news_of_an_idle_table_once(tmp_path: Path) -> None:
    """Its own net changes know the watermark of its last visit; a rebuild would purge by a newer one."""
    desk = ThreeTables(tmp_path, events={"soft_delete_column": None, "purge_deleted_after": "P7D"})
    desk.land_of(1, *TABLES)
    desk.take_in(FIRST)
    days = 8 * 24 * 3600
    desk.clock = START + timedelta(days=9)
    desk.land_of(days, "notes")
    window = "2026-01-09T1200"
    desk.take_in(window, tables=["notes"])
    desk.take_in(FIRST, closed=True)
    found = asked(desk)
    assert set(found.tables) >= {"labels", "tags"} and window in found.windows
    desk.take_in(window)
    assert asked(desk).nothing


def test_status_calls_no_table_behind_that_a_run_need_not_visit(desk: ThreeTables) -> None:
    desk.land_of(61, "notes")
    desk.take_in(SECOND, tables=["notes"])

    def pending() -> dict[str, tuple[int | None, int | None]]:
        found = overview(desk.workspace, SOURCE).tables
        return {each.table.removeprefix(f"{SOURCE}/"): each.pending for each in found}

    assert {pending()[f"dim_{table}"] for table in TABLES} == {(0, 0)}
    desk.land_of(62, "tags")
    assert {table: pending()[f"dim_{table}"] for table in TABLES} == {
        "labels": (0, 0),
        "notes": (0, 0),
        "tags": (1, 1),
    }


def test_a_table_without_news_is_complete_as_far_as_its_source_has_landed(desk: ThreeTables) -> None:
    desk.land_of(61, "notes")
    found = {
        each.table.rpartition("_")[2]: each.freshness for each in overview(desk.workspace, SOURCE).tables
    }
    notes, tags = found["notes"], found["tags"]
    assert notes is not None and tags is not None
    assert (notes.unshown_batches, tags.unshown_batches) == (1, 0)
    assert tags.complete_to == tags.landed_to and notes.complete_to < tags.complete_to


def test_an_idle_dimension_notes_now_and_then_how_far_it_has_read(
    desk: ThreeTables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every look reads the log of the net changes from there on. Nothing is folded without Spark."""
    monkeypatch.setattr(keyed_update, "FAR_BEHIND", 3)
    contract = desk.of("tags")
    net_changes, dimension = desk.workspace.net_changes(contract), desk.workspace.dimension(contract)
    before = dimension.open()
    read_to = []
    for number in range(4):
        state = net_changes.open().state(FIRST)
        assert state is not None
        noted = replace(state.checkpoint, run_id=f"run {number}")
        commit(net_changes, [replace(state, checkpoint=noted)])
        dimensions.update(desk.workspace, None, contract, "run")  # type: ignore[arg-type]
        shown = dimension.open().state(WHOLE_TABLE)
        assert shown is not None and shown.checkpoint.upstream_version is not None
        read_to.append(shown.checkpoint.upstream_version)
    start = read_to[0]
    assert read_to == [start, start, start + 3, start + 3]
    after = dimension.open()
    assert after.version == before.version + 1
    assert after.all_files() == before.all_files() and shown.checkpoint.merges == ()


def test_a_gate_waits_for_no_window_that_nobody_judges_again(
    desk: ThreeTables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay also visits windows in which nothing has landed; nothing requests a run over these alone."""

    def closed(*_: object) -> None:
        raise dimensions.GateClosed("rows break it", fix="correct it")

    monkeypatch.setattr(dimensions._Update, "is_due", True)
    monkeypatch.setattr(dimensions._Update, "commit", closed)
    desk.take_in(SECOND)
    desk.put_contract("notes", owner="team:stricter")
    desk.reopen()
    arguments = desk.workspace, None, desk.of("notes"), "run"
    assert FIRST in pending_windows(desk.workspace, SOURCE).windows
    dimensions.update(*arguments)  # type: ignore[arg-type]
    desk.take_in(FIRST)
    assert pending_windows(desk.workspace, SOURCE).nothing
    with pytest.raises(dimensions.GateClosed):
        dimensions.update(*arguments)  # type: ignore[arg-type]


def test_a_merged_window_without_a_state_is_not_reported(
    desk: ThreeTables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program has rewritten it; a later run makes it again."""
    monkeypatch.setattr(dimensions, "_merge", lambda *_, **__: frozenset({FIRST, "2026-01-01T0900"}))
    desk.take_in(SECOND)
    done = dimensions.materialize(desk.workspace, None, desk.of("tags"), [SECOND], "run")  # type: ignore[arg-type]
    assert [each.window for each in done] == [SECOND, FIRST]


def test_a_table_that_waits_for_a_person_is_not_asked_for_again_and_again_to_be_purged(
    tmp_path: Path,
) -> None:
    """A run over it changes nothing, so the next look would ask for the same run."""
    purging = {"soft_delete_column": None, "purge_deleted_after": "P7D"}
    desk = ThreeTables(tmp_path, events=purging)
    desk.land_of(1, *TABLES)
    desk.take_in(FIRST)
    desk.clock = START + timedelta(days=9)
    desk.land_of(8 * 24 * 3600, "notes")
    window = "2026-01-09T1200"
    retyped = json.loads((desk.contracts / "tags.json").read_text())
    retyped["properties"]["title"] = {"type": ["integer", "null"], "x-pg-type": "integer", "description": "."}
    (desk.contracts / "tags.json").write_text(json.dumps(retyped))
    desk.reopen()
    others = ["labels", "notes"]
    desk.take_in(window, tables=others)
    desk.take_in(FIRST, tables=others, closed=True)
    desk.take_in(window, tables=others)
    assert asked(desk).nothing
