"""Seed manifests: reads the description of a delivery of data files, and checks it against its contract.

The format is ``contracts/seed_manifest.schema.json``, which refuses what is not supported and says why
(``policies``). This module refuses what depends on the contract: for example, a mode that needs a cursor for
a table without one.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from omnisupport_ingest.contracts.documents import check_document, program_file, read_bytes, read_document
from omnisupport_ingest.contracts.load import Contracts, TableContract
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.foreign import printable, shortened
from omnisupport_ingest.sources.manifests.formats import FORMATS, format_of
from omnisupport_ingest.sources.manifests.policies import (
    BACKFILL,
    CDC,
    FULL_SNAPSHOT,
    INCREMENTAL,
    OPTIONAL,
    REJECT,
)
from omnisupport_ingest.sources.packed import PACKED
from omnisupport_ingest.sources.query.cursor import CursorColumn, CursorKind

SCHEMA = "contracts/seed_manifest.schema.json"

SEED_MANIFESTS = "seed_manifests"
"""A folder of manifests that stands beside the folders of their data files."""


class SeedManifestError(IngestError):
    """A seed manifest cannot be used; the message names the file, the place in it and what is wrong there.

    Fix: Correct it; ``omnisupport-ingest manifest validate`` checks it.
    """

    exit_code = 2


@dataclass(frozen=True, slots=True)
class SeedFile:
    """One data file: where it is and what it must be. ``rows`` counts records, without a header."""

    path: Path
    sha256: str
    rows: int


@dataclass(frozen=True, slots=True)
class Gates:
    """The policy for each kind of fault; the values are ``policies.ACTIONS``."""

    checksum: str = REJECT
    row_count: str = REJECT
    schema: str = REJECT
    unknown_column: str = REJECT
    row: str = REJECT
    license: str = OPTIONAL["license"]
    duplicate_delivery: str = OPTIONAL["duplicate_delivery"]
    missing_file: str = OPTIONAL["missing_file"]

    def action(self, fault: str) -> str:
        """Return the policy for a kind of fault."""
        return str(getattr(self, fault))


@dataclass(frozen=True, slots=True)
class ReplayOf:
    """What a replay folds again: the windows ``first`` to ``last``, or those that ``batches`` reached."""

    reason: str
    first: str | None = None
    last: str | None = None
    batches: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SeedManifest:
    """A checked seed manifest.

    ``as_of``: the moment that its data describes (timezone-aware; None: the moment it lands). ``replay``:
    what is folded again; None unless the mode is a replay, which has no ``files``. ``path``: the file of the
    manifest; ``sha256``: its hash.
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
    replay: ReplayOf | None = None

    @property
    def reference(self) -> str:
        """The name of the manifest with its hash and its number of files, as a batch records it: another
        manifest may have the same name."""
        return f"{self.path.name} (SHA-256 {self.sha256}, {len(self.files)} files)"

    @property
    def rows(self) -> int:
        """Number of rows in all files together."""
        return sum(file.rows for file in self.files)


def default_manifests_dir() -> Path:
    """Return ``data/seed_manifests`` of the working folder if it exists, else the folder in this package."""
    folder = Path("data") / SEED_MANIFESTS
    return folder if folder.is_dir() else program_file("data/seed_manifests")


def load_manifest(path: Path, contracts: Contracts) -> SeedManifest:
    """Return the seed manifest in ``path``. Raises ``SeedManifestError`` if it is none or needs what is not
    supported.

    It opens no data file; ``land`` checks those.
    """
    document = read_document(path, SeedManifestError)
    check_document(document, path, SCHEMA, SeedManifestError)
    mode, contract = document["load_mode"], _contract(path, document["contract"], contracts)
    if mode in (INCREMENTAL, BACKFILL) and contract.cursor is None:
        raise _refused(
            path,
            "load_mode",
            f"{mode} needs a column that orders the versions of a row, and {contract.path} names none",
            "Add x-cdc.cursor to the contract, or deliver the table as a full_snapshot.",
        )
    counted = contract.cursor is not None and CursorColumn.of(contract).kind is CursorKind.NUMBER
    if mode == FULL_SNAPSHOT and counted:
        raise _refused(
            path,
            "load_mode",
            f"a full_snapshot stands where its moment says, and the cursor in {contract.path} is a number",
            "Deliver it as incremental_cursor, or name a time as x-cdc.cursor.field.",
        )
    replay = document.get("replay")
    files = tuple(_file(path, mode, number, each) for number, each in enumerate(document.get("files", ())))
    _refuse_twice(path, files)
    return SeedManifest(
        name=document["name"],
        description=document["description"],
        owner=document["owner"],
        license=document["license"],
        load_mode=mode,
        contract=contract,
        as_of=_moment(path, document.get("as_of")),
        files=files,
        gates=Gates(**document.get("gates", {})),
        path=path,
        sha256=hashlib.sha256(read_bytes(path, SeedManifestError)).hexdigest(),
        replay=None if replay is None else _replay_of(replay),
    )


def _file(path: Path, mode: str, number: int, entry: dict[str, Any]) -> SeedFile:
    file = SeedFile(path.parent / entry["path"], entry["sha256"], entry["rows"])
    _refuse_outside(path, file.path, f"files[{number}].path", entry["path"])
    known = (".jsonl", ".ndjson", ".json") if mode == CDC else FORMATS
    if format_of(file.path) not in known:
        packed = " or ".join(PACKED)
        raise _refused(
            path,
            f"files[{number}].path",
            f"{shortened(entry['path'])} does not say a format that {mode} reads",
            f"Let the name end with {', '.join(known)}; a text format may have {packed} behind it.",
        )
    return file


def _refuse_outside(path: Path, file: Path, at: str, named: str) -> None:
    """Refuse a data file outside the folder of its delivery: a manifest comes from others, and must not make
    this machine read and describe any file that it names.

    The folder is that of the manifest, or the one above for manifests in a folder ``SEED_MANIFESTS``.
    """
    folder = path.absolute().parent
    folder = folder.parent if folder.name == SEED_MANIFESTS else folder
    try:
        inside = Path(os.path.realpath(file)).is_relative_to(os.path.realpath(folder))
    except ValueError:
        # A name with a NUL character is of no file; reading says so.
        inside = True
    if inside and not Path(named).is_absolute():
        return
    raise _refused(
        path,
        at,
        f"{shortened(named)} is not a path relative to the manifest that stays in {printable(folder)}",
        "Put the file into the folder of the manifest, or below it, and name it from there; a link must not "
        "lead out of it.",
    )


def _refuse_twice(path: Path, files: Sequence[SeedFile]) -> None:
    first: dict[Path, int] = {}
    for number, file in enumerate(files):
        known = first.setdefault(file.path.absolute(), number)
        if known != number:
            raise _refused(
                path, f"files[{number}].path", f"is the file of files[{known}], too", "Name each file once."
            )


def _replay_of(document: dict[str, Any]) -> ReplayOf:
    windows = document.get("windows", {})
    first = windows.get("from")
    return ReplayOf(document["reason"], first, windows.get("to", first), tuple(document.get("batches", ())))


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
        parsed = datetime.fromisoformat(text)
        # A time near an end of the calendar may lie beyond it in another time zone.
        moment = parsed.astimezone(UTC) if parsed.tzinfo is not None else None
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
