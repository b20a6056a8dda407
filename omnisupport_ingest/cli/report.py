"""``report``: one HTML page of a home, with plots."""

from __future__ import annotations

import click

from omnisupport_ingest.cli.opening import open_workspace
from omnisupport_ingest.cli.out import Out, out_option
from omnisupport_ingest.cli.render import echo_json, size
from omnisupport_ingest.report import page


@click.command()
@out_option("Where to write the page; unset: report.html in the home.")
@click.option(
    "--batches",
    type=click.IntRange(min=1),
    default=2000,
    show_default=True,
    metavar="N",
    help="Read the newest N batches of each source.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the numbers as one JSON document instead.")
def report(out: Out | None, batches: int, as_json: bool) -> None:
    """Write one HTML page with plots: freshness, lag, latency, events, faults, growth, cost of runs.

    The page is one file that opens without a server and without a network. It is made from the manifests of
    landed batches and the tables' Delta logs, without Spark; no value of a row is in it. The Dagster asset
    `report` writes the same page to the home every hour.

    \b
    Examples:
      omnisupport-ingest report
      omnisupport-ingest report --out report.html
      omnisupport-ingest report --json | jq '.sources[].commit_to_dimension_seconds'

    Exit code: 0 done, 1 a manifest cannot be read, 2 usage or settings, 3 no home.
    """
    workspace = open_workspace()
    sources = page.collect(workspace, most=batches)
    if as_json:
        echo_json(page.document(str(workspace.home.path), sources))
        return
    path = (out or Out(workspace.home.path, is_folder=True)).file(page.FILE_NAME)
    written = page.write(workspace, path, sources)
    click.echo(f"Wrote {path} ({size(written)}). Open it in a browser.")
