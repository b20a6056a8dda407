"""Erases a subject: live and deleted rows of every table of the source. It cannot be undone.

The subject's encryption key is destroyed, or the subject is recorded as one that never gets a key. So no copy
that landed encrypted can be read any more, in landing, in raw, and in backups of both. Copies that landed
plain stay there until retention removes them. Layers downstream of raw hold readable values (what policies
leave of them). So their windows are judged again without the values, whatever form these landed in, and
former versions are swept at once. Sealed windows are rewritten by the command itself (``sealed_windows``).
The same command continues the work until all is done, and may be repeated at any time.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from omnisupport_ingest.cdc.erasing import key_hash
from omnisupport_ingest.cdc.subject_values import Of
from omnisupport_ingest.contracts.at_rest import maybe_encrypted_columns
from omnisupport_ingest.contracts.erased_subjects import ErasedName
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.contracts.names import row_subject
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.read.former_subjects import (
    FormerOfTable,
    cells_by_former_keys,
    former_of_subject,
    images_by_former_keys,
)
from omnisupport_ingest.read.holdings import Holding
from omnisupport_ingest.read.plain_images import Sought, plain_images
from omnisupport_ingest.read.row_cells import withheld_of_no_row
from omnisupport_ingest.read.sealed_events import SealedEvents
from omnisupport_ingest.read.subject_traces import (
    Subjects,
    Traced,
    cells_above_raw,
    cells_left_over,
    key_ids_of_row,
    named_in_lake,
    of_nobody,
    of_others,
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
    earlier_ids,
    read_earlier,
    sweep_former,
    what_became,
    windows_waiting,
    with_data,
    withdrawn_personal,
    write_certificate,
)
from omnisupport_ingest.review.erasing import ErasureIncomplete, ErasureRefused, record
from omnisupport_ingest.review.sealed_windows import erase_in_sealed_windows, tables_not_found
from omnisupport_ingest.storage import storage_of


@dataclass(frozen=True, slots=True)
class SubjectErased:
    """What was destroyed, and what is left.

    ``certificate``: its file; None if nothing was recorded. ``state``: of it; None likewise. ``images``: row
    images that landed encrypted, ``plain_images``: those that landed plain, in ``windows``.
    ``cells``: cells downstream of raw that are still readable. ``swept``: deleted files of former versions.
    ``waiting``: windows that are to be judged. ``sealed``: sealed windows with some of ``cells``, which stay.
    """

    certificate: Path | None
    state: str | None
    images: int
    plain_images: int
    cells: int
    windows: tuple[str, ...]
    swept: int
    remains: tuple[dict[str, Any], ...]
    waiting: tuple[str, ...]
    sealed: tuple[str, ...]

    @property
    def complete(self) -> bool:
        """Whether the home holds nothing readable of the subject except what ``remains`` names."""
        return self.state == COMPLETE


def look_up_subject(workspace: Workspace, contract: TableContract, key: str) -> SubjectErased:
    """Return what ``erase_subject`` would erase, without recording it. Raises ``ErasureRefused`` where it
    would."""
    subjects = _subjects(workspace, contract, key)
    withdrawn = withdrawn_personal(workspace, contract.source)
    of_subject = _traced(workspace, contract, key, subjects)
    cells = cells_above_raw(workspace, contract, of_subject, whole_rows=False)
    former = _former(workspace, contract, key, subjects)
    cells += _not_in(cells, cells_by_former_keys(workspace, former))
    by_former, mixed = _images_by_former_keys(workspace, former, subjects)
    remaining = _Remaining(
        cells,
        (),
        of_others(workspace, contract, of_subject, subjects),
        withdrawn,
        not_found=tables_not_found(workspace, contract, of_subject),
        by_former=by_former,
        mixed=mixed,
    )
    remains, _ = _remains(workspace, contract, of_subject, remaining)
    return _erased(None, None, of_subject, remaining, remains)


def erase_subject(
    workspace: Workspace, contract: TableContract, key: str, *, erased_by: str, why: str
) -> SubjectErased:
    """Record the subject of the row with ``key`` as erased, destroy its encryption key, and write a
    certificate.

    ``key``: as ``key_text`` writes it. ``erased_by`` and ``why`` are recorded as given. Raises
    ``ErasureRefused``, saying why nothing was recorded.
    """
    erased_by, why = erased_by.strip(), why.strip()
    for value, missing in ((erased_by, "name of the person who erases"), (why, "reason")):
        if not value:
            raise ErasureIncomplete(
                f"The {missing} is missing.", fix="Give it: the certificate records person, time and reason."
            )
    subjects = _subjects(workspace, contract, key)
    withdrawn = withdrawn_personal(workspace, contract.source)
    keys = workspace.subjects
    keys.make()
    ids = subjects.all_ids(workspace, contract.source)
    path = certificate_path(workspace, contract, b"".join(sorted(ids)))
    earlier = read_earlier(path)
    if earlier is None:
        asked = ErasureRequest(erased_by, why, datetime.now(UTC))
        earlier = _begin(workspace, contract, key, subjects, asked)
    # Whatever landed after the windows were named was judged by a run that knew of the erasure. So a row that
    # lives, and is sent again and again, makes no window stale.
    named_before = earlier.windows_named and keys.destroyed(ids) == ids
    keys.note_names(contract.source, _names(workspace, contract))
    # Before the key goes: it may encrypt what links former keys of rows to present ones.
    former = _former(workspace, contract, key, subjects, earlier.former_keys_sha256)
    of_former = _record_former(workspace, former, earlier.asked)
    destroyed = keys.destroy(ids)
    # Trace the subject now, to find events that landed or were judged meanwhile too.
    of_subject = _traced(workspace, contract, key, subjects)
    sealed = SealedEvents.of(workspace, contract.source)
    _name_windows(workspace, contract, ids, of_subject, sealed, plain=not named_before)
    windows = {*keys.windows_of(contract.source, ids), *of_former}
    erase_in_sealed_windows(workspace, contract.source)
    waiting = windows_waiting(workspace, contract.source, windows)
    cells = cells_above_raw(workspace, contract, of_subject, whole_rows=bool(waiting))
    cells += _not_in(cells, cells_by_former_keys(workspace, former))
    swept, left_over = list[str](), list[Holding]()
    if not (cells or waiting):
        swept = sweep_former(workspace, contract.source, _tables(workspace, contract, of_subject))
        left_over = cells_left_over(workspace, contract, of_subject)
        left_over += _not_in(left_over, cells_by_former_keys(workspace, former, left_over=True))
    others = of_others(workspace, contract, of_subject, subjects)
    # Of the files that were written meanwhile.
    sealed = SealedEvents.of(workspace, contract.source)
    not_found = tables_not_found(workspace, contract, of_subject)
    in_sealed = sealed.windows_of([*cells, *left_over])
    by_former, mixed = _images_by_former_keys(workspace, former, subjects)
    remaining = _Remaining(
        cells,
        waiting,
        others,
        withdrawn,
        left_over,
        in_sealed,
        not_found,
        len(swept),
        by_former,
        mixed,
    )
    remains, in_versions = _remains(workspace, contract, of_subject, remaining)
    uncovered = [each for each in _of_subject(withdrawn, contract, of_subject) if with_data(workspace, each)]
    state = COMPLETE
    if cells or waiting or left_over or uncovered:
        state = PENDING
    elif of_subject.plain or others or by_former or mixed or not_found or in_versions:
        state = INCOMPLETE
    document = _head(contract, key, ids, earlier) | {
        "state": state,
        "windows_named": True,
        # The ids are keyed hashes of the subject. By them a run sees that an older file of keys was restored.
        "keys": {
            "of_the_subject": len(ids),
            "destroyed_now": destroyed,
            "ids": sorted(each.hex() for each in ids),
        },
        "former_keys_sha256": sorted({each for table in former for each in table.named}),
        "encrypted": tuple(of_subject.encrypted),
        "record": tuple(of_subject.plain),
        "after": what_became(workspace, earlier.before, [*cells, *left_over]),
        "swept": tuple(sorted({*earlier.swept, *swept})),
        "remains": remains,
    }
    write_certificate(path, document)
    return _erased(path, state, of_subject, remaining, remains)


def _begin(
    workspace: Workspace, contract: TableContract, key: str, subjects: Subjects, asked: ErasureRequest
) -> Earlier:
    """Write the first certificate and name the windows of the subject, before it is recorded as erased: if
    the command is killed after that, both say what was begun."""
    ids = subjects.all_ids(workspace, contract.source)
    of_subject = _traced(workspace, contract, key, subjects)
    cells = cells_above_raw(workspace, contract, of_subject, whole_rows=False)
    earlier = Earlier(asked, tuple(cells), ())
    sealed = SealedEvents.of(workspace, contract.source)
    _name_windows(workspace, contract, ids, of_subject, sealed, plain=True)
    remains = Remains()
    remains.add(
        "all of it",
        [contract.full_name],
        "this is written before anything is erased. If it stays so, the command was killed: give it again",
    )
    document = _head(contract, key, ids, earlier) | {
        "state": PENDING,
        "encrypted": tuple(of_subject.encrypted),
        "record": tuple(of_subject.plain),
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
    *,
    plain: bool,
) -> None:
    """Record which windows have rows of the subject. Those that are sealed, or have images that landed plain,
    are named for all keys ``ids``: nothing says which of these each image is of. ``plain``: name the windows
    with plain images too."""
    for_all = sealed.windows_with(contract, of_subject) | (of_subject.plain_windows if plain else set())
    named = {each: {*of_subject.windows.get(each, ()), *for_all} for each in ids}
    workspace.subjects.name_windows(contract.source, named)


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


def _traced(workspace: Workspace, contract: TableContract, key: str, subjects: Subjects) -> Traced:
    """Return what landing and raw have of the subject; it is known by ``key`` too if that names it."""
    of_subject = traced(workspace, contract.source, subjects)
    if contract.subject is not None and contract.key == (contract.subject.column,):
        of_subject.rows.add((contract.schema, contract.table, key))
        of_subject.subjects.add(json.loads(key)[0])
    return of_subject


def _subjects(workspace: Workspace, contract: TableContract, key: str) -> Subjects:
    """Return whom to erase: the row's subject, and the row itself, as far as it names nobody."""
    if contract.subject is None:
        raise ErasureRefused(
            f"The contract of {contract.full_name} of {contract.source} does not say whose a row is.",
            fix='Write x-cdc.at_rest: {"pii": "plain", "subject": "person", "subject_column": '
            '"person_id"} with your own names, and name personal columns in x-cdc.pii; with "encrypted" '
            "instead of plain, what lands from then on can be erased from landing and raw too. Or erase the "
            "row without --subject.",
        )
    row = (contract.schema, contract.table, key)
    own, named = (row_subject(contract.full_name), key), list[Of]()
    if contract.key == (contract.subject.column,):
        named = [(contract.subject.name, json.loads(key)[0])]
    row_ids = key_ids_of_row(workspace, contract, key)
    keys, source = workspace.subjects, contract.source
    images = plain_images(workspace, source, [contract], Sought((), {row}))
    # The old row of a key change may name another subject by its key alone.
    landed_plain = {each.of for each in images if each.personal}
    named_plain = frozenset({own, *named, *landed_plain})
    subjects = Subjects(contract.subject.name, frozenset(row_ids), named_plain)
    id_of = dict(zip(sorted(subjects.named), keys.ids_of(subjects.triples(source)), strict=False))
    # Of sealed windows no image is left, but the key that its values landed by: backups may have them.
    known = keys.known([id_of[each] for each in named if each in id_of])
    if not (row_ids or landed_plain or known):
        if earlier := earlier_ids(workspace, contract, key_hash(key)):
            # Retention has removed what landed: the certificate says who was erased.
            theirs = named_plain | named_in_lake(workspace, contract, earlier)
            return Subjects(contract.subject.name, earlier, theirs)
        _require_landed(workspace, contract, key, subjects)
    erased = keys.destroyed(id_of.values())
    others: set[object] = {*keys.living(row_ids - {id_of.get(own)})}
    others |= {id_of.get(each, each) for each in landed_plain - {own} if id_of.get(each) not in erased}
    if len(others) > 1:
        raise ErasureRefused(
            f"The row of {contract.full_name} has belonged to {len(others)} subjects.",
            fix="Erase each by a table of which the key is the subject.",
        )
    return subjects


