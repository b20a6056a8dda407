"""Plans the upkeep in one update of a table with fresh files: ranges to rewrite, fresh files to empty."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from omnisupport_ingest.lake.fresh_files import values_in
from omnisupport_ingest.lake.key_files import KeyFile, KeyRange, range_numbers
from omnisupport_ingest.lake.layout import generation_of
from omnisupport_ingest.layers.updating_ranges import FilesToUpdate, Way, is_cut
from omnisupport_ingest.layers.upkeep import Counts, fresh_to_merge, ranges_to_rewrite


@dataclass(frozen=True)
class Rewrites:
    """How the ranges of a table are updated, by their numbers.

    ``homes``: ranges whose files are rewritten instead of having rows marked; None: all ranges. ``forced``:
    ranges whose files are rewritten even if no row changes, once they are looked at.
    """

    homes: frozenset[int] | None = None
    forced: frozenset[int] = frozenset()

    def are_home(self, numbers: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """Return a mask of ``numbers``: whether the rows of the range are rewritten and not marked."""
        if self.homes is None:
            return np.ones(len(numbers), np.bool_)
        return np.isin(numbers, np.fromiter(self.homes, np.int64))


def with_leaving(
    target: FilesToUpdate, keys: npt.NDArray[Any], *, look_at_all: bool = False
) -> FilesToUpdate:
    """Return ``target`` with ``leaving`` set: the fresh files whose rows all move. ``keys``: values of the
    ordering column; with ``Way.ERASE`` every fresh file with one of them leaves."""
    files = target.fresh
    chosen: Sequence[int] = []
    if look_at_all or target.way is Way.RETURN:
        chosen = range(len(files))
    elif target.way is Way.ERASE:
        held = values_in(files, target.order)
        chosen = [number for number, values in enumerate(held) if np.isin(values, keys).any()]
    elif target.way is Way.MARK:
        of = [generation_of(file.path) for file in files]
        # The files that the tasks of one update wrote hold each key once, so they count as one.
        generations = sorted(set(of))
        counts = [
            [sum(rows for rows, each in zip(all_rows, of, strict=True) if each == one) for one in generations]
            for all_rows in ([file.rows for file in files], [file.stored_rows for file in files])
        ]
        merged = {generations[number] for number in fresh_to_merge(*counts)}
        chosen = [number for number, each in enumerate(of) if each in merged]
    return replace(target, leaving=frozenset(files[number].path for number in chosen))


def rewrites_of(target: FilesToUpdate, ranges: Sequence[KeyRange], sent: Counts) -> Rewrites:
    """Plan which of ``ranges`` are rewritten. ``sent``: the number of rows sent to each."""
    cut = frozenset(n for n in range(len(ranges)) if is_cut(ranges, n)) if target.fresh else frozenset()
    if target.way is Way.REWRITE:
        return Rewrites(forced=cut)
    dead = np.array([sum(_dead(file) for file in each.files) for each in ranges], np.int64)
    if target.way is Way.ERASE:
        return Rewrites(forced=cut | _numbers(dead > 0))
    groups = _groups(ranges)
    fresh = np.zeros(len(ranges), np.int64)
    for values in values_in(target.fresh, target.order, live=True):
        fresh += np.bincount(range_numbers(values, ranges), minlength=len(ranges))
    if target.way is Way.RETURN:
        return Rewrites(forced=cut | _numbers(dead + fresh > 0))
    firsts = np.flatnonzero(np.diff(groups, prepend=-1))
    stored = np.array([sum(file.stored_rows for file in ranges[n].files) for n in firsts.tolist()], np.int64)
    of_group = [np.bincount(groups, weights=each).astype(np.int64) for each in (fresh, sent)]
    chosen = ranges_to_rewrite(stored, dead[firsts] + of_group[0], of_group[1])
    homes = _numbers(np.isin(groups, chosen))
    return Rewrites(homes, homes)


def moving_rows(target: FilesToUpdate, ranges: Sequence[KeyRange]) -> Counts:
    """Count the live rows of each of ``ranges`` in the fresh files that leave."""
    found = np.zeros(len(ranges), np.int64)
    leaving = [file for file in target.fresh if file.path in target.leaving]
    for values in values_in(leaving, target.order, live=True):
        found += np.bincount(range_numbers(values, ranges), minlength=len(ranges))
    return found


def _groups(ranges: Sequence[KeyRange]) -> npt.NDArray[np.int64]:
    """Return for each range the number of its group: ranges that are cut out of the same files share one."""
    other = [0, *(one.files != two.files for one, two in pairwise(ranges))]
    return np.cumsum(other)


def _numbers(mask: npt.NDArray[np.bool_]) -> frozenset[int]:
    return frozenset(np.flatnonzero(mask).tolist())


def _dead(file: KeyFile) -> int:
    return file.stored_rows - file.rows
