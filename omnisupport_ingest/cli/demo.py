"""``demo``: the main job, step by step, from an empty folder to a proven result.

A step may find its work done already, so an interrupted demo continues. The steps move no data themselves:
the services and the daemon do, as under ``up``. The steps start them, wait for them, and compare.
"""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from omnisupport_ingest.cli.demo_settings import (
    home_overrides,
    new_home_overrides,
    require_of_a_demo,
    settings_of,
    settings_of_new_home,
)
from omnisupport_ingest.cli.errors import FINDINGS
from omnisupport_ingest.cli.home import remove_home
from omnisupport_ingest.cli.opening import existing_home, has_home, open_home, open_settings
from omnisupport_ingest.cli.render import progress_bar
from omnisupport_ingest.cli.stopping import interrupt_on_terminate
from omnisupport_ingest.cli.views import show_proof
from omnisupport_ingest.demo.domains import embedded_domain
from omnisupport_ingest.demo.workload import Workload
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.home import Home
from omnisupport_ingest.layers.scheduling.pending import Pending, pending_windows
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.runtime.dagster_home import dagster_environment
from omnisupport_ingest.runtime.dagster_services import start_dagster_without_ui, stop_dagster
from omnisupport_ingest.runtime.home_lock import HomeLock
from omnisupport_ingest.runtime.spark import session
from omnisupport_ingest.runtime.spark_connect import stop_spark_connect
from omnisupport_ingest.runtime.standalone import start_standalone
from omnisupport_ingest.runtime.supervisor import Supervisor
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.sources.postgres.embedded.dsn import embedded_server, source_dsn
from omnisupport_ingest.sources.postgres.session.server import current_wal_lsn
from omnisupport_ingest.verify import services
from omnisupport_ingest.verify.again import (
    StartedReplay,
    changed_tables,
    contents,
    differing,
    make_again,
    replayable,
    start_replay,
)
from omnisupport_ingest.verify.proof import Proof, prove

if TYPE_CHECKING:
    from dagster import DagsterInstance

    from omnisupport_ingest.demo.domain import Domain

_WORKLOAD_SECONDS = 65.0
"""Duration of the workload, long enough to reach a second window."""

_STEP_SECONDS = 600.0
"""The longest time that a step waits for the daemon."""

_LOOK_SECONDS = 0.5


class DemoStuck(IngestError):
    """The demo cannot go on: a step took too long, a replay failed or changed content, or landing has a gap.

    Fix: Read the logs that the message names, then run ``demo`` again: it goes on where it stopped.
    """


@dataclass(frozen=True)
class Demo:
    """One run of the demo: where it works, and what it does."""

    settings: Settings
    home: Home
    supervisor: Supervisor
    changes: int
    """Number of row changes that the workload commits."""
    seed: int
    again: str
    """What a person must type before the next command, so that it finds this home."""
    workers: int | None = None
    """Number of workers of the cluster that Spark runs on; None: Spark runs as the settings say."""

    @property
    def domain(self) -> Domain[Any]:
        """The domain of the embedded server of the home."""
        return embedded_domain(self.settings)

    @property
    def workspace(self) -> Workspace:
        return Workspace.open(self.settings)


@click.command()
@click.option(
    "--changes",
    type=click.IntRange(min=120),
    default=50_000,
    show_default=True,
    help="Row changes that the workload commits.",
)
@click.option("--seed", type=int, default=services.SEED, show_default=True, help="Same seed, same changes.")
@click.option(
    "--domain",
    metavar="NAME",
    help="Database to use: `support_desk` or `social`. Each has its own home, unless OMNISUPPORT_HOME "
    "names one.  [default: that of the home, else support_desk]",
)
@click.option(
    "--cluster",
    "workers",
    type=click.IntRange(1, 8),
    metavar="WORKERS",
    help="Run Spark as a cluster of this machine, with so many worker processes, and compare every content "
    "hash with what one machine makes of the same batches.",
)
@click.option("--fresh", is_flag=True, help="Remove the home first and begin again.")
def demo(changes: int, seed: int, domain: str | None, workers: int | None, fresh: bool) -> int:
    """Run the main job end to end on an embedded PostgreSQL, and compare source and lake at the end.

    It starts PostgreSQL, capture, Spark and Dagster, changes rows, replays a window, and stops everything.
    A demo that was interrupted goes on where it stopped.

    \b
    Examples:
      omnisupport-ingest demo --fresh --changes 5000
      omnisupport-ingest demo --domain social
      omnisupport-ingest demo --cluster 2 --changes 5000

    Exit code: 0 nothing differs, 1 a difference or a named problem, 2 usage or settings, 3 the home has
    another domain, or only tables of no demo, 4 Java or PostgreSQL is missing, or the home is of another
    server, 6 the home is in use, 7 a service failed.
    """
    home_settings = Settings(**home_overrides(domain))
    if home_settings.source_dsn is not None:
        raise click.UsageError(
            "demo makes tables and changes rows: it runs on the embedded PostgreSQL only. "
            "Unset OMNISUPPORT_SOURCE_DSN."
        )
    if fresh and has_home(home_settings):
        settings = open_settings(**home_overrides(domain))
        # Nothing is recorded in it any more, as it goes.
        home = existing_home(settings)
        require_of_a_demo(home)
        embedded_server(settings, home)  # raises if the source was captured from another server
        # Before anything is removed, as it may refuse.
        overrides = settings_of_new_home(domain)
        remove_home(home)
    else:
        overrides = settings_of(domain)
    if not has_home(home_settings):
        overrides |= new_home_overrides(home_settings)
    settings = open_settings(**overrides)
    home = open_home(settings)
    embedded_server(settings, home)  # raises if the source was captured from another server
    # If the next command finds the home by itself, nothing must be typed before it.
    again = (
        ""
        if settings.home == Settings().home
        else f"OMNISUPPORT_HOME={shlex.quote(os.path.relpath(home.path))} "
    )
    with (
        interrupt_on_terminate(),
        HomeLock(home, "demo"),
        Supervisor(home, report=click.echo) as supervisor,
    ):
        return run(Demo(settings, home, supervisor, changes, seed, again, workers))


