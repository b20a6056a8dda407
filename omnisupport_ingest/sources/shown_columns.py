"""Tables whose columns are known by name only: views, other databases, and rows of events and files.

PostgreSQL's catalog numbers columns and tables. Its numbers distinguish a renamed column from a dropped one
and an added one. Without them a column is known by its name and gets a number of ours; a rename looks like a
dropped and an added column. What is unknown about a column (its type, whether it may be NULL) is assumed
unchanged.

Of rows, the newest decides the schema of its table; rows that come late, or again, are ignored. A change is
recorded once: if its rows did not land at first, the change is known already when they do.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from omnisupport_ingest.contracts.cursor_policy import TIMES
from omnisupport_ingest.contracts.learned import LearnedColumns
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.landing.schema_changes import (
    KINDS_OF_TYPES,
    Look,
    SchemaChange,
    SchemaChanges,
    SeenColumn,
    SeenTable,
)
from omnisupport_ingest.sources.postgres.catalog.live_table import LiveColumn, LiveTable
from omnisupport_ingest.sources.postgres.catalog.recording import LiveSchema, record

NOT_INSPECTED = ""
"""``LiveTable.kind`` of a table that exists and could not be inspected."""

_OF_TYPES = KINDS_OF_TYPES | {"column_added_again"}


@dataclass(frozen=True, slots=True)
class ShownColumn:
    """A column. ``pg_type``: as of ``SeenColumn``. ``not_null``: None if unknown. ``labels``: of an enum
    type; empty if unknown."""

    name: str
    pg_type: str = ""
    not_null: bool | None = None
    labels: tuple[str, ...] = ()


def schema_by_name(
    contract: TableContract, columns: Sequence[ShownColumn], known: SeenTable | None
) -> LiveSchema:
    """Return the table of ``contract`` with ``columns``. ``known``: the table as it was last seen."""
    before = {each.name: each for each in known.columns} if known is not None else {}
    number = max((each.number for each in before.values()), default=0)
    seen = []
    for each in columns:
        was = before.get(each.name)
        if was is None:
            number += 1
            was = SeenColumn(number, each.name, each.pg_type, each.not_null or False, None, None, ())
        not_null = was.not_null if each.not_null is None else each.not_null
        kind, labels = each.pg_type or was.pg_type, each.labels or was.labels
        seen.append(SeenColumn(was.number, each.name, kind, not_null, None, None, labels))
    # A fixed order, whatever the order of a row's members is.
    seen.sort(key=lambda column: column.number)
    key = known.key if known is not None else ()
    return live_schema(contract, SeenTable(0, contract.full_name, tuple(seen), key, None))


@dataclass(frozen=True, slots=True)
class Sighting:
    """Rows of a batch with the same columns. ``at``: the time of the newest. ``place``: where the first is,
    in words. ``partial``: they may leave columns out."""

    at: datetime
    rows: int
    place: str
    partial: bool = False


@dataclass(frozen=True, slots=True)
class Recorder:
    """Records the columns in the rows of a source, before the rows land in ``epoch``.

    ``learned``: as of ``recording.record``. ``partial``: every row may leave columns out. ``now``: no row
    counts as newer than this.
    """

    changes: SchemaChanges
    learned: LearnedColumns | None
    epoch: int
    now: datetime
    partial: bool = False

    def take(self, contract: TableContract, columns: Sequence[ShownColumn], rows: Sighting) -> None:
        """Record what has changed in the table of ``contract``; ``rows`` are its rows, with ``columns``."""
        at, learned = min(rows.at, self.now), self.learned
        known = self.changes.tables().get(contract.name)
        if known is not None and known.at is not None and at <= known.at:
            return
        if (self.partial or rows.partial) and known is not None:
            there = {each.name for each in columns}
            if any(each.personal and each.name not in there for each in contract.source_columns):
                # A personal column is missing: the row may leave it out, or a new column may be it under
                # another name.
                learned = None
            columns = [
                *columns,
                *(ShownColumn(each.name) for each in known.columns if each.name not in there),
            ]
        live = schema_by_name(contract, columns, known)
        live.seen = replace(live.seen, rows=rows.rows, at=at)
        look = Look(self.epoch, place=rows.place)
        record(self.changes, look, {contract.name: contract}, {contract.name: live}, learned=learned)


def live_schema(contract: TableContract, seen: SeenTable) -> LiveSchema:
    """Return the table of ``contract`` as it was ``seen``. Which value older rows have in an added column is
    unknown."""
    columns = tuple(
        LiveColumn(each.name, each.pg_type, each.not_null, False, each.labels, None, None)
        for each in seen.columns
    )
    live = LiveTable(contract.schema, contract.table, "r", "p", "d", None, None, None, columns, ())
    return LiveSchema(live, seen)


def with_types_of(
    contract: TableContract, live: LiveTable, loose: Collection[str], changes: Sequence[SchemaChange]
) -> LiveTable:
    """Return the table ``live``, whose columns ``loose`` have the types that ``contract`` gives them.

    Their declared types say nothing of their values. Where one of ``changes`` of the table gave a column
    such a type, that type counts, unless the contract says a time: SQLite keeps times as texts.
    """
    changed = {each.column for each in changes if each.kind in _OF_TYPES}
    contracted = {
        each.name: each
        for each in contract.source_columns
        if each.name in loose and (each.name not in changed or each.type.kind in TIMES)
    }
    columns = (
        replace(each, pg_type=found.pg_type, max_length=found.max_length)
        if (found := contracted.get(each.name)) is not None
        else each
        for each in live.columns
    )
    return replace(live, columns=tuple(columns))


def live_as_contracted(
    contract: TableContract, seen: SeenTable, changes: Sequence[SchemaChange]
) -> LiveSchema:
    """Return the table of ``contract`` as it was ``seen``, for its next contract.

    Rows tell less of a type than a contract does: for them every ``varchar(20)`` is a text. And rows may
    leave out a column that exists. So a column of the contract stays as the contract has it, except for what
    one of ``changes`` of the table says about it.
    """
    changed: dict[str | None, set[str]] = {}
    for change in changes:
        changed.setdefault(change.column, set()).add(change.kind)
    contracted = {each.name: each for each in contract.source_columns}
    schema = live_schema(contract, seen)
    columns = []
    for live in schema.live.columns:
        column = contracted.get(live.name)
        if column is not None:
            kinds = changed.get(live.name, set())
            if not kinds & KINDS_OF_TYPES:
                live = replace(live, pg_type=column.pg_type, max_length=column.max_length)
            if "column_nullable" not in kinds:
                live = replace(live, not_null=not column.nullable)
            if not kinds & {"enum_value_added", "enum_values_changed"}:
                live = replace(live, labels=())
        columns.append(live)
    there = {each.name for each in columns}
    for column in contract.source_columns:
        if column.name not in there and "column_dropped" not in changed.get(column.name, ()):
            live = LiveColumn(
                column.name, column.pg_type, not column.nullable, False, (), column.max_length, None
            )
            columns.append(live)
    schema.live = replace(schema.live, columns=tuple(columns))
    return schema
