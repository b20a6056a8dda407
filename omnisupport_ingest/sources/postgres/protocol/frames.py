"""What a replication connection receives, cut into messages many at a time.

A frame is one message of PostgreSQL's protocol: a letter, its length, its content (manual, "Message
Formats"). Nearly all of them are row changes. They are handed out as they lie in the buffer, as many as
follow one another, so that no Python object is made for one of them; every other message is handed out alone.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from omnisupport_ingest.sources.postgres.protocol.text_columns import big_endian
from omnisupport_ingest.sources.postgres.session.errors import ProtocolViolation, RowTooLarge

WAL_DATA, KEEPALIVE = ord("w"), ord("k")
"""First byte of the two messages that a server sends within ``COPY_DATA``."""

WAL_DATA_HEADER = 25
"""Bytes before the payload of a ``WAL_DATA`` message: type, start LSN, end LSN, send time."""

COPY_DATA = ord("d")
"""The letter of a frame of the stream itself; the others are about the connection."""

_LETTERS = frozenset(b"dcWENSACZ")
"""Letters of the frames that a server may send while it replicates, or before it starts to."""

FRAME_HEADER = 5
"""Bytes before the content of a frame: its letter, and the length of what follows the letter."""

BUFFER_BYTES = 1024 * 1024
"""What is received at a time, at most; the buffer grows for one longer message alone."""

_BESIDE_A_ROW = 16 * 1024
"""Bytes of a message beside the values of a row: its head, and 5 for each column of the new row and the old
one (1,600 at most).
"""

HEAD = WAL_DATA_HEADER + 9
"""Bytes that are taken of a change whose row is too long: up to the oid of its table, which follows the id of
the transaction while that is in progress.
"""

_NOT_TAKEN = {ord("I"): b"i", ord("U"): b"u", ord("D"): b"d"}
"""First byte of a row change → first byte of its replacement if the row is too long, which no server
sends.
"""

_FEWEST = 4
"""Row changes that are worth being handed out together."""

_FEWEST_TRANSACTIONS = 12
"""Transactions that are worth being handed out together; fewer cost less one by one."""

_ROW_KINDS = np.isin(np.arange(256), list(b"IUD"))
"""Whether a letter is that of a row change."""

_BEGIN, _COMMIT = ord("B"), ord("C")
_BEGIN_BYTES, _COMMIT_BYTES = 21, 26
"""Sizes of the messages that begin and end a transaction."""

_SIZE = struct.Struct("!Q")
_LENGTH = struct.Struct("!xI")

Positions = npt.NDArray[np.int64]


class Rows(NamedTuple):
    """Row changes that follow one another: the ``WAL_DATA`` messages of ``data`` between ``starts`` and
    ``ends``.
    """

    data: bytes
    starts: Positions
    ends: Positions

    @property
    def size(self) -> int:
        """Bytes of the messages."""
        return int(np.add.reduce(self.ends - self.starts))

    @classmethod
    def of(cls, messages: list[bytes]) -> Rows:
        """Return ``messages`` as one."""
        ends = np.cumsum(np.fromiter(map(len, messages), np.int64, len(messages)))
        return cls(b"".join(messages), np.concatenate((np.zeros(1, np.int64), ends[:-1])), ends)


class Transactions(NamedTuple):
    """Whole transactions that follow one another, each of row changes alone.

    ``firsts``: number of the first of ``rows`` of each. ``end_lsns``: just behind their commit records.
    ``commit_micros``: commit times, in microseconds since 2000.
    """

    rows: Rows
    firsts: Positions
    commit_lsns: Positions
    end_lsns: Positions
    commit_micros: Positions
    xids: Positions

    @property
    def total(self) -> int:
        """Number of transactions."""
        return len(self.firsts)

    def between(self, first: int, end: int) -> Transactions:
        """Return those from number ``first`` on, before number ``end``."""
        if (first, end) == (0, self.total):
            return self
        bounds = np.append(self.firsts, len(self.rows.starts))
        start, stop = int(bounds[first]), int(bounds[end])
        starts, ends = self.rows.starts[start:stop], self.rows.ends[start:stop]
        at, behind = (int(starts[0]), int(ends[-1])) if len(starts) else (0, 0)
        rows = Rows(self.rows.data[at:behind], starts - at, ends - at)
        commits = (each[first:end] for each in self[2:])
        return Transactions(rows, self.firsts[first:end] - start, *commits)


class Frames:
    """The bytes that were received and not handed out."""

    def __init__(self, max_row_bytes: int | None = None) -> None:
        """``max_row_bytes``: of a longer message only the head is kept (see ``pop``); None: no limit."""
        self.max_row_bytes = max_row_bytes
        self._longest = None if max_row_bytes is None else max_row_bytes + _BESIDE_A_ROW
        self._data = bytearray(BUFFER_BYTES)
        self._at = self._filled = 0  # what is not handed out; its whole frames lie between ``_bounds``
        self._bounds = [0]
        self._next = self._count = 0
        self._others: list[int] = []  # the frames that are no row changes, the last first
        self._kinds = np.zeros(0, np.uint8)  # letters of row changes, begins and commits; 0 of other frames
        self._instead: bytes | None = None  # of a message that is too long
        self._unread = 0  # its bytes that have not come
        self._long_follows = False  # one that is too long, behind the whole frames

    def space(self) -> memoryview:
        """Return where the next bytes belong. Every whole frame must have been handed out."""
        begun, wanted = self._filled - self._at, BUFFER_BYTES
        if begun >= FRAME_HEADER:
            length = _LENGTH.unpack_from(self._data, self._at)[0] - 4
            if not self.too_long(length):
                wanted = max(wanted, length + FRAME_HEADER)
        # A large frame comes in many pieces: what has come of it is moved once, not with each of them.
        if self._at or wanted != len(self._data):
            unread = bytes(memoryview(self._data)[self._at : self._filled])
            if wanted != len(self._data):
                self._data = bytearray(wanted)
            self._data[:begun] = unread
            self._at, self._filled = 0, begun
        return memoryview(self._data)[self._filled :]

    def received(self, count: int) -> None:
        """Record that ``count`` bytes are in ``space`` now."""
        dropped = min(self._unread, count)
        self._unread -= dropped
        self._at += dropped
        self._filled += count
        self._cut()

    def add(self, message: bytes) -> None:
        """Take in one message that came without its frame; ``received(0)`` follows the last one."""
        end = self._filled + FRAME_HEADER + len(message)
        if end > len(self._data):
            self._data = self._data + bytes(end - len(self._data))
        self._data[self._filled : end] = b"d" + (len(message) + 4).to_bytes(4, "big") + message
        self._filled = end

    def rows(self) -> Rows | None:
        """Hand out the row changes that come next, up to the next other message.

        None where they are few: then ``pop`` costs less.
        """
        first = self._next
        end = self._others[-1] if self._others else self._count
        if end - first < _FEWEST:
            return None
        bounds = np.array(self._bounds[first : end + 1])
        start = self._at
        bounds -= start
        self._next, self._at = end, start + int(bounds[-1])
        return Rows(bytes(memoryview(self._data)[start : self._at]), bounds[:-1] + FRAME_HEADER, bounds[1:])

    def transactions(self) -> Transactions | None:
        """Hand out the whole transactions that come next and hold row changes alone.

        None where there is none, or where they are few: then ``pop`` and ``rows`` cost less.
        """
        first = self._next
        if len(self._others) < 2 * _FEWEST_TRANSACTIONS or self._kinds[first] != _BEGIN:
            return None
        # The first frame behind its rows must be its end. Where it is not, nothing else is looked at: each
        # transaction may be so, of a server that sends where it came from.
        if self._kinds[self._others[-2]] != _COMMIT:
            return None
        kinds = self._kinds[first:]
        unknown = np.flatnonzero(kinds == 0)
        commits = np.flatnonzero(kinds[: unknown[0] if len(unknown) else None] == _COMMIT)
        if not len(commits):
            return None
        kinds = kinds[: commits[-1] + 1]
        begins = np.flatnonzero(kinds == _BEGIN)
        if len(begins) != len(commits) or (begins[1:] != commits[:-1] + 1).any():
            return None
        end, start = first + len(kinds), self._at
        bounds = np.array(self._bounds[first : end + 1]) - start
        self._next, self._at = end, start + int(bounds[-1])
        while self._others and self._others[-1] < end:
            self._others.pop()
        data = bytes(memoryview(self._data)[start : self._at])
        is_row = (kinds != _BEGIN) & (kinds != _COMMIT)
        rows = Rows(data, bounds[:-1][is_row] + FRAME_HEADER, bounds[1:][is_row])
        payloads = bounds[:-1] + FRAME_HEADER + WAL_DATA_HEADER
        of_begin, of_commit = payloads[begins], payloads[commits]
        return Transactions(
            rows,
            begins - 2 * np.arange(len(begins)),
            big_endian(data, ">i8", of_begin + 1).astype(np.int64),
            big_endian(data, ">i8", of_commit + 10).astype(np.int64),
            big_endian(data, ">i8", of_begin + 9).astype(np.int64),
            big_endian(data, ">u4", of_begin + 17).astype(np.int64),
        )

    def pop(self) -> tuple[int, bytes] | None:
        """Hand out the letter and the content of the next frame; None if none is whole.

        A row change that is too long comes as ``pgoutput.RowNotTaken`` decodes it; ``RowTooLarge`` if another
        message is too long. ``ProtocolViolation`` where no frame can begin, as ``received``.
        """
        if self._instead is not None:
            message, self._instead = self._instead, None
            self._cut()
            return COPY_DATA, message
        number = self._next
        if number == self._count:
            if not self._long_follows:
                return None
            self._cut()
            return self.pop()
        if self._others and self._others[-1] == number:
            self._others.pop()
        start, self._next, self._at = self._at, number + 1, self._bounds[number + 1]
        if self._at < start + FRAME_HEADER:
            raise out_of_step(self._data[start])
        return self._data[start], bytes(memoryview(self._data)[start + FRAME_HEADER : self._at])

    def too_long(self, length: int) -> bool:
        """Whether a message of ``length`` bytes is not taken into memory."""
        return self._longest is not None and length > self._longest

    def instead_of(self, head: bytes, length: int) -> bytes:
        """Return what stands for a row change of ``length`` bytes, too long, that begins with ``head``."""
        kind = _NOT_TAKEN.get(head[WAL_DATA_HEADER]) if head[0] == WAL_DATA else None
        if kind is None:
            raise RowTooLarge(length, self.max_row_bytes or 0)
        return head[:WAL_DATA_HEADER] + kind + head[WAL_DATA_HEADER + 1 : HEAD] + _SIZE.pack(length)

    def _cut(self) -> None:
        """Find the whole frames; those found before have been handed out."""
        data, at, end, unpack = self._data, self._at, self._filled, _LENGTH.unpack_from
        longest = 1 << 32 if self._longest is None else self._longest + 4
        self._long_follows = False
        bounds = [at]
        add, last = bounds.append, end - FRAME_HEADER
        while at <= last:
            (length,) = unpack(data, at)
            following = at + length + 1
            if following > end or length > longest:
                if data[at] not in _LETTERS:
                    raise out_of_step(data[at])
                self._long_follows = length > longest and len(bounds) > 1
                if length > longest and not self._long_follows:
                    self._take_head(length - 4)
                break
            at = following
            add(at)
        self._bounds, self._next, self._count = bounds, 0, len(bounds) - 1
        self._kinds = self._kinds_of_frames()
        # The letters of row changes lie above all others that are kept.
        self._others = (self._kinds <= _COMMIT).nonzero()[0][::-1].tolist()

    def _take_head(self, length: int) -> None:
        """Keep the first bytes of a frame that is too long, and let go of the rest as it comes."""
        start = self._at + FRAME_HEADER
        if self._filled - start >= HEAD:
            self._instead = self.instead_of(bytes(self._data[start : start + HEAD]), length)
            self._unread = max(0, start + length - self._filled)
            self._at = min(self._filled, start + length)

    def _kinds_of_frames(self) -> npt.NDArray[np.uint8]:
        if not self._count:
            return np.zeros(0, np.uint8)
        letters = np.frombuffer(self._data, np.uint8, self._filled)
        bounds, last = np.array(self._bounds), self._filled - 1
        starts = bounds[:-1]
        sizes = bounds[1:] - starts - (FRAME_HEADER + WAL_DATA_HEADER)
        kinds = letters[np.minimum(starts + FRAME_HEADER + WAL_DATA_HEADER, last)]
        known = _ROW_KINDS[kinds] & (sizes > 0)
        known |= (kinds == _BEGIN) & (sizes == _BEGIN_BYTES)
        known |= (kinds == _COMMIT) & (sizes == _COMMIT_BYTES)
        known &= letters[np.minimum(starts + FRAME_HEADER, last)] == WAL_DATA
        known &= letters[starts] == COPY_DATA
        return np.where(known, kinds, np.uint8(0))


def out_of_step(letter: int) -> ProtocolViolation:
    """Return the error for bytes that begin no frame: what follows them cannot be told apart."""
    return ProtocolViolation(
        f"The source sent a message of type {bytes([letter])!r} in the replication stream, which is not "
        "known, or is not where a message can begin.",
        fix="Start capture again: it continues where landing ends. If it comes again, see what stands "
        "between this machine and the server (a proxy, a pooler), and report it with the server's version.",
    )
