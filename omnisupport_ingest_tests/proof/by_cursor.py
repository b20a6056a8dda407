"""The way that sees no history: tables read by a cursor, deletes noticed by comparing keys.

What such a reading can see is what the tables hold at the time. So the random histories are told to tables of
a PostgreSQL, part by part, each row that differs with the time of its change; after each part the dimension
must hold exactly what the tables do, and have every other row that was read as deleted.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import psycopg2
from psycopg2.extensions import connection as Connection
from pyspark.sql import SparkSession

from omnisupport_ingest.contracts.learned import with_learned
from omnisupport_ingest.contracts.load import contract_paths, load_contracts
from omnisupport_ingest.contracts.sources import SourceDefinition, SourceKind
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.read.lake_keys import dimension_keys
from omnisupport_ingest.sources.postgres.embedded.server import EmbeddedPostgres
from omnisupport_ingest.sources.query.run import QuerySource
from omnisupport_ingest_tests.oracle.model import Event, Image, Key, TableShape
from omnisupport_ingest_tests.oracle.oracle import current_state
from omnisupport_ingest_tests.proof import compare
from omnisupport_ingest_tests.proof.compare import Difference
from omnisupport_ingest_tests.proof.platform import Platform
from omnisupport_ingest_tests.proof.policies import PROTECTIONS
from omnisupport_ingest_tests.proof.privacy import exposed, hidden_by
from omnisupport_ingest_tests.proof.tables import (
    KEY,
    LEARNABLE,
    SHAPES,
    SOURCE,
    TYPES,
    ContractShape,
    Terms,
    held,
    shapes_of,
)

CURSOR = "changed"
TERMS = {
    shape.name: Terms((), 900, 1000, beside=(CURSOR,), retyped={CURSOR: "timestamp with time zone"})
    for shape in SHAPES
}
PARTS = 4

ADDED, ADDED_BEFORE = "note_2", 1
"""A column that the tables get by a real ALTER before a part, from 0, while rows of theirs have been read."""

LOOKBACKS: Mapping[str, str] = {"tickets": "PT10M", "agents": "PT0S"}
"""By table. In the one all rows are read again in every part, in the other only those that changed."""

Rows = Mapping[Key, Image]

Older = dict[str, set[Key]]
"""By table, the rows that have not changed since it got the column, so that they may be known without it."""


def prove_by_cursor(
    events: Sequence[Event], folder: Path, spark: SparkSession, turn: tuple[int, int]
) -> Iterator[Difference]:
    """Tell ``events`` to tables in parts; what differs after one of them.

    ``turn``: before which part, from 0, contracts say of personal data what ``PROTECTIONS`` has under which
    number; the part after it they learn the column that the tables have got.
    """
    platform = Platform(folder, spark, TERMS, {})
    with ExitStack() as resources:
        server = EmbeddedPostgres(folder / "server")
        resources.callback(server.destroy)
        server.start()
        tables = resources.enter_context(closing(psycopg2.connect(server.dsn())))
        _make(tables)
        told: dict[str, Rows] = {shape.name: {} for shape in SHAPES}
        older: Older = {shape.name: set() for shape in SHAPES}
        for part in range(PARTS):
            if part == turn[0] + 1:
                for shape in SHAPES:
                    platform.learn(shape.name, ADDED)
            terms = terms_of(part, turn)
            platform.change_law(terms, {})
            name_cursors(platform)
            if part == ADDED_BEFORE:
                told = {name: _add_column(tables, name, rows) for name, rows in told.items()}
                older = {name: set(rows) for name, rows in told.items()}
            source = _source(platform.workspace, folder, server.dsn())
            for shape in SHAPES:
                whole, before = shape if part < ADDED_BEFORE else with_column(shape), told[shape.name]
                rows = rows_after(events[: len(events) * (part + 1) // PARTS], whole)
                _tell(tables, whole, before, rows)
                older[shape.name] = {key for key in older[shape.name] if rows.get(key) == before[key]}
                told[shape.name] = rows
            assert source.sync().finished
            platform.catch_up()
            lake = dimension_keys(platform.workspace, SOURCE)
            assert not source.compare(lake).faults
            for each in lake.values():
                each.close()
            platform.catch_up()
            shapes = shapes_of(terms, platform.tokens)
            for shape in shapes:
                name = shape.name
                yield from differences(platform.workspace, shape, told[name], older[name])
            values = hidden_by(terms, shapes).values((event, None) for event in events)
            for table, found in exposed(platform.workspace, values, compare._rows):
                yield Difference(table, "values that a policy hides", found, [])


def terms_of(part: int, turn: tuple[int, int]) -> Mapping[str, Terms]:
    before, number = turn
    protecting = PROTECTIONS[number if part >= before else 0]
    learned = {table: {ADDED: LEARNABLE[table][ADDED]} if part > before else {} for table in TERMS}
    return {table: each.under(protecting, table, learned[table]) for table, each in TERMS.items()}


def with_column(shape: TableShape) -> TableShape:
    """The table with the column that it gets; a row that no event gives a value has the default in it."""
    default = LEARNABLE[shape.name][ADDED]
    return replace(shape, columns=(*shape.columns, ADDED), defaults=((ADDED, default),))


def _add_column(connection: Connection, table: str, rows: Rows) -> Rows:
    """Give the table a column, with what the contract says of older rows; its ``rows`` then."""
    default = LEARNABLE[table][ADDED]
    with connection, connection.cursor() as cursor:
        # A default that is a constant changes no row, and no cursor of one.
        cursor.execute(f"ALTER TABLE {table} ADD {ADDED} text DEFAULT %s", (default,))
        cursor.execute(f"ALTER TABLE {table} ALTER {ADDED} DROP DEFAULT")
    return {key: {**row, ADDED: default} for key, row in rows.items()}


def name_cursors(platform: Platform) -> None:
    """Have the contracts name the cursor, and the platform take them."""
    workspace = platform.workspace
    folder = workspace.settings.contracts_dir
    assert folder is not None
    for path in contract_paths(folder):
        document = json.loads(path.read_text())
        table = document["x-cdc"]["table"]
        document["x-cdc"]["cursor"] = {"field": CURSOR, "lookback": LOOKBACKS[table]}
        path.write_text(json.dumps(document))
    contracts = load_contracts(folder, partial(with_learned, workspace.home.path))
    platform.workspace = Workspace(workspace.settings, workspace.home, contracts, workspace.decisions)


def _make(connection: Connection) -> None:
    with connection, connection.cursor() as cursor:
        for shape in SHAPES:
            columns = [f"{name} bigint" for name in KEY]
            columns += [f'"{name}" {TYPES.get(name, "text")}' for name in shape.columns]
            key = ", ".join(KEY)
            cursor.execute(
                f"CREATE TABLE {shape.name} ({', '.join(columns)}, {CURSOR} timestamptz NOT NULL, "
                f"PRIMARY KEY ({key}))"
            )
            cursor.execute(f"CREATE INDEX ON {shape.name} ({CURSOR}, {key})")


def _source(workspace: Workspace, folder: Path, dsn: str) -> QuerySource:
    connection = folder / "connection"
    connection.touch(mode=0o600)
    connection.write_text(dsn)
    definition = SourceDefinition(SOURCE, SourceKind.QUERY, "Tables.", connection_file=str(connection))
    return QuerySource.of(definition, workspace.contracts, workspace.home)


def rows_after(events: Sequence[Event], shape: TableShape) -> Rows:
    """The rows that stand after ``events``. In a table no value is unknown: what is unresolved is NULL."""
    return {
        key: {name: row.values.get(name) for name in shape.columns}
        for key, row in current_state(events, shape).items()
        if not row.ended
    }


def _tell(connection: Connection, shape: TableShape, before: Rows, rows: Rows) -> None:
    """Bring the table from ``before`` to ``rows``: what differs in one transaction."""
    names = (*KEY, *shape.columns)
    values = ", ".join(f"%s::{'bigint' if name in KEY else TYPES.get(name, 'text')}" for name in names)
    anew = ", ".join(f'"{name}" = excluded."{name}"' for name in (*shape.columns, CURSOR))
    columns = ", ".join(f'"{name}"' for name in (*names, CURSOR))
    with connection, connection.cursor() as cursor:
        for key in before.keys() - rows.keys():
            cursor.execute(f"DELETE FROM {shape.name} WHERE ({', '.join(KEY)}) = (%s, %s)", key)
        for key, row in rows.items():
            if before.get(key) != row:
                cursor.execute(
                    f"INSERT INTO {shape.name} ({columns}) "
                    f"VALUES ({values}, clock_timestamp()) "
                    f"ON CONFLICT ({', '.join(KEY)}) DO UPDATE SET {anew}",
                    (*key, *(row[name] for name in shape.columns)),
                )


def differences(
    workspace: Workspace, shape: ContractShape, rows: Rows, older: Collection[Key]
) -> Iterator[Difference]:
    contract = compare._contract(workspace, shape)
    found = {compare._key(row): row for row in compare._rows(workspace.dimension(contract))}
    mark = shape.soft_delete_column or ""
    for key in sorted(found.keys() | rows.keys()):
        layer, lane = f"dim_{shape.name} by cursor", int(key[0])
        here = found.get(key)
        if key not in rows:
            assert here is not None
            if not here["_cdc_is_deleted"]:
                yield Difference(layer, str(key), here, "a deleted row", lane)
            continue
        due = {name: held(shape, name, text) for name, text in rows[key].items() if name in shape.columns}
        wanted = (rows[key][mark] is not None, due)
        values = {} if here is None else dict(compare._values(here, shape))
        values.pop(CURSOR, None)
        if key in older and ADDED not in values and ADDED not in dict(shape.defaults):
            # A policy leaves nothing of a default, and no event has said the value.
            due.pop(ADDED, None)
        told = None if here is None else (here["_cdc_is_deleted"], values)
        if told != wanted:
            yield Difference(layer, str(key), told, wanted, lane)
