"""``demo``: the main job from an empty folder to a proved result, a step at a time.

Each step is a function that may find its work done already: a demo that was interrupted goes on.
"""

from __future__ import annotations

import shlex
import sys

import click
from rich.console import Console

from omnisupport_ingest.cli import services
from omnisupport_ingest.cli.clean import remove_home
from omnisupport_ingest.cli.demo_run import Demo, progress
from omnisupport_ingest.cli.opening import open_home, open_settings
from omnisupport_ingest.cli.stopping import interrupt_on_terminate
from omnisupport_ingest.runtime.dagster_services import start_dagster_without_ui
from omnisupport_ingest.runtime.home_lock import HomeLock
from omnisupport_ingest.runtime.spark_connect import stop_spark_connect
from omnisupport_ingest.runtime.supervisor import Supervisor
from omnisupport_ingest.settings import Settings

WINDOW = "minutes:1"
"""Windows of a minute: the workload crosses at least two of them while a person waits."""

_WORKLOAD_SECONDS = 65.0
"""Long enough to reach into a second window wherever in a minute it begins."""


@click.command()
@click.option(
    "--changes",
    type=click.IntRange(min=120),
    default=50_000,
    show_default=True,
    help="Row changes that the workload commits.",
)
@click.option("--seed", type=int, default=services.SEED, show_default=True, help="Same seed, same changes.")
@click.option("--fresh", is_flag=True, help="Remove the home first and begin again.")
def demo(changes: int, seed: int, fresh: bool) -> int:
    """Run the main job end to end on an embedded PostgreSQL, and prove the result.

    \b
    Example:
      omnisupport-ingest demo --fresh --changes 5000

    Exit code: 0 nothing differs, 1 a difference or a named problem, 2 usage or settings, 4 Java or
    PostgreSQL is missing, 6 the home is in use, 7 a service failed.
    """
    console = Console(highlight=False)
    settings = open_settings()
    if settings.source_dsn is not None:
        raise click.UsageError(
            "demo makes tables and changes rows: it runs on the embedded PostgreSQL only. "
            "Unset OMNISUPPORT_SOURCE_DSN."
        )
    home = open_home(settings) if _exists(settings) else None
    if home is not None and fresh:
        remove_home(home)
        home = None
    if home is None:
        # The size of the windows is fixed when a home is made.
        chosen = Settings()
        window = chosen.window if "window" in chosen.model_fields_set else WINDOW
        settings = open_settings(window=window)
        home = open_home(settings)
    with (
        interrupt_on_terminate(),
        HomeLock(home, "demo"),
        Supervisor(home, report=console.print) as supervisor,
    ):
        return run(Demo(settings, home, supervisor, console, changes, seed))


def _exists(settings: Settings) -> bool:
    return (settings.home.expanduser() / "home.json").exists()


def run(demo: Demo) -> int:
    """All steps in order; the exit code is 0 only if the proof found no difference."""
    from omnisupport_ingest.cli import demo_pipeline, proof

    try:
        start_the_source(demo)
        start_capture(demo)
        start_spark(demo)
        start_dagster(demo)
        run_the_workload(demo)
        replay = demo_pipeline.start_a_replay(demo)
        demo_pipeline.wait_for_the_sensor(demo)
        demo_pipeline.finish_the_replay(demo, replay)
        result = demo_pipeline.prove_the_result(demo)
    finally:
        stop_spark_connect(demo.supervisor, demo.home)
    proof.print_proof(result)
    say_what_to_do_next(demo)
    return 0 if result.holds else 1


def start_the_source(demo: Demo) -> None:
    """A real PostgreSQL with the support desk in it."""
    services.start_source(demo.supervisor, demo.settings, demo.home, seed=demo.seed)


def start_capture(demo: Demo) -> None:
    """Publication, slot, changes and snapshots: a process of its own."""
    demo.console.print("Starting capture: the WAL, and the snapshots beside it …")
    demo.supervisor.start(services.capture(demo.settings))


def start_spark(demo: Demo) -> None:
    """One warm Spark for all runs."""
    services.start_spark(demo.supervisor, demo.settings, demo.home)


def start_dagster(demo: Demo) -> None:
    """The definitions and sensors that `up` shows, without the UI."""
    demo.console.print("Starting Dagster: its sensor takes the batches from here …")
    start_dagster_without_ui(demo.supervisor, demo.settings, demo.home)


def run_the_workload(demo: Demo) -> None:
    """Real transactions while capture and pipeline run."""
    from omnisupport_ingest.sources.postgres.source_dsn import source_dsn
    from omnisupport_ingest.sources.postgres.support_desk.workload import Workload

    traffic = Workload(source_dsn(demo.settings, demo.home), demo.seed)
    with progress(demo.console) as bar:
        row = bar.add_task("Changing the support desk", total=demo.changes)

        def changed(done: int) -> None:
            bar.update(row, completed=min(done, demo.changes))
            demo.supervisor.check()

        traffic.run(demo.changes, _WORKLOAD_SECONDS, on_progress=changed)


def say_what_to_do_next(demo: Demo) -> None:
    """Where the lake is, how to see the graph, and one line that reads a dimension."""
    table = demo.home.lake / demo.settings.source / "dim_tickets"
    query = f"import deltalake; print(deltalake.DeltaTable('{table}').to_pandas().head())"
    demo.console.print(f"\nLake:     {demo.home.lake}", soft_wrap=True)
    demo.console.print("See it:   make up   (or: omnisupport-ingest up)")
    # Not `python`: which one that is, and whether it has deltalake, nobody knows.
    python = shlex.quote(sys.executable)
    demo.console.print(f'Query it: {python} -c "{query}"', soft_wrap=True, markup=False)
