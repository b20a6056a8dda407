"""Does the slot continue what has landed? The proof, from facts alone (no connection, no files).

The strong proof: the last landed transaction is sent again, and is the same. It needs a slot whose
confirmed position lies at or below that transaction's commit. Else the weaker one: the end of the
chain lies between the slot's confirmed position and the end of the server's WAL.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from omnisupport_ingest.landing.epochs import EpochRecord
from omnisupport_ingest.landing.manifest import StreamSpan
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.sources.postgres.errors import HoleInSource
from omnisupport_ingest.sources.postgres.server import ServerFacts, SlotFacts

REPAIR = (
    "Find out what happened to the source first. Then begin a new epoch, which takes a new snapshot of "
    'every table and keeps what has landed: omnisupport-ingest capture --new-epoch "what happened"'
)
"""The documented repair of a hole."""


@dataclass(frozen=True, slots=True)
class LandedTransaction:
    """The last transaction of the chain, as its manifest recorded it."""

    commit_lsn: Lsn
    xid: int
    commit_ts: datetime

    @classmethod
    def last_of(cls, span: StreamSpan) -> LandedTransaction | None:
        """The last transaction of a batch; none for a batch of an idle stretch."""
        if span.last_commit_lsn is None or span.last_xid is None or span.last_commit_ts is None:
            return None
        return cls(span.last_commit_lsn, span.last_xid, span.last_commit_ts)


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Where to start streaming. ``resent``: the transaction that must come first, if it is proof.

    Without it the weaker proof has been found to hold. ``recovered_from``: the slot's confirmed
    position, where it lies below what has landed: capture died, or the server did, before the last
    batches were confirmed for good. Null where the two agree.
    """

    start: Lsn
    end_of_chain: Lsn
    resent: LandedTransaction | None
    recovered_from: Lsn | None = None


def resume_point(
    epoch: EpochRecord,
    end_of_chain: Lsn,
    last: LandedTransaction | None,
    server: ServerFacts,
    flushed: Lsn,
    slot: SlotFacts | None,
) -> ResumePoint:
    """Where the stream of ``epoch`` continues; ``HoleInSource`` if continuity cannot be proved.

    ``end_of_chain``: end LSN of the last landed stream batch, else the slot's consistent point.
    ``flushed``: the end of the server's flushed WAL.
    """
    facts = epoch.facts
    if facts is None:
        raise _hole(f"Epoch {epoch.number} was not captured from a server", "it has no slot to continue")
    if server.system_identifier != facts.system_identifier:
        raise _hole(
            "This is another database server",
            f"system identifier {server.system_identifier}, landed from {facts.system_identifier}",
        )
    if server.timeline != facts.timeline:
        raise _hole(
            "The server is on another timeline (it was promoted or restored)",
            f"timeline {server.timeline}, landed from {facts.timeline}",
        )
    if server.database != facts.database:
        raise _hole("This is another database", f"{server.database}, landed from {facts.database}")
    if slot is None or slot.plugin != "pgoutput" or slot.database != server.database:
        raise _hole(f"The replication slot {facts.slot} is gone", f"the chain ends at {end_of_chain}")
    confirmed = slot.confirmed_flush_lsn
    if slot.wal_status == "lost" or confirmed is None:
        raise _hole(
            f"The server has removed WAL that the slot {facts.slot} needs",
            f"the chain ends at {end_of_chain}",
        )
    if flushed < end_of_chain:
        raise _hole(
            "The server's WAL ends before the landed chain (it was restored from a backup)",
            f"WAL ends at {flushed}, the chain at {end_of_chain}",
        )
    require_unmoved(slot, end_of_chain)
    recovered_from = confirmed if confirmed < end_of_chain else None
    if last is not None and confirmed <= last.commit_lsn:
        return ResumePoint(last.commit_lsn, end_of_chain, last, recovered_from)
    return ResumePoint(end_of_chain, end_of_chain, None, recovered_from)


def require_unmoved(slot: SlotFacts, end_of_chain: Lsn) -> None:
    """``HoleInSource`` if ``slot`` is confirmed further than the chain reaches.

    To be asked once more when the slot is being read: the server passes over what lies below without a word.
    """
    if slot.confirmed_flush_lsn is not None and slot.confirmed_flush_lsn > end_of_chain:
        raise _hole(
            f"The slot {slot.name} has been read by somebody else, or made anew",
            f"confirmed up to {slot.confirmed_flush_lsn}, landed up to {end_of_chain}",
        )


def not_resent(expected: LandedTransaction, found: str) -> HoleInSource:
    """The error when another thing than the last landed transaction comes first."""
    return _hole(
        "The source does not send the last landed transaction again: its history is another one",
        f"expected transaction {expected.xid} that committed at {expected.commit_lsn}, "
        f"{expected.commit_ts.isoformat()}; found {found}",
    )


def below_the_chain(commit_lsn: Lsn, end_of_chain: Lsn) -> HoleInSource:
    """The error for a transaction that stands where the chain says there is none."""
    return _hole(
        "The source sends a transaction that the landed chain has passed without seeing",
        f"it committed at {commit_lsn}, the chain ends at {end_of_chain}",
    )


def _hole(problem: str, values: str) -> HoleInSource:
    return HoleInSource(f"{problem}: {values}. Events may be missing.", fix=REPAIR)
