"""Our side: a home, its contracts, and ``capture`` as a process of its own, as anybody runs it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click

from omnisupport_ingest.cli.contracts_new import NewContracts, write_contracts
from omnisupport_ingest.landing.manifest import Manifest
from omnisupport_ingest.landing.rows import LandedEvent
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.landing.tail import events_of
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.settings import PREFIX, Settings
from parity.server import Server
from parity.tables import PUBLISHED, SCHEMA, WITHOUT_KEY

SLOT = PUBLICATION = "parity_ours"
SOURCE = "parity"
FILES, TOPICS = "parity_files", "parity_topics"
"""The sources of Debezium's records, each in a home of its own."""

_SETUP_SECONDS = 120
_STOP_SECONDS = 30


@dataclass(frozen=True, slots=True)
class Ours:
    """A home of ours. ``source``: the one in it that is compared."""

    home: Path
    contracts: Path
    source: str
    variables: Mapping[str, str]

    @property
    def settings(self) -> Settings:
        named = {name.removeprefix(PREFIX).lower(): value for name, value in self.variables.items()}
        return Settings(_env_file=None, **named)  # type: ignore[arg-type]

    def on(self, remote: str) -> Ours:
        """Return this home, its commands with their session on the Spark server ``remote``."""
        return replace(self, variables={**self.variables, f"{PREFIX}SPARK_REMOTE": remote})

    def run(self, *arguments: str, seconds: float) -> None:
        """One of our commands, to its end; ``ClickException`` with what it said if it fails."""
        done = subprocess.run(
            _command(*arguments),
            env=os.environ | self.variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds,
        )
        if done.returncode:
            said = "\n".join(done.stdout.splitlines()[-25:])
            raise click.ClickException(f"omnisupport-ingest {' '.join(arguments)}: {done.returncode}\n{said}")

    def landed(self) -> list[tuple[Manifest, LandedEvent]]:
        """Every landed change with its batch, in the order of positions; no rows of snapshots."""
        store = LandingStore(self.home / "landing", self.source)
        batches = [each for each in store.manifests() if each.stream is not None]
        return [(batch, event) for batch in batches for event in events_of(store, batch)]


def home_of(server: Server, name: str, source: str) -> Ours:
    """A new home called ``name``, with contracts of all tables that can have one for ``source``."""
    folder = server.folder / name
    contracts = folder / "contracts"
    variables = {
        "HOME": str(folder / "home"),
        "CONTRACTS_DIR": str(contracts),
        # The source that is captured; files go into any other.
        "SOURCE": SOURCE,
        "SOURCE_DSN": server.dsn,
        "SLOT": SLOT,
        "PUBLICATION": PUBLICATION,
        "BATCH_MAX_SECONDS": "0.5",
        "SPARK_DRIVER_MEMORY": "1g",
    }
    variables = {PREFIX + each: value for each, value in variables.items()}
    found = Ours(folder / "home", contracts, source, variables)
    tables = [f"{SCHEMA}.{each}" for each in PUBLISHED if each != WITHOUT_KEY]
    settings = found.settings.model_copy(update={"source": source})
    outcomes = write_contracts(NewContracts(settings, tables, None, owner="team:parity"))
    for each in outcomes:
        if each.status != "written":
            raise click.ClickException(f"No contract of {each.table}: {each.problem}")
    return found


@dataclass(frozen=True, slots=True)
class Following:
    """A capture that follows the source."""

    process: subprocess.Popen[bytes]
    ours: Ours
    log: Path

    def wait(self, until: Lsn, seconds: float) -> None:
        """Until everything below ``until`` has landed; then it is stopped."""
        store = LandingStore(self.ours.home / "landing", self.ours.source)
        deadline = time.monotonic() + seconds
        while not _landed(store, until):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise click.ClickException(f"Our capture did not get to {until}; see {self.log}")
            time.sleep(0.2)
        self.process.send_signal(signal.SIGTERM)
        if self.process.wait(_STOP_SECONDS):
            raise click.ClickException(f"Our capture ended with {self.process.returncode}; see {self.log}")

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def start(server: Server, ours: Ours) -> Following:
    """Make slot, epoch and snapshots of the empty tables; then follow."""
    ours.run("capture", "--once", seconds=_SETUP_SECONDS)
    log = server.folder / "capture.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            _command("capture"),
            env=os.environ | ours.variables,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    return Following(process, ours, log)


def _command(*arguments: str) -> Sequence[str]:
    return [sys.executable, "-m", "omnisupport_ingest.cli.main", *arguments]


def _landed(store: LandingStore, until: Lsn) -> bool:
    epoch = store.current_epoch()
    last = store.last_stream(epoch.number) if epoch is not None else None
    return last is not None and last.stream is not None and last.stream.end_lsn >= until
