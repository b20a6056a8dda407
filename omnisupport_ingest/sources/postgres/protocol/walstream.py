"""The replication stream as raw messages.

psycopg2's own replication cursor answers keepalives by itself and confirms a position with each answer. Here
a position may be confirmed only when it is durable in landing. So ``transport`` reads the messages without
that cursor, on the connection that psycopg2 opened. Message formats: PostgreSQL manual, "Streaming
Replication Protocol".
"""

from __future__ import annotations

import struct
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from psycopg2.extensions import connection as Connection

from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.sources.postgres.protocol.frames import COPY_DATA, Frames, Rows, Transactions
from omnisupport_ingest.sources.postgres.protocol.transport import Refused, transport_of
from omnisupport_ingest.sources.postgres.session.connection import source_errors
from omnisupport_ingest.sources.postgres.session.errors import SourceUnavailable
from omnisupport_ingest.sources.postgres.session.quoting import identifier, literal
from omnisupport_ingest.sources.postgres.session.silence import Awaited, Silence

POSTGRES_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
"""PostgreSQL counts microseconds from this time."""

_KEEPALIVE = struct.Struct("!xQ8xB")
_STATUS = struct.Struct("!cQQQqB")

_GATHER_SECONDS = 0.0005
"""Seconds to let more messages arrive after the first ones; far less than the age of a batch."""

_END_SECONDS = 5.0
"""Seconds to wait for the end of a stream: the server may be in the middle of a transaction."""


@dataclass(frozen=True, slots=True)
class Keepalive:
    """The server has sent everything before ``wal_end``. ``reply_now``: it expects a status now."""

    wal_end: Lsn
    reply_now: bool

    @classmethod
    def parse(cls, message: bytes) -> Keepalive:
        wal_end, reply = _KEEPALIVE.unpack_from(message)
        return cls(Lsn(wal_end), bool(reply))


def from_microseconds(since_2000: int) -> datetime:
    """Return a protocol timestamp (microseconds since 2000) as a datetime in UTC."""
    return POSTGRES_EPOCH + timedelta(microseconds=since_2000)


