"""Snapshots of a range of a table's keys: what is in it is as at the source, what is not stays as it was."""

from __future__ import annotations

import json
from contextlib import closing
from random import Random

import pytest

from omnisupport_ingest.landing.manifest import Manifest
from omnisupport_ingest.landing.snapshot_plans import SnapshotPlans
from omnisupport_ingest.landing.snapshot_progress import snapshots_under_way
from omnisupport_ingest.sources.postgres.session.connection import connect
from omnisupport_ingest.sources.postgres.snapshot.key_ranges import NoKeyRange
from omnisupport_ingest.sources.postgres.snapshot.requests import SnapshotRequests
from omnisupport_ingest_tests.sources.postgres.range_facts import Keys, ask, lose, ranged, scope_of
from omnisupport_ingest_tests.sources.postgres.snapshot_facts import (
    COLUMNS,
    capture,
    chunks,
    complete,
    following,
    make_papers,
    make_tickets,
    same_as_source,
)
from omnisupport_ingest_tests.sources.postgres.source_under_test import (
    UNRESOLVED,
    SourceUnderTest,
    contract,
    folded,
)
from omnisupport_ingest_tests.waiting import until


@pytest.fixture
def tickets(source: SourceUnderTest) -> SourceUnderTest:
    """A table of 1,000 rows that was captured, and that chunks of 100 are read of."""
    make_tickets(source)
    source.catch_up()
    return source


def test_only_the_range_is_read_and_rows_that_are_gone_there_are_ended(tickets: SourceUnderTest) -> None:
    lose(
        tickets,
        "DELETE FROM tickets WHERE id % 100 < 10",
        "UPDATE tickets SET v = 'unseen' WHERE id % 10 = 3",
    )
    scope = ask(tickets, ["250"], ["599"])
    tickets.catch_up()
    now, held = tickets.rows("tickets", COLUMNS), folded(tickets.events(), "tickets")
    numbers = range(1, 1001)
    inside = {json.dumps([str(n)]) for n in numbers if 250 <= n <= 599}
    assert {key for key in held if scope.holds(key)} == now.keys() & inside
    assert all(held[key] == now[key] for key in now.keys() & inside)
    # Nothing that was missed outside is known.
    assert len(held.keys() - inside) == 1000 - 350
    assert not any(held[key]["v"] == "unseen" for key in held.keys() - inside)
    again = [batch for batch in ranged(tickets) if batch.chunk and not batch.chunk.boundary]
    assert sum(batch.rows for batch in again) == len(now.keys() & inside)
    assert [each.after for each in tickets.events("b")] == [None, scope.text]
    # A part of a table does not make it whole.
    assert not complete(tickets)


def test_all_of_a_table_by_ranges_side_by_side_is_the_table(tickets: SourceUnderTest) -> None:
    lose(tickets, "DELETE FROM tickets WHERE id % 3 = 0", "INSERT INTO tickets VALUES (2000, 'unseen')")
    ask(tickets, None, ["299"])
    ask(tickets, ["300"], ["800"])
    ask(tickets, ["801"], None)
    tickets.catch_up()
    assert same_as_source(tickets) and not complete(tickets)


def test_table_stays_complete_and_is_not_while_the_stream_is_behind_the_range(
    tickets: SourceUnderTest,
) -> None:
    assert complete(tickets)
    told = []

    def landed(batch: Manifest) -> None:
        if batch.chunk is not None and not batch.chunk.boundary:
            tickets.sql("UPDATE tickets SET v = v || '.' WHERE id % 7 = 0")
            told.append(complete(tickets))

    tickets.overrides["snapshot_threads"] = 1
    ask(tickets, ["1"], ["500"])
    capture(tickets, landed)
    # The first chunk was read where the stream stood.
    assert len(told) == 6 and not any(told[1:])
    tickets.catch_up()
    assert complete(tickets) and same_as_source(tickets)


def test_range_is_read_beside_a_stream_that_goes_on_and_hostile_writers(tickets: SourceUnderTest) -> None:
    rng = Random(5)
    tickets.overrides["snapshot_rows_per_second"] = 2000
    with following(tickets):
        for _ in range(3):
            first, last = sorted(rng.sample(range(1, 1200), 2))
            ask(tickets, [str(first)], [str(last)])
            ends = len(tickets.events("b"))
            while len(tickets.events("b")) == ends:
                one, other = rng.sample(range(1, 1200), 2)
                tickets.transaction(
                    f"DELETE FROM tickets WHERE id = {one}",
                    f"UPDATE tickets SET id = {one} WHERE id = {other}",
                    f"INSERT INTO tickets VALUES ({other}, 'new') ON CONFLICT (id) DO UPDATE SET v = 'more'",
                )
        until(lambda: same_as_source(tickets) and complete(tickets))


