"""``demo``: the main job from an empty folder to a proved result, a step at a time.

Each step is a function that may find its work done already: a demo that was interrupted goes on.
"""

from __future__ import annotations

import os
import shlex
import sys
from typing import Any

import click
from rich.console import Console

from omnisupport_ingest.cli import services
from omnisupport_ingest.cli.clean import remove_home
from omnisupport_ingest.cli.demo_run import Demo, progress
from omnisupport_ingest.cli.opening import open_home, open_settings
from omnisupport_ingest.cli.stopping import interrupt_on_terminate
from omnisupport_ingest.contracts.in_force import recorded
from omnisupport_ingest.contracts.load import default_contracts_dir
from omnisupport_ingest.home import HomeMismatch
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
@click.option(
    "--domain",
    metavar="NAME",
    help="What to demonstrate: `support_desk` or `social`. Each has a home of its own, unless "
    "OMNISUPPORT_HOME names one.  [default: what the home has, else support_desk]",
)
@click.option("--fresh", is_flag=True, help="Remove the home first and begin again.")
def demo(changes: int, seed: int, domain: str | None, fresh: bool) -> int:
    """Run the main job end to end on an embedded PostgreSQL, and prove the result.

    \b
    Examples:
      omnisupport-ingest demo --fresh --changes 5000
      omnisupport-ingest demo --domain social

    Exit code: 0 nothing differs, 1 a difference or a named problem, 2 usage or settings, 3 the home has
    another domain, 4 Java or PostgreSQL is missing, 6 the home is in use, 7 a service failed.
    """
    console = Console(highlight=False)
    there = Settings(**_place_of(domain))
    if there.source_dsn is not None:
        raise click.UsageError(
            "demo makes tables and changes rows: it runs on the embedded PostgreSQL only. "
            "Unset OMNISUPPORT_SOURCE_DSN."
        )
    if fresh and _exists(there):
        remove_home(open_home(open_settings(**_place_of(domain))))
    asked = _asked(domain)
    if not _exists(there) and "window" not in there.model_fields_set:
        # The size of the windows is fixed when a home is made.
        asked["window"] = WINDOW
    settings = open_settings(**asked)
    home = open_home(settings)
    # Without --domain, the next command finds the home as this one did.
    found = settings.home == Settings().home
    again = "" if found else f"OMNISUPPORT_HOME={shlex.quote(os.path.relpath(home.path))} "
    with (
        interrupt_on_terminate(),
        HomeLock(home, "demo"),
        Supervisor(home, report=console.print) as supervisor,
    ):
        return run(Demo(settings, home, supervisor, console, changes, seed, again))


def _place_of(domain: str | None) -> dict[str, Any]:
    """The setting that says where the home of the domain so called is, unless the environment says it."""
    from omnisupport_ingest.demo.domains import domain_called, home_of

    if domain is None or "home" in Settings().model_fields_set:
        return {}
    return {"home": home_of(domain_called(domain))}


def _asked(domain: str | None) -> dict[str, Any]:
    """The settings that ``--domain`` stands for; ``HomeMismatch`` if the home has landed another one."""
    from omnisupport_ingest.demo.domains import DEFAULT, domain_called

    place = _place_of(domain)
    if domain is None:
        return place
    chosen, given = domain_called(domain), Settings(**place)
    there = recorded(given)
    if there is None:
        folder = given.contracts_dir or default_contracts_dir(chosen.contracts)
        return place | {"source": chosen.name, "contracts_dir": folder}
    has = there.source or DEFAULT.name
    if has != chosen.name:
        folder = given.home.expanduser().absolute()
        raise HomeMismatch(
            f"The home {folder} has the source {has}, and --domain is {chosen.name}: a home is demonstrated "
            "with what it has.",
            fix=f"Leave OMNISUPPORT_HOME out, or name another folder by it: {chosen.name} gets a home of its "
            f"own. Or leave --domain out, to go on with {has}.",
        )
    return place | {"source": chosen.name}


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
    """A real PostgreSQL with the domain in it."""
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
    from omnisupport_ingest.demo.workload import Workload
    from omnisupport_ingest.sources.postgres.session.dsn import source_dsn

    traffic = Workload(demo.domain, source_dsn(demo.settings, demo.home), demo.seed)
    with progress(demo.console) as bar:
        row = bar.add_task(f"Changing {demo.domain.title}", total=demo.changes)

        def changed(done: int) -> None:
            bar.update(row, completed=min(done, demo.changes))
            demo.supervisor.check()

        traffic.run(demo.changes, _WORKLOAD_SECONDS, on_progress=changed)


def say_what_to_do_next(demo: Demo) -> None:
    """Where the lake is, how to see the graph, and one line that reads a dimension."""
    table = demo.home.lake / demo.settings.source / f"dim_{demo.domain.shown}"
    query = f"import deltalake; print(deltalake.DeltaTable('{table}').to_pandas().head())"
    demo.console.print(f"\nLake:     {demo.home.lake}", soft_wrap=True)
    again = demo.again
    demo.console.print(f"See it:   {again}make up   (or: {again}omnisupport-ingest up)", soft_wrap=True)
    # Not `python`: which one that is, and whether it has deltalake, nobody knows.
    python = shlex.quote(sys.executable)
    demo.console.print(f'Query it: {python} -c "{query}"', soft_wrap=True, markup=False)
