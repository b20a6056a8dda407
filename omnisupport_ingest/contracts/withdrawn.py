"""Withdrawn contracts: files in the folder ``withdrawn`` beside the contracts of a home.

A withdrawn contract becomes ``<source>.<name>.json`` there. Later ones of the same name replace no file: they
become ``<source>.<name>.2.json``, ``<source>.<name>.3.json`` and so on. The highest number counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from omnisupport_ingest.contracts.expression_syntax import closing_after
from omnisupport_ingest.contracts.in_force import in_force
from omnisupport_ingest.contracts.load import load_contract
from omnisupport_ingest.contracts.model import ContractError, TableContract
from omnisupport_ingest.settings import Settings


def withdrawn_folder(settings: Settings) -> Path:
    """Return the folder of withdrawn files, which is beside the contracts of the home."""
    return in_force(settings).contracts.parent / "withdrawn"


def withdrawn_contracts(
    settings: Settings, there: Iterable[TableContract], source: str
) -> tuple[TableContract, ...]:
    """Return the newest withdrawn contract of each name of ``source`` that none of ``there`` has.

    ``there``: the contracts in force. Raises ``ContractError`` if a file of the source is not a contract.
    """
    files = [path for path in _files(settings) if path.name.startswith(f"{source}.")]
    with closing_after():
        return _newest([load_contract(path) for path in files], there)


def readable_withdrawn(settings: Settings, there: Iterable[TableContract]) -> tuple[TableContract, ...]:
    """Return the withdrawn contracts of all sources as ``withdrawn_contracts`` does, and skip files that are
    not contracts: for work that must go on whatever is in the folder."""
    found = []
    with closing_after():
        for path in _files(settings):
            with suppress(ContractError):
                found.append(load_contract(path))
    return _newest(found, there)


def free_path(folder: Path, name: str, file: Path) -> Path:
    """Return the path at which ``file`` goes into ``folder`` as ``name``. An existing file has this path only
    if both files are the same."""
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


def _files(settings: Settings) -> list[Path]:
    return sorted(withdrawn_folder(settings).glob("*.*.json"), key=_number)


def _newest(withdrawn: Iterable[TableContract], there: Iterable[TableContract]) -> tuple[TableContract, ...]:
    found = {(each.source, each.name): each for each in withdrawn}
    known = {(each.source, each.name) for each in there}
    return tuple(found[each] for each in sorted(found.keys() - known))