def _require_landed(workspace: Workspace, contract: TableContract, key: str, subjects: Subjects) -> None:
    """Raise ``ErasureRefused`` if nothing of the subject is there: a mistyped key must not erase a subject
    that lands later."""
    assert contract.subject is not None, "it names its subject"
    of_subject = _traced(workspace, contract, key, subjects)
    if of_subject.encrypted or of_subject.plain:
        return
    if contract.encrypted_subject is None and cells_above_raw(
        workspace, contract, of_subject, whole_rows=False
    ):
        # Retention has removed what landed.
        return
    if SealedEvents.of(workspace, contract.source).has_row(contract, key):
        raise ErasureRefused(
            f"Landing and raw have no image of that row of {contract.full_name} any more: retention has "
            "removed them with their windows. So they cannot say whose the row is.",
            fix=f"Erase by the table whose key {contract.subject.column} is: that erases this row too.",
        )
    raise ErasureRefused(
        f"{contract.full_name} of {contract.source} has no row with that key of which values have landed.",
        fix=f"Write the key ({', '.join(contract.key)}) as PostgreSQL prints it; or erase by the table whose "
        f"key {contract.subject.column} is.",
    )


@dataclass(frozen=True, slots=True)
class _Remaining:
    """What is left of a subject.

    ``cells``: readable cells downstream of raw. ``waiting``: windows that are to be judged, again or for the
    first time. ``of_others``: landed images of its rows that are of other subjects. ``withdrawn``:
    withdrawn contracts of the source with personal values. ``left_over``: readable cells in files of no
    version. ``sealed``: sealed windows with some of ``cells``, which stay. ``not_found``: tables with sealed
    windows in which rows of the subject cannot be found. ``swept``: how many files were swept now.
    ``by_former``: landed images by former keys of its rows that do not name it. ``mixed``: those by former
    keys that rows of others had too.
    """

    cells: Sequence[Holding]
    waiting: Collection[str]
    of_others: Sequence[Holding]
    withdrawn: Sequence[TableContract]
    left_over: Sequence[Holding] = ()
    sealed: Sequence[str] = ()
    not_found: Sequence[TableContract] = ()
    swept: int = 0
    by_former: Sequence[Holding] = ()
    mixed: Sequence[Holding] = ()


