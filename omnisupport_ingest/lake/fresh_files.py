"""Fresh files: where a table with deletion vectors keeps the new rows of keys whose old rows were marked.

The other files of a key-ordered table hold ranges of keys that do not overlap (``key_files``). A fresh file
may hold rows of any keys, in their order. An update marks the old rows of its keys as deleted, wherever they
are, and writes their new rows to fresh files, so it neither reads nor writes the other rows of those files.
Files of such a table have small row groups: a few rows are read without the rest of their file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from omnisupport_ingest.lake.deletion_vectors import dead_rows_of, live_mask
from omnisupport_ingest.lake.key_files import Bound, KeyFile, KeyOrder, between

if TYPE_CHECKING:
    from omnisupport_ingest.lake.deletion_vectors import Rows

ROWS_PER_GROUP = 4_096
"""Rows of a row group in a table with deletion vectors. Measured: smaller ones make files larger and scans
slower, and larger ones make updates of scattered keys read more."""


class Wanted(Protocol):
    """Which rows are looked for, by their values of the order."""

    def may_be_in(self, low: Bound, high: Bound) -> bool:
        """Whether a value from ``low`` to ``high``, both inclusive, may be wanted."""

    def among(self, values: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """A mask of the wanted ``values``."""


@dataclass(frozen=True)
class Between:
    """Values from ``start`` (inclusive) to ``end`` (exclusive), None for no bound."""

    start: Bound | None
    end: Bound | None

    def may_be_in(self, low: Bound, high: Bound) -> bool:
        return (self.end is None or low < self.end) and (self.start is None or high >= self.start)  # type: ignore[operator]

    def among(self, values: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        return between(values, self.start, self.end)


class Among:
    """Certain values."""

    def __init__(self, values: npt.NDArray[Any]) -> None:
        self._values = np.unique(values)

    def may_be_in(self, low: Bound, high: Bound) -> bool:
        first = np.searchsorted(self._values, _like(self._values, low))
        return bool(first < len(self._values) and self._values[first] <= high)

    def among(self, values: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        if not len(values) or not len(self._values):
            return np.zeros(len(values), np.bool_)
        if values.dtype == object:
            # Text is compared by Arrow: NumPy would ask Python for each pair.
            near = self._values[np.searchsorted(self._values, values.min()) :]
            mask: npt.NDArray[np.bool_] = pc.is_in(
                pa.array(values, pa.string()), value_set=pa.array(near, pa.string())
            ).to_numpy(zero_copy_only=False)
            return mask
        places = np.searchsorted(self._values, values)
        places[places == len(self._values)] = 0
        found: npt.NDArray[np.bool_] = self._values[places] == values
        return found


@dataclass(frozen=True)
class Found:
    """Live ``rows`` of ``file``, and their numbers in it."""

    file: KeyFile
    numbers: Rows
    rows: pa.Table

    def only(self, mask: npt.NDArray[np.bool_]) -> Found:
        """Those that ``mask`` has."""
        if mask.all():
            return self
        return Found(self.file, self.numbers[mask], self.rows.filter(pa.array(mask)))


class RowFinder:
    """Finds rows in the files that one task looks into. It reads the footer of each file once, and holds no
    file open: a task may look into more files than a process may have open."""

    def __init__(self, order: KeyOrder, schema: pa.Schema) -> None:
        self._order, self._schema = order, schema
        self._footers: dict[str, _Footer] = {}

    def find(self, file: KeyFile, wanted: Wanted) -> Found:
        """Return the live rows of ``file`` that are wanted, in their order.

        Of other row groups nothing is read, and of groups without wanted rows only the key.
        """
        footer = self._footers.get(file.path)
        if footer is None:
            footer = self._footers[file.path] = _Footer(file, self._order)
        groups = [group for group in range(len(footer.starts)) if footer.may_have(group, wanted)]
        if groups:
            with pq.ParquetFile(file.stored, metadata=footer.metadata, pre_buffer=False) as parquet:
                return self._found(file, parquet, footer, groups, wanted)
        return self._nothing(file)

    def _found(
        self, file: KeyFile, parquet: pq.ParquetFile, footer: _Footer, groups: Sequence[int], wanted: Wanted
    ) -> Found:
        chosen, numbers, places = [], [], []
        keys = parquet.read_row_groups(groups, columns=[self._order.column], use_threads=False)
        values, at, offset = self._order.values(keys), 0, 0
        for group in groups:
            count, start = footer.counts[group], footer.starts[group]
            rows = np.flatnonzero(wanted.among(values[at : at + count]))
            rows = rows[~np.isin(rows + start, footer.dead)] if len(footer.dead) else rows
            at += count
            if len(rows):
                chosen.append(group)
                numbers.append(rows + start)
                places.append(rows + offset)
                offset += count
        if not chosen:
            return self._nothing(file)
        found = parquet.read_row_groups(chosen, columns=self._schema.names, use_threads=False)
        found = found.select(self._schema.names).cast(self._schema)
        where = np.concatenate(places)
        if len(where) < found.num_rows:
            found = found.take(pa.array(where))
        return Found(file, np.concatenate(numbers).astype(np.int64), found.combine_chunks())

    def _nothing(self, file: KeyFile) -> Found:
        return Found(file, np.zeros(0, np.int64), self._schema.empty_table())


class _Footer:
    def __init__(self, file: KeyFile, order: KeyOrder) -> None:
        self.metadata = footer = pq.read_metadata(file.stored)
        self.dead = dead_rows_of(file)
        paths = [footer.row_group(0).column(n).path_in_schema for n in range(footer.num_columns)]
        place = paths.index(order.column)
        groups = [footer.row_group(number) for number in range(footer.num_row_groups)]
        self.counts = [group.num_rows for group in groups]
        self.starts = np.concatenate([[0], np.cumsum(self.counts)])[:-1].tolist()
        self._stats = [group.column(place).statistics for group in groups]
        self._bounds = [
            (each.min, each.max)
            if each is not None and each.has_min_max and each.has_null_count and not each.null_count
            else None
            for each in self._stats
        ]

    def may_have(self, group: int, wanted: Wanted) -> bool:
        bounds = self._bounds[group]
        return bounds is None or wanted.may_be_in(*bounds)


def values_in(files: Sequence[KeyFile], order: KeyOrder, *, live: bool = False) -> list[npt.NDArray[Any]]:
    """Return the values of the order in each of ``files``; with ``live`` only those of live rows."""
    found = []
    for file in files:
        values = order.values(pq.read_table(file.stored, columns=[order.column], partitioning=None))
        if live and file.vector is not None:
            values = values[live_mask(dead_rows_of(file), len(values))]
        found.append(values)
    return found


def _like(values: npt.NDArray[Any], value: Bound) -> Any:
    return np.array([value], dtype=values.dtype)[0] if values.dtype != object else value
