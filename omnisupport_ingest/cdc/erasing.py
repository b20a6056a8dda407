"""Erasing: what is left of an event of a row that a person had erased, once the event is judged.

Judging looks at the whole event, so an erasure changes no verdict, no collision and no review. Only
then the values go: of the row images the key's columns stay, and every other column counts as one that
was not sent. The fold knows such columns: they are not known, and nothing is made up for them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import pyarrow as pa

from omnisupport_ingest.cdc.images import read_image
from omnisupport_ingest.cdc.life import Position
from omnisupport_ingest.contracts.names import TableName
from omnisupport_ingest.json_values import compact

ERASED = "erased"
"""The column that tells which events were erased, for whoever must hash their content again."""

_VALUES = ("before", "after", "unchanged", "envelope")

KeyPlace = tuple[str, str, str]
"""Schema, table, and hash of the key."""


@dataclass(frozen=True, slots=True)
class Span:
    """Events of a key above ``after`` (null: from the first one) and up to ``through``, included."""

    after: Position | None
    through: Position

    def holds(self, position: Position) -> bool:
        return position <= self.through and (self.after is None or position > self.after)


@dataclass(frozen=True)
class Erasures:
    """What was erased of a source, by key; false where nothing was."""

    spans: Mapping[KeyPlace, Collection[Span]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.spans)

    def holds(self, place: TableName, key: str | None, position: Position) -> bool:
        """Whether the event of ``key`` in the table ``place`` (schema, table) was erased."""
        if key is None or place not in self._tables:
            return False
        return any(span.holds(position) for span in self.spans.get((*place, key_hash(key)), ()))

    @cached_property
    def _tables(self) -> frozenset[TableName]:
        return frozenset((schema, table) for schema, table, _ in self.spans)


def key_hash(key: str) -> str:
    """SHA-256 of the text of a key, as an event has it."""
    return hashlib.sha256(key.encode()).hexdigest()


def erase_batches(
    batches: Iterable[pa.RecordBatch],
    erasures: Erasures,
    keys: Mapping[TableName, Collection[str]],
) -> Iterator[pa.RecordBatch]:
    """Take the values out of erased events, and add the column ``ERASED``.

    In: columns of ``RAW_TYPE`` and any others. ``keys``: the key's columns, by schema and table.
    """
    for batch in batches:
        erased = _erased(batch, erasures)
        columns = {name: batch.column(name) for name in batch.schema.names}
        if any(erased):
            columns |= _without_values(batch, erased, keys)
        names = [*columns, ERASED]
        yield pa.RecordBatch.from_arrays([*columns.values(), pa.array(erased, pa.bool_())], names=names)


def _erased(batch: pa.RecordBatch, erasures: Erasures) -> list[bool]:
    names = ("source_schema", "source_table", "key", "epoch", "commit_lsn", "ordinal")
    rows = zip(*(batch.column(name).to_pylist() for name in names), strict=True)
    return [
        erasures.holds((schema, table), key, (epoch, lsn, ordinal))
        for schema, table, key, epoch, lsn, ordinal in rows
    ]


def _without_values(
    batch: pa.RecordBatch, erased: list[bool], keys: Mapping[TableName, Collection[str]]
) -> dict[str, pa.Array]:
    values = {name: batch.column(name).to_pylist() for name in _VALUES}
    tables = zip(
        batch.column("source_schema").to_pylist(), batch.column("source_table").to_pylist(), strict=True
    )
    for row, (gone, place) in enumerate(zip(erased, tables, strict=True)):
        if gone:
            after, unchanged = _blanked(values["after"][row], values["unchanged"][row], keys.get(place, ()))
            values["after"][row], values["unchanged"][row] = after, unchanged
            values["before"][row] = values["envelope"][row] = None
    return {name: pa.array(values[name], batch.schema.field(name).type) for name in _VALUES}


def _blanked(
    after: str | None, unchanged: Collection[str] | None, key: Collection[str]
) -> tuple[str | None, Collection[str] | None]:
    """The row image without its values, and the columns that are not sent then.

    An image that cannot be read is gone whole: what is a value in it is not known.
    """
    image = read_image(after)
    if image is None:
        return None, unchanged
    kept = {name: image[name] for name in key if name in image}
    text = compact(kept)
    return text, sorted({*(unchanged or ()), *(name for name in image if name not in kept)}) or None
