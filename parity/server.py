"""The database that both read: an embedded server that Debezium's driver can reach as well.

The driver speaks TCP alone. So the server listens on a loopback address of its own, by chance, where it
wants the password of one role; everybody else goes through the socket.
"""

from __future__ import annotations

import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from psycopg2.extensions import connection as Connection

from omnisupport_ingest.sources.postgres.embedded.files import PORT, Location
from omnisupport_ingest.sources.postgres.embedded.server import DATABASE, EmbeddedPostgres
from omnisupport_ingest.sources.postgres.session.connection import connect

ROLE = "debezium"

_RULES = """\
local  all  all                    trust
host   all  {role}  127.0.0.0/8    scram-sha-256
"""


@dataclass(frozen=True, slots=True)
class Reach:
    """How Debezium's driver reaches the server."""

    host: str
    port: int
    database: str
    user: str
    password: str


@dataclass(frozen=True, slots=True)
class Server:
    """A running server, and ``folder`` that everything of this run is in."""

    dsn: str
    folder: Path
    reach: Reach

    def connect(self) -> Connection:
        """A new session, each statement a transaction of its own until one is begun."""
        return connect(self.dsn, application_name="parity")

    def execute(self, *statements: str) -> list[tuple[Any, ...]]:
        """Run statements, each in a transaction of its own; the rows of the last one."""
        with closing(self.connect()) as connection, connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)
            return cursor.fetchall() if cursor.description else []


@contextmanager
def server(keep: Path | None) -> Iterator[Server]:
    """A new server; it and, unless ``keep`` names it, its folder are gone afterwards."""
    if keep is not None:
        keep.mkdir(parents=True, mode=0o700)
    folder = keep.absolute() if keep is not None else Path(tempfile.mkdtemp(prefix="omnisupport-parity-"))
    postgres = EmbeddedPostgres(folder / "postgres")
    try:
        yield _reachable(postgres, folder)
    finally:
        postgres.destroy()
        if keep is None:
            shutil.rmtree(folder)


def _reachable(postgres: EmbeddedPostgres, folder: Path) -> Server:
    postgres.start()
    # An address by chance, as the port is always the same; macOS has only one.
    numbers = [secrets.randbelow(250) + 1 for _ in range(3)]
    host = "127." + ".".join(map(str, numbers)) if sys.platform == "linux" else "127.0.0.1"
    password = secrets.token_urlsafe()
    found = Server(postgres.dsn(), folder, Reach(host, PORT, DATABASE, ROLE, password))
    found.execute(
        f"ALTER SYSTEM SET listen_addresses = '{host}'",
        f"CREATE ROLE {ROLE} LOGIN SUPERUSER PASSWORD '{password}'",
    )
    location = Location.read(postgres.folder)
    assert location is not None
    (location.data / "pg_hba.conf").write_text(_RULES.format(role=ROLE))
    postgres.stop()
    postgres.start()
    return found
