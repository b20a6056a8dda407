"""The replication stream as raw messages.

psycopg2's own replication cursor answers keepalives by itself, and moves the confirmed position with them.
Here a position may be confirmed only when it is durable in landing. So the stream is read by libpq's COPY
functions on the connection that psycopg2 opened (``connection.pgconn_ptr``, made for this use). Message
formats: PostgreSQL manual, "Streaming Replication Protocol".
"""

from __future__ import annotations

import ctypes
import select
import struct
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import psycopg2
from psycopg2.extensions import connection as Connection

from omnisupport_ingest.failpoints import gate
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.sources.postgres.session.connection import source_errors
from omnisupport_ingest.sources.postgres.session.errors import RowTooLarge, SourceUnavailable
from omnisupport_ingest.sources.postgres.session.quoting import identifier, literal
from omnisupport_ingest.sources.postgres.session.silence import Awaited, Silence

POSTGRES_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
"""PostgreSQL counts microseconds from here."""

WAL_DATA, KEEPALIVE = ord("w"), ord("k")
"""First byte of the two messages that a server sends."""

WAL_DATA_HEADER = 25
"""Bytes before the payload of a ``WAL_DATA`` message: type, start LSN, end LSN, send time."""

_BESIDE_A_ROW = 16 * 1024
"""Bytes of a message beside the values of a row: its head, and 5 for each column of the new row and the old
one (1,600 at most).
"""

_HEAD = WAL_DATA_HEADER + 9
"""Bytes that are taken of a change whose row is too long: up to the oid of its table, which follows the id of
the transaction while that is in progress.
"""

_NOT_TAKEN = {ord("I"): b"i", ord("U"): b"u", ord("D"): b"d"}
"""First byte of a row change → first byte of its replacement if the row is too long, which no server
sends.
"""

_SIZE = struct.Struct("!Q")

_KEEPALIVE = struct.Struct("!xQqB")
_STATUS = struct.Struct("!cQQQqB")
_COPY_BOTH = 8
_READ_NOW = 1
_ENDED = -1

_END_SECONDS = 5.0
"""Seconds to wait for the end of a stream: the server may be in the middle of a transaction."""


@dataclass(frozen=True, slots=True)
class Keepalive:
    """The server has sent everything before ``wal_end``. ``reply_now``: it waits for a status."""

    wal_end: Lsn
    sent_at: datetime
    reply_now: bool

    @classmethod
    def parse(cls, message: bytes) -> Keepalive:
        wal_end, microseconds, reply = _KEEPALIVE.unpack_from(message)
        return cls(Lsn(wal_end), from_microseconds(microseconds), bool(reply))


def from_microseconds(since_2000: int) -> datetime:
    """Return a protocol timestamp as a datetime in UTC."""
    return POSTGRES_EPOCH + timedelta(microseconds=since_2000)