def run(demo: Demo) -> int:
    """Run all steps in order. Returns the exit code: 0 only if the comparison found no difference."""
    try:
        demo = start_the_cluster(demo)
        services.launch_spark(demo.supervisor, demo.settings, demo.home)
        start_the_source(demo)
        start_capture(demo)
        services.start_spark(demo.supervisor, demo.settings, demo.home, click.echo)
        start_dagster(demo)
        run_the_workload(demo)
        replay = replay_a_window(demo)
        wait_for_the_sensor(demo)
        finish_the_replay(demo, replay)
        result = prove_the_result(demo)
    finally:
        stop_dagster(demo.supervisor)
        stop_spark_connect(demo.supervisor, demo.home)
    show_proof(result)
    same = demo.workers is None or compare_with_one_machine(demo)
    say_what_to_do_next(demo)
    return 0 if result.holds and same else FINDINGS


def start_the_cluster(demo: Demo) -> Demo:
    """Start a Spark master and workers, if requested; return the demo that runs on them."""
    if demo.workers is None:
        return demo
    click.echo(f"Starting a Spark cluster of {demo.workers} worker processes …")
    settings = start_standalone(demo.supervisor, demo.settings, demo.home, demo.workers)
    return replace(demo, settings=settings)


def start_the_source(demo: Demo) -> None:
    """Start a real PostgreSQL with the domain in it."""
    services.start_source(demo.supervisor, demo.settings, demo.home, click.echo, seed=demo.seed)


def start_capture(demo: Demo) -> None:
    """Start capture, a process of its own, which makes publication and slot."""
    click.echo("Starting capture: the WAL, and the snapshots beside it …")
    demo.supervisor.start(services.capture(demo.settings))


def start_dagster(demo: Demo) -> None:
    """Start the definitions and sensors that `up` shows, without the UI."""
    click.echo("Starting Dagster: its sensor takes the batches from here …")
    start_dagster_without_ui(demo.supervisor, demo.settings, demo.home)


def run_the_workload(demo: Demo) -> None:
    """Commit real transactions while capture and pipeline run."""
    traffic = Workload(demo.domain, source_dsn(demo.settings, demo.home), demo.seed)
    with progress_bar() as bar:
        row = bar.add_task(f"Changing {demo.domain.title}", total=demo.changes)

        def changed(done: int) -> None:
            bar.update(row, completed=min(done, demo.changes))
            demo.supervisor.check()

        traffic.run(demo.changes, _WORKLOAD_SECONDS, on_progress=changed)


def replay_a_window(demo: Demo) -> StartedReplay:
    """Launch a partition backfill of a finished window, through every layer."""
    from omnisupport_ingest.definitions import build_definitions
    from omnisupport_ingest.defs.backfills import Backfill, launch_backfill

    workspace, source = demo.workspace, demo.settings.source

    def complete() -> bool:
        pending_or_stuck(workspace, source)
        return bool(replayable(workspace, source))

    _wait(demo, complete, "the first window in every layer")
    graph = build_definitions(workspace).resolve_asset_graph()
    with _instance(demo) as instance:

        def launch(window: str) -> str:
            reason = "demo: replay of a finished window"
            return launch_backfill(instance, graph, Backfill(source, [window], reason))

        replay = start_replay(workspace, source, launch)
    click.echo(f"Backfill {replay.backfill_id}: replaying window {replay.window} through every layer …")
    return replay


