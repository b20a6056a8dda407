"""``target``: tables of a warehouse that follow the current state of tables of the lake."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from omnisupport_ingest.cli.opening import existing_home, open_settings

if TYPE_CHECKING:
    from omnisupport_ingest.contracts.model import TableContract
    from omnisupport_ingest.stages.workspace import Workspace


@click.group()
def target() -> None:
    """Tables in another PostgreSQL that follow the current state: contracts name them in x-cdc.target."""


@target.command()
@click.argument("tables", nargs=-1)
@click.option("--compare", is_flag=True, help="Compare every row, not only those that changed since.")
@click.option("--anew", is_flag=True, help="Take the lake as it is, though the target has a later state.")
@click.option("--json", "as_json", is_flag=True, help="Print what was done as one JSON document.")
def sync(tables: tuple[str, ...], compare: bool, anew: bool, as_json: bool) -> None:
    """Write to the targets of TABLES (all that have one) what they lack.

    Each in one transaction, with the version of the lake's table that it has then. Repeating it writes
    nothing. The daemon of `up` does the same whenever a current state has changed.

    \b
    Example:
      omnisupport-ingest target sync tickets

    Exit code: 0 done; 1 no current state yet; 2 usage, settings, no target or connection; 3 no home;
    4 the target does not answer; 5 it must be changed, or has a later state.
    """
    from omnisupport_ingest.targets.sync import sync_target

    workspace, contracts = _chosen(tables)
    done = [sync_target(workspace, contract, compare=compare, anew=anew) for contract in contracts]
    if as_json:
        click.echo(json.dumps([asdict(each) for each in done], indent=2))
        return
    for each in done:
        got = f", new columns {', '.join(each.added)}" if each.added else ""
        click.echo(
            f"{each.table} → {each.target}: {each.written:,} rows written, {each.deleted:,} deleted, at "
            f"version {each.delta_version}{got}."
        )


@target.command()
@click.argument("tables", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="Print it as one JSON document.")
def status(tables: tuple[str, ...], as_json: bool) -> int:
    """Show how far the targets of TABLES (all that have one) are behind the lake.

    \b
    Example:
      omnisupport-ingest target status tickets

    Exit code: 0 shown; 1 a target has a problem; 2 usage, settings or no target; 3 no home.
    """
    from omnisupport_ingest.targets.sync import target_lag

    workspace, contracts = _chosen(tables)
    lags = [target_lag(workspace, contract) for contract in contracts]
    if as_json:
        click.echo(json.dumps([asdict(each) for each in lags], indent=2, default=str))
    for each in lags if not as_json else ():
        if each.problem is not None:
            said = f"{each.problem} Fix: {each.fix}"
        elif each.synced_at is None:
            said = f"never synced; {each.rows or 0:,} rows wait"
        elif each.versions is None or each.rows is None:
            said = "another past than the lake's: the next sync compares every row"
        else:
            behind = "" if each.seconds is None else f", {each.seconds:,.0f} s"
            said = f"{each.versions} versions, {each.rows:,} rows{behind} behind"
            said += f"; synced {each.synced_at:%Y-%m-%d %H:%M:%S} up to {each.position}"
        click.echo(f"{each.table} → {each.target}: {said}.".replace("..", "."))
    return 1 if any(each.problem is not None for each in lags) else 0


def _chosen(tables: tuple[str, ...]) -> tuple[Workspace, list[TableContract]]:
    """The contracts called ``tables``; without a name, all that have a target."""
    from omnisupport_ingest.contracts.model import table_named
    from omnisupport_ingest.stages.workspace import Workspace

    settings = open_settings()
    existing_home(settings)
    workspace = Workspace.open(settings)
    named = [table_named(each, workspace.contracts.all) for each in tables]
    return workspace, named or [each for each in workspace.contracts.all if each.target is not None]
