"""``rebuild``: a home of an earlier format becomes one of this format, its dimensions made again.

Landing, ``raw_cdc_staging``, ``deduped_events``, quarantine and what people decided keep their form. The
earlier ``dim_<table>`` held net changes and goes first, as the current state takes its name; the earlier
``published/<table>`` stays for its readers until the new dimensions are whole. Whatever ends the command, the
next one goes on.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from omnisupport_ingest.cli.counted import counted
from omnisupport_ingest.cli.one_pass import one_pass
from omnisupport_ingest.cli.opening import existing_home, open_settings
from omnisupport_ingest.cli.stopping import interrupt_on_terminate
from omnisupport_ingest.durable import sync_folder
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.failpoints import gate
from omnisupport_ingest.home import Home
from omnisupport_ingest.lake.layout import WHOLE_TABLE

if TYPE_CHECKING:
    from omnisupport_ingest.stages.workspace import Workspace

_NET_CHANGES, _CURRENT_STATE = "dim_*", "published"
"""Folders of a source in the lake, before format version 2."""


@click.command()
def rebuild() -> None:
    """Make the dimensions of a home of an earlier version again, from what has landed.

    Commands that find such a home name this one. The source is not needed. Tables that the earlier version
    published can be read at their old place until the end; then they are removed. Does not run beside `up`.
    In a home that has nothing of an earlier version it takes in what is pending, as `materialize` does.

    \b
    Example:
      omnisupport-ingest rebuild

    Exit code: 0 every dimension is there, 1 a run failed or a batch is missing, 2 usage or settings,
    3 there is no home, 6 the platform or another pass runs on this home.
    """
    from omnisupport_ingest.stages.workspace import Workspace

    settings = open_settings()
    home = existing_home(settings, earlier=True)
    with (
        interrupt_on_terminate(),
        one_pass(settings, home, "rebuild", lambda line: click.echo(line, err=True)) as the_pass,
    ):
        if home.is_earlier:
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
    """A table of the earlier version has no dimension in its place."""


def _require_dimensions(home: Home, workspace: Workspace) -> None:
    """``NotRebuilt`` if a table that the earlier version published has no dimension: its only copy stays."""
    from omnisupport_ingest.stages.looking import look

    contracts = {(each.source, each.name): each for each in workspace.contracts}
    for source in _folders(home.lake, _CURRENT_STATE):
        for table in sorted(each for each in source.iterdir() if each.is_dir()):
            contract = contracts.get((source.parent.name, table.name))
            made = look(workspace.dimension(contract)) if contract is not None else None
            if made is None or made.state(WHOLE_TABLE) is None:
                raise NotRebuilt(
                    f"{table} stays, and all tables of the earlier version with it: "
                    + ("no contract names it." if contract is None else f"dim_{table.name} was not made."),
                    fix="Put its contract back, or move the folder away; then rebuild again."
                    if contract is None
                    else "`omnisupport-ingest status` says what holds it up; then rebuild again.",
                )


def _remove(home: Home, pattern: str) -> int:
    """Remove the folders of each source that ``pattern`` names; returns how many."""
    found = list(_folders(home.lake, pattern))
    for folder in found:
        with gate("lake.earlier", f"{folder.parent.name}/{folder.name}"):
            shutil.rmtree(folder)
            sync_folder(folder.parent)
    return len(found)


def _folders(lake: Path, pattern: str) -> Iterator[Path]:
    for source in sorted(lake.iterdir()):
        if source.is_dir():
            yield from sorted(each for each in source.glob(pattern) if each.is_dir())
