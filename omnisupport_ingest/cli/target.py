"""``target``: tables of another PostgreSQL that follow the current state of tables in the lake."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from omnisupport_ingest.cli.errors import FINDINGS
from omnisupport_ingest.cli.opening import open_workspace, tables_named
from omnisupport_ingest.cli.render import Commands, clock, counted, echo_json, span
from omnisupport_ingest.targets.sync import TargetLag, sync_target, target_lag

if TYPE_CHECKING:
    from omnisupport_ingest.contracts.model import TableContract
    from omnisupport_ingest.layers.workspace import Workspace


@click.group(cls=Commands)
def target() -> None:
    """Keep tables of another PostgreSQL up to date (x-cdc.target of contracts), and show how far they are."""


@target.command()
@click.argument("tables", nargs=-1)
@click.option("--compare", is_flag=True, help="Compare every row, not only the changed ones.")
@click.option("--anew", is_flag=True, help="Write the state of the lake, even if the target has a later one.")
@click.option("--json", "as_json", is_flag=True, help="Print what was done as one JSON document.")
def sync(tables: tuple[str, ...], compare: bool, anew: bool, as_json: bool) -> None:
    """Bring the targets of TABLES (by default all that have one) to the current state of the lake.

    Each target is written in one transaction, which also records the version of the lake's table. A second
    call writes nothing. The daemon of `up` does the same whenever a current state has changed.

    \b
    Example:
      omnisupport-ingest target sync tickets

    Exit code: 0 done; 1 no current state yet; 2 usage, settings, no target or connection; 3 no home;
    4 the target does not answer; 5 it must be changed, or has a later state.
    """
    workspace = open_workspace()
    contracts = _with_target(workspace, tables)
    if not contracts:
        raise click.UsageError("No contract names a target (x-cdc.target): see docs/targets.md.")
    done = [sync_target(workspace, contract, compare=compare, anew=anew) for contract in contracts]
    if as_json:
        echo_json([asdict(each) for each in done])
        return
    for each in done:
        new = f", new columns {', '.join(each.added)}" if each.added else ""
        click.echo(
            f"{each.table} → {each.target}: {counted(each.written, 'row')} written, {each.deleted:,} "
            f"deleted, at version {each.delta_version}{new}."
        )


@target.command()
@click.argument("tables", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def status(tables: tuple[str, ...], as_json: bool) -> int:
    """Show how far the targets of TABLES (by default all that have one) are behind the lake.

    \b
    Example:
      omnisupport-ingest target status tickets

    Exit code: 0 every target has the rows of the lake; 1 one lacks some, or has a problem; 2 usage,
    settings or no target; 3 no home.
    """
    workspace = open_workspace()
    contracts = _with_target(workspace, tables)
    lags = [target_lag(workspace, contract) for contract in contracts]
    if as_json:
        click.echo(json.dumps([asdict(each) for each in lags], indent=2, default=str))
    elif not lags:
        click.echo("No contract names a target.")
    else:
        for each in lags:
            click.echo(f"{each.table} → {each.target}: {_lag(each)}")
    # No number of rows: a problem, or another history, of which only a sync knows what is missing.
    return 0 if all(each.rows == 0 for each in lags) else FINDINGS


def _lag(lag: TargetLag) -> str:
    if lag.problem is not None:
        return f"{lag.problem} Fix: {lag.fix}"
    if lag.synced_at is None:
        return f"never synced; {counted(lag.rows or 0, 'row')} to write."
    if lag.versions is None or lag.rows is None:
        return "it has another history than the lake: the next sync compares every row."
    age = "" if lag.seconds is None else f", {span(lag.seconds)}"
    behind = f"{counted(lag.versions, 'version')}, {counted(lag.rows, 'row')}{age} behind"
    return f"{behind}; synced {clock(lag.synced_at)} up to {lag.position}."


def _with_target(workspace: Workspace, tables: tuple[str, ...]) -> list[TableContract]:
    """Return the contracts called ``tables``; without names, all that have a target."""
    return tables_named(workspace, tables) or [
        each for each in workspace.contracts.all if each.target is not None
    ]
