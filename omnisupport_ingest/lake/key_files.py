"""Files of a table that are ordered by key: each holds a range of keys, and no two ranges overlap.

The file of a key is found by a binary search among the lowest keys, so an update rewrites only the files of
the keys it touches, whatever the size of the table. A file has at most twice ``ROWS_PER_FILE`` rows; a file
that grows beyond that is split.

In a table where one key may have any number of rows, the oldest rows of a key with very many go to sealed
files, which hold rows of that key alone. An update that adds rows to the key neither reads nor writes them.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from omnisupport_ingest.lake import layout
from omnisupport_ingest.lake.deletion_vectors import (
    DeletionVector,
    dead_rows_of,
    live_mask,
)
from omnisupport_ingest.lake.file_index_tables import NO_BOUNDS
from omnisupport_ingest.lake.file_tasks import repeating_texts
from omnisupport_ingest.lake.layout import LakeFile, StoredFile
from omnisupport_ingest.lake.snapshot import TableSnapshot
from omnisupport_ingest.lake.stats import stats_of

_MAX_RUNS = 1_000
"""Up to this many ordered runs of rows, sorting copies run by run."""

_FOOTERS = 32
"""Number of footers that a process keeps, each of some hundred kilobytes."""

ROWS_PER_FILE = 16_384
"""Default where the contract sets none. Measured: files of about this size read as fast as large ones."""

Bound = int | str

SEALED = "sealed-"
"""Prefix of the names of sealed files."""

FRESH = "fresh-"
"""Prefix of the names of fresh files (``lake.fresh_files``)."""

_LOWEST = int(np.iinfo(np.int64).min)


@dataclass(frozen=True, slots=True)
class KeyOrder:
    """The order of the files: by ``column``, as whole numbers if ``whole_numbers``, else as text by code
    points. ``personal``: columns of which no value may stand in the log."""

    column: str
    whole_numbers: bool
    personal: frozenset[str] = frozenset()

    def values(self, rows: pa.Table) -> npt.NDArray[Any]:
        """Return the values of ``rows``. A missing key counts as the lowest value, and so does a withheld
        event's key that is not a number."""
        column = rows[self.column].combine_chunks()
        column = (
            pc.fill_null(column.cast(pa.int64()), _LOWEST) if self.whole_numbers else pc.fill_null(column, "")
        )
        values: npt.NDArray[Any] = column.to_numpy(zero_copy_only=False)
        return values

    def no_values(self) -> npt.NDArray[Any]:
        """Return an empty array of the type that ``values`` has."""
        return np.zeros(0, np.int64 if self.whole_numbers else object)

    def sort(self, rows: pa.Table) -> pa.Table:
        values = self.values(rows)
        if bool((values[1:] >= values[:-1]).all()):
            # The usual case: the fold's output is in order.
            return rows.combine_chunks()
        order = np.argsort(values, kind="stable")
        cuts = np.flatnonzero(np.diff(order) != 1) + 1
        if len(cuts) > _MAX_RUNS:
            return rows.take(pa.array(order)).combine_chunks()
        # A file with a few new rows consists of long ordered runs, and a slice copies a run at once.
        starts, ends = [0, *cuts.tolist()], [*cuts.tolist(), len(order)]
        runs = [rows.slice(order[start], end - start) for start, end in zip(starts, ends, strict=True) if end]
        return pa.concat_tables([rows.slice(0, 0), *runs]).combine_chunks()


@dataclass(frozen=True)
class KeyFile(StoredFile):
    """A file of the table, with its lowest key.

    Thousands go to a task. Without slots, they are sent in a quarter of the time.
    """

    path: str
    full_path: str
    lowest: Bound
    rows: int
    vector: DeletionVector | None = None


@dataclass(frozen=True)
class FileRange:
    """Keys from ``start`` (inclusive) to ``end`` (exclusive), None for no bound, and the files that hold
    them: none, one, or several small files that an update combines."""

    start: Bound | None
    end: Bound | None
    files: tuple[KeyFile, ...] = ()