def _libpq() -> ctypes.PyDLL:
    """Return the libpq that psycopg2 is linked with, found through psycopg2's own library."""
    file = psycopg2._psycopg.__file__
    library, unlocked = ctypes.PyDLL(file), ctypes.CDLL(file)
    # Taking bytes from the socket lets go of the interpreter's lock, so that the thread that makes
    # batches gets its turns; for the other calls, one for each message, that would cost too much.
    library.PQconsumeInput = unlocked.PQconsumeInput  # type: ignore[attr-defined]
    # These wait for the server's answer, which a thread beside them may have to give up.
    library.PQexec = unlocked.PQexec  # type: ignore[attr-defined]
    library.PQgetResult = unlocked.PQgetResult  # type: ignore[attr-defined]
    pointer, integer, text = ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p
    signatures = {
        "PQexec": (pointer, [pointer, text]),
        "PQresultStatus": (integer, [pointer]),
        "PQgetResult": (pointer, [pointer]),
        "PQresultErrorMessage": (text, [pointer]),
        "PQclear": (None, [pointer]),
        "PQgetCopyData": (integer, [pointer, ctypes.POINTER(pointer), integer]),
        "PQputCopyData": (integer, [pointer, text, integer]),
        "PQputCopyEnd": (integer, [pointer, text]),
        "PQconsumeInput": (integer, [pointer]),
        "PQflush": (integer, [pointer]),
        "PQfreemem": (None, [pointer]),
        "PQerrorMessage": (text, [pointer]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


class WalStream:
    """A started logical replication stream. Not for use from several threads."""

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

        ``in_progress``: large transactions are sent before they commit (PostgreSQL 14 and newer).
        ``max_row_bytes``: a longer message is not taken into memory (see ``read``); None: no limit. Raises
        ``SourceUnavailable`` with the server's reason if it refuses.
        """
        self._connection = connection
        self._longest = None if max_row_bytes is None else max_row_bytes + _BESIDE_A_ROW
        self._confirmed = start.value
        self._asked_at: float | None = None
        self._pq = _libpq()
        self._handle = ctypes.c_void_p(connection.pgconn_ptr)
        self._buffer = ctypes.c_void_p()
        self._buffer_address = ctypes.byref(self._buffer)
        self._socket = select.poll()
        self._socket.register(connection.fileno(), select.POLLIN)
        self._get = self._pq.PQgetCopyData
        self._free = self._pq.PQfreemem
        options = [("proto_version", "2"), ("streaming", "on")] if in_progress else [("proto_version", "1")]
        options.append(("publication_names", identifier(publication)))
        if connection.server_version >= 140000:
            options.append(("messages", "true"))
        listed = ", ".join(f"{name} {literal(value)}" for name, value in options)
        self._start(f"START_REPLICATION SLOT {identifier(slot)} LOGICAL {start} ({listed})")

    def read(self) -> bytes | None:
        """Return the next message, or None if none has arrived yet. Never waits.

        A row change that is too long is returned as ``pgoutput.RowNotTaken`` decodes it; ``RowTooLarge`` if
        another message is too long.
        """
        length = self._get(self._handle, self._buffer_address, _READ_NOW)
        if length == 0:
            # No whole message is buffered: take what the socket holds, without waiting for more.
            if not self._pq.PQconsumeInput(self._handle):
                raise self._went_away()
            length = self._get(self._handle, self._buffer_address, _READ_NOW)
            if length == 0:
                return None
            self._asked_at = None
        if length < 0:
            raise self._went_away(ended=length == _ENDED)
        if self._longest is not None and length > self._longest:
            head = ctypes.string_at(self._buffer, _HEAD)
            self._free(self._buffer)
            return self._not_taken(head, length)
        message = ctypes.string_at(self._buffer, length)
        self._free(self._buffer)
        return message

    @property
    def max_row_bytes(self) -> int:
        """Size that a row may have, in bytes; 0 for no limit."""
        return 0 if self._longest is None else self._longest - _BESIDE_A_ROW

    def _not_taken(self, head: bytes, length: int) -> bytes:
        """Return the replacement for a row change of ``length`` bytes that begins with ``head``."""
        kind = _NOT_TAKEN.get(head[WAL_DATA_HEADER]) if head[0] == WAL_DATA else None
        if kind is None:
            raise RowTooLarge(length, self.max_row_bytes)
        return head[:WAL_DATA_HEADER] + kind + head[WAL_DATA_HEADER + 1 :] + _SIZE.pack(length)

    def wait(self, seconds: float) -> None:
        """Wait until something arrives, at most ``seconds``.

        ``SourceUnavailable`` if a reply was asked for, the server has been silent for longer than the
        connection tolerates, and it is not at work.
        """
        if self._socket.poll(max(0.0, seconds) * 1000):
            self._asked_at = None
        elif self._asked_at is not None and time.monotonic() - self._asked_at > self.silence.seconds:
            why = self.silence.explained(self._connection.info.backend_pid, streaming=True)
            if why is not None and not self._socket.poll(0):
                self.silence.end(self._connection.info.backend_pid)
                raise SourceUnavailable(
                    "The source has fallen silent: nothing has come by the replication stream for "
                    f"{time.monotonic() - self._asked_at:.0f} seconds, and {why}.",
                    fix="See what stands between this machine and the server (proxy, firewall, network) and "
                    "whether the server runs. Capture continues where landing ends.",
                )
            self._asked_at = None

    @property
    def silence(self) -> Silence:
        """The tolerated silence of the server."""
        silence: Silence = self._connection.silence
        return silence

    def confirm(self, durable: Lsn | None, *, received: Lsn, ask_reply: bool = False) -> None:
        """Tell the server that it need not send again what committed below ``durable``.

        None leaves the slot where it is. ``received`` (at or above ``durable``) only quiets the server's
        keepalives. ``ask_reply`` asks for a keepalive, which says how far the server has read its WAL.
        """
        now = int((time.time() - POSTGRES_EPOCH.timestamp()) * 1_000_000)
        flushed = durable.value if durable is not None else 0
        status = _STATUS.pack(b"r", received.value, flushed, flushed, now, ask_reply)
        with gate("source.confirm", "forward" if flushed > self._confirmed else "again"):
            if (
                self._pq.PQputCopyData(self._handle, status, len(status)) != 1
                or self._pq.PQflush(self._handle) < 0
            ):
                raise self._went_away()
        self._confirmed = max(self._confirmed, flushed)
        if ask_reply and self._asked_at is None:
            self._asked_at = time.monotonic()

    def end(self) -> None:
        """End the stream in order, so that the server has received every ``confirm``; call ``close``
        afterwards.

        Waits a few seconds at most. A server loses what it has not read when a connection is just closed; the
        next start would then look like one after a crash.
        """
        if self._pq.PQputCopyEnd(self._handle, None) != 1 or self._pq.PQflush(self._handle) < 0:
            return
        give_up = time.monotonic() + _END_SECONDS
        while (left := give_up - time.monotonic()) > 0:
            length = self._get(self._handle, self._buffer_address, _READ_NOW)
            if length > 0:
                self._free(self._buffer)
            elif length < 0 or (self._socket.poll(left * 1000) and not self._pq.PQconsumeInput(self._handle)):
                return

    def close(self) -> None:
        """Close the connection, whatever state it is in."""
        self._connection.close()

    def _start(self, command: str) -> None:
        with source_errors("starting replication"), Awaited(self._connection, self.silence) as answer:
            result = self._pq.PQexec(self._handle, command.encode())
            answer.raise_if_given_up()
        status = self._pq.PQresultStatus(result)
        self._pq.PQclear(result)
        if status != _COPY_BOTH:
            raise SourceUnavailable(
                f"The source refused to start replication: {self._message()}.",
                fix="If the slot is active for another process, stop that process; otherwise act on "
                "the server's message. Capture then continues where landing ends.",
            )

    def _went_away(self, *, ended: bool = False) -> SourceUnavailable:
        """Return the error. ``ended``: the server has ended the stream itself, perhaps with an error
        message.
        """
        reason = (self._error_at_end() if ended else "") or self._message() or "end of stream"
        return SourceUnavailable(
            f"The source closed the replication stream: {reason}.",
            fix="Start the database again if it is down; capture then continues where landing ends.",
        )

    def _error_at_end(self) -> str:
        result = self._pq.PQgetResult(self._handle)
        if not result:
            return ""
        # The lines after the first may quote data.
        message = _one_line((self._pq.PQresultErrorMessage(result) or b"").split(b"\n")[0])
        self._pq.PQclear(result)
        return message

    def _message(self) -> str:
        return _one_line(self._pq.PQerrorMessage(self._handle))


def _one_line(text: bytes | None) -> str:
    return " ".join((text or b"").decode(errors="replace").split()).rstrip(".")