class WalStream:
    """A started logical replication stream. Not thread-safe."""

    def __init__(
        self,
        connection: Connection,
        slot: str,
        publication: str,
        start: Lsn,
        *,
        in_progress: bool = False,
        max_row_bytes: int | None = None,
    ) -> None:
        """Start ``slot`` at ``start`` on a replication connection; the stream owns the connection.

        ``in_progress``: let the server send large transactions before they commit (PostgreSQL 14 and newer).
        ``max_row_bytes``: a longer message is not read into memory (see ``read``); None: no limit. Raises
        ``SourceUnavailable`` with the server's reason if it refuses.
        """
        self._connection = connection
        self._frames = Frames(max_row_bytes)
        self._confirmed = start.value
        self._reply_requested_at: float | None = None
        self._receiving = False
        self._transport = transport_of(connection)
        options = [("proto_version", "2"), ("streaming", "on")] if in_progress else [("proto_version", "1")]
        options.append(("publication_names", identifier(publication)))
        if connection.server_version >= 140000:
            options.append(("messages", "true"))
        listed = ", ".join(f"{name} {literal(value)}" for name, value in options)
        self._start(f"START_REPLICATION SLOT {identifier(slot)} LOGICAL {start} ({listed})")

    def read(self) -> bytes | None:
        """Return the next message, or None if none has arrived yet. Never waits.

        For a row change that is too long, returns a message that decodes to ``pgoutput.OversizedRow``. Raises
        ``RowTooLarge`` if another message is too long.
        """
        while True:
            frame = self._frames.pop()
            if frame is None:
                if not self._transport.receive(self._frames):
                    return None
                self._reply_requested_at, self._receiving = None, not self._transport.gathers
                frame = self._frames.pop()
                if frame is None:
                    return None
            letter, content = frame
            if letter == COPY_DATA:
                return content
            self._transport.handle_frame(letter, content)

    def rows(self) -> Rows | None:
        """Return the received row changes up to the next other message, or None. Receives nothing itself."""
        return self._frames.rows()

    def transactions(self) -> Transactions | None:
        """Return the received transactions that are whole and contain only row changes, or None."""
        return self._frames.transactions()

    @property
    def max_row_bytes(self) -> int:
        """The largest size of a row in bytes; 0 for no limit."""
        return self._frames.max_row_bytes or 0

    def wait(self, seconds: float) -> None:
        """Wait until something arrives, at most ``seconds``; not at all if that is negative.

        Raises ``SourceUnavailable`` if the server owes a reply, has been silent for longer than the
        connection tolerates, and its session is not working.
        """
        if self._receiving:
            # Let more messages arrive: waking up for every few changes costs both sides more.
            self._receiving = False
            time.sleep(max(0.0, min(seconds, _GATHER_SECONDS)))
        elif self._transport.wait(max(0.0, seconds)):
            self._reply_requested_at = None
        elif (
            self._reply_requested_at is not None
            and time.monotonic() - self._reply_requested_at > self.silence.seconds
        ):
            why = self.silence.explained(self._connection.info.backend_pid, streaming=True)
            if why is not None and not self._transport.wait(0):
                self.silence.end(self._connection.info.backend_pid)
                raise SourceUnavailable(
                    "The source has fallen silent: nothing has come by the replication stream for "
                    f"{time.monotonic() - self._reply_requested_at:.0f} seconds, and {why}.",
                    fix="See what stands between this machine and the server (proxy, firewall, network) and "
                    "whether the server runs. Capture continues where landing ends.",
                )
            self._reply_requested_at = None

    @property
    def silence(self) -> Silence:
        """How long the server may be silent."""
        silence: Silence = self._connection.silence
        return silence

    def confirm(self, durable: Lsn | None, *, received: Lsn, request_reply: bool = False) -> None:
        """Confirm to the server that everything that committed below ``durable`` is in landing.

        The server need not send it again. None: the slot's confirmed position stays. ``received`` (at or
        above ``durable``) only reduces the server's keepalives. ``request_reply``: request a keepalive, which
        says how far the server has read its WAL.
        """
        now = int((time.time() - POSTGRES_EPOCH.timestamp()) * 1_000_000)
        flushed = durable.value if durable is not None else 0
        status = _STATUS.pack(b"r", received.value, flushed, flushed, now, request_reply)
        with failpoint("source.confirm", "forward" if flushed > self._confirmed else "again"):
            self._transport.send_copy_data(status)
        self._confirmed = max(self._confirmed, flushed)
        if request_reply and self._reply_requested_at is None:
            self._reply_requested_at = time.monotonic()

    def end(self) -> None:
        """End the stream in order, so that the server receives every ``confirm``; then call ``close``.

        Waits a few seconds at most. If a connection is just closed, the server loses what it has not read,
        and the next start looks like one after a crash.
        """
        # The end arrives as an error, after everything that was sent before it.
        with suppress(SourceUnavailable):
            self._transport.end()
            give_up = time.monotonic() + _END_SECONDS
            while (seconds_left := give_up - time.monotonic()) > 0:
                if self.rows() is None and self.read() is None:
                    self._transport.wait(seconds_left)

    def close(self) -> None:
        """Close the connection, whatever state it is in."""
        try:
            self._transport.close()
        finally:
            self._connection.close()

    def _start(self, command: str) -> None:
        with source_errors("starting replication"), Awaited(self._connection, self.silence) as answer:
            try:
                self._transport.start(command, self._frames, answer)
            except Refused as refusal:
                raise SourceUnavailable(
                    f"The source refused to start replication: {refusal}.",
                    fix="If the slot is active for another process, stop that process; otherwise act on "
                    "the server's message. Capture then continues where landing ends.",
                ) from None