def test_snapshot_of_a_range_goes_on_where_it_was_killed(tickets: SourceUnderTest) -> None:
    tickets.overrides["snapshot_threads"] = 1
    scope = ask(tickets, ["101"], ["900"])
    tickets.killed_at("landing.manifest.after@tickets-000003")
    epoch = tickets.store.current_epoch()
    assert epoch is not None
    (under_way,) = snapshots_under_way(tickets.store, epoch.number)
    assert (under_way.scope, under_way.chunks, under_way.done) == (str(scope), 9, 4)
    tickets.sql("DELETE FROM tickets WHERE id BETWEEN 150 AND 850")
    tickets.catch_up()
    assert len(ranged(tickets)) == 9 + 1
    assert same_as_source(tickets) and complete(tickets)
    assert SnapshotRequests(tickets.store.folder).read() == []
    tickets.catch_up()
    assert len(ranged(tickets)) == 9 + 1


def test_snapshot_of_the_table_answers_what_was_asked_of_its_ranges(tickets: SourceUnderTest) -> None:
    ask(tickets, ["1"], ["10"])
    ask(tickets, ["1"], ["20"])
    SnapshotRequests(tickets.store.folder).write("tickets", "all of it")
    tickets.catch_up()
    assert ranged(tickets) == [] and len(chunks(tickets)) == 2 * 11
    assert SnapshotRequests(tickets.store.folder).read() == []


def test_range_that_is_asked_for_while_the_table_is_read_is_read_too(tickets: SourceUnderTest) -> None:
    SnapshotRequests(tickets.store.folder).write("tickets", "all of it")
    tickets.overrides["snapshot_threads"] = 1
    tickets.killed_at("landing.manifest.after@tickets-000003")
    ask(tickets, ["50"], ["149"])
    tickets.catch_up()
    assert len(SnapshotPlans(tickets.store.folder).all(1)) == 3
    assert sum(batch.rows for batch in ranged(tickets)) == 100 + 1
    assert same_as_source(tickets) and complete(tickets)


def test_range_of_a_table_that_was_not_read_yet_is_read_with_the_table(source: SourceUnderTest) -> None:
    source.sql("CREATE TABLE late (id int PRIMARY KEY, v text)", "INSERT INTO late VALUES (1, 'one')")
    source.tables.append(contract("late", COLUMNS))
    with closing(connect(source.dsn)):
        ask(source, ["1"], ["10"])
    source.catch_up()
    assert ranged(source) == [] and same_as_source(source, "late") and complete(source, "late")


def test_rows_whose_keys_change_while_their_range_is_read_have_their_long_values(
    source: SourceUnderTest,
) -> None:
    make_papers(source, 1, 600)
    source.catch_up()

    def landed(batch: Manifest) -> None:
        if batch.chunk is not None and (batch.chunk.chunk, batch.chunk.boundary) == (0, False):
            # Within the range, into it, out of it, out of what is still to be read of it.
            source.sql(
                "UPDATE papers SET id = id + 1000 WHERE id = 110",
                "UPDATE papers SET id = 130 + 2000 WHERE id = 130",
                "UPDATE papers SET id = 110 WHERE id = 390",
                "UPDATE papers SET id = 130 WHERE id = 500",
                "UPDATE papers SET id = 3000 WHERE id = 380",
                "UPDATE papers SET id = 380 WHERE id = 50",
            )

    ask(source, ["101"], ["400"])
    capture(source, landed)
    source.catch_up()
    held = folded(source.events(), "papers")
    assert held == source.rows("papers", ("id", "v", "long"))
    assert not any(UNRESOLVED in row.values() for row in held.values())


def test_table_whose_key_has_another_type_by_now_is_read_whole(tickets: SourceUnderTest) -> None:
    ask(tickets, ["5"], ["9"])
    tickets.sql("ALTER TABLE tickets ALTER COLUMN id TYPE numeric")
    tickets.catch_up()
    assert ranged(tickets) == []
    assert len(chunks(tickets)) == 2 * 11 and same_as_source(tickets)


def test_damaged_note_has_the_whole_table_read(tickets: SourceUnderTest) -> None:
    ask(tickets, ["5"], ["9"])
    (note,) = (tickets.store.folder / "snapshot_requests").iterdir()
    note.write_text("{")
    tickets.catch_up()
    assert ranged(tickets) == [] and len(chunks(tickets)) == 2 * 11


