"""Files of a table that are ordered by key: each holds a range of keys, and no two ranges overlap.

So the file that a key belongs to is found by a search among the lowest keys, and an update rewrites the files
of the keys it touches, whatever the size of the table. A file has at most twice ``ROWS_PER_FILE`` rows; one
that grows is split.

Where a key may have any number of rows, the first ones of a key that has very many go to sealed files, which
hold rows of that key alone: an update that adds to the key reads and writes none of them.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import DeltaTable

from omnisupport_ingest.lake import layout
from omnisupport_ingest.lake.file_tasks import repeating_texts
from omnisupport_ingest.lake.stats import stats_of
from omnisupport_ingest.storage import place_at_hand

_MOST_STRETCHES = 1_000
"""Stretches in order up to which rows are sorted stretch by stretch."""

ROWS_PER_FILE = 16_384
"""Where a contract does not say otherwise. Measured: files of about this size read as fast as large ones."""

Bound = int | str

SEALED = "sealed-"
"""What the names of sealed files begin with."""

_LOWEST = int(np.iinfo(np.int64).min)


@dataclass(frozen=True, slots=True)
class KeyOrder:
    """By what the files are ordered: the values of ``column``, whole numbers if ``whole_numbers``, else text
    by its code points."""

    column: str
    whole_numbers: bool

    def values(self, rows: pa.Table) -> npt.NDArray[Any]:
        """The values of ``rows``; no key, or one that is no number (of a withheld event), is the lowest."""
        column = rows[self.column].combine_chunks()
        column = (
            pc.fill_null(column.cast(pa.int64()), _LOWEST) if self.whole_numbers else pc.fill_null(column, "")
        )
        found: npt.NDArray[Any] = column.to_numpy(zero_copy_only=False)
        return found

    def nothing(self) -> npt.NDArray[Any]:
        """No values, of the type that ``values`` has."""
        return np.zeros(0, np.int64 if self.whole_numbers else object)

    def sort(self, rows: pa.Table) -> pa.Table:
        values = self.values(rows)
        if bool((values[1:] >= values[:-1]).all()):
            # As the fold leaves them, mostly.
            return rows.combine_chunks()
        order = np.argsort(values, kind="stable")
        cuts = np.flatnonzero(np.diff(order) != 1) + 1
        if len(cuts) > _MOST_STRETCHES:
            return rows.take(pa.array(order)).combine_chunks()
        # A file that few rows came to is in order but for these, and a stretch is copied as it is.
        starts, ends = [0, *cuts.tolist()], [*cuts.tolist(), len(order)]
        stretches = [
            rows.slice(order[start], end - start) for start, end in zip(starts, ends, strict=True) if end
        ]
        return pa.concat_tables([rows.slice(0, 0), *stretches]).combine_chunks()


@dataclass(frozen=True, slots=True)
class KeyFile:
    """A file of the table, with its lowest key."""

    path: str
    place: str
    lowest: Bound
    rows: int

    @property
    def uri(self) -> str:
        """``place`` for whoever opens it: brought here first, if an object store keeps it."""
        return place_at_hand(self.place)


@dataclass(frozen=True, slots=True)
class KeyRange:
    """Keys from ``start`` up to but not with ``end`` (null: open), and the files that hold them: none, one,
    or small ones that an update makes one of."""

    start: Bound | None
    end: Bound | None
    files: tuple[KeyFile, ...] = ()


def key_files(handle: DeltaTable, folder: Path, order: KeyOrder) -> list[KeyFile] | None:
    """The data files of the table, by key; None if some file does not say its lowest key, or ranges overlap:
    then another program has written to the table."""
    found = []
    for path, low, high, rows in _listed(handle, order):
        if layout.is_state(path) or _is_sealed(path):
            continue
        if low is None or high is None:
            return None
        found.append((low, high, KeyFile(path, str(folder / path), low, rows)))
    found.sort(key=lambda each: each[0])
    if any(above[0] <= below[1] for below, above in pairwise(found)):
        return None
    return [file for _, _, file in found]


def sealed_files(handle: DeltaTable, folder: Path, order: KeyOrder) -> dict[Bound, tuple[KeyFile, ...]]:
    """The sealed files of the table, by the value of ``order`` that all rows of a file have."""
    found: dict[Bound, tuple[KeyFile, ...]] = {}
    for path, value, _, rows in _listed(handle, order):
        if _is_sealed(path):
            found[value] = (*found.get(value, ()), KeyFile(path, str(folder / path), value, rows))
    return found


def _listed(handle: DeltaTable, order: KeyOrder) -> Iterator[tuple[str, Any, Any, int]]:
    """Path, lowest and highest value of ``order``, and rows of each file. The statistics of other columns do
    not become Python's objects: a table may have thousands of files."""
    listed = pa.table(handle.get_add_actions(flatten=False))
    bounds = []
    for name in ("min", "max"):
        told = listed[name].combine_chunks() if name in listed.column_names else None
        has = (
            told is not None
            and pa.types.is_struct(told.type)
            and told.type.get_field_index(order.column) >= 0
        )
        bounds.append(pc.struct_field(told, order.column).to_pylist() if has else [None] * listed.num_rows)
    paths = map(unquote, listed["path"].to_pylist())
    return zip(paths, *bounds, listed["num_records"].to_pylist(), strict=True)