@dataclass(frozen=True, slots=True)
class FilesByKind:
    """The data files of a table of this kind.

    Attributes:
        ordered: sorted by key; None if another program has written to the table. That shows in a file without
            bounds of its keys, or in two files whose ranges overlap.
        sealed: sealed files, by the value of the ordering column that all rows of a file share.
        fresh: fresh files (``lake.fresh_files``), sorted by path.
    """

    ordered: list[KeyFile] | None
    sealed: dict[Bound, tuple[KeyFile, ...]]
    fresh: list[KeyFile]


def files_by_kind(snapshot: TableSnapshot, order: KeyOrder) -> FilesByKind:
    """Return the data files of ``snapshot``, whose rows are in ``order``."""
    sealed: dict[Bound, tuple[KeyFile, ...]] = {}
    fresh: list[KeyFile] = []
    ordered: list[tuple[Bound | None, Bound | None, KeyFile]] = []
    for file, low, high in _listed(snapshot, order):
        found = KeyFile(file.path, file.full_path, low, file.rows, file.vector)
        if _is_sealed(file.path):
            sealed[low] = (*sealed.get(low, ()), found)
        elif is_fresh(file.path):
            fresh.append(found)
        else:
            ordered.append((low, high, found))
    return FilesByKind(_in_order(ordered), sealed, sorted(fresh, key=lambda file: file.path))


def _in_order(files: list[tuple[Any, Any, KeyFile]]) -> list[KeyFile] | None:
    if any(low is None or high is None for low, high, _ in files):
        return None
    files.sort(key=lambda each: each[0])
    if any(above[0] <= below[1] for below, above in pairwise(files)):
        return None
    return [file for _, _, file in files]


def _listed(snapshot: TableSnapshot, order: KeyOrder) -> Iterator[tuple[LakeFile, Any, Any]]:
    """Yield each data file with the lowest and the highest value of its rows."""
    assert snapshot.table.spec.ordered_by == order.column, "the bounds are those of the order"
    bounds, of_type = snapshot.bounds(layout.WHOLE_TABLE), int if order.whole_numbers else str
    for file in snapshot.files(layout.WHOLE_TABLE):
        low, high = bounds[file.path]
        # Another program may write anything into statistics.
        known = type(low) is of_type and type(high) is of_type
        yield file, *((low, high) if known else NO_BOUNDS)


def is_fresh(path: str) -> bool:
    """Return whether the file at ``path`` is a fresh file."""
    return _name_in(path).startswith(FRESH)


def _is_sealed(path: str) -> bool:
    return _name_in(path).startswith(SEALED)


def _name_in(path: str) -> str:
    return path.rpartition("/")[2]


def ranges_of(
    files: Sequence[KeyFile], cuts: Iterable[Bound] = (), *, rows_together: int = 0
) -> list[FileRange]:
    """Return the key ranges of ``files`` in order, split further at ``cuts``; without files one open range.

    Neighbouring files with up to ``rows_together`` rows together share a range.
    """
    groups: list[tuple[KeyFile, ...]] = []
    for file in files:
        if groups and sum(each.rows for each in groups[-1]) + file.rows <= rows_together:
            groups[-1] = (*groups[-1], file)
        else:
            groups.append((file,))
    starts = {group[0].lowest: group for group in groups[1:]}
    bounds = sorted({*starts, *cuts})
    held = groups[0] if groups else ()
    ranges, start = [], None
    for bound in bounds:
        ranges.append(FileRange(start, bound, held))
        start, held = bound, starts.get(bound, held)
    return [*ranges, FileRange(start, None, held)]


def range_numbers(values: npt.NDArray[Any], ranges: Sequence[FileRange]) -> npt.NDArray[np.int32]:
    """Return for each value the index of its range."""
    starts = [each.start for each in ranges[1:]]
    bounds = np.array(starts, dtype=values.dtype if values.dtype != object else object)
    return np.searchsorted(bounds, values, side="right").astype(np.int32)


def read_range(of: FileRange, order: KeyOrder, schema: pa.Schema) -> pa.Table:
    """Read the rows of the range, with the columns of ``schema``."""
    if not of.files:
        return schema.empty_table()
    rows = pa.concat_tables([read_file(file, schema) for file in of.files])
    chosen = between(order.values(rows), of.start, of.end)
    return rows if chosen.all() else rows.filter(pa.array(chosen))


