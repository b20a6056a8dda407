"""Divides the bytes of a replication connection into messages, many at a time.

A frame is one message of PostgreSQL's protocol: a letter, its length, its content (manual, "Message
Formats"). Nearly all frames are row changes. Consecutive row changes are returned together, where they lie
in the buffer, so that a row change costs no Python object and no copy. Every other message is returned by
itself.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from omnisupport_ingest.compiled import compiled_frames
from omnisupport_ingest.sources.postgres.protocol.text_columns import PADDING, Positions, big_endian
from omnisupport_ingest.sources.postgres.session.errors import ProtocolViolation, RowTooLarge

WAL_DATA, KEEPALIVE = ord("w"), ord("k")
"""First byte of the two messages that a server sends within ``COPY_DATA``."""

WAL_DATA_HEADER = 25
"""Bytes before the payload of a ``WAL_DATA`` message: type, start LSN, end LSN, send time."""

COPY_DATA = ord("d")
"""Letter of the frames that carry the stream. All other frames concern the connection."""

_LETTERS = frozenset(b"dcWENSACZ")
"""Letters of the frames that a server may send during replication, or before it starts."""

FRAME_HEADER = 5
"""Bytes before the content of a frame: its letter, and the length of what follows the letter."""

BUFFER_BYTES = 1024 * 1024
"""Bytes that are received at a time, at most, unless a message is longer."""

_ROOM_BYTES = 5 * BUFFER_BYTES
"""Bytes of a buffer, unless a message is longer. One after the other is filled, and none is used again:
whoever has rows of it keeps it."""

_ROW_OVERHEAD = 16 * 1024
"""Bytes of a message in addition to the row's values: its head, and 5 for each column (at most 1,600) of the
new and the old row."""

HEAD_BYTES = WAL_DATA_HEADER + 9
"""Bytes that are kept of the change of a row that is too long: up to the oid of its table. In a transaction
in progress, the oid follows the transaction's id."""

_OVERSIZED = {ord("I"): b"i", ord("U"): b"u", ord("D"): b"d"}
"""First byte of a row change → that of its replacement if the row is too long; no server sends it."""

_KEPT_BYTES = 128 * 1024
"""Fewer bytes of rows are copied: a buffer is not kept for so little."""

_MIN_ROWS = 4
"""Smallest number of row changes that are returned together; a smaller number costs less one by one."""

_MIN_TRANSACTIONS = 12
"""Smallest number of transactions that are returned together; a smaller number costs less one by one."""

_ROW_KINDS = np.isin(np.arange(256), list(b"IUD"))
"""For each byte, whether it is the letter of a row change."""

_BEGIN, _COMMIT = ord("B"), ord("C")
_BEGIN_BYTES, _COMMIT_BYTES = 21, 26
"""Sizes of the messages that begin and end a transaction."""

_SIZE = struct.Struct("!Q")
_LENGTH = struct.Struct("!xI")


class Rows(NamedTuple):
    """Consecutive row changes: ``WAL_DATA`` messages in ``data``, each from ``starts`` to ``ends``.

    There may be more in ``data``, at least ``PADDING``; what was received there does not change any more.
    """

    data: bytes | memoryview
    starts: Positions
    ends: Positions

    @property
    def size(self) -> int:
        """Bytes of the messages."""
        return int(np.add.reduce(self.ends - self.starts))

    @classmethod
    def of(cls, messages: list[bytes]) -> Rows:
        """Return ``messages`` as one value, in their order."""
        ends = np.cumsum(np.fromiter(map(len, messages), np.int64, len(messages)))
        starts = np.concatenate((np.zeros(1, np.int64), ends[:-1]))
        return cls(b"".join([*messages, PADDING]), starts, ends)


