"""What an update of a table with deletion vectors tidies up besides: a bounded part of the table each time.

Marked rows and fresh files make every reader work. So a range of keys is written anew once its dead rows and
its rows in fresh files (together its *waste*) are many; an update does that to the worst ranges only. The
fresh files of one *generation*, those that the tasks of one update wrote, count as one. Small generations
are merged while there are many, the smallest first, so that a row is written again only when its generation
has doubled.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

WASTE = 0.25
"""A range with more waste than this share of its rows is due to be written anew."""

RANGES_AT_ONCE = 1 / 16
"""Of the ranges that are due, an update writes the worst: up to this share of all ranges."""

TOO_MUCH_WASTE = 1.0
"""A range with more waste than this share of its rows is written anew in any case."""

DENSE = 0.1
"""A range that is sent so many rows, as a share of its own, is written anew: marking would cost as much."""

FRESH_GENERATIONS = 12
"""From so many generations of fresh files on, an update merges the small ones."""

_FEW_FRESH_GENERATIONS = 6
"""What is left of them then, at most."""

Counts = npt.NDArray[np.int64]


def ranges_to_rewrite(stored: Counts, waste: Counts, sent: Counts) -> npt.NDArray[np.int64]:
    """Return the numbers of the ranges that an update writes anew, ascending.

    By range: ``stored`` rows of its files, dead ones included; ``waste`` of before, and rows that are
    ``sent`` to it.
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

    ``live`` and ``stored`` rows of the fresh files of each. Those of a generation that is half dead move, and
    those of the smallest ones where there are ``FRESH_GENERATIONS``.
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
