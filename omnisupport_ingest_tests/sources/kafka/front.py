"""What stands before a broker in a company: TLS, and users with passwords (SASL, mechanism PLAIN).

Tansu takes no certificate and no plain users, so a front of our own takes connections for it: it decrypts,
asks each connection who it is, by the requests of Kafka's protocol for that (SaslHandshake,
SaslAuthenticate), and hands everything else through, both ways. The broker names the front as its address.
"""

from __future__ import annotations

import ipaddress
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


@dataclass
class Front:
    """``port`` of loopback, before a broker on ``behind``. ``certificate``: its own, to be trusted; None: it
    speaks plainly. ``users``: who may, with passwords; none: everybody. ``let_in``: whom it has let in.
    ``cut``, ``mend``: nobody reaches the broker, and everybody may again."""

    port: int
    behind: int = 0
    certificate: Path | None = None
    users: dict[str, str] = field(default_factory=dict)
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
def front(folder: Path, *, tls: bool, users: dict[str, str] | None = None) -> Iterator[Front]:
    """A front whose ``behind`` is to be set before anybody connects; gone with the block."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        found = Front(listener.getsockname()[1], users=users or {})
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
    while (request := _frame(client)) is not None:
        api, version, number = struct.unpack_from(">hhi", request)
        if api == _API_VERSIONS:
            broker.sendall(struct.pack(">i", len(request)) + request)
            _answer(client, _frame(broker) or b"")
        elif api == _HANDSHAKE:
            code = 0 if request.endswith(b"\x00\x05PLAIN") else _NO_SUCH_MECHANISM
            _answer(client, struct.pack(">ihih", number, code, 1, 5) + b"PLAIN")
        elif api == _AUTHENTICATE and version < 2:
            _, user, password = request.rsplit(b"\0", 2)
            user = user[user.rfind(b"\0") + 1 :]
            known = of.users.get(user.decode()) == password.decode()
            text = b"" if known else b"the user or its password is wrong"
            told = struct.pack(">ihh", number, 0 if known else _REFUSED, len(text)) + text
            _answer(client, told + struct.pack(">i", 0) + (struct.pack(">q", 0) if version else b""))
            if known:
                of.let_in.append(user.decode())
            return known
        else:
            return False
    return False


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
