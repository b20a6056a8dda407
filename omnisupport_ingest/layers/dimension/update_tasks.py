"""Tasks of Spark update a table of key-ordered files; each task has a range of keys.

A task reads the changes of its keys and the files that hold these keys, updates the rows (``cdc.updating``,
``cdc.history_update``), writes the new files, and returns a row of statistics for each. No row passes through
the driver or the JVM. Files that a restarted task wrote twice are left out by name.
"""

from __future__ import annotations

import math
import uuid
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T

from omnisupport_ingest.cdc import columnar
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.lake import standing_task
from omnisupport_ingest.lake.contenthash import ContentHash
from omnisupport_ingest.lake.deletion_vectors import dead_rows_of
from omnisupport_ingest.lake.drafts import Drafts
from omnisupport_ingest.lake.file_rows import rows_of
from omnisupport_ingest.lake.file_tasks import are_few, in_shares
from omnisupport_ingest.lake.frame_tasks import write_by_tasks
from omnisupport_ingest.lake.key_files import (
    Bound,
    FileRange,
    KeyFile,
    KeyOrder,
    WrittenFile,
    between,
    range_numbers,
    ranges_of,
    rows_between,
)
from omnisupport_ingest.lake.layout import WHOLE_TABLE, LakeFile
from omnisupport_ingest.lake.schema import arrow_schema
from omnisupport_ingest.lake.staging import room_on_disk
from omnisupport_ingest.lake.stats import rows_in
from omnisupport_ingest.layers.dimension.range_update import (
    OUTCOME,
    RANGE,
    FilesToUpdate,
    Way,
    is_cut,
    update_ranges,
)
from omnisupport_ingest.layers.dimension.tidying import Rewrites, moving_rows, rewrites_of, with_leaving
from omnisupport_ingest.layers.dimension.vector_update import MARKED, mark_rows
from omnisupport_ingest.visiting import Visit, visiting

if TYPE_CHECKING:
    from omnisupport_ingest.lake.deletion_vectors import Rows

_TASKS_OF_FEW = 4
_ROWS_OF_FEW_FILES = 400_000
_ROWS_OF_A_PART = 100_000
_KEYS_OF_A_SAMPLE = 50_000
_BYTES_OF_A_GROUP = 4 * 1024 * 1024
_READ_PER_WRITTEN = 16
_ROWS_TO_LOOK_UP = 2_048


@dataclass(frozen=True)
class FilesUpdated:
    """The result of an update, before its commit.

    ``written``: files in the draft folder. ``replaced``: paths of the files that they replace. ``removed``
    and ``added``: hashes of the rows that left and of those that came. ``refold``: files of keys that must be
    folded again, so that their new rows can be sent; if there are any, the other fields do not count.
    ``doubted``: names of the ``written`` files whose rows the gate must read (``FilesToUpdate.doubts``).
    ``dead``: path of a file that stays → all of its dead rows, for files in which this update marked rows.
    """

    written: tuple[WrittenFile, ...] = ()
    replaced: tuple[str, ...] = ()
    removed: ContentHash = field(default_factory=ContentHash)
    added: ContentHash = field(default_factory=ContentHash)
    refold: tuple[str, ...] = ()
    doubted: frozenset[str] = frozenset()
    dead: Mapping[str, Rows] = field(default_factory=dict)


@dataclass(frozen=True)
class Sent:
    """The input of an update.

    ``changes``: files of net changes, to be merged with the rows of their keys. ``refolded``: stored rows
    with ``cdc.updating.CHANGE`` that were folded again, if any. ``again``: files of such rows from which keys
    are rebuilt (``refold_by_tasks``). ``folded``, ``stored``: the schemas of net changes and of stored rows.
    """

    spark: SparkSession
    changes: Sequence[LakeFile]
    folded: T.StructType
    stored: T.StructType
    refolded: DataFrame | None = None
    again: Sequence[LakeFile] = ()

    @property
    def rows(self) -> int:
        """The approximate number of rows that are sent."""
        return sum(file.rows for file in self.changes)


