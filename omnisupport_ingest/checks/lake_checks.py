"""Checks that need only landing and the logs of the tables; none starts Spark.

They read the records of commits, not what a run reported, so an old backfill or a lost event log cannot make
them pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta

from deltalake.exceptions import DeltaError

from omnisupport_ingest.cdc.judging import OPEN
from omnisupport_ingest.checks.findings import CheckFinding
from omnisupport_ingest.contracts.decision_table import COLLISION, OLDER_EPOCH
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.landing.completeness import chunks_of, incomplete_now
from omnisupport_ingest.landing.landed import Landed
from omnisupport_ingest.landing.lost_changes import LostChanges, LostStretch
from omnisupport_ingest.landing.manifest import Manifest
from omnisupport_ingest.layers.dimension.shown_net_changes import Shown
from omnisupport_ingest.layers.reviews import ReviewLedger
from omnisupport_ingest.layers.scheduling.pending import standing_of_windows
from omnisupport_ingest.layers.scheduling.window_numbers import Standing
from omnisupport_ingest.layers.type_changes import waits
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.read.freshness import (
    FRESH_WITHIN,
    Freshness,
    ServiceLevel,
    freshness,
    service_level,
)
from omnisupport_ingest.read.verified import verified_of
from omnisupport_ingest.review.quarantine_stock import rises_of
from omnisupport_ingest.review.quarantined import Filter, Quarantined, quarantined
from omnisupport_ingest.storage import put_back, take_away
from omnisupport_ingest.windows import OUT_OF_RANGE
from omnisupport_ingest.wording import counted

RISES_WITHIN = timedelta(days=1)
"""The quarantine is compared with its state of this long ago."""

_NAMED = 3
"""Number of windows or reasons that a summary names; it counts the others."""

_REVIEW = "Review them: omnisupport-ingest quarantine list --source {source} --reason {reason}"


def chain_unbroken(workspace: Workspace, source: str) -> CheckFinding:
    """Check that every stream batch continues the one before it; the summary names a gap with both LSNs."""
    landed = workspace.landing(source).landed()
    numbers: dict[str, int | float] = {"batches": landed.count}
    if landed.gap is not None:
        summary = f"{landed.gap} Later batches of that epoch are held back. Fix: {landed.gap.fix}"
        return CheckFinding(False, summary, numbers)
    return CheckFinding(True, "Every batch continues the one before it.", numbers)


def sentinel_empty(workspace: Workspace, source: str) -> CheckFinding:
    """Check that every landed event has a commit time within the range of windows."""
    events = sum(each.out_of_range for each in workspace.landing(source).landed().epochs)
    if events:
        summary = (
            f"Committed before the first window or far ahead of the clock: {counted(events, 'event')}. "
            f"Quarantined in the partition {OUT_OF_RANGE}. See: omnisupport-ingest quarantine list "
            f"--source {source}"
        )
        return CheckFinding(False, summary, {"events": events})
    return CheckFinding(True, "Every event falls into a window.", {"events": 0})


def tables_complete(
    workspace: Workspace, source: str, names: Collection[str] | None = None
) -> dict[str, CheckFinding]:
    """Check that the stream has passed each table's snapshot and the dimension shows it.

    Returns a finding by contract name, for the tables in ``names`` (None: all). Until a table is complete,
    its dimension is no state that the source ever had.
    """
    store = workspace.landing(source)
    landed = store.landed()
    epoch = max(
        [*(each.number for each in store.epochs()), *(each.epoch for each in landed.epochs)], default=0
    )
    batches = landed.around_snapshots(epoch)
    # Read after the batches, so that none is missed.
    lost = LostChanges(store.folder, epoch).all()
    # Read before the tables are opened: a window that is settled by then has all of its batches in them.
    windows = standing_of_windows(workspace, source).unsettled
    facts = _LandingFacts(landed, batches, epoch, lost, windows)
    return _of_each_table(workspace, source, names, lambda each: _table_complete(workspace, each, facts))


@dataclass(frozen=True, slots=True)
class _LandingFacts:
    """What is known of a source: what ``landed``, the ``batches`` around the snapshots of ``epoch``, the
    missed changes of its stream (``lost``), and the ``windows`` in which a table may lack a batch."""

    landed: Landed
    batches: Sequence[Manifest]
    epoch: int
    lost: Sequence[LostStretch]
    windows: Collection[str]


def _table_complete(workspace: Workspace, contract: TableContract, facts: _LandingFacts) -> CheckFinding:
    if (waiting := waits(workspace, contract)) is not None:
        return CheckFinding(False, f"{waiting.problem} Fix: {waiting.fix}")
    if not facts.landed.captured:
        return CheckFinding(
            True, "A delivery lands as a whole." if facts.landed.count else "Nothing has landed yet."
        )
    incomplete = incomplete_now(facts.batches, contract.name, facts.epoch, facts.lost)
    if incomplete is not None:
        behind = incomplete.bytes_behind
        numbers: dict[str, int | float] = {} if behind is None else {"bytes_behind": behind}
        return CheckFinding(False, f"{incomplete.problem} Fix: {incomplete.fix}", numbers)
    missing = _unshown_batches(workspace, contract, facts)
    if missing:
        summary = (
            f"The dimension does not show {counted(missing, 'batch')} yet of its snapshot or of the stream "
            "below it. The sensor requests runs of their windows. See: omnisupport-ingest status "
            f"--source {contract.source}"
        )
        return CheckFinding(False, summary, {"batches_missing": missing})
    return CheckFinding(
        True, f"The stream has passed the snapshot of epoch {facts.epoch}.", {"batches_missing": 0}
    )


def _unshown_batches(workspace: Workspace, contract: TableContract, facts: _LandingFacts) -> int:
    """Count the batches that the table needs to be complete and does not show yet.

    These are the batches that the net changes have not consumed, and the snapshot chunks that the dimension
    does not show.
    """
    net_changes, dimension = workspace.net_changes(contract).look(), workspace.dimension(contract).look()
    shown, epoch = Shown.of(net_changes, dimension), facts.epoch
    chunks = chunks_of(facts.batches, contract.name, epoch)
    high = max((each.chunk.high for each in chunks if each.chunk is not None), default=Lsn(0))
    names = {each.batch_id for each in chunks}
    missing: set[str] = set()
    for window in facts.windows:
        state = net_changes.state(window) if net_changes is not None else None
        for part in facts.landed.untaken(window, frozenset(state.batches if state is not None else ())):
            in_stream = part.epoch == epoch and part.begins is not None and part.begins < high
            if contract.full_name in part.rows_per_table and (in_stream or part.batch_id in names):
                missing.add(part.batch_id)
    if net_changes is None or dimension is None:
        return max(1, len(missing | names))
    # A batch of the stream may change nothing; then the dimension is not written again.
    unshown = {each.batch_id for each in chunks if not shown.has(each, contract.full_name)}
    return len(missing | unshown)


def watermark_fresh(workspace: Workspace, source: str, now: datetime) -> CheckFinding:
    """Check that the watermark of the newest stream batch is close to ``now`` (timezone-aware)."""
    epochs = workspace.landing(source).landed().epochs
    marks = [each.stream_mark for each in epochs if each.stream_mark is not None]
    if not marks:
        return CheckFinding(True, "Nothing of a stream has landed, so there is no watermark.")
    lag = (now - marks[-1]).total_seconds()
    numbers: dict[str, int | float] = {"watermark_lag_seconds": round(lag, 1)}
    if lag > FRESH_WITHIN.total_seconds():
        return CheckFinding(
            False,
            f"The watermark is {lag / 60:.0f} minutes behind: is capture running? See: omnisupport-ingest "
            f"source status {source}",
            numbers,
        )
    return CheckFinding(True, f"The watermark is {lag:.0f} seconds behind.", numbers)


def tables_fresh(
    workspace: Workspace, source: str, now: datetime, names: Collection[str] | None = None
) -> dict[str, CheckFinding]:
    """Check that each dimension shows what was committed until shortly before ``now`` (timezone-aware).

    Returns a finding by contract name, for the tables in ``names`` (None: all). The service level of a
    contract may set the allowed lag, and how recently the table must have been verified against its source.
    Unlike ``watermark_fresh``, this checks what people read.
    """
    landing = workspace.landing(source)
    landed = landing.landed()
    # Read before the tables are opened: a window that is settled by then has all of its batches in them.
    unsettled = standing_of_windows(workspace, source).unsettled

    def fresh(contract: TableContract) -> CheckFinding:
        net_changes, dimension = workspace.net_changes(contract).look(), workspace.dimension(contract).look()
        expectation = contract.quality.freshness
        # A table that waits for a person consumes nothing, which does not make a window unsettled.
        windows = unsettled if waits(workspace, contract) is None else None
        behind = freshness(contract, net_changes, dimension, landing, landed, windows)
        level = service_level(contract, behind, verified_of(workspace.home, contract), now)
        found = _table_fresh(contract.source, behind, level)
        return found if expectation is None else replace(found, severity=expectation.severity)

    return _of_each_table(workspace, source, names, fresh)


def _of_each_table(
    workspace: Workspace,
    source: str,
    names: Collection[str] | None,
    find: Callable[[TableContract], CheckFinding],
) -> dict[str, CheckFinding]:
    """Call ``find`` for the tables in ``names`` (None: all); a table that cannot be read is a failed
    finding."""
    found = {}
    for contract in workspace.contracts.of_source(source):
        if names is not None and contract.name not in names:
            continue
        try:
            found[contract.name] = find(contract)
        except IngestError as error:
            found[contract.name] = CheckFinding(False, f"{error.problem} Fix: {error.fix}")
        except DeltaError as error:
            # Its message may quote statistics, and so values of rows.
            problem = f"A log of {contract.name} in the lake cannot be read ({type(error).__name__})."
            folder = workspace.dimension(contract).folder
            fix = put_back(folder, "Restore the table's folder from a backup.")
            fix += f" Or {take_away(folder, 'delete it')}: it is rebuilt from the events."
            found[contract.name] = CheckFinding(False, f"{problem} Fix: {fix}")
    return found


def _table_fresh(source: str, found: Freshness, level: ServiceLevel) -> CheckFinding:
    lag, behind = level.lag, found.behind_landing_seconds
    numbers: dict[str, int | float] = {
        "unshown_batches": found.unshown_batches,
        "allowed_lag_seconds": level.within,
    }
    if level.verified_ago is not None:
        numbers["verified_seconds_ago"] = level.verified_ago
    if lag is not None:
        numbers["lag_seconds"] = lag
    if behind is not None:
        numbers["behind_landing_seconds"] = behind
    promised = "The service level of its contract is" if level.by_contract else "The default service level is"
    if level.broken:
        why = "; ".join(level.broken)
        return CheckFinding(False, f"{promised} broken: {why}. {_help(source, found, level)}", numbers)
    if lag is None:
        return CheckFinding(True, "Nothing of a stream has landed, and nothing waits.", numbers)
    behind_by = f"{lag:.0f} of {level.within:.0f} seconds"
    return CheckFinding(True, f"{promised} kept: the dimension is behind by {behind_by}.", numbers)


def _help(source: str, found: Freshness, level: ServiceLevel) -> str:
    """Return where to look, and the command that helps."""
    if level.lag is None or level.lag <= level.within:
        return f"See: omnisupport-ingest verify {source} --checksums"
    if found.unshown_batches:
        return (
            f"Landed with changes of the table, and not shown: {counted(found.unshown_batches, 'batch')}. "
            f"Look at the runs (omnisupport-ingest status --source {source})."
        )
    return (
        "The table shows all that has landed: is capture running "
        f"(omnisupport-ingest source status {source}), or is a delivery missing?"
    )


def counts_add_up(workspace: Workspace, source: str) -> CheckFinding:
    """Check that ``raw = deduped + duplicates + quarantined`` in every window, and that raw agrees.

    Windows that deduped has not judged yet, or not up to where raw is, are left out: that is ordinary work.
    """
    standing = standing_of_windows(workspace, source)
    total, wrong = standing.counts, list(standing.wrong)
    numbers: dict[str, int | float] = {
        "windows": standing.judged,
        "windows_wrong": len(wrong),
        **asdict(total),
    }
    if wrong:
        summary = (
            f"Events are not accounted for in {_named(wrong)}. Judge them again: omnisupport-ingest replay "
            f"--source {source} --from {wrong[0]} --to {wrong[-1]}"
        )
        return CheckFinding(False, summary, numbers)
    return CheckFinding(
        True,
        f"{counted(total.raw, 'raw event')} = {total.deduped:,} deduped + "
        f"{counted(total.duplicates, 'duplicate')} + "
        f"{total.quarantined} quarantined, in {counted(standing.judged, 'window')}, and so in each.",
        numbers,
    )


def no_collisions(workspace: Workspace, source: str) -> CheckFinding:
    """Check that every event that shares its position with an event of other content was reviewed."""
    standing = standing_of_windows(workspace, source)
    rows = Counter(standing.held)
    numbers: dict[str, int | float] = {f"quarantined_{reason}": rows[reason] for reason in sorted(rows)}
    left = _unreviewed(workspace, source, COLLISION, standing)
    if left:
        summary = (
            f"{counted(len(left), 'event')} at positions with different content, in {_windows_of(left)}. "
            f"Neither copy was accepted. {_REVIEW.format(source=source, reason=COLLISION)}"
        )
        return CheckFinding(False, summary, {**numbers, "collisions_unreviewed": len(left)})
    collisions = rows[COLLISION]
    reviewed = f"{counted(collisions, 'collision')} reviewed" if collisions else "none for a collision"
    return CheckFinding(True, f"In quarantine: {counted(rows.total(), 'event')}, {reviewed}.", numbers)


def epochs_in_order(workspace: Workspace, source: str) -> CheckFinding:
    """Check that every event of an older epoch that landed after a newer epoch began was reviewed."""
    left = _unreviewed(workspace, source, OLDER_EPOCH, standing_of_windows(workspace, source))
    numbers: dict[str, int | float] = {"events": len(left)}
    if left:
        summary = (
            f"{counted(len(left), 'event')} of an older epoch landed after a newer one began, in "
            f"{_windows_of(left)}. Quarantined. "
            f"{_REVIEW.format(source=source, reason=OLDER_EPOCH)}"
        )
        return CheckFinding(False, summary, numbers)
    return CheckFinding(True, "No event of an older epoch waits for a review.", numbers)


def quarantine_not_rising(workspace: Workspace, source: str, now: datetime) -> CheckFinding:
    """Check that no reason holds more undiscarded events in quarantine than a day before ``now``."""
    rises = rises_of(workspace, source, now - RISES_WITHIN)
    total = sum(rise.events for rise in rises)
    numbers: dict[str, int | float] = {"events": total}
    risen = [rise for rise in rises if rise.more > 0]
    if risen:
        more = sum(rise.more for rise in risen)
        numbers |= {f"more_{rise.reason}": rise.more for rise in risen}
        named = ", ".join(f"{rise.reason} {rise.events} (+{rise.more})" for rise in risen[:_NAMED])
        others = len(risen) - _NAMED
        if others > 0:
            named += f" and {counted(others, 'more reason')}"
        summary = (
            f"The quarantine holds {counted(more, 'more undiscarded event')} than a day ago: {named}. "
            f"See them: omnisupport-ingest quarantine list --source {source}"
        )
        return CheckFinding(False, summary, numbers)
    return CheckFinding(
        True, f"In quarantine: {counted(total, 'event')}; no reason has more than a day ago.", numbers
    )


def _unreviewed(workspace: Workspace, source: str, reason: str, standing: Standing) -> list[Quarantined]:
    """Return the events in quarantine for ``reason`` that wait for a review, or whose decision waits for a
    run."""
    windows = standing.left[reason]
    if not windows:
        return []
    ledger = ReviewLedger.open(workspace, source)
    rows = [
        row
        for window in windows
        for row in quarantined(workspace, source, ledger, Filter(reason=reason, window=window))
    ]
    return [row for row in rows if row.state == OPEN or row.waits]


def _windows_of(rows: Sequence[Quarantined]) -> str:
    return _named(sorted({row.window for row in rows}))


def _named(windows: list[str]) -> str:
    shown = ", ".join(windows[:_NAMED])
    more = len(windows) - _NAMED
    return f"{shown} and {counted(more, 'more window')}" if more > 0 else shown
