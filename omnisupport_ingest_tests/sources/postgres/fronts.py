"""Programs that stand between a client and PostgreSQL: one ends TLS, one behaves as a pooler does, one
stops forwarding without closing anything, one loses what is on its way when a client goes.

The embedded server is built without TLS, and a pooler is no part of it; what they forward to is real.
Each is a process of its own: capture waits for the server inside libpq, and no thread beside it runs then.

``python -m … tls CERTIFICATE KEY PLAIN DECRYPTED`` or ``python -m … KIND BACKEND`` (pooler, swallowing,
losing) prints its port; a backend is the path of a socket or ``host:port``.
"""

from __future__ import annotations

import asyncio
import signal
import ssl
import struct
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

_SSL_REQUEST, _GSS_REQUEST = 80877103, 80877104
_FORGED_PID = 123_456_789
_ON_ITS_WAY_SECONDS = 0.03


@contextmanager
def tls_front(certificate: Path, key: Path, *, plain: str, decrypted: str) -> Iterator[int]:
    """A port that takes TLS and forwards to ``decrypted``; what comes without goes to ``plain``."""
    with _running("tls", str(certificate), str(key), plain, decrypted) as (port, _):
        yield port


@contextmanager
def pooler(backend: str) -> Iterator[int]:
    """A port that hides the server's process id and refuses replication, as PgBouncer does."""
    with _running("pooler", backend) as (port, _):
        yield port


class Swallowing:
    """A front on ``port`` that forwards, until it is told to swallow what comes, and the ends of connections
    with it. To its clients it is there as before."""

    def __init__(self, port: int, front: subprocess.Popen[str]) -> None:
        self.port, self._front = port, front

    def swallow_all(self) -> None:
        """Nothing is forwarded from now on, of new connections neither."""
        self._front.send_signal(signal.SIGUSR1)

    def swallow_open(self) -> None:
        """What is open now is dead; new connections are forwarded."""
        self._front.send_signal(signal.SIGUSR2)

    def break_connections(self) -> None:
        """End the front, and so whoever still waits for it."""
        self._front.kill()


@contextmanager
def swallowing(backend: str, *, after: str | None = None) -> Iterator[Swallowing]:
    """A front that falls silent on request.

    ``after``: the text of a statement; a connection that has sent it is dead once it was answered."""
    with _running("swallowing", backend, *([after] if after else [])) as (port, front):
        yield Swallowing(port, front)


@contextmanager
def losing(backend: str) -> Iterator[int]:
    """A port that forwards what a client sends a moment later, and not at all if the client is gone by then:
    as the kernel does where a connection is closed before all that came by it was read."""
    with _running("losing", backend) as (port, _):
        yield port


@contextmanager
def _running(*arguments: str) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    front = subprocess.Popen([sys.executable, "-m", __name__, *arguments], stdout=subprocess.PIPE, text=True)
    assert front.stdout is not None
    try:
        yield int(front.stdout.readline()), front
    finally:
        front.kill()
        front.communicate()


def _serve_tls(context: ssl.SSLContext, plain: str, decrypted: str) -> Serve:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first = await _first_packet(reader, writer, offer_tls=True)
        if _code(first) != _SSL_REQUEST:
            await _relay((reader, writer), await _open(plain), first)
            return
        await writer.start_tls(context)
        await _relay((reader, writer), await _open(decrypted), b"")

    return serve


def _serve_pooled(backend: str) -> Serve:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first = await _first_packet(reader, writer, offer_tls=False)
        if b"\0replication\0" in first:
            fields = b"SFATAL\0C08P01\0Munsupported startup parameter: replication\0\0"
            writer.write(b"E" + struct.pack("!i", len(fields) + 4) + fields)
            await writer.drain()
            writer.close()
            return
        server = await _open(backend)
        server[1].write(first)
        kind = b""
        while kind not in (b"K", b"E"):
            kind = await server[0].readexactly(1)
            (length,) = struct.unpack("!i", await server[0].readexactly(4))
            body = await server[0].readexactly(length - 4)
            if kind == b"K":
                body = struct.pack("!i", _FORGED_PID) + body[4:]
            writer.write(kind + struct.pack("!i", length) + body)
        await _relay((reader, writer), server, b"")

    return serve


