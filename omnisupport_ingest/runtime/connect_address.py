"""The address of the warm Spark Connect server of a home, and how a client knows that it reaches that server.

A client of Spark Connect sends its token to whatever process listens on the server's port, and after the
server has stopped, any process may. So clients do not know the port. They get a Unix socket in a folder that
only the owner of the home can enter. Behind it, ``connect_server.py`` connects them only to the process that
it has started.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, quote

from omnisupport_ingest.durable import replace
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.foreign import Unreadable
from omnisupport_ingest.records import encode, read_note
from omnisupport_ingest.runtime.private_folders import socket_answers

if TYPE_CHECKING:
    from pyspark.sql.connect.client import DefaultChannelBuilder

_FILE = "spark-connect.json"
_SOCKET = "socket"
_USER = "omnisupport"


@dataclass(frozen=True)
class ConnectAddress:
    """The address of a server: the path of its Unix socket, and the token that its clients must send."""

    socket: str
    token: str

    def __repr__(self) -> str:
        return f"ConnectAddress(socket={self.socket!r})"

    @property
    def url(self) -> str:
        """The address in the form of ``OMNISUPPORT_SPARK_REMOTE``; it contains the token."""
        return f"sc://localhost/;{_SOCKET}={quote(self.socket, safe='')};token={self.token}"

    def write(self, run_folder: Path) -> None:
        """Record the address in ``run_folder``; only the owner can read it."""
        with failpoint("runtime.file"):
            replace(run_folder / _FILE, encode(self))

    @classmethod
    def read(cls, run_folder: Path) -> ConnectAddress | None:
        """Return the recorded address if its server answers; None if the record is missing or stale."""
        try:
            address = read_note(cls, run_folder / _FILE)
        except (OSError, Unreadable):
            return None
        return address if socket_answers(Path(address.socket)) else None

    @staticmethod
    def forget(run_folder: Path) -> None:
        # No failpoint: tells what runs now; nothing in it outlives a restart.
        (run_folder / _FILE).unlink(missing_ok=True)


def by_socket(url: str) -> bool:
    """Whether ``url`` names a Unix socket, as the URL of a ``ConnectAddress`` does."""
    return _SOCKET in parse_qs(url.partition("/;")[2], separator=";")


def socket_channel(url: str, session_id: str) -> DefaultChannelBuilder:
    """Return PySpark's channel to a server whose ``url`` names a Unix socket.

    ``session_id``: the session that the client uses on the server, a UUID.
    """
    import grpc  # type: ignore[import-untyped]
    from pyspark.sql.connect.client import DefaultChannelBuilder

    class SocketChannelBuilder(DefaultChannelBuilder):
        def toChannel(self) -> grpc.Channel:
            credentials = grpc.composite_channel_credentials(
                grpc.local_channel_credentials(grpc.LocalConnectionType.UDS),
                grpc.access_token_call_credentials(self.token),
            )
            return self._secure_channel(f"unix:{path}", credentials)

    # A session belongs to one user. The variables from which PySpark takes the user's name differ between our
    # processes.
    builder = SocketChannelBuilder(f"{url};session_id={session_id};user_id={_USER}")
    # Every call would send the parameters that are left here.
    path = builder._params.pop(_SOCKET)
    return builder
