"""Follows the slot: reads messages, lands batches, and confirms a position only when it is durable.

One loop takes what has arrived, cuts it into batches at commits, has other threads land them, and confirms
what is durable. Nothing lands and nothing is confirmed before the stream has proved that it continues the
chain of landed batches.
"""

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
from omnisupport_ingest.sources.postgres.protocol.changes import ChangeCollector
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
    OversizedRow,
    Relation,
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
from omnisupport_ingest.sources.postgres.stream.in_progress import NO_MESSAGE_YET, InProgress

_log = logging.getLogger(__name__)

IDLE_SECONDS = 10.0
"""Seconds between two requests to the server for how far it has read its WAL. Idle batches land as often."""

_ASK_SECONDS_IF_AWAITED = 0.2
"""The same, while ``run`` waits for its goal or for the proof of continuity."""

_STOP_GRACE_SECONDS = 10.0
"""Seconds that a stop waits for the end of a transaction before it discards the transaction."""

_LANDING_POLL_SECONDS = 0.002
"""Seconds between two checks whether a batch is durable, while nothing arrives."""

_CHECK_MESSAGES = 4096
"""Messages of one transaction between two checks of the clock and of the stop."""


@dataclass(frozen=True, slots=True)
class OpenStream:
    """A stream that was started at ``resume.start``.

    ``messages``: reads what ``stream`` receives. ``connection``: for SQL beside the stream.
    """

    stream: WalStream
    messages: InProgress
    connection: Connection
    resume: ResumePoint


