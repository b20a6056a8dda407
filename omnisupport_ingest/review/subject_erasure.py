"""Erases a subject: destroys its encryption key, so that no copy of its landed rows can be read any more.

This covers live and deleted rows of every table of the source, in landing, in raw, and in backups of both. It
cannot be undone. Layers downstream of raw hold readable values (what policies leave of them). So their
windows are judged again without the values, and former versions are swept at once; then the certificate is
complete. Sealed windows are rewritten by the command itself (``sealed_windows``). The same command continues
the work until all is done, and may be repeated at any time.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from omnisupport_ingest.cdc.erasing import key_hash
from omnisupport_ingest.contracts.at_rest import encrypted_columns
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.contracts.subject_keys import row_subject
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.read.holdings import Holding
from omnisupport_ingest.read.sealed_events import SealedEvents
from omnisupport_ingest.read.subject_traces import (
    Traced,
    by_other_keys,
    cells_above_raw,
    cells_left_over,
    found_by_keys_alone,
    key_ids_of_row,
    of_nobody,
    traced,
)
from omnisupport_ingest.review.certificate import (
    COMPLETE,
    FORMAT_VERSION,
    INCOMPLETE,
    PENDING,
    Earlier,
    ErasureRequest,
    Remains,
    certificate_path,
    read_earlier,
    sweep_former,
    what_became,
    windows_waiting,
    with_data,
    withdrawn_personal,
    write_certificate,
)
from omnisupport_ingest.review.erasing import ErasureIncomplete, ErasureRefused
from omnisupport_ingest.review.sealed_windows import erase_in_sealed_windows
from omnisupport_ingest.storage import storage_of


@dataclass(frozen=True, slots=True)
class SubjectErased:
    """What was destroyed, and what is left.

    ``certificate``: its file; None if nothing was recorded. ``complete``: the home holds nothing readable of
    the subject except what ``remains`` names. ``images``: row images that landed encrypted, in ``windows``.
    ``cells``: cells downstream of raw that are still readable. ``swept``: deleted files of former versions.
    ``waiting``: windows that are to be judged. ``sealed``: sealed windows with some of ``cells``, which stay.
    """

    certificate: Path | None
    complete: bool
    images: int
    cells: int
    windows: tuple[str, ...]
    swept: int
    remains: tuple[dict[str, Any], ...]
    waiting: tuple[str, ...]
    sealed: tuple[str, ...]


def look_up_subject(workspace: Workspace, contract: TableContract, key: str) -> SubjectErased:
    """Return what ``erase_subject`` would erase, without destroying the key. Raises ``ErasureRefused`` where
    it would."""
    ids = _key_ids(workspace, contract, key)
    withdrawn = withdrawn_personal(workspace, contract.source)
    of_subject = _traced(workspace, contract, key, ids)
    cells = cells_above_raw(workspace, contract, of_subject, whole_rows=False)
    sealed = SealedEvents.of(workspace, contract.source)
    remaining = _Remaining(
        cells,
        (),
        by_other_keys(workspace, contract, of_subject, ids),
        withdrawn,
        not_found=_not_found(sealed, contract, of_subject),
    )
    remains, _ = _remains(workspace, contract, of_subject, remaining)
    return _erased(None, False, of_subject, remaining, remains)


def erase_subject(
    workspace: Workspace, contract: TableContract, key: str, *, erased_by: str, why: str
) -> SubjectErased:
    """Destroy the encryption key of the subject of the row with ``key``, and write a certificate.

    ``key``: as ``key_text`` writes it. ``erased_by`` and ``why`` are recorded as given. Raises
    ``ErasureRefused``, saying why nothing was destroyed.
    """
    erased_by, why = erased_by.strip(), why.strip()
    for value, missing in ((erased_by, "name of the person who erases"), (why, "reason")):
        if not value:
            raise ErasureIncomplete(
                f"The {missing} is missing.", fix="Give it: the certificate records person, time and reason."
            )
    ids = _key_ids(workspace, contract, key)
    withdrawn = withdrawn_personal(workspace, contract.source)
    path = certificate_path(workspace, contract, b"".join(sorted(ids)))
    earlier = read_earlier(path)
    if earlier is None:
        earlier = _begin(workspace, contract, key, ids, ErasureRequest(erased_by, why, datetime.now(UTC)))
    workspace.subjects.note_names(contract.source, _names(workspace, contract))
    destroyed = workspace.subjects.destroy(ids)
    # Trace the subject now, to find events that landed or were judged meanwhile too.
    of_subject = _traced(workspace, contract, key, ids)
    sealed = SealedEvents.of(workspace, contract.source)
    windows = _name_windows(workspace, contract, ids, of_subject, sealed)
    erase_in_sealed_windows(workspace, contract.source)
    waiting = windows_waiting(workspace, contract.source, windows)
    cells = cells_above_raw(workspace, contract, of_subject, whole_rows=bool(waiting))
    swept, left_over = list[str](), list[Holding]()
    if not (cells or waiting):
        swept = sweep_former(workspace, contract.source, _tables(workspace, contract, of_subject))
        left_over = cells_left_over(workspace, contract, of_subject)
    others = by_other_keys(workspace, contract, of_subject, ids)
    # Of the files that were written meanwhile.
    sealed = SealedEvents.of(workspace, contract.source)
    not_found = _not_found(sealed, contract, of_subject)
    in_sealed = sealed.windows_of([*cells, *left_over])
    remaining = _Remaining(cells, waiting, others, withdrawn, left_over, in_sealed, not_found, len(swept))
    remains, in_versions = _remains(workspace, contract, of_subject, remaining)
    uncovered = [each for each in _of_subject(withdrawn, contract, of_subject) if with_data(workspace, each)]
    state = COMPLETE
    if cells or waiting or left_over or uncovered:
        state = PENDING
    elif of_subject.plain or others or not_found or in_versions:
        state = INCOMPLETE
    document = _head(contract, key, ids, earlier) | {
        "state": state,
        # The ids are keyed hashes of the subject. By them a run sees that an older file of keys was restored.
        "keys": {
            "of_the_subject": len(ids),
            "destroyed_now": destroyed,
            "ids": sorted(each.hex() for each in ids),
        },
        "encrypted": tuple(of_subject.encrypted),
        "after": what_became(workspace, earlier.before, [*cells, *left_over]),
        "swept": tuple(sorted({*earlier.swept, *swept})),
        "remains": remains,
    }
    write_certificate(path, document)
    return _erased(path, state == COMPLETE, of_subject, remaining, remains)


def _begin(
    workspace: Workspace, contract: TableContract, key: str, ids: Collection[bytes], asked: ErasureRequest
) -> Earlier:
    """Write the first certificate and name the windows of the subject, before its keys are destroyed: if the
    command is killed after that, both say what was begun."""
    of_subject = _traced(workspace, contract, key, ids)
    cells = cells_above_raw(workspace, contract, of_subject, whole_rows=False)
    earlier = Earlier(asked, tuple(cells), ())
    _name_windows(workspace, contract, ids, of_subject, SealedEvents.of(workspace, contract.source))
    remains = Remains()
    remains.add(
        "all of it",
        [contract.full_name],
        "this is written before the key is destroyed. If it stays so, the command was killed: give it again",
    )
    document = _head(contract, key, ids, earlier) | {
        "state": PENDING,
        "encrypted": tuple(of_subject.encrypted),
        "after": what_became(workspace, cells, cells),
        "swept": (),
        "remains": tuple(remains.entries),
    }
    write_certificate(certificate_path(workspace, contract, b"".join(sorted(ids))), document)
    return earlier


def _name_windows(
    workspace: Workspace,
    contract: TableContract,
    ids: Collection[bytes],
    of_subject: Traced,
    sealed: SealedEvents,
) -> set[str]:
    """Record which windows have rows of the subject; return them. Of sealed ones landing and raw do not say
    which key encrypted what, so they are named for all keys ``ids``."""
    in_sealed = sealed.windows_with(contract, of_subject)
    named = {each: {*of_subject.windows.get(each, ()), *in_sealed} for each in ids}
    workspace.subjects.name_windows(contract.source, named)
    return {window for windows in named.values() for window in windows}


def _head(contract: TableContract, key: str, ids: Collection[bytes], earlier: Earlier) -> dict[str, Any]:
    """Return the members of a certificate that are the same each time it is written, but for when."""
    return {
        "format_version": FORMAT_VERSION,
        "source": contract.source,
        "table": contract.full_name,
        "subject": contract.subject.name if contract.subject else None,
        "key_sha256": key_hash(key),
        "asked": earlier.asked,
        "before": earlier.before,
        "looked_at": datetime.now(UTC),
        "keys": {"of_the_subject": len(ids), "destroyed_now": 0},
    }


def _traced(workspace: Workspace, contract: TableContract, key: str, ids: Collection[bytes]) -> Traced:
    """Return what landing and raw have of the subject; it is known by ``key`` too if that names it."""
    of_subject = traced(workspace, contract.source, ids)
    if contract.subject is not None and contract.key == (contract.subject.column,):
        of_subject.rows.add((contract.schema, contract.table, key))
        of_subject.subjects.add(json.loads(key)[0])
    return of_subject


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
    # Of sealed windows no image is left, but the key that its values landed by: backups may have them.
    landed = workspace.subjects.known(ids[1:])
    others = workspace.subjects.living(row_ids.difference(ids[:1]))
    if not (row_ids or landed or traced(workspace, contract.source, ids).encrypted):
        # A mistyped key must not destroy the key of a subject that lands later.
        if SealedEvents.of(workspace, contract.source).has_row(contract, key):
            raise ErasureRefused(
                f"Landing and raw have no image of that row of {contract.full_name} any more: retention has "
                "removed them with their windows. So they cannot say whose the row is.",
                fix=f"Erase by the table whose key {contract.subject.column} is: that erases this row too.",
            )
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
    """What is left of a subject.

    ``cells``: readable cells downstream of raw. ``waiting``: windows that are to be judged, again or for the
    first time. ``by_other_keys``: landed images of its rows that other keys encrypted. ``withdrawn``:
    withdrawn contracts of the source with personal values. ``left_over``: readable cells in files of no
    version. ``sealed``: sealed windows with some of ``cells``, which stay. ``not_found``: tables with sealed
    windows in which rows of the subject cannot be found. ``swept``: how many files were swept now.
    """

    cells: Sequence[Holding]
    waiting: Collection[str]
    by_other_keys: Sequence[Holding]
    withdrawn: Sequence[TableContract]
    left_over: Sequence[Holding] = ()
    sealed: Sequence[str] = ()
    not_found: Sequence[TableContract] = ()
    swept: int = 0


def _names(workspace: Workspace, contract: TableContract) -> dict[str, str]:
    """Return the tables of the source that share the subject of ``contract``, with the name of it."""
    subjects = {each.full_name: each.subject for each in workspace.contracts.of_source(contract.source)}
    return {
        table: each.name
        for table, each in subjects.items()
        if each is not None and contract.subject is not None and each.name == contract.subject.name
    }


def _not_found(sealed: SealedEvents, contract: TableContract, of_subject: Traced) -> list[TableContract]:
    """Return the tables in which nobody can find the rows of the subject in sealed windows."""
    by_keys_alone = found_by_keys_alone(of_subject.contracts, contract.subject)
    return [each for each in by_keys_alone if sealed.has_events_of(each)]


def _tables(workspace: Workspace, contract: TableContract, of_subject: Traced) -> list[TableContract]:
    """Return the contracts of the tables that may hold rows of the subject."""
    return _of_subject(workspace.contracts.of_source(contract.source), contract, of_subject)


def _of_subject(
    contracts: Sequence[TableContract], contract: TableContract, of_subject: Traced
) -> list[TableContract]:
    """Return those of ``contracts`` whose tables may hold rows of the subject."""
    table_names, subject = {(schema, table) for schema, table, _ in of_subject.rows}, contract.subject
    return [
        each
        for each in contracts
        if each.table_name in table_names
        or (subject is not None and each.subject is not None and each.subject.name == subject.name)
    ]


def _remains(
    workspace: Workspace, contract: TableContract, of_subject: Traced, remaining: _Remaining
) -> tuple[tuple[dict[str, Any], ...], bool]:
    """Return what remains of the subject, where and why; and whether a bucket keeps old versions of it."""
    remains = Remains()
    remains.add(
        "encrypted images, which nobody can read",
        [each.path for each in of_subject.encrypted],
        "landing and raw are the record: files, checksums and the chain stay as they are",
    )
    remains.add(
        "images that landed plain",
        [each.path for each in of_subject.plain],
        "they landed before the contract said encrypted; retention of landing and raw deletes them",
    )
    remains.add(
        "cells that can be read",
        [each.path for each in remaining.cells],
        "their windows are not judged again yet, then give the command again; or they landed plain, then "
        "erase the rows without --subject too, once they have ended; or the row had the value from another "
        "subject",
    )
    remains.add(
        "sealed windows with cells that can be read",
        remaining.sealed,
        "they could not be erased: the lake does not have whom such a row names, or it had the value from "
        "another subject. No run judges these windows again, so this certificate stays pending",
    )
    remains.add(
        "tables whose sealed windows were not searched",
        [each.full_name for each in remaining.not_found],
        "the lake does not have whom their rows name (pii changes the column, or its type is neither text "
        "nor integer), and landing and raw have no images of sealed windows. What such rows hold can be read "
        "as before, and no run changes it, so this certificate never becomes complete",
    )
    remains.add(
        "files that no table names",
        [each.path for each in remaining.left_over],
        "a run is writing them, or wrote them and died: give the command again when no run is under way; "
        "what a dead one left goes when it is a day old",
    )
    remains.add(
        "windows that wait to be judged",
        remaining.waiting,
        "what a run under way has read may be written still; give the command again when nothing is pending",
    )
    remains.add(
        "images of its rows that another key encrypted",
        [each.path for each in remaining.by_other_keys],
        "the row had another key then, or said of nobody's whose it is: erase it by that key (explain names "
        "former keys), or by its own table, with --subject too",
    )
    remains.add(
        "lines that could not be read and say of nobody whose they are",
        [each.path for each in of_nobody(workspace, contract.source)],
        "they may have its values, encrypted by the key of their table; retention of landing and raw deletes "
        "them",
    )
    erased = [
        (each, [column for column in each.source_columns if column.name in encrypted_columns(each)])
        for each in _tables(workspace, contract, of_subject)
    ]
    remains.add_outside(workspace, contract.source, erased)
    remains.add_withdrawn(workspace, remaining.withdrawn)
    remains.add("backups of keys/", ["wherever they are"], "whoever restores one has the destroyed key again")
    in_versions = remains.add_of_storage(workspace, contract.source)
    if not storage_of(workspace.home.lake / "any").is_local:
        remains.add(
            "homes of other machines on this bucket",
            ["wherever they are"],
            "their keys/ has the key: give the same command there; their copies of files go with `sweep`",
        )
    return tuple(remains.entries), in_versions


def _erased(
    path: Path | None,
    complete: bool,
    of_subject: Traced,
    remaining: _Remaining,
    remains: tuple[dict[str, Any], ...],
) -> SubjectErased:
    return SubjectErased(
        path,
        complete,
        of_subject.images,
        sum(each.count for each in (*remaining.cells, *remaining.left_over)),
        tuple(sorted({window for windows in of_subject.windows.values() for window in windows})),
        remaining.swept,
        remains,
        tuple(remaining.waiting),
        tuple(remaining.sealed),
    )
