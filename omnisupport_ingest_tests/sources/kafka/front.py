"""What stands before a broker in a company: TLS, and users with passwords (SASL: PLAIN, SCRAM).

Tansu takes no certificate and no plain users, so a front of our own takes connections for it: it decrypts,
asks each connection who it is, by the requests of Kafka's protocol for that (SaslHandshake,
SaslAuthenticate), and hands everything else through, both ways. The broker names the front as its address.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
import secrets
import socket
import ssl
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_API_VERSIONS, _HANDSHAKE, _AUTHENTICATE = 18, 17, 36
_REFUSED, _NO_SUCH_MECHANISM = 58, 33
_ROUNDS = 4096


@dataclass
class Front:
    """``port`` of loopback, before a broker on ``behind``. ``certificate``: its own, to be trusted; None: it
    speaks plainly. ``users``: who may, with passwords; none: everybody. ``mechanisms``: by which they say who
    they are. ``let_in``: whom it has let in.
    ``cut``, ``mend``: nobody reaches the broker, and everybody may again."""

    port: int
    behind: int = 0
    certificate: Path | None = None
    users: dict[str, str] = field(default_factory=dict)
    mechanisms: tuple[str, ...] = ("PLAIN",)
    let_in: list[str] = field(default_factory=list)
    _passing: list[socket.socket] = field(default_factory=list)
    was_cut: bool = False
    _is_cut: bool = False

    def cut(self) -> None:
        self._is_cut = self.was_cut = True
        while self._passing:
            _end(self._passing.pop())

    def mend(self) -> None:
        self._is_cut = False

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"


@contextmanager
def front(
    folder: Path, *, tls: bool, users: dict[str, str] | None = None, mechanisms: tuple[str, ...] = ("PLAIN",)
) -> Iterator[Front]:
    """A front whose ``behind`` is to be set before anybody connects; gone with the block."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        found = Front(listener.getsockname()[1], users=users or {}, mechanisms=mechanisms)
        context = None
        if tls:
            found.certificate = folder / "certificate.pem"
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(found.certificate, _write_certificate(found.certificate))
        threading.Thread(target=_accept, args=(listener, context, found), daemon=True).start()
        yield found
        listener.shutdown(socket.SHUT_RDWR)


def _accept(listener: socket.socket, context: ssl.SSLContext | None, of: Front) -> None:
    with suppress(OSError):
        while True:
            client, _ = listener.accept()
            threading.Thread(target=_serve, args=(client, context, of), daemon=True).start()


def _serve(client: socket.socket, context: ssl.SSLContext | None, of: Front) -> None:
    with suppress(OSError), client:
        if context is not None:
            client = context.wrap_socket(client, server_side=True)
        with client, socket.create_connection(("127.0.0.1", of.behind)) as broker:
            if of._is_cut or (of.users and not _knows(client, broker, of)):
                return
            of._passing.append(client)
            back = threading.Thread(target=_pass_on, args=(broker, client), daemon=True)
            back.start()
            _pass_on(client, broker)
            back.join()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while piece := source.recv(1 << 16):
            target.sendall(piece)
    for each in (source, target):
        _end(each)


