"""Reads what a COPY returns from the socket of a connection, many rows at a time.

psycopg2 calls a method for every row, for which it takes the interpreter's lock. A thread that works on
earlier rows often has that lock, and as a socket holds few rows, the server then waits too. Here the kernel
receives a megabyte without the lock, and no row has a Python object.

The server sends each row as one frame (PostgreSQL manual, "Message Formats"): a letter, a length, the row.
The rows of a block stay where they were received.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
import psycopg2
import psycopg2.errors
from psycopg2.extensions import connection as Connection

from omnisupport_ingest.compiled import compiled_frames
from omnisupport_ingest.sources.postgres.protocol.frames import COPY_DATA, FRAME_HEADER, frame_bounds
from omnisupport_ingest.sources.postgres.protocol.text_columns import Positions
from omnisupport_ingest.sources.postgres.session.errors import RowTooLarge

_ERROR, _READY = ord("E"), ord("Z")
_OTHER_FRAMES = frozenset(b"HcCNSA")
"""Letters of frames that a COPY may bring besides those of rows, errors and the end. They are ignored."""

_READY_FRAME = b"Z\0\0\0\5"
"""The last frame, without its last byte. No row contains it, because no text of PostgreSQL contains NUL."""

_ROOM = 64 * 1024
"""Bytes of a buffer in addition to a block."""

_CHECK_MS = 200
"""How long one call waits for the first bytes."""

_SINGLE_BYTES = 1024 * 1024
"""So many bytes are taken as they arrive; a small result ends without a wait for more."""

_READ_BYTES, _READ_MICROS = 1024 * 1024, 10_000
"""What a later call waits for, and for how long in total; then it returns what has arrived."""

_DISCARD_SECONDS = 30.0
"""How long the rest of an answer may take that nobody wants: by far longer than a page or a chunk takes."""

_TIMEVAL = struct.Struct("@ll")
_MOST_BYTES = 1 << 32
"""More than the length of a frame can say."""


_LINE_END = ord("\n")
Buffer = npt.NDArray[np.uint8]


class Lines(NamedTuple):
    """Lines of COPY, one per row: in ``data``, each from ``starts`` to ``ends``, with its line end."""

    data: bytes | Buffer
    starts: Positions
    ends: Positions

    @classmethod
    def of(cls, content: bytes) -> Self:
        """Return the lines of ``content``, of which the last one is whole too."""
        ends = np.flatnonzero(np.frombuffer(content, np.uint8) == _LINE_END) + 1
        return cls(content, np.concatenate(([0], ends[:-1])), ends)

    @property
    def rows(self) -> int:
        return len(self.starts)

    @property
    def size(self) -> int:
        """The bytes of all lines."""
        return int(np.add.reduce(self.ends - self.starts))

    def joined(self) -> bytes:
        """Return the lines, one after the other."""
        if compiled_frames is not None:
            return compiled_frames.join(self.data, self.starts, self.ends)
        bounds = zip(self.starts.tolist(), self.ends.tolist(), strict=True)
        return b"".join([bytes(self.data[start:stop]) for start, stop in bounds])

    def last(self) -> bytes:
        """Return the last line, without its line end."""
        return bytes(self.data[self.starts[-1] : self.ends[-1] - 1])


def copy_from_socket(
    connection: Connection,
    command: str,
    block_bytes: int,
    max_row_bytes: int | None,
    lines: Callable[[Lines], None],
) -> None:
    """Call ``lines`` with the rows that ``command`` (COPY … TO STDOUT, as text) returns.

    ``connection``: not encrypted, and used by nobody else meanwhile. A block has as many rows as fit into
    ``block_bytes``, at least one, so the same rows always make the same blocks. ``max_row_bytes``: as of
    ``copy_lines``. Raises ``RowTooLarge`` and psycopg2's errors. An error in ``lines`` ends the copy and is
    raised from here.
    """
    answer = _Answer(block_bytes, max_row_bytes)
    try:
        with _Socket(connection) as server:
            try:
                server.send(command)
                while not answer.over:
                    for block in answer.add(server.receive(answer.free_space())):
                        lines(block)
            except BaseException:
                if not answer.over and not server.closed:
                    server.discard(answer.rest())
                raise
    except _Closed as closed:
        connection.close()
        # What the server said last explains why it closed the connection.
        with suppress(_Closed):
            answer.find_frames()
        raise answer.error or psycopg2.OperationalError(f"{closed}") from None
    if answer.error is not None:
        raise answer.error


class _Closed(Exception):
    """Raised if the connection has been closed, or cannot be used any more."""


def _frame_end(data: Buffer, at: int) -> int:
    return at + 1 + int.from_bytes(bytes(data[at + 1 : at + FRAME_HEADER]), "big")


class _Answer:
    """The server's answer to a COPY: what has been received and not been returned as part of a block.

    ``done``: the server has sent all rows, or why it does not. ``error``: why it refused, or ended the copy.
    """

    def __init__(self, block_bytes: int, max_row_bytes: int | None) -> None:
        self.done = False
        self.error: psycopg2.Error | None = None
        self._block_bytes, self._max_row_bytes = block_bytes, max_row_bytes
        self._usual_bytes = block_bytes + block_bytes // 16 + _ROOM  # of a buffer, unless a row is longer
        self._data = np.empty(self._usual_bytes, np.uint8)
        self._filled = self._seen = 0  # bytes received; of these, bytes of whole frames that were found
        self._starts = self._ends = np.empty(0, np.int64)  # of the rows among them

    @property
    def over(self) -> bool:
        """Whether the server waits for the next statement, and nothing of it is left in part: libpq would
        read the end of a frame without its beginning."""
        return self.done and self._seen == self._filled

    def free_space(self) -> memoryview:
        """Return the buffer to receive into."""
        if self._filled == len(self._data):
            self._make_room()
        return self._data[self._filled :].data

    def add(self, count: int) -> Iterator[Lines]:
        """Yield the blocks that are complete, after ``count`` bytes more. Raises ``RowTooLarge``."""
        self._filled += count
        # Looking for frames costs less for many at once.
        if count and self._filled < len(self._data) and self._last()[:-1] != _READY_FRAME:
            return
        self.find_frames()
        lengths = self._ends - self._starts
        if self._max_row_bytes is not None and len(lengths) and lengths.max() > self._max_row_bytes:
            raise RowTooLarge(int(lengths.max()), self._max_row_bytes)
        sizes, first, before = np.cumsum(lengths), 0, 0
        while first < len(sizes):
            stop = max(first + 1, int(np.searchsorted(sizes, before + self._block_bytes, "right")))
            if stop == len(sizes) and (not self.done or self.error is not None):
                # The next row may belong to this block. After an error, the block never becomes complete.
                break
            yield Lines(self._data, self._starts[first:stop], self._ends[first:stop])
            first, before = stop, int(sizes[stop - 1])
        self._starts, self._ends = self._starts[first:], self._ends[first:]

    def rest(self) -> Rest:
        """Return what is left of the answer, of which nobody wants the rows."""
        rest = Rest(self.done)
        rest.add(self._data[self._seen : self._filled].data)
        return rest

    def _last(self) -> bytes:
        """Return the last bytes received, as many as the last frame has."""
        return bytes(self._data[max(0, self._filled - len(_READY_FRAME) - 1) : self._filled])

    def find_frames(self) -> None:
        """Find the whole frames among what was received since the last time."""
        data, end = self._data, self._filled
        while self._seen <= end - FRAME_HEADER:
            letter = data[self._seen]
            if letter == COPY_DATA:
                bounds = frame_bounds(data.data, self._seen, end, _MOST_BYTES, COPY_DATA)
                if len(bounds) == 1:
                    if _frame_end(data, self._seen) < self._seen + FRAME_HEADER:
                        raise _Closed("a message without a length arrived in a COPY")
                    return
                self._starts = np.concatenate((self._starts, bounds[:-1] + FRAME_HEADER))
                self._ends = np.concatenate((self._ends, bounds[1:]))
                self._seen = int(bounds[-1])
                continue
            following = _frame_end(data, self._seen)
            if letter not in _OTHER_FRAMES and letter not in (_ERROR, _READY):
                raise _Closed(f"a message of type {bytes([letter])!r} arrived in a COPY")
            if following > end:
                return
            if letter == _ERROR:
                self.error = _error(bytes(data[self._seen + FRAME_HEADER : following]))
            self.done |= letter == _READY
            self._seen = following

    def _make_room(self) -> None:
        """Take a new buffer, with what was not returned at its front. It is larger than usual if that needs
        most of it. The blocks that were returned keep this one."""
        data, begun = self._data, self._seen
        first = int(self._starts[0]) - FRAME_HEADER if len(self._starts) else begun
        left = self._filled - first
        wanted = self._usual_bytes
        while left > wanted * 7 // 8:
            wanted *= 2
        if self._filled - begun >= FRAME_HEADER:
            end = _frame_end(data, begun)
            size = end - begun - FRAME_HEADER
            if data[begun] == COPY_DATA and self._max_row_bytes is not None and size > self._max_row_bytes:
                raise RowTooLarge(size, self._max_row_bytes)
            wanted = max(wanted, end - first + _ROOM)
        self._data = np.empty(wanted, np.uint8)
        self._data[:left] = data[first : self._filled]
        self._filled, self._seen = left, begun - first
        self._starts, self._ends = self._starts - first, self._ends - first


class Rest:
    """The rest of an answer: which of its frames is the last one. It keeps no row."""

    def __init__(self, done: bool = False) -> None:
        """``done``: the last frame has arrived before."""
        self._done, self._head, self._skip = done, b"", 0

    @property
    def over(self) -> bool:
        """Whether the server waits for the next statement, and nothing of it is left in part."""
        return self._done and not self._head and not self._skip

    def add(self, received: memoryview) -> None:
        """Follow the frames in the bytes that arrived."""
        at = 0
        while at < len(received):
            if self._skip:
                passed = min(self._skip, len(received) - at)
                self._skip, at = self._skip - passed, at + passed
                continue
            missing = FRAME_HEADER - len(self._head)
            self._head, at = self._head + bytes(received[at : at + missing]), at + missing
            if len(self._head) == FRAME_HEADER:
                self._done |= self._head[0] == _READY
                self._skip = int.from_bytes(self._head[1:], "big") + 1 - FRAME_HEADER
                self._head = b""


class _Socket:
    """The socket of a connection, on which libpq waits for nothing. Within its context, calls wait.

    ``send`` and ``receive`` raise ``_Closed``; ``closed`` is true from then on.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection, self._count, self.closed = connection, 0, False
        try:
            self._socket = socket.socket(fileno=os.dup(connection.fileno()))
        except OSError as error:
            raise self._gone(error.strerror) from error
        self._readable = select.poll()
        self._readable.register(self._socket, select.POLLIN)

    def __enter__(self) -> Self:
        # The descriptor is our own, but libpq's shares its settings.
        self._socket.setblocking(True)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL.pack(0, _READ_MICROS))
        return self

    def __exit__(self, *_: object) -> None:
        with self._socket:
            with suppress(OSError):
                self._socket.setblocking(False)
            with suppress(OSError):
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL.pack(0, 0))

    def send(self, command: str) -> None:
        content = command.encode() + b"\0"
        try:
            self._socket.sendall(b"Q" + (len(content) + 4).to_bytes(4, "big") + content)
        except OSError as error:
            raise self._gone(error.strerror) from error

    def receive(self, into: memoryview) -> int:
        """Return the number of bytes received; 0 if none arrived in a while."""
        try:
            if self._count < _SINGLE_BYTES:
                if not self._readable.poll(_CHECK_MS):
                    return 0
                count = self._socket.recv_into(into)
            else:
                count = self._socket.recv_into(into[:_READ_BYTES], flags=socket.MSG_WAITALL)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise self._gone(error.strerror) from error
        if not count:
            raise self._gone("end of stream")
        self._count += count
        return count

    def discard(self, rest: Rest) -> None:
        """Discard the ``rest`` of the answer, so that libpq finds an idle connection. Close the connection
        if that takes long.

        The server is not asked to stop: psycopg2 holds the interpreter's lock while it asks, without an end
        if nobody answers.
        """
        buffer, until = memoryview(bytearray(_READ_BYTES)), time.monotonic() + _DISCARD_SECONDS
        try:
            while not rest.over and time.monotonic() < until:
                rest.add(buffer[: self.receive(buffer)])
        except _Closed:
            pass
        finally:
            # Also after an interrupt: what is left would be taken for the answer to the next statement.
            if not rest.over:
                self._connection.close()

    def _gone(self, reason: str | None) -> _Closed:
        self.closed = True
        return _Closed(f"server closed the connection unexpectedly ({reason})")


def _error(content: bytes) -> psycopg2.Error:
    """Return the error that psycopg2 raises for an ErrorResponse, without the fields that may quote data."""
    fields = {each[:1]: each[1:].decode(errors="replace") for each in content.split(b"\0") if each}
    code = fields.get(b"C", "")
    kind: type[psycopg2.Error] = psycopg2.DatabaseError
    # As psycopg2, which takes a code that it does not know for one of its class.
    for known in (code, f"{code[:2]}000", "P0000" if code[:1] == "P" else ""):
        with suppress(KeyError):
            kind = psycopg2.errors.lookup(known)
            break
    error: psycopg2.Error = kind(fields.get(b"M", "no message"))
    # psycopg2 lets only its own code and this method set the code.
    error.__setstate__({"pgcode": code})
    return error
