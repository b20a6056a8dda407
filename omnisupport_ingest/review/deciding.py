"""Releases and discards quarantined events: all decisions of a command are recorded in one commit, or none.

Decisions are checked against the ledger version that the commit is based on. If two people release the two
events of a collision at the same time, the second is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from omnisupport_ingest.cdc.judging import DISCARD, RELEASE
from omnisupport_ingest.contracts.decision_table import (
    BATCH_REJECTED,
    DUPLICATE_POSITION,
    MALFORMED,
    OUT_OF_RANGE_TIME,
    ROW_RULE,
    SCHEMA_MISMATCH,
)
from omnisupport_ingest.contracts.model import BLOCK, TableContract
from omnisupport_ingest.contracts.protection import needs_protection
from omnisupport_ingest.contracts.quality import QUARANTINE, WITHHOLDING
from omnisupport_ingest.contracts.row_columns import MISSING_COLUMN, UNKNOWN_COLUMN
from omnisupport_ingest.contracts.row_rules import policies_of
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.lake.delta import open_delta
from omnisupport_ingest.lake.ledger import SEQUENCE
from omnisupport_ingest.lake.schema import arrow_schema
from omnisupport_ingest.lake.table import LakeTable
from omnisupport_ingest.layers.events.event_ref import EventRef
from omnisupport_ingest.layers.ledgers import REVIEW_TYPE
from omnisupport_ingest.layers.removed import RAW, Removal, Removed, sealed_error
from omnisupport_ingest.layers.reviews import Review, ReviewLedger
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.position import Position
from omnisupport_ingest.review.quarantined import (
    Quarantined,
    is_malformed,
    quarantined,
    same_position,
    whole_events,
)
from omnisupport_ingest.windows import OUT_OF_RANGE

DECISIONS = (RELEASE, DISCARD)

_DONE = {RELEASE: "released", DISCARD: "discarded"}
_NAMED = 10
"""Most refused events that an error names."""


class ReviewRefused(IngestError):
    """Events of the quarantine cannot be released or discarded as you ask. Nothing was recorded.

    Fix: Leave out the events that the message names, or do for each what it says.
    """


class ReviewIncomplete(IngestError):
    """No event is named, or the decision, the person who decides or the reason is missing.

    Fix: Give what is missing: the review ledger records it.
    """

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Refusal:
    """An event on which the decision is not allowed, the reason, and what to do instead."""

    event: EventRef
    problem: str
    fix: str


@dataclass(frozen=True, slots=True)
class Decided:
    """The result of a command.

    ``recorded``: decisions that were written now. ``overturned``: decisions that counted for these events
    until now. ``unchanged``: events that had the same decision before.
    ``beside``: events at the position of a released one that still wait for a review. ``left``: decisions of
    others on events that were to be decided only while nobody had (``decide_undecided``).
    """

    recorded: tuple[Review, ...]
    unchanged: tuple[Review, ...]
    beside: tuple[Quarantined, ...]
    left: tuple[Review, ...] = ()
    overturned: tuple[Review, ...] = ()

    @property
    def windows(self) -> list[str]:
        """Return the windows that the recorded decisions make stale, sorted."""
        return sorted({review.window for review in self.recorded})


def decide(
    workspace: Workspace,
    source: str,
    decision: str,
    events: Sequence[EventRef],
    *,
    reviewer: str,
    why: str,
) -> Decided:
    """Record ``decision`` (``release`` or ``discard``) on ``events``; a repeated one changes nothing.

    ``reviewer`` and ``why`` are recorded as given. Raises ``ReviewRefused``, naming every event on which the
    decision is not allowed, and ``ReviewIncomplete``, naming what is missing.
    """
    return _decide(workspace, source, events, _Asked(decision, reviewer.strip(), why.strip()))


def decide_undecided(
    workspace: Workspace,
    source: str,
    decision: str,
    events: Sequence[EventRef],
    *,
    reviewer: str,
    why: str,
) -> Decided:
    """Do as ``decide``, but leave those of ``events`` as they are that somebody has decided by now."""
    asked = _Asked(decision, reviewer.strip(), why.strip(), only_undecided=True)
    return _decide(workspace, source, events, asked)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A decision, who decides and why; and whether it is only on events that nobody has decided."""

    decision: str
    reviewer: str
    why: str
    only_undecided: bool = False


def _decide(workspace: Workspace, source: str, events: Sequence[EventRef], asked: _Asked) -> Decided:
    _require_complete(asked.decision, events, asked.reviewer, asked.why)
    plan = _Plan(workspace, source, list(dict.fromkeys(events)), asked)
    written = ReviewLedger.of_entries(workspace.reviews(source).append(plan.rows))
    return Decided(
        written.reviews,
        tuple(plan.unchanged),
        tuple(plan.beside),
        tuple(plan.left),
        tuple(plan.overturned),
    )