class _Swallowed:
    """Which connections are dead: the first ``dead`` ones, all while ``all``, and each on which the statement
    ``after`` was answered.
    """

    def __init__(self, backend: str, after: str | None = None) -> None:
        self._backend, self._opened, self._dead, self._all = backend, 0, 0, False
        self._after, self._answered = after, set[int]()

    def swallow_all(self) -> None:
        self._all = True

    def swallow_open(self) -> None:
        self._dead, self._all = self._opened, False

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._opened += 1
        number = self._opened
        server, sent = await _open(self._backend), asyncio.Event()
        await asyncio.gather(
            self._pump(number, reader, server[1], sent), self._pump(number, server[0], writer, sent)
        )

    async def _pump(
        self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, sent: asyncio.Event
    ) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                if not self._is_dead(number):
                    answered = sent.is_set()
                    if self._after is not None and self._after.encode() in data:
                        sent.set()
                    writer.write(data)
                    await writer.drain()
                    if answered:
                        self._answered.add(number)
        if not self._is_dead(number):
            with suppress(OSError, RuntimeError):
                writer.close()

    def _is_dead(self, number: int) -> bool:
        return self._all or number <= self._dead or number in self._answered


def _serve_losing(backend: str) -> Serve:
    async def receive(reader: asyncio.StreamReader, held: asyncio.Queue[bytes]) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                held.put_nowait(data)

    async def deliver(held: asyncio.Queue[bytes], writer: asyncio.StreamWriter) -> None:
        while True:
            data = await held.get()
            await asyncio.sleep(_ON_ITS_WAY_SECONDS)
            writer.write(data)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server, held = await _open(backend), asyncio.Queue[bytes]()
        delivering = asyncio.create_task(deliver(held, server[1]))
        answering = asyncio.create_task(_pump(server[0], writer))
        await receive(reader, held)
        delivering.cancel()
        server[1].close()
        await answering

    return serve


async def _listen_swallowing(backend: str, after: str | None = None) -> None:
    swallowed, loop = _Swallowed(backend, after), asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, swallowed.swallow_all)
    loop.add_signal_handler(signal.SIGUSR2, swallowed.swallow_open)
    await _listen(swallowed.serve)


async def _open(backend: str) -> Streams:
    if backend.startswith("/"):
        return await asyncio.open_unix_connection(backend)
    host, _, port = backend.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def _first_packet(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, offer_tls: bool
) -> bytes:
    """The startup packet, or the request for TLS if that is offered (and then accepted)."""
    while True:
        head = await reader.readexactly(4)
        packet = head + await reader.readexactly(struct.unpack("!i", head)[0] - 4)
        wants_tls = _code(packet) == _SSL_REQUEST
        if not wants_tls and _code(packet) != _GSS_REQUEST:
            return packet
        writer.write(b"S" if wants_tls and offer_tls else b"N")
        await writer.drain()
        if wants_tls and offer_tls:
            return packet


def _code(packet: bytes) -> int:
    return int(struct.unpack_from("!i", packet, 4)[0])


async def _relay(client: Streams, server: Streams, first: bytes) -> None:
    server[1].write(first)
    await asyncio.gather(_pump(client[0], server[1]), _pump(server[0], client[1]))


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError, ssl.SSLError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    with suppress(OSError, RuntimeError):
        writer.close()


async def _listen(serve: Serve) -> None:
    async def guarded(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, OSError, ssl.SSLError):
            await serve(reader, writer)

    server = await asyncio.start_server(guarded, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    kind, *given = sys.argv[1:]
    if kind == "pooler":
        asyncio.run(_listen(_serve_pooled(*given)))
    elif kind == "losing":
        asyncio.run(_listen(_serve_losing(*given)))
    elif kind == "swallowing":
        asyncio.run(_listen_swallowing(*given))
    else:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(given[0], given[1])
        asyncio.run(_listen(_serve_tls(context, given[2], given[3])))