def _is_sealed(path: str) -> bool:
    return PurePosixPath(path).name.startswith(SEALED)


def ranges_of(
    files: Sequence[KeyFile], cuts: Iterable[Bound] = (), *, rows_together: int = 0
) -> list[KeyRange]:
    """The ranges of keys of ``files`` in order, cut once more at ``cuts``. One range without files.

    Files side by side with up to ``rows_together`` rows in all have one range.
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
        ranges.append(KeyRange(start, bound, held))
        start, held = bound, starts.get(bound, held)
    return [*ranges, KeyRange(start, None, held)]


def range_numbers(values: npt.NDArray[Any], ranges: Sequence[KeyRange]) -> npt.NDArray[np.int32]:
    """For each value, the number of the range that it belongs to."""
    starts = [each.start for each in ranges[1:]]
    bounds = np.array(starts, dtype=values.dtype if values.dtype != object else object)
    return np.searchsorted(bounds, values, side="right").astype(np.int32)


def read_range(of: KeyRange, order: KeyOrder, schema: pa.Schema) -> pa.Table:
    """The rows of the range, in the columns of ``schema``."""
    if not of.files:
        return schema.empty_table()
    rows = pa.concat_tables([read_file(file, schema) for file in of.files])
    values = order.values(rows)
    chosen = np.ones(len(values), np.bool_)
    if of.start is not None:
        chosen &= values >= of.start
    if of.end is not None:
        chosen &= values < of.end
    return rows if chosen.all() else rows.filter(pa.array(chosen))


def between(values: npt.NDArray[Any], start: Bound | None, end: Bound | None) -> npt.NDArray[np.bool_]:
    """Which of ``values`` lie from ``start`` up to but not with ``end``."""
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
    """The rows of a Parquet file that lie from the first of ``bounds`` up to but not with the second.

    The file has any order; of one that is ordered only a part is read. Out: the columns of ``schema``, with
    the values ``known`` where it names them, and NULL where the file lacks a column.
    """
    start, end = bounds
    with pq.ParquetFile(path, pre_buffer=False) as parquet:
        every = range(parquet.num_row_groups)
        groups = [number for number in every if _may_hold(parquet.metadata, number, order, bounds)]
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


def _chosen(rows: pa.Table, chosen: npt.NDArray[np.bool_]) -> pa.Table:
    """The ``rows`` that are ``chosen``; not copied where they stand together, as in an ordered file."""
    places = np.flatnonzero(chosen)
    if len(places) and places[-1] - places[0] + 1 == len(places):
        return rows.slice(places[0], len(places))
    return rows.filter(pa.array(chosen))


def _may_hold(
    footer: pq.FileMetaData, group: int, order: KeyOrder, bounds: tuple[Bound | None, Bound | None]
) -> bool:
    """Whether a row group may have rows between ``bounds``, by its statistics."""
    start, end = bounds
    columns = (footer.row_group(group).column(place) for place in range(footer.num_columns))
    told = next(each.statistics for each in columns if each.path_in_schema == order.column)
    if told is None or not told.has_min_max or not told.has_null_count or told.null_count:
        return True
    return (end is None or told.min < end) and (start is None or told.max >= start)


def read_file(file: KeyFile, schema: pa.Schema) -> pa.Table:
    """All rows of ``file``, in the columns of ``schema``."""
    with pq.ParquetFile(file.uri, pre_buffer=False) as parquet:
        return parquet.read(use_threads=False).select(schema.names).cast(schema)


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file that was written: its name, size in bytes, rows, and Delta statistics (JSON)."""

    name: str
    rows: int
    bytes: int
    stats: str


