"""Updates ranges of keys within a task: reads their files, updates the rows, and writes new files.

Each range reports its result in one row (``OUTCOME``): the files written, and the hashes of removed and added
rows.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import types as T

from omnisupport_ingest.cdc import columnar
from omnisupport_ingest.cdc.updating import CHANGE, MERGE, Updated
from omnisupport_ingest.lake.contenthash import ContentHash
from omnisupport_ingest.lake.fresh_files import Between, Found, RowFinder
from omnisupport_ingest.lake.key_files import (
    ROWS_PER_FILE,
    Bound,
    FileRange,
    KeyFile,
    KeyOrder,
    WrittenFile,
    range_numbers,
    read_file,
    read_range,
    write_rows,
)

RANGE = "_cdc_range"
"""The column with the number of its range, in rows on their way to a file."""

_BYTES_IN_HAND = 64 * 1024 * 1024

REFOLDED = T.StructType([T.StructField("_cdc_key", T.StringType())])
"""The columns of a file of keys that must be folded again."""

_KEYS = pa.schema([("_cdc_key", pa.string())])

OUTCOME = T.StructType(
    [
        T.StructField("range", T.IntegerType()),
        T.StructField("changed", T.BooleanType()),
        T.StructField("removed", T.StringType()),
        T.StructField("added", T.StringType()),
        T.StructField("refold", T.StringType()),
        T.StructField("sealed", T.ArrayType(T.StringType())),
        T.StructField("doubted", T.BooleanType()),
        T.StructField(
            "marks",
            T.ArrayType(
                T.StructType([T.StructField("path", T.StringType()), T.StructField("rows", T.BinaryType())])
            ),
        ),
        T.StructField(
            "files",
            T.ArrayType(
                T.StructType(
                    [
                        T.StructField("name", T.StringType()),
                        T.StructField("rows", T.LongType()),
                        T.StructField("bytes", T.LongType()),
                        T.StructField("stats", T.StringType()),
                    ]
                )
            ),
        ),
    ]
)


class Rules(Protocol):
    """How the rows of a table are updated: ``cdc.updating.UpdateRules``, ``cdc.history_update.HistoryRules``.

    ``schema``: of the rows in the files. ``sent``: of the rows sent to them, with ``CHANGE``.
    ``ordered_above``: whether the files above have the column by which the files of the table are ordered.
    """

    @property
    def ordered_above(self) -> bool: ...

    @property
    def schema(self) -> pa.Schema: ...

    @property
    def sent(self) -> pa.Schema: ...

    def rows_of(self, above: pa.Table) -> pa.Table:
        """Return rows of the files above in the form in which they are sent to this table."""

    def reached(self, held: pa.Table, sent: pa.Table) -> npt.NDArray[np.bool_]:
        """Return which of the rows ``held`` may change when the rows ``sent`` come."""

    def update(self, held: pa.Table, sent: pa.Table) -> Updated:
        """Update the rows ``held`` (all that ``reached`` selects) by the rows ``sent``."""

    def same(self, one: pa.Table, other: pa.Table) -> bool:
        """Whether the two have the same rows, in any order."""

    def ordered(self, rows: pa.Table) -> pa.Table:
        """Return ``rows`` with the rows of each key in the order that they must have."""


class Way(Enum):
    """What becomes of the files that hold the rows which an update replaces.

    ``MARK``: the files stay, and the rows are marked as deleted, unless upkeep is due. ``REWRITE``: the files
    are rewritten. ``ERASE``: also rewrite every file with a row of a sent key that is already marked as
    deleted. ``RETURN``: also rewrite all files with marked rows, and remove all fresh files.
    """

    MARK = "mark"
    REWRITE = "rewrite"
    ERASE = "erase"
    RETURN = "return"


@dataclass(frozen=True)
class FilesToUpdate:
    """The files of a table by key, the folder for drafts of new ones, and the rules.

    ``rows_per_file`` and ``seals``: as in ``lake.key_files.write_rows``; ``sealed``: the sealed files.
    ``doubts``: whether the gate must read given new rows before they are shown.
    ``fresh``: the fresh files of a table that has any; ``leaving``: paths of those whose rows all move away.
    ``way``: what becomes of the files that hold the old rows. ``rows_per_group``: rows of a row group in
    written files; None for the library's default.
    """

    files: Sequence[KeyFile]
    order: KeyOrder
    draft: Path
    rules: Rules
    rows_per_file: int = ROWS_PER_FILE
    seals: bool = False
    sealed: Mapping[Bound, tuple[KeyFile, ...]] = field(default_factory=dict)
    doubts: Callable[[pa.Table], bool] | None = None
    fresh: Sequence[KeyFile] = ()
    leaving: frozenset[str] = frozenset()
    way: Way = Way.REWRITE
    rows_per_group: int | None = None


@dataclass(frozen=True)
class _InHand:
    """A range whose files have been read: its rows, including those in ``sealed`` and ``fresh`` files.

    ``reached``: which rows may change. ``forced``: rewrite its files even if no row changes.
    """

    number: int
    rows: pa.Table
    reached: npt.NDArray[np.bool_]
    sealed: Sequence[KeyFile]
    fresh: Sequence[Found] = ()
    forced: bool = False


def update_ranges(
    table: pa.Table,
    target: FilesToUpdate,
    ranges: Sequence[FileRange],
    looks: Iterable[int] = (),
    forced: Collection[int] = (),
) -> Iterator[pa.RecordBatch]:
    """Update the files of the ranges that ``table`` has rows of, and look at the ranges numbered ``looks``.

    Rows of several ranges that may change are updated together, because a call of the kernel costs the same
    for a few rows as for one. The files of ``forced`` ranges are rewritten even if no row changes.
    """
    numbers = table[RANGE].to_numpy()
    if (numbers[1:] < numbers[:-1]).any():
        table = table.take(pc.sort_indices(table[RANGE])).combine_chunks()
        numbers = table[RANGE].to_numpy()
    table = table.select(target.rules.sent.names)
    outcomes: list[dict[str, Any]] = []
    in_hand: list[_InHand] = []
    size = first = last = 0
    finder = RowFinder(target.order, target.rules.schema)
    for number in np.unique(np.concatenate([numbers, np.fromiter(looks, np.int32)])):
        start, last = np.searchsorted(numbers, [number, number + 1]).tolist()
        read = _read(int(number), table.slice(start, last - start), target, ranges, finder)
        in_hand.append(replace(read, forced=number in forced))
        size += in_hand[-1].rows.nbytes
        if size >= _BYTES_IN_HAND:
            outcomes += _updated(in_hand, table.slice(first, last - first), target, ranges)
            in_hand, size, first = [], 0, last
    if in_hand:
        outcomes += _updated(in_hand, table.slice(first, last - first), target, ranges)
    yield batch_of(outcomes)


def batch_of(outcomes: Sequence[dict[str, Any]]) -> pa.RecordBatch:
    """Return ``outcomes`` as a batch with the columns of ``OUTCOME``."""
    columns = [pa.array([each[field.name] for each in outcomes], _arrow(field)) for field in OUTCOME.fields]
    return pa.RecordBatch.from_arrays(columns, names=OUTCOME.names)


def _read(
    number: int, sent: pa.Table, target: FilesToUpdate, ranges: Sequence[FileRange], finder: RowFinder
) -> _InHand:
    rules, of = target.rules, ranges[number]
    rows, sealed = read_range(of, target.order, rules.schema), sealed_of(sent, target)
    found = [finder.find(file, Between(of.start, of.end)) for file in target.fresh]
    fresh = [each for each in found if len(each.numbers)]
    if sealed or fresh:
        more = [read_file(file, rules.schema) for file in sealed]
        rows = pa.concat_tables([rows, *more, *(each.rows for each in fresh)])
    return _InHand(number, rows, rules.reached(rows, sent), sealed, fresh)


def _updated(
    in_hand: Sequence[_InHand], sent: pa.Table, target: FilesToUpdate, ranges: Sequence[FileRange]
) -> list[dict[str, Any]]:
    """Update the ranges ``in_hand`` by the rows that are ``sent`` to them."""
    old = [each.rows.take(pa.array(np.flatnonzero(each.reached))) for each in in_hand]
    updated = target.rules.update(pa.concat_tables(old).combine_chunks(), sent.combine_chunks())
    if len(updated.refold):
        return [outcome(in_hand[0].number, refold=noted(updated.refold, target.draft))]
    made, places = updated.rows.combine_chunks(), np.zeros(0, np.int32)
    if len(in_hand) == 1:
        places = np.full(made.num_rows, in_hand[0].number)
    else:
        made, places = by_place(made, range_numbers(target.order.values(made), ranges))
    outcomes = []
    for each, was in zip(in_hand, old, strict=True):
        start, end = np.searchsorted(places, [each.number, each.number + 1])
        mine = made.slice(start, end - start)
        changed = each.forced or not _are_same(was, mine, target.rules)
        if changed or is_cut(ranges, each.number):
            outcomes.append(_written(each, was, mine, target) | {"changed": changed})
        else:
            outcomes.append(outcome(each.number))
    return outcomes


def by_place(rows: pa.Table, places: npt.NDArray[np.int32]) -> tuple[pa.Table, npt.NDArray[np.int32]]:
    """Return ``rows`` sorted by their ``places``, and the sorted places.

    Rows that are sorted already are not copied: rows of new keys come in the order of the keys.
    """
    if (places[1:] >= places[:-1]).all():
        return rows, places
    order = np.argsort(places, kind="stable")
    return rows.take(pa.array(order)).combine_chunks(), places[order]


def _are_same(was: pa.Table, made: pa.Table, rules: Rules) -> bool:
    if was.num_rows != made.num_rows:
        return False
    before, after = (np.sort(each["_cdc_row_hash"].to_numpy()) for each in (was, made))
    # Rows that differ nearly always differ in their hashes, so the full comparison is rare.
    return bool(np.array_equal(before, after)) and rules.same(was, made)


def _written(of: _InHand, was: pa.Table, made: pa.Table, target: FilesToUpdate) -> dict[str, Any]:
    """Write the new files of the range ``of`` and return its outcome. The rows ``made`` replace the rows
    ``was``."""
    rules = target.rules
    kept = columnar.filter_slices(of.rows, ~of.reached)
    # In each file the rows of one key are in order; with rows from fresh files they must be sorted again.
    rows = rules.ordered(pa.concat_tables([kept, made])) if of.fresh else None
    files = write_rows(
        pa.concat_tables([kept, rules.ordered(made)]) if rows is None else rows,
        target.order,
        target.draft,
        rows_per_file=target.rows_per_file,
        seals=target.seals,
        rows_per_group=target.rows_per_group,
    )
    return outcome(of.number) | {
        "sealed": [file.path for file in of.sealed],
        "removed": str(ContentHash.of(was["_cdc_row_hash"].to_numpy())),
        "added": str(ContentHash.of(made["_cdc_row_hash"].to_numpy())),
        # Rows that are kept have passed the gate before.
        "doubted": target.doubts is not None and target.doubts(made),
        "files": named(files),
        "marks": marks_of(each for each in of.fresh if each.file.path not in target.leaving),
    }


def named(files: Iterable[WrittenFile]) -> list[dict[str, Any]]:
    """Return the written ``files`` in the form of an outcome."""
    return [
        {"name": each.name, "rows": each.rows, "bytes": each.bytes, "stats": each.stats} for each in files
    ]


def marks_of(found: Iterable[Found]) -> list[dict[str, Any]]:
    """Return the rows to mark in the form of an outcome: row numbers as 64-bit integers."""
    return [
        {"path": each.file.path, "rows": each.numbers.astype(np.int64).tobytes()}
        for each in found
        if len(each.numbers)
    ]


def noted(keys: pa.Array, draft: Path) -> str:
    """Write ``keys``, which must be folded again, to a file in ``draft``; return the file's name."""
    # No failpoint: a draft that no table names yet.
    draft.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = draft / f"refold-{uuid.uuid4().hex}.parquet"
    pq.write_table(pa.table([keys.cast(pa.string())], schema=_KEYS), path)
    return path.name


