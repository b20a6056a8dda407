"""Erases a subject: its encryption key is destroyed, so no copy of its landed rows can be read any more.

This covers every table of the source, live and deleted rows, landing, raw, and backups of both, and cannot be
undone. Layers downstream of raw hold values in readable form (what policies leave of them). So their windows
are judged again without the values, former versions are swept at once, and then the certificate is complete.
The same command continues until all is done; it may be repeated at any time.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from omnisupport_ingest.cdc.erasing import key_hash
from omnisupport_ingest.contracts.at_rest import encrypted_columns
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.contracts.pg_types import INTEGERS
from omnisupport_ingest.contracts.pii_policies import KEEP, TOKENIZE
from omnisupport_ingest.contracts.subject_keys import row_subject
from omnisupport_ingest.durable import replace
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.foreign import Unreadable, printable, read_file
from omnisupport_ingest.home import Home
from omnisupport_ingest.lake.sweep import sweep_replaced
from omnisupport_ingest.layers.pending import pending_windows
from omnisupport_ingest.layers.quarantine_files import named_anywhere
from omnisupport_ingest.layers.versions import RulesVersions
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.read.export_ledger import exported_files, still_there
from omnisupport_ingest.read.subject_traces import (
    Holding,
    Traced,
    by_other_keys,
    cells_above_raw,
    cells_left_over,
    key_ids_of_row,
    of_nobody,
    tables_of,
    traced,
)
from omnisupport_ingest.records import Format, encode
from omnisupport_ingest.review.erasing import ErasureIncomplete, ErasureRefused
from omnisupport_ingest.storage import storage_of

FOLDER = "certificates"
"""Folder of the home; a certificate is one JSON file in it, readable by its owner only."""

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class _Asked:
    by: str
    why: str
    at: datetime


@dataclass(frozen=True, slots=True)
class _Earlier:
    """What a certificate repeats from the first one of its subject: who asked, what was held before, and the
    files that were swept.
    """

    asked: _Asked
    before: tuple[Holding, ...]
    swept: tuple[str, ...]


_FORMAT = Format(_Earlier, FORMAT_VERSION, strict=False)


@dataclass(frozen=True, slots=True)
class SubjectErased:
    """What was done.

    ``certificate``: its file; None if nothing was recorded. ``complete``: the home holds nothing readable of
    the subject except what ``remains`` names. ``images``: row images that landed encrypted, in ``windows``.
    ``cells``: cells downstream of raw that are still readable. ``swept``: deleted files of former versions.
    """

    certificate: Path | None
    complete: bool
    images: int
    cells: int
    windows: tuple[str, ...]
    swept: int
    remains: tuple[dict[str, Any], ...]


def look_up_subject(workspace: Workspace, contract: TableContract, key: str) -> SubjectErased:
    """Return what ``erase_subject`` would erase, without destroying it; ``ErasureRefused`` if it would
    refuse."""
    ids = _key_ids(workspace, contract, key)
    of_subject = traced(workspace, contract.source, ids)
    cells = cells_above_raw(workspace, contract, of_subject, whole_rows=False)
    remaining = _Remaining(cells, (), by_other_keys(workspace, contract, of_subject, ids))
    return _erased(None, False, of_subject, cells, 0, _remains(workspace, contract, of_subject, remaining))


def erase_subject(
    workspace: Workspace, contract: TableContract, key: str, *, erased_by: str, why: str
) -> SubjectErased:
    """Destroy the encryption key of the subject of the row with ``key``, and write a certificate.

    ``key``: as ``key_text`` writes it. ``erased_by`` and ``why`` are recorded as they are given. Raises
    ``ErasureRefused`` saying why nothing was destroyed.
    """
    erased_by, why = erased_by.strip(), why.strip()
    for value, missing in ((erased_by, "name of the person who erases"), (why, "reason")):
        if not value:
            raise ErasureIncomplete(
                f"The {missing} is missing.", fix="Give it: the certificate records person, time and reason."
            )
    ids = _key_ids(workspace, contract, key)
    path = _certificate(workspace, contract, ids)
    before = _read(path) or _Earlier(
        _Asked(erased_by, why, datetime.now(UTC)),
        tuple(
            cells_above_raw(workspace, contract, traced(workspace, contract.source, ids), whole_rows=False)
        ),
        (),
    )
    destroyed = workspace.subjects.destroy(ids)
    # Only now, so that events which landed or were judged meanwhile are found too.
    of_subject = traced(workspace, contract.source, ids)
    workspace.subjects.name_windows(contract.source, of_subject.windows)
    waiting = _waiting(workspace, contract.source, of_subject)
    cells = cells_above_raw(workspace, contract, of_subject, whole_rows=bool(waiting))
    keeps_versions = storage_of(workspace.home.lake / "any").keeps_versions()
    swept, left_over = list[str](), list[Holding]()
    if not (cells or waiting):
        swept = _sweep(workspace, contract, of_subject)
        left_over = cells_left_over(workspace, contract, of_subject)
    remaining = _Remaining(
        cells, waiting, by_other_keys(workspace, contract, of_subject, ids), left_over, keeps_versions
    )
    pending = bool(cells or waiting or left_over)
    remains = _remains(workspace, contract, of_subject, remaining)
    complete = not (pending or of_subject.plain or remaining.by_other_keys or keeps_versions)
    document = {
        "format_version": FORMAT_VERSION,
        "state": "complete" if complete else "pending" if pending else "incomplete",
        "source": contract.source,
        "table": contract.full_name,
        "subject": contract.subject.name if contract.subject else None,
        "key_sha256": key_hash(key),
        "asked": before.asked,
        "before": before.before,
        "looked_at": datetime.now(UTC),
        "keys": {"of_the_subject": len(ids), "destroyed_now": destroyed},
        "encrypted": tuple(of_subject.encrypted),
        "after": _after(workspace, before.before, [*cells, *left_over]),
        "swept": tuple(sorted({*before.swept, *swept})),
        "remains": remains,
    }
    _write(path, document)
    return _erased(path, complete, of_subject, [*cells, *left_over], len(swept), remains)


def _key_ids(workspace: Workspace, contract: TableContract, key: str) -> set[bytes]:
    """Return the ids of the keys to destroy: that of the row's subject, and the row's own."""
    if contract.subject is None:
        raise ErasureRefused(
            f"{contract.full_name} of {contract.source} lands plain, so there is no key to destroy.",
            fix="Erase the row without --subject; or write encrypted in x-cdc.at_rest, for what lands from "
            "then on.",
        )
    row_ids = key_ids_of_row(workspace, contract, key)
    own, named = (contract.source, row_subject(contract.full_name), key), []
    if contract.key == (contract.subject.column,):
        named = [(contract.source, contract.subject.name, json.loads(key)[0])]
    ids = workspace.subjects.ids_of([own, *named])
    others = workspace.subjects.living(row_ids.difference(ids[:1]))
    if not row_ids and not traced(workspace, contract.source, ids).encrypted:
        # A mistyped key must not destroy the key of a subject that has yet to land.
        raise ErasureRefused(
            f"{contract.full_name} of {contract.source} has no row with that key that landed encrypted.",
            fix=f"Write the key ({', '.join(contract.key)}) as PostgreSQL prints it; or erase by the table "
            f"whose key {contract.subject.column} is.",
        )
    if len(others) > 1:
        raise ErasureRefused(
            f"The row of {contract.full_name} has belonged to {len(others)} subjects.",
            fix="Erase each by a table of which the key is the subject.",
        )
    return {*row_ids, *ids}


@dataclass(frozen=True, slots=True)
class _Remaining:
    """What is left of a subject: readable ``cells`` downstream of raw; windows ``waiting`` to be judged,
    again or for the first time; landed images of its rows ``by_other_keys``; readable cells ``left_over`` in
    files of no version; ``in_versions``: whether the bucket keeps versions of what is deleted from it."""

    cells: Sequence[Holding]
    waiting: Collection[str]
    by_other_keys: Sequence[Holding]
    left_over: Sequence[Holding] = ()
    in_versions: bool = False


def _waiting(workspace: Workspace, source: str, of_subject: Traced) -> list[str]:
    """Return the windows with images of the subject that a layer has yet to rebuild without their values.

    A run in progress may have read them before the key was destroyed. What it writes is rebuilt, because the
    versions of its windows have changed.
    """
    windows = {window for named in of_subject.windows.values() for window in named}
    versions, deduped = RulesVersions(workspace, source), workspace.deduped(source).look()
    states = {window: deduped.state(window) if deduped is not None else None for window in windows}
    made_before = {
        window
        for window, state in states.items()
        if state is None or not {*versions.of(window)} <= {*state.versions}
    }
    # Of every batch: who runs a window by hand need not take the first ones first.
    waits = pending_windows(workspace, source, limit=sys.maxsize)
    return sorted(windows & {*made_before, *waits.windows, *waits.late_windows})


def _tables(workspace: Workspace, contract: TableContract, of_subject: Traced) -> list[TableContract]:
    """Return the contracts of the tables that may hold rows of the subject."""
    table_names, subject = {(schema, table) for schema, table, _ in of_subject.rows}, contract.subject
    return [
        each
        for each in workspace.contracts.of_source(contract.source)
        if each.table_name in table_names
        or (subject is not None and each.subject is not None and each.subject.name == subject.name)
    ]


def _sweep(workspace: Workspace, contract: TableContract, of_subject: Traced) -> list[str]:
    """Delete former versions of the tables that held the subject's values; return the deleted files, relative
    to the lake."""
    source = contract.source
    tables = [(workspace.deduped(source), frozenset[str]())]
    tables.append((workspace.quarantine(source), named_anywhere(workspace, source)))
    for each in _tables(workspace, contract, of_subject):
        tables += [(table, frozenset()) for table in tables_of(workspace, each)]
    return [
        f"{table.spec.path}/{path}" for table, spare in tables for path in sweep_replaced(table, spare=spare)
    ]


def _remains(
    workspace: Workspace, contract: TableContract, of_subject: Traced, remaining: _Remaining
) -> tuple[dict[str, Any], ...]:
    """Return what remains of the subject, where, and why."""
    remains: list[dict[str, Any]] = []

    def add(what: str, where: Collection[str], why: str) -> None:
        if where:
            remains.append({"what": what, "where": sorted(where), "why": why})

    add(
        "encrypted images, which nobody can read",
        [each.path for each in of_subject.encrypted],
        "landing and raw are the record: files, checksums and the chain stay as they are",
    )
    add(
        "images that landed plain",
        [each.path for each in of_subject.plain],
        "they landed before the contract said encrypted; retention of landing and raw deletes them",
    )
    add(
        "cells that can be read",
        [each.path for each in remaining.cells],
        "their windows are not judged again yet, then give the command again; or retention has sealed them, "
        "or the row had the value from another subject",
    )
    add(
        "files that no table names",
        [each.path for each in remaining.left_over],
        "a run is writing them, or wrote them and died: give the command again when no run is under way; "
        "what a dead one left goes when it is a day old",
    )
    add(
        "windows that wait to be judged",
        remaining.waiting,
        "what a run under way has read may be written still; give the command again when nothing is pending",
    )
    add(
        "images of its rows that another key encrypted",
        [each.path for each in remaining.by_other_keys],
        "the row had another key then, or said of nobody's whose it is: erase it by that key (explain names "
        "former keys), or by its own table, with --subject too",
    )
    add(
        "lines that could not be read and say of nobody whose they are",
        [each.path for each in of_nobody(workspace, contract.source)],
        "they may have its values, encrypted by the key of their table; retention of landing and raw deletes "
        "them",
    )
    add(
        "files as they were delivered",
        _delivered(workspace.home, contract.source),
        "they may have its values, as records of a topic may; delete them",
    )
    tables = _tables(workspace, contract, of_subject)
    named = {f"{each.source}.{each.name}" for each in tables}
    add(
        "exports that were written before",
        [
            each.path
            for each in exported_files(workspace.home.path)
            if each.table in named and still_there(each)
        ],
        "they left the lake: delete them, and what was made of them",
    )
    columns = [
        (each, column)
        for each in tables
        for column in each.source_columns
        if column.name in encrypted_columns(each)
    ]
    add(
        "values in the map of tokens",
        [f"{each.full_name}.{column.name}" for each, column in columns if column.pii == TOKENIZE],
        "another row may have the same value: pii forget takes a token out",
    )
    add(
        "bounds of integer columns",
        [
            f"{table.spec.path}/_delta_log"
            for each, column in columns
            if column.pii == KEEP and column.type.kind in INTEGERS
            for table in tables_of(workspace, each)
        ],
        "the log of a Delta table keeps the lowest and highest number of each file, of former files too",
    )
    add(
        "rows of targets",
        [f"{each.target.schema}.{each.target.table}" for each in tables if each.target is not None],
        "their next sync sets the columns to NULL",
    )
    add("backups of keys/", ["wherever they are"], "whoever restores one has the destroyed key again")
    storage = storage_of(workspace.home.lake / "any")
    if remaining.in_versions:
        add(
            "former versions of objects",
            [storage.table_uri(workspace.home.lake / contract.source)],
            "the bucket keeps versions of what is deleted; its rule NoncurrentVersionExpiration ends them",
        )
    if not storage.is_local:
        add(
            "homes of other machines on this bucket",
            ["wherever they are"],
            "their keys/ has the key: give the same command there; their copies of files go with `sweep`",
        )
    return tuple(remains)


def _delivered(home: Home, source: str) -> list[str]:
    """Return the files in the inbox of ``source``. One whose name is not UTF-8 was refused, and is there."""
    files = (each for each in (home.inbox / source).rglob("*") if each.is_file())
    return [printable(each.relative_to(home.path)) for each in files]


def _after(
    workspace: Workspace, before: Sequence[Holding], cells: Sequence[Holding]
) -> tuple[dict[str, Any] | Holding, ...]:
    """Return what became of the files that held cells, and which files hold cells now."""
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
    """Of what is kept; None if it is gone."""
    try:
        return storage_of(path).digest(path)[1]
    except FileNotFoundError:
        return None


def _certificate(workspace: Workspace, contract: TableContract, ids: Collection[bytes]) -> Path:
    name = hashlib.sha256(contract.source.encode() + b"".join(sorted(ids))).hexdigest()[:16]
    return workspace.home.path / FOLDER / f"{contract.source}-{contract.name}-{name}.json"


def _read(path: Path) -> _Earlier | None:
    """Return what a later certificate repeats from an earlier one; None without one."""
    try:
        return _FORMAT.decode(read_file(path))
    except FileNotFoundError:
        return None
    except Unreadable as problem:
        raise ErasureRefused(
            f"{path}, the certificate of an earlier erasure, cannot be read: {problem}.",
            fix="Restore it from a backup; or move it away, then the new one is of this erasure alone.",
        ) from problem


def _write(path: Path, document: dict[str, Any]) -> None:
    # No failpoint: a folder: one that is there already is as good.
    path.parent.mkdir(mode=0o700, exist_ok=True)
    with failpoint("pii.subject_keys", "certificate"):
        replace(path, encode(document))


def _erased(
    path: Path | None,
    complete: bool,
    of_subject: Traced,
    cells: Sequence[Holding],
    swept: int,
    remains: tuple[dict[str, Any], ...],
) -> SubjectErased:
    return SubjectErased(
        path,
        complete,
        sum(each.count for each in of_subject.encrypted if each.place == "landing"),
        sum(each.count for each in cells),
        tuple(sorted({window for windows in of_subject.windows.values() for window in windows})),
        swept,
        remains,
    )
