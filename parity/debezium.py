"""Debezium's side: its slot and publication, its settings, and the process that its engine runs in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import click

from omnisupport_ingest.runtime.java import find_java
from parity.modes import Modes
from parity.server import Server
from parity.tables import SCHEMA

SLOT = PUBLICATION = "parity_debezium"
TOPIC = "parity"

_SETTINGS = {
    "name": "parity",
    "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
    "plugin.name": "pgoutput",
    "topic.prefix": TOPIC,
    "slot.name": SLOT,
    "publication.name": PUBLICATION,
    "publication.autocreate.mode": "disabled",
    # Both begin with empty tables; snapshots are not what is compared.
    "snapshot.mode": "no_data",
    "provide.transaction.metadata": "true",
    # By default it leaves truncates out.
    "skipped.operations": "none",
    "offset.storage": "org.apache.kafka.connect.storage.MemoryOffsetBackingStore",
    "offset.flush.interval.ms": "1000",
    "poll.interval.ms": "10",
    "key.converter.schemas.enable": "false",
    "value.converter.schemas.enable": "false",
    "header.converter.schemas.enable": "false",
    "schema.include.list": SCHEMA,
}
"""Everything else is as the connector comes, but for the modes of values where others are asked for."""


@dataclass(frozen=True, slots=True)
class Engine:
    """A running engine. ``events``: the file that its records go to. ``log``: what it says."""

    process: subprocess.Popen[bytes]
    events: Path
    log: Path

    def wait(self, seconds: float) -> None:
        """Until it has come to the end of the comparison; ``ClickException`` if it does not get there."""
        try:
            if self.process.wait(seconds) == 0:
                return
            problem = f"Debezium's engine has ended with exit code {self.process.returncode}."
        except subprocess.TimeoutExpired:
            self.stop()
            problem = f"Debezium's engine did not come to the end within {seconds:.0f} s."
        raise click.ClickException(f"{problem} Its log: {self.log}\n{_tail(self.log)}")

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def start(server: Server, modes: Modes, broker: str | None) -> Engine:
    """Start the engine on its slot, which is there already, with ``modes`` for its values.

    ``broker``: the address that its records go to, too; None: only to the file.
    """
    reach = server.reach
    settings, events = server.folder / "debezium.json", server.folder / "debezium.jsonl"
    properties = {
        **_SETTINGS,
        **modes.settings,
        "database.hostname": reach.host,
        "database.port": str(reach.port),
        "database.user": reach.user,
        "database.password": reach.password,
        "database.dbname": reach.database,
    }
    settings.touch(mode=0o600)
    settings.write_text(json.dumps(properties))
    java = find_java(server.folder)
    libjvm = next(java.real.rglob("libjvm.*"))
    log = server.folder / "debezium.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "parity.engine", str(settings), str(events), str(libjvm)),
                *(() if broker is None else (broker,)),
            ],
            stdout=output,
            stderr=subprocess.STDOUT,
            # Its library writes logs into the working directory, and takes settings from there.
            cwd=_working_directory(server.folder),
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
        )
    return Engine(process, events, log)


def _working_directory(folder: Path) -> Path:
    found = folder / "debezium"
    found.mkdir()
    return found


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-15:])
