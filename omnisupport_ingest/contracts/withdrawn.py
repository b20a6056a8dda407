"""Withdrawn contracts: files in the folder ``withdrawn`` beside the contracts of a home.

The file of a contract is ``<source>.<name>.json`` there. One that is withdrawn later under the same name
replaces none: it is ``<source>.<name>.2.json``, the next ``.3.json``. The highest number counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from omnisupport_ingest.contracts.expressions import closing_after
from omnisupport_ingest.contracts.in_force import in_force
from omnisupport_ingest.contracts.load import load_contract
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.settings import Settings


def withdrawn_folder(settings: Settings) -> Path:
    """Return where the files of what was withdrawn are: beside the contracts of the home."""
    return in_force(settings).contracts.parent / "withdrawn"


def withdrawn_contracts(settings: Settings, there: Iterable[TableContract]) -> tuple[TableContract, ...]:
    """Return the newest withdrawn contract of each source and name that none of ``there`` has.

    ``there``: the contracts in force. ``ContractError`` if a file is not a contract.
    """
    known = {(each.source, each.name) for each in there}
    found = {}
    with closing_after():
        for path in sorted(withdrawn_folder(settings).glob("*.*.json"), key=_number):
            contract = load_contract(path)
            found[contract.source, contract.name] = contract
    return tuple(found[each] for each in sorted(found.keys() - known))


def free_path(folder: Path, name: str, file: Path) -> Path:
    """Return where ``file`` goes in ``folder`` as ``name``; over a file that is there only if both are the
    same.
    """
    taken = sorted((*folder.glob(f"{name}.json"), *folder.glob(f"{name}.*.json")), key=_number)
    if not taken:
        return folder / f"{name}.json"
    newest = taken[-1]
    if newest.read_bytes() == file.read_bytes():
        return newest
    return folder / f"{name}.{_number(newest) + 1}.json"


def is_numbered(path: Path) -> bool:
    """Whether ``path``, as ``free_path`` returns it, is not the first file of its name."""
    return path.stem.rpartition(".")[2].isdecimal()


def _number(path: Path) -> int:
    return int(path.stem.rpartition(".")[2]) if is_numbered(path) else 1