def update_files(sent: Sent, target: FilesToUpdate, *, look_at_all: bool = False) -> FilesUpdated:
    """Update the files of ``target`` by what is ``sent``.

    ``look_at_all``: also look at files to which nothing is sent, because a new truncate or a purge may affect
    their rows.
    """
    settled = [*sent.again, *_refolded_files(sent, target)]
    rows = _Rows(sent.changes, settled, arrow_schema(sent.folded, without=()))
    if target.fresh:
        keys = rows.refolded_keys(target.order) if target.way is Way.ERASE else target.order.no_values()
        target = with_leaving(target, keys, look_at_all=look_at_all)
    look_at_all = look_at_all or target.way is Way.RETURN
    ranges = ranges_of(target.files, rows_together=target.rows_per_file)
    if are_few(rows.files) and sent.refolded is None and not look_at_all:
        few = partial(_update_few, rows=rows, target=target, ranges=ranges)
        with failpoint("lake.write", target.draft), room_on_disk(sent.spark, target.draft):
            found = standing_task.ask(sent.spark, few)
        if found is not None:
            return _collected(found, ranges, target)
    standing_task.release()
    drafts = Drafts.of(sent.spark, target.draft)
    sample = _Sample(target.order.no_values(), 1)
    if rows.files and not (are_few(rows.files) and target.way is Way.REWRITE):
        sample = _sample(sent.spark, rows, target.order, drafts.visit)
    if not are_few(rows.files):
        cuts = _cuts(sample, ranges, 2 * target.rows_per_file)
        ranges = ranges_of(target.files, cuts, rows_together=target.rows_per_file)
    rewrites = rewrites_of(target, ranges, sample.of(ranges))
    due = rewrites.rewritten or frozenset()
    looks = [
        number for number in range(len(ranges)) if look_at_all or number in due or is_cut(ranges, number)
    ]
    bounds = _shared_out(sample, ranges, looks, rewrites, moving_rows(target, ranges))
    share = _Share(rows, target, ranges, rewrites, looks)
    tasks = len(bounds) - 1
    with failpoint("lake.write", target.draft), room_on_disk(sent.spark, target.draft):
        update = partial(_update, share=share, bounds=bounds, drafts=drafts)
        outcomes = sent.spark.range(0, tasks, 1, tasks).mapInArrow(update, OUTCOME).collect()
    updated = _collected(outcomes, ranges, target)
    if drafts.visit is not None:
        drafts.bring([file.name for file in updated.written])
        refold = drafts.paths(Path(path).name for path in updated.refold)
        return replace(updated, refold=tuple(refold))
    return updated


@dataclass(frozen=True)
class _Rows:
    """Files of rows to send: ``changes`` with the schema ``folded``, and ``refolded`` rows with
    ``CHANGE``."""

    changes: Sequence[LakeFile]
    refolded: Sequence[LakeFile]
    folded: pa.Schema

    @property
    def files(self) -> list[LakeFile]:
        return [*self.changes, *self.refolded]

    def refolded_keys(self, order: KeyOrder) -> npt.NDArray[Any]:
        """Return the ``refolded`` rows' values of the ordering column."""
        found = [
            order.values(pq.read_table(file.uri, columns=[order.column], partitioning=None))
            for file in self.refolded
        ]
        return np.concatenate([order.no_values(), *found])

    def between(self, target: FilesToUpdate, start: Bound | None, end: Bound | None) -> pa.Table:
        """Return the rows with ``CHANGE`` of the keys from ``start`` (inclusive) to ``end`` (exclusive)."""
        rules, order = target.rules, target.order
        kind = rules.sent
        found = [kind.empty_table()]
        # A run over many windows sends many files of few rows. Convert these together.
        for files in in_shares(self.changes):
            if rules.ordered_above:
                above = [
                    rows_between(file.uri, order, self.folded, dict(file.partition), (start, end))
                    for file in files
                ]
                found.append(rules.rows_of(columnar.concat(above)))
            else:
                rows = rules.rows_of(rows_of(files, self.folded))
                found.append(rows.filter(pa.array(between(order.values(rows), start, end))))
        found += [rows_between(file.uri, order, kind, {}, (start, end)) for file in self.refolded]
        return columnar.concat(each.cast(kind) for each in found)


