"""Following the slot: messages come in, batches land, and a position is confirmed only once it is durable."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from psycopg2.extensions import connection as Connection

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.landing.manifest import Manifest, RelationVersion
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.sources.postgres.catalog.partition_roots import PartitionRoots
from omnisupport_ingest.sources.postgres.catalog.published import PublishedTables
from omnisupport_ingest.sources.postgres.catalog.relations import TypeNames
from omnisupport_ingest.sources.postgres.catalog.schema_watch import SchemaWatch
from omnisupport_ingest.sources.postgres.protocol.changes import EventReader
from omnisupport_ingest.sources.postgres.protocol.frames import (
    KEEPALIVE,
    WAL_DATA,
    WAL_DATA_HEADER,
    Transactions,
)
from omnisupport_ingest.sources.postgres.protocol.pgoutput import (
    ROW_KINDS,
    Begin,
    Commit,
    Decoder,
    InProgressMessage,
    LogicalMessage,
    Relation,
    RowNotTaken,
    Truncate,
    begin_of,
    commit_of,
)
from omnisupport_ingest.sources.postgres.protocol.row_events import RowSchema
from omnisupport_ingest.sources.postgres.protocol.walstream import Keepalive, WalStream
from omnisupport_ingest.sources.postgres.session.errors import (
    ProtocolViolation,
    RowTooLarge,
    SourceUnavailable,
)
from omnisupport_ingest.sources.postgres.session.server import WalClock, wal_clock
from omnisupport_ingest.sources.postgres.slot.continuity import ResumePoint, below_the_chain, not_resent
from omnisupport_ingest.sources.postgres.stream.batches import StreamBatches, by_window
from omnisupport_ingest.sources.postgres.stream.captured import CapturedTables
from omnisupport_ingest.sources.postgres.stream.in_progress import TAKEN, InProgress

_log = logging.getLogger(__name__)

IDLE_SECONDS = 10.0
"""Seconds between two questions to the server how far it has read; an idle stretch lands as often."""

_ASK_UNTIL_SECONDS = 0.2
"""The same while somebody waits for a given LSN, or for the proof of continuity."""

_STOP_GRACE_SECONDS = 10.0
"""How long a stop waits for the end of a transaction before that transaction is discarded."""

_LANDING_SECONDS = 0.002
"""Seconds between two looks whether a batch has landed, while nothing comes."""

_CHECK_MESSAGES = 4096
"""Messages of one transaction between two checks of clock and stop."""


@dataclass(frozen=True, slots=True)
class OpenStream:
    """A stream that was started at ``resume.start``.

    ``messages`` gives what ``stream`` receives. ``connection``: for SQL on the side.
    """

    stream: WalStream
    messages: InProgress
    connection: Connection
    resume: ResumePoint


@dataclass(frozen=True, slots=True)
class FollowedTables:
    """The tables that a stream is read for. The follower takes those that are handed over to ``captured``."""

    captured: CapturedTables
    published: PublishedTables
    schemas: SchemaWatch
    roots: PartitionRoots


class Follower:
    """One run of one stream. ``run`` returns when it is stopped or has reached its goal."""

    def __init__(
        self,
        opened: OpenStream,
        tables: FollowedTables,
        events: EventReader,
        batches: StreamBatches,
        landed: Callable[[Manifest], None],
        proved: Callable[[], None],
    ) -> None:
        """``landed`` is called with each batch, once durable. ``proved`` is called once the stream has proved
        that it continues the chain, unless that was certain before.
        """
        self.skipped_messages = 0
        """Number of logical messages outside any transaction. They have no commit, so no position, and do not
        land.
        """
        resume = opened.resume
        self._stream, self._messages, self._connection = opened.stream, opened.messages, opened.connection
        self._published, self._roots, self._tables = tables.published, tables.roots, tables.captured
        self._schemas = tables.schemas
        self._events, self._batches, self._landed = events, batches, landed
        self._decoder = Decoder()
        self._types = TypeNames(opened.connection)
        self._expected = resume.resent
        self._unproved_below = None if resume.proved else resume.end_of_chain
        self._tell_proved = proved
        self._passing_over = False
        self._window: str | None = None
        self._heard: Lsn = batches.end
        # A keepalive at or above ``flushed`` proves the clock: everything that had committed has arrived.
        self._clock: WalClock = wal_clock(opened.connection)
        self._clock_proved = False
        self._idle_wanted = True
        self._next_ask = time.monotonic()
        self._next_clock = self._next_look = self._next_ask + IDLE_SECONDS
        self._commit_lsn = 0
        self._stop_by: float | None = None
        self._until: Lsn | None = None
        # While a slow disk is waited for, the server must hear that capture is alive.
        batches.meanwhile = self._report

    def run(self, until: Lsn | None, stop: threading.Event) -> None:
        """Follow until everything that committed below ``until`` is durable, or ``stop`` is set.

        A stop lands complete transactions. Raises ``SourceUnavailable`` when the server goes away,
        ``RowTooLarge`` (with the table, if it is a row), ``GapInSource``, ``ChainContested``,
        ``LandingFailed``; ``Doubtful`` and ``NotKept`` if the rest has to be read without transactions in
        progress.
        """
        self._until = until
        try:
            self._run(stop)
            self._settle()
        finally:
            self._close()
            if self.skipped_messages:
                _log.warning(
                    "%d logical messages were sent outside any transaction; they have no position "
                    "and did not land",
                    self.skipped_messages,
                )

    def _run(self, stop: threading.Event) -> None:
        read, batches, row = self._messages.read, self._batches, self._events.row
        take_rows, take_transactions = self._messages.take_rows, self._messages.take_transactions
        left = _CHECK_MESSAGES
        while True:
            whole = not (batches.in_transaction or self._passing_over or self._expected)
            if whole and (transactions := take_transactions()) is not None:
                self._take_transactions(transactions)
                left = _CHECK_MESSAGES
                if self._between_messages(stop, idle=False):
                    return
                continue
            rows = take_rows() if left > 0 else None
            if rows is not None:
                left -= len(rows.starts)
                if not self._passing_over and self._events.rows(rows):
                    self._hand_over()
                continue
            message = read()
            left -= 1
            if message is None or left <= 0 or not (batches.in_transaction or self._passing_over):
                left = _CHECK_MESSAGES
                if self._between_messages(stop, idle=message is None):
                    return
                if message is None:
                    self._stream.wait(self._seconds_to_wait())
                    continue
            if message[0] == WAL_DATA:
                if message[WAL_DATA_HEADER] in ROW_KINDS:
                    if not self._passing_over and row(message):
                        self._hand_over()
                    continue
                self._take(message)
                read = self._messages.read
            elif message[0] == KEEPALIVE:
                self._answer(Keepalive.parse(message))
            elif message is TAKEN:
                read, left = self._messages.read, 1
            else:
                raise ProtocolViolation(
                    f"The source sent a replication message of type {message[:1]!r}, which is not known.",
                    fix="Report this with the server's version. What has landed is intact.",
                )

    # --- changes -------------------------------------------------------------------------------

    def _take(self, received: bytes) -> None:
        message = self._decoder.decode(received[WAL_DATA_HEADER:])
        if isinstance(message, Begin):
            self._begin(message)
        elif isinstance(message, Commit):
            self._commit(message)
        elif isinstance(message, Relation):
            self._messages.described(message.oid, received)
            self._describe(message)
        elif isinstance(message, RowNotTaken):
            if not self._passing_over:
                self._step_over(message, int.from_bytes(received[1:9], "big"))
        elif isinstance(message, Truncate):
            if not self._passing_over:
                names = self._roots.truncated(message.relations, self._commit_lsn)
                self._events.truncate(names, int.from_bytes(received[1:9], "big"))
        elif isinstance(message, LogicalMessage):
            if not message.transactional:
                self.skipped_messages += 1
            elif not self._passing_over:
                self._events.message(message)
        elif isinstance(message, InProgressMessage):
            self._messages.take(message, received)

    def _step_over(self, change: RowNotTaken, lsn: int) -> None:
        """Land that a row changed which was too large to take; ``RowTooLarge`` if its table would then lack
        the change.
        """
        name, told_by_contract = self._events.table_of(change.relation)
        error = RowTooLarge(change.size, self._stream.max_row_bytes, ".".join(name))
        if told_by_contract and not self._published.reads_above(name, self._commit_lsn, error.problem):
            raise error
        _log.warning("%s It lands without a key and without the row.", error.problem)
        self._events.not_taken(change, lsn)

    def _begin(self, transaction: Begin) -> None:
        expected = self._expected
        if expected is not None:
            received = (Lsn(transaction.commit_lsn), transaction.xid, transaction.commit_ts)
            if received != (expected.commit_lsn, expected.xid, expected.commit_ts):
                raise not_resent(
                    expected,
                    f"transaction {received[1]} that committed at {received[0]}, {received[2].isoformat()}",
                )
            self._expected = None
            self._passing_over = True
            self._commit_lsn = transaction.commit_lsn
            return
        if transaction.commit_lsn < self._batches.last_end.value:
            raise below_the_chain(Lsn(transaction.commit_lsn), self._batches.last_end)
        self._sent_up_to(transaction.commit_lsn)
        self._batches.begin(transaction)
        window = self._batches.window_of(transaction)
        if window != self._window:
            self._hand_over()
            self._window = window
        self._events.begin(transaction)
        self._commit_lsn = transaction.commit_lsn

    def _commit(self, transaction: Commit) -> None:
        if self._passing_over:
            self._passing_over = False
            self._sent_up_to(transaction.end_lsn)
            return
        self._batches.commit(transaction)
        self._heard = max(self._heard, self._batches.received_end)
        reached = self._until is not None and self._batches.received_end >= self._until
        if reached or self._batches.due(self._events.collected_bytes):
            self._seal()
        if reached:
            self._settle()

    def _take_transactions(self, transactions: Transactions) -> None:
        """Take in whole transactions as ``_begin``, their row changes and ``_commit`` would, one by one.

        What follows the goal is left: each transaction would land alone.
        """
        lowest, batches = int(transactions.commit_lsns.min()), self._batches
        if lowest < batches.last_end.value:
            raise below_the_chain(Lsn(lowest), batches.last_end)
        batches.begin(begin_of(transactions, 0))
        for window, some in list(by_window(transactions, batches.window_of)):
            rest = some
            while rest.total and not self._at_goal:
                batches.begin(begin_of(rest, 0))
                count = batches.fitting(rest, self._events.collected_bytes, self._until)
                self._take_of_window(window, rest.between(0, count))
                rest = rest.between(count, rest.total)

    def _take_of_window(self, window: str, transactions: Transactions) -> None:
        last = begin_of(transactions, transactions.total - 1)
        self._sent_up_to(last.commit_lsn)
        self._batches.begin(last)
        if window != self._window:
            self._hand_over()
            self._window = window
        if self._events.transactions(transactions):
            self._hand_over()
        self._commit_lsn = last.commit_lsn
        self._commit(commit_of(transactions, transactions.total - 1))

    def _sent_up_to(self, lsn: int) -> None:
        """Record that everything that committed below ``lsn`` was sent, and did not contradict the chain."""
        if self._unproved_below is not None and self._expected is None and lsn >= self._unproved_below.value:
            self._unproved_below = None
            self._tell_proved()

    def _describe(self, relation: Relation) -> None:
        self._published.require_named(relation, self._commit_lsn)
        name = self._roots.name_of(relation, self._commit_lsn)
        types = self._types.of(relation.columns)
        form = dict(zip((column.name for column in relation.columns), types, strict=True))
        self._schemas.described(self._connection, name, form, self._commit_lsn, self._tables.all)
        if self._events.is_described(relation.oid):
            self._hand_over()
        read_above = self._published.read_above(name, self._commit_lsn)
        self._describe_batch(self._events.describe(relation, name, read_above=read_above))

    def _describe_batch(self, schema: RowSchema) -> None:
        relation = schema.relation
        self._batches.relations[schema.name] = RelationVersion(
            *schema.name,
            tuple(column.name for column in relation.columns),
            self._types.of(relation.columns),
            schema.key_names,
            relation.replica_identity,
        )

    def _add_tables(self, tables: Sequence[TableContract]) -> None:
        """From the next transaction on, land changes of ``tables`` under the keys of their contracts."""
        if self._batches.pending:
            # The open batch has changes of them under the keys that it recorded.
            self._seal()
        self._hand_over()
        keys = {each.table_name: each.key for each in tables}
        described = [
            (relation, name)
            for relation in self._events.without_contract
            if (name := self._roots.name_among(relation, keys)) is not None
        ]
        schemas = self._events.add_tables(keys, described)
        self._roots.add_tables(tables)
        for schema in schemas:
            self._describe_batch(schema)

    # --- durable, then confirmed ---------------------------------------------------------------

    def _hand_over(self) -> None:
        self._batches.add(self._events.take())

    def _seal(self) -> None:
        """Begin to land the open batch, once the one before is durable."""
        self._hand_over()
        self._settle()
        self._batches.seal()

    def _settle(self, *, wait: bool = True) -> None:
        """Confirm the batch that is landing once it is durable: wait for that, or do so if it is."""
        batch = self._batches.landed(wait=wait)
        if batch is not None:
            self._confirm(batch)

    def _close(self) -> None:
        """Discard what is open. What is durable counts, whatever has ended the run."""
        batch = self._batches.close()
        if batch is not None:
            with suppress(SourceUnavailable):
                self._confirm(batch)

    def _confirm(self, batch: Manifest) -> None:
        try:
            self._report()
        finally:
            # It is durable, though the source may have gone.
            self._landed(batch)

    def _report(self, *, ask_reply: bool = False) -> None:
        # Confirm nothing before the slot has proved that it continues the chain: the next start must
        # be able to ask for the same proof.
        durable = self._batches.end if self._unproved_below is None else None
        self._stream.confirm(durable, received=self._heard, ask_reply=ask_reply)

    # --- idle, and stopping --------------------------------------------------------------------

    def _answer(self, keepalive: Keepalive) -> None:
        """Land what the keepalive proves, if it is time to, and answer it if a reply is asked for.

        The server sends everything that committed below ``wal_end`` before the keepalive. A server that shuts
        down asks until everything it sent is confirmed, so it is answered at once.
        """
        batches = self._batches
        if self._expected is not None and keepalive.wal_end > self._expected.commit_lsn:
            raise not_resent(self._expected, f"nothing in the WAL up to {keepalive.wal_end}")
        self._heard = max(self._heard, keepalive.wal_end)
        self._sent_up_to(keepalive.wal_end.value)
        goal_passed = self._until is not None and keepalive.wal_end >= self._until > batches.end
        if not (batches.in_transaction or self._passing_over or self._expected):
            if keepalive.reply_now or goal_passed:
                if batches.pending:
                    self._seal()
                self._settle()
            proves = keepalive.wal_end >= self._clock.flushed and not self._clock_proved
            wanted = keepalive.reply_now or goal_passed or self._idle_wanted or proves
            if wanted and not batches.pending and keepalive.wal_end > batches.last_end:
                self._settle()
                self._land_idle(keepalive.wal_end)
        if keepalive.reply_now:
            self._report()

    def _land_idle(self, wal_end: Lsn) -> None:
        proven = self._clock.clock if wal_end >= self._clock.flushed else None
        self._clock_proved = self._clock_proved or proven is not None
        self._idle_wanted = False
        self._confirm(self._batches.seal_idle(wal_end, proven))

    def _between_messages(self, stop: threading.Event, *, idle: bool) -> bool:
        """Do what is due between two messages. Returns whether the run is over."""
        batches = self._batches
        at_commit = not batches.in_transaction
        self._settle(wait=False)
        if at_commit and batches.due(self._events.collected_bytes):
            self._seal()
        if at_commit and not self._passing_over and self._tables.any_waiting:
            self._tables.take(self._add_tables)
        if self._at_goal:
            return True
        if stop.is_set() and self._may_stop():
            return True
        now = time.monotonic()
        if now >= self._next_ask:
            self._ask(now, idle=idle, at_commit=at_commit)
        return False

    @property
    def _at_goal(self) -> bool:
        return self._until is not None and self._batches.end >= self._until and self._unproved_below is None

    def _may_stop(self) -> bool:
        batches = self._batches
        if not batches.in_transaction:
            if batches.pending:
                self._seal()
            self._settle()
            return True
        if self._stop_by is None:
            self._stop_by = time.monotonic() + _STOP_GRACE_SECONDS
        return time.monotonic() >= self._stop_by

    def _ask(self, now: float, *, idle: bool, at_commit: bool) -> None:
        """Report that capture is alive. If nothing comes, ask how far the server has read, and whether it is
        there.
        """
        pause = min(IDLE_SECONDS, self._stream.silence.seconds / 2)
        waited_for = self._until is not None or self._unproved_below is not None
        self._next_ask = now + (_ASK_UNTIL_SECONDS if waited_for else pause)
        if now >= self._next_look:
            self._schemas.look(self._connection)
            self._schemas.require(self._tables.all)
            self._published.require_same(self._connection)
            self._next_look = now + IDLE_SECONDS
        if idle and at_commit and not self._batches.pending and now >= self._next_clock:
            if self._clock_proved or self._batches.end >= self._clock.flushed:
                self._clock, self._clock_proved = wal_clock(self._connection), False
            else:
                # Keep the older clock: a lagging server might never prove a newer one. The slot moves on.
                self._idle_wanted = True
            self._next_clock = now + IDLE_SECONDS
        self._report(ask_reply=idle)

    def _seconds_to_wait(self) -> float:
        until_ask = self._next_ask - time.monotonic()
        if self._batches.landing:
            return min(until_ask, _LANDING_SECONDS)
        until_cut = self._batches.seconds_left if self._batches.pending else until_ask
        # Short enough to notice a stop.
        return min(until_ask, max(until_cut, 0.01), 0.2)