class _Plan:
    """The effect of a command on the present ledger. It is computed again when another command commits
    first."""

    def __init__(self, workspace: Workspace, source: str, events: Sequence[EventRef], asked: _Asked) -> None:
        self._workspace, self._source, self._decision = workspace, source, asked.decision
        self._wanted, self._events, self._asked = events, events, asked
        self._sealed: Mapping[str, Removal] = {}
        self.unchanged: list[Review] = []
        self.beside: list[Quarantined] = []
        self.left: list[Review] = []
        self.overturned: list[Review] = []

    def rows(self, entries: pa.Table) -> pa.Table:
        """Return the rows to record. Raises ``ReviewRefused`` if the decision is not allowed on an event."""
        ledger = ReviewLedger.of_entries(entries)
        # Retention may seal a window between two attempts.
        self._sealed = Removed.open(self._workspace, self._source).of(RAW)
        if self._asked.only_undecided:
            latest_of = {event: ledger.latest(event) for event in self._wanted}
            decided = {event: each for event, each in latest_of.items() if each and not each.of_copies}
            self.left = list(decided.values())
            self._events = [event for event in self._wanted if event not in decided]
            if not self._events:
                return self._table(())
        copies = whole_events(self._workspace, self._source, ledger, self._events)
        copy_of = {row.event: (row, values) for row, values in _copies_first(copies)}
        positions = _ReleasedPositions(
            ledger, [copy_of[event][0] for event in self._events if event in copy_of]
        )
        refusals: list[Refusal] = []
        new: list[Quarantined | Review] = []
        self.unchanged, self.overturned = [], []
        for event in self._events:
            latest, holding = ledger.latest(event), copy_of.get(event)
            is_copy = holding is not None and holding[0].reason == DUPLICATE_POSITION
            if latest is not None and latest.of_copies and not is_copy:
                # Nobody has decided on the event itself.
                latest = None
            if holding is not None:
                cause = self._cause(*holding, positions)
            elif latest is not None and self._may_overturn(ledger, latest):
                cause = self._cause_elsewhere(latest, positions)
            else:
                cause = elsewhere(self._workspace, self._source, event, latest)
            if cause is not None:
                refusals.append(Refusal(event, *cause))
            elif latest is not None and latest.decision == self._decision:
                self.unchanged.append(latest)
            else:
                # The other decision on an event counts for its copies, too.
                of_event = latest is not None and not latest.of_copies
                subject = latest if holding is None or (is_copy and of_event) else holding[0]
                assert subject is not None, "an event that is in neither place has a cause to be refused"
                new.append(subject)
                if latest is not None:
                    self.overturned.append(latest)
        if refusals:
            raise _refused(self._decision, len(self._events), refusals)
        self.beside = self._beside(new, [row for row, _ in copies])
        return self._table(new)

    def _may_overturn(self, ledger: ReviewLedger, latest: Review) -> bool:
        """Whether the decision may follow on ``latest``, for an event that is not in quarantine."""
        if self._decision == DISCARD or latest.decision == RELEASE:
            return True
        # A release that was taken back: until its window is judged again, the event is still accepted.
        released = any(each.decision == RELEASE for each in ledger.history(latest.event))
        return released and _window_in(self._workspace.deduped(self._source), latest.event) is not None

    def _cause_elsewhere(self, latest: Review, positions: _ReleasedPositions) -> tuple[str, str] | None:
        """As ``_cause``, for an event that is not in quarantine; ``latest``: the decision on it."""
        if latest.decision == self._decision:
            return None
        if latest.window in self._sealed:
            return self._sealed_cause(latest.window)
        return positions.taken(latest) if self._decision == RELEASE else None

    def _cause(
        self, row: Quarantined, values: dict[str, Any], positions: _ReleasedPositions
    ) -> tuple[str, str] | None:
        """Return why the decision is not allowed on the event in quarantine, and what to do instead; None if
        it is allowed."""
        if row.window in self._sealed:
            return self._sealed_cause(row.window)
        if self._decision == DISCARD:
            return None
        return self._unreleasable(row, values) or positions.taken(row)

    def _sealed_cause(self, window: str) -> tuple[str, str]:
        """Return why no decision on an event of the sealed ``window`` is allowed: none has an effect."""
        error = sealed_error(self._sealed[window], self._source)
        return error.problem, error.fix

    def _unreleasable(self, row: Quarantined, values: dict[str, Any]) -> tuple[str, str] | None:
        contracts = self._workspace.contracts
        contract = contracts.find(self._source, row.source_schema, row.source_table)
        hidden = contract is None and any(map(needs_protection, contracts.of_source(self._source)))
        return _unreleasable(row, values, hidden=hidden) or _broken(row, contract)

    def _beside(self, new: Iterable[Quarantined | Review], rows: Iterable[Quarantined]) -> list[Quarantined]:
        if self._decision != RELEASE:
            return []
        decided = set(self._events)
        return [
            other
            for other in rows
            if other.event not in decided
            and other.review is None
            and any(same_position(other, subject) for subject in new)
        ]

    def _table(self, new: Iterable[Quarantined | Review]) -> pa.Table:
        now = datetime.now(UTC)
        review = {
            "decision": self._decision,
            "reviewer": self._asked.reviewer,
            "why": self._asked.why,
            "reviewed_at": now,
        }
        schema = arrow_schema(REVIEW_TYPE, without=(SEQUENCE,))
        return pa.Table.from_pylist([{**_columns(subject), **review} for subject in new], schema=schema)