def test_prefix_of_a_composite_key_is_a_range(source: SourceUnderTest) -> None:
    source.sql(
        'CREATE TABLE lines (shop int, id text COLLATE "C", v text, PRIMARY KEY (id, shop))',
        "INSERT INTO lines SELECT n % 5, n, 'old' FROM generate_series(1, 500) n",
    )
    source.tables.append(contract("lines", ("shop", "id", "v"), ("shop", "id")))
    source.overrides |= {"snapshot_chunk_rows": 30}
    source.catch_up()
    ask(source, ["2"], ["3", "4"])
    source.catch_up()
    again = [
        event for batch in ranged(source) for event in [batch] if batch.chunk and not batch.chunk.boundary
    ]
    ((expected,),) = source.query("SELECT count(*) FROM lines WHERE shop = 2 OR (shop = 3 AND id <= '4')")
    assert sum(batch.rows for batch in again) == expected and 0 < expected < 200


@pytest.mark.parametrize(
    ("column", "values"),
    [
        pytest.param("smallint", "n * 7 - 900", id="smallint"),
        pytest.param("bigint", "(n - 100)::bigint * 1000000007", id="bigint"),
        pytest.param("uuid", "md5(n::text)::uuid", id="uuid"),
        pytest.param("date", "date '0100-03-01 BC' + n * 4000", id="date"),
        pytest.param("date", "CASE n WHEN 1 THEN 'infinity' WHEN 2 THEN '-infinity' ELSE"
                     " date '2026-01-01' + n END", id="date without end"),
        pytest.param('text COLLATE "C"', "chr(32 + n * 61 % 700) || n", id="text"),
        pytest.param('varchar(20) COLLATE "POSIX"', "md5(n::text)::varchar(5) || n", id="varchar"),
    ],
)  # fmt: skip
def test_lake_and_server_agree_on_what_lies_in_a_range(
    source: SourceUnderTest, column: str, values: str
) -> None:
    source.sql(
        f"CREATE TABLE ordered (id {column} PRIMARY KEY)",
        f"INSERT INTO ordered SELECT {values} FROM generate_series(1, 200) n",
    )
    table = contract("ordered", ("id",))
    keys = [row[0] for row in source.query("SELECT o.id::text FROM ordered o ORDER BY o.id")]
    rng = Random(column + values)
    for _ in range(20):
        first, last = sorted(rng.sample(range(len(keys)), 2))
        scope = scope_of(source, table, [keys[first]], [keys[last]])
        assert [key for key in keys if scope.holds(json.dumps([key]))] == keys[first : last + 1]


@pytest.mark.parametrize(
    ("key", "why"),
    [
        pytest.param("numeric", "is numeric", id="numeric"),
        pytest.param("timestamptz", "is timestamp with time zone", id="timestamptz"),
        pytest.param("char(4)", r"is character\(4\)", id="padded"),
        pytest.param("word", "is word", id="a domain"),
    ],
)
def test_range_of_keys_that_the_lake_cannot_order_is_refused(
    source: SourceUnderTest, key: str, why: str
) -> None:
    source.sql('CREATE DOMAIN word AS text COLLATE "C"')
    source.sql(f"CREATE TABLE odd (id {key} PRIMARY KEY)")
    with pytest.raises(NoKeyRange, match=why) as refused:
        scope_of(source, contract("odd", ("id",)), ["1"], None)
    assert "source snapshot odd" in refused.value.fix


def test_range_of_texts_in_another_order_than_that_of_bytes_is_refused(source: SourceUnderTest) -> None:
    others = source.query(
        "SELECT collname FROM pg_collation WHERE collprovider = 'c' AND collcollate NOT IN ('C', 'POSIX')"
        " AND collencoding IN (-1, pg_char_to_encoding('UTF8'))"
    )
    if not others:
        pytest.skip("this machine has no locale but C")
    source.sql(f'CREATE TABLE odd (id text COLLATE "{others[0][0]}" PRIMARY KEY)')
    with pytest.raises(NoKeyRange, match="is text in a collation other than C"):
        scope_of(source, contract("odd", ("id",)), ["1"], None)


@pytest.mark.parametrize(
    ("start", "end", "why"),
    [
        pytest.param(["one"], None, "'one' is no value of column id", id="not a value"),
        pytest.param(["9"], ["5"], "ends before it starts: 9 to 5", id="the wrong way round"),
        pytest.param(["1", "2"], None, "the key of public.tickets has 1 columns: id", id="too many values"),
        pytest.param([], None, "0 values were given", id="no value"),
        pytest.param(["99999999999"], None, "out of range", id="a value beyond the type"),
    ],
)
def test_what_is_no_range_is_refused_with_the_reason(
    tickets: SourceUnderTest, start: Keys, end: Keys, why: str
) -> None:
    with pytest.raises(NoKeyRange, match=why):
        scope_of(tickets, tickets.tables[0], start, end)


def test_bounds_are_written_as_the_server_writes_them(tickets: SourceUnderTest) -> None:
    assert str(scope_of(tickets, tickets.tables[0], ["007"], [" 10 "])) == "7 to 10"