def _former(
    workspace: Workspace,
    contract: TableContract,
    key: str,
    subjects: Subjects,
    named: Collection[str] = (),
) -> list[FormerOfTable]:
    """Return what tables have by former keys of rows of ``subjects``. ``named``: as of
    ``former_of_subject``."""
    tables = workspace.contracts.of_source(contract.source)
    if not any(each.key_since for each in tables):
        return []
    texts = {text for kind, text in subjects.named if kind == subjects.kind}
    said = [(subjects.kind, each) for each in sorted(_traced(workspace, contract, key, subjects).subjects)]
    ids = subjects.all_ids(workspace, contract.source)
    known = workspace.subjects.ids_of([(contract.source, *each) for each in said])
    # By another contract an image may have been of another subject than it says now.
    texts |= {text for (_, text), key_id in zip(said, known, strict=False) if key_id in ids}
    return former_of_subject(workspace, contract.source, {(subjects.kind, each) for each in texts}, named)


def _record_former(
    workspace: Workspace, former: Sequence[FormerOfTable], asked: ErasureRequest
) -> frozenset[str]:
    """Record the events by former keys as erased, and return their windows."""
    found = set[str]()
    for each in former:
        if each.spans:
            done = record(workspace, each.contract, each.spans, erased_by=asked.by, why=asked.why)
            found |= {window for entry in (*done.before, *done.recorded) for window in entry.windows}
    return frozenset(found)


