"""Sends and receives the bytes of a replication connection that psycopg2 has opened.

Without encryption, bytes are read from the socket directly, many at a time: libpq returns one message per
call, which costs as much as the rest of reading. A thread receives them ahead, so that the server need not
wait for what is done with them (``compiled_receiver.c``). With TLS or GSSAPI only libpq can decrypt them, so
its C functions are called, in the library that psycopg2 is linked with.
"""

from __future__ import annotations

import ctypes
import os
import select
import time
from contextlib import suppress
from functools import cache
from typing import Protocol

import psycopg2
from psycopg2.extensions import connection as Connection

from omnisupport_ingest.compiled import compiled_receiver
from omnisupport_ingest.sources.postgres.protocol.frames import (
    BUFFER_BYTES,
    HEAD_BYTES,
    Frames,
    unknown_frame,
)
from omnisupport_ingest.sources.postgres.session.errors import SourceUnavailable
from omnisupport_ingest.sources.postgres.session.silence import Awaited

_COPY_BOTH_RESPONSE, _ERROR = ord("W"), ord("E")
_END_OF_STREAM = b"cC"
"""CopyDone and CommandComplete. A server that shuts down sends CommandComplete alone."""
_ANY_TIME = b"NSA"
"""NoticeResponse, ParameterStatus, NotificationResponse: they may arrive at any time and are ignored."""
_COPY_BOTH = 8
_READ_NOW = 1
_ENDED = -1
_ENOUGH_BYTES = 1024 * 1024
_IDLE_MICROS, _MOST_MICROS = 2_000, 20_000
"""How long one call waits for more once something has arrived (``compiled_receiver.take``)."""

_ROOM_BYTES = 4 * 1024 * 1024
"""Bytes that are received ahead: what a busy server sends in some 50 ms."""

_SEND_SECONDS = 5.0
"""Seconds that sending a status may wait for the socket; a server reads only between two messages."""


class Refused(Exception):
    """Raised when the server refuses to start replication; the text is the server's."""


class Transport(Protocol):
    """One replication connection. Every method raises ``SourceUnavailable`` if the server has gone."""

    def start(self, command: str, frames: Frames, answer: Awaited) -> None:
        """Start replication. ``frames`` receives what the server sends after its answer.

        Raises ``Refused`` if the server refuses, and ``OperationalError`` if waiting for the ``answer`` was
        given up.
        """

    @property
    def gathers(self) -> bool:
        """Whether ``receive`` waits a moment for more once something has arrived."""

    def receive(self, frames: Frames) -> bool:
        """Receive what has arrived; return at once, and False, if nothing has."""

    def wait(self, seconds: float) -> bool:
        """Wait until something arrives, at most ``seconds``. Return whether something has."""

    def send_copy_data(self, message: bytes) -> None:
        """Send one CopyData message."""

    def end(self) -> None:
        """Tell the server that we send nothing more."""

    def close(self) -> None:
        """Use the connection no longer. Call it before the connection is closed."""

    def handle_frame(self, letter: int, content: bytes) -> None:
        """Handle a frame that is not part of the stream: an error of the server, or the end of the stream.

        Ignores frames that may arrive at any time. Raises ``ProtocolViolation`` for any other frame.
        """


def transport_of(connection: Connection) -> Transport:
    """Return the transport for ``connection``, which must be idle."""
    if is_encrypted(connection):
        return LibpqTransport(_libpq(), ctypes.c_void_p(connection.pgconn_ptr))
    return SocketTransport(connection.fileno())


def is_encrypted(connection: Connection) -> bool:
    """Whether only libpq can read what comes over ``connection``."""
    gss = _libpq().PQgssEncInUse(ctypes.c_void_p(connection.pgconn_ptr))
    return bool(connection.info.ssl_in_use or gss)


