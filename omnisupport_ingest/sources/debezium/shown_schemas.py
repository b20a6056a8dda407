"""Collects the schemas of the rows of a batch, and records them when the batch lands.

The columns of a row are those of its ``after``, which has every column of its table; their types are in the
schema beside it, if there is one. Rows that were written alike count together, so many lines cost as much as
one. A single row of the flat form without a schema may be written by something else than Debezium, and leave
columns out: it does not show that a column was dropped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeAlias

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.sources.debezium.changes import Change
from omnisupport_ingest.sources.debezium.connect_types import shown_column
from omnisupport_ingest.sources.shown_columns import Recorder, Sighting

First: TypeAlias = int | bytes
"""Which row was the first of several: its number in its file, or its line if it is of no file."""

_PARTS = ("type", "name", "optional", "parameters", "items")
"""The members of a column's Connect schema that define its type."""


@dataclass(frozen=True, slots=True)
class RowSchema:
    """The columns of a row. ``written``: their names and types as one text. ``fields``: the Connect schemas
    of columns that have one. ``flat``: they are of the flat form."""

    names: tuple[str, ...]
    fields: Mapping[str, Mapping[str, Any]]
    written: str
    flat: bool = False

    @classmethod
    def of(
        cls, row: Mapping[str, Any], fields: Mapping[str, Mapping[str, Any]], *, flat: bool = False
    ) -> RowSchema:
        """Return the schema of ``row``, column → value."""
        names = tuple(row)
        parts = [[fields[name].get(part) for part in _PARTS] for name in names if name in fields]
        return cls(names, fields, f"{names}{parts}{flat}", flat)


@dataclass(slots=True)
class _Shown:
    """Rows of one table with one schema. ``latest``: the time of the newest row."""

    contract: TableContract
    schema: RowSchema
    first: First
    latest: datetime
    rows: int = 0


class ShownSchemas:
    """Collects the schemas of the rows of one batch."""

    def __init__(self) -> None:
        self._shown: dict[tuple[str, str], _Shown] = {}
        self._last: dict[str, RowSchema] = {}

    def add_row(self, contract: TableContract, change: Change, first: First, at: datetime) -> None:
        """Add the row of ``change``, if it has one; ``at``: its time."""
        if change.after is None:
            return
        schema, shown = self._last.get(contract.name), (tuple(change.after), change.fields, change.flat)
        # Nearly every row has the schema of the row before it.
        if schema is None or (schema.names, schema.fields, schema.flat) != shown:
            schema = RowSchema.of(change.after, change.fields, flat=change.flat)
            self._last[contract.name] = schema
        self.add(contract, schema, first, at)

    def add(
        self, contract: TableContract, schema: RowSchema, first: First, latest: datetime, rows: int = 1
    ) -> None:
        """Add ``rows`` (their number) of the table of ``contract``; ``latest``: the time of the newest."""
        key = contract.name, schema.written
        shown = self._shown.get(key)
        if shown is None:
            shown = self._shown[key] = _Shown(contract, schema, first, latest)
        elif isinstance(first, int) and isinstance(shown.first, int):
            shown.first = min(shown.first, first)
        shown.latest = max(shown.latest, latest)
        shown.rows += rows

    def record(self, into: Recorder, place: Callable[[First], str]) -> None:
        """Record what has changed since the last batch. ``place`` returns where a row is, in words."""
        for shown in sorted(self._shown.values(), key=lambda each: each.latest):
            columns = [shown_column(each, shown.schema.fields.get(each, {})) for each in shown.schema.names]
            partial = shown.rows == 1 and shown.schema.flat and not shown.schema.fields
            rows = Sighting(shown.latest, shown.rows, place(shown.first), partial)
            into.take(shown.contract, columns, rows)


def place_of_record(line: First) -> str:
    """Return where a record of Kafka is, in words. ``line``: its line, as ``kafka.records`` writes it."""
    found = _RECORD.match(line) if isinstance(line, bytes) else None
    if found is None:
        return "a topic"
    topic, partition, offset = (json.loads(part) for part in found.groups())
    return f"{topic}[{partition}], offset {offset}"


_RECORD = re.compile(rb'\{"topic":("(?:[^"\\]|\\.)*"),"partition":([0-9]+),"offset":([0-9]+)[,}]')