def _end(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _knows(client: socket.socket, broker: socket.socket, of: Front) -> bool:
    """Whether the client says who it is, before it asks anything but what the broker can do."""
    exchange: _Plain | _Scram | None = None
    while (request := _frame(client)) is not None:
        api, version, number, of_name = struct.unpack_from(">hhih", request)
        content = request[10 + max(of_name, 0) :]
        if api == _API_VERSIONS:
            broker.sendall(struct.pack(">i", len(request)) + request)
            _answer(client, _frame(broker) or b"")
        elif api == _HANDSHAKE:
            mechanism = content[2:].decode()
            if mechanism in of.mechanisms:
                exchange = _Plain(of.users) if mechanism == "PLAIN" else _Scram(of.users, mechanism)
            names = b"".join(struct.pack(">h", len(each)) + each.encode() for each in of.mechanisms)
            code = 0 if exchange is not None else _NO_SUCH_MECHANISM
            _answer(client, struct.pack(">ihi", number, code, len(of.mechanisms)) + names)
        elif api == _AUTHENTICATE and version < 2 and exchange is not None:
            try:
                code, text, said = 0, b"", exchange.step(content[4:])
            except _Wrong:
                code, text, said = _REFUSED, b"the user or its password is wrong", b""
            told = struct.pack(">ihh", number, code, len(text)) + text + struct.pack(">i", len(said)) + said
            _answer(client, told + (struct.pack(">q", 0) if version else b""))
            if code:
                return False
            if exchange.user is not None:
                of.let_in.append(exchange.user)
                return True
        else:
            return False
    return False


class _Wrong(Exception):
    """Raised where a client is not who it says."""


class _Plain:
    """Who a client is, by its user and password. ``user``: known behind the last step."""

    def __init__(self, users: dict[str, str]) -> None:
        self.user: str | None = None
        self._users = users

    def step(self, message: bytes) -> bytes:
        _, user, password = message.decode().split("\0")
        if self._users.get(user) != password:
            raise _Wrong
        self.user = user
        return b""


class _Scram:
    """Who a client is, by the proof that it knows the password (RFC 5802); the server proves the same."""

    def __init__(self, users: dict[str, str], mechanism: str) -> None:
        self.user: str | None = None
        self._users, self._hash = users, mechanism.removeprefix("SCRAM-").replace("-", "").lower()
        self._asked: str | None = None
        self._signed = b""
        self._salt, self._nonce = secrets.token_bytes(16), ""

    def step(self, message: bytes) -> bytes:
        return self._ask(message) if self._asked is None else self._check(message)

    def _ask(self, message: bytes) -> bytes:
        bare = message.removeprefix(b"n,,")
        told = _attributes(bare)
        self._asked, self._nonce = told["n"], told["r"] + secrets.token_hex(12)
        asked = f"r={self._nonce},s={base64.b64encode(self._salt).decode()},i={_ROUNDS}".encode()
        self._signed = bare + b"," + asked
        return asked

    def _check(self, message: bytes) -> bytes:
        told = _attributes(message)
        password = self._users.get(self._asked or "")
        if password is None or told["r"] != self._nonce or told["c"] != "biws":
            raise _Wrong
        salted = hashlib.pbkdf2_hmac(self._hash, password.encode(), self._salt, _ROUNDS)
        key = self._hmac(salted, b"Client Key")
        stored = hashlib.new(self._hash, key).digest()
        signed = self._signed + b"," + message.rpartition(b",p=")[0]
        proof = bytes(a ^ b for a, b in zip(key, self._hmac(stored, signed), strict=True))
        if not hmac.compare_digest(proof, base64.b64decode(told["p"])):
            raise _Wrong
        self.user = self._asked
        return b"v=" + base64.b64encode(self._hmac(self._hmac(salted, b"Server Key"), signed))

    def _hmac(self, key: bytes, content: bytes) -> bytes:
        return hmac.digest(key, content, self._hash)


def _attributes(message: bytes) -> dict[str, str]:
    return dict(each.split("=", 1) for each in message.decode().split(","))  # type: ignore[misc]


def _frame(source: socket.socket) -> bytes | None:
    size = _bytes(source, 4)
    return None if size is None else _bytes(source, int.from_bytes(size, "big"))


def _bytes(source: socket.socket, count: int) -> bytes | None:
    found = b""
    while len(found) < count:
        piece = source.recv(count - len(found))
        if not piece:
            return None
        found += piece
    return found


def _answer(client: socket.socket, content: bytes) -> None:
    client.sendall(struct.pack(">i", len(content)) + content)


def _write_certificate(path: Path) -> Path:
    """A certificate of 127.0.0.1 that signs itself; returns the file of its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a broker")])
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    path.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    of_key = path.with_name("key.pem")
    form = serialization.PrivateFormat.PKCS8
    of_key.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
    of_key.chmod(0o600)
    return of_key
