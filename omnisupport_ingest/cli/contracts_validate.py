"""Reading a folder of contracts to the end, whatever is wrong with some of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from omnisupport_ingest.contracts.load import (
    ContractError,
    Contracts,
    TableContract,
    contract_paths,
    load_contract,
)


@dataclass(frozen=True, slots=True)
class Reading:
    """The contracts of ``folder`` that can be used, by source and name, and every problem found."""

    folder: Path
    contracts: Contracts
    problems: tuple[ContractError, ...]


def read_all(folder: Path) -> Reading:
    """Read every contract file of ``folder``; ``ContractError`` if it is no folder or holds none."""
    read: list[TableContract] = []
    problems: list[ContractError] = []
    for path in contract_paths(folder):
        try:
            read.append(load_contract(path))
        except ContractError as error:
            problems.append(error)
    try:
        return Reading(folder, Contracts(tuple(read)), tuple(problems))
    except ContractError:
        usable, clashes = _that_go_together(read)
        return Reading(folder, usable, (*problems, *clashes))


def _that_go_together(contracts: list[TableContract]) -> tuple[Contracts, list[ContractError]]:
    """Contracts may each be valid and clash: the first of two counts, the other is a problem."""
    usable, clashes = Contracts(()), []
    for contract in contracts:
        try:
            usable = Contracts((*usable, contract))
        except ContractError as error:
            clashes.append(error)
    return usable, clashes


def show(found: Reading) -> None:
    """List the contracts, then the problems on standard error."""
    rows = [
        (
            f"{contract.source}.{contract.name}",
            contract.full_name,
            contract.version,
            f"{len(contract.columns)} column{'s' * (len(contract.columns) != 1)}",
            f"key {', '.join(contract.key)}",
        )
        for contract in found.contracts
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(4)] if rows else []
    for *cells, key in rows:
        click.echo("  ".join([*(f"{cell:{width}}" for cell, width in zip(cells, widths, strict=True)), key]))
    for problem in found.problems:
        click.echo(f"Error: {problem}", err=True)
    if not found.problems:
        click.echo(f"{len(found.contracts)} contracts in {found.folder} are valid.")
    else:
        click.echo(
            f"{len(found.contracts)} contracts in {found.folder} are valid, {len(found.problems)} are not."
        )


def document(found: Reading) -> dict[str, Any]:
    """The reading as JSON."""
    return {
        "folder": str(found.folder),
        "contracts": [
            {
                "source": contract.source,
                "name": contract.name,
                "table": contract.full_name,
                "version": contract.version,
                "columns": len(contract.columns),
                "key": list(contract.key),
                "path": contract.path,
                "fingerprint": contract.fingerprint,
            }
            for contract in found.contracts
        ],
        "problems": [{"problem": each.problem, "fix": each.fix} for each in found.problems],
    }
