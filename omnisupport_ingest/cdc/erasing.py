"""Remove the values of a row that a person had erased from its events, once they are judged.

Judging sees the whole event, so an erasure changes no verdict, no collision and no review. Then the values
are removed: a row image keeps the key's columns, and every other column counts as not sent. The fold leaves
such columns unresolved, as always, and invents nothing for them.
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
"""Column that marks erased events, so that accepted ones get a new hash of their content."""

_VALUES = ("before", "after", "unchanged", "envelope")

KeyPlace = tuple[str, str, str]
"""Schema, table, and hash of the key."""


@dataclass(frozen=True, slots=True)
class Span:
    """Events of a key above ``after`` (None: from the first one) up to and including ``through``."""

    after: Position | None
    through: Position

    def holds(self, position: Position) -> bool:
        return position <= self.through and (self.after is None or position > self.after)


@dataclass(frozen=True)
class Erasures:
    """What was erased of a source, by key. False if nothing was."""

    spans: Mapping[KeyPlace, Collection[Span]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.spans)

    def holds(self, place: TableName, key: str | None, position: Position) -> bool:
        """Whether the event of ``key`` at ``position`` was erased. ``place``: schema and table."""
        if key is None or place not in self._tables:
            return False
        return any(span.holds(position) for span in self.spans.get((*place, key_hash(key)), ()))

    @cached_property
    def _tables(self) -> frozenset[TableName]:
        return frozenset((schema, table) for schema, table, _ in self.spans)


def key_hash(key: str) -> str:
    """Return the SHA-256 of a key's text, as events have it, in hexadecimal digits."""
    return hashlib.sha256(key.encode()).hexdigest()


def erase_batches(
    batches: Iterable[pa.RecordBatch],
    erasures: Erasures,
    keys: Mapping[TableName, Collection[str]],
) -> Iterator[pa.RecordBatch]:
    """Remove the values of erased events, and add the boolean column ``ERASED``.

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
    """Return the row image with its key alone, and the columns that then count as not sent.

    An image that cannot be read is removed whole, because nobody knows which parts of it are values.
    """
    image = read_image(after)
    if image is None:
        return None, unchanged
    kept = {name: image[name] for name in key if name in image}
    text = compact(kept)
    return text, sorted({*(unchanged or ()), *(name for name in image if name not in kept)}) or None
