"""Capture of the same changes with personal values encrypted, beside capture with them plain.

The changes are those of ``bench.capture``. Two of 13 columns are personal, the long one among them. By
``--subject customer_id`` every ticket is of a subject of its own, so that every insert makes a key, which is
the worst case; by ``organization_id`` 977 subjects share the tickets.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import click

from bench.capture import UNREAD, copy_slot, end_of_wal
from bench.report import Run, alternate, conclude
from bench.source import SLOT, Source, change_tickets, source
from omnisupport_ingest.contracts.load import default_contracts_dir
from omnisupport_ingest.position import Lsn

FLOOR = 0.6


@click.command()
@click.option("--changes", default=1_000_000, show_default=True, help="Changes to capture.")
@click.option("--repeats", default=2, show_default=True, help="Runs of each.")
@click.option("--subject", default="customer_id", show_default=True, help="The column that says whose it is.")
def main(changes: int, repeats: int, subject: str) -> None:
    """Compare encrypted with plain capture on the same slot content."""
    with source() as server:
        click.echo(f"Making {changes:,} changes …", err=True)
        plain = _contracts(server.folder / "plain", subject=None)
        encrypted = _contracts(server.folder / "encrypted", subject=subject)
        server.capture(server.folder / "home", end_of_wal(server), plain)
        copy_slot(server, SLOT, UNREAD)
        made = change_tickets(server, changes)
        until = end_of_wal(server)
        result = alternate(
            made,
            repeats,
            "plain",
            lambda: _captured(server, until, plain),
            lambda: _captured(server, until, encrypted),
        )
    conclude(f"encrypted_by_{subject}", "Encrypted capture", result, floor=FLOOR, memory_limit=None)


def _captured(server: Source, until: Lsn, contracts: Path) -> Run:
    copy_slot(server, UNREAD, SLOT)
    home = server.folder / "continued"
    shutil.copytree(server.folder / "home", home)
    server.settle()
    run = server.capture(home, until, contracts)
    shutil.rmtree(home)
    return run


def _contracts(folder: Path, *, subject: str | None) -> Path:
    """The support desk's contracts in ``folder``, with tickets encrypted unless ``subject`` is null."""
    shutil.copytree(default_contracts_dir(), folder)
    path = folder / "tickets.json"
    document: dict[str, Any] = json.loads(path.read_text())
    for name in document["x-cdc"]["pii"]:
        document["properties"][name]["type"] = ["string", "null"]
    document["required"] = [name for name in document["required"] if name not in document["x-cdc"]["pii"]]
    if subject is not None:
        document["x-cdc"]["at_rest"] = {"pii": "encrypted", "subject": "asker", "subject_column": subject}
    path.write_text(json.dumps(document))
    return folder


if __name__ == "__main__":
    main()
