"""Tables whose columns are known by name alone: views, other databases, and the rows of events and files.

PostgreSQL's catalog numbers columns and tables. By its numbers a renamed column can be distinguished from one
that was dropped and another that was added. Without them a column is known by its name and gets a number of
ours: a rename is a column dropped and one added. What nothing tells of a column (its type, whether it may be
NULL) is taken to be as it was.

Of what comes as rows the newest row says what its table is: rows that come late, or again, say nothing. What
was recorded and did not land is known already when it does, so it is recorded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime

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


@dataclass(frozen=True, slots=True)
class ShownColumn:
    """A column. ``pg_type``: as of ``SeenColumn``. ``not_null``: None: not known. ``labels``: of an
    enum type; empty: not known."""

    name: str
    pg_type: str = ""
    not_null: bool | None = None
    labels: tuple[str, ...] = ()


def schema_by_name(
    contract: TableContract, columns: Sequence[ShownColumn], known: SeenTable | None
) -> LiveSchema:
    """Return the table of ``contract``, which has ``columns``. ``known``: as it was last seen."""
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
    # In one order, whatever the order of a row's members is.
    seen.sort(key=lambda column: column.number)
    key = known.key if known is not None else ()
    return live_schema(contract, SeenTable(0, contract.full_name, tuple(seen), key, None))


@dataclass(frozen=True, slots=True)
class Sighting:
    """Rows of a batch with the same columns. ``at``: time of the newest. ``place``: the first, in words."""

    at: datetime
    rows: int
    place: str


@dataclass(frozen=True, slots=True)
class Recorder:
    """Records the columns that the rows of a source show, before they land in ``epoch``.

    ``learned``: as of ``recording.record``. ``partial``: a row may leave columns out. ``now``: no row is
    newer.
    """

    changes: SchemaChanges
    learned: LearnedColumns | None
    epoch: int
    now: datetime
    partial: bool = False

    def take(self, contract: TableContract, columns: Sequence[ShownColumn], rows: Sighting) -> None:
        """Record what has changed in the table of ``contract``, whose ``rows`` have ``columns``."""
        at, learned = min(rows.at, self.now), self.learned
        known = self.changes.tables().get(contract.name)
        if known is not None and known.at is not None and at <= known.at:
            return
        if self.partial and known is not None:
            there = {each.name for each in columns}
            if any(each.personal and each.name not in there for each in contract.source_columns):
                # It may be left out, or have another name now: that of a new column.
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
    """Return the table of ``contract`` as it was ``seen``. Nothing tells what rows have in a column that are
    older than it."""
    columns = tuple(
        LiveColumn(each.name, each.pg_type, each.not_null, False, each.labels, None, None)
        for each in seen.columns
    )
    live = LiveTable(contract.schema, contract.table, "r", "p", "d", None, None, None, columns, ())
    return LiveSchema(live, seen, tells_defaults=False)


def live_as_contracted(
    contract: TableContract, seen: SeenTable, changes: Sequence[SchemaChange]
) -> LiveSchema:
    """Return the table of ``contract`` as it was ``seen``, for its next contract.

    What rows say of a type is less than a contract does: they call every ``varchar(20)`` a text. And a column
    that no row has may be one that rows leave out. So a column of the contract is as that says, but for what
    a change of the table (one of ``changes``) says of it.
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
