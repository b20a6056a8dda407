"""Fresh files: where a table with deletion vectors keeps the new rows of keys whose old rows were marked.

The other files of a key-ordered table hold ranges of keys that do not overlap (``key_files``). A fresh file
may hold rows of any keys, in their order. An update marks the old rows of its keys as deleted, wherever they
are, and writes their new rows to fresh files, so it neither reads nor writes the other rows of those files.
Files of such a table have small row groups: a few rows are read without the rest of their file.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
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
    """Which rows are looked for, by their values of the ordering column."""

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
        """Return the rows for which ``mask`` is true."""
        if mask.all():
            return self
        return Found(self.file, self.numbers[mask], self.rows.filter(pa.array(mask)))


class RowFinder:
    """Finds rows in the files that one task looks into. It reads the footer of each file once, and holds no
    file open: a task may look into more files than a process may have open."""

    def __init__(self, order: KeyOrder, schema: pa.Schema) -> None:
        self._order, self._schema = order, schema
        self._footers: dict[str, _Footer] = {}

    def find(self, file: KeyFile, wanted: Wanted, schema: pa.Schema | None = None) -> Found:
        """Return the live ``wanted`` rows of ``file``, in their order, with the columns of ``schema``; None:
        all columns.

        Row groups that cannot hold a wanted row are not read; of groups that turn out to hold none, only the
        key is read.
        """
        schema, footer = self._schema if schema is None else schema, self._footer(file)
        groups = [group for group in range(len(footer.starts)) if footer.may_have(group, wanted)]
        if groups:
            with pq.ParquetFile(file.stored, metadata=footer.metadata, pre_buffer=False) as parquet:
                keys = parquet.read_row_groups(groups, columns=[self._order.column], use_threads=False)
                numbers = footer.rows_of(groups)[wanted.among(self._order.values(keys))]
                if len(footer.dead):
                    numbers = numbers[~np.isin(numbers, footer.dead)]
                if len(numbers):
                    return Found(file, numbers, footer.read(parquet, schema, numbers))
        return Found(file, np.zeros(0, np.int64), schema.empty_table())

    def values(self, file: KeyFile, wanted: Mapping[str, Rows]) -> dict[str, pa.Array]:
        """Return by column the values of ``file`` at the row numbers ``wanted`` (at least one per column,
        ascending).

        Of each column, only the row groups with such rows are read.
        """
        footer = self._footer(file)
        together: dict[tuple[int, ...], list[str]] = defaultdict(list)
        for name, numbers in wanted.items():
            together[tuple(footer.groups_of(numbers))].append(name)
        found: dict[str, pa.Array] = {}
        with pq.ParquetFile(file.stored, metadata=footer.metadata, pre_buffer=False) as parquet:
            for names in together.values():
                every = np.unique(np.concatenate([wanted[name] for name in names]))
                rows = footer.read(parquet, pa.schema([self._schema.field(name) for name in names]), every)
                for name in names:
                    places = np.searchsorted(every, wanted[name])
                    found[name] = rows[name].combine_chunks().take(pa.array(places))
        return found

    def _footer(self, file: KeyFile) -> _Footer:
        if file.path not in self._footers:
            self._footers[file.path] = _Footer(file, self._order)
        return self._footers[file.path]


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

    def rows_of(self, groups: Sequence[int]) -> Rows:
        """The numbers of all rows of ``groups``."""
        return np.concatenate([np.arange(self.starts[n], self.starts[n] + self.counts[n]) for n in groups])

    def groups_of(self, numbers: Rows) -> list[int]:
        """The row groups that have the rows with these ``numbers``."""
        found: list[int] = np.unique(np.searchsorted(self.starts, numbers, side="right") - 1).tolist()
        return found

    def read(self, parquet: pq.ParquetFile, schema: pa.Schema, numbers: Rows) -> pa.Table:
        """Read the rows with these ``numbers`` (at least one, ascending), from the row groups that have
        them."""
        groups = self.groups_of(numbers)
        rows = parquet.read_row_groups(groups, columns=schema.names, use_threads=False).select(schema.names)
        if len(numbers) < rows.num_rows:
            rows = rows.take(pa.array(np.searchsorted(self.rows_of(groups), numbers)))
        return rows.cast(schema).combine_chunks()


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
