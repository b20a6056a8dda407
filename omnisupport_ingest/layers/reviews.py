"""The ledger of reviews: what people decided about quarantined events.

Judging the events of a window depends on its reviews, so a review makes that window stale, and no other. The
ledger keeps every decision; the last one for an event counts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property

import pyarrow as pa

from omnisupport_ingest.cdc.event_columns import EventId
from omnisupport_ingest.cdc.judging import DISCARD, DISCARD_COPIES, RELEASE
from omnisupport_ingest.contracts.decision_table import DUPLICATE_POSITION
from omnisupport_ingest.lake.ledger import SEQUENCE, refuse_row, require_rows
from omnisupport_ingest.layers.events.event_ref import EventRef
from omnisupport_ingest.layers.workspace import Workspace

_NAME = "review_ledger"
_REQUIRED = frozenset(("epoch", "commit_lsn", "ordinal", "event_hash", "window", "decision", SEQUENCE))


@dataclass(frozen=True, slots=True)
class Review:
    """One decision on one event. ``decision`` is ``release`` or ``discard``.

    ``reason``: why the event was in quarantine then. ``why``: the reviewer's own words. ``reviewed_at``
    is timezone-aware; ``sequence`` orders decisions, whatever the clock said.
    """

    event: EventRef
    identity_hash: str | None
    window: str
    source_schema: str
    source_table: str
    reason: str
    decision: str
    reviewer: str
    why: str
    reviewed_at: datetime
    sequence: int

    @property
    def of_copies(self) -> bool:
        """Whether it is a discard of copies only: the event itself was not in quarantine."""
        return self.decision == DISCARD and self.reason == DUPLICATE_POSITION


@dataclass(frozen=True)
class ReviewLedger:
    """Every decision on events of one source, in the order in which they were made."""

    reviews: tuple[Review, ...]

    @classmethod
    def open(cls, workspace: Workspace, source: str) -> ReviewLedger:
        """Return the ledger as it is now; empty if nothing was decided. Raises ``LedgerUnreadable``."""
        return cls.of_entries(workspace.reviews(source).entries())

    @classmethod
    def of_entries(cls, entries: pa.Table) -> ReviewLedger:
        """From the rows of the ledger, by ``sequence`` (columns of ``REVIEW_TYPE``). ``LedgerUnreadable``."""
        require_rows(entries, _NAME, _REQUIRED)
        decided = zip(entries["decision"].to_pylist(), entries["commit_lsn"].to_pylist(), strict=True)
        for row, (decision, lsn) in enumerate(decided):
            if decision not in (RELEASE, DISCARD):
                refuse_row(entries, _NAME, row, "its decision is none that this version knows")
            if lsn < 0:
                refuse_row(entries, _NAME, row, "commit_lsn is negative")
        return cls(tuple(map(_review, entries.to_pylist())))

    def of_window(self, window: str) -> Mapping[EventId, str]:
        """Return the latest decision of each event, by (epoch, commit LSN, ordinal, event hash), as
        ``judging.JudgingRules.reviews`` has it."""
        return {
            review.event.key: DISCARD_COPIES if review.of_copies else review.decision
            for review in self._by_window.get(window, ())
        }

    def digest(self, window: str) -> str | None:
        """Return a digest (SHA-256) of the result of ``of_window``; None if nothing was decided.

        The same decisions give the same digest, whoever made them, when, and after which other decisions.
        """
        if window not in self._by_window:
            return None
        if window not in self._digests:
            lines = [
                f"{epoch}:{lsn}:{ordinal}:{hashed}={what}"
                for (epoch, lsn, ordinal, hashed), what in sorted(self.of_window(window).items())
            ]
            self._digests[window] = hashlib.sha256("\n".join(lines).encode()).hexdigest()
        return self._digests[window]

    def latest(self, event: EventRef) -> Review | None:
        """The decision that counts for ``event``; None if nobody decided."""
        return self._latest.get(event)

    def history(self, event: EventRef) -> tuple[Review, ...]:
        """Every decision on ``event``, the first one first."""
        return tuple(review for review in self.reviews if review.event == event)

    def windows(self) -> list[str]:
        """The windows of which something was decided, sorted."""
        return sorted(self._by_window)

    def in_force(self) -> Iterable[Review]:
        """The latest decision of every event."""
        return self._latest.values()

    @cached_property
    def _latest(self) -> dict[EventRef, Review]:
        return {review.event: review for review in self.reviews}

    @cached_property
    def _digests(self) -> dict[str, str]:
        # A cache: the digest is needed for each event in quarantine.
        return {}

    @cached_property
    def _by_window(self) -> dict[str, list[Review]]:
        found: dict[str, list[Review]] = {}
        for review in self._latest.values():
            found.setdefault(review.window, []).append(review)
        return found


def _review(row: Mapping[str, object]) -> Review:
    fields = dict(row)
    event = EventRef.of(*(fields.pop(name) for name in ("epoch", "commit_lsn", "ordinal", "event_hash")))  # type: ignore[arg-type]
    return Review(event=event, **fields)  # type: ignore[arg-type]
