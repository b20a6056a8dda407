"""One Spark job that updates a table of key-ordered files by rows sent to the files of their keys.

Spark brings the rows of each range of keys together. A task reads the file of its range itself, updates its
rows (``cdc.updating``), writes the files that take its place, and returns a row of statistics; no row passes
through the driver. What a task that was started again wrote twice is left out by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from omnisupport_ingest.cdc import columnar
from omnisupport_ingest.cdc.stored import from_folded
from omnisupport_ingest.cdc.updating import CHANGE, MERGE, Updated, UpdateRules, update_rows
from omnisupport_ingest.failpoints import gate
from omnisupport_ingest.lake.contenthash import ContentHash
from omnisupport_ingest.lake.key_files import (
    ROWS_PER_FILE,
    Bound,
    KeyFile,
    KeyOrder,
    KeyRange,
    WrittenFile,
    range_numbers,
    ranges_of,
    read_range,
    write_rows,
)
from omnisupport_ingest.lake.layout import WINDOW, LakeFile
from omnisupport_ingest.lake.one_task import are_few, rows_of
from omnisupport_ingest.lake.read import read_files
from omnisupport_ingest.lake.schema import arrow_schema
from omnisupport_ingest.lake.staging import room_on_disk

_RANGE = "_cdc_range"
_TASKS_OF_FEW = 4
_FEW = 50_000
"""Rows up to which nobody counts how many go to which file."""

_ROWS_OF_A_RANGE = 4 * ROWS_PER_FILE
_ROWS_OF_A_PART = 100_000
_SAMPLE_OF_A_RANGE = 20

_KEYS = pa.schema([("_cdc_key", pa.string())])

_OUTCOME = T.StructType(
    [
        T.StructField("range", T.IntegerType()),
        T.StructField("changed", T.BooleanType()),
        T.StructField("removed", T.StringType()),
        T.StructField("added", T.StringType()),
        T.StructField("refold", T.StringType()),
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


@dataclass(frozen=True)
class FilesUpdated:
    """What an update comes to, before its commit.

    ``written``: files in the draft folder. ``replaced``: paths of the files whose place they take.
    ``removed`` and ``added``: hashes of the rows that left and of those that came. ``refold``: files of keys
    that must be folded again and sent as they are to be; if there are any, nothing else counts.
    """

    written: tuple[WrittenFile, ...] = ()
    replaced: tuple[str, ...] = ()
    removed: ContentHash = field(default_factory=ContentHash)
    added: ContentHash = field(default_factory=ContentHash)
    refold: tuple[str, ...] = ()


@dataclass(frozen=True)
class FilesToUpdate:
    """The files of a table by key, the folder that new ones are drafted in, and the rules.

    ``rows_per_file``: as of ``lake.key_files.write_rows``.
    """

    files: Sequence[KeyFile]
    order: KeyOrder
    draft: Path
    rules: UpdateRules
    rows_per_file: int = ROWS_PER_FILE


@dataclass(frozen=True)
class Sent:
    """What a table is updated by.

    ``changes``: files of net changes, to be merged with the rows of their keys. ``refolded``: stored rows
    with ``cdc.updating.CHANGE`` that were folded again, if any. ``folded``, ``stored``: the schemas of both.
    """

    spark: SparkSession
    changes: Sequence[LakeFile]
    folded: T.StructType
    stored: T.StructType
    refolded: DataFrame | None = None

    @property
    def rows(self) -> int:
        """About how many rows are sent."""
        return sum(file.rows for file in self.changes)


def update_files(sent: Sent, target: FilesToUpdate, *, look_at_all: bool = False) -> FilesUpdated:
    """Update the files of ``target`` by what is ``sent``.

    ``look_at_all``: files that nothing is sent to are looked at too, as new truncates and what may be left
    out by now asks for. Few rows are read by the tasks that update the files; more are brought to them.
    """
    ranges = ranges_of(target.files)
    if sent.refolded is None and are_few(sent.changes):
        outcome = _by_few_tasks(sent, target, ranges, look_at_all=look_at_all)
    else:
        rows = _stored_rows(sent, target)
        if sent.rows > _FEW:
            ranges = ranges_of(target.files, _cuts(rows, target, ranges))
        outcome = _by_ranges(rows, sent.rows, target, ranges, look_at_all=look_at_all)
    with gate("lake.write", target.draft), room_on_disk(outcome, target.draft):
        outcomes = outcome.collect()
    return _collected(outcomes, ranges)


def _by_few_tasks(
    sent: Sent, target: FilesToUpdate, ranges: Sequence[KeyRange], *, look_at_all: bool
) -> DataFrame:
    """Tasks that each read all that is sent, and update the files of every so many ranges."""
    tasks = min(len(ranges), _TASKS_OF_FEW)
    kind = arrow_schema(sent.folded, without=())
    update = partial(
        _update_some,
        target=target,
        ranges=ranges,
        read=partial(rows_of, list(sent.changes), kind),
        among=tasks,
        look_at_all=look_at_all,
    )
    return sent.spark.range(0, tasks, 1, tasks).mapInArrow(update, _OUTCOME)


def _update_some(
    batches: Iterable[pa.RecordBatch],
    target: FilesToUpdate,
    ranges: Sequence[KeyRange],
    read: Callable[[], pa.Table],
    among: int,
    *,
    look_at_all: bool,
) -> Iterator[pa.RecordBatch]:
    for number in (each for batch in batches for each in batch.column(0).to_pylist()):
        stored = from_folded(read(), target.rules.schema)
        rows = stored.append_column(CHANGE, pa.repeat(pa.scalar(MERGE), stored.num_rows))
        places = range_numbers(target.order.values(rows), ranges)
        wanted = range(number, len(ranges), among) if look_at_all else ()
        rows = rows.append_column(_RANGE, pa.array(places)).filter(pa.array(places % among == number))
        yield from _update_rows(rows, target, ranges, wanted)


def _stored_rows(sent: Sent, target: FilesToUpdate) -> DataFrame:
    """All that is sent, as stored rows with ``CHANGE``."""
    schema = T.StructType([*sent.stored.fields, T.StructField(CHANGE, T.StringType())])
    changes = read_files(sent.spark, sent.folded, (WINDOW,), sent.changes)
    rows = changes.mapInArrow(partial(_stored, schema=target.rules.schema), schema)
    return rows if sent.refolded is None else rows.unionByName(sent.refolded)


def _stored(batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        rows = from_folded(pa.Table.from_batches([batch]), schema)
        yield from rows.append_column(CHANGE, pa.repeat(pa.scalar(MERGE), rows.num_rows)).to_batches()


def _by_ranges(
    sent: DataFrame, count: int, target: FilesToUpdate, ranges: Sequence[KeyRange], *, look_at_all: bool
) -> DataFrame:
    """Tasks to which Spark brings the rows of their ranges."""
    schema = T.StructType([*sent.schema.fields, T.StructField(_RANGE, T.IntegerType())])
    routed = sent.mapInArrow(partial(_route, order=target.order, ranges=ranges), schema)
    shared = [number for number, each in enumerate(ranges) if _is_cut(ranges, number)]
    looks = list(range(len(ranges))) if look_at_all else shared
    if looks:
        routed = routed.unionByName(_looks(sent.sparkSession, looks, schema))
    parts = max(1, min(len(ranges), max(8, math.ceil(count / _ROWS_OF_A_PART))))
    grouped = routed.coalesce(1) if parts == 1 else routed.repartition(parts, _RANGE)
    return grouped.mapInArrow(partial(_update, target=target, ranges=ranges), _OUTCOME)


def _is_cut(ranges: Sequence[KeyRange], number: int) -> bool:
    """Whether the file of a range holds other ranges too: if one of them changes, all must be written."""
    file = ranges[number].file
    beside = [each.file for each in (*ranges[max(0, number - 1) : number], *ranges[number + 1 : number + 2])]
    return file is not None and file in beside


def _looks(spark: SparkSession, numbers: Sequence[int], schema: T.StructType) -> DataFrame:
    """A row without values for each range, which asks for a look at its file."""
    chosen = F.array(*(F.lit(number) for number in numbers))
    frame = spark.range(1).select(F.explode(chosen).alias(_RANGE))
    values = (
        F.col(_RANGE) if each.name == _RANGE else F.lit(None).cast(each.dataType).alias(each.name)
        for each in schema.fields
    )
    return frame.select(*values)


def _cuts(sent: DataFrame, target: FilesToUpdate, ranges: Sequence[KeyRange]) -> list[Bound]:
    """Where to cut ranges that very many rows are sent to, by a sample of their keys."""
    column = target.order.column
    keyed = sent.select(F.col(f"`{column}`"))
    schema = T.StructType([keyed.schema[0], T.StructField(_RANGE, T.IntegerType())])
    routed = keyed.mapInArrow(partial(_route, order=target.order, ranges=ranges), schema)
    counted = routed.groupBy(_RANGE).agg(F.count("*").alias("rows"))
    heavy = {row[_RANGE]: row["rows"] for row in counted.collect() if row["rows"] > 2 * _ROWS_OF_A_RANGE}
    if not heavy:
        return []
    total = sum(heavy.values())
    share = min(1.0, _SAMPLE_OF_A_RANGE / _ROWS_OF_A_RANGE)
    sample = routed.where(F.col(_RANGE).isin(*heavy)).sample(fraction=share, seed=total)
    values: dict[int, list[Bound]] = {number: [] for number in heavy}
    for row in sample.collect():
        if row[0] is not None:
            values[row[_RANGE]].append(row[0])
    cuts: list[Bound] = []
    for number, found in values.items():
        found.sort()
        pieces = math.ceil(heavy[number] / _ROWS_OF_A_RANGE)
        cuts += {found[len(found) * piece // pieces] for piece in range(1, pieces)} if found else ()
    starts = {each.start for each in ranges}
    return [cut for cut in set(cuts) if cut not in starts]


def _route(
    batches: Iterable[pa.RecordBatch], order: KeyOrder, ranges: Sequence[KeyRange]
) -> Iterator[pa.RecordBatch]:
    """The rows, each with the number of its range."""
    for batch in batches:
        rows = pa.Table.from_batches([batch])
        numbers = range_numbers(order.values(rows), ranges)
        yield from rows.append_column(_RANGE, pa.array(numbers)).combine_chunks().to_batches()


def _update(
    batches: Iterable[pa.RecordBatch], target: FilesToUpdate, ranges: Sequence[KeyRange]
) -> Iterator[pa.RecordBatch]:
    """What Spark runs on its workers: update the files of the ranges that have rows here."""
    table = columnar.whole(batches)
    if table is not None:
        yield from _update_rows(table, target, ranges)


def _update_rows(
    table: pa.Table, target: FilesToUpdate, ranges: Sequence[KeyRange], looks: Iterable[int] = ()
) -> Iterator[pa.RecordBatch]:
    """Update the files of the ranges that ``table`` has rows of, and look at those numbered ``looks``."""
    schema = target.rules.schema.append(pa.field(CHANGE, pa.string()))
    table = table.take(pc.sort_indices(table[_RANGE])).combine_chunks()
    numbers = table[_RANGE].to_numpy()
    outcomes = []
    for number in np.unique(np.concatenate([numbers, np.fromiter(looks, np.int32)])):
        start, end = np.searchsorted(numbers, [number, number + 1])
        rows = table.slice(start, end - start)
        rows = rows.filter(pc.is_valid(rows[CHANGE])).select(schema.names)
        sent = rows.cast(schema).combine_chunks() if rows.num_rows else schema.empty_table()
        held = read_range(ranges[number], target.order, target.rules.schema)
        updated = update_rows(held, sent, target.rules)
        outcomes.append(_outcome(int(number), updated, target, keep=_is_cut(ranges, int(number))))
    columns = [pa.array([each[field.name] for each in outcomes], _arrow(field)) for field in _OUTCOME.fields]
    yield pa.RecordBatch.from_arrays(columns, names=_OUTCOME.names)


def _arrow(of: T.StructField) -> pa.DataType:
    if isinstance(of.dataType, T.ArrayType):
        return pa.list_(
            pa.struct(
                [("name", pa.string()), ("rows", pa.int64()), ("bytes", pa.int64()), ("stats", pa.string())]
            )
        )
    return {"range": pa.int32(), "changed": pa.bool_()}.get(of.name, pa.string())


def _outcome(number: int, updated: Updated, target: FilesToUpdate, *, keep: bool) -> dict[str, Any]:
    """Write what the range has now. ``keep``: also where nothing changed, as the file's other ranges may."""
    refold = ""
    files: list[WrittenFile] = []
    if len(updated.refold):
        target.draft.mkdir(mode=0o700, parents=True, exist_ok=True)
        refold = str(target.draft / f"refold-{number}.parquet")
        pq.write_table(pa.table([updated.refold.cast(pa.string())], schema=_KEYS), refold)
    elif updated.changed or keep:
        files = write_rows(updated.rows, target.order, target.draft, rows_per_file=target.rows_per_file)
    return {
        "range": number,
        "changed": updated.changed,
        "removed": str(ContentHash.of(updated.removed)),
        "added": str(ContentHash.of(updated.added)),
        "refold": refold,
        "files": [
            {"name": each.name, "rows": each.rows, "bytes": each.bytes, "stats": each.stats} for each in files
        ],
    }


def _collected(outcomes: Sequence[Any], ranges: Sequence[KeyRange]) -> FilesUpdated:
    refold = tuple(sorted(each["refold"] for each in outcomes if each["refold"]))
    if refold:
        return FilesUpdated(refold=refold)
    changed = {ranges[each["range"]].file for each in outcomes if each["changed"]}
    written = [
        WrittenFile(file["name"], file["rows"], file["bytes"], file["stats"])
        for each in outcomes
        if ranges[each["range"]].file in changed
        for file in each["files"]
    ]
    none = ContentHash()
    return FilesUpdated(
        written=tuple(sorted(written, key=lambda file: file.name)),
        replaced=tuple(sorted(file.path for file in changed if file is not None)),
        removed=reduce(ContentHash.__add__, (ContentHash.parse(each["removed"]) for each in outcomes), none),
        added=reduce(ContentHash.__add__, (ContentHash.parse(each["added"]) for each in outcomes), none),
    )