def _refolded_files(sent: Sent, target: FilesToUpdate) -> list[LakeFile]:
    """Write the rows that were folded again to files, for the tasks to read; return the files."""
    if sent.refolded is None:
        return []
    folder = target.draft / f"refolded-{uuid.uuid4().hex}"
    rows = sent.refolded.sortWithinPartitions(f"`{target.order.column}`")
    drafts = Drafts.of(sent.spark, target.draft)
    with failpoint("lake.write", target.draft), room_on_disk(sent.spark, target.draft):
        if drafts.visit is not None:
            return [
                LakeFile(each.name, str(drafts.objects / each.name), WHOLE_TABLE, (), each.rows, each.bytes)
                for each in write_by_tasks(rows, drafts, ())
            ]
        # With small, sorted row groups, a task reads only those that have its keys.
        rows.write.option("parquet.block.size", _BYTES_OF_A_GROUP).parquet(f"file://{folder}")
    return [
        LakeFile(str(file), str(file), WHOLE_TABLE, (), rows_in(file), file.stat().st_size)
        for file in sorted(folder.glob("*.parquet"))
    ]


@dataclass(frozen=True)
class _Sample:
    """A sorted sample of the keys that are sent; each stands for ``weight`` rows."""

    keys: npt.NDArray[Any]
    weight: int

    def of(self, ranges: Sequence[FileRange]) -> npt.NDArray[np.int64]:
        """Return about how many rows are sent to each of ``ranges``."""
        return np.bincount(range_numbers(self.keys, ranges), minlength=len(ranges)) * self.weight