def outcome(number: int, *, refold: str | None = None) -> dict[str, Any]:
    """Return the outcome of a range in which nothing has changed."""
    nothing = str(ContentHash())
    return {
        "range": number,
        "changed": False,
        "removed": nothing,
        "added": nothing,
        "refold": refold,
        "sealed": [],
        "doubted": False,
        "marks": [],
        "files": [],
    }


def sealed_of(sent: pa.Table, target: FilesToUpdate) -> list[KeyFile]:
    """Return the sealed files of keys whose complete new rows are sent: the old rows in these files go."""
    if not target.sealed:
        return []
    settled = sent.filter(pc.not_equal(sent[CHANGE], MERGE))
    values = dict.fromkeys(target.order.values(settled).tolist())
    return [file for value in values for file in target.sealed.get(value, ())]


def _arrow(of: T.StructField) -> pa.DataType:
    if of.name == "sealed":
        return pa.list_(pa.string())
    if of.name == "marks":
        return pa.list_(pa.struct([("path", pa.string()), ("rows", pa.binary())]))
    if isinstance(of.dataType, T.ArrayType):
        return pa.list_(
            pa.struct(
                [("name", pa.string()), ("rows", pa.int64()), ("bytes", pa.int64()), ("stats", pa.string())]
            )
        )
    return {"range": pa.int32(), "changed": pa.bool_(), "doubted": pa.bool_()}.get(of.name, pa.string())


def is_cut(ranges: Sequence[FileRange], number: int) -> bool:
    """Whether other ranges share the files of a range. If one of them changes, all must be written."""
    files = ranges[number].files
    beside = [each.files for each in (*ranges[max(0, number - 1) : number], *ranges[number + 1 : number + 2])]
    return bool(files) and files in beside