class SocketTransport:
    """Uses the socket directly. libpq must not be waiting for anything on the connection."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._receiver: object | None = None
        self._socket = select.poll()
        self._socket.register(descriptor, select.POLLIN)
        self._writable = select.poll()
        self._writable.register(descriptor, select.POLLOUT)

    def start(self, command: str, frames: Frames, answer: Awaited) -> None:
        # The command is sent here and not by libpq, which would read the beginning of the stream into its own
        # buffer.
        self._send(b"Q", command.encode() + b"\0")
        while True:
            while (frame := frames.pop()) is not None:
                letter, content = frame
                if letter == _COPY_BOTH_RESPONSE:
                    return self.receive_ahead()
                if letter == _ERROR:
                    raise Refused(_error_text(content, b"SMDH"))
                self.handle_frame(letter, content)
            self._socket.poll()
            try:
                self.receive(frames)
            except SourceUnavailable:
                answer.raise_if_given_up()
                raise

    def receive_ahead(self) -> None:
        """From now on, have a thread receive, if the package was installed with a C compiler and the system
        has a thread and four descriptors to give."""
        if compiled_receiver is not None:
            with suppress(OSError):
                self._receiver = compiled_receiver.start(self._descriptor, _ROOM_BYTES)

    @property
    def gathers(self) -> bool:
        return self._receiver is not None

    def receive(self, frames: Frames) -> bool:
        into = frames.free_space()
        try:
            if compiled_receiver is None or self._receiver is None:
                count: int | None = os.readv(self._descriptor, [into])
            else:
                count = compiled_receiver.take(
                    self._receiver, into, _ENOUGH_BYTES, _IDLE_MICROS, _MOST_MICROS
                )
        except BlockingIOError:
            count = None
        except OSError as error:
            raise stream_closed(error.strerror or str(error)) from error
        finally:
            into.release()
        if count is None:
            return False
        if not count:
            raise stream_closed("server closed the connection unexpectedly")
        frames.received(count)
        return True

    def wait(self, seconds: float) -> bool:
        if compiled_receiver is None or self._receiver is None:
            return bool(self._socket.poll(seconds * 1000))
        return compiled_receiver.wait(self._receiver, int(seconds * 1_000_000))

    def send_copy_data(self, message: bytes) -> None:
        self._send(b"d", message)

    def end(self) -> None:
        self._send(b"c", b"")

    def close(self) -> None:
        if compiled_receiver is not None and self._receiver is not None:
            compiled_receiver.stop(self._receiver)

    def handle_frame(self, letter: int, content: bytes) -> None:
        if letter == _ERROR:
            raise stream_closed(_error_text(content))
        if letter in _END_OF_STREAM:
            raise stream_closed("end of stream")
        if letter not in _ANY_TIME:
            raise unknown_frame(letter)

    def _send(self, letter: bytes, content: bytes) -> None:
        unsent = letter + (len(content) + 4).to_bytes(4, "big") + content
        give_up = time.monotonic() + _SEND_SECONDS
        while unsent:
            try:
                # No failpoint: its callers put one around the call.
                unsent = unsent[os.write(self._descriptor, unsent) :]
            except BlockingIOError:
                if time.monotonic() > give_up:
                    raise stream_closed("it takes nothing in") from None
                self._writable.poll(1000)
            except OSError as error:
                raise stream_closed(error.strerror or str(error)) from error


class LibpqTransport:
    """Uses libpq, for an encrypted connection."""

    gathers = False

    def __init__(self, library: ctypes.PyDLL, handle: ctypes.c_void_p) -> None:
        self._pq, self._handle = library, handle
        self._socket = select.poll()
        self._socket.register(library.PQsocket(handle), select.POLLIN)
        self._buffer = ctypes.c_void_p()
        self._buffer_address = ctypes.byref(self._buffer)
        self._get, self._free = library.PQgetCopyData, library.PQfreemem
        self._end_status: int | None = None

    def start(self, command: str, frames: Frames, answer: Awaited) -> None:  # noqa: ARG002
        result = self._pq.PQexec(self._handle, command.encode())
        answer.raise_if_given_up()
        status = self._pq.PQresultStatus(result)
        self._pq.PQclear(result)
        if status != _COPY_BOTH:
            raise Refused(_one_line(self._pq.PQerrorMessage(self._handle)))

    def receive(self, frames: Frames) -> bool:
        if self._end_status is not None:
            raise self._gone(ended=self._end_status == _ENDED)
        frames.free_space()
        taken, read_socket = 0, False
        while taken < BUFFER_BYTES:
            length = self._get(self._handle, self._buffer_address, _READ_NOW)
            if length > 0:
                frames.add(self._message(frames, length))
                taken += length
            elif length < 0:
                self._end_status = length
                if not taken:
                    raise self._gone(ended=length == _ENDED)
                break
            elif taken or read_socket:
                break
            elif not self._pq.PQconsumeInput(self._handle):
                raise self._gone(ended=False)
            else:
                # No whole message was buffered. Now the socket has been read, so one may be.
                read_socket = True
        frames.received(0)
        return taken > 0

    def wait(self, seconds: float) -> bool:
        return bool(self._socket.poll(seconds * 1000))

    def send_copy_data(self, message: bytes) -> None:
        # No failpoint: its callers put one around the call.
        if (
            self._pq.PQputCopyData(self._handle, message, len(message)) != 1
            or self._pq.PQflush(self._handle) < 0
        ):
            raise self._gone(ended=False)

    def end(self) -> None:
        if self._pq.PQputCopyEnd(self._handle, None) != 1 or self._pq.PQflush(self._handle) < 0:
            raise self._gone(ended=False)

    def close(self) -> None:
        """Does nothing: libpq alone uses the connection."""

    def handle_frame(self, letter: int, content: bytes) -> None:
        """Does nothing: libpq handles such frames itself."""

    def _message(self, frames: Frames, length: int) -> bytes:
        try:
            if frames.too_long(length):
                return frames.replacement_for(ctypes.string_at(self._buffer, HEAD_BYTES), length)
            return ctypes.string_at(self._buffer, length)
        finally:
            self._free(self._buffer)

    def _gone(self, *, ended: bool) -> SourceUnavailable:
        """Return the error for a lost stream. ``ended``: the server ended it itself, perhaps by an error."""
        reason = self._error_at_end() if ended else ""
        return stream_closed(reason or _one_line(self._pq.PQerrorMessage(self._handle)) or "end of stream")

    def _error_at_end(self) -> str:
        result = self._pq.PQgetResult(self._handle)
        if not result:
            return ""
        # The lines after the first may quote data.
        message = _one_line((self._pq.PQresultErrorMessage(result) or b"").split(b"\n")[0])
        self._pq.PQclear(result)
        return message


def stream_closed(reason: str) -> SourceUnavailable:
    """Return the error for a stream that ended for ``reason``."""
    return SourceUnavailable(
        f"The source closed the replication stream: {reason}.",
        fix="Start the database again if it is down; capture then continues where landing ends.",
    )


def _error_text(content: bytes, fields: bytes = b"SM") -> str:
    """Return the text of an ErrorResponse (manual, "Error and Notice Message Fields") as libpq writes it.

    ``fields``: letters of the fields to include; by default none that may quote data.
    """
    fields_by_letter = {each[0]: each[1:] for each in content.split(b"\0") if each}
    severity = fields_by_letter.get(ord("S"), b"ERROR")
    names = {ord("D"): b"DETAIL", ord("H"): b"HINT"}
    problem = severity + b": " + fields_by_letter.get(ord("M"), b"")
    for field in fields:
        if field in names and field in fields_by_letter:
            problem += b" " + names[field] + b": " + fields_by_letter[field]
    return _one_line(problem)


def _one_line(text: bytes | None) -> str:
    return " ".join((text or b"").decode(errors="replace").split()).rstrip(".")


@cache
def _libpq() -> ctypes.PyDLL:
    """Return the libpq that psycopg2 is linked with, found through psycopg2's own library."""
    file = psycopg2._psycopg.__file__
    library, unlocked = ctypes.PyDLL(file), ctypes.CDLL(file)
    # While it takes bytes from the socket, PQconsumeInput releases the interpreter's lock, so that the thread
    # that makes batches can run. For the other functions, called once per message, that would cost too much.
    library.PQconsumeInput = unlocked.PQconsumeInput  # type: ignore[attr-defined]
    # These two wait for the server's answer, so they release the lock too: another thread may have to end the
    # wait.
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
        "PQsocket": (integer, [pointer]),
        "PQfreemem": (None, [pointer]),
        "PQerrorMessage": (text, [pointer]),
        "PQgssEncInUse": (integer, [pointer]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