def _sample(spark: SparkSession, rows: _Rows, order: KeyOrder, visit: Visit | None) -> _Sample:
    """Return every n-th key of each file, read by tasks; the total number is bounded."""
    files = rows.files
    weight = max(1, sum(file.rows for file in files) // _KEYS_OF_A_SAMPLE)
    shares = in_shares(files)
    task = visiting(visit, partial(_sampled, shares=shares, order=order, weight=weight))
    found = spark.range(0, len(shares), 1, len(shares)).mapInArrow(task, "keys binary").collect()
    # A row of Spark for each key would take longer than reading the keys.
    keys = [pa.ipc.open_stream(row["keys"]).read_all()["key"].to_numpy() for row in found]
    return _Sample(np.sort(np.concatenate([order.no_values(), *keys])), weight)


def _sampled(
    batches: Iterable[pa.RecordBatch],
    shares: Sequence[Sequence[LakeFile]],
    order: KeyOrder,
    weight: int,
) -> Iterator[pa.RecordBatch]:
    schema = pa.schema([("key", pa.int64() if order.whole_numbers else pa.string())])
    for number in (each for batch in batches for each in batch.column(0).to_pylist()):
        for file in shares[number]:
            keys = order.values(pq.read_table(file.uri, columns=[order.column], partitioning=None))
            # Start at another key in each file, so that many small files are sampled in proportion.
            every = np.sort(keys)[zlib.crc32(file.uri.encode()) % weight :: weight]
            sampled = pa.BufferOutputStream()
            with pa.ipc.new_stream(sampled, schema) as stream:
                stream.write_batch(pa.record_batch([pa.array(every, schema.field(0).type)], schema))
            yield pa.record_batch({"keys": pa.array([sampled.getvalue().to_pybytes()], pa.binary())})


def _cuts(sample: _Sample, ranges: Sequence[FileRange], rows_of_a_range: int) -> list[Bound]:
    """Return where to split ranges to which very many rows are sent."""
    numbers = range_numbers(sample.keys, ranges)
    starts = {each.start for each in ranges}
    cuts: set[Bound] = set()
    for number, keys in zip(*np.unique(numbers, return_counts=True), strict=True):
        pieces = math.ceil(keys * sample.weight / rows_of_a_range)
        if pieces > 1:
            held = sample.keys[np.searchsorted(numbers, number) :][:keys]
            cuts |= {held[keys * piece // pieces] for piece in range(1, pieces)}
    return [cut.item() if isinstance(cut, np.generic) else cut for cut in cuts if cut not in starts]


def _shared_out(
    sample: _Sample,
    ranges: Sequence[FileRange],
    looks: Sequence[int],
    rewrites: Rewrites,
    moving: npt.NDArray[np.int64],
) -> list[int]:
    """Divide the ranges among tasks of about equal work; return the first range of each task, then the end.

    ``moving``: by range, the rows that move out of fresh files.
    """
    count = len(ranges)
    sent = sample.of(ranges)
    # Without a sample, assume that every range is sent something.
    looked = (sent > 0) if len(sample.keys) else np.ones(count, np.bool_)
    looked[list(looks)] = True
    # Reading and rewriting a file costs about as much as sending half of its rows.
    held = np.array([sum(file.rows for file in each.files) for each in ranges])
    held = np.where(rewrites.has(np.arange(count)), held // 2, held // _READ_PER_WRITTEN)
    work = np.cumsum(sent + np.where(looked, held, 0) + moving)
    # Each task that marks rows leaves a fresh file, so few rows get a single task.
    least = _TASKS_OF_FEW if rewrites.rewritten is None else 1
    counted = bool(len(sample.keys) or looks or moving.any())
    tasks = max(least, math.ceil(work[-1] / _ROWS_OF_A_PART) if counted else 0)
    firsts = np.searchsorted(work, work[-1] * np.arange(1, tasks) / tasks, side="right")
    return sorted({0, *(int(first) for first in firsts if first < count), count})


@dataclass(frozen=True)
class _Share:
    """The inputs that all tasks of an update share. ``looks``: ranges to look at in any case."""

    rows: _Rows
    target: FilesToUpdate
    ranges: Sequence[FileRange]
    rewrites: Rewrites
    looks: Sequence[int]

    def update(self, sent: pa.Table, low: int, high: int) -> Iterator[pa.RecordBatch]:
        """Update the ranges from ``low`` (inclusive) to ``high`` (exclusive) by the rows ``sent``.

        ``sent`` has the column ``RANGE``.
        """
        target, ranges, rewrites = self.target, self.ranges, self.rewrites
        to_rewrite, to_mark = columnar.split_rows(sent, rewrites.has(sent[RANGE].to_numpy()))
        looks = [look for look in self.looks if low <= look < high]
        written: list[int] = []
        for batch in update_ranges(to_rewrite, target, ranges, looks, rewrites.forced):
            changed = batch.filter(batch["changed"])
            written += changed["range"].to_pylist()
            yield batch
        if target.leaving or rewrites.rewritten is not None:
            yield from mark_rows(to_mark, target, ranges, (low, high), written)


def _update(
    batches: Iterable[pa.RecordBatch], share: _Share, bounds: Sequence[int], drafts: Drafts
) -> Iterator[pa.RecordBatch]:
    """Run in a worker: for each task number in ``batches``, update the files of the task's ranges.

    ``bounds``: the first range of each task, then the end.
    """
    ranges = share.ranges
    with drafts.begun() as folder:
        target = replace(share.target, draft=folder)
        share = replace(share, target=target)
        for number in (each for batch in batches for each in batch.column(0).to_pylist()):
            low, high = bounds[number], bounds[number + 1]
            sent = share.rows.between(target, ranges[low].start, ranges[high - 1].end)
            numbers = range_numbers(target.order.values(sent), ranges)
            for batch in share.update(sent.append_column(RANGE, pa.array(numbers)), low, high):
                drafts.sent(folder)
                yield batch


def _update_few(
    rows: _Rows, target: FilesToUpdate, ranges: Sequence[FileRange]
) -> list[dict[str, Any]] | None:
    """Do the work of ``_update`` in this one task; return None if it is enough work for several tasks."""
    sent = rows.between(target, ranges[0].start, ranges[-1].end)
    numbers = range_numbers(target.order.values(sent), ranges)
    rewrites = rewrites_of(target, ranges, np.bincount(numbers, minlength=len(ranges)))
    due = sorted(rewrites.rewritten or ())
    touched = np.union1d(numbers, np.array(due, np.int64)).astype(int)
    rewritten = rewrites.has(touched)
    held = sum(file.rows for number in touched[rewritten] for file in ranges[number].files)
    held += sum(file.rows for file in target.fresh if file.path in target.leaving)
    held += _ROWS_TO_LOOK_UP * int((~rewritten).sum())
    if held > _ROWS_OF_FEW_FILES:
        return None
    share = _Share(rows, target, ranges, rewrites, due)
    sent = sent.append_column(RANGE, pa.array(numbers))
    return [row for batch in share.update(sent, 0, len(ranges)) for row in batch.to_pylist()]


def _collected(outcomes: Sequence[Any], ranges: Sequence[FileRange], target: FilesToUpdate) -> FilesUpdated:
    refold = tuple(sorted(str(target.draft / each["refold"]) for each in outcomes if each["refold"]))
    if refold:
        return FilesUpdated(refold=refold)
    marked = [each for each in outcomes if each["range"] == MARKED]
    of_ranges = [each for each in outcomes if each["range"] != MARKED]
    changed = {ranges[each["range"]].files for each in of_ranges if each["changed"]}
    rewritten = [each for each in of_ranges if ranges[each["range"]].files in changed]
    counted = [*rewritten, *marked]
    written = [
        WrittenFile(file["name"], file["rows"], file["bytes"], file["stats"])
        for each in counted
        for file in each["files"]
    ]
    replaced = {file.path for files in changed for file in files} | target.leaving
    replaced |= {path for each in rewritten for path in each["sealed"]}
    dead = _dead(counted, target)
    gone = {path for path, rows in dead.items() if len(rows) == _file_at(target)[path].stored_rows}
    none = ContentHash()
    return FilesUpdated(
        written=tuple(sorted(written, key=lambda file: file.name)),
        replaced=tuple(sorted(replaced | gone)),
        removed=reduce(ContentHash.__add__, (ContentHash.parse(each["removed"]) for each in outcomes), none),
        added=reduce(ContentHash.__add__, (ContentHash.parse(each["added"]) for each in outcomes), none),
        doubted=frozenset(file["name"] for each in outcomes if each["doubted"] for file in each["files"]),
        dead={path: rows for path, rows in dead.items() if path not in gone},
    )


def _dead(outcomes: Sequence[Any], target: FilesToUpdate) -> dict[str, Rows]:
    """Return all dead rows, old and new, of each file in which ``outcomes`` mark rows."""
    found: dict[str, list[Rows]] = {}
    for each in outcomes:
        for mark in each["marks"]:
            found.setdefault(mark["path"], []).append(np.frombuffer(mark["rows"], np.int64))
    files = _file_at(target)
    return {
        path: np.unique(np.concatenate([dead_rows_of(files[path]), *rows])) for path, rows in found.items()
    }


def _file_at(target: FilesToUpdate) -> dict[str, KeyFile]:
    sealed = (file for files in target.sealed.values() for file in files)
    return {file.path: file for file in (*target.files, *target.fresh, *sealed)}
