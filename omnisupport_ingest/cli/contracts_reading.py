"""``contracts validate``: every contract of a folder, and every problem of one, or of several together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from omnisupport_ingest.cli.render import counted, say_err
from omnisupport_ingest.cli.render import table as show_table
from omnisupport_ingest.contracts.in_force import refuse_other_subjects
from omnisupport_ingest.contracts.load import (
    ContractError,
    Contracts,
    TableContract,
    contract_paths,
    load_contract,
)
from omnisupport_ingest.contracts.quality_document import reference_problems
from omnisupport_ingest.contracts.sources import sources_in
from omnisupport_ingest.contracts.way_in import way_problems
from omnisupport_ingest.wording import agreeing

if TYPE_CHECKING:
    from omnisupport_ingest.settings import Settings


@dataclass(frozen=True, slots=True)
class Reading:
    """The usable contracts of ``folder``, by source and name, and every problem found."""

    folder: Path
    contracts: Contracts
    problems: tuple[ContractError, ...]


def read_all(folder: Path, settings: Settings) -> Reading:
    """Read every contract file of ``folder``. Raises ``ContractError`` if it is no folder or has no
    contract."""
    read: list[TableContract] = []
    problems: list[ContractError] = []
    for path in contract_paths(folder):
        try:
            read.append(load_contract(path))
        except ContractError as error:
            problems.append(error)
    # Two valid contracts may clash: then the first counts, and the other is a problem.
    usable = Contracts(())
    for contract in read:
        try:
            usable = Contracts((*usable, contract))
        except ContractError as error:
            problems.append(error)
    problems += reference_problems(usable)
    try:
        refuse_other_subjects(settings, usable)
    except ContractError as error:
        problems.append(error)
    try:
        problems += way_problems(usable, sources_in(folder.absolute().parent / "sources", settings, usable))
    except ContractError as error:
        # A definition is wrong, so it is unknown how the tables of its source are read.
        problems.append(error)
    return Reading(folder, usable, tuple(problems))


def show_reading(reading: Reading) -> None:
    """Print the contracts, then the problems on standard error."""
    rows = [
        [
            f"{contract.source}.{contract.name}",
            contract.full_name,
            contract.version,
            str(len(contract.columns)),
            ", ".join(contract.key),
        ]
        for contract in reading.contracts
    ]
    if rows:
        show_table(["contract", "table", "version", "columns", "key"], rows, right=("columns",))
    for problem in reading.problems:
        say_err(f"Error: {problem}")
    number, wrong = len(reading.contracts), len(reading.problems)
    read = f"{counted(number, 'contract')} in {reading.folder}"
    # A contract that can be read may have a problem with its source or with another one, or several.
    if wrong:
        click.echo(f"{read} can be read; there {agreeing(wrong, 'is', 'are')} {counted(wrong, 'problem')}.")
    else:
        click.echo(f"{read} {agreeing(number, 'is', 'are')} valid.")


def reading_document(reading: Reading) -> dict[str, Any]:
    """Return what ``show_reading`` prints, as JSON values."""
    return {
        "folder": str(reading.folder),
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
            for contract in reading.contracts
        ],
        "problems": [{"problem": each.problem, "fix": each.fix} for each in reading.problems],
    }
