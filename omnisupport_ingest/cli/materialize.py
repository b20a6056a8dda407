"""``materialize`` and ``rebuild``: take what has landed through every layer, without a daemon.

``ingest-run`` is the process of each of their runs, and of those of ``sync`` and ``replay``.

``rebuild`` converts a home of an earlier format to this format. Landing, ``raw_cdc_staging``,
``deduped_events``, quarantine and the decisions of people keep their format. The earlier ``dim_<table>`` held
net changes. It is removed first, because the current state takes its name. The earlier ``published/<table>``
stays for its readers until the new dimensions are complete. An interrupted command is continued by the next
one.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import click

from omnisupport_ingest.cli.opening import existing_home, home_of_landed, open_settings
from omnisupport_ingest.cli.render import counted, echo_json
from omnisupport_ingest.cli.stopping import interrupt_on_terminate
from omnisupport_ingest.cli.views import pass_progress
from omnisupport_ingest.durable import sync_folder
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.home import Home
from omnisupport_ingest.lake.layout import WHOLE_TABLE
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.runtime.records_lease import daemon_of
from omnisupport_ingest.settings import STORAGE_URL
from omnisupport_ingest.verify.one_pass import one_pass
from omnisupport_ingest.windows import WindowRange


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the runs as one JSON document.")
def materialize(as_json: bool) -> None:
    """Take everything that has landed through every layer, by runs of the ingest jobs, and exit.

    The Dagster instance of the home records the runs, materializations and checkpoints, so the UI of `up`
    shows them afterwards. What is committed already is not done again. The source is not needed.

    Refused while `up` runs on the home: its sensor does this work.

    \b
    Example:
      omnisupport-ingest materialize --json

    Exit code: 0 nothing is pending any more, 1 a run failed or a batch is missing, 2 usage or
    settings, 3 no home, 6 the platform or another pass runs on this home.
    """
    settings = open_settings()
    home = home_of_landed(settings)
    workspace = Workspace.open(settings)
    with (
        interrupt_on_terminate(),
        one_pass(settings, home, "materialize", pass_progress()) as the_pass,
    ):
        runs = the_pass.materialize(workspace)
    if as_json:
        echo_json({"runs": [asdict(run) for run in runs]})
    else:
        click.echo(f"{counted(len(runs), 'run')}. Everything that has landed is in every layer.")


_NET_CHANGES, _CURRENT_STATE = "dim_*", "published"
"""Folders of a source in the lake before format version 2."""


@click.command()
def rebuild() -> None:
    """Upgrade a home of an earlier version: make its dimensions again, from what has landed.

    Other commands refuse such a home and name this one. The source is not needed. Tables that the earlier
    version published can be read at their old place until the end; then they are removed. In a home of this
    version the command takes in what is pending, as `materialize` does.

    Refused while `up` runs on the home.

    \b
    Example:
      omnisupport-ingest rebuild

    Exit code: 0 every dimension is there, 1 a run failed or a batch is missing, 2 usage or settings,
    3 there is no home, 6 the platform or another pass runs on this home.
    """
    settings = open_settings()
    home = existing_home(settings, earlier=True)
    with (
        interrupt_on_terminate(),
        one_pass(settings, home, "rebuild", pass_progress()) as the_pass,
    ):
        if home.is_earlier:
            home.require_convertible()
            _remove(home, _NET_CHANGES)
            home.adopt()
        workspace = Workspace.open(settings)
        runs = the_pass.materialize(workspace)
        _require_dimensions(home, workspace)
        removed = _remove(home, _CURRENT_STATE)
    click.echo(f"{counted(len(runs), 'run')}. Every dimension is there.")
    if removed:
        click.echo("The folders of the earlier version are removed.")


class NotRebuilt(IngestError):
    """``rebuild`` could not make every dimension again, so the tables of the earlier format stay.

    Fix: Put back the contract that the message names, or see in ``omnisupport-ingest status`` what holds the
    table up; then rebuild again.
    """


def _require_dimensions(home: Home, workspace: Workspace) -> None:
    """Raise ``NotRebuilt`` if an earlier table is the only copy, because no dimension replaces it yet."""
    contracts = {(each.source, each.name): each for each in workspace.contracts}
    for source in _folders(home.lake, _CURRENT_STATE):
        for table in sorted(each for each in source.iterdir() if each.is_dir()):
            contract = contracts.get((source.parent.name, table.name))
            dimension = workspace.dimension(contract).look() if contract is not None else None
            if dimension is None or dimension.state(WHOLE_TABLE) is None:
                raise NotRebuilt(
                    f"{table} and all other tables of the earlier version stay: "
                    + ("no contract names it." if contract is None else f"dim_{table.name} was not made."),
                    fix="Put its contract back, or move the folder away; then rebuild again."
                    if contract is None
                    else "`omnisupport-ingest status` says what holds it up; then rebuild again.",
                )


def _remove(home: Home, pattern: str) -> int:
    """Remove the folders of each source that match ``pattern``; return how many."""
    folders = list(_folders(home.lake, pattern))
    for folder in folders:
        with failpoint("lake.earlier", f"{folder.parent.name}/{folder.name}"):
            shutil.rmtree(folder)
            sync_folder(folder.parent)
    return len(folders)


def _folders(lake: Path, pattern: str) -> Iterator[Path]:
    for source in sorted(lake.iterdir()):
        if source.is_dir():
            yield from sorted(each for each in source.glob(pattern) if each.is_dir())


_END_SECONDS = 20.0
"""Seconds that Dagster may take to record that the run was interrupted."""


@click.command("ingest-run", hidden=True)
@click.argument("source")
@click.argument("first")
@click.argument("last")
@click.option("--cursor", help="The newest landed batch.")
@click.option("--replay", help="Replay the windows; tags of the run, as a JSON object.")
@click.option("--tables", help="Visit these tables only, a JSON array of the names of their contracts.")
def ingest_run(
    source: str, first: str, last: str, cursor: str | None, replay: str | None, tables: str | None
) -> None:
    """Take the windows FIRST to LAST of SOURCE through every layer; print how the run ended as JSON.

    It ends when its standard input does, which the process that waits for it holds open.
    """
    threading.Thread(target=_end_with_parent, daemon=True).start()
    import dagster as dg

    from omnisupport_ingest.definitions import build_definitions
    from omnisupport_ingest.defs.direct_run import WindowRun, run_windows
    from omnisupport_ingest.defs.lost_runs import end_lost_runs

    definitions = build_definitions(Workspace.open(open_settings()))
    with dg.DagsterInstance.get() as instance:
        # Otherwise a killed run would keep the pools of its tables.
        url = os.environ.get(STORAGE_URL)
        end_lost_runs(instance, elsewhere=url is not None and daemon_of(url) is None)
        run = run_windows(
            instance,
            definitions,
            WindowRun(
                source,
                WindowRange(first, last),
                cursor,
                replay=json.loads(replay) if replay is not None else None,
                tables=json.loads(tables) if tables is not None else None,
            ),
        )
    click.echo(json.dumps(asdict(run)))


def _end_with_parent() -> None:
    # Not through sys.stdin: the thread would hold its lock when the interpreter ends, which then aborts.
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_END_SECONDS)
    os._exit(1)
