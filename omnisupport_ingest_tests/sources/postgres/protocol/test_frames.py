"""Bytes of a connection are the messages that were sent, however they come in pieces."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnisupport_ingest.sources.postgres.protocol.frames import COPY_DATA, Frames
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


def received(content: bytes, cuts: Sequence[int]) -> list[bytes]:
    frames, found, at = Frames(LIMIT), [], 0
    for end in [*sorted(cut % (len(content) + 1) for cut in cuts), len(content)]:
        while at < end:
            space = frames.space()
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


@given(st.lists(ROW | ROW | OTHER, max_size=30), st.lists(st.integers(0, 3000), max_size=12))
def test_messages_are_what_was_sent_wherever_they_are_cut(messages: list[bytes], cuts: list[int]) -> None:
    assert received(b"".join(map(framed, messages)), cuts) == messages


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
        space = frames.space()
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
    space = frames.space()
    space[: len(begun)] = begun
    space.release()
    frames.received(len(begun))
    tracemalloc.start()
    try:
        for _ in range(size // 4096):
            frames.space().release()
            frames.received(4000)
        assert tracemalloc.get_traced_memory()[1] < 1.2 * size
    finally:
        tracemalloc.stop()


def test_messages_without_a_frame_are_read_alike() -> None:
    frames = Frames()
    messages = [wal_data(b"I\0\0\x40\x01N" + bytes(size)) for size in (1, 2_000_000, 3)]
    frames.space().release()
    for message in messages:
        frames.add(message)
    frames.received(0)
    assert read(frames) == messages
