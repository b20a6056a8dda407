"""Encrypted requests over TCP, between processes that share a secret.

The answering process makes the secret for its own lifetime, and gives it to the processes that may send
requests. A client proves that it has the secret, by an HMAC of a greeting that is new for each connection,
before anything else of it is read. Request and answer are JSON, encrypted by AES-GCM. The associated data of
a request is the greeting; that of an answer also has the hash of the request, which has a random nonce. So a
recording is useless: neither side accepts it a second time.
"""

from __future__ import annotations

import errno
import hmac
import logging
import os
import random
import secrets
import socket
import socketserver
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from typing import Any

import orjson
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

_log = logging.getLogger(__name__)

Answer = Callable[[dict[str, Any]], dict[str, Any]]
"""A function that answers a request. Several threads may call it at the same time."""

_SECRET_BYTES = 32
_NONCE_BYTES = 12
_GREETING_BYTES = 16
_PROOF_BYTES = 32
_LENGTH_BYTES = 4
_UNPROVEN = 64
"""Most connections that have not yet proved that they know the secret; further ones are closed."""
_PORTS = 16
"""Number of ports that are tried in a row, as Spark does (``spark.port.maxRetries``)."""
_TRIES = 5
_WAIT_SECONDS = 1.0
"""Seconds before the second try, varied by half; before each further try, twice as long."""
_ROOM_SECONDS = 1.0
"""Seconds that a new connection waits for one of the unproven connections to end or prove itself."""
_HIGHEST_PORT = 65_535
_EVERY = ""
"""All addresses of this machine."""
_CONNECT_SECONDS = 10.0
_ANSWER_SECONDS = 120.0


class NotAnswered(Exception):
    """Raised if no process answers at the address, or if the answer was not made with the shared secret."""


