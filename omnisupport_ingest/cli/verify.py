"""``verify``: is the lake the same as the source, row by row?"""

from __future__ import annotations

import click

from omnisupport_ingest.cli.opening import open_settings

NOT_THE_SAME = 1
"""Exit code when a difference was found."""


@click.command()
def verify() -> int:
    """Compare source and dimensions at one LSN, every row and column; exit 0 if nothing differs."""
    from omnisupport_ingest.cli.proof import print_proof, prove
    from omnisupport_ingest.runtime.spark import session
    from omnisupport_ingest.stages.workspace import Workspace

    settings = open_settings()
    proof = prove(Workspace.open(settings), session(settings))
    print_proof(proof)
    return 0 if proof.holds else NOT_THE_SAME