def _images_by_former_keys(
    workspace: Workspace, former: Sequence[FormerOfTable], subjects: Subjects
) -> tuple[list[Holding], list[Holding]]:
    """Return the files of landing and raw with readable images by former keys: of the subject's rows alone,
    and of others' too."""
    ids = subjects.all_ids(workspace, former[0].contract.source) if former else frozenset[bytes]()
    alone, mixed = (images_by_former_keys(workspace, former, ids, mixed=each) for each in (False, True))
    return alone, mixed


def _not_in(known: Sequence[Holding], more: Sequence[Holding]) -> list[Holding]:
    paths = {each.path for each in known}
    return [each for each in more if each.path not in paths]


def _names(workspace: Workspace, contract: TableContract) -> dict[str, ErasedName]:
    """Return the tables of the source that share the subject of ``contract``, with the name of it."""
    subjects = {each.full_name: each.subject for each in workspace.contracts.of_source(contract.source)}
    return {
        table: ErasedName(each.name, each.encrypted)
        for table, each in subjects.items()
        if each is not None and contract.subject is not None and each.name == contract.subject.name
    }


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
        "landing and raw are the record that all else is made from: files, checksums and the chain stay as "
        "they are, until retention of landing and raw deletes them",
    )
    remains.add(
        "cells that can be read",
        [each.path for each in remaining.cells],
        "their windows are not judged again yet, or the job of the history has not run: give the command "
        "again afterwards; or the row had the value from another subject",
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
        "the lake does not have whom their rows name (pii changes or changed the column, or its type is "
        "neither text nor integer), and landing and raw have no images of sealed windows. What such rows "
        "hold can be read as before, and no run changes it, so this certificate never becomes complete",
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
        "images of its rows that are of another subject",
        [each.path for each in remaining.of_others],
        "the row had another key then, or said of nobody's whose it is: erase it by that key (explain names "
        "former keys), or by its own table, with --subject too",
    )
    remains.add(
        "images by a former key of its rows",
        [each.path for each in remaining.by_former],
        "the table had another key then, and they do not name the subject: they landed plain, or encrypted "
        "by another key. Above raw they have no values; retention of landing and raw deletes them",
    )
    remains.add(
        "images by a former key that rows of other subjects had too",
        [each.path for each in remaining.mixed],
        "an event with that key names another subject. Those that name nobody may have the subject's values, "
        "above raw too; retention deletes them",
    )
    remains.add(
        "lines that could not be read and say of nobody whose they are",
        [each.path for each in of_nobody(workspace, contract.source)],
        "they may have its values, encrypted by the key of their table; retention of landing and raw deletes "
        "them",
    )
    tables = _tables(workspace, contract, of_subject)
    plain = [each for each in tables if each.encrypted_subject is None]
    remains.add(
        "events in quarantine whose key could not be read",
        {each.path for table in plain for each in withheld_of_no_row(workspace, table)},
        "nobody can say whose they are, so they may have its values, as landing and raw have them; retention "
        "of landing, raw and quarantine deletes them",
    )
    erased = [
        (each, [column for column in each.source_columns if column.name in maybe_encrypted_columns(each)])
        for each in tables
    ]
    remains.add_outside(workspace, contract.source, erased)
    remains.add_withdrawn(workspace, remaining.withdrawn)
    where = ["wherever they are"]
    remains.add("backups of keys/", where, "whoever restores one has the destroyed key again")
    if plain:
        remains.add("backups", where, "they have what the home had when they were made")
    in_versions = remains.add_of_storage(workspace, contract.source)
    if not storage_of(workspace.home.lake / "any").is_local:
        remains.add(
            "homes of other machines on this bucket",
            ["wherever they are"],
            "their keys/ has the key, or does not know the erasure: give the same command there; their "
            "copies of files go with `sweep`",
        )
    return tuple(remains.entries), in_versions


def _erased(
    path: Path | None,
    state: str | None,
    of_subject: Traced,
    remaining: _Remaining,
    remains: tuple[dict[str, Any], ...],
) -> SubjectErased:
    return SubjectErased(
        path,
        state,
        of_subject.images,
        of_subject.plain_images,
        sum(each.count for each in (*remaining.cells, *remaining.left_over)),
        tuple(sorted(of_subject.plain_windows.union(*of_subject.windows.values()))),
        remaining.swept,
        remains,
        tuple(remaining.waiting),
        tuple(remaining.sealed),
    )
