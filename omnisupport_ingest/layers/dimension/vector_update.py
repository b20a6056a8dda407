"""Updates rows without rewriting their files: a task marks the old rows, and writes the new ones elsewhere.

A task looks up the old rows of the keys that are sent to it, in the files of their ranges and in the fresh
files, and merges them by the rules of the dimension. It first reads only the columns that decide a merge
(``UpdateRules.looked_at``). It reads other columns only where a new row copies a value from an old one, and
only those row groups. The positions of the old rows become part of the outcome, and the commit makes deletion
vectors of them. All new rows of a task go to one fresh file.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from omnisupport_ingest.cdc import columnar
from omnisupport_ingest.cdc.updating import UpdateRules
from omnisupport_ingest.lake.contenthash import ContentHash
from omnisupport_ingest.lake.fresh_files import Among, Between, Found, RowFinder
from omnisupport_ingest.lake.key_files import FileRange, range_numbers, write_fresh
from omnisupport_ingest.layers.dimension.range_update import (
    RANGE,
    FilesToUpdate,
    batch_of,
    marks_of,
    named,
    noted,
    outcome,
    sealed_of,
)

MARKED = -1
"""Stands for the number of a range in an outcome with marked rows, which may be of any ranges."""


def mark_rows(
    sent: pa.Table,
    target: FilesToUpdate,
    ranges: Sequence[FileRange],
    span: tuple[int, int],
    written: Collection[int],
) -> Iterator[pa.RecordBatch]:
    """Update the rows of ``sent`` by marking, and move the rows out of the fresh files that leave.

    ``sent``: with the column ``RANGE``. ``span``: the task's first range (inclusive) and its end (exclusive).
    ``written``: ranges of the task that were rewritten, with their rows in fresh files.
    """
    rules, order = _rules_of(target), target.order
    finder = RowFinder(order, rules.schema)
    stays = _held(sent, target, ranges, finder)
    moving = _moving(target, ranges, span, written, finder)
    sent = sent.select(rules.sent.names).combine_chunks()
    held = _Held((*stays, *moving), rules.looked_at, finder)
    reached = rules.reached(held.rows, sent)
    places = np.flatnonzero(reached)
    merge = rules.merge(held.rows.filter(pa.array(reached)).combine_chunks(), sent)
    if len(merge.refold):
        yield batch_of([outcome(MARKED, refold=noted(merge.refold, target.draft))])
        return
    made = merge.replaced(held.values({name: places[numbers] for name, numbers in merge.wanted.items()}))
    masks = held.masks(places[made.leaves])
    kept = [each.only(~mask).rows for each, mask in zip(moving, masks[len(stays) :], strict=True)]
    rows = columnar.concat([rules.schema.empty_table(), *kept, made.rows])
    if not made.leaves.any() and not rows.num_rows:
        return
    files = []
    if rows.num_rows:
        files = [write_fresh(rules.ordered(rows), order, target.draft, target.rows_per_group)]
    removed = merge.held["_cdc_row_hash"].filter(pa.array(made.leaves))
    result = outcome(MARKED) | {
        "changed": True,
        "removed": str(ContentHash.of(removed.to_numpy())),
        "added": str(ContentHash.of(made.rows["_cdc_row_hash"].to_numpy())),
        "doubted": target.doubts is not None and target.doubts(made.rows),
        "files": named(files),
        "marks": marks_of(each.only(mask) for each, mask in zip(stays, masks, strict=False)),
    }
    yield batch_of([result])


@dataclass(frozen=True)
class _Held:
    """The rows ``found``, numbered consecutively, with the columns of ``looked_at`` or with all."""

    found: Sequence[Found]
    looked_at: pa.Schema
    finder: RowFinder

    @cached_property
    def rows(self) -> pa.Table:
        """All rows, with the columns of ``looked_at``."""
        parts = [each.rows.select(self.looked_at.names) for each in self.found]
        return columnar.concat([self.looked_at.empty_table(), *parts])

    def values(self, wanted: Mapping[str, npt.NDArray[np.int64]]) -> dict[str, pa.Array]:
        """By column, the values of the rows with the ``wanted`` numbers (at least one, ascending)."""
        parts: dict[str, list[pa.Array]] = {name: [] for name in wanted}
        cuts = {name: np.searchsorted(at, self._ends) for name, at in wanted.items()}
        for number, each in enumerate(self.found):
            bounds = {name: slice(*cut[number : number + 2]) for name, cut in cuts.items()}
            mine = {name: wanted[name][bound] - self._ends[number] for name, bound in bounds.items()}
            in_hand = {name for name in mine if name in each.rows.column_names}
            read = {name: each.numbers[at] for name, at in mine.items() if len(at) and name not in in_hand}
            found = self.finder.values(each.file, read) if read else {}
            found |= {
                name: columnar.one_chunk(each.rows[name]).take(pa.array(mine[name])) for name in in_hand
            }
            for name, array in found.items():
                parts[name].append(array)
        return {name: pa.concat_arrays(arrays) for name, arrays in parts.items()}

    def masks(self, numbers: npt.NDArray[np.int64]) -> list[npt.NDArray[np.bool_]]:
        """Return for each of ``found`` a mask of its rows that have one of ``numbers``."""
        mask = np.zeros(self._ends[-1], np.bool_)
        mask[numbers] = True
        return np.split(mask, self._ends[1:-1]) if self.found else []

    @cached_property
    def _ends(self) -> npt.NDArray[np.int64]:
        return np.cumsum([0, *(len(each.numbers) for each in self.found)])


def _rules_of(target: FilesToUpdate) -> UpdateRules:
    if not isinstance(target.rules, UpdateRules):
        raise TypeError("Only the rows of a dimension are marked: files of a history are written anew.")
    return target.rules


def _held(
    sent: pa.Table, target: FilesToUpdate, ranges: Sequence[FileRange], finder: RowFinder
) -> list[Found]:
    """Return the rows with the keys of ``sent``, in files that stay, with the columns of ``looked_at``."""
    if not sent.num_rows:
        return []
    values, numbers = target.order.values(sent), sent[RANGE].to_numpy()
    looked_at = _rules_of(target).looked_at
    found = []
    for number in np.unique(numbers):
        mine = Among(values[numbers == number])
        found += [finder.find(file, mine, looked_at) for file in ranges[number].files]
    every = Among(values)
    stays = [file for file in target.fresh if file.path not in target.leaving]
    return [*found, *(finder.find(file, every, looked_at) for file in (*sealed_of(sent, target), *stays))]


def _moving(
    target: FilesToUpdate,
    ranges: Sequence[FileRange],
    span: tuple[int, int],
    written: Collection[int],
    finder: RowFinder,
) -> list[Found]:
    """Return the rows of the ranges in ``span`` from fresh files that leave, without those moved already."""
    low, high = span
    keys = Between(ranges[low].start, ranges[high - 1].end)
    moving = [finder.find(file, keys) for file in target.fresh if file.path in target.leaving]
    if not written:
        return moving
    gone = np.fromiter(written, np.int32)
    return [
        each.only(~np.isin(range_numbers(target.order.values(each.rows), ranges), gone)) for each in moving
    ]
