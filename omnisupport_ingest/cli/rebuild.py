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

import click

from omnisupport_ingest.cli.counted import counted
from omnisupport_ingest.cli.one_pass import one_pass
from omnisupport_ingest.cli.opening import existing_home, open_settings
from omnisupport_ingest.cli.stopping import interrupt_on_terminate
from omnisupport_ingest.durable import sync_folder
from omnisupport_ingest.failpoints import gate
from omnisupport_ingest.home import Home

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
        runs = the_pass.materialize(Workspace.open(settings))
        removed = _remove(home, _CURRENT_STATE)
    click.echo(f"{counted(len(runs), 'run')}. Every dimension is there.")
    if removed:
        click.echo("The folders of the earlier version are removed.")


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
