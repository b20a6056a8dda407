"""``ingest-run``: one run of the ingest job, in a process of its own, for ``sync`` and ``materialize``.

A process per run, as Dagster has it: what a run leaves behind in memory ends with it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from dataclasses import asdict

import click

from omnisupport_ingest.cli.opening import open_settings

_END_SECONDS = 20.0
"""How long Dagster may take to record that the run was interrupted."""


@click.command("ingest-run", hidden=True)
@click.argument("source")
@click.argument("first")
@click.argument("last")
@click.option("--cursor", help="The newest landed batch.")
@click.option("--replay", help="Make the windows again; tags of the run, as a JSON object.")
@click.option("--table", help="The only table that is made again.")
def ingest_run(
    source: str, first: str, last: str, cursor: str | None, replay: str | None, table: str | None
) -> None:
    """Take the windows FIRST to LAST of SOURCE through every layer; print how the run ended as JSON.

    Ends when its standard input does, which the process that waits for it holds open.
    """
    threading.Thread(target=_end_with_parent, daemon=True).start()
    import dagster as dg

    from omnisupport_ingest.definitions import build_definitions
    from omnisupport_ingest.defs.direct_run import run_windows
    from omnisupport_ingest.defs.lost_runs import end_lost_runs
    from omnisupport_ingest.stages.workspace import Workspace
    from omnisupport_ingest.windows import WindowRange

    definitions = build_definitions(Workspace.open(open_settings()))
    with dg.DagsterInstance.get() as instance:
        # A killed run would keep the pools of its tables for itself.
        end_lost_runs(instance)
        run = run_windows(
            instance,
            definitions,
            source,
            WindowRange(first, last),
            cursor,
            replay=json.loads(replay) if replay is not None else None,
            table=table,
        )
    click.echo(json.dumps(asdict(run)))


def _end_with_parent() -> None:
    # Not through sys.stdin: its lock would be held when the interpreter ends, which then aborts.
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_END_SECONDS)
    os._exit(1)
