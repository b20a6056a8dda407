"""Changed column types: when tables are made again under new types, and who decides it.

Values stay the source's text until they are folded, so a table can be rebuilt with any types. If the new type
holds every value of the old one, the next run rebuilds it. Any other change may be a mistake, and readers of
the table notice it, so it waits until a person requests it. Until then the table stays as it was and counts
as incomplete; other tables go on.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.foreign import Unreadable
from omnisupport_ingest.lake.schema import Retyped, SchemaChanged
from omnisupport_ingest.lake.snapshot import TableSnapshot
from omnisupport_ingest.lake.table_spec import TablePlace
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.records import decode_note, encode
from omnisupport_ingest.storage import replace, storage_of

_FOLDER = "retyped"


@dataclass(frozen=True, slots=True)
class _Request:
    """A person's request to rebuild tables. ``contract``: fingerprint of the contract that it applies to."""

    contract: str


def require_types(workspace: Workspace, contract: TableContract, snapshot: TableSnapshot) -> None:
    """Raise ``SchemaChanged`` if ``snapshot`` has columns of another type that wait for a person."""
    found = waiting(workspace, contract, snapshot)
    if found:
        raise _asks(contract, snapshot.table, found)


def waits(workspace: Workspace, contract: TableContract) -> SchemaChanged | None:
    """Return why the tables of ``contract`` wait for a person; None if they do not."""
    for table in workspace.tables_of(contract):
        if table.look() is not None and (found := waiting(workspace, contract, table.open())):
            return _asks(contract, table, found)
    return None


def other_types(workspace: Workspace, contract: TableContract) -> dict[str, tuple[Retyped, ...]]:
    """The tables of ``contract`` with columns of another type, by path."""
    held = (table for table in workspace.tables_of(contract) if table.exists)
    return {table.spec.path: found for table in held if (found := table.open().retyped)}


def ask_for(workspace: Workspace, contract: TableContract) -> None:
    """Request that the next run rebuilds the tables of ``contract`` with its types; durable when it returns.

    The request applies to the contract as it is now. After another change of it, a new request is needed.
    """
    file = _file(workspace, contract)
    # No failpoint: making a folder that exists already does no harm.
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with failpoint("lake.retype", contract.name):
        replace(file, encode(_Request(contract.fingerprint)))


def waiting(workspace: Workspace, contract: TableContract, snapshot: TableSnapshot) -> tuple[Retyped, ...]:
    """The columns of ``snapshot``, of a table of ``contract``, that wait for a person. Cheap."""
    found = tuple(each for each in snapshot.retyped if not each.widens)
    return () if found and _is_requested(_file(workspace, contract), contract) else found


def _is_requested(file: Path, contract: TableContract) -> bool:
    try:
        # Read the stored request: another machine may have replaced it since it was copied here.
        request = decode_note(_Request, storage_of(file).read(file))
        return request.contract == contract.fingerprint
    except (OSError, Unreadable):
        return False


def _file(workspace: Workspace, contract: TableContract) -> Path:
    return workspace.home.lake / contract.source / _FOLDER / f"{contract.name}.json"


def _asks(contract: TableContract, table: TablePlace, found: tuple[Retyped, ...]) -> SchemaChanged:
    return SchemaChanged(
        f"{table.spec.path} has columns of another type than {contract.path} says: "
        f"{', '.join(map(str, found))}. It stays as it is, and takes in nothing more.",
        fix="Restore the type in the contract; or have net changes, dimension and history made again "
        f"under the new types, from the events: omnisupport-ingest contracts retype {contract.name}",
    )
