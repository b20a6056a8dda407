"""``materialize``: take what has landed through every layer, without a daemon."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from omnisupport_ingest.cli.counted import counted
from omnisupport_ingest.cli.one_pass import one_pass
from omnisupport_ingest.cli.opening import open_home, open_settings
from omnisupport_ingest.cli.stopping import interrupt_on_terminate


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the runs as one JSON document.")
def materialize(as_json: bool) -> None:
    """Take everything that has landed through every layer, by runs of the ingest jobs, and exit.

    The runs, materializations and checkpoints stand in the Dagster instance of the home: `up` shows
    them afterwards. A window is taken in whole, every table of it; what is committed already is not
    done again. The source is not needed. Does not run beside `up`, whose sensor does this work.

    \b
    Example:
      omnisupport-ingest materialize --json

    Exit code: 0 nothing is pending any more, 1 a run failed or a batch is missing, 2 usage or
    settings, 6 the platform or another pass runs on this home.
    """
    from omnisupport_ingest.stages.workspace import Workspace

    settings = open_settings()
    home = open_home(settings)
    workspace = Workspace.open(settings)
    with (
        interrupt_on_terminate(),
        one_pass(settings, home, "materialize", lambda line: click.echo(line, err=True)) as the_pass,
    ):
        runs = the_pass.materialize(workspace)
    if as_json:
        click.echo(json.dumps({"runs": [asdict(run) for run in runs]}, indent=2))
    else:
        click.echo(f"{counted(len(runs), 'run')}. Everything that has landed is in every layer.")
