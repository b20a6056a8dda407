"""COPY read from the socket gives what psycopg2 gives, in the same blocks, and leaves a usable connection."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate, count
from types import SimpleNamespace
from typing import Any

import psycopg2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg2.extensions import connection as Connection

from omnisupport_ingest.sources.postgres.protocol import copy_socket, frames
from omnisupport_ingest.sources.postgres.protocol.copy_rows import copy_by_psycopg, copy_lines
from omnisupport_ingest.sources.postgres.protocol.copy_socket import Lines, Rest, copy_from_socket
from omnisupport_ingest.sources.postgres.protocol.frames import COPY_DATA, frame_bounds
from omnisupport_ingest.sources.postgres.session.errors import RowTooLarge, SourceUnavailable
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest

BOTH_WAYS = pytest.mark.parametrize("copy", [copy_by_psycopg, copy_from_socket])
Copy = Callable[..., None]

MANY = "COPY (SELECT n, repeat('d', n * 37 % 700) FROM generate_series(1, 30000) n) TO STDOUT"
"""Rows of about 10 MB. The lengths of some frames contain a line end, before a row that begins like one."""


@pytest.fixture
def connection(source: SourceUnderTest) -> Iterator[Connection]:
    with source.connected() as connection:
        yield connection


def frame(letter: bytes, content: bytes) -> bytes:
    return letter + (len(content) + 4).to_bytes(4, "big") + content


ROWS = st.one_of(
    st.binary(max_size=12).map(lambda row: row.replace(b"\n", b"d")),
    # Lengths with a line end in them, and rows that look like the begin of a frame.
    st.sampled_from([b"", b"d", b"d\0\0", b"d\0\0\0\5", b"d" * 5, b"d" * 517, b"x" * 2559, b"d" * 2655]),
).map(lambda row: frame(b"d", row + b"\n"))
OTHERS = st.sampled_from([frame(b"N", b"notice\n\0"), frame(b"c", b""), frame(b"Z", b"I"), b"?"])


@given(st.lists(st.one_of(ROWS, ROWS, ROWS, OTHERS), max_size=9).map(b"".join), st.data())
def test_frames_found_at_once_are_those_followed_one_by_one(stream: bytes, drawn: st.DataObject) -> None:
    end = drawn.draw(st.integers(0, len(stream)))
    start = drawn.draw(st.integers(0, min(end, 40)))
    longest = drawn.draw(st.sampled_from([0, 9, 1 << 32]))
    for letter in (None, COPY_DATA):
        found = frame_bounds(bytearray(stream), start, end, longest, letter)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(frames, "compiled_frames", None)
            assert found.tolist() == frame_bounds(bytearray(stream), start, end, longest, letter).tolist()


@pytest.mark.parametrize("block_bytes", [1, 100, 5_000, 70_000, 6 * 1024 * 1024])
def test_blocks_are_those_of_psycopg2(connection: Connection, block_bytes: int) -> None:
    query = MANY if block_bytes > 100 else MANY.replace("30000", "500")
    taken: dict[Copy, list[bytes]] = {copy_by_psycopg: [], copy_from_socket: []}
    for copy, blocks in taken.items():
        copy(connection, query, block_bytes, None, into(blocks))
    assert taken[copy_from_socket] == taken[copy_by_psycopg]
    assert all(block.endswith(b"\n") for block in taken[copy_from_socket])


@BOTH_WAYS
def test_a_row_longer_than_a_block_is_a_block(connection: Connection, copy: Copy) -> None:
    sizes = "unnest(ARRAY[3, 3000000, 5, 900]) WITH ORDINALITY w (n, place)"
    taken: list[bytes] = []
    rows = f"COPY (SELECT repeat('y', n) FROM {sizes} ORDER BY place) TO STDOUT"
    copy(connection, rows, 1000, 3_000_001, into(taken))
    assert [len(block) for block in taken] == [4, 3_000_001, 907]
    with pytest.raises(RowTooLarge) as refused:
        copy(connection, rows, 1000, 3_000_000, into(taken))
    assert refused.value.size == 3_000_001


@BOTH_WAYS
def test_blocks_stay_as_they_are_while_later_ones_are_received(connection: Connection, copy: Copy) -> None:
    kept: list[Lines] = []
    now: list[bytes] = []

    def take(lines: Lines) -> None:
        kept.append(lines)
        now.append(lines.joined())

    copy(connection, MANY, 300_000, None, take)
    assert len(kept) > 20 and [lines.joined() for lines in kept] == now
    assert [lines.rows for lines in kept] == [block.count(b"\n") for block in now]
    assert [lines.size for lines in kept] == [len(block) for block in now]
    assert kept[-1].last() + b"\n" == now[-1][-len(kept[-1].last()) - 1 :] and b"\n" not in kept[-1].last()


def test_one_long_row_makes_no_later_block_large(connection: Connection) -> None:
    rows = "unnest(ARRAY[5000000] || array_fill(900, ARRAY[3000])) n"
    kept: list[Lines] = []
    copy_from_socket(
        connection, f"COPY (SELECT repeat('y', n) FROM {rows}) TO STDOUT", 100_000, None, kept.append
    )
    sizes = {id(lines.data): len(lines.data) for lines in kept}.values()
    assert len(kept) > 25 and max(sizes) > 5_000_000 and sum(size > 1_000_000 for size in sizes) < 3


@BOTH_WAYS
def test_nothing_is_read_from_an_empty_table(connection: Connection, copy: Copy) -> None:
    copy(connection, "COPY (SELECT 1 WHERE false) TO STDOUT", 1000, None, pytest.fail)


@BOTH_WAYS
@pytest.mark.parametrize(
    ("query", "kind", "code"),
    [
        ("SELECT * FROM nowhere", psycopg2.errors.UndefinedTable, "42P01"),
        ("SELECT 1 / (29000 - n) FROM generate_series(1, 30000) n", psycopg2.errors.DivisionByZero, "22012"),
    ],
)
def test_an_error_of_the_server_is_raised_as_psycopg2_does(
    connection: Connection, copy: Copy, query: str, kind: type[psycopg2.Error], code: str
) -> None:
    with connection.cursor() as cursor:
        cursor.execute("BEGIN")
        cursor.execute("SAVEPOINT before")
        taken: list[bytes] = []
        with pytest.raises(kind) as raised:
            copy(connection, f"COPY ({query}) TO STDOUT", 1000, None, into(taken))
        assert raised.value.pgcode == code
        # The last rows before the error did not fill a block.
        assert b"".join(taken).count(b"\n") < 28_999
        cursor.execute("ROLLBACK TO before")
        cursor.execute("SELECT 7")
        assert cursor.fetchone() == (7,)


SHORT = st.sampled_from(
    [frame(b"d", b"\n"), frame(b"d", b"Z\0\0\0\5\n"), frame(b"N", b"d\n\0"), frame(b"c", b"")]
)


@given(st.lists(SHORT, max_size=4), st.lists(SHORT, max_size=2), st.integers(0, 60))
def test_the_rest_of_an_answer_is_over_when_its_last_frame_and_all_that_began_are_whole(
    before: list[bytes], after: list[bytes], cut: int
) -> None:
    frames = [*before, frame(b"Z", b"I"), *after]
    stream, ends = memoryview(b"".join(frames)), list(accumulate(map(len, frames)))
    for end in range(len(stream) + 1):
        rest = Rest()
        rest.add(stream[: min(cut, end)])
        rest.add(stream[min(cut, end) : end])
        assert rest.over == (end in ends[len(before) :]), end


@pytest.mark.parametrize("blocks", [1, 50])
def test_a_connection_whose_copy_was_given_up_can_be_used(connection: Connection, blocks: int) -> None:
    with pytest.raises(OSError, match="the disk is full"):
        copy_from_socket(connection, MANY, 100_000, None, giving_up(blocks))
    with connection.cursor() as cursor:
        cursor.execute("SELECT 7")
        assert cursor.fetchone() == (7,)
    assert not os.get_blocking(connection.fileno()), "libpq needs it so"


def test_a_connection_whose_copy_was_given_up_far_from_its_end_is_closed(
    connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_socket, "_DISCARD_SECONDS", 0.5)
    numbers = "generate_series(1, 100000)"
    endless = f"COPY (SELECT repeat('x', 500) FROM {numbers}, {numbers} AS more) TO STDOUT"
    with pytest.raises(OSError, match="the disk is full"):
        copy_from_socket(connection, endless, 100_000, None, giving_up(3))
    assert connection.closed


def into(taken: list[bytes]) -> Callable[[Lines], None]:
    """Append each block to ``taken``, as its lines one after the other."""
    return lambda lines: taken.append(lines.joined())


def giving_up(blocks: int) -> Callable[[Lines], None]:
    """Take ``blocks`` blocks, and fail at the last of them."""
    taken = count(1)

    def give_up(_: Lines) -> None:
        if next(taken) == blocks:
            raise OSError("the disk is full")

    return give_up


def test_what_follows_the_last_frame_is_read_to_its_end() -> None:
    """A frame may come after the one that ends the copy; libpq could not read the second half of it."""
    setting = frame(b"S", b"is_superuser\0off\0")
    answer = frame(b"H", b"\0\0\1\0\0") + frame(b"d", b"1\n") + frame(b"c", b"") + frame(b"Z", b"I")
    here, there = socket.socketpair()
    with here, there:
        taken: list[bytes] = []
        # Only the descriptor of the connection is asked for.
        connection: Any = SimpleNamespace(fileno=here.fileno)
        there.sendall(answer + setting[:7])
        later = threading.Timer(0.5, there.sendall, [setting[7:]])
        later.start()
        copy_from_socket(connection, "COPY t TO STDOUT", 1000, None, into(taken))
        later.join()
        assert taken == [b"1\n"]
        here.setblocking(False)
        with pytest.raises(BlockingIOError):
            here.recv(1)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("42P01", psycopg2.errors.UndefinedTable),
        ("P9001", psycopg2.InternalError),
        ("22ABC", psycopg2.DataError),
        ("42ABC", psycopg2.ProgrammingError),
        ("57ABC", psycopg2.OperationalError),
        ("ZZ999", psycopg2.DatabaseError),
    ],
)
def test_an_error_with_a_code_of_its_own_is_one_of_its_class(code: str, kind: type[psycopg2.Error]) -> None:
    error = copy_socket._error(b"SERROR\0C" + code.encode() + b"\0Mno\0\0")
    assert isinstance(error, kind) and error.pgcode == code
    assert kind is not psycopg2.DatabaseError or type(error) is kind


def test_a_server_that_ends_the_session_is_said_to_be_unavailable(source: SourceUnderTest) -> None:
    with source.connected() as connection, source.connected() as other, other.cursor() as cursor:
        end = partial(cursor.execute, f"SELECT pg_terminate_backend({connection.info.backend_pid})")
        ending = threading.Timer(0.3, end)
        ending.start()
        with pytest.raises(SourceUnavailable, match="while reading sleep: terminating connection"):
            copy_lines(connection, "SELECT pg_sleep(60)", doing="reading sleep", lines=pytest.fail)
        ending.join()
        assert connection.closed
