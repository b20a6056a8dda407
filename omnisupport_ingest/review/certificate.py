"""The certificate of an erasure: one JSON file in the home that says what is gone, what remains, and why.

The first command of an erasure writes it, and later runs of the same command write it again. They repeat from
the earlier one who asked, which files held cells, and which were swept. It has no value and no key.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from omnisupport_ingest.contracts.model import Column, TableContract
from omnisupport_ingest.contracts.pg_types import INTEGERS
from omnisupport_ingest.contracts.pii_policies import TOKENIZE
from omnisupport_ingest.contracts.withdrawn import withdrawn_contracts
from omnisupport_ingest.durable import replace
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.foreign import Unreadable, printable, read_file
from omnisupport_ingest.home import Home
from omnisupport_ingest.lake.log_files import names_bounds_of
from omnisupport_ingest.lake.sweep import sweep_replaced
from omnisupport_ingest.landing.kept_positions import FOLDER as POSITIONS
from omnisupport_ingest.landing.kept_positions import last_kept_window
from omnisupport_ingest.layers.erasures import CERTIFICATES
from omnisupport_ingest.layers.events.quarantine_files import named_anywhere
from omnisupport_ingest.layers.scheduling.pending import pending_windows
from omnisupport_ingest.layers.versions import RulesVersions
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.processes import remove_all_left_behind
from omnisupport_ingest.read.export_ledger import ExportedFile, exported_files, still_there
from omnisupport_ingest.read.holdings import Holding
from omnisupport_ingest.records import Format, encode
from omnisupport_ingest.storage import storage_of

FORMAT_VERSION = 1

COMPLETE, PENDING, INCOMPLETE = "complete", "pending", "incomplete"
"""States of an erasure: nothing readable is left except what ``remains`` names; cells above raw are left;
only images in landing and raw are left."""


WITHDRAWN = "tables of withdrawn contracts"
"""Reason for what remains of tables that no run updates: their cells are neither counted nor erased."""


class CertificateUnreadable(IngestError):
    """The certificate of an earlier erasure cannot be read. Nothing was erased.

    Fix: Restore it from a backup; or move it away: then the new one is of this erasure alone.
    """


@dataclass(frozen=True, slots=True)
class ErasureRequest:
    """Who asked for the erasure, why and when (timezone-aware)."""

    by: str
    why: str
    at: datetime


@dataclass(frozen=True, slots=True)
class Earlier:
    """The facts that a later certificate repeats: who asked, which files held cells before, and which were
    swept. ``windows_named``: of a subject, whether its windows were named after it was recorded as erased.
    ``former_keys_sha256``: of a subject, the former keys of its rows that events linked to it.
    """

    asked: ErasureRequest
    before: tuple[Holding, ...]
    swept: tuple[str, ...]
    windows_named: bool = False
    former_keys_sha256: tuple[str, ...] = ()


FORMAT = Format(Earlier, FORMAT_VERSION, strict=False)


def certificate_path(workspace: Workspace, contract: TableContract, identity: bytes) -> Path:
    """Return the path of the certificate. ``identity``: distinguishes what was erased within the source."""
    name = hashlib.sha256(contract.source.encode() + identity).hexdigest()[:16]
    return workspace.home.path / CERTIFICATES / f"{contract.source}-{contract.name}-{name}.json"


def read_earlier(path: Path) -> Earlier | None:
    """Return the facts that a later certificate repeats from an earlier one; None without an earlier one.

    Raises ``CertificateUnreadable``.
    """
    try:
        return FORMAT.decode(read_file(path))
    except FileNotFoundError:
        return None
    except Unreadable as problem:
        raise CertificateUnreadable(
            f"{path}, the certificate of an earlier erasure, cannot be read: {problem}.",
            fix="Restore it from a backup; or move it away, then the new one is of this erasure alone.",
        ) from problem


def earlier_ids(workspace: Workspace, contract: TableContract, key_sha256: str) -> frozenset[bytes]:
    """Return the ids of the keys in the newest certificate of the subject of that row; empty without one.

    By it an erasure goes on when landing and raw no longer say whose the row is. A certificate that is
    damaged, or that a killed command left before any key was erased, is passed over.
    """
    found = dict[str, frozenset[bytes]]()
    folder = workspace.home.path / CERTIFICATES
    for path in folder.glob(f"{contract.source}-{contract.name}-*.json"):
        try:
            document = json.loads(read_file(path))
            of = (document["source"], document["table"], document["key_sha256"])
            ids = frozenset(bytes.fromhex(each) for each in document["keys"]["ids"])
            if of == (contract.source, contract.full_name, key_sha256):
                found[document["looked_at"]] = ids
        except (OSError, Unreadable, ValueError, KeyError, TypeError):
            continue
    return found[max(found)] if found else frozenset()


def write_certificate(path: Path, document: dict[str, Any]) -> None:
    # No failpoint: making a folder that exists already does no harm.
    path.parent.mkdir(mode=0o700, exist_ok=True)
    with failpoint("pii.subject_keys", "certificate"):
        replace(path, encode(document))


def what_became(
    workspace: Workspace, before: Sequence[Holding], cells: Sequence[Holding]
) -> tuple[dict[str, Any] | Holding, ...]:
    """Return what became of the files that held cells ``before``, and which files hold ``cells`` now."""
    count_of = {each.path: each.count for each in cells}
    home = workspace.home.path
    entries = [
        {
            "place": each.place,
            "path": each.path,
            "sha256": _sha256_of(home / each.path),
            "count": count_of.get(each.path, 0),
        }
        for each in before
    ]
    known = {each.path for each in before}
    return (*entries, *(each for each in cells if each.path not in known))


def _sha256_of(path: Path) -> str | None:
    """Return the SHA-256 of the stored file; None if it is gone."""
    try:
        return storage_of(path).digest(path)[1]
    except FileNotFoundError:
        return None


def windows_waiting(workspace: Workspace, source: str, windows: Collection[str]) -> list[str]:
    """Return those of ``windows`` that a layer has yet to rebuild without the erased values.

    A run in progress may have read the values before the erasure. What it writes is rebuilt, because the
    versions of its windows have changed. Only versions of erasures count here. A window without events of a
    table is not rebuilt for that table's contract, and a window to be rebuilt for another reason is pending
    anyway.
    """
    windows = {*windows}
    versions, deduped = RulesVersions(workspace, source), workspace.deduped(source).look()
    states = {window: deduped.state(window) if deduped is not None else None for window in windows}
    made_before = {
        window
        for window, state in states.items()
        if state is None or not {*versions.of_erased(window)} <= {*state.versions}
    }
    # Look at every batch: a person may run windows by hand, in any order.
    waits = pending_windows(workspace, source, limit=sys.maxsize)
    return sorted(windows & {*made_before, *waits.windows, *waits.late_windows})


def withdrawn_personal(workspace: Workspace, source: str) -> list[TableContract]:
    """Return the withdrawn contracts of ``source`` with personal values. Raises ``ContractError`` for a file
    that is no contract.
    """
    withdrawn = withdrawn_contracts(workspace.settings, workspace.contracts, source)
    return [each for each in withdrawn if each.subject is not None or each.personal]


def with_data(workspace: Workspace, contract: TableContract) -> list[str]:
    """Return the tables of ``contract`` that exist, as paths in the lake."""
    return [table.spec.path for table in workspace.tables_of(contract) if table.exists]


def sweep_former(workspace: Workspace, source: str, contracts: Iterable[TableContract]) -> list[str]:
    """Delete the former versions of the tables of ``contracts``, and of the tables with their events, raw
    included; return the deleted files, relative to the lake. Scratch folders of killed processes go too."""
    remove_all_left_behind(workspace.home.run)
    tables = [(workspace.raw(source), frozenset[str]()), (workspace.deduped(source), frozenset())]
    tables.append((workspace.quarantine(source), named_anywhere(workspace, source)))
    for each in contracts:
        tables += [(table, frozenset()) for table in workspace.tables_of(each)]
    return [
        f"{table.spec.path}/{path}" for table, spare in tables for path in sweep_replaced(table, spare=spare)
    ]


@dataclass
class Remains:
    """A list of what remains after an erasure: where, and why."""

    entries: list[dict[str, Any]] = field(default_factory=list)

    def add(self, what: str, where: Collection[str], why: str) -> None:
        if where:
            self.entries.append({"what": what, "where": sorted(where), "why": why})

    def add_outside(
        self, workspace: Workspace, source: str, erased: Sequence[tuple[TableContract, Sequence[Column]]]
    ) -> None:
        """Add what lies outside of the tables, or in their logs. ``erased``: each contract with the columns
        that were erased."""
        self.add(
            "files as they were delivered",
            _delivered(workspace.home, source),
            "they may have its values, as records of a topic may; delete them",
        )
        exports = _exports(workspace, [each for each, _ in erased])
        unchanged = [each for each in exports if still_there(each)]
        self.add(
            "exports that were written before",
            {each.path for each in unchanged},
            "they left the lake: delete them, and what was made of them",
        )
        self.add(
            "exports that are not what was written, or not there any more",
            {_told(each) for each in exports if each not in unchanged},
            "if somebody changed or moved one, it may have its values still",
        )
        columns = [(each, column) for each, of_contract in erased for column in of_contract]
        self.add(
            "values in the map of tokens",
            [f"{each.full_name}.{column.name}" for each, column in columns if column.pii == TOKENIZE],
            "another row may have the same value: pii forget takes a token out",
        )
        bounded = []
        for each, of_contract in erased:
            numbers = [column.name for column in of_contract if column.type.kind in INTEGERS]
            for table in workspace.tables_of(each) if numbers else ():
                if table.exists and names_bounds_of(table.folder, numbers):
                    bounded.append(f"{table.spec.path}/_delta_log")
        self.add(
            "bounds of integer columns",
            bounded,
            "the log of a Delta table has the lowest and highest number of each file for 30 days: of columns "
            "that pii does not name, of others from before it did, or from an earlier version",
        )
        self.add(
            "rows of targets",
            [f"{each.target.schema}.{each.target.table}" for each, _ in erased if each.target is not None],
            "their next sync sets the columns to NULL",
        )
        landing = workspace.landing(source).folder
        self.add(
            "hashes in the positions that are kept",
            [f"{landing.relative_to(workspace.home.path)}/{POSITIONS}"] if last_kept_window(landing) else [],
            "64 bits over the values of a row without a key or of a snapshot, and of a line that was no "
            "event: by them somebody who knows all of these values but one could try the last",
        )

    def add_withdrawn(self, workspace: Workspace, withdrawn: Sequence[TableContract]) -> None:
        """Add the tables that exist of ``withdrawn``, contracts with personal values."""
        for each in withdrawn:
            self.add(
                WITHDRAWN,
                with_data(workspace, each),
                "no run erases from them. Delete them: omnisupport-ingest contracts withdraw "
                f"{each.name} --source {each.source} --drop-data. Or put the contract of {each.name} back, "
                "erase when its windows are judged, and withdraw it again",
            )
        self.add(
            "exports of withdrawn tables",
            {_told(each) for each in _exports(workspace, withdrawn)},
            "they left the lake: delete them, and what was made of them",
        )
        self.add(
            "rows of targets of withdrawn tables",
            [f"{each.target.schema}.{each.target.table}" for each in withdrawn if each.target is not None],
            "no sync comes any more: delete them there",
        )

    def add_of_storage(self, workspace: Workspace, source: str) -> bool:
        """Add what an object store keeps. Return whether it keeps old versions of deleted objects."""
        storage = storage_of(workspace.home.lake / "any")
        if in_versions := storage.keeps_versions():
            self.add(
                "former versions of objects",
                [storage.table_uri(workspace.home.lake / source)],
                "the bucket keeps versions of what is deleted; its rule NoncurrentVersionExpiration ends "
                "them",
            )
        return in_versions


def _exports(workspace: Workspace, contracts: Iterable[TableContract]) -> list[ExportedFile]:
    """Return the exports of the tables of ``contracts``. One path may have several, one written over the
    other: somebody may have kept the earlier one elsewhere."""
    of_tables = {f"{each.source}.{each.name}" for each in contracts}
    return [each for each in exported_files(workspace.home.path) if each.table in of_tables]


def _told(export: ExportedFile) -> str:
    return f"{export.path} (SHA-256 {export.sha256})"


def _delivered(home: Home, source: str) -> list[str]:
    """Return the files in the inbox of ``source``, including one refused because its name is not UTF-8."""
    files = (each for each in (home.inbox / source).rglob("*") if each.is_file())
    return [printable(each.relative_to(home.path)) for each in files]
