"""Where the warm Spark Connect server of a home is reached, and how a client is sure that it is that server.

A client of Spark Connect sends its token to whatever listens on the server's port, and after a stop the
port is anybody's. So clients know no port: they are given a Unix socket in a folder that only the owner of
the home can enter, and behind it ``connect_server.py`` takes them to the process that it has started, no
other.
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
    """The address of a server: the path of its Unix socket, and the token that it asks its clients for."""

    socket: str
    token: str

    def __repr__(self) -> str:
        return f"ConnectAddress(socket={self.socket!r})"

    @property
    def url(self) -> str:
        """The address as ``OMNISUPPORT_SPARK_REMOTE`` takes it; the token is in it."""
        return f"sc://localhost/;{_SOCKET}={quote(self.socket, safe='')};token={self.token}"

    def write(self, run_folder: Path) -> None:
        """Record the address in ``run_folder``, readable by the owner only."""
        with failpoint("runtime.file"):
            replace(run_folder / _FILE, encode(self))

    @classmethod
    def read(cls, run_folder: Path) -> ConnectAddress | None:
        """The recorded address if its server is there; nothing if the record is missing or stale."""
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
    """Whether ``url`` names a Unix socket, as that of a ``ConnectAddress`` does."""
    return _SOCKET in parse_qs(url.partition("/;")[2], separator=";")


def socket_channel(url: str, session_id: str) -> DefaultChannelBuilder:
    """Make the channel to a server whose ``url`` names a Unix socket, for PySpark.

    ``session_id``: the session of the server that its client is to have, a UUID.
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

    # A session is one user's; the variables that PySpark takes a name from differ between our processes.
    builder = SocketChannelBuilder(f"{url};session_id={session_id};user_id={_USER}")
    # What stays among the parameters would be sent along with every call.
    path = builder._params.pop(_SOCKET)
    return builder
