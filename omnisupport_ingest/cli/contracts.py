"""``contracts``: look at the table contracts."""

from __future__ import annotations

import click

from omnisupport_ingest.cli.opening import open_settings


@click.group()
def contracts() -> None:
    """Check the table contracts."""


@contracts.command()
def validate() -> None:
    """Read every contract; the first problem is told with its file, its place and the fix."""
    from omnisupport_ingest.contracts.load import default_contracts_dir, load_contracts

    folder = open_settings().contracts_dir or default_contracts_dir()
    found = load_contracts(folder)
    for contract in found:
        click.echo(
            f"{contract.source}.{contract.full_name}  {contract.version}  {len(contract.columns)} columns"
        )
    click.echo(f"{len(found)} contracts in {folder} are valid.")
