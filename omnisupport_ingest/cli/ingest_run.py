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
def ingest_run(source: str, first: str, last: str, cursor: str | None) -> None:
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
        run = run_windows(instance, definitions, source, WindowRange(first, last), cursor)
    click.echo(json.dumps(asdict(run)))


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_END_SECONDS)
    os._exit(1)
