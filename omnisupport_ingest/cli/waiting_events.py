"""What a pass says about events in quarantine: no dimension has them, and nothing else would show that."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omnisupport_ingest.cli.render import counted, say_err
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.review.quarantine_stock import discarded_of, stock_of

if TYPE_CHECKING:
    from omnisupport_ingest.layers.workspace import Workspace


def say_waiting(workspace: Workspace, source: str) -> None:
    """Print on standard error how many events of ``source`` wait in quarantine, if any; counted as in
    ``status``."""
    try:
        discarded = discarded_of(workspace, source)
    except IngestError:
        # A damaged ledger is a finding of `doctor`; here no event counts as discarded.
        discarded = 0
    waiting = sum(stock_of(workspace, source).values()) - discarded
    if waiting > 0:
        verb = "waits" if waiting == 1 else "wait"
        say_err(
            f"{counted(waiting, 'event')} of {source} {verb} in quarantine for a person. See: "
            f"omnisupport-ingest quarantine list --source {source}"
        )
