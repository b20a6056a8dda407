"""Remove the values of a row that a person had erased from its events, once they are judged.

Judging sees the whole event, so an erasure changes no verdict, no collision and no review. Then the values
are removed: a row image keeps the key's columns, and every other column counts as not sent. The fold leaves
such columns unresolved, as always, and invents nothing for them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from omnisupport_ingest.cdc.images import read_image
from omnisupport_ingest.cdc.life import PositionTuple
from omnisupport_ingest.contracts.names import TableName
from omnisupport_ingest.json_values import compact

_VALUES = ("before", "after", "unchanged", "envelope")

KeyPlace = tuple[str, str, str]
"""Schema, table, and hash of the key."""


@dataclass(frozen=True, slots=True)
class Span:
    """Events of a key above ``after`` (None: from the first one) up to and including ``through``."""

    after: PositionTuple | None
    through: PositionTuple

    def holds(self, position: PositionTuple) -> bool:
        return position <= self.through and (self.after is None or position > self.after)


@dataclass(frozen=True)
class Erasures:
    """What was erased of a source, by key. False if nothing was."""

    spans: Mapping[KeyPlace, Collection[Span]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.spans)

    def holds(self, place: TableName, key: str | None, position: PositionTuple) -> bool:
        """Whether the event of ``key`` at ``position`` was erased. ``place``: schema and table."""
        if key is None or place not in self.tables:
            return False
        return any(span.holds(position) for span in self.spans.get((*place, key_hash(key)), ()))

    @cached_property
    def tables(self) -> frozenset[TableName]:
        """The tables with erased rows."""
        return frozenset((schema, table) for schema, table, _ in self.spans)

    @cached_property
    def last(self) -> PositionTuple:
        """The highest position of an erased event. Raises ``ValueError`` if nothing was erased."""
        return max(span.through for spans in self.spans.values() for span in spans)


def key_hash(key: str) -> str:
    """Return the SHA-256 of a key's text, as events have it, in hexadecimal digits."""
    return hashlib.sha256(key.encode()).hexdigest()


def erased_in(batch: pa.RecordBatch, erasures: Erasures) -> list[bool]:
    """Whether each event of ``batch`` was erased."""
    erased = [False] * len(batch)
    if not erasures:
        return erased
    rows = np.flatnonzero(_may_be_erased(batch, erasures))
    if not len(rows):
        return erased
    names = ("source_schema", "source_table", "key", "epoch", "commit_lsn", "ordinal")
    events = batch.select(list(names)).take(pa.array(rows))
    values = (events.column(name).to_pylist() for name in names)
    for row, schema, table, key, *position in zip(rows.tolist(), *values, strict=True):
        epoch, lsn, ordinal = position
        erased[row] = erasures.holds((schema, table), key, (epoch, lsn, ordinal))
    return erased


def _may_be_erased(batch: pa.RecordBatch, erasures: Erasures) -> npt.NDArray[np.bool_]:
    """Which events are of a table of which rows were erased, and not above all that was erased.

    New events lie above, so they cost no look at their keys.
    """
    tables = pa.array(sorted({table for _, table in erasures.tables}), pa.string())
    wanted: npt.NDArray[np.bool_] = pc.is_in(batch.column("source_table"), tables).to_numpy(False)
    epoch, lsn, ordinal = (batch.column(name).to_numpy() for name in ("epoch", "commit_lsn", "ordinal"))
    last = erasures.last
    below = (lsn < last[1]) | ((lsn == last[1]) & (ordinal <= last[2]))
    old: npt.NDArray[np.bool_] = wanted & ((epoch < last[0]) | ((epoch == last[0]) & below))
    return old


def without_values(
    batch: pa.RecordBatch, erased: Sequence[bool], keys: Mapping[TableName, Collection[str]]
) -> pa.RecordBatch:
    """Remove the values of the ``erased`` events of ``batch``. ``keys``: the key's columns, by schema and
    table."""
    values = {name: batch.column(name).to_pylist() for name in _VALUES}
    tables = zip(
        batch.column("source_schema").to_pylist(), batch.column("source_table").to_pylist(), strict=True
    )
    for row, (gone, place) in enumerate(zip(erased, tables, strict=True)):
        if gone:
            after, unchanged = _blanked(values["after"][row], values["unchanged"][row], keys.get(place, ()))
            values["after"][row], values["unchanged"][row] = after, unchanged
            values["before"][row] = values["envelope"][row] = None
    for name in _VALUES:
        place = batch.schema.get_field_index(name)
        column = batch.schema.field(place)
        batch = batch.set_column(place, column, pa.array(values[name], column.type))
    return batch


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
