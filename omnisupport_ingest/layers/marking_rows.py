"""How a task updates rows without writing their files anew: it marks the old rows and writes new ones apart.

The old rows of the keys that something is sent to are looked up in the files of their ranges and in the fresh
files, and merged as everywhere (``updating_ranges.Rules``). Where they are becomes part of the outcome; the
commit makes deletion vectors of it. The new rows of a task go to one fresh file.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np
import pyarrow as pa

from omnisupport_ingest.cdc import columnar
from omnisupport_ingest.lake.contenthash import ContentHash
from omnisupport_ingest.lake.fresh_files import Among, Between, Found, RowFinder
from omnisupport_ingest.lake.key_files import KeyRange, range_numbers, write_fresh
from omnisupport_ingest.layers.updating_ranges import (
    RANGE,
    FilesToUpdate,
    are_same,
    batch_of,
    marks_of,
    named,
    noted,
    outcome,
    sealed_of,
)

MARKED = -1
"""In an outcome, in the place of the number of a range: rows of any ranges were marked."""


def mark_rows(
    sent: pa.Table,
    target: FilesToUpdate,
    ranges: Sequence[KeyRange],
    span: tuple[int, int],
    written: Collection[int],
) -> Iterator[pa.RecordBatch]:
    """Update the rows of ``sent`` by marking, and move the rows of the fresh files that leave.

    ``sent``: with ``RANGE``. ``span``: the first range of the task and the end. ``written``: ranges of it
    that were written anew, with their fresh rows.
    """
    rules, order = target.rules, target.order
    finder = RowFinder(order, rules.schema)
    found = _held(sent, target, ranges, finder)
    moving = _moving(target, ranges, span, written, finder)
    sent = sent.select(rules.sent.names).combine_chunks()
    held = _rows_of(everywhere := [*found, *moving], rules.schema)
    reached = rules.reached(held, sent)
    old = held.filter(pa.array(reached)).combine_chunks()
    updated = rules.update(old, sent)
    if len(updated.refold):
        yield batch_of([outcome(MARKED, refold=noted(updated.refold, target.draft))])
        return
    made = updated.rows.combine_chunks()
    if are_same(old, made, rules):
        # What moves goes as it is, those rows among it that were looked at.
        old, made, reached = old.slice(0, 0), made.slice(0, 0), np.zeros_like(reached)
    ends = np.cumsum([len(each.numbers) for each in everywhere])
    masks = np.split(reached, ends[:-1]) if everywhere else []
    kept = [each.only(~mask) for each, mask in zip(moving, masks[len(found) :], strict=True)]
    rows = columnar.concat([_rows_of(kept, rules.schema), made]).combine_chunks()
    if not old.num_rows and not rows.num_rows:
        return
    files = []
    if rows.num_rows:
        files = [write_fresh(rules.ordered(rows), order, target.draft, target.rows_per_group)]
    told = outcome(MARKED) | {
        "changed": True,
        "removed": str(ContentHash.of(old["_cdc_row_hash"].to_numpy())),
        "added": str(ContentHash.of(made["_cdc_row_hash"].to_numpy())),
        "doubted": target.doubts is not None and target.doubts(made),
        "files": named(files),
        "marks": marks_of(each.only(mask) for each, mask in zip(found, masks, strict=False)),
    }
    yield batch_of([told])


def _rows_of(found: Sequence[Found], schema: pa.Schema) -> pa.Table:
    return columnar.concat([schema.empty_table(), *(each.rows for each in found)])


def _held(
    sent: pa.Table, target: FilesToUpdate, ranges: Sequence[KeyRange], finder: RowFinder
) -> list[Found]:
    """The rows that have the keys of ``sent``, in files that stay."""
    if not sent.num_rows:
        return []
    values, numbers = target.order.values(sent), sent[RANGE].to_numpy()
    found = []
    for number in np.unique(numbers):
        mine = Among(values[numbers == number])
        found += [finder.find(file, mine) for file in ranges[number].files]
    every = Among(values)
    stays = [file for file in target.fresh if file.path not in target.leaving]
    return [*found, *(finder.find(file, every) for file in (*sealed_of(sent, target), *stays))]


def _moving(
    target: FilesToUpdate,
    ranges: Sequence[KeyRange],
    span: tuple[int, int],
    written: Collection[int],
    finder: RowFinder,
) -> list[Found]:
    """The rows of the ranges of ``span`` in fresh files that leave, unless they have moved already."""
    low, high = span
    keys = Between(ranges[low].start, ranges[high - 1].end)
    moving = [finder.find(file, keys) for file in target.fresh if file.path in target.leaving]
    if not written:
        return moving
    gone = np.fromiter(written, np.int32)
    return [
        each.only(~np.isin(range_numbers(target.order.values(each.rows), ranges), gone)) for each in moving
    ]