class Transactions(NamedTuple):
    """Consecutive whole transactions that contain only row changes.

    ``firsts``: for each transaction, index of its first row in ``rows``. ``end_lsns``: the LSN just after the
    commit record. ``commit_micros``: commit time in microseconds since 2000.
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
        """Return the transactions from number ``first`` up to, but not including, number ``end``."""
        if (first, end) == (0, self.total):
            return self
        bounds = np.append(self.firsts, len(self.rows.starts))
        start, stop = int(bounds[first]), int(bounds[end])
        rows = Rows(self.rows.data, self.rows.starts[start:stop], self.rows.ends[start:stop])
        commits = (each[first:end] for each in self[2:])
        return Transactions(rows, self.firsts[first:end] - start, *commits)


class Frames:
    """Received bytes that have not been returned yet."""

    def __init__(self, max_row_bytes: int | None = None) -> None:
        """``max_row_bytes``: of a longer message only the head is kept (see ``pop``); None: no limit."""
        self.max_row_bytes = max_row_bytes
        self._max_bytes = None if max_row_bytes is None else max_row_bytes + _ROW_OVERHEAD
        self._data = _buffer(_ROOM_BYTES)
        self._at = self._filled = 0  # bytes not returned; ``_bounds``: of the whole frames in them
        self._bounds = np.zeros(1, np.int64)
        self._next = self._count = 0
        self._other_frames: list[int] = []  # numbers of frames that are no row changes, descending
        self._kinds = np.zeros(0, np.uint8)  # letters of row changes, begins and commits; 0 of other frames
        self._replacement: bytes | None = None  # replaces a message that is too long
        self._to_discard = 0  # bytes of that message that have not arrived
        self._too_long_is_next = False  # whether such a message follows the whole frames

    def free_space(self) -> memoryview:
        """Return the buffer to receive into. Call it only when every whole frame has been returned."""
        begun = self._filled - self._at
        wanted = begun + BUFFER_BYTES
        if begun >= FRAME_HEADER:
            length = _LENGTH.unpack_from(self._data, self._at)[0] - 4
            # A large frame arrives in many pieces. What has arrived is moved once, not with each piece.
            if length > BUFFER_BYTES and not self.too_long(length):
                wanted = length + FRAME_HEADER
        self._make_room(wanted)
        return self._data[self._filled : self._at + wanted]

    def received(self, count: int) -> None:
        """Record that ``count`` bytes were received into ``free_space``. Raises as ``pop`` does."""
        dropped = min(self._to_discard, count)
        self._to_discard -= dropped
        self._at += dropped
        self._filled += count
        self._find_frames()

    def add(self, message: bytes) -> None:
        """Add one message that came without its frame. Call ``received(0)`` after the last one."""
        self._make_room(self._filled - self._at + FRAME_HEADER + len(message))
        end = self._filled + FRAME_HEADER + len(message)
        self._data[self._filled : end] = b"d" + (len(message) + 4).to_bytes(4, "big") + message
        self._filled = end

    def rows(self) -> Rows | None:
        """Return the row changes up to the next message of another kind, and remove them.

        None if there are only a few: ``pop`` then costs less.
        """
        first = self._next
        end = self._other_frames[-1] if self._other_frames else self._count
        if end - first < _MIN_ROWS:
            return None
        data, bounds = self._taken(first, end)
        return Rows(data, bounds[:-1] + FRAME_HEADER, bounds[1:])

    def transactions(self) -> Transactions | None:
        """Return the next transactions, and remove them, if they are whole and contain only row changes.

        None if there are only a few: ``pop`` and ``rows`` then cost less.
        """
        first = self._next
        if len(self._other_frames) < 2 * _MIN_TRANSACTIONS or self._kinds[first] != _BEGIN:
            return None
        # The first frame after the rows must be the commit. If it is not, look no further: a server that
        # sends origins sends one in every transaction.
        if self._kinds[self._other_frames[-2]] != _COMMIT:
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
        end = first + len(kinds)
        data, bounds = self._taken(first, end)
        while self._other_frames and self._other_frames[-1] < end:
            self._other_frames.pop()
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
        """Return the letter and the content of the next frame, and remove it; None if no frame is whole.

        For a row change that is too long, return a message that decodes to ``pgoutput.OversizedRow``. Raises
        ``RowTooLarge`` if another message is too long. Raises ``ProtocolViolation`` for bytes that begin no
        frame.
        """
        if self._replacement is not None:
            message, self._replacement = self._replacement, None
            self._find_frames()
            return COPY_DATA, message
        number = self._next
        if number == self._count:
            if not self._too_long_is_next:
                return None
            self._find_frames()
            return self.pop()
        if self._other_frames and self._other_frames[-1] == number:
            self._other_frames.pop()
        start, self._next, self._at = self._at, number + 1, int(self._bounds[number + 1])
        if self._at < start + FRAME_HEADER:
            raise unknown_frame(self._data[start])
        return self._data[start], bytes(self._data[start + FRAME_HEADER : self._at])

    def too_long(self, length: int) -> bool:
        """Whether a message of ``length`` bytes is too long to be read into memory."""
        return self._max_bytes is not None and length > self._max_bytes

    def replacement_for(self, head: bytes, length: int) -> bytes:
        """Return the replacement of a row change of ``length`` bytes that begins with ``head``.

        Raises ``RowTooLarge`` if the message is no row change.
        """
        kind = _OVERSIZED.get(head[WAL_DATA_HEADER]) if head[0] == WAL_DATA else None
        if kind is None:
            raise RowTooLarge(length, self.max_row_bytes or 0)
        return head[:WAL_DATA_HEADER] + kind + head[WAL_DATA_HEADER + 1 : HEAD_BYTES] + _SIZE.pack(length)

    def _taken(self, first: int, end: int) -> tuple[bytes | memoryview, Positions]:
        """Remove the frames from number ``first`` up to ``end``; return bytes, and where in them each frame
        begins, and the last one ends."""
        bounds = self._bounds[first : end + 1]
        start, self._next, self._at = int(bounds[0]), end, int(bounds[-1])
        if self._at - start >= _KEPT_BYTES:
            return self._data, bounds
        return bytes(self._data[start : self._at]) + PADDING, bounds - start

    def _make_room(self, size: int) -> None:
        """Take a new buffer, unless ``size`` bytes, counted from the first that was not returned, fit into
        this one. What was not returned moves to the front of the new one."""
        if self._at + size + len(PADDING) <= len(self._data):
            return
        unread = self._data[self._at : self._filled]
        self._data = _buffer(max(size, _ROOM_BYTES))
        self._data[: len(unread)] = unread
        self._at, self._filled = 0, len(unread)

    def _find_frames(self) -> None:
        """Find the whole frames. All frames found before must have been returned."""
        data, at, end, unpack = self._data, self._at, self._filled, _LENGTH.unpack_from
        longest = 1 << 32 if self._max_bytes is None else self._max_bytes + 4
        self._too_long_is_next = False
        bounds = frame_bounds(data, at, end, longest)
        at = int(bounds[-1])
        if at <= end - FRAME_HEADER:
            # The frame that follows is not whole, or is too long.
            (length,) = unpack(data, at)
            if data[at] not in _LETTERS:
                raise unknown_frame(data[at])
            self._too_long_is_next = length > longest and len(bounds) > 1
            if length > longest and not self._too_long_is_next:
                self._take_head(length - 4)
        self._bounds, self._next, self._count = bounds, 0, len(bounds) - 1
        self._kinds = self._kinds_of_frames()
        # ``_kinds`` contains 0, begins, commits, and the letters of row changes, which are greater than
        # those.
        self._other_frames = (self._kinds <= _COMMIT).nonzero()[0][::-1].tolist()

    def _take_head(self, length: int) -> None:
        """Keep the first bytes of a frame that is too long, and discard the rest as it arrives."""
        start = self._at + FRAME_HEADER
        if self._filled - start >= HEAD_BYTES:
            self._replacement = self.replacement_for(bytes(self._data[start : start + HEAD_BYTES]), length)
            self._to_discard = max(0, start + length - self._filled)
            self._at = min(self._filled, start + length)

    def _kinds_of_frames(self) -> npt.NDArray[np.uint8]:
        if not self._count:
            return np.zeros(0, np.uint8)
        letters = np.frombuffer(self._data, np.uint8, self._filled)
        bounds, last = self._bounds, self._filled - 1
        starts = bounds[:-1]
        sizes = bounds[1:] - starts - (FRAME_HEADER + WAL_DATA_HEADER)
        kinds = letters[np.minimum(starts + FRAME_HEADER + WAL_DATA_HEADER, last)]
        known = _ROW_KINDS[kinds] & (sizes > 0)
        known |= (kinds == _BEGIN) & (sizes == _BEGIN_BYTES)
        known |= (kinds == _COMMIT) & (sizes == _COMMIT_BYTES)
        known &= letters[np.minimum(starts + FRAME_HEADER, last)] == WAL_DATA
        known &= letters[starts] == COPY_DATA
        return np.where(known, kinds, np.uint8(0))


def _buffer(size: int) -> memoryview:
    """Return room for ``size`` bytes, and behind it for reading a number beyond its end."""
    return np.empty(size + len(PADDING), np.uint8).data


def frame_bounds(
    data: bytearray | memoryview, at: int, filled: int, longest: int, letter: int | None = None
) -> Positions:
    """Return where the whole frames of ``data`` from ``at`` to ``filled`` begin, and where the last one ends.

    A frame of more than ``longest`` bytes after its letter is taken for the end. So is, if ``letter`` is
    given, one of another letter or without a length.
    """
    if compiled_frames is not None:
        wanted = -1 if letter is None else letter
        return np.frombuffer(compiled_frames.find_frames(data, at, filled, longest, wanted), np.int64)
    bounds, last, unpack = [at], filled - FRAME_HEADER, _LENGTH.unpack_from
    while at <= last and letter in (None, data[at]):
        (length,) = unpack(data, at)
        if length > longest or at + length + 1 > filled or (letter is not None and length < 4):
            break
        at += length + 1
        bounds.append(at)
    return np.array(bounds, np.int64)


def unknown_frame(letter: int) -> ProtocolViolation:
    """Return the error for bytes that begin no frame. The frames after them cannot be found either."""
    return ProtocolViolation(
        f"The source sent a message of type {bytes([letter])!r} in the replication stream, which is not "
        "known, or is not where a message can begin.",
        fix="Start capture again: it continues where landing ends. If it comes again, see what stands "
        "between this machine and the server (a proxy, a pooler), and report it with the server's version.",
    )
