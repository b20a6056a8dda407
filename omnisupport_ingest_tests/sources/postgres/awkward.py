"""A server of its own over TCP, with passwords and rules, for sources that refuse."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import threading
from pathlib import Path

from psycopg2.extensions import connection as Connection
from psycopg2.extensions import make_dsn, parse_dsn

from omnisupport_ingest import failpoints
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.sources.postgres.embedded.files import Location
from omnisupport_ingest.sources.postgres.embedded.server import EmbeddedPostgres
from omnisupport_ingest.sources.postgres.session.connection import connect
from omnisupport_ingest_tests.cli.command import Done, command, environment
from omnisupport_ingest_tests.waiting import PATIENCE

SOURCE, ROLE, TLS_ROLE, PASSWORD = "shop", "capture_role", "tls_role", "s3cret-word"

_SAYS_SECONDS = PATIENCE

_RULES = f"""\
local    all  {TLS_ROLE}                scram-sha-256
local    all  all                       trust
hostssl  all  {TLS_ROLE}  127.0.0.0/8   scram-sha-256
host     all  {TLS_ROLE}  127.0.0.0/8   reject
host     all  all         127.0.0.0/8   scram-sha-256
"""


def contract_document(table: str) -> dict[str, object]:
    """A contract of ``public.<table>`` with a key and one more column."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": table.capitalize(),
        "description": f"A row of {table}.",
        "type": "object",
        "required": ["id"],
        "additionalProperties": True,
        "properties": {
            "id": {"type": "integer", "x-pg-type": "integer", "description": "Number of the row."},
            "v": {"type": ["string", "null"], "x-pg-type": "text", "description": "Its value."},
        },
        "x-cdc": {
            "version": "1.0.0",
            "source": SOURCE,
            "schema": "public",
            "table": table,
            "owner": "team:tests",
            "key": ["id"],
            "events": {"soft_delete_column": None},
            "lateness": {"allowed": "PT1H", "max": "P7D"},
            "pii": {},
        },
    }


class AwkwardServer:
    """A PostgreSQL that listens on loopback, wants passwords there, and TLS from one role."""

    def __init__(self, folder: Path) -> None:
        self.server = EmbeddedPostgres(folder)
        self.server.start()
        # An address of its own, as the port is always the same; macOS has only one.
        numbers = [secrets.randbelow(250) + 1 for _ in range(3)]
        self.host = "127." + ".".join(map(str, numbers)) if sys.platform == "linux" else "127.0.0.1"
        self.sql(f"ALTER SYSTEM SET listen_addresses = '{self.host}'", "ALTER SYSTEM SET fsync = off")
        for role in (ROLE, TLS_ROLE):
            self.sql(f"CREATE ROLE {role} LOGIN REPLICATION PASSWORD '{PASSWORD}'")
        self._data.joinpath("pg_hba.conf").write_text(_RULES)
        self.restart()

    @property
    def _data(self) -> Path:
        location = Location.read(self.server.folder)
        assert location is not None
        return location.data

    def restart(self, *, standby: bool = False) -> None:
        self.server.stop()
        signal = self._data / "standby.signal"
        if standby:
            signal.touch()
        else:
            signal.unlink(missing_ok=True)
        self.server.start()

    def admin(self, database: str = "support") -> Connection:
        return connect(self.server.dsn(database), application_name="test")

    def sql(self, *statements: str, database: str = "support") -> None:
        connection = self.admin(database)
        with connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)
        connection.close()

    @property
    def by_tcp(self) -> str:
        return f"{self.host}:5432"

    @property
    def by_socket(self) -> str:
        return str(parse_dsn(self.server.dsn())["host"]) + "/.s.PGSQL.5432"


