"""The traps of ``updated_at``, each on a real server: what a reading catches, and what it cannot."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest

from omnisupport_ingest.sources.postgres.session.connection import connect
from omnisupport_ingest.sources.query import sync as query_sync
from omnisupport_ingest.sources.query.cursor import (
    GENERATIONS,
    MOST_SCHEMAS,
    NULL_ORDINALS,
    corrected,
    ordinals,
)
from omnisupport_ingest.sources.query.errors import AnotherDatabase, QueryRefused
from omnisupport_ingest.sources.query.null_rows import Changed, NullRows
from omnisupport_ingest.sources.query.postgres import PostgresReader
from omnisupport_ingest.sources.query.state import FILE, QueryState
from omnisupport_ingest.sources.query.sync import rewind, sync
from omnisupport_ingest.windows import KEY_FORMAT
from omnisupport_ingest_tests.sources.query.tickets import GRID, TABLE, Desk, contract

NO_LOOKBACK = {"field": "updated_at", "lookback": "PT0S"}


@pytest.mark.parametrize("lookback, caught", [("PT5M", True), ("PT0S", False)])
@pytest.mark.quick
def test_a_commit_that_comes_late_is_caught_by_the_lookback_alone(desk: Desk, lookback, caught):
    desk.table = contract({"field": "updated_at", "lookback": lookback})
    with closing(connect(desk.dsn)) as slow:
        slow.autocommit = False
        with slow.cursor() as cursor:
            cursor.execute("INSERT INTO tickets VALUES (1, 'slow', clock_timestamp())")
        desk.run("INSERT INTO tickets VALUES (2, 'quick')")
        desk.sync()
        slow.commit()
    desk.sync()
    assert (1 in desk.subjects()) is caught


@pytest.mark.quick
def test_no_row_is_missed_where_equal_times_lie_across_a_page(desk: Desk):
    desk.page_rows = 7
    desk.run("INSERT INTO tickets SELECT n, 'bulk', now() FROM generate_series(1, 100) AS n")
    report = desk.sync()
    assert set(desk.subjects()) == set(range(1, 101))
    assert report.tables[0].landed == 100


def test_a_tie_that_commits_after_its_time_was_read_is_read_without_a_lookback_too(desk: Desk):
    desk.table = contract(NO_LOOKBACK)
    desk.run("INSERT INTO tickets VALUES (5, 'first', '2026-11-20 10:00+00')")
    desk.sync()
    desk.run("INSERT INTO tickets VALUES (3, 'second', '2026-11-20 10:00+00')")
    desk.sync()
    assert set(desk.subjects()) == {3, 5}


def test_an_update_that_does_not_touch_the_column_is_seen_within_the_lookback_and_is_a_contradiction(
    desk: Desk,
):
    desk.run("INSERT INTO tickets VALUES (1, 'one', now()), (2, 'old', now() - interval '1 hour')")
    desk.sync()
    desk.run("UPDATE tickets SET subject = 'changed'")
    desk.sync()
    events = desk.events()
    of_one = [each for each in events if each["key"] == '["1"]']
    # One position with two contents: a collision, which a person decides. The other was not seen at all.
    assert len({(each["ordinal"], each["identity"]) for each in of_one}) == 1 and len(of_one) == 2
    assert len([each for each in events if each["key"] == '["2"]']) == 1


@pytest.mark.quick
def test_a_hard_delete_is_not_seen_by_a_reading(desk: Desk):
    desk.run("INSERT INTO tickets VALUES (1, 'one'), (2, 'two')")
    desk.sync()
    desk.run("DELETE FROM tickets WHERE id = 1")
    report = desk.sync()
    assert set(desk.subjects()) == {1, 2}
    assert not report.tables[0].went_back


def test_a_clock_that_was_ahead_hides_no_later_row(desk: Desk):
    desk.run("INSERT INTO tickets VALUES (1, 'from the future', now() + interval '2 hours')")
    desk.sync()
    desk.run("INSERT INTO tickets VALUES (2, 'after the clock was set right')")
    again = desk.sync()
    assert set(desk.subjects()) == {1, 2}
    # The row ahead is met in every reading until its time has come, and lands once.
    assert again.tables[0].again == 1


def test_a_row_whose_clock_went_back_waits_for_a_person(desk: Desk):
    desk.run("INSERT INTO tickets VALUES (1, 'new', now() - interval '10 s')")
    desk.sync()
    desk.run("UPDATE tickets SET subject = 'newer, by an older clock', updated_at = now() - interval '1 min'")
    report = desk.sync()
    assert report.tables[0].behind == 1
    assert [each["misplaced"] for each in desk.events() if each["op"] == "r"] == [None, True]
    # Met again, it is known, and does not land once more.
    assert desk.sync().tables[0].landed == 0


def test_a_restored_backup_is_told_and_a_full_refresh_makes_it_right(desk: Desk):
    desk.run(
        "INSERT INTO tickets SELECT n, 'backup', now() - interval '1 day' FROM generate_series(1, 3) AS n"
    )
    desk.sync()
    desk.run("INSERT INTO tickets VALUES (4, 'lost'); UPDATE tickets SET subject = 'lost', updated_at = now()"
             " WHERE id = 1")  # fmt: skip
    desk.sync()
    # What a restore of the backup leaves, then work goes on.
    desk.run("DELETE FROM tickets WHERE id = 4")
    desk.run("UPDATE tickets SET subject = 'backup', updated_at = now() - interval '1 day' WHERE id = 1")
    report = desk.sync()
    assert report.tables[0].went_back
    assert desk.subjects()[1] == "lost"
    desk.refresh("restored from a backup")
    report = desk.sync()
    assert report.tables[0].full
    assert desk.subjects()[1] == "backup"
    ends = [each for each in desk.events() if each["op"] == "b"]
    assert [each["epoch"] for each in ends] == [2]
    lowest = min(each["ordinal"] for each in desk.events() if each["epoch"] == 2)
    assert ends[0]["ordinal"] == lowest


def test_a_cursor_of_another_type_is_refused_until_the_table_is_read_anew(desk: Desk):
    desk.run("INSERT INTO tickets VALUES (1, 'one')")
    desk.sync()
    desk.run("ALTER TABLE tickets ALTER updated_at TYPE timestamp USING updated_at AT TIME ZONE 'UTC'")
    with pytest.raises(QueryRefused, match="was timestamp with time zone and is now timestamp without"):
        desk.sync()
    desk.refresh("type changed")
    assert desk.sync().tables[0].landed == 1
    desk.run("ALTER TABLE tickets ALTER updated_at TYPE text")
    with pytest.raises(QueryRefused, match="is text now"):
        desk.sync()


def test_rows_without_a_cursor_are_read_in_every_sync_and_land_once(desk: Desk):
    desk.page_rows = 2
    desk.run("INSERT INTO tickets SELECT n, 'n', NULL FROM generate_series(1, 5) AS n")
    assert desk.sync().tables[0].read == 5
    desk.run("INSERT INTO tickets VALUES (6, 'six')")
    again = desk.sync()
    assert again.tables[0].read == 6
    assert set(desk.subjects()) == {1, 2, 3, 4, 5, 6}
    assert len([each for each in desk.events() if each["op"] == "r"]) == 6


def test_a_type_of_a_coarse_precision_still_misses_nothing_within_its_second(desk: Desk):
    coarse = {
        "type": ["string", "null"],
        "x-pg-type": "timestamp(0) with time zone",
        "description": "Coarse.",
    }
    desk.table = contract(NO_LOOKBACK, updated_at=coarse)
    desk.run("ALTER TABLE tickets ALTER updated_at TYPE timestamptz(0)")
    for number in range(1, 4):
        desk.run(f"INSERT INTO tickets VALUES ({number}, 'x', '2026-11-20 10:00:00.{number}+00')")
        desk.sync()
    assert set(desk.subjects()) == {1, 2, 3}


def test_a_sync_that_is_stopped_after_each_page_ends_with_every_row_once(desk: Desk):
    desk.page_rows = 10
    desk.run("INSERT INTO tickets SELECT n, 'x', now() - n * interval '1 s' FROM generate_series(1, 95) AS n")
    for _ in range(30):
        calls = iter([False, True])
        report = desk.sync(stopped=lambda calls=calls: next(calls))
        if report.finished:
            break
    assert report.finished
    rows = [each for each in desk.events() if each["op"] == "r"]
    assert len(rows) == 95 and set(desk.subjects()) == set(range(1, 96))


def test_a_sync_that_is_stopped_within_a_page_keeps_what_has_landed_and_goes_on_from_there(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(query_sync, "_BATCH_BYTES", 1)
    # Several blocks of COPY, so several batches of one page.
    desk.page_rows = 1_000_000
    desk.run(
        "INSERT INTO tickets SELECT n, repeat(md5(n::text), 100), now() - n * interval '1 s'"
        " FROM generate_series(1, 5000) n"
    )
    # Asked before the rows without a cursor, before the others, and behind the first batch of these.
    calls = iter([False, False, True])
    first = desk.sync(stopped=lambda: next(calls))
    assert not first.finished and 0 < first.tables[0].landed < 5000
    assert desk.sync().finished
    rows = [each for each in desk.events() if each["op"] == "r"]
    assert len(rows) == 5000 and set(desk.subjects()) == set(range(1, 5001))


def test_what_commits_during_a_sync_of_many_transactions_is_found_by_the_next(desk: Desk):
    desk.page_rows = 10
    desk.run("INSERT INTO tickets SELECT n, 'x', now() - n * interval '1 s' FROM generate_series(1, 50) AS n")
    calls = iter([False, False, True])
    desk.sync(stopped=lambda: next(calls))
    # Below what was read by now, as its transaction began before.
    desk.run("INSERT INTO tickets VALUES (99, 'late', now() - interval '100 s')")
    desk.sync()
    desk.sync()
    assert 99 in desk.subjects()


def test_another_database_behind_the_connection_is_refused_until_all_is_read_anew(desk: Desk, postgres):
    desk.run("INSERT INTO tickets VALUES (1, 'one')")
    desk.sync()
    desk.run("CREATE DATABASE other_place TEMPLATE template0")
    try:
        elsewhere = replace(desk, dsn=postgres.dsn("other_place"))
        with pytest.raises(AnotherDatabase, match="leads to the database"):
            elsewhere.sync()
        with closing(connect(elsewhere.dsn)) as connection, connection.cursor() as cursor:
            cursor.execute(TABLE + "; INSERT INTO tickets VALUES (2, 'two')")
        elsewhere.refresh("moved there")
        assert elsewhere.sync().finished
        assert {each["key"] for each in desk.events() if each["epoch"] == 2} == {'["2"]', None}
    finally:
        desk.run("DROP DATABASE other_place")


def test_of_several_changes_between_two_readings_the_last_one_alone_is_read(desk: Desk):
    desk.run("INSERT INTO tickets VALUES (1, 'first')")
    desk.sync()
    for subject in ("second", "third"):
        desk.run(f"UPDATE tickets SET subject = '{subject}', updated_at = clock_timestamp()")
    desk.sync()
    landed = [json.loads(each["after"])["subject"] for each in desk.events() if each["op"] == "r"]
    assert landed == ["first", "third"]


ADDED = "ALTER TABLE tickets ADD priority text"


def positions(desk: Desk) -> dict[tuple[int, int, str], set[str]]:
    """The images that landed at each position of a row."""
    found: dict[tuple[int, int, str], set[str]] = {}
    for each in desk.events():
        if each["op"] == "r":
            found.setdefault((each["epoch"], each["ordinal"], each["identity"]), set()).add(each["after"])
    return found


def newest(desk: Desk, key: str) -> dict[str, str | None]:
    rows = [each for each in desk.events() if each["key"] == key and each["op"] == "r"]
    image: dict[str, str | None] = json.loads(max(rows, key=lambda each: each["ordinal"])["after"])
    return image


@pytest.mark.parametrize(
    ("altered", "shown"),
    [
        (ADDED, {"priority": None}),
        ("ALTER TABLE tickets ADD priority text DEFAULT 'low'", {"priority": "low"}),
        (f"{ADDED}; UPDATE tickets SET priority = 'high'", {"priority": "high"}),
        ("ALTER TABLE tickets DROP note", {"note": None}),
        ("ALTER TABLE tickets DROP note, ADD note text", {"note": None}),
        ("ALTER TABLE tickets ALTER note TYPE numeric(12,4) USING note::numeric", {"note": "7.0000"}),
    ],
)
def test_a_version_within_the_lookback_is_no_contradiction_after_its_table_was_altered(
    desk: Desk, altered: str, shown: dict[str, str | None]
):
    desk.run("ALTER TABLE tickets ADD note text")
    desk.run("INSERT INTO tickets VALUES (1, 'one', now(), '7'), (2, 'no cursor', NULL, '7')")
    desk.sync()
    desk.run(altered)
    desk.run("INSERT INTO tickets (id, subject) VALUES (3, 'after it')")
    desk.sync()
    assert all(len(images) == 1 for images in positions(desk).values())
    for key in ('["1"]', '["2"]'):
        # What was read later stands above, so nobody has to decide.
        assert {name: newest(desk, key).get(name) for name in shown} == shown
    assert desk.sync().tables[0].landed == 0
    assert len([each for each in desk.events() if each["op"] == "r"]) == 5


def test_what_is_read_again_from_a_lower_cursor_is_no_contradiction_after_an_alter(desk: Desk):
    desk.run("INSERT INTO tickets VALUES (1, 'old', now() - interval '1 day'), (2, 'new', now())")
    desk.sync()
    desk.run(ADDED)
    desk.sync()
    assert "priority" not in newest(desk, '["1"]')
    with QueryState(desk.store.folder) as state:
        assert rewind(desk.table, state, None)
    desk.sync()
    assert newest(desk, '["1"]')["priority"] is None
    assert all(len(images) == 1 for images in positions(desk).values())


def test_a_contradiction_stays_one_after_an_alter(desk: Desk):
    desk.run(f"INSERT INTO tickets VALUES (1, 'one', now()); {ADDED}")
    desk.sync()
    desk.run("UPDATE tickets SET subject = 'changed'")
    desk.sync()
    assert [len(images) for images in positions(desk).values()] == [2]


def test_a_renamed_label_of_an_enum_is_no_contradiction(desk: Desk):
    desk.run("CREATE TYPE mood AS ENUM ('low', 'high'); ALTER TABLE tickets ADD mood mood, ADD moods mood[]")
    desk.run("INSERT INTO tickets VALUES (1, 'one', now(), 'low', '{low,high}')")
    desk.sync()
    desk.run("ALTER TYPE mood RENAME VALUE 'low' TO 'calm'")
    desk.sync()
    assert newest(desk, '["1"]') | {"mood": "calm", "moods": "{calm,high}"} == newest(desk, '["1"]')
    assert [len(images) for images in positions(desk).values()] == [1, 1]


def test_what_an_earlier_version_read_is_no_contradiction_after_an_alter(desk: Desk):
    desk.run("INSERT INTO tickets VALUES (1, 'one', now()), (2, 'no cursor', NULL)")
    desk.sync()
    with closing(sqlite3.connect(desk.store.folder / FILE)) as base, base:
        # Earlier versions kept no schema.
        base.execute("DROP TABLE schemas")
    desk.run(ADDED)
    desk.sync()
    assert [len(images) for images in positions(desk).values()] == [1] * 4
    assert "priority" in newest(desk, '["1"]') and "priority" in newest(desk, '["2"]')
    assert desk.sync().tables[0].landed == 0


def test_another_cursor_of_the_same_type_is_refused_until_the_table_is_read_anew(desk: Desk):
    desk.run("ALTER TABLE tickets ADD created_at timestamptz DEFAULT now()")
    created = {"type": ["string", "null"], "x-pg-type": "timestamp with time zone", "description": "Begin."}
    desk.table = contract({"field": "created_at", "lookback": "PT5M"}, created_at=created)
    desk.run("INSERT INTO tickets VALUES (1, 'one'), (2, 'two')")
    desk.sync()
    # Not seen, as the column stays as it was; and older than any lookback once the other one is named.
    desk.run("UPDATE tickets SET subject = 'changed', updated_at = now() - interval '1 hour' WHERE id = 1")
    desk.table = contract(None, created_at=created)
    with pytest.raises(QueryRefused, match="was created_at and is now updated_at"):
        desk.sync()
    desk.refresh("another cursor")
    desk.sync()
    assert desk.subjects() == {1: "changed", 2: "two"}


def test_a_state_that_names_no_cursor_is_read_and_names_it_from_then_on(desk: Desk):
    desk.run("INSERT INTO tickets VALUES (1, 'one')")
    desk.sync()
    with closing(sqlite3.connect(desk.store.folder / FILE)) as base, base:
        # As earlier versions wrote it.
        base.execute("UPDATE progress SET told = json_remove(told, '$.column')")
    assert desk.sync().tables[0].landed == 0
    with QueryState(desk.store.folder) as state:
        progress = state.progress("public.tickets")
    assert progress is not None and progress.column == "updated_at"


@pytest.mark.parametrize("later", ["9999-12-31 23:59:59.999999+00", "infinity"])
def test_a_version_of_a_time_that_is_very_late_stands_above_the_earlier_ones(desk: Desk, later: str):
    desk.run("INSERT INTO tickets VALUES (1, 'one'), (2, 'two')")
    desk.sync()
    desk.run(f"UPDATE tickets SET subject = 'for ever', updated_at = '{later}' WHERE id = 1")
    desk.sync()
    assert desk.subjects() == {1: "for ever", 2: "two"}
    assert desk.sync().tables[0].landed == 0


def test_the_ordinals_of_many_schemas_stay_below_the_next_cursor_with_a_delete_between_each():
    found: list[int] = []
    for number in range(MOST_SCHEMAS):
        (ordinal,) = ordinals(pa.array([7]), number).to_pylist()
        found += [ordinal, corrected(ordinal, contract())]
    assert found == list(range(7 * GENERATIONS, 8 * GENERATIONS))
    assert ordinals(pa.array([7]), 3 * GENERATIONS).to_pylist() == found[-2:-1]


def window_of_time(text: str) -> str:
    moment = datetime.fromisoformat(text)
    return GRID.truncate(max(moment, GRID.first)).strftime(KEY_FORMAT)


@pytest.mark.parametrize("later", ["2126-01-01 00:00:00+00", "infinity"])
def test_a_row_far_ahead_of_the_clock_is_in_the_first_window_and_moves_no_watermark(desk: Desk, later: str):
    desk.run("INSERT INTO tickets VALUES (1, 'one', '2026-11-20 10:00+00')")
    desk.run(f"INSERT INTO tickets VALUES (2, 'from far ahead', '{later}')")
    landed_from = datetime.now(UTC)
    desk.sync()
    windows = {each["key"]: each["window"] for each in desk.events() if each["op"] == "r"}
    assert windows == {
        '["1"]': window_of_time("2026-11-20 10:00+00"),
        '["2"]': GRID.first.strftime(KEY_FORMAT),
    }
    for batch in desk.store.manifests():
        highest = batch.arrival.highest_commit_ts
        assert highest is None or highest < landed_from


def test_a_row_that_was_far_ahead_stays_in_the_first_window_when_its_time_has_come(desk: Desk):
    desk.run("INSERT INTO tickets VALUES (1, 'ahead', now() + interval '2 days')")
    desk.sync()
    with QueryState(desk.store.folder) as state:
        state.forget_all()
    desk.run("INSERT INTO tickets VALUES (2, 'beside it', now() + interval '2 days')")
    in_two_days = replace(desk.inlet(), clock=lambda: datetime.now(UTC) + timedelta(days=2))
    with closing(PostgresReader(desk.dsn)) as reader, QueryState(desk.store.folder) as state:
        sync(in_two_days, reader, state)
    windows: dict[str, set[str]] = {}
    for each in desk.events():
        if each["op"] == "r":
            windows.setdefault(each["key"], set()).add(each["window"])
    assert windows['["1"]'] == {GRID.first.strftime(KEY_FORMAT)}
    assert windows['["2"]'] != windows['["1"]']


def of_null(desk: Desk, key: str = '["1"]') -> list[tuple[int, str]]:
    """The versions of a row as they landed, by position."""
    found = {(each["ordinal"], each["after"]) for each in desk.events() if each["key"] == key}
    return sorted((ordinal, json.loads(after)["subject"]) for ordinal, after in found)


def set_null(desk: Desk, subject: str) -> None:
    desk.run(f"UPDATE tickets SET subject = '{subject}', updated_at = NULL WHERE id = 1")


@pytest.mark.quick
def test_each_change_of_a_row_without_a_cursor_lands_above_the_one_before(desk: Desk):
    desk.run("INSERT INTO tickets VALUES (1, 'one', NULL), (2, 'beside it', NULL)")
    desk.sync()
    for subject in ("two", "three"):
        set_null(desk, subject)
        report = desk.sync().tables[0]
        assert (report.landed, report.again) == (1, 1)
    versions = of_null(desk)
    assert [subject for _, subject in versions] == ["one", "two", "three"]
    assert len({ordinal for ordinal, _ in versions}) == 3
    assert all(ordinal in NULL_ORDINALS and ordinal % 2 == 0 for ordinal, _ in versions)
    assert desk.sync().tables[0].landed == 0


def test_a_row_that_loses_its_cursor_again_is_below_its_version_with_one(desk: Desk):
    desk.run("INSERT INTO tickets VALUES (1, 'no time', NULL)")
    desk.sync()
    desk.run("UPDATE tickets SET subject = 'a time', updated_at = now()")
    desk.sync()
    assert desk.subjects() == {1: "a time"}
    set_null(desk, "no time again")
    desk.sync()
    assert desk.subjects() == {1: "a time"}
    assert all(len(images) == 1 for images in positions(desk).values())
    desk.refresh("a row lost its cursor")
    desk.sync()
    assert desk.subjects() == {1: "no time again"}


def forget_state(desk: Desk) -> None:
    (desk.store.folder / FILE).unlink()


def as_an_earlier_version_left_it(desk: Desk) -> None:
    with closing(sqlite3.connect(desk.store.folder / FILE)) as base, base:
        base.execute("DROP TABLE null_rows")
        base.execute("DROP TABLE null_rows_known")


def die_while_landing(desk: Desk) -> None:
    with QueryState(desk.store.folder) as state:
        state.expect_null_rows("public.tickets")
        state._base.execute("UPDATE null_rows SET ordinal = ordinal - 2, image = 0")


@pytest.mark.parametrize("lost", [forget_state, as_an_earlier_version_left_it, die_while_landing])
def test_changes_of_rows_without_a_cursor_go_on_from_what_has_landed(
    desk: Desk, lost: Callable[[Desk], None]
):
    desk.run("INSERT INTO tickets VALUES (1, 'one', NULL), (2, 'beside it', NULL)")
    desk.sync()
    set_null(desk, "two")
    desk.sync()
    lost(desk)
    set_null(desk, "three")
    assert desk.sync().tables[0].landed == 1
    assert [subject for _, subject in of_null(desk)] == ["one", "two", "three"]
    assert all(len(images) == 1 for images in positions(desk).values())


def test_a_row_without_a_cursor_of_which_two_contents_wait_gets_well_by_the_next_sync(desk: Desk):
    desk.run("INSERT INTO tickets VALUES (1, 'one', NULL)")
    desk.sync()
    # As an earlier version landed a change: at the position of the first version.
    forget_state(desk)
    set_null(desk, "two")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NullRows, "changed", lambda _self, events: Changed(events))
        desk.sync()
    as_an_earlier_version_left_it(desk)
    assert desk.sync().tables[0].landed == 1
    assert [subject for _, subject in of_null(desk)] == ["one", "two", "two"]
    assert desk.sync().tables[0].landed == 0


def test_a_row_without_a_cursor_that_has_changed_too_often_is_refused_until_it_is_read_anew(desk: Desk):
    desk.run("INSERT INTO tickets VALUES (1, 'one', NULL)")
    desk.sync()
    with closing(sqlite3.connect(desk.store.folder / FILE)) as base, base:
        base.execute("UPDATE null_rows SET ordinal = ?", (NULL_ORDINALS.stop - 4,))
    set_null(desk, "the last one")
    assert desk.sync().tables[0].landed == 1
    set_null(desk, "one too many")
    with pytest.raises(QueryRefused, match="no position is left") as refused:
        desk.sync()
    assert "omnisupport-ingest sync desk --table tickets --full-refresh" in refused.value.fix
    desk.refresh("no position is left")
    desk.sync()
    assert desk.subjects() == {1: "one too many"}