def between(values: npt.NDArray[Any], start: Bound | None, end: Bound | None) -> npt.NDArray[np.bool_]:
    """Return a mask of the ``values`` from ``start`` (inclusive) to ``end`` (exclusive), None for no
    bound."""
    chosen = np.ones(len(values), np.bool_)
    if start is not None:
        chosen &= values >= start
    if end is not None:
        chosen &= values < end
    return chosen


def rows_between(
    path: str,
    order: KeyOrder,
    schema: pa.Schema,
    known: Mapping[str, Any],
    bounds: tuple[Bound | None, Bound | None],
) -> pa.Table:
    """Read the rows of a Parquet file from the first of ``bounds`` (inclusive) to the second (exclusive).

    The file may have any order; of an ordered file only the needed row groups are read. Columns out: those of
    ``schema``, with the values of ``known`` where it names them, NULL where the file lacks a column.
    """
    start, end = bounds
    of = Path(path).stat()
    footer = _footer((path, of.st_ino, of.st_size, of.st_mtime_ns))
    with pq.ParquetFile(path, metadata=footer, pre_buffer=False) as parquet:
        every = range(parquet.num_row_groups)
        groups = [number for number in every if _may_hold(parquet.metadata, number, order, bounds)]
        if not groups:
            return schema.empty_table()
        in_file = set(parquet.schema_arrow.names)
        wanted = [name for name in schema.names if name in in_file and name not in known]
        rows = parquet.read_row_groups(groups, columns=wanted, use_threads=False)
    rows = _chosen(rows, between(order.values(rows), start, end))
    arrays = [
        pa.repeat(pa.scalar(known[field.name], field.type), rows.num_rows)
        if field.name in known
        else rows[field.name].cast(field.type)
        if field.name in in_file
        else pa.nulls(rows.num_rows, field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(arrays, schema=schema)


@lru_cache(_FOOTERS)
def _footer(of: tuple[str, int, int, int]) -> pq.FileMetaData:
    """Return the footer of a file, by its path and what changes with its content: many tasks read parts of
    one."""
    return pq.read_metadata(of[0])


def _chosen(rows: pa.Table, chosen: npt.NDArray[np.bool_]) -> pa.Table:
    """Return the ``chosen`` rows, without a copy where they are contiguous, as in an ordered file."""
    numbers = np.flatnonzero(chosen)
    if len(numbers) and numbers[-1] - numbers[0] + 1 == len(numbers):
        return rows.slice(numbers[0], len(numbers))
    return rows.filter(pa.array(chosen))


def _may_hold(
    footer: pq.FileMetaData, group: int, order: KeyOrder, bounds: tuple[Bound | None, Bound | None]
) -> bool:
    """Return whether a row group may hold rows between ``bounds``, by its statistics."""
    start, end = bounds
    columns = (footer.row_group(group).column(index) for index in range(footer.num_columns))
    stats = next(each.statistics for each in columns if each.path_in_schema == order.column)
    if stats is None or not stats.has_min_max or not stats.has_null_count or stats.null_count:
        return True
    return (end is None or stats.min < end) and (start is None or stats.max >= start)


def read_file(file: KeyFile, schema: pa.Schema) -> pa.Table:
    """Read the live rows of ``file``, with the columns of ``schema``."""
    with pq.ParquetFile(file.stored, pre_buffer=False) as parquet:
        rows = parquet.read(use_threads=False).select(schema.names).cast(schema)
    if file.vector is None:
        return rows
    return rows.filter(pa.array(live_mask(dead_rows_of(file), file.stored_rows)))


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A new file: name, number of rows, size in bytes, and Delta statistics (JSON text)."""

    name: str
    rows: int
    bytes: int
    stats: str


def write_rows(
    rows: pa.Table,
    order: KeyOrder,
    folder: Path,
    *,
    rows_per_file: int = ROWS_PER_FILE,
    seals: bool = False,
    rows_per_group: int | None = None,
) -> list[WrittenFile]:
    """Write ``rows`` in order to new files in ``folder``, each with ``rows_per_file`` to twice as many rows.

    Rows of one key keep their order. With ``seals``, a key that has more rows than that gets sealed files for
    the first of them. ``rows_per_group``: rows of a row group; None for the library's default.
    """
    ordered = order.sort(rows)
    values = order.values(ordered)
    sealed: list[WrittenFile] = []
    if seals and len(values) > 2 * rows_per_file:
        sealed, ordered = _sealed(ordered, values, order, folder, rows_per_file)
        values = order.values(ordered)
    parts = round(len(values) / rows_per_file) if len(values) > 2 * rows_per_file else 1
    cuts = np.linspace(0, len(values), parts + 1).astype(int)[1:-1]
    # Rows of one value stay in one file: ranges of files must not overlap.
    cuts = np.unique(np.searchsorted(values, values[cuts], side="left")) if len(cuts) else cuts
    bounds = [0, *(int(cut) for cut in cuts if cut), len(values)]
    return sealed + [
        _write(ordered.slice(start, end - start), order, folder, rows_per_group=rows_per_group)
        for start, end in pairwise(bounds)
        if end > start
    ]


def _sealed(
    ordered: pa.Table, values: npt.NDArray[Any], order: KeyOrder, folder: Path, rows_per_file: int
) -> tuple[list[WrittenFile], pa.Table]:
    """Write the sealed files; return them and the rows that are left."""
    firsts = np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]]))
    counts = np.diff(np.append(firsts, len(values)))
    written, stays = [], np.ones(len(values), np.bool_)
    for first, count in zip(firsts, counts, strict=True):
        # Keys that are no numbers share the lowest value.
        if count <= 2 * rows_per_file or values[first] == _LOWEST:
            continue
        last = first + (count // rows_per_file - 1) * rows_per_file
        stays[first:last] = False
        written += [
            _write(ordered.slice(start, rows_per_file), order, folder, SEALED)
            for start in range(first, last, rows_per_file)
        ]
    return written, ordered.filter(pa.array(stays)).combine_chunks()


def write_again(of: Path, rows: pa.Table, order: KeyOrder, folder: Path) -> WrittenFile:
    """Write ``rows``, what remains of the file ``of``, in their order; a sealed file stays sealed."""
    return _write(rows, order, folder, SEALED if _is_sealed(of.name) else "part-")


def written_file(path: Path, order: KeyOrder) -> WrittenFile:
    """Describe a file that ``write_rows`` wrote earlier, from the file itself."""
    return _described(path, pq.read_metadata(path), pq.read_table(path, columns=[order.column]), order)


def write_fresh(rows: pa.Table, order: KeyOrder, folder: Path, rows_per_group: int | None) -> WrittenFile:
    """Write ``rows``, of any keys, in order to a new fresh file in ``folder``; rows of one key keep their
    order."""
    return _write(order.sort(rows), order, folder, FRESH, rows_per_group=rows_per_group)


def _write(
    rows: pa.Table,
    order: KeyOrder,
    folder: Path,
    kind: str = "part-",
    *,
    rows_per_group: int | None = None,
) -> WrittenFile:
    # No failpoint: a draft that no table names yet.
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / f"{kind}{uuid.uuid4().hex}.parquet"
    footers: list[pq.FileMetaData] = []
    repeat = repeating_texts(rows)
    pq.write_table(
        rows,
        path,
        row_group_size=rows_per_group,
        compression="snappy",
        use_dictionary=repeat,
        metadata_collector=footers,
    )
    return _described(path, footers[0], rows, order)


def _described(path: Path, footer: pq.FileMetaData, rows: pa.Table, order: KeyOrder) -> WrittenFile:
    count, text = stats_of(footer, order.personal)
    stats = json.loads(text)
    values = order.values(rows)
    # The bounds of text in the footer may be cut short; these are exact.
    of_type = rows.schema.field(order.column).type
    for name, bound in (("minValues", values[:1]), ("maxValues", values[-1:])):
        stats[name][order.column] = _in_type(bound.tolist()[0], of_type)
    stats["nullCount"][order.column] = rows[order.column].null_count
    return WrittenFile(path.name, count, path.stat().st_size, json.dumps(stats, separators=(",", ":")))


def _in_type(bound: Bound, of_type: pa.DataType) -> Bound:
    """Raise ``bound`` to the lowest number of ``of_type``. The value of a row without a key may lie below it,
    and Delta ignores statistics that the column's type cannot hold."""
    if isinstance(bound, str):
        return bound
    return max(bound, int(np.iinfo(of_type.to_pandas_dtype()).min))
