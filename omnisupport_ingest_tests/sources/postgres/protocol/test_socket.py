"""What a server may send beside changes, how it may end, and a socket that takes little at a time."""

from __future__ import annotations

import errno
import socket
import struct
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnisupport_ingest.sources.postgres.protocol import transport
from omnisupport_ingest.sources.postgres.protocol.frames import Frames
from omnisupport_ingest.sources.postgres.protocol.transport import SocketTransport
from omnisupport_ingest.sources.postgres.session.errors import ProtocolViolation, SourceUnavailable
from omnisupport_ingest_tests.sources.postgres.protocol.test_frames import framed, wal_data

ROW = wal_data(b"I\0\0\x40\x01N1")
ERROR = b"SFATAL\0VFATAL\0C57P01\0Mterminating connection\0Done (alice@example.com)\0\0"


@pytest.fixture(params=[True, False], ids=["received ahead", "received by itself"])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[socket.socket, SocketTransport]]:
    """The server's end, and ours as libpq leaves it: it never waits."""
    server, ours = socket.socketpair()
    ours.setblocking(False)
    with server, ours:
        transport = SocketTransport(ours.fileno())
        if request.param:
            transport.receive_ahead()
        yield server, transport
        transport.close()


def taken(ours: SocketTransport) -> list[bytes]:
    """Take all that has come, as the stream does. Something comes; its thread may have to wait for a core."""
    frames, found = Frames(), []
    while ours.wait(0.05 if found else 10) and ours.receive(frames):
        while (frame := frames.pop()) is not None:
            if frame[0] == ord("d"):
                found.append(frame[1])
            else:
                ours.handle_frame(*frame)
    return found


def test_notices_and_parameters_among_changes_mean_nothing(
    ends: tuple[socket.socket, SocketTransport],
) -> None:
    server, ours = ends
    notice, parameter = framed(b"SWARNING\0Mx\0\0", b"N"), framed(b"TimeZone\0UTC\0", b"S")
    server.sendall(
        framed(ROW) + notice + framed(ROW) + parameter + framed(b"\0\0\0\1a\0b\0", b"A") + framed(ROW)
    )
    assert taken(ours) == [ROW] * 3


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (framed(ERROR, b"E"), "FATAL: terminating connection"),
        (framed(b"", b"c"), "end of stream"),
        (framed(b"COPY 0\0", b"C"), "end of stream"),
        (b"", "server closed the connection unexpectedly"),
        (framed(ROW)[:9], "server closed the connection unexpectedly"),
    ],
    ids=["an error", "copy done", "a shutdown", "closed", "closed within a frame"],
)
def test_an_end_of_the_stream_says_how_it_ended(
    ends: tuple[socket.socket, SocketTransport], sent: bytes, said: str
) -> None:
    server, ours = ends
    server.sendall(framed(ROW) + sent)
    server.shutdown(socket.SHUT_WR)
    with pytest.raises(SourceUnavailable) as error:
        taken(ours)
    assert f"stream: {said}." in error.value.problem and "alice" not in str(error.value)


def test_without_a_thread_to_be_had_it_receives_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoThreads:
        @staticmethod
        def start(*_: object) -> None:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(transport, "compiled_receiver", NoThreads)
    server, ours = socket.socketpair()
    ours.setblocking(False)
    with server, ours:
        found = SocketTransport(ours.fileno())
        found.receive_ahead()
        assert not found.gathers
        server.sendall(framed(ROW))
        assert taken(found) == [ROW]
        found.close()


def test_a_reset_connection_is_told_as_such() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        ours = socket.create_connection(listening.getsockname())
        server, _ = listening.accept()
        ours.setblocking(False)
        # Closed with bytes that nobody read, and without lingering: the peer gets a reset.
        server.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        server.close()
        with ours, pytest.raises(SourceUnavailable, match="reset by peer"):
            taken(SocketTransport(ours.fileno()))


@pytest.mark.parametrize(
    "bytes_of_no_frame",
    [b"x\0\0\0\5q", b"\0\0\0\0\x09abcde", b"x\x7f\0\0\0", b"d\0\0\0\0", b"N\0\0\0\2"],
    ids=["an unknown letter", "a nul", "a long one that has not come", "no length", "less than its length"],
)
def test_bytes_that_begin_no_frame_end_the_stream(
    ends: tuple[socket.socket, SocketTransport], bytes_of_no_frame: bytes
) -> None:
    """Passed over, they would leave the reader waiting for gigabytes that never come."""
    server, ours = ends
    server.sendall(framed(ROW) + bytes_of_no_frame)
    with pytest.raises(ProtocolViolation):
        taken(ours)


@given(st.integers(1, 200))
def test_a_status_goes_whole_to_a_server_that_reads_little_at_a_time(count: int) -> None:
    server, ours = socket.socketpair()
    ours.setblocking(False)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    message = b"r" + bytes(range(38))
    wanted, found = framed(message * 200) * count, bytearray()

    def read() -> None:
        while len(found) < len(wanted):
            found.extend(server.recv(977))

    reader = threading.Thread(target=read)
    with server, ours:
        reader.start()
        for _ in range(count):
            SocketTransport(ours.fileno()).send_copy_data(message * 200)
        reader.join(60)
    assert found == wanted


def test_a_server_that_takes_nothing_in_is_given_up(
    ends: tuple[socket.socket, SocketTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "_SEND_SECONDS", 0.1)
    _, ours = ends
    with pytest.raises(SourceUnavailable, match="takes nothing in"):
        ours.send_copy_data(bytes(50_000_000))
