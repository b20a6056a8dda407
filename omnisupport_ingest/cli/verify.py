"""``verify``: compare the source with the lake, row by row or by checksums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from omnisupport_ingest.cli.errors import FINDINGS
from omnisupport_ingest.cli.long_look import speaking
from omnisupport_ingest.cli.opening import log_of, open_settings, open_workspace, require_source_in_use
from omnisupport_ingest.cli.render import echo_json
from omnisupport_ingest.cli.verify_checksums import verify_by_checksums
from omnisupport_ingest.cli.views import proof_document, show_proof
from omnisupport_ingest.runtime.spark import session
from omnisupport_ingest.sources.postgres.embedded.dsn import source_dsn
from omnisupport_ingest.sources.postgres.preflight.source_check import contracted_tables
from omnisupport_ingest.sources.postgres.session.connection import connect
from omnisupport_ingest.verify.proof import prove, require_progress

if TYPE_CHECKING:
    from omnisupport_ingest.layers.workspace import Workspace


@click.command()
@click.argument("name", required=False)
@click.option("--table", "tables", metavar="NAME", multiple=True, help="Compare only this table; repeatable.")
@click.option(
    "--sample",
    type=click.IntRange(min=1),
    metavar="N",
    help="Compare about N keys of each table (see above).",
)
@click.option("--full", is_flag=True, help="Compare every row and column. This is the default.")
@click.option("--checksums", is_flag=True, help="Compare by checksums of key ranges (see above).")
@click.option(
    "--repair",
    is_flag=True,
    help="Compare by checksums, and read the differing keys from the source again.",
)
@click.option("--json", "as_json", is_flag=True, help="Print counts as one JSON document, without any key.")
def verify(
    name: str | None,
    tables: tuple[str, ...],
    sample: int | None,
    full: bool,
    checksums: bool,
    repair: bool,
    as_json: bool,
) -> int:
    """Compare the source with the dimensions at one LSN.

    NAME is a captured source (`sources list`); by default the one that the settings name.

    The command takes an exact snapshot of the source and waits until the lake has reached it. So capture and
    pipeline must be running (`up`); `sync --verify` needs neither. The server keeps WAL for the snapshot only
    while it is read. The files of the dimensions are compared. If a dimension has newer events by then, these
    are applied to the source's rows first.

    --sample N chooses keys by their hash, the same keys on both sides and every time. It finds a chosen row
    that is missing in the lake, is too many there, or has another value in any column. If nothing has
    changed since, it also compares the number of live rows. It does not find another value in a row that
    was not chosen. The source reads each table once, with a sample too.

    --checksums asks the server for counts and checksums of key ranges, and works out the same of the lake's
    files: no row is sent. Ranges that differ are cut until the keys are known, and looked at again at a later
    LSN before they count. Rows that have changed meanwhile are left out. What cannot be compared now is said
    to be so, with the reason. What is equal, and at which LSN, is kept: `status`, `report` and the checks
    show it. OMNISUPPORT_VERIFY_MINUTES has the platform do this by itself.

    --repair does the same, and requests a snapshot of just the keys that differ; a running capture begins
    within a second. It lands as ordinary batches.

    For each table up to 20 differing keys are printed, with the names of the columns, never a value. A key
    may be personal data; --json prints none.

    \b
    Example:
      omnisupport-ingest verify --table tickets --sample 5000 --json
      omnisupport-ingest verify --repair

    Exit code: 0 nothing differs, 1 something differs or cannot be compared now, 2 usage or
    settings, 3 no home, 4 the source does not answer, 5 the source is not set up.
    """
    if full and sample is not None:
        raise click.UsageError("--full and --sample exclude each other.")
    by_checksums = checksums or repair
    if by_checksums and (full or sample is not None):
        raise click.UsageError("--checksums and --repair compare every row: leave --full and --sample out.")
    settings = log_of(open_settings(), name)
    workspace = open_workspace(settings)
    _require_tables(workspace, tables)
    # Checked before anything slow: the connection string may be wrong.
    connect(source_dsn(settings, workspace.home)).close()
    require_progress(workspace)
    if by_checksums:
        return verify_by_checksums(workspace, tables, repair=repair, as_json=as_json)
    with speaking():
        proof = prove(workspace, lambda: session(settings), tables=tables, sample=sample)
    if as_json:
        echo_json(proof_document(proof))
    else:
        show_proof(proof)
    return 0 if proof.holds else FINDINGS


def _require_tables(workspace: Workspace, tables: Sequence[str]) -> None:
    """Raise an error if no contract names the source, or one of ``tables`` is none of its contracts."""
    require_source_in_use(workspace.settings, workspace.contracts)
    source = workspace.settings.source
    known = [contract.name for contract in contracted_tables(workspace.contracts, source)]
    for name in tables:
        if name not in known:
            raise click.UsageError(
                f"{name!r} is no table of the source {source}. Its tables: {', '.join(known)}."
            )
