"""``verify``: is the lake the same as the source, row by row?"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from omnisupport_ingest.cli.opening import open_settings
from omnisupport_ingest.cli.source_opening import log_of
from omnisupport_ingest.errors import IngestError

if TYPE_CHECKING:
    from omnisupport_ingest.stages.workspace import Workspace

NOT_THE_SAME = 1
"""Exit code when a difference was found."""

SAMPLE = 1000
"""Keys per table that a sample holds unless another number is asked for."""


@click.command()
@click.argument("name", required=False)
@click.option(
    "--table", "tables", metavar="NAME", multiple=True, help="Compare this table alone; repeatable."
)
@click.option(
    "--sample",
    type=click.IntRange(min=1),
    metavar="N",
    help="Compare about N keys of each table (see above).",
)
@click.option("--full", is_flag=True, help="Compare every row and column. This is the default.")
@click.option("--json", "as_json", is_flag=True, help="Print counts as one JSON document, without any key.")
def verify(name: str | None, tables: tuple[str, ...], sample: int | None, full: bool, as_json: bool) -> int:
    """Compare the source with the dimensions at one LSN.

    NAME is a log of the home (`sources list`); without it, that of the settings.

    Takes an exact snapshot of the source and waits until the lake is there, so capture and pipeline
    must be running (`up`); `sync --verify` brings the lake there by itself. A temporary slot holds WAL
    back while the snapshot is read, no longer. It is always the dimensions' files that are compared: where
    a table has moved on meanwhile, with the source's rows after the events since.

    --sample N chooses keys by their hash, on both sides alike: the same keys each time, so it finds
    a chosen row that is missing in the lake, is too many there, or has another value in any column;
    and the number of live rows is compared where nothing has changed since. It cannot find another
    value in a row that was not chosen. The source still reads each table once.

    Up to 20 differing keys of each table are printed, with the names of the columns, never a value;
    a key may be personal data. --json prints no key.

    \b
    Example:
      omnisupport-ingest verify --table tickets --sample 5000 --json

    Exit code: 0 nothing differs, 1 something differs or the lake did not get there, 2 usage or
    settings, 4 the source does not answer, 5 the source is not set up.
    """
    from omnisupport_ingest.cli.proof import print_proof, proof_document, prove
    from omnisupport_ingest.runtime.spark import session
    from omnisupport_ingest.sources.postgres.session.connection import connect
    from omnisupport_ingest.sources.postgres.session.dsn import source_dsn
    from omnisupport_ingest.stages.workspace import Workspace

    if full and sample is not None:
        raise click.UsageError("--full and --sample exclude each other.")
    settings = log_of(open_settings(), name)
    workspace = Workspace.open(settings)
    require_tables(workspace, tables)
    # Before anything that takes time: a connection string may be wrong.
    connect(source_dsn(settings, workspace.home)).close()
    require_progress(workspace)
    proof = prove(workspace, lambda: session(settings), tables=tables, sample=sample)
    if as_json:
        click.echo(json.dumps(proof_document(proof), indent=2))
    else:
        print_proof(proof)
    return 0 if proof.holds else NOT_THE_SAME


def require_tables(workspace: Workspace, tables: Sequence[str]) -> None:
    """``UsageError`` if one of ``tables`` is no contract of the source."""
    known = [contract.name for contract in workspace.contracts.of_source(workspace.settings.source)]
    for name in tables:
        if name not in known:
            raise click.UsageError(
                f"{name!r} is no table of the source {workspace.settings.source}. Its tables: "
                f"{', '.join(known) or 'none, as no contract names it'}."
            )


def require_progress(workspace: Workspace) -> None:
    """``IngestError`` if nothing runs that could bring the lake to where the source is now."""
    from omnisupport_ingest.runtime.home_lock import in_use
    from omnisupport_ingest.sources.postgres.session.errors import CaptureRunning
    from omnisupport_ingest.sources.postgres.session.lease import Lease

    if in_use(workspace.home):
        return
    try:
        Lease.take(workspace.home.run, workspace.settings.source).release()
    except CaptureRunning:
        return
    raise IngestError(
        f"Neither the platform nor a capture runs on {workspace.home.path}, so the lake would never get to "
        "where the source is now.",
        fix="Run `omnisupport-ingest sync --verify full`, or start `omnisupport-ingest up` and verify again.",
    )