class Shop:
    """A database with two contracted tables on an awkward server, and a home for it."""

    def __init__(self, server: AwkwardServer, folder: Path) -> None:
        self.server, self.folder = server, folder
        self.database = f"shop_{secrets.token_hex(4)}"
        self.home, self.contracts = folder / "home", folder / "contracts"
        self.contracts.mkdir(parents=True)
        server.sql(f"CREATE DATABASE {self.database} STRATEGY file_copy")
        for table in ("items", "orders"):
            self.sql(
                f"CREATE TABLE {table} (id int PRIMARY KEY, v text)",
                f"INSERT INTO {table} VALUES (1, 'one'), (2, 'two')",
                f"GRANT SELECT ON {table} TO {ROLE}, {TLS_ROLE}",
            )
            self.contract(table)
        self.sql(
            f"CREATE PUBLICATION {self.database} FOR TABLE items, orders"
            " WITH (publish_via_partition_root = true)"
        )

    def contract(self, table: str) -> None:
        (self.contracts / f"{table}.json").write_text(json.dumps(contract_document(table)))

    def sql(self, *statements: str) -> None:
        self.server.sql(*statements, database=self.database)

    def query(self, statement: str) -> list[tuple[object, ...]]:
        connection = self.server.admin(self.database)
        with connection.cursor() as cursor:
            cursor.execute(statement)
            found: list[tuple[object, ...]] = cursor.fetchall()
        connection.close()
        return found

    def dsn(self, **parts: object) -> str:
        given: dict[str, object] = {
            "host": self.server.host,
            "port": 5432,
            "user": ROLE,
            "password": PASSWORD,
            "dbname": self.database,
            "sslmode": "disable",
        }
        return str(make_dsn(**(given | parts)))

    def settings(self, dsn: str | None = None) -> dict[str, str]:
        return {
            "home": str(self.home),
            "source": SOURCE,
            "source_dsn": dsn or self.dsn(),
            "slot": self.database,
            "publication": self.database,
            "contracts_dir": str(self.contracts),
            "batch_max_seconds": "0.5",
            "window": "minutes:1",
        }

    def run(self, *arguments: str, dsn: str | None = None) -> Done:
        """Run one of our commands on this source; no password may be in what it says."""
        with environment(**self.settings(dsn)):
            done = command(*arguments)
        assert PASSWORD not in done.output
        assert "unexpected" not in done.output, done.output
        return done

    def untouched(self) -> bool:
        """Whether neither the source nor the home has anything of a capture."""
        slots = self.query(f"SELECT FROM pg_replication_slots WHERE database = '{self.database}'")
        return not slots and self.home_is_empty()

    def home_is_empty(self) -> bool:
        """Whether nothing has landed and no epoch has begun."""
        if not self.home.exists():
            return True
        store = LandingStore(self.home / "landing", SOURCE)
        note = (store.folder / "slot-being-made").exists()
        return store.current_epoch() is None and not store.batch_ids() and not note

    def landed(self) -> bool:
        """Whether both tables' snapshots, with their rows, have landed."""
        store = LandingStore(self.home / "landing", SOURCE)
        rows = {m.chunk.table: m.rows for m in store.manifests() if m.chunk and not m.chunk.boundary}
        return set(rows) == {"items", "orders"} and all(rows.values())

    def following(self, *, failpoint: str | None = None) -> Following:
        """A capture that follows, as a process of its own; it dies by SIGKILL at ``failpoint``."""
        variables = {f"OMNISUPPORT_{name.upper()}": value for name, value in self.settings().items()}
        if failpoint is not None:
            variables[failpoints.VARIABLE] = failpoint
        return Following(
            subprocess.Popen(
                [sys.executable, "-m", "omnisupport_ingest.cli.main", "capture"],
                env={**os.environ, **variables, "PYTHONUNBUFFERED": "1"},
                stderr=subprocess.PIPE,
                text=True,
            )
        )


class Following:
    """A capture that follows; what it says is read line by line, and must hold no password."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def says(self, words: str) -> None:
        """Wait until it has said ``words``, after what was waited for before; not for ever."""
        assert self.process.stderr is not None
        told: list[str] = []
        # Its end is the end of what it says.
        too_long = threading.Timer(_SAYS_SECONDS, self.process.kill)
        too_long.start()
        try:
            while words not in "".join(told):
                line = self.process.stderr.readline()
                assert line, f"it ended, or was ended, without {words!r}: {told}"
                assert PASSWORD not in line
                told.append(line)
        finally:
            too_long.cancel()

    def stop(self) -> int:
        """Tell it to stop; returns its exit code."""
        self.process.terminate()
        rest = self.process.communicate(timeout=PATIENCE)[1]
        assert PASSWORD not in rest
        return self.process.returncode


def closed_port() -> int:
    """A port of loopback that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
