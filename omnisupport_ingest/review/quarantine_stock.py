"""Counts the events in quarantine by reason, now and at an earlier time.

The present counts come from the states of ``deduped_events``. Earlier counts were recorded in the window
index, or come from the log of the table. So they depend neither on the reports of runs nor on when the events
landed: if a contract refuses rows of last year, the quarantine rises today.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from omnisupport_ingest.cdc.judging import DISCARDED
from omnisupport_ingest.lake.delta import open_delta
from omnisupport_ingest.lake.layout import LakeFile
from omnisupport_ingest.lake.snapshot import TableSnapshot
from omnisupport_ingest.lake.table import LakeTable
from omnisupport_ingest.layers.events.quarantine_files import QuarantineFiles
from omnisupport_ingest.layers.reviews import ReviewLedger
from omnisupport_ingest.layers.scheduling.pending import held_at, standing_of_windows
from omnisupport_ingest.layers.withheld_numbers import reason_of, states_in
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.review.quarantined import Filter, quarantined


@dataclass(frozen=True, slots=True)
class Rise:
    """The number of ``events`` in quarantine for ``reason``, without discarded ones. ``more``: how many more
    than before; negative for fewer."""

    reason: str
    events: int
    more: int


def rises_of(workspace: Workspace, source: str, before: datetime) -> list[Rise]:
    """Return every reason that has events now or had some at ``before`` (timezone-aware), the largest rise
    first."""
    ledger, standing = ReviewLedger.open(workspace, source), standing_of_windows(workspace, source)
    now = Counter(standing.held)
    now.subtract(standing.discarded)
    for window in standing.unapplied:
        rows = quarantined(workspace, source, ledger, Filter(window=window, state=DISCARDED))
        now.subtract(row.reason for row in rows)
    noted = held_at(workspace, source, before)
    then = _undiscarded_at(workspace.quarantine(source), before, ledger) if noted is None else noted
    rises = [
        Rise(reason, max(now[reason], 0), max(now[reason], 0) - max(then[reason], 0))
        for reason in {*now, *then}
    ]
    return sorted(rises, key=lambda rise: (-rise.more, -rise.events, rise.reason))


def stock_of(workspace: Workspace, source: str) -> Counter[str]:
    """Count the events in quarantine now, by reason, without reading any of them."""
    files = QuarantineFiles.newest(workspace, source)
    return _by_reason(file for file, _ in files.shown()) if files is not None else Counter()


def discarded_of(workspace: Workspace, source: str) -> int:
    """Count the events in quarantine that a person has discarded: nobody has to look at them any more."""
    ledger = ReviewLedger.open(workspace, source)
    if not ledger.reviews:
        return 0
    standing = standing_of_windows(workspace, source)
    windows = (Filter(window=window, state=DISCARDED) for window in standing.unapplied)
    waiting = sum(len(quarantined(workspace, source, ledger, each)) for each in windows)
    return sum(standing.discarded.values()) + waiting


def _undiscarded_at(table: LakeTable, at: datetime, ledger: ReviewLedger) -> Counter[str]:
    """Count the undiscarded events in quarantine at the time ``at`` (timezone-aware), by reason, from the
    table's log.

    The events of a file that is gone by now count as undiscarded.
    """
    snapshot = _look_at(table, at)
    files = list(snapshot.all_files()) if snapshot is not None else []
    found = _by_reason(files)
    if ledger.reviews:
        for file in files:
            found[reason_of(file)] -= states_in(file).get(DISCARDED, 0)
    return found


def _by_reason(files: Iterable[LakeFile]) -> Counter[str]:
    found: Counter[str] = Counter()
    for file in files:
        found[reason_of(file)] += file.rows
    return found


def _look_at(table: LakeTable, at: datetime) -> TableSnapshot | None:
    """Return the version at the time ``at``; None if there was none, or the log does not reach back so
    far."""
    if not table.exists:
        return None
    handle = open_delta(table.folder)
    versions = [
        entry["version"]
        for entry in handle.history()
        if entry["timestamp"] <= at.timestamp() * 1000 and entry.get("version") is not None
    ]
    if not versions:
        return None
    handle.load_as_version(max(versions))
    return TableSnapshot(table, handle)
