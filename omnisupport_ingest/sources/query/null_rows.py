"""Rows without a cursor: which of them have changed, and the ordinal of each version.

No cursor orders the versions of such a row. So every reading reads all of them, and the last version of each
key is remembered: its ordinal and the hash of its image (``cursors.sqlite``). An unchanged row does not land.
A changed one lands at the next even ordinal of its key; the odd one in between is for a delete that a
comparison finds. ``NULL_ORDINALS`` has room for 64 versions of a key in an epoch; then the table is refused
until it is read whole again.

Landing is the truth, and the file only a copy of it. If the file was lost, comes from an earlier version, or
a process died while rows landed, the last versions are read from landing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.landing.rows import EVENT_SCHEMA
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.position import Lsn, Position
from omnisupport_ingest.sources.query.advice import read_anew
from omnisupport_ingest.sources.query.cursor import NULL_ORDINALS
from omnisupport_ingest.sources.query.errors import QueryRefused
from omnisupport_ingest.sources.query.events import RowEvents, image_hash
from omnisupport_ingest.sources.query.state import NullRow, QueryState

_COLUMNS = ["ordinal", "op", "key", "after", "source_schema", "source_table"]
_ORDINAL = EVENT_SCHEMA.get_field_index("ordinal")


@dataclass(frozen=True, slots=True)
class Changed:
    """``events``: those to land. ``rows``: those of them without a cursor, to be remembered once they have
    landed. ``again``: number of rows that are left out because they have landed unchanged."""

    events: pa.Table
    rows: tuple[NullRow, ...] = ()
    again: int = 0


@dataclass
class NullRows:
    """The rows without a cursor of one table; ``makes`` makes its events."""

    makes: RowEvents
    store: LandingStore
    state: QueryState
    _has_learned: bool = field(default=False, init=False, repr=False)

    def changed(self, events: pa.Table) -> Changed:
        """Leave out the rows of ``events`` without a cursor that have landed unchanged, and set the ordinals
        of the others.

        Raises ``QueryRefused`` if no ordinal is left for one, or if what has landed cannot be read.
        """
        ordinals = events.column("ordinal").to_numpy().copy()
        places = np.flatnonzero(ordinals < NULL_ORDINALS.stop).tolist()
        if not places:
            return Changed(events)
        self._learn()
        name = self.makes.table.full_name
        theirs = events.take(pa.array(places))
        keys = theirs.column("key").to_pylist()
        known = self.state.null_rows(name, keys)
        lands, rows = np.ones(len(ordinals), np.bool_), []
        for place, key, image in zip(places, keys, theirs.column("after"), strict=True):
            found, digest = known.get(key), image_hash(image.as_py())
            if found is not None and found.image == digest:
                lands[place] = False
                continue
            if found is not None:
                ordinals[place] = self._next(found.ordinal, int(ordinals[place]))
            rows.append(NullRow(key, int(ordinals[place]), digest))
        field = EVENT_SCHEMA.field(_ORDINAL)
        events = events.set_column(_ORDINAL, field, pa.array(ordinals, field.type))
        again = len(places) - len(rows)
        return Changed(events.filter(pa.array(lands)) if again else events, tuple(rows), again)

    @contextmanager
    def remembering(self, rows: Sequence[NullRow]) -> Iterator[None]:
        """Remember ``rows``, which land in the block, at its end. Until then only landing knows of them."""
        if not rows:
            yield
            return
        name = self.makes.table.full_name
        self._learn()
        self.state.expect_null_rows(name)
        yield
        self.state.remember_null_rows(name, rows)

    def _next(self, last: int, lowest: int) -> int:
        """Return the next even ordinal above ``last``, not below ``lowest``."""
        ordinal = max(lowest, last // 2 * 2 + 2)
        if ordinal not in NULL_ORDINALS:
            table = self.makes.table
            raise QueryRefused(
                f"A row of {table.full_name} without a cursor has changed so often that no position is left.",
                fix=f"Set {self.makes.cursor.name} in every row, by a trigger and NOT NULL, then read the "
                f"table anew: {read_anew(table.source, 'no position was left', table)}",
            )
        return ordinal

    def _learn(self) -> None:
        """Read from landing which versions have landed, unless all are remembered."""
        name = self.makes.table.full_name
        # Done once, before rows of this reading land: later, some may have landed that are not remembered
        # yet.
        if self._has_learned or self.state.knows_null_rows(name):
            self._has_learned = True
            return
        first = Position(self.makes.epoch, Lsn(0), NULL_ORDINALS.start)
        last = Position(self.makes.epoch, Lsn(0), NULL_ORDINALS.stop - 1)
        of_null = _of(self.makes.table)
        for file in self.store.reaching(self.makes.epoch, first, last):
            try:
                path = self.store.path_of(file)
                landed = pq.read_table(path, columns=_COLUMNS, partitioning=None, filters=of_null)
            except (OSError, pa.ArrowException) as error:
                if self.state.has_null_rows(name):
                    # It is an old file, whose versions are remembered. What a dead process landed is in newer
                    # files.
                    continue
                raise QueryRefused(
                    f"{file.path} of landing cannot be read ({type(error).__name__}). It may hold versions "
                    f"of rows of {name} without a cursor.",
                    fix="Restore the file, or read the table anew: "
                    + read_anew(self.makes.table.source, "landing was trimmed", self.makes.table),
                ) from None
            for block in _rows_of(landed):
                self._merge(name, block)
        self.state.remember_null_rows(name, ())
        self._has_learned = True

    def _merge(self, name: str, landed: Sequence[NullRow]) -> None:
        """Add versions that have landed. If there are two images at one ordinal, neither counts, so the row
        lands again."""
        known: dict[str, NullRow] = dict(self.state.null_rows(name, [each.key for each in landed]))
        for each in landed:
            found = known.get(each.key)
            if found is None or each.ordinal > found.ordinal:
                known[each.key] = each
            elif each.ordinal == found.ordinal and each.image != found.image:
                known[each.key] = NullRow(each.key, each.ordinal, None)
        self.state.add_null_rows(name, list(known.values()))


def _of(table: TableContract) -> pc.Expression:
    ordinal = pc.field("ordinal")
    of_null = (ordinal >= NULL_ORDINALS.start) & (ordinal < NULL_ORDINALS.stop)
    name = (pc.field("source_schema") == table.schema) & (pc.field("source_table") == table.table)
    return of_null & name & pc.field("key").is_valid()


_BLOCK_ROWS = 50_000


def _rows_of(landed: pa.Table) -> Iterator[list[NullRow]]:
    """Yield the versions in ``landed``, in blocks; a delete is a version without an image."""
    for batch in landed.to_batches(_BLOCK_ROWS):
        columns: Mapping[str, list[object]] = batch.to_pydict()
        yield [
            NullRow(str(key), int(str(ordinal)), None if image is None else image_hash(str(image)))
            for key, ordinal, image in zip(columns["key"], columns["ordinal"], columns["after"], strict=True)
        ]