def write_rows(
    rows: pa.Table, order: KeyOrder, folder: Path, *, rows_per_file: int = ROWS_PER_FILE, seals: bool = False
) -> list[WrittenFile]:
    """Write ``rows`` to new files in ``folder``, ordered, with ``rows_per_file`` rows to twice as many.

    Rows of one key keep their order. With ``seals`` the first rows of a key that has more are sealed.
    """
    ordered = order.sort(rows)
    values = order.values(ordered)
    sealed: list[WrittenFile] = []
    if seals and len(values) > 2 * rows_per_file:
        sealed, ordered = _sealed(ordered, values, order, folder, rows_per_file)
        values = order.values(ordered)
    parts = round(len(values) / rows_per_file) if len(values) > 2 * rows_per_file else 1
    cuts = np.linspace(0, len(values), parts + 1).astype(int)[1:-1]
    # Rows of one value stay together: between files of which both have it no search could choose.
    cuts = np.unique(np.searchsorted(values, values[cuts], side="left")) if len(cuts) else cuts
    bounds = [0, *(int(cut) for cut in cuts if cut), len(values)]
    return sealed + [
        _write(ordered.slice(start, end - start), order, folder)
        for start, end in pairwise(bounds)
        if end > start
    ]


def _sealed(
    ordered: pa.Table, values: npt.NDArray[Any], order: KeyOrder, folder: Path, rows_per_file: int
) -> tuple[list[WrittenFile], pa.Table]:
    """The files of what is sealed, and the rows that are left."""
    firsts = np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]]))
    counts = np.diff(np.append(firsts, len(values)))
    written, stays = [], np.ones(len(values), np.bool_)
    for first, count in zip(firsts, counts, strict=True):
        # Keys that are no numbers share a value.
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
    """Write ``rows``, what is left of the file ``of`` in its order; a sealed file stays one."""
    return _write(rows, order, folder, SEALED if _is_sealed(of.name) else "part-")


def written_file(path: Path, order: KeyOrder) -> WrittenFile:
    """What ``write_rows`` says of a file that it wrote, from the file."""
    return _described(path, pq.read_metadata(path), pq.read_table(path, columns=[order.column]), order)


def _write(rows: pa.Table, order: KeyOrder, folder: Path, kind: str = "part-") -> WrittenFile:
    # No failpoint: a draft that no table names yet.
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / f"{kind}{uuid.uuid4().hex}.parquet"
    footers: list[pq.FileMetaData] = []
    repeat = repeating_texts(rows)
    pq.write_table(rows, path, compression="snappy", use_dictionary=repeat, metadata_collector=footers)
    return _described(path, footers[0], rows, order)


def _described(path: Path, footer: pq.FileMetaData, rows: pa.Table, order: KeyOrder) -> WrittenFile:
    count, text = stats_of(footer)
    stats = json.loads(text)
    values = order.values(rows)
    # The bounds of text in the footer may be cut short; these are exact.
    of_type = rows.schema.field(order.column).type
    for name, bound in (("minValues", values[:1]), ("maxValues", values[-1:])):
        stats[name][order.column] = _in_type(bound.tolist()[0], of_type)
    stats["nullCount"][order.column] = rows[order.column].null_count
    return WrittenFile(path.name, count, path.stat().st_size, json.dumps(stats, separators=(",", ":")))


def _in_type(bound: Bound, of_type: pa.DataType) -> Bound:
    """``bound`` as a column of ``of_type`` can have it, as that of a row without a key is not: Delta reads no
    statistics of a number that the type does not have."""
    if isinstance(bound, str):
        return bound
    return max(bound, int(np.iinfo(of_type.to_pandas_dtype()).min))
