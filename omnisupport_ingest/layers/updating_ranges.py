"""How a task updates ranges of keys: it reads their files, updates the rows, and writes new files.

Each range reports in one row (``OUTCOME``) the files that were written, and hashes of the removed and of the
added rows.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import types as T

from omnisupport_ingest.cdc import columnar
from omnisupport_ingest.cdc.updating import CHANGE, GONE, SET, Updated
from omnisupport_ingest.lake.contenthash import ContentHash
from omnisupport_ingest.lake.key_files import (
    ROWS_PER_FILE,
    Bound,
    KeyFile,
    KeyOrder,
    KeyRange,
    range_numbers,
    read_file,
    read_range,
    write_rows,
)

RANGE = "_cdc_range"
"""The column of a row on its way to a file that has the number of its range."""

_BYTES_IN_HAND = 64 * 1024 * 1024

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

    ``schema``: of the rows in the files. ``sent``: of the rows that are sent to them, with ``CHANGE``.
    ``ordered_above``: the files above have the column that the files of the table are ordered by.
    """

    @property
    def ordered_above(self) -> bool: ...

    @property
    def schema(self) -> pa.Schema: ...

    @property
    def sent(self) -> pa.Schema: ...

    def rows_of(self, above: pa.Table) -> pa.Table:
        """Rows of the files above as rows to be sent to this table."""

    def reached(self, held: pa.Table, sent: pa.Table) -> npt.NDArray[np.bool_]:
        """Which of the rows ``held`` may be changed when the rows ``sent`` come."""

    def update(self, held: pa.Table, sent: pa.Table) -> Updated:
        """Update the rows ``held``, all that are reached, by the rows ``sent``."""

    def same(self, one: pa.Table, other: pa.Table) -> bool:
        """Whether the two have the same rows, in any order."""

    def ordered(self, rows: pa.Table) -> pa.Table:
        """``rows`` in the order that the rows of one key must have."""


@dataclass(frozen=True)
class FilesToUpdate:
    """The files of a table by key, the folder that new ones are drafted in, and the rules.

    ``rows_per_file`` and ``seals``: as of ``lake.key_files.write_rows``; ``sealed``: the files so made.
    ``doubts``: whether rows that were made have to be looked at before they are shown.
    """

    files: Sequence[KeyFile]
    order: KeyOrder
    draft: Path
    rules: Rules
    rows_per_file: int = ROWS_PER_FILE
    seals: bool = False
    sealed: Mapping[Bound, tuple[KeyFile, ...]] = field(default_factory=dict)
    doubts: Callable[[pa.Table], bool] | None = None


@dataclass(frozen=True)
class _InHand:
    """A range whose files have been read: its rows, with those of ``sealed`` files, and which of them may be
    changed."""

    number: int
    rows: pa.Table
    reached: npt.NDArray[np.bool_]
    sealed: Sequence[KeyFile]


def update_ranges(
    table: pa.Table, target: FilesToUpdate, ranges: Sequence[KeyRange], looks: Iterable[int] = ()
) -> Iterator[pa.RecordBatch]:
    """Update the files of the ranges that ``table`` has rows of, and look at those numbered ``looks``.

    Of many ranges the rows that may change are updated together: a few rows cost the kernel as much as one.
    """
    numbers = table[RANGE].to_numpy()
    if (numbers[1:] < numbers[:-1]).any():
        table = table.take(pc.sort_indices(table[RANGE])).combine_chunks()
        numbers = table[RANGE].to_numpy()
    table = table.select(target.rules.sent.names)
    outcomes: list[dict[str, Any]] = []
    in_hand: list[_InHand] = []
    size = first = last = 0
    for number in np.unique(np.concatenate([numbers, np.fromiter(looks, np.int32)])):
        start, last = np.searchsorted(numbers, [number, number + 1]).tolist()
        in_hand.append(_read(int(number), table.slice(start, last - start), target, ranges))
        size += in_hand[-1].rows.nbytes
        if size >= _BYTES_IN_HAND:
            outcomes += _updated(in_hand, table.slice(first, last - first), target, ranges)
            in_hand, size, first = [], 0, last
    if in_hand:
        outcomes += _updated(in_hand, table.slice(first, last - first), target, ranges)
    columns = [pa.array([each[field.name] for each in outcomes], _arrow(field)) for field in OUTCOME.fields]
    yield pa.RecordBatch.from_arrays(columns, names=OUTCOME.names)


def _read(number: int, sent: pa.Table, target: FilesToUpdate, ranges: Sequence[KeyRange]) -> _InHand:
    rules = target.rules
    rows, sealed = read_range(ranges[number], target.order, rules.schema), _sealed_of(sent, target)
    if sealed:
        rows = pa.concat_tables([rows, *(read_file(file, rules.schema) for file in sealed)])
    return _InHand(number, rows, rules.reached(rows, sent), sealed)


