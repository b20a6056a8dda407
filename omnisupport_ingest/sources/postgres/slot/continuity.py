"""Proves, from facts alone, that a slot continues what has landed.

A server may have been restored to an earlier state and written to since, until its WAL is as long as before.
So the proof compares what the server sends, not how far its WAL reaches. The strong proof: the server sends
the last landed transaction again, unchanged. That needs a slot that is confirmed at or below the commit of
this transaction. The weaker proof: the slot is confirmed at a position that this home has confirmed. In both
cases the server must send nothing else below the end of the chain.

A host name may lead to another server from one connection to the next: after a fail-over, while the stream is
still open to the old primary, or if the connection string names several hosts. So ``connect_to_source`` opens
SQL connections and verifies that they lead to the server of the epoch.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from psycopg2 import errors as sql_errors
from psycopg2.extensions import connection as Connection

from omnisupport_ingest.landing.epochs import EpochFacts, EpochRecord
from omnisupport_ingest.landing.manifest import StreamSpan
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.sources.postgres.session.connection import connect, source_errors
from omnisupport_ingest.sources.postgres.session.errors import (
    AnotherSource,
    GapInSource,
    SlotMoved,
    SourceRefused,
)
from omnisupport_ingest.sources.postgres.session.server import STANDBY, ServerFacts, SlotFacts, standby_fix

REPAIR = (
    "Find out what happened to the source first. Then begin a new epoch, which takes a new snapshot of "
    'every table and keeps what has landed: omnisupport-ingest capture --new-epoch "what happened"'
)
"""The documented repair of a gap."""

_MOVED = (
    "If the connection string (OMNISUPPORT_SOURCE_DSN, or what the definition of the source names) leads to "
    "the wrong place, correct it: nothing was captured there. If the source has moved there for good, begin "
    "a new epoch, which takes a new snapshot of every table and keeps what has landed: omnisupport-ingest "
    'capture --new-epoch "what happened"'
)


@dataclass(frozen=True, slots=True)
class LandedTransaction:
    """The last transaction of the chain, as its manifest recorded it."""

    commit_lsn: Lsn
    xid: int
    commit_ts: datetime

    @classmethod
    def last_of(cls, span: StreamSpan) -> LandedTransaction | None:
        """Return the last transaction of the batch with ``span``; None for the batch of an idle stretch."""
        if span.last_commit_lsn is None or span.last_xid is None or span.last_commit_ts is None:
            return None
        return cls(span.last_commit_lsn, span.last_xid, span.last_commit_ts)


class LandedChain(NamedTuple):
    """The landed stream of an epoch: its end, and its last transaction (None if none has landed).

    ``stops``: the ends of the batches from that transaction on; if none has landed, also the slot's
    consistent point. A slot that only this home reads is confirmed at one of ``stops``, or below all of them.
    """

    end: Lsn
    last: LandedTransaction | None
    stops: frozenset[Lsn]


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Where to start streaming. ``resent``: the transaction that must arrive first as proof, or None.

    ``recovered_from``: the slot's confirmed position if it lies below the end of what has landed; else None.
    It lies below if capture or the server died before the last batches were durably confirmed.
    """

    start: Lsn
    end_of_chain: Lsn
    resent: LandedTransaction | None
    recovered_from: Lsn | None = None

    @property
    def proved(self) -> bool:
        """Whether nothing that the stream sends can contradict what has landed."""
        return self.resent is None and self.start >= self.end_of_chain


def resume_point(
    epoch: EpochRecord, chain: LandedChain, server: ServerFacts, flushed: Lsn, slot: SlotFacts | None
) -> ResumePoint:
    """Return where the stream of ``epoch`` continues. Raises ``GapInSource`` if continuity cannot be proved.

    ``flushed``: the end of the server's flushed WAL. If the result is not ``proved``, the stream itself must
    still prove, up to the end of the chain, that it is the stream that has landed.
    """
    facts, end_of_chain, last = epoch.facts, chain.end, chain.last
    if facts is None:
        raise _gap(f"Epoch {epoch.number} was not captured from a server", "it has no slot to continue")
    require_same_server(facts, server.system_identifier, server.timeline, server.database)
    if slot is None or slot.plugin != "pgoutput" or slot.database != server.database:
        raise _gap(f"The replication slot {facts.slot} is gone", f"the chain ends at {end_of_chain}")
    confirmed = slot.confirmed_flush_lsn
    if slot.wal_status == "lost" or confirmed is None:
        raise _gap(_given_up(facts.slot, slot.invalidated), f"the chain ends at {end_of_chain}")
    if flushed < end_of_chain:
        raise _gap(
            "The server's WAL ends before the landed chain (it was restored from a backup)",
            f"WAL ends at {flushed}, the chain at {end_of_chain}",
        )
    require_unmoved(slot, end_of_chain)
    recovered_from = confirmed if confirmed < end_of_chain else None
    if last is not None and confirmed <= last.commit_lsn:
        return ResumePoint(last.commit_lsn, end_of_chain, last, recovered_from)
    if confirmed not in chain.stops:
        raise _moved(
            f"The slot {facts.slot} has been moved by somebody else, or made anew",
            f"it is confirmed up to {confirmed}, where no batch ends",
        )
    return ResumePoint(confirmed, end_of_chain, None, recovered_from)


