"""When net changes wait, so that one merge into the dimension takes the net changes of several runs.

A data file is always rewritten whole. If each run changes a few keys anywhere in a large table, it rewrites
much of the table for few rows. A contract may let net changes wait (``x-cdc.delayed_merge``). They wait while
both conditions hold: the oldest is younger than the contract's age, counted from the commit of the run that
folded it; and they have fewer rows than the contract's share of the dimension (a key that several runs
changed counts once for each). At most ``WAITING_FILES`` files wait, because every run looks at them.

The dimension does not show what waits; its checkpoint says up to which LSN it is complete. Only plain changes
of rows wait. A replaced window (by a replay, late events, a review, an erasure), a truncate, a snapshot end,
another contract, and rows to purge cause an immediate merge of everything that waits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime
from statistics import median

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.lake.checkpoint import MergeCost
from omnisupport_ingest.lake.log import LogChanges
from omnisupport_ingest.lake.snapshot import TableSnapshot
from omnisupport_ingest.lake.state import WindowState
from omnisupport_ingest.layers.dimension.shown_net_changes import (
    judging_rules_of,
    net_facts,
    purged_before,
    purged_of,
    shown_since,
)
from omnisupport_ingest.layers.dimension.tied_keys import keyless_in
from omnisupport_ingest.layers.versions import of_contract

MERGES_KEPT = 10
"""Number of updates whose costs a dimension keeps."""

WAITING_FILES = 1_000
"""Maximum number of files of net changes that wait; a run adds one or a few."""

_MERGES = 3
_FILES = 8
_MUCH = 0.25
_LITTLE = 0.01
_MANY_ROWS = 500_000
_MANY_FOR_A_KEY = 1_000
_SMALL_FILES = 4_096


@dataclass(frozen=True, slots=True)
class WaitingMerge:
    """``rows`` of net changes that the dimension does not show yet, the oldest committed at ``since``. They
    are merged at ``due``, or earlier if there are too many."""

    rows: int
    since: datetime
    due: datetime


def waiting_merge(
    contract: TableContract,
    state: WindowState | None,
    net_changes: TableSnapshot,
    changes: LogChanges | None = None,
) -> WaitingMerge | None:
    """Return the net changes that wait for their merge into a dimension with ``state``; None if none may wait
    or none do.

    ``changes``: the net changes that the dimension does not show, if the caller has them already.
    """
    delay = contract.delayed_merge
    if delay is None or state is None or judging_rules_of(state.versions) != set(of_contract(contract)):
        return None
    changes = changes or shown_since(state, net_changes)
    if changes is None or changes.gone or not changes.added or changes.oldest is None:
        return None
    rows = sum(file.rows for file in changes.added)
    if rows >= delay.max_share * state.checkpoint.rows or len(changes.added) > WAITING_FILES:
        return None
    watermark = net_facts(state, net_changes, changes).watermark
    if purged_of(state) != purged_before(contract, watermark):
        return None
    if any(True for _ in keyless_in(changes.added)):
        return None
    return WaitingMerge(rows, changes.oldest, changes.oldest + delay.max_age)


@dataclass(frozen=True, slots=True)
class ScatteredWrites:
    """The median of the last ``updates``: shares (0 to 1) of the files rewritten and of the keys changed.

    ``rows_per_file``: a smaller file size with which at most half as many rows would be rewritten; None if
    there is none.
    """

    updates: int
    files_share: float
    keys_share: float
    rows_per_file: int | None = None


def scattered_writes(merges: tuple[MergeCost, ...]) -> ScatteredWrites | None:
    """Return how the last updates of a dimension rewrote much for few keys; None if they did not, or if too
    little is known.

    Much is a quarter of its files for a hundredth of its rows or fewer; or half a million rows, and a
    thousand for each key. For a table of a few files the result is None.
    """
    found = [each for each in merges if each.keys and each.rows and each.held >= _FILES]
    if len(found) < _MERGES:
        return None
    share = median(each.files / each.held for each in found)
    keys = median(each.keys / each.rows for each in found)
    rows = median(each.files / each.held * each.rows for each in found)
    for_a_key = median(each.files / each.held * each.rows / each.keys for each in found)
    many = rows >= _MANY_ROWS and for_a_key >= _MANY_FOR_A_KEY
    if not many and not (share >= _MUCH and keys <= _LITTLE):
        return None
    last = found[-1]
    help_much = _share_rewritten(share, last.held, last.rows / _SMALL_FILES) <= share / 2
    return ScatteredWrites(len(found), share, keys, _SMALL_FILES if help_much else None)


def _share_rewritten(share: float, files: int, others: float) -> float:
    """Return the share of ``others`` files that an update rewrites, if it rewrites ``share`` of ``files``
    files with the same rows. Every changed key is assumed to fall into any file with equal probability."""
    keys = -files * math.log1p(-min(share, 1 - 0.5 / files))
    return -math.expm1(-keys / others)
