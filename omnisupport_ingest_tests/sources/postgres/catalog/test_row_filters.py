"""Publications with a row filter: the lake is the filtered table, by every way in which rows come into it."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import pytest

from omnisupport_ingest.landing.manifest import Manifest
from omnisupport_ingest.sources.postgres.slot.slot import consistent_snapshot
from omnisupport_ingest.sources.postgres.snapshot.comparison_rows import write_rows_at
from omnisupport_ingest_tests.sources.postgres.published_facts import (
    COLUMNS,
    PAPERS,
    PUBLISHED_PAPERS,
    US,
    Rows,
    held,
    lost,
    make_odd_papers,
    make_people,
    publish,
    publish_otherwise,
    sent,
    written_in_the_home,
)
from omnisupport_ingest_tests.sources.postgres.range_facts import ask, lose, ranged
from omnisupport_ingest_tests.sources.postgres.snapshot_facts import capture, chunks, complete, make_papers
from omnisupport_ingest_tests.sources.postgres.source_under_test import UNRESOLVED, SourceUnderTest, contract


@pytest.fixture
def people(source: SourceUnderTest) -> SourceUnderTest:
    make_people(source)
    return source


def test_snapshot_by_key_holds_the_rows_of_the_filter_alone(people: SourceUnderTest) -> None:
    people.catch_up()
    read, published = chunks(people, "people"), sent(people)
    assert held(people) == published and len(published) == 333 and complete(people, "people")
    assert {event.key for event in people.events("r")} == published.keys()
    # Chunks are of published rows, and so are the keys between them, which the plan keeps.
    assert [span.end for span in read] == [*(f'["{n * 150}"]' for n in range(1, 7)), None]
    assert "kept back" not in written_in_the_home(people) and "sent" in written_in_the_home(people)


def test_snapshot_by_place_holds_the_rows_of_the_filter_alone(source: SourceUnderTest) -> None:
    make_people(source, key="")
    source.catch_up()
    assert len(chunks(source, "people")) > 5 and held(source) == sent(source)
    assert len(source.events("r")) == 333 and "kept back" not in written_in_the_home(source)


def test_filter_that_no_row_meets_leaves_the_table_empty_and_complete(people: SourceUnderTest) -> None:
    people.sql(publish_otherwise(people, "TABLE people WHERE (region = 'moon')"))
    people.catch_up()
    assert held(people) == {} and complete(people, "people") and people.events("r") == []


def test_filter_does_not_count_where_the_schema_is_published_as_a_whole(people: SourceUnderTest) -> None:
    people.sql(f"ALTER PUBLICATION {people.slot} ADD TABLES IN SCHEMA public")
    people.catch_up()
    people.sql("INSERT INTO people VALUES (2000, 'us', 'new', '')")
    people.catch_up()
    assert held(people) == people.rows("people", COLUMNS) and len(held(people)) == 1001


STEPS = {
    "INSERT INTO people VALUES (2001, 'eu', 'in', repeat('n', 9000))": "c",
    "INSERT INTO people VALUES (2002, 'us', 'out', repeat('n', 9000))": "",
    "UPDATE people SET region = 'eu' WHERE id = 1": "c",
    "UPDATE people SET region = 'us' WHERE id = 3": "d",
    "UPDATE people SET v = 'stays' WHERE id = 6": "u",
    "UPDATE people SET v = 'stays out' WHERE id = 7": "",
    "UPDATE people SET id = 3009 WHERE id = 9": "dc",
    "UPDATE people SET id = 3010, region = 'eu' WHERE id = 10": "c",
    "UPDATE people SET id = 3012, region = 'us' WHERE id = 12": "d",
    "UPDATE people SET region = NULL WHERE id = 15": "d",
    "DELETE FROM people WHERE id = 18": "d",
    "DELETE FROM people WHERE id = 19": "",
    "UPDATE people SET v = 'in both' WHERE id = 20": "c",
    "TRUNCATE people": "t",
    "INSERT INTO people VALUES (1, 'eu', '', ''), (2, 'us', '', ''), (3, 'eu', '', '')": "cc",
}
"""Each a transaction of its own, and what is sent of it."""


@pytest.mark.parametrize("statements", [len(STEPS) - 2, len(STEPS)], ids=["changes", "a truncate too"])
def test_rows_enter_leave_and_stay_in_the_filter_by_the_stream(
    people: SourceUnderTest, statements: int
) -> None:
    people.catch_up()
    done = dict(list(STEPS.items())[:statements])
    people.sql(*done)
    people.catch_up()
    of_each = groupby(people.changes(), key=lambda event: event.commit_lsn)
    assert ["".join(event.op for event in events) for _, events in of_each] == list(
        filter(None, done.values())
    )
    # With the whole old row in the log the server sends the long value of a row that enters.
    assert held(people) == sent(people)


def test_row_that_a_key_change_brings_in_lacks_its_long_value_until_its_key_is_read_again(
    source: SourceUnderTest,
) -> None:
    make_odd_papers(source)
    source.catch_up()
    source.sql(
        "UPDATE papers SET id = 500, v = 'came in' WHERE id = 1001",
        "UPDATE papers SET id = 1500 WHERE id = 2",
        "UPDATE papers SET v = 'outside' WHERE id = 1002",
    )
    source.catch_up()
    came, left = source.changes()
    assert (came.op, came.key, came.unchanged, came.moved_from_key) == ("c", '["500"]', ["long"], None)
    assert (left.op, left.key) == ("d", '["2"]')
    assert held(source, "papers")['["500"]'] == {"id": "500", "v": "came in", "long": UNRESOLVED}
    ask(source, ["500"], ["500"])
    source.catch_up()
    assert held(source, "papers") == source.rows(PUBLISHED_PAPERS, PAPERS)
    assert sum(batch.rows for batch in ranged(source)) == 1 + 1


def test_row_that_a_key_change_brings_in_while_the_table_is_read_has_its_long_value(
    source: SourceUnderTest,
) -> None:
    make_odd_papers(source)

    def landed(batch: Manifest) -> None:
        if batch.chunk is not None and (batch.chunk.chunk, batch.chunk.boundary) == (0, False):
            source.sql(
                "UPDATE papers SET id = 0 WHERE id = 1001",
                "UPDATE papers SET id = -1 WHERE id = 1002",
                "UPDATE papers SET id = 1002 WHERE id = -1",
                "UPDATE papers SET id = 400 WHERE id = 1003",
                "UPDATE papers SET id = -2 WHERE id = 290",
                "UPDATE papers SET id = 2000 WHERE id = 291",
                "UPDATE papers SET id = 2001 WHERE id = 5",
            )

    capture(source, landed)
    source.catch_up()
    assert held(source, "papers") == source.rows(PUBLISHED_PAPERS, PAPERS)
    assert '["-1"]' not in {event.key for event in source.events("r")}


def test_moved_row_that_has_left_the_filter_is_not_read_again(source: SourceUnderTest) -> None:
    make_papers(source, 1, 300)
    source.sql(
        "ALTER TABLE papers ALTER v SET NOT NULL",
        "CREATE UNIQUE INDEX by_both ON papers (id, v)",
        "ALTER TABLE papers REPLICA IDENTITY USING INDEX by_both",
    )
    publish(source, "TABLE papers WHERE (v = 'old')")

    def landed(batch: Manifest) -> None:
        if batch.chunk is not None and (batch.chunk.chunk, batch.chunk.boundary) == (0, False):
            source.sql(
                "UPDATE papers SET id = 0 WHERE id = 250",
                "UPDATE papers SET id = -1 WHERE id = 251",
                "UPDATE papers SET v = 'left' WHERE id = 0",
            )

    capture(source, landed)
    assert held(source, "papers") == source.rows("papers WHERE v = 'old'", PAPERS)
    read_again = [event.key for event in source.events("r") if (event.chunk_id or "").endswith("-000004")]
    assert read_again == ['["-1"]']


def test_only_rows_of_the_filter_are_read_of_a_range(people: SourceUnderTest) -> None:
    people.catch_up()
    lose(
        people,
        "UPDATE people SET region = 'us' WHERE id % 30 = 0",
        "UPDATE people SET region = 'eu' WHERE id % 30 = 1",
        "DELETE FROM people WHERE id % 30 = 3",
    )
    before = held(people)
    ask(people, ["250"], ["599"])
    people.catch_up()

    def of(rows: Rows, *, within: bool) -> Rows:
        return {key: row for key, row in rows.items() if (250 <= int(row["id"] or "") < 600) == within}

    assert of(held(people), within=True) == of(sent(people), within=True)
    assert of(held(people), within=False) == of(before, within=False)
    assert sum(batch.rows for batch in ranged(people)) == len(of(sent(people), within=True)) + 1


def test_rows_of_the_filter_alone_are_compared_with_the_lake(people: SourceUnderTest, tmp_path: Path) -> None:

    (table,) = people.tables
    with consistent_snapshot(people.dsn) as (_, snapshot):
        people.sql(publish_otherwise(people, f"TABLE people WHERE ({US})"))
        told = [
            write_rows_at(people.dsn, people.slot, snapshot, table, tmp_path / f"{sample}", sample=sample)
            for sample in (None, 100)
        ]
    # By the filter that was in force where the snapshot stands.
    assert [(each.rows, each.live) for each in told] == [(333, 333)] * 2
    assert told[0].written == 333 and 50 < told[1].written < 200


LOGS = ("id", "v")


def make_logs(source: SourceUnderTest) -> None:
    """A partitioned table whose rows with an even key are published."""
    source.sql(
        "CREATE TABLE logs (id int PRIMARY KEY, v text) PARTITION BY RANGE (id)",
        "CREATE TABLE logs_1 PARTITION OF logs FOR VALUES FROM (0) TO (100)",
        "CREATE TABLE logs_2 PARTITION OF logs FOR VALUES FROM (100) TO (300) PARTITION BY RANGE (id)",
        # Its columns in another order than those of its root.
        "CREATE TABLE logs_2a (v text, id int PRIMARY KEY)",
        "ALTER TABLE logs_2 ATTACH PARTITION logs_2a FOR VALUES FROM (100) TO (300)",
        "INSERT INTO logs SELECT n, 'old' FROM generate_series(0, 299) n",
    )
    publish(source, "TABLE logs WHERE (id % 2 = 0)")
    source.tables.append(contract("logs", LOGS))
    source.overrides |= {"snapshot_chunk_rows": 40}
    source.catch_up()


def same_logs(source: SourceUnderTest) -> bool:
    return held(source, "logs") == source.rows("logs WHERE id % 2 = 0", LOGS)


def test_partitioned_table_is_read_and_followed_by_the_filter_of_its_root(source: SourceUnderTest) -> None:
    make_logs(source)
    assert same_logs(source) and len(chunks(source, "logs")) == 4 and len(source.events("r")) == 150
    source.sql(
        "UPDATE logs SET v = 'new' WHERE id % 50 < 2",
        "DELETE FROM logs WHERE id IN (4, 5)",
        "UPDATE logs SET id = 5 WHERE id = 150",
        "UPDATE logs SET id = 4 WHERE id = 151",
    )
    source.catch_up()
    assert same_logs(source)


@pytest.mark.parametrize(("parity", "rows"), [(0, 10), (1, 0)], ids=["some of the filter", "none of it"])
def test_rows_of_the_filter_alone_come_with_a_partition(
    source: SourceUnderTest, parity: int, rows: int
) -> None:
    make_logs(source)
    source.sql(
        "CREATE TABLE older (id int PRIMARY KEY, v text)",
        f"INSERT INTO older SELECT n, 'came' FROM generate_series(300, 319) n WHERE n % 2 >= {parity}",
        "ALTER TABLE logs ATTACH PARTITION older FOR VALUES FROM (300) TO (400)",
    )
    source.catch_up()
    assert same_logs(source) and complete(source, "logs")
    assert len([event for event in source.events("r") if '"came"' in (event.after or "")]) == rows
    assert len(chunks(source, "logs")) == 4 + bool(rows) and bool(lost(source)) == bool(rows)
    source.sql("ALTER TABLE logs DETACH PARTITION logs_1")
    source.catch_up()
    assert same_logs(source) and complete(source, "logs")