def require_same_server(
    facts: EpochFacts, system_identifier: str | None, timeline: int, database: str
) -> None:
    """Raise ``GapInSource`` unless these are the facts of the server that the epoch is captured from.

    ``system_identifier``: None if the server does not report it. Raises ``AnotherSource``, a kind of
    ``GapInSource``, if the connection string may simply be wrong.
    """
    if system_identifier not in (facts.system_identifier, None):
        raise AnotherSource(
            f"This is another database server: system identifier {system_identifier}, landed from "
            f"{facts.system_identifier}. Events may be missing.",
            fix=_MOVED,
        )
    if timeline != facts.timeline:
        raise _gap(
            "The server is on another timeline (it was promoted or restored)",
            f"timeline {timeline}, landed from {facts.timeline}",
        )
    if database != facts.database:
        raise AnotherSource(
            f"This is another database: {database}, landed from {facts.database}. Events may be missing.",
            fix=_MOVED,
        )


def require_unmoved(slot: SlotFacts, end_of_chain: Lsn) -> None:
    """Raise ``GapInSource`` if ``slot`` is confirmed above the end of the chain.

    Call it again once the slot is being read: the server silently skips everything below the confirmed
    position.
    """
    if slot.confirmed_flush_lsn is not None and slot.confirmed_flush_lsn > end_of_chain:
        raise _moved(
            f"The slot {slot.name} has been read by somebody else, or made anew, or batches are missing at "
            "the end of landing",
            f"confirmed up to {slot.confirmed_flush_lsn}, landed up to {end_of_chain}",
            instead="If batches are missing, it is enough to put them back, manifests and data. ",
        )


def not_resent(expected: LandedTransaction, received: str) -> GapInSource:
    """Return the error for a stream that does not begin with the last landed transaction."""
    return _gap(
        "The source does not send the last landed transaction again: its history is another one",
        f"expected transaction {expected.xid} that committed at {expected.commit_lsn}, "
        f"{expected.commit_ts.isoformat()}; found {received}",
    )


def below_the_chain(commit_lsn: Lsn, end_of_chain: Lsn) -> GapInSource:
    """Return the error for a transaction below the end of the chain that the chain does not contain."""
    return _gap(
        "The source sends a transaction that the landed chain has passed without seeing",
        f"it committed at {commit_lsn}, the chain ends at {end_of_chain}",
    )


_GIVEN_UP = {
    "idle_timeout": "nobody read it for longer than idle_replication_slot_timeout",
    "rows_removed": "rows of the catalog that it needs were removed while the server was a standby",
    "wal_level_insufficient": "wal_level was below logical on the primary while the server was a standby",
}
"""Reasons by ``invalidation_reason`` (PostgreSQL manual, ``pg_replication_slots``), since version 17."""


def _given_up(slot: str, reason: str | None) -> str:
    """Return why the server no longer sends anything from ``slot``. ``reason``: None up to version 16, where
    removed WAL is the only possible reason."""
    if reason in (None, "wal_removed"):
        return f"The server has removed WAL that the slot {slot} needs (max_slot_wal_keep_size)"
    return f"The server has given up the slot {slot}: {_GIVEN_UP.get(reason, reason)}"


def _moved(problem: str, values: str, *, instead: str = "") -> SlotMoved:
    return SlotMoved(
        f"{problem}: {values}. Events may be missing.",
        fix=f"See first that no copy of this home captures through it: a new epoch drops the slot. {instead}"
        f"{REPAIR}",
    )


def _gap(problem: str, values: str) -> GapInSource:
    return GapInSource(f"{problem}: {values}. Events may be missing.", fix=REPAIR)


_TIMELINE_DIGITS = 8
"""Number of hexadecimal digits of the timeline at the start of a WAL file's name."""


def connect_to_source(dsn: str, epoch: EpochRecord) -> Connection:
    """Connect to the server of ``epoch``. Raises ``GapInSource`` if it is another server, and
    ``SourceRefused`` for a standby."""
    connection = connect(dsn)
    try:
        require_source(connection, epoch)
    except BaseException:
        connection.close()
        raise
    return connection


def require_source(connection: Connection, epoch: EpochRecord) -> None:
    """Raise as ``connect_to_source`` does, unless ``connection`` leads to the server of ``epoch``."""
    if epoch.facts is None:
        return
    with source_errors("asking the server who it is"), connection.cursor() as cursor:
        try:
            cursor.execute("SELECT current_database()::text, pg_walfile_name(pg_current_wal_insert_lsn())")
        except sql_errors.ObjectNotInPrerequisiteState:
            raise SourceRefused(STANDBY, fix=standby_fix(connection)) from None
        database, wal_file = cursor.fetchone()
        try:
            cursor.execute("SELECT system_identifier::text FROM pg_control_system()")
            (identifier,) = cursor.fetchone()
        except sql_errors.InsufficientPrivilege:
            identifier = None
    require_same_server(epoch.facts, identifier, int(wal_file[:_TIMELINE_DIGITS], 16), database)
