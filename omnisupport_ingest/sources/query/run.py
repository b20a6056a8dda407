"""A sync of a defined cursor source: its connection, cursors, lease and pause."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from omnisupport_ingest.contracts.learned import LearnedColumns
from omnisupport_ingest.contracts.model import Contracts, TableContract
from omnisupport_ingest.contracts.sources import SourceDefinition
from omnisupport_ingest.contracts.subject_keys import FILE as SUBJECT_KEYS
from omnisupport_ingest.contracts.subject_keys import SubjectKeys
from omnisupport_ingest.home import Home
from omnisupport_ingest.landing.manifest import Manifest
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.sources.encrypting import EncryptedLanding
from omnisupport_ingest.sources.postgres.capture.requests import PauseRequest
from omnisupport_ingest.sources.postgres.session.connection import at_place_of
from omnisupport_ingest.sources.postgres.session.lease import take_lease
from omnisupport_ingest.sources.query.anew import refresh
from omnisupport_ingest.sources.query.batches import Inlet
from omnisupport_ingest.sources.query.compare import Comparison, LakeKeys, compare
from omnisupport_ingest.sources.query.cursor import CursorColumn
from omnisupport_ingest.sources.query.errors import QueryPaused, QueryRefused
from omnisupport_ingest.sources.query.postgres import PostgresReader
from omnisupport_ingest.sources.query.reader import Reader
from omnisupport_ingest.sources.query.schemas import schemas_now
from omnisupport_ingest.sources.query.state import QueryState
from omnisupport_ingest.sources.query.sync import SyncReport, rewind, sync
from omnisupport_ingest.windows import WindowGrid

_POSTGRES = ("postgresql:", "postgres:", "postgresql+psycopg2:")


@dataclass(frozen=True)
class QuerySource:
    """A source of the kind ``query`` in a ``home``. ``run``: the home's folder of locks. ``keys``: the keys
    of its subjects."""

    definition: SourceDefinition
    tables: tuple[TableContract, ...]
    store: LandingStore
    grid: WindowGrid
    home: Path
    run: Path
    keys: SubjectKeys

    @classmethod
    def of(cls, definition: SourceDefinition, contracts: Contracts, home: Home) -> Self:
        """Return the source of ``definition`` in ``home``.

        Raises ``QueryRefused`` if no table of it names a cursor. If only some do, a sync refuses the others.
        """
        tables = tuple(each.as_captured for each in definition.tables(contracts))
        if not tables:
            raise QueryRefused(
                f"No contract names the source {definition.name}, so no table of it is read.",
                fix=f"{definition.first_contracts}, and run this again.",
            )
        _require_a_cursor(tables)
        store = LandingStore(home.landing, definition.name)
        keys = SubjectKeys(home.path / SUBJECT_KEYS)
        return cls(definition, tables, store, home.grid, home.path, home.run, keys)

    def inlet(self, landed: Callable[[Manifest], None] = lambda _batch: None) -> Inlet:
        """Return where its rows land. ``landed`` is called with each batch."""
        return Inlet(
            self.store,
            self.grid,
            self.tables,
            Path(self.definition.path).name,
            self.definition.page_rows,
            landed=landed,
            as_landed=EncryptedLanding(self.definition.name, self.keys, lambda: self.tables),
            learned=LearnedColumns(self.home, self.definition.name),
        )

    def sync(
        self,
        *,
        seconds: float | None = None,
        landed: Callable[[Manifest], None] = lambda _batch: None,
        anew: Sequence[TableContract] = (),
        reason: str = "",
        no_further_than: Mapping[str, str | None] | None = None,
    ) -> SyncReport:
        """Land new rows, for about ``seconds`` (None: to the end).

        ``anew``: tables to read whole, in an epoch that begins for ``reason``. ``no_further_than``: cursors
        by ``schema.table`` (None: the beginning); a table with a higher cursor is read again from there.
        Raises ``CaptureRunning`` if another process reads the source, ``QueryPaused``, and the errors of
        ``sync``.
        """
        pause = self.raise_if_paused()
        if anew:
            # Else an epoch would begin in which nothing can be read.
            _require_a_cursor(anew)
        until = None if seconds is None else time.monotonic() + seconds
        with (
            take_lease(self.run, self.definition.name),
            closing(open_reader(self.definition.connection_text())) as reader,
            QueryState(self.store.folder) as state,
        ):
            inlet = self.inlet(landed)
            for table in self.tables:
                if table.full_name in (no_further_than or {}):
                    rewind(table, state, (no_further_than or {})[table.full_name])
            if anew:
                refresh(inlet, state, anew, reason, schemas_now(reader, self.store, anew))
            return sync(
                inlet,
                reader,
                state,
                stopped=lambda: pause.present or (until is not None and time.monotonic() > until),
            )

    def compare(self, lake: Mapping[str, LakeKeys]) -> Comparison:
        """Land the differences between the keys of the source and of ``lake`` (by ``schema.table``).

        A pause ends it between two ranges of keys. The caller raises the errors in ``faults``. Raises the
        errors of ``compare``, ``QueryPaused`` and ``CaptureRunning``.
        """
        pause = self.raise_if_paused()
        with (
            take_lease(self.run, self.definition.name),
            closing(open_reader(self.definition.connection_text())) as reader,
            QueryState(self.store.folder) as state,
        ):
            return compare(self.inlet(), reader, state, lake, stopped=lambda: pause.present)

    def raise_if_paused(self) -> PauseRequest:
        """Raise ``QueryPaused`` if the source is paused; else return where a pause is requested."""
        pause = PauseRequest(self.store.folder)
        found = pause.read()
        if found is not None:
            raise QueryPaused(
                f"The source {self.definition.name} is paused {found}.",
                fix=f"omnisupport-ingest source resume {self.definition.name}",
            )
        return pause


def _require_a_cursor(tables: Sequence[TableContract]) -> None:
    """Raise ``QueryRefused`` if none of ``tables`` names a cursor."""
    if all(each.cursor is None for each in tables):
        CursorColumn.of(tables[0])


def open_reader(connection: str) -> Reader:
    """Return a reader of the database at ``connection`` (libpq's form, or a SQLAlchemy URL)."""
    dsn = postgres_dsn(connection)
    if dsn is not None:
        return PostgresReader(dsn)
    from omnisupport_ingest.sources.query.dialect import DialectReader

    return DialectReader(connection)


def postgres_dsn(connection: str) -> str | None:
    """Return libpq's form of ``connection``; None if it is not to a PostgreSQL."""
    scheme = connection.partition("//")[0]
    if "://" in connection and scheme not in _POSTGRES:
        return None
    return at_place_of(connection, connection.replace("postgresql+psycopg2:", "postgresql:", 1))