def _updated(
    in_hand: Sequence[_InHand], sent: pa.Table, target: FilesToUpdate, ranges: Sequence[KeyRange]
) -> list[dict[str, Any]]:
    """Update the ranges ``in_hand`` by the rows that are ``sent`` to them."""
    old = [each.rows.take(pa.array(np.flatnonzero(each.reached))) for each in in_hand]
    updated = target.rules.update(pa.concat_tables(old).combine_chunks(), sent.combine_chunks())
    if len(updated.refold):
        return [_outcome(in_hand[0].number, refold=_noted(updated.refold, target.draft))]
    made, places = updated.rows.combine_chunks(), np.zeros(0, np.int32)
    if len(in_hand) == 1:
        places = np.full(made.num_rows, in_hand[0].number)
    else:
        made, places = by_place(made, range_numbers(target.order.values(made), ranges))
    outcomes = []
    for each, was in zip(in_hand, old, strict=True):
        start, end = np.searchsorted(places, [each.number, each.number + 1])
        mine = made.slice(start, end - start)
        changed = not _are_same(was, mine, target.rules)
        if changed or is_cut(ranges, each.number):
            outcomes.append(_written(each, was, mine, target) | {"changed": changed})
        else:
            outcomes.append(_outcome(each.number))
    return outcomes


def by_place(rows: pa.Table, places: npt.NDArray[np.int32]) -> tuple[pa.Table, npt.NDArray[np.int32]]:
    """Return ``rows`` in the order of their ``places``, and these.

    Nothing is copied where they are in order: rows of new keys come in the order of the keys.
    """
    if (places[1:] >= places[:-1]).all():
        return rows, places
    order = np.argsort(places, kind="stable")
    return rows.take(pa.array(order)).combine_chunks(), places[order]


def _are_same(was: pa.Table, made: pa.Table, rules: Rules) -> bool:
    if was.num_rows != made.num_rows:
        return False
    before, after = (np.sort(each["_cdc_row_hash"].to_numpy()) for each in (was, made))
    # Mostly rows differ in what their hashes are about.
    return bool(np.array_equal(before, after)) and rules.same(was, made)


def _written(of: _InHand, was: pa.Table, made: pa.Table, target: FilesToUpdate) -> dict[str, Any]:
    """The outcome of a range whose rows ``made`` take the place of those it ``was`` reached with."""
    kept = columnar.filter_slices(of.rows, ~of.reached)
    files = write_rows(
        pa.concat_tables([kept, target.rules.ordered(made)]),
        target.order,
        target.draft,
        rows_per_file=target.rows_per_file,
        seals=target.seals,
    )
    return _outcome(of.number) | {
        "sealed": [file.path for file in of.sealed],
        "removed": str(ContentHash.of(was["_cdc_row_hash"].to_numpy())),
        "added": str(ContentHash.of(made["_cdc_row_hash"].to_numpy())),
        # What is kept has been looked at before.
        "doubted": target.doubts is not None and target.doubts(made),
        "files": [
            {"name": each.name, "rows": each.rows, "bytes": each.bytes, "stats": each.stats} for each in files
        ],
    }


def _noted(keys: pa.Array, draft: Path) -> str:
    """The file that the ``keys`` that must be folded again are written to."""
    # No failpoint: a draft that no table names yet.
    draft.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = str(draft / f"refold-{uuid.uuid4().hex}.parquet")
    pq.write_table(pa.table([keys.cast(pa.string())], schema=_KEYS), path)
    return path


def _outcome(number: int, *, refold: str | None = None) -> dict[str, Any]:
    """The outcome of a range where nothing has changed."""
    nothing = str(ContentHash())
    return {
        "range": number,
        "changed": False,
        "removed": nothing,
        "added": nothing,
        "refold": refold,
        "sealed": [],
        "doubted": False,
        "files": [],
    }


def _sealed_of(sent: pa.Table, target: FilesToUpdate) -> list[KeyFile]:
    """The sealed files of keys whose rows are sent as they are to be: they hold rows that go."""
    if not target.sealed:
        return []
    settled = sent.filter(pc.is_in(sent[CHANGE], pa.array([SET, GONE])))
    values = dict.fromkeys(target.order.values(settled).tolist())
    return [file for value in values for file in target.sealed.get(value, ())]


def _arrow(of: T.StructField) -> pa.DataType:
    if of.name == "sealed":
        return pa.list_(pa.string())
    if isinstance(of.dataType, T.ArrayType):
        return pa.list_(
            pa.struct(
                [("name", pa.string()), ("rows", pa.int64()), ("bytes", pa.int64()), ("stats", pa.string())]
            )
        )
    return {"range": pa.int32(), "changed": pa.bool_(), "doubted": pa.bool_()}.get(of.name, pa.string())


def is_cut(ranges: Sequence[KeyRange], number: int) -> bool:
    """Whether the files of a range hold other ranges too: if one of them changes, all must be written."""
    files = ranges[number].files
    beside = [each.files for each in (*ranges[max(0, number - 1) : number], *ranges[number + 1 : number + 2])]
    return bool(files) and files in beside
