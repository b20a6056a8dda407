"""Decide whether a dimension can be compared with its source at an LSN now, and which of its rows cannot.

A wrong alarm is worse than a late one. So the check waits for whatever is on its way, or names it: what has
not landed or is not shown yet, late data, a replay, a snapshot in progress, a new contract. Rows that have
changed since the LSN, and rows with unresolved columns, are left out on both sides.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.contracts.pii_policies import KEEP
from omnisupport_ingest.contracts.row_checksum import Key
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.lake.layout import WHOLE_TABLE
from omnisupport_ingest.landing.standing import LandedPart
from omnisupport_ingest.layers.dimension.shown_net_changes import Shown, judging_rules_of
from omnisupport_ingest.layers.histories.consumed_events import DimensionVersion
from omnisupport_ingest.layers.type_changes import waiting
from omnisupport_ingest.layers.versions import of_contract
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.position import Lsn, Position
from omnisupport_ingest.read.as_of import require_complete
from omnisupport_ingest.read.compare import Sample, changed_since, events_since
from omnisupport_ingest.read.dimension_ranges import keys_of_events
from omnisupport_ingest.wording import agreeing, counted

MOST_LEFT_OUT = 20_000
"""Rows that may be left out; with more, a comparison of the rest would mean little."""

_LOOK_SECONDS = 0.5


class NotComparable(IngestError):
    """A table cannot be compared with its source now; the message says what it waits for.

    Fix: Wait: the next check looks again. Decide on events that wait in quarantine.
    """


@dataclass(frozen=True)
class Comparable:
    """A version of a dimension that holds everything below ``lsn`` of ``epoch``. ``moved``: keys with events
    at ``lsn`` or above."""

    version: DimensionVersion
    epoch: int
    lsn: Lsn
    moved: tuple[Key, ...]


def protected_key(contract: TableContract) -> list[str]:
    """Return the key columns that a policy for personal data changes.

    A table with such a column is comparable only row by row (``verify``).
    """
    return [name for name in contract.key if contract.column(name).pii != KEEP]


def comparable(workspace: Workspace, contract: TableContract, lsn: Lsn, deadline: float) -> Comparable:
    """Wait until the dimension holds everything below ``lsn``, and pin its version.

    ``deadline``: on the monotonic clock. Raises ``NotComparable``, ``TableIncomplete`` or ``EventsGone``,
    which say why it cannot be compared.
    """
    if protected := protected_key(contract):
        raise _not(f"the key {', '.join(protected)} is protected, so its rows have other keys in the lake")
    while (lacks := _lacks(workspace, contract, lsn)) is not None:
        if time.monotonic() >= deadline:
            raise _not(lacks)
        time.sleep(_LOOK_SECONDS)
    epoch = _epoch(workspace, contract.source)
    version = DimensionVersion.newest(workspace, contract, epoch, lsn)
    # Check this after the version is pinned: a snapshot of the table may have landed meanwhile.
    require_complete(workspace, contract.source, [contract], Position(epoch, lsn, 0))
    since = Sample(None, version.accepted, version.withheld, epoch, lsn.value)
    _, of_the_table = changed_since(contract, since)
    if of_the_table:
        raise _not("the table was truncated or read again while it was compared")
    moved = keys_of_events(contract, events_since(contract, since, "key"), MOST_LEFT_OUT + 1)
    if len(moved) > MOST_LEFT_OUT:
        raise _not(f"more than {MOST_LEFT_OUT:,} rows changed while the lake was waited for")
    return Comparable(version, epoch, lsn, tuple(moved))


def _lacks(workspace: Workspace, contract: TableContract, lsn: Lsn) -> str | None:
    """Return what the dimension lacks below ``lsn``, in words; None if it has everything."""
    store = workspace.landing(contract.source)
    landed, epoch = store.landed(), _epoch(workspace, contract.source)
    if landed.gap is not None and not landed.gap.is_repaired:
        return f"a gap holds batches back: {landed.gap}"
    last = store.last_stream(epoch)
    reached = last.stream.end_lsn if last is not None and last.stream is not None else None
    if reached is None or reached < lsn:
        return f"landing is at {reached or 'nothing'}, and the source at {lsn}"
    net_changes, dimension = workspace.net_changes(contract).look(), workspace.dimension(contract).look()
    state = dimension.state(WHOLE_TABLE) if dimension is not None else None
    if net_changes is None or dimension is None or state is None:
        return f"dim_{contract.name} is not there yet"
    if any(waiting(workspace, contract, each) for each in (net_changes, dimension)):
        return "a column of another type waits for `contracts retype`"
    if judging_rules_of(state.versions) != set(of_contract(contract)):
        return "its contract is new, and the dimension is not made by it yet"
    shown = Shown.of(net_changes, dimension)
    unshown = [
        part
        for window in store.windows()
        for part in landed.untaken(window, shown.in_window(window))
        if contract.full_name in part.rows_per_table
    ]
    below = {part.batch_id for part in unshown if _begins_below(part, epoch, lsn)}
    if below:
        batches, are = counted(len(below), "batch"), agreeing(len(below), "is", "are")
        return f"{batches} with changes of it before {lsn} {are} not in the dimension yet"
    if shown.newer and not unshown:
        return "windows of it are being replayed"
    return None


def _begins_below(part: LandedPart, epoch: int, lsn: Lsn) -> bool:
    begins = part.begins if part.begins is not None else part.first.commit_lsn
    return part.epoch < epoch or (part.epoch == epoch and begins < lsn)


def _epoch(workspace: Workspace, source: str) -> int:
    epoch = workspace.landing(source).current_epoch()
    if epoch is None:
        raise _not("nothing of it has landed")
    return epoch.number


def _not(why: str) -> NotComparable:
    return NotComparable(why, fix="It is looked at again by the next check.")