def _columns(subject: Quarantined | Review) -> dict[str, Any]:
    epoch, commit_lsn, ordinal, event_hash = subject.event.key
    return {
        "epoch": epoch,
        "commit_lsn": commit_lsn,
        "ordinal": ordinal,
        "event_hash": event_hash,
        "identity_hash": subject.identity_hash,
        "window": subject.window,
        "source_schema": subject.source_schema,
        "source_table": subject.source_table,
        "reason": subject.reason,
    }


class _ReleasedPositions:
    """Positions at which an event is released, already or by this command."""

    def __init__(self, ledger: ReviewLedger, rows: Iterable[Quarantined]) -> None:
        self._released: dict[Position, list[Review]] = {}
        for review in ledger.in_force():
            if review.decision == RELEASE:
                self._released.setdefault(review.event.position, []).append(review)
        self._rows_at: dict[Position, list[Quarantined]] = {}
        for row in rows:
            self._rows_at.setdefault(row.event.position, []).append(row)

    def taken(self, row: Quarantined | Review) -> tuple[str, str] | None:
        """Return why the event of ``row`` cannot be released (another content of its position is released);
        None if it can."""
        for review in self._released.get(row.event.position, ()):
            if review.event != row.event and same_position(row, review):
                return (
                    f"{review.event} stands at the same position with other content, and was released by "
                    f"{_by(review)}.",
                    f"Release one of them only. If that was the wrong one, discard it first: "
                    f"omnisupport-ingest quarantine discard {review.event} --reason TEXT",
                )
        for other in self._rows_at.get(row.event.position, ()):
            if other.event != row.event and same_position(row, other):
                return (
                    f"{other.event} stands at the same position with other content, and is named too.",
                    "Release one of them, and discard the others.",
                )
        return None


def _require_complete(decision: str, events: Sequence[EventRef], reviewer: str, why: str) -> None:
    if decision not in DECISIONS:
        raise ReviewIncomplete(f"{decision!r} is no decision.", fix=f"Use {' or '.join(DECISIONS)}.")
    if not events:
        raise ReviewIncomplete("No event is named.", fix="Name the ids that `quarantine list` shows.")
    for value, missing in ((reviewer, "name of the person who decides"), (why, "reason")):
        if not value:
            raise ReviewIncomplete(
                f"The {missing} is missing.",
                fix="Give it: the ledger records person, time and reason of every decision.",
            )


def _unreleasable(row: Quarantined, values: dict[str, Any], *, hidden: bool) -> tuple[str, str] | None:
    """Return what makes the event itself unreleasable, whatever put it in quarantine; None if nothing does.
    ``hidden``: as in ``is_malformed``."""
    if row.reason == DUPLICATE_POSITION:
        return "It is a copy; the event itself is judged on its own.", "Discard the copy."
    if row.window == OUT_OF_RANGE or row.reason == OUT_OF_RANGE_TIME:
        return (
            f"Its commit time, {row.source_ts:%Y-%m-%d %H:%M:%S} UTC, has no window in this lake.",
            "Discard it; if its row matters, let the source write it again.",
        )
    if row.reason == MALFORMED or is_malformed(values, hidden=hidden):
        return (
            "Its row image or its key cannot be read.",
            "Discard it; if its row matters, let the source write it again.",
        )
    return None


