"""Make homes for measurements: many tables, many windows, and runs of the ingest job as commands start
them."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import dagster as dg

from bench.bulk import Bulk
from omnisupport_ingest.contracts.load import default_contracts_dir
from omnisupport_ingest.definitions import build_definitions
from omnisupport_ingest.defs import keys
from omnisupport_ingest.defs.direct_run import WindowRun, run_windows
from omnisupport_ingest.layers.scheduling.pending import pending_windows
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.runtime.dagster_home import STORING
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.windows import WindowRange

SOURCE = "support_desk"


@dataclass
class ManyTables:
    """A home with tables of the schema of the desk's tickets, and their stream; runs go through Dagster."""

    workspace: Workspace
    instance: dg.DagsterInstance
    definitions: dg.Definitions
    stream: Bulk
    log: Path

    def land(self, table: int, changes: int, at: datetime) -> None:
        """Insert ``changes`` new keys of one table."""
        self.stream.table = table_name(table)
        self.stream.fill(changes, at)

    def run(
        self, first: str, last: str, *, tables: Collection[str] | None = None, replay: bool = False
    ) -> float:
        """One run of the ingest job, or of the replay job, over windows; its seconds. ``tables``: those that
        it visits, None for all."""
        tags: Mapping[str, str] | None = {keys.REASON_TAG: "bench"} if replay else None
        windows, began = WindowRange(first, last), time.perf_counter()
        newest = self.workspace.landing(SOURCE).landed().last
        cursor = newest.batch_id if newest is not None else None
        # What Dagster says of every step is for whom a run has failed.
        with self.log.open("a") as log, redirect_stderr(log):
            done = run_windows(
                self.instance,
                self.definitions,
                WindowRun(SOURCE, windows, None if replay else cursor, replay=tags, tables=tables),
            )
        if not done.succeeded:
            raise RuntimeError(str(done.failures))
        return time.perf_counter() - began

    def taken_in(self) -> tuple[float, float]:
        """Seconds of a look for what is pending, and of the runs that take it in."""
        looked = ran = 0.0
        while True:
            began = time.perf_counter()
            pending = pending_windows(self.workspace, SOURCE)
            looked += time.perf_counter() - began
            if pending.nothing:
                return looked, ran
            ran += self.run(pending.windows[0], pending.windows[-1], tables=pending.tables)


def table_name(number: int) -> str:
    return f"tickets_{number:03}"


@contextmanager
def many_tables(
    folder: Path,
    tables: int,
    *,
    window: str,
    first_window: datetime,
    seed: int = 1,
    policy: Mapping[str, object] | None = None,
) -> Iterator[ManyTables]:
    """A home in ``folder`` with ``tables`` tables, of which nothing has landed. ``policy``: what their
    contracts say beside what those of the desk do."""
    contracts = folder / "contracts"
    contracts.mkdir(parents=True)
    document = json.loads((default_contracts_dir() / "tickets.json").read_text())
    for number in range(tables):
        names = {"table": table_name(number), "source": SOURCE}
        told = document["x-cdc"] | names | dict(policy or {})
        (contracts / f"{table_name(number)}.json").write_text(json.dumps(document | {"x-cdc": told}))
    settings = Settings(
        home=folder / "home",
        window=window,
        first_window=first_window,
        contracts_dir=contracts,
        _env_file=None,
    )
    workspace = Workspace.open(settings)
    (folder / "dagster").mkdir()
    # Records as the platform keeps them.
    kept = {"module": STORING, "class": "KeptSqliteStorage", "config": {"base_dir": str(folder / "dagster")}}
    settings_of_dagster = {"telemetry": {"enabled": False}, "storage": {"custom": kept}}
    with dg.DagsterInstance.local_temp(str(folder / "dagster"), overrides=settings_of_dagster) as instance:
        stream = Bulk(workspace.landing(SOURCE), workspace.grid, seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", dg.BetaWarning)
            definitions = build_definitions(workspace)
        yield ManyTables(workspace, instance, definitions, stream, folder / "runs.log")


def this_minute() -> datetime:
    return datetime.now(UTC).replace(second=0, microsecond=0)
