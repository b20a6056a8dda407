"""A table of tickets on a server without logical decoding, read by ``updated_at``."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from psycopg2.extensions import connection as Connection

from omnisupport_ingest.contracts.load import TableContract, contract_of
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.sources.query.anew import refresh
from omnisupport_ingest.sources.query.batches import Inlet
from omnisupport_ingest.sources.query.postgres import PostgresReader
from omnisupport_ingest.sources.query.reader import Reader
from omnisupport_ingest.sources.query.state import QueryState
from omnisupport_ingest.sources.query.sync import SyncReport, sync
from omnisupport_ingest.windows import WindowGrid, WindowSize

TABLE = """
CREATE TABLE tickets (
    id bigint PRIMARY KEY, subject text, updated_at timestamptz DEFAULT clock_timestamp()
)
"""
INDEX = "CREATE INDEX tickets_cursor ON tickets (updated_at, id)"
SOURCE = "desk"
GRID = WindowGrid(WindowSize(60), datetime(2026, 1, 1, tzinfo=UTC))


def contract(cursor: dict[str, Any] | None = None, **columns: dict[str, Any]) -> TableContract:
    """That of ``tickets``, with ``cursor`` as its policy and more columns."""
    return contract_of(contract_document(cursor, **columns), Path("tickets.json"))


def contract_document(
    cursor: dict[str, Any] | None = None, *, schema: str = "public", **columns: dict[str, Any]
) -> dict[str, Any]:
    """The document of that contract."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Tickets",
        "description": "Tickets of a desk.",
        "type": "object",
        "required": ["id"],
        "additionalProperties": True,
        "properties": {
            "id": {"type": "integer", "x-pg-type": "bigint", "description": "Key."},
            "subject": {"type": ["string", "null"], "x-pg-type": "text", "description": "Subject."},
            "updated_at": {
                "type": ["string", "null"],
                "x-pg-type": "timestamp with time zone",
                "description": "Last change.",
            },
            **columns,
        },
        "x-cdc": {
            "version": "1.0.0",
            "source": SOURCE,
            "schema": schema,
            "table": "tickets",
            "owner": "team:desk",
            "key": ["id"],
            "events": {"soft_delete_column": None},
            "cursor": cursor or {"field": "updated_at", "lookback": "PT5M"},
        },
    }


@dataclass
class Desk:
    """The table, and a home that reads it."""

    connection: Connection | None
    dsn: str
    folder: Path
    table: TableContract = field(default_factory=contract)
    page_rows: int = 1000
    grid: WindowGrid = GRID

    @property
    def store(self) -> LandingStore:
        return LandingStore(self.folder, SOURCE)

    def run(self, sql: str) -> None:
        assert self.connection is not None
        with self.connection.cursor() as cursor:
            cursor.execute(sql)

    def inlet(self) -> Inlet:
        return Inlet(self.store, self.grid, (self.table,), "desk.json", self.page_rows)

    def sync(
        self, *, stopped: Callable[[], bool] = lambda: False, reader: Reader | None = None
    ) -> SyncReport:
        reader = reader or PostgresReader(self.dsn)
        try:
            with QueryState(self.store.folder) as state:
                report = sync(self.inlet(), reader, state, stopped=stopped)
            if report.faults:
                raise report.faults[0]
            return report
        finally:
            reader.close()

    def refresh(self, reason: str = "asked for") -> int:
        with QueryState(self.store.folder) as state:
            return refresh(self.inlet(), state, [self.table], reason)

    def events(self) -> list[dict[str, Any]]:
        """Every event that has landed, with its window, in landing order."""
        found: list[dict[str, Any]] = []
        for batch in sorted(self.store.manifests(), key=lambda each: each.arrival.landed_at):
            self.store.verify(batch)
            for file in batch.files:
                rows = pq.read_table(self.store.path_of(file)).to_pylist()
                found += [row | {"window": file.window} for row in rows]
        return found

    def subjects(self) -> dict[int, str | None]:
        """What the newest version of each row says, by position: the fold of what landed."""
        latest: dict[int, tuple[tuple[int, int], str | None]] = {}
        for event in self.events():
            if event["key"] is None or event["misplaced"]:
                continue
            number = int(json.loads(event["key"])[0])
            at = event["epoch"], event["ordinal"]
            if number not in latest or latest[number][0] <= at:
                latest[number] = at, json.loads(event["after"])["subject"]
        return {number: subject for number, (_, subject) in sorted(latest.items())}


def lite_contract(**columns: dict[str, Any]) -> TableContract:
    """That of the same table in SQLite, whose only schema is ``main``."""
    return replace(contract(None, **columns), schema="main")
