"""Requests to an object store, and bytes, of a batch and of a pass through the layers.

Between the program and an S3 server of this machine (moto) is a proxy that counts. Nothing here depends on
how fast either is.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import click

from bench.landed import Mix, Tickets, now
from bench.report import write_result
from omnisupport_ingest.contracts.in_force import record_in_force
from omnisupport_ingest.home import Home
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.runtime.environment import settings_environment
from omnisupport_ingest.settings import Settings
from omnisupport_ingest_tests.storage.faulty_proxy import FaultyProxy, Passed, faulty_proxy
from omnisupport_ingest_tests.storage.s3_server import reserved_port, s3_server

_SOURCE = "support_desk"
_MANY = 10
"""Batches of the pass that takes in several."""


@dataclass(frozen=True)
class Traffic:
    """``puts``: with copies within the store and parts of uploads."""

    puts: float
    lists: float
    gets: float
    heads: float
    deletes: float
    sent: float
    received: float

    @classmethod
    def of(cls, passed: Sequence[Passed]) -> Traffic:
        counts = Counter("LIST" if "list-type=2" in each.path else each.method for each in passed)
        return cls(
            puts=counts["PUT"] + counts["POST"],
            lists=counts["LIST"],
            gets=counts["GET"],
            heads=counts["HEAD"],
            deletes=counts["DELETE"],
            sent=sum(each.sent for each in passed),
            received=sum(each.received for each in passed if each.method != "HEAD"),
        )

    @classmethod
    def middle(cls, of: Sequence[Traffic]) -> Traffic:
        return cls(**{name: median(getattr(each, name) for each in of) for name in asdict(of[0])})

    def __str__(self) -> str:
        return (
            f"{self.puts:4.0f} PUT {self.lists:3.0f} LIST {self.gets:4.0f} GET {self.heads:4.0f} HEAD "
            f"{self.deletes:3.0f} DELETE, {self.sent / 1e3:8.0f} kB there, {self.received / 1e3:8.0f} kB back"
        )


class Counted:
    """A home in a bucket behind the proxy, and what each step on it asks of the store."""

    def __init__(self, settings: Settings, proxy: FaultyProxy, seed: int) -> None:
        self._settings, self._proxy = settings, proxy
        home = Home.open(settings.home, settings.window_size, storage=settings.storage)
        record_in_force(settings, home)
        workspace = Workspace.open(settings)
        self._stream = Tickets(workspace.landing(_SOURCE), workspace.grid, seed, Mix())

    def land(self, changes: int, batches: int = 1) -> Traffic:
        """Land ``batches`` of ``changes`` each; of one of them on average."""
        seen = len(self._proxy.passed)
        for _ in range(batches):
            self._stream.land(changes, now())
        found = asdict(Traffic.of(self._proxy.passed[seen:]))
        return Traffic(**{name: value / batches for name, value in found.items()})

    def take_in(self) -> Traffic:
        """A pass, in a process of its own as each run of the platform is."""
        seen = len(self._proxy.passed)
        subprocess.run(
            [sys.executable, "-m", "omnisupport_ingest.cli.main", "materialize"],
            env={**os.environ, **settings_environment(self._settings)},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        return Traffic.of(self._proxy.passed[seen:])


@click.command()
@click.option("--changes", default=1_000, show_default=True, help="Of a batch, all of one table and window.")
@click.option("--repeats", default=3, show_default=True, help="Batches and passes that are counted.")
@click.option("--seed", default=1, show_default=True, help="Of the data.")
def main(changes: int, repeats: int, seed: int) -> None:
    """Count requests and bytes of batches and passes on an object store."""
    with (
        reserved_port() as reserved,
        s3_server(reserved.getsockname()[1]) as server,
        faulty_proxy(server.port) as proxy,
        tempfile.TemporaryDirectory(prefix="bench-requests-") as name,
    ):
        os.environ.update(server.variables | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}"})
        place = server.place()
        settings = Settings(home=Path(name) / "home", window="hourly", storage=place, _env_file=None)  # type: ignore[call-arg]
        counted = Counted(settings, proxy, seed)
        counted.land(changes)
        found = {"the first pass, which makes the tables": counted.take_in()}
        pairs = [(counted.land(changes), counted.take_in()) for _ in range(repeats)]
        batches, passes = zip(*pairs, strict=True)
        found["a batch"] = Traffic.middle(batches)
        found["a pass of one batch"] = Traffic.middle(passes)
        counted.land(changes, _MANY)
        found[f"a pass of {_MANY} batches"] = counted.take_in()
        found["a pass that finds nothing new"] = counted.take_in()
    click.echo(f"Batches of {changes:,} changes of one table, median of {repeats}:")
    result: dict[str, Any] = {"changes": changes, "seed": seed}
    for step, traffic in found.items():
        click.echo(f"  {step:38} {traffic}")
        result[step] = asdict(traffic)
    write_result("requests", result)


if __name__ == "__main__":
    main()