@dataclass(frozen=True, slots=True)
class Address:
    """The address of an answering process, and the secret for requests to it."""

    host: str
    port: int
    secret: bytes = field(repr=False)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to ``request``, which may be sent several times. Raises ``NotAnswered`` if all
        tries fail."""
        said = ""
        for number in range(_TRIES):
            if number:
                # Random, so that tasks that begin together do not try again together.
                waits = _WAIT_SECONDS * 2 ** (number - 1)
                time.sleep(waits * random.uniform(0.5, 1.5))  # noqa: S311 - no secret
            try:
                return self._ask(request)
            except (OSError, EOFError, InvalidTag, ValueError) as error:
                said = str(error) or type(error).__name__
        raise NotAnswered(f"{self.host}:{self.port}: {said}")

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        with socket.create_connection((self.host, self.port), timeout=_CONNECT_SECONDS) as connection:
            wire = _Wire(connection, AESGCM(self.secret), time.monotonic() + _ANSWER_SECONDS)
            greeting = wire.read(_GREETING_BYTES)
            connection.sendall(_proof(self.secret, greeting))
            sent = wire.send(request, _of_request(greeting))
            return wire.receive(_of_answer(greeting, sent))[0]


_Made = Callable[[socket.AddressFamily, tuple[str, int]], "_Server"]


class Answering:
    """Answers requests on a port of this machine, in threads of this process, until it is closed."""

    def __init__(self, host: str, port: int, answer: Answer) -> None:
        """``host``: the address to listen on; if this machine does not have it, all addresses of this
        machine. ``port``: the first of several ports to try; 0: any free one.

        Raises ``OSError`` if no port can be used.
        """
        self._secret = secrets.token_bytes(_SECRET_BYTES)
        self._server = _listening(host, port, partial(_Server, self._secret, answer))
        threading.Thread(target=self._server.serve_forever, name="sealed requests", daemon=True).start()

    def address(self, host: str) -> Address:
        """Return the address for clients that reach this machine as ``host``."""
        return Address(host, self._server.server_address[1], self._secret)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _listening(host: str, port: int, made: _Made) -> _Server:
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    last = min(port + _PORTS, _HIGHEST_PORT + 1)
    for each in range(port, last) if port else (0,):
        try:
            try:
                return made(family, (host, each))
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:
                    raise
                # An address outside of this machine that leads here, such as that of a Kubernetes service.
                return made(family, (_EVERY, each))
        except OSError as error:
            if error.errno != errno.EADDRINUSE or not port or each + 1 >= last:
                raise
    raise AssertionError("the last port is bound, or its error was raised")


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self, secret: bytes, answer: Answer, family: socket.AddressFamily, at: tuple[str, int]
    ) -> None:
        self.address_family, self.secret, self.answer = family, secret, answer
        self.unproven = threading.BoundedSemaphore(_UNPROVEN)
        super().__init__(at, _Handler)

    def verify_request(self, *_: object) -> bool:
        return self.unproven.acquire(timeout=_ROOM_SECONDS)

    def process_request(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request(request, client_address)
        except RuntimeError:
            # No thread could be started.
            self.unproven.release()
            raise

    def handle_error(self, request: object, client_address: object) -> None:
        """Log nothing: a client without the secret must not fill our log."""


class _Handler(socketserver.BaseRequestHandler):
    server: _Server

    def handle(self) -> None:
        connection: socket.socket = self.request
        secret, greeting = self.server.secret, os.urandom(_GREETING_BYTES)
        wire = _Wire(connection, AESGCM(secret), time.monotonic() + _CONNECT_SECONDS)
        try:
            connection.sendall(greeting)
            proof = wire.read(_PROOF_BYTES)
        finally:
            self.server.unproven.release()
        if not hmac.compare_digest(proof, _proof(secret, greeting)):
            return
        wire.until = time.monotonic() + _ANSWER_SECONDS
        request, received = wire.receive(_of_request(greeting))
        try:
            answer = self.server.answer(request)
        except Exception as error:
            # The client had the secret, so this is a fault of ours. The error's text may contain values of
            # rows.
            places = "".join(traceback.format_tb(error.__traceback__))
            _log.error("A request of a task cannot be answered: %s at\n%s", type(error).__name__, places)
            raise
        wire.send(answer, _of_answer(greeting, received))


def _proof(secret: bytes, greeting: bytes) -> bytes:
    return hmac.digest(secret, b"proof" + greeting, "sha256")


def _of_request(greeting: bytes) -> bytes:
    return b"request" + greeting


def _of_answer(greeting: bytes, request: bytes) -> bytes:
    """Return the associated data of an answer. ``request``: the digest of the encrypted request."""
    return b"answer" + greeting + request


@dataclass
class _Wire:
    """Sends and receives messages, encrypted by ``cipher``. ``until``: when to give up reading (monotonic
    seconds)."""

    connection: socket.socket
    cipher: AESGCM
    until: float

    def send(self, message: dict[str, Any], of: bytes) -> bytes:
        """Send ``message`` with the associated data ``of``; return the digest of what was sent."""
        nonce = os.urandom(_NONCE_BYTES)
        sealed = nonce + self.cipher.encrypt(nonce, orjson.dumps(message), of)
        self.connection.settimeout(_ANSWER_SECONDS)
        self.connection.sendall(len(sealed).to_bytes(_LENGTH_BYTES, "big") + sealed)
        return sha256(sealed).digest()

    def receive(self, of: bytes) -> tuple[dict[str, Any], bytes]:
        """Return the message with the associated data ``of``, and the digest of what was received."""
        sealed = self.read(int.from_bytes(self.read(_LENGTH_BYTES), "big"))
        message: dict[str, Any] = orjson.loads(
            self.cipher.decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], of)
        )
        return message, sha256(sealed).digest()

    def read(self, length: int) -> bytes:
        """Return ``length`` bytes. Raises ``EOFError`` if there are fewer. Memory grows only with what was
        received."""
        found = bytearray()
        while len(found) < length:
            left = self.until - time.monotonic()
            if left <= 0:
                raise TimeoutError("it took too long")
            self.connection.settimeout(left)
            piece = self.connection.recv(min(length - len(found), 1 << 20))
            if not piece:
                raise EOFError("the connection ended")
            found += piece
        return bytes(found)