def _broken(row: Quarantined, contract: TableContract | None) -> tuple[str, str] | None:
    """Return which rules of its contract the event breaks. Rules that let rows pass do not count, nor do
    rules that only another row of its batch breaks."""
    if row.reason == BATCH_REJECTED:
        return None
    at_odds = [rule for rule in row.rules if rule.endswith((f":{UNKNOWN_COLUMN}", f":{MISSING_COLUMN}"))]
    if row.reason == SCHEMA_MISMATCH or (at_odds and contract is not None and contract.evolution == BLOCK):
        return (
            f"Its row is not of the columns of its contract, which says block ({row.table}: "
            f"{', '.join(at_odds)}).",
            f"Let the contract follow: omnisupport-ingest contracts propose {row.table} --write. Its windows "
            "are then judged again by themselves. Else discard it.",
        )
    policies = policies_of(contract) if contract is not None else {}
    broken = [rule for rule in row.rules if policies.get(rule, QUARANTINE) in WITHHOLDING]
    if row.reason == ROW_RULE or broken:
        rules = ", ".join(broken or row.rules) or "unknown"
        return (
            f"It breaks its contract ({row.table}: {rules}), and so would the dimension.",
            f"Change the contract of {row.table} if the rule is wrong: its windows are then judged again by "
            "themselves. Else discard it.",
        )
    return None


def elsewhere(workspace: Workspace, source: str, event: EventRef, latest: Review | None) -> tuple[str, str]:
    """Return what became of an event that is not in quarantine."""
    before = f"It was {done_by(latest)}, and is " if latest else "It is "
    window = _window_in(workspace.deduped(source), event)
    if window is not None:
        return (
            f"{before}not in quarantine: it is accepted, in window {window} of {source}/deduped_events.",
            "Leave it out. An event that is accepted without a release cannot be discarded.",
        )
    window = _window_in(workspace.raw(source), event)
    if window is not None:
        return (
            f"{before}not in quarantine: it has landed, and either window {window} is not judged with it yet "
            "or its row was erased.",
            "Try again when the window was run: omnisupport-ingest status",
        )
    for other in workspace.contracts.sources():
        if other != source and any(each.event == event for each in _held_by(workspace, other)):
            return f"{source} has no such event.", f"It is in quarantine of {other}: add --source {other}"
    return (
        f"{source} has no such event." if latest is None else f"{before}in no table of {source} any more.",
        "Copy the id from `omnisupport-ingest quarantine list`, or name another --source.",
    )


def _held_by(workspace: Workspace, source: str) -> list[Quarantined]:
    return quarantined(workspace, source, ReviewLedger.open(workspace, source))


def _window_in(table: LakeTable, event: EventRef) -> str | None:
    """Return the window in which ``table`` holds ``event``; None if it does not."""
    if not table.exists:
        return None
    epoch, commit_lsn, ordinal, event_hash = event.key
    condition = (
        (pc.field("epoch") == epoch)
        & (pc.field("commit_lsn") == commit_lsn)
        & (pc.field("ordinal") == ordinal)
        & (pc.field("event_hash") == event_hash)
    )
    dataset = open_delta(table.folder).to_pyarrow_dataset()
    windows = dataset.to_table(columns=["window"], filter=condition).column("window").to_pylist()
    return str(windows[0]) if windows else None


def _copies_first(
    copies: Iterable[tuple[Quarantined, dict[str, Any]]],
) -> list[tuple[Quarantined, dict[str, Any]]]:
    """Sort copies of an event before the event itself, which has the same id."""
    return sorted(copies, key=lambda pair: pair[0].reason != DUPLICATE_POSITION)


def done_by(review: Review) -> str:
    """Return what was decided, by whom and when: ``released by ana on 2026-01-31 at 10:00 UTC``."""
    return f"{_DONE[review.decision]} by {_by(review)}"


def _by(review: Review) -> str:
    return f"{review.reviewer} on {review.reviewed_at:%Y-%m-%d at %H:%M} UTC"


def _refused(decision: str, count: int, refusals: Sequence[Refusal]) -> ReviewRefused:
    done = _DONE[decision]
    if count == 1:
        return ReviewRefused(
            f"{refusals[0].event} cannot be {done}. {refusals[0].problem}", fix=refusals[0].fix
        )
    lines = [f"  {each.event}: {each.problem}" for each in refusals[:_NAMED]]
    if len(refusals) > _NAMED:
        lines.append(f"  and {len(refusals) - _NAMED} more")
    fixes = list(dict.fromkeys(each.fix for each in refusals[:_NAMED]))
    return ReviewRefused(
        f"{len(refusals)} of {count} events cannot be {done}, so nothing was recorded:\n" + "\n".join(lines),
        fix="\n  ".join(["Leave them out; or, for each:", *fixes]),
    )
