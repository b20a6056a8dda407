"""The thread that receives ahead: nothing is lost or reordered, and it ends with the connection."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnisupport_ingest.compiled import CompiledReceiver, compiled_receiver
from omnisupport_ingest_tests.examples import examples

pytestmark = pytest.mark.skipif(compiled_receiver is None, reason="installed without a C compiler")

SECOND = 1_000_000
LONG = 60 * SECOND


class Receiver:
    """A receiver of the bytes that ``server`` sends."""

    def __init__(self, server: socket.socket, descriptor: int, room: int) -> None:
        assert compiled_receiver is not None
        self.server, self._of = server, compiled_receiver
        self.functions: CompiledReceiver = compiled_receiver
        self.receiver = compiled_receiver.start(descriptor, room)

    def take(self, most: int, enough: int = 1, idle: int = 500, until: int = 2_000) -> bytes | None:
        """Take up to ``most`` bytes, as a value; None if nothing has arrived."""
        into = bytearray(most)
        count = self._of.take(self.receiver, memoryview(into), enough, idle, until)
        return None if count is None else bytes(into[:count])

    def wait(self, micros: int = LONG) -> bool:
        return self._of.wait(self.receiver, micros)

    def stop(self) -> None:
        self._of.stop(self.receiver)


@contextmanager
def received(room: int = 1024) -> Iterator[Receiver]:
    server, ours = socket.socketpair()
    with server, ours:
        receiver = Receiver(server, ours.fileno(), room)
        yield receiver
        receiver.stop()


@settings(max_examples=examples(200))
@given(
    st.lists(st.tuples(st.binary(max_size=90), st.sampled_from([0.0, 0.0, 0.0004])), max_size=12),
    st.integers(1, 60),
    st.lists(st.tuples(st.integers(1, 70), st.integers(0, 80)), min_size=1, max_size=5),
)
def test_all_that_was_sent_is_taken_in_order_however_little_room_there_is(
    pieces: list[tuple[bytes, float]], room: int, takes: list[tuple[int, int]]
) -> None:
    with received(room) as receiver:

        def send() -> None:
            for piece, pause in pieces:
                receiver.server.sendall(piece)
                time.sleep(pause)
            receiver.server.shutdown(socket.SHUT_WR)

        sender = threading.Thread(target=send)
        sender.start()
        found, turn = b"", 0
        while receiver.wait():
            most, enough = takes[turn % len(takes)]
            part = receiver.take(most, enough)
            if part == b"":
                break
            found, turn = found + (part or b""), turn + 1
        sender.join()
    assert found == b"".join(piece for piece, _ in pieces)


def test_what_comes_soon_after_is_taken_together() -> None:
    with received(20) as receiver:
        assert receiver.take(9) is None, "nothing has come, and it does not wait"
        receiver.server.sendall(b"first")
        assert receiver.wait()
        later = threading.Timer(0.05, receiver.server.sendall, [b" and more"])
        later.start()
        assert receiver.take(20, 14, 30 * SECOND, LONG) == b"first and more"
        later.join()
        receiver.server.sendall(bytes(30))
        assert receiver.wait()
        found = receiver.take(100, 20, 30 * SECOND, LONG)
        assert found == bytes(20), "no more than there is room for"


@pytest.mark.parametrize(("idle", "until"), [(2_000, LONG), (LONG, 2_000)])
def test_a_server_that_sends_little_is_not_waited_for_long(idle: int, until: int) -> None:
    with received() as receiver:
        receiver.server.sendall(b"x")
        assert receiver.wait()
        assert receiver.take(9, 9, idle, until) == b"x"


def test_a_wait_ends_when_something_arrives_when_the_stream_ends_and_when_its_time_is_over() -> None:
    with received() as receiver:
        assert not receiver.wait(1_000) and not receiver.wait(0)
        threading.Timer(0.05, receiver.server.sendall, [b"x"]).start()
        assert receiver.wait()
        assert receiver.wait(), "it has not been taken"
        assert receiver.take(9) == b"x"
        threading.Timer(0.05, receiver.server.shutdown, [socket.SHUT_WR]).start()
        assert receiver.wait()
        assert receiver.take(9) == b"" == receiver.take(9)


def test_a_reset_comes_after_what_came_before_it() -> None:
    server, ours = socket.socketpair()
    with ours:
        receiver = Receiver(server, ours.fileno(), 1024)
        server.sendall(b"last words")
        # Closed with bytes that nobody read: a reset.
        ours.sendall(b"x")
        server.close()
        assert receiver.wait()
        assert receiver.take(99) == b"last words"
        assert receiver.wait()
        for _ in range(2):
            with pytest.raises(ConnectionResetError):
                receiver.take(99)
        receiver.stop()


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("stopped", [True, False])
def test_it_leaves_neither_a_thread_nor_the_connection_open(stopped: bool) -> None:
    server, ours = socket.socketpair()
    with server:
        before = receiving_threads()
        receiver = Receiver(server, ours.fileno(), 1)
        while receiving_threads() == before:
            pass  # It gives itself its name.
        assert receiving_threads() == before + 1
        server.sendall(b"more than there is room for")
        assert receiver.wait()
        if stopped:
            receiver.stop()
            receiver.stop()
            assert receiver.take(9) == b"m" and receiver.take(9) == b""
        else:
            del receiver
        # The system counts a thread for a moment after its end.
        give_up = time.monotonic() + 10
        while receiving_threads() > before and time.monotonic() < give_up:
            time.sleep(0.001)
        assert receiving_threads() == before
        ours.close()
        server.settimeout(10)
        with pytest.raises(ConnectionResetError):
            server.recv(1)
            server.sendall(b"x")


def receiving_threads() -> int:
    found = 0
    for task in Path("/proc/self/task").iterdir():
        # A thread may end meanwhile.
        with suppress(FileNotFoundError, ProcessLookupError):
            found += (task / "comm").read_text() == "receives ahead\n"
    return found


def test_only_one_thread_uses_it_and_no_forked_process() -> None:
    with received() as receiver:
        waiting = threading.Thread(target=receiver.wait)
        waiting.start()
        time.sleep(0.05)
        with pytest.raises(RuntimeError, match="used by another"):
            receiver.take(9)
        receiver.server.sendall(b"x")
        waiting.join()
        child = os.fork()
        if not child:
            try:
                receiver.take(9)
            except RuntimeError:
                del receiver.receiver
                os._exit(3)
            os._exit(4)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        assert receiver.take(9) == b"x", "the other process has taken nothing"


def test_arguments_that_make_no_sense_are_refused() -> None:
    assert compiled_receiver is not None
    with pytest.raises(OSError, match="Bad file descriptor"):
        compiled_receiver.start(10_000, 1)
    with socket.socket() as nowhere, pytest.raises(ValueError, match="needs room"):
        compiled_receiver.start(nowhere.fileno(), 0)
    with received() as receiver:
        for idle, until in ((-1, 1), (1, -1), (1, 1 << 62)):
            with pytest.raises(ValueError, match="not a time to wait"):
                receiver.take(1, 1, idle, until)
    for function, arguments in (
        (compiled_receiver.take, (object(), memoryview(bytearray(1)), 1, 1, 1)),
        (compiled_receiver.wait, (object(), 1)),
        (compiled_receiver.stop, (object(),)),
    ):
        with pytest.raises(ValueError, match="PyCapsule"):
            function(*arguments)  # type: ignore[operator, call-arg]
        with pytest.raises(TypeError):
            function()  # type: ignore[operator, call-arg]
