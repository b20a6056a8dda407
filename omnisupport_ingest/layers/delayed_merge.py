"""When net changes wait, so that one merge into the dimension takes those of several runs.

A data file is always rewritten whole. Where each run touches a few keys anywhere in a large table, it
rewrites much of the table for few rows. A contract may let net changes wait (``x-cdc.delayed_merge``). They
wait while both hold: the oldest is younger than the contract's age, counted from the commit of the run that
folded it; and they have fewer rows than the contract's share of the dimension (a key that several runs
changed counts once for each). At most ``WAITING_FILES`` files wait, because every run looks at them.

The dimension does not show what waits: its checkpoint says up to which LSN it is complete.
Only plain changes of rows wait. Replaced windows (a replay, late events, a review, an erasure), a truncate, a
snapshot end, another contract, and rows to purge cause a merge at once, of everything that waits.
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
from omnisupport_ingest.layers.odd_keys import keyless_in
from omnisupport_ingest.layers.shown import judging_rules_of, net_facts, purged_before, purged_of, shown_since
from omnisupport_ingest.layers.versions import of_contract

MERGES_KEPT = 10
"""A dimension remembers what so many updates came to."""

WAITING_FILES = 1_000
"""So many files of net changes may wait: one run adds one or a few."""

_MERGES = 3
_FILES = 8
_MUCH = 0.25
_LITTLE = 0.01
_MANY_ROWS = 500_000
_MANY_FOR_A_KEY = 1_000
_SMALL_FILES = 4_096


@dataclass(frozen=True, slots=True)
class WaitingMerge:
    """``rows`` of net changes that the dimension does not show yet, the oldest committed at ``since``; they
    are merged at ``due``, or before if there are too many."""

    rows: int
    since: datetime
    due: datetime


def waiting_merge(
    contract: TableContract,
    state: WindowState | None,
    net_changes: TableSnapshot,
    changes: LogChanges | None = None,
) -> WaitingMerge | None:
    """The net changes that wait for their merge into a dimension with ``state``; None if nothing waits, or
    may wait.

    ``changes``: what the net changes have that the dimension does not show, if it is known already.
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
    """The middle one of the last ``updates``: shares (0 to 1) of the files it rewrote and of the keys it
    touched. ``rows_per_file``: smaller files of which it would rewrite at most half as many rows; None if
    there are none.
    """

    updates: int
    files_share: float
    keys_share: float
    rows_per_file: int | None = None


def scattered_writes(merges: tuple[MergeCost, ...]) -> ScatteredWrites | None:
    """Whether the last updates of a dimension rewrote much for few keys; None if not, or if it is not known.

    Much is a quarter of its files for a hundredth of its rows or fewer, or half a million rows and a thousand
    for each key. Of a table of a few files nothing is said.
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
    """Where keys anywhere rewrite a ``share`` of so many ``files``, the share they rewrite of so many
    ``others`` with the same rows: each falls into any file alike."""
    keys = -files * math.log1p(-min(share, 1 - 0.5 / files))
    return -math.expm1(-keys / others)
