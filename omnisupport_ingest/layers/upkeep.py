"""Upkeep of a table with deletion vectors: each update also tidies up a bounded part of the table.

Marked rows and fresh files slow readers down. The dead rows of a range of keys and its rows in fresh files
are its *waste*. A range with much waste is rewritten, but an update rewrites only the worst ranges. The fresh
files that the tasks of one update wrote are one *generation*. If there are many generations, the smallest are
merged first. So a row is written again only when its generation has doubled.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

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