@dataclass(frozen=True, slots=True)
class FollowedTables:
    """The tables of a stream. The follower adds tables that are handed over to ``captured``."""

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
        changes: ChangeCollector,
        batches: StreamBatches,
        landed: Callable[[Manifest], None],
        proved: Callable[[], None],
    ) -> None:
        """``landed``: called with each batch when it is durable. ``proved``: called when the stream has
        proved that it continues the chain; never called if that was certain from the start."""
        self.skipped_messages = 0
        """Number of logical messages outside transactions. They have no commit, so they have no position and
        do not land."""
        resume = opened.resume
        self._stream, self._messages, self._connection = opened.stream, opened.messages, opened.connection
        self._published, self._roots, self._tables = tables.published, tables.roots, tables.captured
        self._schemas = tables.schemas
        self._changes, self._batches, self._landed = changes, batches, landed
        self._decoder = Decoder()
        self._types = TypeNames(opened.connection)
        self._to_be_resent = resume.resent
        self._unproved_below = None if resume.proved else resume.end_of_chain
        self._on_proved = proved
        self._skipping_landed = False
        self._window: str | None = None
        self._received_up_to: Lsn = batches.end
        # A keepalive at or above ``flushed`` proves the clock: everything that had committed by then has
        # arrived.
        self._wal_clock: WalClock = wal_clock(opened.connection)
        self._clock_proved = False
        self._idle_batch_due = True
        self._next_ask = time.monotonic()
        self._next_clock_read = self._next_catalog_check = self._next_ask + IDLE_SECONDS
        self._commit_lsn = 0
        self._stop_by: float | None = None
        self._until: Lsn | None = None
        # The server must hear that capture is alive even while a slow disk makes it wait.
        batches.meanwhile = self._report

    def run(self, until: Lsn | None, stop: threading.Event) -> None:
        """Follow until everything that committed below ``until`` is durable, or ``stop`` is set.

        A stop lands the complete transactions. Raises ``SourceUnavailable`` if the server goes away,
        ``RowTooLarge`` (with the table, if it is a row), ``GapInSource``, ``ChainContested`` and
        ``LandingFailed``. Raises ``RollbackUnclear`` and ``SpoolFailed`` if the stream must be read again
        without transactions in progress.
        """
        self._until = until
        try:
            self._run(stop)
            self._confirm_landed()
        finally:
            self._close()
            if self.skipped_messages:
                _log.warning(
                    "%d logical messages were sent outside any transaction; they have no position "
                    "and did not land",
                    self.skipped_messages,
                )

    def _run(self, stop: threading.Event) -> None:
        read, batches, row = self._messages.read, self._batches, self._changes.add_row
        take_rows, take_transactions = self._messages.take_rows, self._messages.take_transactions
        left = _CHECK_MESSAGES
        while True:
            whole = not (batches.in_transaction or self._skipping_landed or self._to_be_resent)
            if whole and (transactions := take_transactions()) is not None:
                self._take_transactions(transactions)
                left = _CHECK_MESSAGES
                if self._do_what_is_due(stop, idle=False):
                    return
                continue
            rows = take_rows() if left > 0 else None
            if rows is not None:
                left -= len(rows.starts)
                if not self._skipping_landed and self._changes.add_rows(rows):
                    self._flush_changes()
                continue
            message = read()
            left -= 1
            if message is None or left <= 0 or not (batches.in_transaction or self._skipping_landed):
                left = _CHECK_MESSAGES
                if self._do_what_is_due(stop, idle=message is None):
                    return
                if message is None:
                    self._stream.wait(self._seconds_to_wait())
                    continue
            if message[0] == WAL_DATA:
                if message[WAL_DATA_HEADER] in ROW_KINDS:
                    if not self._skipping_landed and row(message):
                        self._flush_changes()
                    continue
                self._handle(message)
                read = self._messages.read
            elif message[0] == KEEPALIVE:
                self._answer(Keepalive.parse(message))
            elif message is NO_MESSAGE_YET:
                read, left = self._messages.read, 1
            else:
                raise ProtocolViolation(
                    f"The source sent a replication message of type {message[:1]!r}, which is not known.",
                    fix="Report this with the server's version. What has landed is intact.",
                )

    # --- changes -------------------------------------------------------------------------------

    def _handle(self, received: bytes) -> None:
        message = self._decoder.decode(received[WAL_DATA_HEADER:])
        if isinstance(message, Begin):
            self._begin(message)
        elif isinstance(message, Commit):
            self._commit(message)
        elif isinstance(message, Relation):
            self._messages.record_description(message.oid, received)
            self._describe(message)
        elif isinstance(message, OversizedRow):
            if not self._skipping_landed:
                self._land_oversized(message, int.from_bytes(received[1:9], "big"))
        elif isinstance(message, Truncate):
            if not self._skipping_landed:
                names = self._roots.truncated(message.relations, self._commit_lsn)
                self._changes.add_truncate(names, int.from_bytes(received[1:9], "big"))
        elif isinstance(message, LogicalMessage):
            if not message.transactional:
                self.skipped_messages += 1
            elif not self._skipping_landed:
                self._changes.add_message(message)
        elif isinstance(message, InProgressMessage):
            self._messages.take(message, received)

    def _land_oversized(self, change: OversizedRow, lsn: int) -> None:
        """Land the change of a row that is too large to read, without its key and its row.

        Raises ``RowTooLarge`` if the table would then lack the change.
        """
        name, has_contract = self._changes.table_of(change.relation)
        error = RowTooLarge(change.size, self._stream.max_row_bytes, ".".join(name))
        if has_contract and not self._published.reads_above(name, self._commit_lsn, error.problem):
            raise error
        _log.warning("%s It lands without a key and without the row.", error.problem)
        self._changes.add_oversized(change, lsn)

    def _begin(self, transaction: Begin) -> None:
        expected = self._to_be_resent
        if expected is not None:
            received = (Lsn(transaction.commit_lsn), transaction.xid, transaction.commit_ts)
            if received != (expected.commit_lsn, expected.xid, expected.commit_ts):
                raise not_resent(
                    expected,
                    f"transaction {received[1]} that committed at {received[0]}, {received[2].isoformat()}",
                )
            self._to_be_resent = None
            self._skipping_landed = True
            self._commit_lsn = transaction.commit_lsn
            return
        if transaction.commit_lsn < self._batches.last_end.value:
            raise below_the_chain(Lsn(transaction.commit_lsn), self._batches.last_end)
        self._record_sent_up_to(transaction.commit_lsn)
        self._batches.begin(transaction)
        window = self._batches.window_of(transaction)
        if window != self._window:
            self._flush_changes()
            self._window = window
        self._changes.begin(transaction)
        self._commit_lsn = transaction.commit_lsn

    def _commit(self, transaction: Commit) -> None:
        if self._skipping_landed:
            self._skipping_landed = False
            self._record_sent_up_to(transaction.end_lsn)
            return
        self._batches.commit(transaction)
        self._received_up_to = max(self._received_up_to, self._batches.received_end)
        reached = self._until is not None and self._batches.received_end >= self._until
        if reached or self._batches.due(self._changes.collected_bytes):
            self._seal()
        if reached:
            self._confirm_landed()

    def _take_transactions(self, transactions: Transactions) -> None:
        """Handle whole transactions, with the same result as ``_begin``, ``add_row``, ``_commit`` for each.

        Stops at the goal, because above it each transaction would become a batch of its own.
        """
        lowest, batches = int(transactions.commit_lsns.min()), self._batches
        if lowest < batches.last_end.value:
            raise below_the_chain(Lsn(lowest), batches.last_end)
        batches.begin(begin_of(transactions, 0))
        for window, some in list(by_window(transactions, batches.window_of)):
            rest = some
            while rest.total and not self._at_goal:
                batches.begin(begin_of(rest, 0))
                count = batches.count_that_fits(rest, self._changes.collected_bytes, self._until)
                self._take_of_window(window, rest.between(0, count))
                rest = rest.between(count, rest.total)

    def _take_of_window(self, window: str, transactions: Transactions) -> None:
        last = begin_of(transactions, transactions.total - 1)
        self._record_sent_up_to(last.commit_lsn)
        self._batches.begin(last)
        if window != self._window:
            self._flush_changes()
            self._window = window
        if self._changes.add_transactions(transactions):
            self._flush_changes()
        self._commit_lsn = last.commit_lsn
        self._commit(commit_of(transactions, transactions.total - 1))

    def _record_sent_up_to(self, lsn: int) -> None:
        """Record that the server sent all that committed below ``lsn``, without contradicting the chain."""
        if (
            self._unproved_below is not None
            and self._to_be_resent is None
            and lsn >= self._unproved_below.value
        ):
            self._unproved_below = None
            self._on_proved()

    def _describe(self, relation: Relation) -> None:
        self._published.require_named(relation, self._commit_lsn)
        name = self._roots.name_of(relation, self._commit_lsn)
        types = self._types.base_of(relation.columns)
        schema = dict(zip((column.name for column in relation.columns), types, strict=True))
        self._schemas.described(self._connection, name, schema, self._commit_lsn, self._tables.named)
        if self._changes.is_described(relation.oid):
            self._flush_changes()
        read_above = self._published.read_above(name, self._commit_lsn)
        self._describe_batch(self._changes.describe(relation, name, read_above=read_above))

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
        """From the next transaction on, land changes of ``tables`` with the keys of their contracts."""
        if self._batches.pending:
            # The open batch has recorded other keys for the changes that it contains.
            self._seal()
        self._flush_changes()
        keys = {each.table_name: each.key for each in tables}
        described = [
            (relation, name)
            for relation in self._changes.without_contract
            if (name := self._roots.name_among(relation, keys)) is not None
        ]
        schemas = self._changes.add_tables(keys, described)
        self._roots.add_tables(tables)
        for schema in schemas:
            self._describe_batch(schema)

    # --- land, then confirm --------------------------------------------------------------------

    def _flush_changes(self) -> None:
        self._batches.add(self._changes.take())

    def _seal(self) -> None:
        """Start landing the open batch as soon as the batch before it is durable."""
        self._flush_changes()
        self._confirm_landed()
        self._batches.seal()

    def _confirm_landed(self, *, wait: bool = True) -> None:
        """If the batch that is landing is durable, confirm it. ``wait``: first wait until it is."""
        batch = self._batches.landed(wait=wait)
        if batch is not None:
            self._confirm(batch)

    def _close(self) -> None:
        """Discard the open batch, and pass on the batch that is durable, whatever ended the run."""
        batch = self._batches.close()
        if batch is not None:
            with suppress(SourceUnavailable):
                self._confirm(batch)

    def _confirm(self, batch: Manifest) -> None:
        try:
            self._report()
        finally:
            # The batch is durable even if the source has gone away.
            self._landed(batch)

    def _report(self, *, request_reply: bool = False) -> None:
        # Confirm nothing before the slot has proved that it continues the chain: the next start may need the
        # same proof.
        durable = self._batches.end if self._unproved_below is None else None
        self._stream.confirm(durable, received=self._received_up_to, request_reply=request_reply)

    # --- idle, and stopping --------------------------------------------------------------------

    def _answer(self, keepalive: Keepalive) -> None:
        """Land an idle batch if one is due, and reply if the server wants a reply.

        The keepalive proves that the server has sent everything that committed below ``wal_end``. A server
        that shuts down sends keepalives until everything it sent is confirmed, so reply at once.
        """
        batches = self._batches
        if self._to_be_resent is not None and keepalive.wal_end > self._to_be_resent.commit_lsn:
            raise not_resent(self._to_be_resent, f"nothing in the WAL up to {keepalive.wal_end}")
        self._received_up_to = max(self._received_up_to, keepalive.wal_end)
        self._record_sent_up_to(keepalive.wal_end.value)
        goal_passed = self._until is not None and keepalive.wal_end >= self._until > batches.end
        if not (batches.in_transaction or self._skipping_landed or self._to_be_resent):
            awaited = keepalive.reply_now or goal_passed
            if awaited:
                if batches.pending:
                    self._seal()
                self._confirm_landed()
            proves = keepalive.wal_end >= self._wal_clock.flushed and not self._clock_proved
            wanted = awaited or self._idle_batch_due or proves
            # A batch that is landing may take long. Do not let an idle batch wait for it: the stream must be
            # read on.
            free = not (batches.pending or batches.landing)
            if wanted and free and keepalive.wal_end > batches.end:
                self._land_idle(keepalive.wal_end)
        if keepalive.reply_now:
            self._report()

    def _land_idle(self, wal_end: Lsn) -> None:
        proven = self._wal_clock.clock if wal_end >= self._wal_clock.flushed else None
        self._clock_proved = self._clock_proved or proven is not None
        self._idle_batch_due = False
        self._confirm(self._batches.seal_idle(wal_end, proven))

    def _do_what_is_due(self, stop: threading.Event, *, idle: bool) -> bool:
        """Do what is due: confirm, seal, add tables, report. Return whether the run is over."""
        batches = self._batches
        at_commit = not batches.in_transaction
        self._confirm_landed(wait=False)
        if at_commit and batches.due(self._changes.collected_bytes):
            self._seal()
        if at_commit and not self._skipping_landed and self._tables.any_waiting:
            self._tables.take(self._add_tables)
        if self._at_goal:
            return True
        if stop.is_set() and self._may_stop():
            return True
        now = time.monotonic()
        if now >= self._next_ask:
            self._ask_server(now, idle=idle, at_commit=at_commit)
        return False

    @property
    def _at_goal(self) -> bool:
        return self._until is not None and self._batches.end >= self._until and self._unproved_below is None

    def _may_stop(self) -> bool:
        batches = self._batches
        if not batches.in_transaction:
            if batches.pending:
                self._seal()
            self._confirm_landed()
            return True
        if self._stop_by is None:
            self._stop_by = time.monotonic() + _STOP_GRACE_SECONDS
        return time.monotonic() >= self._stop_by

    def _ask_server(self, now: float, *, idle: bool, at_commit: bool) -> None:
        """Report that capture is alive. If nothing arrives, ask the server how far it has read its WAL."""
        pause = min(IDLE_SECONDS, self._stream.silence.seconds / 2)
        waited_for = self._until is not None or self._unproved_below is not None
        self._next_ask = now + (_ASK_SECONDS_IF_AWAITED if waited_for else pause)
        if now >= self._next_catalog_check:
            self._schemas.look(self._connection)
            self._schemas.require(self._tables.all)
            self._published.require_same(self._connection)
            self._next_catalog_check = now + IDLE_SECONDS
        if idle and at_commit and not self._batches.pending and now >= self._next_clock_read:
            if self._clock_proved or self._batches.end >= self._wal_clock.flushed:
                self._wal_clock, self._clock_proved = wal_clock(self._connection), False
            else:
                # Keep the older clock: a lagging server might never prove a newer one.
                self._idle_batch_due = True
            self._next_clock_read = now + IDLE_SECONDS
        self._report(request_reply=idle)

    def _seconds_to_wait(self) -> float:
        until_ask = self._next_ask - time.monotonic()
        if self._batches.landing:
            return min(until_ask, _LANDING_POLL_SECONDS)
        until_cut = self._batches.seconds_left if self._batches.pending else until_ask
        # Short enough to notice a stop.
        return min(until_ask, max(until_cut, 0.01), 0.2)
