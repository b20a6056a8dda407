"""Tables with a row filter that are written while they are read: the lake ends as the filtered table."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random

import pytest

from omnisupport_ingest.sources.postgres.snapshot.requests import SnapshotRequests
from omnisupport_ingest_tests.sources.postgres.published_facts import (
    PAPERS,
    PUBLISHED_PAPERS,
    Rows,
    held,
    make_odd_papers,
    make_people,
    read_again,
    sent,
)
from omnisupport_ingest_tests.sources.postgres.range_facts import ask
from omnisupport_ingest_tests.sources.postgres.snapshot_facts import chunks, complete, following
from omnisupport_ingest_tests.sources.postgres.source_under_test import UNRESOLVED, SourceUnderTest
from omnisupport_ingest_tests.waiting import until

WRITERS = 2


def of_people(chance: Random, key: int, other: int) -> str:
    """A change of a table that is filtered by what is no key; of keys that nobody else has in hand."""
    region = chance.choice(["eu", "us"])
    return chance.choice(
        [
            f"UPDATE people SET region = '{region}' WHERE id = {key}",
            f"UPDATE people SET v = '{chance.choice(['', 'in both ', 'for us '])}{other}' WHERE id = {key}",
            f"UPDATE people SET long = repeat('{other}', {chance.choice([1, 3000])}) WHERE id = {key}",
            f"DELETE FROM people WHERE id = {key}",
            f"INSERT INTO people SELECT {key}, '{region}', 'new', repeat('n', 9000)"
            f" WHERE NOT EXISTS (SELECT FROM people WHERE id = {key})",
            f"UPDATE people SET id = {other}, region = '{region}' WHERE id = {key}"
            f" AND NOT EXISTS (SELECT FROM people WHERE id = {other})",
        ]
    )


def of_papers(chance: Random, key: int, other: int) -> str:
    """A change of a table that is filtered by its key, whose long values an update does not send again."""
    far = other + chance.choice([0, 0, 1000])
    return chance.choice(
        [
            f"UPDATE papers SET id = {far} WHERE id = {key} AND NOT EXISTS"
            f" (SELECT FROM papers WHERE id = {far})",
            f"UPDATE papers SET id = {key} WHERE id = {key + 1000} AND NOT EXISTS"
            f" (SELECT FROM papers WHERE id = {key})",
            f"UPDATE papers SET v = '{other}' WHERE id IN ({key}, {key + 1000})",
            f"DELETE FROM papers WHERE id = {far}",
            f"INSERT INTO papers SELECT {far}, 'new', repeat('n', 9000)"
            f" WHERE NOT EXISTS (SELECT FROM papers WHERE id = {far})",
        ]
    )


@contextmanager
def written(source: SourceUnderTest, seed: int, change: Callable[[Random, int, int], str]) -> Iterator[None]:
    """Each writer changes rows of keys of its own meanwhile, one or some at a time, and rolls some back."""
    over, failed = threading.Event(), list[BaseException]()

    def write(number: int) -> None:
        chance = Random(seed * WRITERS + number)

        def one() -> str:
            key, other = (WRITERS * chance.randint(1, 550) + number for _ in range(2))
            return change(chance, key, other)

        try:
            with source.connected() as connection, connection.cursor() as cursor:
                while not over.is_set():
                    some = "; ".join(one() for _ in range(chance.choice([1, 1, 4])))
                    cursor.execute(f"BEGIN; {some}; {chance.choice(['COMMIT', 'COMMIT', 'ROLLBACK'])}")
        except BaseException as error:
            failed.append(error)

    writers = [threading.Thread(target=write, args=(number,)) for number in range(WRITERS)]
    for writer in writers:
        writer.start()
    try:
        yield
    finally:
        over.set()
        for writer in writers:
            writer.join()
    assert not failed


def read_while_written(
    source: SourceUnderTest, table: str, seed: int, change: Callable[[Random, int, int], str]
) -> None:
    """The first snapshot, one of a range where its keys have one, and one more, all beside writers."""
    source.overrides["snapshot_rows_per_second"] = 400
    with written(source, seed, change), following(source):
        until(lambda: complete(source, table))
        if table == "papers":
            ask(source, ["50"], ["250"])
            until(lambda: len(source.events("b")) == 2)
        SnapshotRequests(source.store.folder).write(table, "a test")
        ends = len(source.events("b"))
        until(lambda: len(source.events("b")) > ends and complete(source, table))
    assert len({span.low for span in chunks(source, table)}) > 2
    source.catch_up()


@pytest.mark.slow
@pytest.mark.drawn(2)
@pytest.mark.parametrize("key", ["PRIMARY KEY", ""], ids=["by key", "by ctid"])
@pytest.mark.parametrize("seed", range(2))
def test_table_that_is_written_while_it_is_read_ends_as_its_filtered_rows(
    source: SourceUnderTest, key: str, seed: int
) -> None:
    make_people(source, key=key)
    read_while_written(source, "people", seed, of_people)
    assert held(source) == sent(source)


@pytest.mark.drawn(1)
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_table_filtered_by_its_key_ends_so_too_but_for_long_values_that_nobody_sent(
    source: SourceUnderTest, seed: int
) -> None:
    make_odd_papers(source)
    read_while_written(source, "papers", seed, of_papers)

    def known(rows: Rows, by: Rows) -> Rows:
        """``rows`` without the values that ``by`` has not resolved."""
        return {
            key: {name: value for name, value in row.items() if by[key][name] != UNRESOLVED}
            for key, row in rows.items()
        }

    now, lake = source.rows(PUBLISHED_PAPERS, PAPERS), held(source, "papers")
    assert now.keys() == lake.keys()
    assert known(now, lake) == known(lake, lake)
    read_again(source, "papers")
    assert held(source, "papers") == now
