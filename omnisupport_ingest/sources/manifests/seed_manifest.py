"""Seed manifests: what a delivery of data files holds, read into values and held to its contract.

The form is ``contracts/seed_manifest.schema.json``. A manifest may ask only for what this version
does: a load mode or a gate action that would not be carried out is refused here, by name.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from omnisupport_ingest.contracts.documents import check_document, program_file, read_bytes, read_document
from omnisupport_ingest.contracts.load import Contracts, TableContract
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.foreign import shortened

SCHEMA = "contracts/seed_manifest.schema.json"

LOAD_MODES = frozenset({"full_snapshot"})
"""The load modes that are carried out; the schema knows the names of the others."""

GATES = {
    "checksum": ("reject",),
    "row_count": ("reject",),
    "schema": ("reject",),
    "unknown_column": ("accept", "reject"),
    "row": ("quarantine",),
}
"""Per kind of fault the actions that are carried out. ``reject`` refuses the whole delivery;
``quarantine`` is what the pipeline does with a row that breaks a rule; an accepted unknown column
stays in the raw layers."""


class SeedManifestError(IngestError):
    """A seed manifest that cannot be used; the message names the file, the JSON path and the fix."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class SeedFile:
    """One data file, JSON Lines: where it is and what it must be. ``rows`` counts lines."""

    path: Path
    sha256: str
    rows: int


@dataclass(frozen=True, slots=True)
class Gates:
    """What to do about each kind of fault; the values are those of ``GATES``."""

    checksum: str
    row_count: str
    schema: str
    unknown_column: str
    row: str


@dataclass(frozen=True, slots=True)
class SeedManifest:
    """A checked seed manifest.

    ``as_of`` is the moment its data describes (timezone-aware; null: the moment it lands).
    ``path`` is its file and ``sha256`` the hash of that file.
    """

    name: str
    description: str
    owner: str
    license: str
    load_mode: str
    contract: TableContract
    as_of: datetime | None
    files: tuple[SeedFile, ...]
    gates: Gates
    path: Path
    sha256: str

    @property
    def rows(self) -> int:
        """Rows of all files together."""
        return sum(file.rows for file in self.files)


def default_manifests_dir() -> Path:
    """``data/seed_manifests`` of the working folder if it is there, else the one that comes with us."""
    here = Path("data/seed_manifests")
    return here if here.is_dir() else program_file("data/seed_manifests")


def load_manifest(path: Path, contracts: Contracts) -> SeedManifest:
    """The seed manifest in ``path``; ``SeedManifestError`` if it is not one or asks for too much.

    Data files are not opened yet; ``land`` checks them.
    """
    document = read_document(path, SeedManifestError)
    check_document(document, path, SCHEMA, SeedManifestError)
    mode = document["load_mode"]
    if mode not in LOAD_MODES:
        raise _refused(
            path,
            "load_mode",
            f"the load mode {mode!r} is not carried out by this version",
            f"Use {' or '.join(sorted(LOAD_MODES))}; changes of a PostgreSQL source come by its capture.",
        )
    for fault, action in document["gates"].items():
        if action not in GATES[fault]:
            raise _refused(
                path,
                f"gates.{fault}",
                f"{action!r} is not carried out for faults of this kind",
                f"Use {' or '.join(GATES[fault])}.",
            )
    return SeedManifest(
        name=document["name"],
        description=document["description"],
        owner=document["owner"],
        license=document["license"],
        load_mode=mode,
        contract=_contract(path, document["contract"], contracts),
        as_of=_moment(path, document.get("as_of")),
        files=tuple(
            SeedFile(path.parent / each["path"], each["sha256"], each["rows"]) for each in document["files"]
        ),
        gates=Gates(**document["gates"]),
        path=path,
        sha256=hashlib.sha256(read_bytes(path, SeedManifestError)).hexdigest(),
    )


def _contract(path: Path, named: dict[str, Any], contracts: Contracts) -> TableContract:
    contract = contracts.find(named["source"], named["schema"], named["table"])
    if contract is None:
        raise _refused(
            path,
            "contract",
            f"there is no contract for {named['schema']}.{named['table']} of {named['source']!r}",
            "Add the contract file, or name a table that has one.",
        )
    if contract.version != named["version"]:
        raise _refused(
            path,
            "contract.version",
            f"asks for {named['version']}, but {contract.path} is version {contract.version}",
            "Check the data against the contract's present version, then name that version.",
        )
    return contract


def _moment(path: Path, text: str | None) -> datetime | None:
    if text is None:
        return None
    try:
        told = datetime.fromisoformat(text)
        # What is near an end of the calendar may lie beyond it in another zone.
        moment = told.astimezone(UTC) if told.tzinfo is not None else None
    except (ValueError, OverflowError):
        moment = None
    if moment is None:
        raise _refused(
            path,
            "as_of",
            f"{shortened(text)} is no moment",
            "Write ISO 8601 with a zone, like 2026-01-31T09:00:00Z.",
        )
    return moment


def _refused(path: Path, at: str, problem: str, fix: str) -> SeedManifestError:
    return SeedManifestError(f"{path} at $.{at}: {problem}.", fix=fix)