def wait_for_the_sensor(demo: Demo) -> None:
    """Wait until everything that the source has committed by now is in every layer."""
    workspace = demo.workspace
    target = current_wal_lsn(source_dsn(demo.settings, demo.home))
    with progress_bar() as bar:
        row = bar.add_task("Sensor runs: batches in every layer", total=None)

        def done() -> bool:
            pending = pending_or_stuck(workspace, demo.settings.source)
            bar.update(row, completed=pending.landed - pending.batches, total=pending.landed)
            landed = pending.stream_end
            return landed is not None and landed >= target and pending.nothing

        _wait(demo, done, "the sensor's runs")


def finish_the_replay(demo: Demo, replay: StartedReplay) -> None:
    """Wait for the backfill. Raises ``DemoStuck`` if it failed or changed the content of a table."""
    from omnisupport_ingest.defs.backfills import backfill_status

    with _instance(demo) as instance:
        _wait(demo, lambda: backfill_status(instance, replay.backfill_id).finished, "the backfill")
        status = backfill_status(instance, replay.backfill_id)
    if not status.succeeded:
        raise DemoStuck(
            f"Backfill {replay.backfill_id} ended as {status.status}: {status.error or 'see its runs'}.",
            fix="Open the UI (omnisupport-ingest up), page Backfills, and read the log of its runs.",
        )
    changed = changed_tables(demo.workspace, replay)
    if changed:
        raise DemoStuck(
            f"The replay of window {replay.window} changed the content of {', '.join(changed)}.",
            fix="This must not happen: keep the home, and report it with the logs below it.",
        )
    click.echo(f"Replay of {replay.window}: {len(replay.before)} tables, every content hash as before.")


def prove_the_result(demo: Demo) -> Proof:
    """Compare source and dimensions at one LSN, row by row; capture and sensor continue meanwhile."""
    click.echo("Comparing source and dimensions at one LSN …")
    spark = session(demo.settings)
    try:
        return prove(demo.workspace, lambda: spark)
    finally:
        # If a session is still open when its server ends, closing it is retried for minutes.
        spark.stop()


def compare_with_one_machine(demo: Demo) -> bool:
    """Stop everything, make the same batches again with `local[2]`, and compare every content hash."""
    demo.supervisor.stop()
    click.echo("\nStopped. Making the same batches again on one machine, Spark local[2] …")
    one_machine = {"spark_master": "local[2]", "spark_properties": None}
    with failpoint("runtime.file"), tempfile.TemporaryDirectory(prefix="one-", dir=demo.home.run) as folder:
        again = make_again(demo.settings, demo.home, Path(folder, "home"), **one_machine)
    on_cluster = contents(demo.settings)
    different = differing(on_cluster, again.contents)
    windows = len({window for _, window in on_cluster if window})
    click.echo(
        f"Cluster of {demo.workers} workers and one machine: {len(on_cluster)} content hashes of "
        f"{len({table for table, _ in on_cluster})} tables in {windows} windows, "
        + (f"{len(different)} differ:" if different else "every one the same.")
    )
    for each in different:
        click.echo(f"  {each}")
    return not different


def say_what_to_do_next(demo: Demo) -> None:
    """Print where the lake is, how to see the graph, and a command that reads a dimension."""
    table = demo.home.lake / demo.settings.source / f"dim_{demo.domain.shown}"
    query = f"import deltalake; print(deltalake.DeltaTable('{table}').to_pandas().iloc[:5, :4])"
    click.echo(f"\nLake:     {demo.home.lake}")
    click.echo(f"See it:   {demo.again}make up   (or: {demo.again}omnisupport-ingest up)")
    # Not `python`: that may be another interpreter, without deltalake.
    click.echo(f'Query it: {shlex.quote(sys.executable)} -c "{query}"')


def pending_or_stuck(workspace: Workspace, source: str) -> Pending:
    """Return what is not committed yet. Raises ``DemoStuck`` if a gap means that it never will be."""
    pending = pending_windows(workspace, source)
    # If a later epoch has repaired the gap, the platform continues.
    if pending.gap is not None and not pending.gap.is_repaired:
        raise DemoStuck(str(pending.gap), fix=pending.gap.fix)
    return pending


@contextmanager
def _instance(demo: Demo) -> Iterator[DagsterInstance]:
    """Yield the Dagster instance that the demo's daemon uses."""
    os.environ.update(dagster_environment(demo.settings, demo.home))
    from dagster import DagsterInstance

    with DagsterInstance.get() as instance:
        yield instance


def _wait(demo: Demo, done: Callable[[], bool], step: str) -> None:
    deadline = time.monotonic() + _STEP_SECONDS
    while not done():
        demo.supervisor.check()
        if time.monotonic() > deadline:
            raise DemoStuck(
                f"Waited {_STEP_SECONDS:.0f} s for {step}.",
                fix=f"Read the logs in {demo.home.logs}; then run the demo again, it goes on from here.",
            )
        time.sleep(_LOOK_SECONDS)
