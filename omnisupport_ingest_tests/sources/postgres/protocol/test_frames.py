"""Bytes of a connection are the messages that were sent, however they come in pieces."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnisupport_ingest.sources.postgres.protocol import frames as frames_module
from omnisupport_ingest.sources.postgres.protocol.frames import COPY_DATA, Frames, Transactions
from omnisupport_ingest.sources.postgres.protocol.pgoutput import (
    Commit,
    Decoder,
    begin_of,
    commit_of,
)
from omnisupport_ingest.sources.postgres.session.errors import RowTooLarge

LIMIT = 100
LONGEST = LIMIT + 16 * 1024
"""A message may be longer than its row by what else is in it."""


def wal_data(payload: bytes) -> bytes:
    return b"w" + struct.pack("!QQQ", 7, 7, 0) + payload


def framed(message: bytes, letter: bytes = b"d") -> bytes:
    return letter + struct.pack("!I", len(message) + 4) + message


def read(frames: Frames) -> list[bytes]:
    """Take all that is whole, row changes together."""
    found = []
    while True:
        rows = frames.rows()
        if rows is not None:
            found += [rows.data[start:end] for start, end in zip(rows.starts, rows.ends, strict=True)]
        elif (frame := frames.pop()) is not None:
            assert frame[0] == COPY_DATA
            found.append(frame[1])
        else:
            return found


@contextmanager
def buffers_of(room: int) -> Iterator[None]:
    """Have buffers of ``room`` bytes, of which half is received at a time, and few rows taken together, where
    they lie from 60 bytes on."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(frames_module, "_MIN_ROWS", 2)
        patched.setattr(frames_module, "_KEPT_BYTES", 60)
        patched.setattr(frames_module, "_ROOM_BYTES", room)
        patched.setattr(frames_module, "BUFFER_BYTES", room // 2)
        yield


ROOMS = st.sampled_from([60, 240, 5_000_000])


def received(content: bytes, cuts: Sequence[int]) -> list[bytes]:
    frames, found, at = Frames(LIMIT), [], 0
    for end in [*sorted(cut % (len(content) + 1) for cut in cuts), len(content)]:
        while at < end:
            space = frames.free_space()
            count = min(len(space), end - at)
            space[:count] = content[at : at + count]
            space.release()
            at += count
            frames.received(count)
            found += read(frames)
    return found


ROW = st.builds(
    lambda kind, rest: wal_data(kind + b"\0\0\x40\x01N" + rest),
    st.sampled_from([b"I", b"U", b"D"]),
    st.binary(max_size=40),
)
OTHER = st.one_of(
    st.builds(wal_data, st.binary(min_size=1, max_size=30).filter(lambda each: each[0] not in b"IUD")),
    st.just(b"k" + bytes(17)),
)


@given(st.lists(ROW | ROW | OTHER, max_size=30), st.lists(st.integers(0, 3000), max_size=12), ROOMS)
def test_messages_are_what_was_sent_wherever_they_are_cut(
    messages: list[bytes], cuts: list[int], room: int
) -> None:
    with buffers_of(room):
        assert received(b"".join(map(framed, messages)), cuts) == messages


def test_a_buffer_is_not_kept_for_a_few_rows() -> None:
    frames, messages = Frames(), [wal_data(b"I\0\0\x40\x01N" + bytes(500))] * 300
    for count in (5, 300):
        content = b"".join(map(framed, messages[:count]))
        space = frames.free_space()
        space[: len(content)] = content
        space.release()
        frames.received(len(content))
        rows = frames.rows()
        assert rows is not None and len(rows.starts) == count
        assert (len(rows.data) > 1_000_000) == (count == 300)
        assert [bytes(rows.data[a:b]) for a, b in zip(rows.starts, rows.ends, strict=True)] == messages[
            :count
        ]


def test_rows_stay_as_they_are_while_later_ones_are_received() -> None:
    messages = [wal_data(b"I\0\0\x40\x01N" + bytes([number]) * 5) for number in range(30)]
    with buffers_of(240):
        found = received(b"".join(map(framed, messages)), [])
    assert any(isinstance(each, memoryview) for each in found), "no rows were taken together"
    assert found == messages


BEGINS = st.builds(
    lambda lsn, micros, xid: wal_data(struct.pack("!cQqI", b"B", lsn, micros, xid)),
    st.integers(1, 2**62),
    st.integers(-(2**40), 2**50),
    st.integers(3, 2**32 - 1),
)
COMMITS = st.builds(
    lambda lsn, end, micros: wal_data(struct.pack("!cBQQq", b"C", 0, lsn, end, micros)),
    st.integers(1, 2**62),
    st.integers(1, 2**62),
    st.integers(-(2**40), 2**50),
)
CHANGES = ROW.filter(lambda message: message[25:26] in (b"I", b"U", b"D"))
WHOLE = st.tuples(BEGINS, st.lists(CHANGES, max_size=6), COMMITS).map(lambda t: [t[0], *t[1], t[2]])


@given(
    st.lists(WHOLE | WHOLE | (OTHER | BEGINS | COMMITS).map(lambda each: [each]), max_size=12),
    st.lists(st.integers(0, 3000), max_size=6),
    st.sampled_from([20_000, 5_000_000]),
    st.data(),
)
def test_whole_transactions_are_those_that_were_sent(
    parts: list[list[bytes]], cuts: list[int], room: int, data: st.DataObject
) -> None:
    sent = [message for part in parts for message in part]
    content = b"".join(map(framed, sent))
    found, at = list[object](), 0
    with buffers_of(room):
        frames = Frames()
        for end in [*sorted(cut % (len(content) + 1) for cut in cuts), len(content)]:
            space = frames.free_space()
            space[: end - at] = content[at:end]
            space.release()
            frames.received(end - at)
            at = end
            while True:
                if (whole := together(frames, data.draw(st.integers(1, 4)))) is not None:
                    half = data.draw(st.integers(0, whole.total))
                    for first, last in ((0, half), (half, whole.total)):
                        found += told(whole.between(first, last))
                elif (frame := frames.pop()) is not None:
                    found.append(meaning(frame[1]))
                else:
                    break
    assert found == list(map(meaning, sent))


def together(frames: Frames, fewest: int) -> Transactions | None:
    """The whole transactions that come next, if at least about so many messages of the buffer are theirs."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(frames_module, "_MIN_TRANSACTIONS", fewest)
        return frames.transactions()


def told(transactions: Transactions) -> list[object]:
    """What was sent of ``transactions``, as ``meaning`` says it."""
    found, rows = list[object](), transactions.rows
    bounds = [*transactions.firsts.tolist(), len(rows.starts)]
    for number, (first, end) in enumerate(pairwise(bounds)):
        found.append(begin_of(transactions, number))
        found += [rows.data[rows.starts[row] : rows.ends[row]] for row in range(first, end)]
        found.append(commit_of(transactions, number).end_lsn)
    return found


def meaning(message: bytes) -> object:
    """Return what begins a transaction decoded, of what ends one the end of its record, else ``message``."""
    if (message[25:26], len(message)) in ((b"B", 46), (b"C", 51)) and message[:1] == b"w":
        decoded = Decoder().decode(message[25:])
        return decoded.end_lsn if isinstance(decoded, Commit) else decoded
    return message


@pytest.mark.parametrize("count", [2, 11, 12, 40])
def test_transactions_are_handed_out_together_unless_they_are_few(count: int) -> None:
    begin = wal_data(struct.pack("!cQqI", b"B", 1, 2, 3))
    commit = wal_data(struct.pack("!cBQQq", b"C", 0, 1, 5, 2))
    row = wal_data(b"I" + bytes(20))
    sent, begun = [begin, row, row, commit] * count, [begin, row]
    frames = Frames()
    content = b"".join(map(framed, [*sent, *begun]))
    frames.free_space()[: len(content)] = content
    frames.received(len(content))
    whole = frames.transactions()
    if count < 12:
        assert whole is None
        begun = [*sent, *begun]
    else:
        assert whole is not None and len(whole.rows.starts) == 2 * count
        assert whole.firsts.tolist() == list(range(0, 2 * count, 2))
        assert frames.transactions() is None
    assert [frame[1] for frame in iter(frames.pop, None)] == begun


@given(st.lists(st.integers(0, 40_000), max_size=8), st.integers(LONGEST + 1, LONGEST + 9000))
def test_only_the_head_of_a_row_that_is_too_long_is_kept(cuts: list[int], length: int) -> None:
    head = wal_data(b"U\0\0\x40\x01N")
    long = head + bytes(length - len(head))
    before, after = wal_data(b"I\0\0\x40\x01N1"), wal_data(b"D\0\0\x40\x01K2")
    instead = head[:25] + b"u" + head[26:] + bytes(34 - len(head)) + struct.pack("!Q", length)
    assert received(framed(before) + framed(long) + framed(after), cuts) == [before, instead, after]


def test_a_row_of_the_longest_allowed_size_is_taken_whole() -> None:
    row = wal_data(b"I\0\0\x40\x01N") + bytes(LONGEST - 31)
    assert received(framed(row), [100, 9000]) == [row]


def test_another_message_that_is_too_long_is_refused() -> None:
    with pytest.raises(RowTooLarge):
        received(framed(wal_data(b"M" + bytes(LONGEST))), [])


def test_a_message_larger_than_the_buffer_is_taken_whole() -> None:
    frames, row = Frames(), wal_data(b"I\0\0\x40\x01N" + bytes(3_000_000))
    content, at, found = framed(row) + framed(row), 0, []
    while at < len(content):
        space = frames.free_space()
        count = min(len(space), len(content) - at)
        space[:count] = content[at : at + count]
        space.release()
        at += count
        frames.received(count)
        found += read(frames)
    assert found == [row, row]


def test_what_has_come_of_a_large_message_is_not_copied_with_each_piece() -> None:
    """It was, so a row of 64 MB took half a minute of copying, and one of 1 GB hours."""
    frames, size = Frames(), 16 * 1024 * 1024
    begun = framed(wal_data(b"I\0\0\x40\x01N" + bytes(size)))[:100]
    space = frames.free_space()
    space[: len(begun)] = begun
    space.release()
    frames.received(len(begun))
    tracemalloc.start()
    try:
        for _ in range(size // 4096):
            frames.free_space().release()
            frames.received(4000)
        assert tracemalloc.get_traced_memory()[1] < 1.2 * size
    finally:
        tracemalloc.stop()


def test_messages_without_a_frame_are_read_alike() -> None:
    frames = Frames()
    messages = [wal_data(b"I\0\0\x40\x01N" + bytes(size)) for size in (1, 2_000_000, 3)]
    frames.free_space().release()
    for message in messages:
        frames.add(message)
    frames.received(0)
    assert read(frames) == messages
