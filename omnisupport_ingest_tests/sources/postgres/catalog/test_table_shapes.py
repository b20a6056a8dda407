"""Tables of any shape: contracts drafted from the source, and every row and change landed under its key."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from omnisupport_ingest.contracts.load import contract_of
from omnisupport_ingest.contracts.model import Contracts
from omnisupport_ingest.contracts.names import lake_names
from omnisupport_ingest.layers.dimension import dimensions, net_changes
from omnisupport_ingest.layers.events import deduped, raw
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.read.compare import compare
from omnisupport_ingest.sources.postgres.catalog.live_table import read_live_tables
from omnisupport_ingest.sources.postgres.catalog.new_contract import all_tables, draft
from omnisupport_ingest.sources.postgres.slot.slot import consistent_snapshot
from omnisupport_ingest.sources.postgres.snapshot.comparison_rows import write_rows_at
from omnisupport_ingest_tests.sources.postgres.source_under_test import SOURCE, SourceUnderTest, folded


def with_contracts(source: SourceUnderTest) -> SourceUnderTest:
    """``source`` with a contract for each of its tables."""
    with source.connected() as connection:
        live = all_tables(read_live_tables(connection).values())
    names = lake_names([(table.schema, table.table) for table in live], {})
    for table in live:
        name = names[table.schema, table.table]
        document = draft(table, source=SOURCE, name=name, owner="team:tests").document
        source.tables.append(contract_of(document, Path(f"{name}.json")))
    return source


def test_odd_names_composite_and_text_keys(source: SourceUnderTest) -> None:
    source.sql(
        'CREATE SCHEMA "My Schema"',
        'CREATE TABLE "My Schema"."Weird ""Name"" / 50%" ("Größe" text, "has space" text, "Id" int,'
        ' PRIMARY KEY ("Id", "Größe"))',
        'CREATE TABLE "表" (id text PRIMARY KEY, "列" text)',
        'CREATE TABLE "a.b" (id text COLLATE "C" PRIMARY KEY)',
        'INSERT INTO "My Schema"."Weird ""Name"" / 50%" VALUES (\'groß\', \'kept\', 7)',
        "INSERT INTO \"表\" VALUES ('', '値'), (E'tab\\tline\\n\"quote\"', NULL)",
    )
    with_contracts(source).catch_up()
    source.sql(
        'UPDATE "My Schema"."Weird ""Name"" / 50%" SET "Größe" = \'größer\'',
        "UPDATE \"表\" SET \"列\" = '新' WHERE id = ''",
        "INSERT INTO \"a.b\" VALUES ('Z')",
    )
    source.catch_up()
    events = source.events()
    assert folded(events, 'Weird "Name" / 50%') == {
        json.dumps(["7", "größer"]): {"Größe": "größer", "has space": "kept", "Id": "7"}
    }
    assert folded(events, "表") == {
        json.dumps([""]): {"id": "", "列": "新"},
        json.dumps(['tab\tline\n"quote"']): {"id": 'tab\tline\n"quote"', "列": None},
    }
    assert folded(events, "a.b") == {json.dumps(["Z"]): {"id": "Z"}}


def test_one_table_name_in_two_schemas(source: SourceUnderTest) -> None:
    source.sql(
        "CREATE SCHEMA archive",
        "CREATE TABLE orders (id int PRIMARY KEY)",
        "CREATE TABLE archive.orders (id int PRIMARY KEY)",
        "INSERT INTO orders VALUES (1)",
        "INSERT INTO archive.orders VALUES (2)",
    )
    with_contracts(source).catch_up()
    source.sql("INSERT INTO archive.orders VALUES (3)")
    source.catch_up()
    rows = [(event.source_schema, event.key) for event in source.events("r", "c")]
    assert sorted(rows) == [("archive", '["2"]'), ("archive", '["3"]'), ("public", '["1"]')]
    boundaries = [event.source_schema for event in source.events("b")]
    assert sorted(boundaries) == ["archive", "public"]


def test_a_wide_table_and_an_empty_one(source: SourceUnderTest) -> None:
    columns = ", ".join(f"c{number:03d} {'int' if number % 2 else 'text'}" for number in range(200))
    source.sql(
        f"CREATE TABLE wide (id int PRIMARY KEY, {columns})",
        "CREATE TABLE nothing_in_it (id int PRIMARY KEY)",
        "INSERT INTO wide (id, c000, c199) VALUES (1, 'first', 199)",
    )
    with_contracts(source).catch_up()
    source.sql("UPDATE wide SET c100 = 'middle'")
    source.catch_up()
    row = folded(source.events(), "wide")['["1"]']
    assert len(row) == 201
    assert (row["c000"], row["c100"], row["c199"], row["c001"]) == ("first", "middle", "199", None)
    assert [event.source_table for event in source.events("b")] == ["nothing_in_it", "wide"]


@pytest.mark.slow
def test_a_hundred_tables_are_one_start(source: SourceUnderTest) -> None:
    source.sql(*(f"CREATE TABLE t{number:03d} (id int PRIMARY KEY, v varchar(9))" for number in range(100)))
    source.sql(*(f"INSERT INTO t{number:03d} VALUES (1, 'v')" for number in range(0, 100, 2)))
    with_contracts(source)
    assert len(source.tables) == 100
    began = time.monotonic()
    source.catch_up()
    # Linear in the number of tables; a start that asked the server in vain for each would not be.
    assert time.monotonic() - began < 60
    assert len(source.events("b")) == 100
    assert len(source.events("r")) == 50


ODD = '"qu""ote\'s / 50% = {x}"'


@pytest.mark.slow
def test_odd_names_and_types_are_the_same_in_the_lake(source: SourceUnderTest, spark: SparkSession) -> None:
    source.sql(
        "CREATE SCHEMA archive",
        "CREATE TYPE mood AS ENUM ('fine', 'so so')",
        "CREATE DOMAIN ids AS int[]",
        f'CREATE TABLE {ODD} ("Größe" text, "Id" int, "order-id" int, "a:b" mood, "50%" ids,'
        ' "1st" varchar(9)[], "has space" text, twice int GENERATED ALWAYS AS ("Id" * 2) STORED,'
        ' PRIMARY KEY ("Id", "Größe"))',
        f"CREATE TABLE archive.{ODD} (id int PRIMARY KEY, span interval, place point, n numeric)",
        f"INSERT INTO {ODD} VALUES ('groß', 7, 1, 'so so', '{{1,2}}', '{{a,NULL}}', 'h')",
        f"INSERT INTO {ODD} VALUES ('klein', 8)",
        f"INSERT INTO archive.{ODD} VALUES (1, '1 day 2 hours', '(1,2)', 'NaN')",
        f"INSERT INTO archive.{ODD} VALUES (2)",
        "CREATE TABLE prices (since timestamptz, n numeric(5,2), price int, PRIMARY KEY (since, n))",
        "INSERT INTO prices VALUES ('-infinity', 'NaN', 1), ('2026-01-01', 'NaN', 2), ('infinity', 1, 3)",
    )
    with_contracts(source).catch_up()
    source.sql(
        "UPDATE prices SET price = price + 10",
        "DELETE FROM prices WHERE since = 'infinity'",
        f'UPDATE {ODD} SET "Größe" = \'größer\', "50%" = \'{{3}}\' WHERE "Id" = 7',
        f"DELETE FROM archive.{ODD} WHERE id = 2",
    )
    source.catch_up()
    is_the_same_in_the_lake(source, spark)


@pytest.mark.slow
def test_keyless_table_is_the_same_in_the_lake_under_a_declared_key(
    source: SourceUnderTest, spark: SparkSession
) -> None:
    source.sql("CREATE TABLE lines (invoice int, line int, v text, PRIMARY KEY (invoice, line))")
    with_contracts(source)
    # Drafted while there was a key, or written by hand: the contract says what nothing at the source does.
    source.sql("ALTER TABLE lines DROP CONSTRAINT lines_pkey", "ALTER TABLE lines REPLICA IDENTITY FULL")
    source.sql("INSERT INTO lines SELECT n / 10, n % 10, 'v' || n FROM generate_series(1, 40) n")
    source.sql("CREATE TABLE journal (at int, what text)", "ALTER TABLE journal REPLICA IDENTITY FULL")
    source.catch_up()
    source.sql(
        f"ALTER PUBLICATION {source.slot} ADD TABLE journal",
        "INSERT INTO journal VALUES (1, 'a'), (2, 'b')",
        "UPDATE journal SET what = 'c' WHERE at = 1",
        "DELETE FROM journal WHERE at = 2",
        "INSERT INTO lines VALUES (9, 1, 'new')",
        "UPDATE lines SET v = NULL WHERE invoice = 2",
        "UPDATE lines SET invoice = 8 WHERE invoice = 3",
        "DELETE FROM lines WHERE line = 7",
    )
    source.catch_up()
    workspace = is_the_same_in_the_lake(source, spark)
    # No contract says which row a change of journal is about, so nothing is refused for it.
    found = {}
    for layer in (workspace.raw, workspace.quarantine, workspace.deduped):
        table = layer(SOURCE).open()
        rows = table.read(spark, table.all_files()).filter("source_table = 'journal'").collect()
        assert {row["key"] for row in rows} <= {None}
        found[layer.__name__] = sorted(row["op"] for row in rows)
    assert found == {"raw": [*"ccdu"], "quarantine": [], "deduped": [*"ccdu"]}


def is_the_same_in_the_lake(source: SourceUnderTest, spark: SparkSession) -> Workspace:
    """Take what has landed through every layer; every dimension is the source's."""
    workspace = Workspace(source.settings, source.home, Contracts(tuple(source.tables)))
    windows = sorted({file.window for batch in source.manifests() for file in batch.files})
    raw.materialize(workspace, spark, SOURCE, windows, "run")
    deduped.materialize(workspace, spark, SOURCE, windows, "run")
    for contract in source.tables:
        net_changes.materialize(workspace, spark, contract, windows, "run")
        dimensions.update(workspace, spark, contract, "run")
    with consistent_snapshot(source.dsn) as (_, snapshot):
        for contract in source.tables:
            expected = source.home_folder / f"{contract.name}.parquet"
            write_rows_at(source.dsn, source.slot, snapshot, contract, expected, sample=None)
            files = [file.uri for file in workspace.dimension(contract).open().all_files()]
            compared = compare(contract, expected, files)
            assert compared.holds, (contract.full_name, compared)
            assert compared.source_rows == compared.current_rows > 0
    return workspace
