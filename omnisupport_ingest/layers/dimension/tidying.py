"""Tidies up a table with deletion vectors: each update rewrites a bounded part of it.

Marked rows and fresh files slow readers down. The dead rows of a range of keys and its rows in fresh files
are its *waste*. A range with much waste is rewritten, but an update rewrites only the worst ranges. The fresh
files that the tasks of one update wrote are one *generation*. If there are many generations, the smallest are
merged first. So a row is written again only when its generation has doubled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from omnisupport_ingest.lake.fresh_files import values_in
from omnisupport_ingest.lake.key_files import FileRange, KeyFile, range_numbers
from omnisupport_ingest.lake.layout import generation_of
from omnisupport_ingest.layers.dimension.range_update import FilesToUpdate, Way, is_cut

WASTE = 0.25
"""A range with more waste than this share of its rows is due to be rewritten."""

RANGES_AT_ONCE = 1 / 16
"""An update rewrites the worst of the due ranges, up to this share of all ranges."""

TOO_MUCH_WASTE = 1.0
"""A range with more waste than this share of its rows is rewritten in any case."""

DENSE = 0.1
"""A range that is sent this share of its rows or more is rewritten: marking would cost as much."""

FRESH_GENERATIONS = 12
"""With this many generations of fresh files, an update merges the small ones."""

_FEW_FRESH_GENERATIONS = 6
"""Most generations that are left after a merge."""

Counts = npt.NDArray[np.int64]


def ranges_to_rewrite(stored: Counts, waste: Counts, sent: Counts) -> npt.NDArray[np.int64]:
    """Return the numbers of the ranges that an update rewrites, ascending.

    All by range. ``stored``: rows in its files, dead ones included. ``waste``: its waste before the update.
    ``sent``: rows that are sent to it.
    """
    size = np.maximum(stored, 1)
    share = (waste + sent) / size
    at_once = (sent > 0) & ((sent >= DENSE * stored) | (stored == 0))
    due = np.flatnonzero((share > WASTE) & (waste > 0) & ~at_once)
    worst = due[np.argsort(-share[due], kind="stable")]
    most = max(1, int(len(stored) * RANGES_AT_ONCE))
    chosen = [*np.flatnonzero(at_once), *worst[:most], *due[share[due] > TOO_MUCH_WASTE]]
    return np.unique(np.array(chosen, np.int64))


def fresh_to_merge(live: Sequence[int], stored: Sequence[int]) -> list[int]:
    """Return the numbers of the generations whose rows an update moves to a new one, ascending.

    By generation, ``live`` and ``stored``: rows of its fresh files without and with dead ones. The rows of a
    generation move if half of them are dead; and if there are ``FRESH_GENERATIONS``, those of the smallest
    ones.
    """
    moves = {number for number, rows in enumerate(live) if 2 * rows <= stored[number]}
    stays = sorted((number for number in range(len(live)) if number not in moves), key=live.__getitem__)
    if len(stays) >= FRESH_GENERATIONS:
        together, count = 0, 0
        for number in stays:
            if count >= len(stays) - _FEW_FRESH_GENERATIONS + 1 and live[number] > together:
                break
            together, count = together + live[number], count + 1
        moves |= set(stays[:count])
    return sorted(moves)


@dataclass(frozen=True)
class Rewrites:
    """How the ranges of a table are updated, by their numbers.

    ``rewritten``: ranges whose files are rewritten; in all others rows are marked. None: all are rewritten.
    ``forced``: ranges whose files are rewritten even if no row changes, once they are looked at.
    """

    rewritten: frozenset[int] | None = None
    forced: frozenset[int] = frozenset()

    def has(self, numbers: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """Return a mask of ``numbers``: whether the files of the range are rewritten."""
        if self.rewritten is None:
            return np.ones(len(numbers), np.bool_)
        return np.isin(numbers, np.fromiter(self.rewritten, np.int64))


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


def rewrites_of(target: FilesToUpdate, ranges: Sequence[FileRange], sent: Counts) -> Rewrites:
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
    rewritten = _numbers(np.isin(groups, chosen))
    return Rewrites(rewritten, rewritten)


def moving_rows(target: FilesToUpdate, ranges: Sequence[FileRange]) -> Counts:
    """Count the live rows of each of ``ranges`` in the fresh files that leave."""
    found = np.zeros(len(ranges), np.int64)
    leaving = [file for file in target.fresh if file.path in target.leaving]
    for values in values_in(leaving, target.order, live=True):
        found += np.bincount(range_numbers(values, ranges), minlength=len(ranges))
    return found


def _groups(ranges: Sequence[FileRange]) -> npt.NDArray[np.int64]:
    """Return for each range the number of its group: ranges that are cut out of the same files share one."""
    other = [0, *(one.files != two.files for one, two in pairwise(ranges))]
    return np.cumsum(other)


def _numbers(mask: npt.NDArray[np.bool_]) -> frozenset[int]:
    return frozenset(np.flatnonzero(mask).tolist())


def _dead(file: KeyFile) -> int:
    return file.stored_rows - file.rows
