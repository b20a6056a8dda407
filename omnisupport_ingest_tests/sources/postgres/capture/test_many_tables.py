"""Many tables: none costs a query of its own, and a change of each is recorded before its first row lands."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from omnisupport_ingest.contracts.model import Contracts
from omnisupport_ingest.landing.manifest import Manifest
from omnisupport_ingest.landing.schema_changes import SchemaChanges
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.sources.postgres.capture.capture import Capture
from omnisupport_ingest.sources.postgres.catalog.partitions import PartitionedTables
from omnisupport_ingest.sources.postgres.session.silence import AwaitedCursor
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest, contract
from omnisupport_ingest_tests.waiting import until

COUNT = 40
NAMES = tuple(f"t{number:02d}" for number in range(COUNT))
BEFORE = {"id": "integer", "v": "text", "n": "integer", "d": "word", "e": "word[]"}
ALTERS = {
    "column_added": "ADD w text",
    "column_dropped": "DROP v",
    "column_renamed": "RENAME v TO w",
    "column_retyped": "ALTER v TYPE int USING 7",
    "column_widened": "ALTER n TYPE bigint",
}


def made(source: SourceUnderTest, names: Sequence[str]) -> SourceUnderTest:
    """Captured tables, each with a row; every fourth is partitioned."""
    source.sql("CREATE DOMAIN word AS varchar(9)")
    for number, name in enumerate(names):
        table = f"CREATE TABLE {name} (id int PRIMARY KEY, v text, n int, d word, e word[])"
        if number % 4 == 0:
            table += f" PARTITION BY RANGE (id); CREATE TABLE {name}_all PARTITION OF {name} DEFAULT"
        source.sql(f"{table}; INSERT INTO {name} VALUES (1, 'one', 1)")
        source.tables.append(contract(name, ("id", "v")))
    source.catch_up()
    return source


@pytest.fixture
def many(source: SourceUnderTest) -> SourceUnderTest:
    return made(source, NAMES)


@pytest.fixture
def few(source: SourceUnderTest) -> SourceUnderTest:
    return made(source, NAMES[:6])


@pytest.fixture
def queries(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each statement is sent from now on."""
    sent, execute = Counter[str](), AwaitedCursor.execute

    def counted(cursor: AwaitedCursor, query: Any, parameters: Any = None) -> None:
        sent[str(query)] += 1
        execute(cursor, query, parameters)

    monkeypatch.setattr(AwaitedCursor, "execute", counted)
    return sent


@pytest.mark.parametrize("behind", [False, True], ids=["as they are", "altered since"])
def test_no_query_is_sent_once_for_each_table_by_a_start_and_the_first_changes(
    many: SourceUnderTest, queries: Counter[str], behind: bool
) -> None:
    many.sql(*(f"INSERT INTO {name} VALUES (2, 'two', 2)" for name in NAMES))
    if behind:
        # A partition that is written anew has its table read again.
        plain = [name for number, name in enumerate(NAMES) if number % 4]
        many.sql(*(f"ALTER TABLE {name} ALTER n TYPE bigint" for name in plain))
    queries.clear()
    many.catch_up()
    assert sum(each.op == "c" for each in many.events()) == COUNT
    ((statement, times),) = queries.most_common(1)
    assert times < COUNT / 2, statement


def test_a_start_parses_the_manifests_of_a_snapshot_once(
    many: SourceUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed, parse = Counter[str](), LandingStore._parse

    def counted(store: LandingStore, batch_id: str) -> Manifest:
        parsed[batch_id] += 1
        return parse(store, batch_id)

    monkeypatch.setattr(LandingStore, "_parse", counted)
    monkeypatch.setattr("omnisupport_ingest.sources.postgres.capture.capture._MANIFESTS_IN_MEMORY", 10)
    many.catch_up()
    assert max(count for name, count in parsed.items() if "-r-" in name) == 1


def test_a_start_reads_the_record_of_all_schemas_once(
    many: SourceUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, read = [], SchemaChanges.read

    def counted(changes: SchemaChanges) -> Any:
        reads.append(changes)
        return read(changes)

    monkeypatch.setattr(SchemaChanges, "read", counted)
    many.catch_up()
    assert len(reads) == 1


@pytest.mark.parametrize("row_before", [False, True], ids=["first sight", "seen before"])
@pytest.mark.parametrize("kinds", [[*ALTERS], *([each] for each in ALTERS)], ids=["every kind", *ALTERS])
def test_a_change_is_recorded_before_a_row_lands_that_comes_with_it(
    few: SourceUnderTest, kinds: list[str], row_before: bool
) -> None:
    """Whether the stream describes the table for the first time or again; the catalogs were read before.

    By itself, as the look for a change of one table sees those of the others.
    """
    altered = dict(zip(NAMES[1:6], kinds, strict=False))
    recorded_by: dict[str, set[str]] = {}
    proved = threading.Event()

    def landed(batch: Manifest) -> None:
        proved.set()
        known = {(each.table, each.kind) for each in SchemaChanges(few.store.folder).all()}
        for relation in batch.relations:
            columns = dict(zip(relation.columns, relation.types, strict=True))
            if columns != BEFORE:
                recorded_by[relation.table] = {kind for table, kind in known if table == relation.table}

    stop = threading.Event()
    capture = Capture(few.settings, few.home, Contracts(tuple(few.tables)), landed)
    thread = threading.Thread(target=capture.run, args=(None, stop))
    thread.start()
    try:
        few.sql("INSERT INTO t00 VALUES (3, 'three', 3)")
        assert proved.wait(60), "the catalogs were read, and the stream has begun"
        if row_before:
            few.sql(*(f"INSERT INTO {name} (id) VALUES (4)" for name in altered))
        statements = []
        for name, kind in altered.items():
            statements += [f"ALTER TABLE {name} {ALTERS[kind]}", f"INSERT INTO {name} (id) VALUES (5)"]
        few.sql(*statements)
        until(lambda: recorded_by.keys() == altered.keys())
    finally:
        stop.set()
        thread.join()
    assert recorded_by == {name: {kind} for name, kind in altered.items()}
    first = {each.table: each.first_commit for each in SchemaChanges(few.store.folder).all()}
    rows = {each.source_table: each.commit_lsn for each in few.events("c")}
    assert {name: lsn.value for name, lsn in first.items() if lsn is not None} == {
        name: rows[name] for name in altered
    }


def test_which_tables_are_partitioned_is_asked_at_once_and_of_unknown_ones_later(
    many: SourceUnderTest, queries: Counter[str]
) -> None:
    oids = dict(many.query("SELECT relname::text, oid::bigint FROM pg_class WHERE relkind IN ('r', 'p')"))
    with many.connected() as connection:
        queries.clear()
        tables = PartitionedTables(connection, [("public", name) for name in (*NAMES, "gone")])
        found = [name for name in NAMES if tables.has(oids[name])]
        assert found == [*NAMES[::4]] and queries.total() == 1
        many.sql("CREATE TABLE later (id int) PARTITION BY RANGE (id)")
        ((later,),) = many.query("SELECT 'later'::regclass::oid::bigint")
        queries.clear()
        for _ in range(2):
            assert tables.has(later) and not tables.has(oids["t00_all"]) and not tables.has(1)
        assert queries.total() == 3
