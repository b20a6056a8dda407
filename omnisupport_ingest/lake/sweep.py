"""Deletes files that a crash left behind, and files that no version in use holds.

When a unit's folder is staged, or a second run finds it, the folder gets a new time. So a folder that a
running writer is about to commit is young. Before deleting a folder, ``sweep`` moves it aside and checks its
age again: a writer that comes later finds no folder and stages its own.

A writer may have been held up for longer than any age, on a machine that slept. So files that no commit ever
named are deleted only behind a fence: an empty commit on the version at which nobody referenced them. A
writer that planned before the fence can no longer commit, and plans again.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import time
import uuid
from collections.abc import Collection
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import unquote

from deltalake import DeltaTable

from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.lake import layout
from omnisupport_ingest.lake.commit import until_first
from omnisupport_ingest.lake.delta import open_delta
from omnisupport_ingest.lake.log_files import LogFiles, files_in_log, has_vectors, left_since
from omnisupport_ingest.lake.snapshot import TableSnapshot
from omnisupport_ingest.lake.table import LakeTable
from omnisupport_ingest.storage import Kept, changed_before, forget_unread, storage_of

_SUFFIXES = (".parquet", ".bin")
"""Matches data files, and files of deletion vectors."""

_TRIES = 20
"""How often to look again while other writers commit."""

_REMEMBERED = timedelta(days=6)
"""Checkpoints know what left a table for a week (``delta.deletedFileRetentionDuration``)."""


def sweep(
    table: LakeTable, older_than: timedelta = timedelta(days=1), *, spare: Collection[str] = ()
) -> list[str]:
    """Delete unreferenced files of ``table`` older than ``older_than``; return their paths, sorted.

    ``spare``: paths of files that stay whatever this table's log says, because another table needs them.

    Unreferenced are unit folders, states and foreign files that no commit added, or that a commit removed
    longer ago than ``older_than``; and unfinished writes in the staging folder. Afterwards older versions of
    the table can no longer be read. A writer must commit within ``older_than``.
    """
    if not table.exists:
        return []
    now = time.time()
    folder, before = table.folder, now - older_than.total_seconds()
    unreferenced = until_first(lambda: _fenced(table, older_than, spare), _TRIES)
    if not storage_of(folder).is_local:
        limit = datetime.now(UTC) - older_than
        removed = _sweep_objects(folder, unreferenced, limit)
        forget_unread(folder, limit)
    else:
        removed = [
            target
            for target in sorted(_targets(folder, unreferenced))
            if _remove_if_old(folder / target, folder / layout.STAGING, before)
        ]
    # Drafts are on this machine, wherever the table is stored.
    return sorted([*removed, *_sweep_drafts(folder, before)])


def _fenced(table: LakeTable, older_than: timedelta, spare: Collection[str]) -> set[str]:
    """Return the unreferenced files, after putting a fence if old ones among them were never committed: no
    writer can commit those any more. Raises ``CommitConflict`` if another writer committed meanwhile."""
    handle = open_delta(table.folder)
    unreferenced = _unreferenced(table, handle, older_than, spare)
    if not unreferenced:
        return unreferenced
    left = handle.vacuum(retention_hours=0, dry_run=True, enforce_retention_duration=False, full=False)
    unnamed = unreferenced - {unquote(path) for path in left} - _in_log(table, handle).gone_vectors()
    if unnamed and _some_is_old(table.folder, unnamed, older_than):
        TableSnapshot(table, handle).fence()
    return unreferenced


def _some_is_old(folder: Path, files: Collection[str], older_than: timedelta) -> bool:
    if not storage_of(folder).is_local:
        return bool(_objects_of(folder, files, datetime.now(UTC) - older_than))
    limit = time.time() - older_than.total_seconds()
    return any(changed_before(folder / target, limit) for target in _targets(folder, set(files)))


def _sweep_drafts(folder: Path, before: float) -> list[str]:
    """Delete unfinished writes in which nothing is newer than ``before`` (seconds since 1970)."""
    staging, removed = folder / layout.STAGING, []
    for draft in sorted(staging.iterdir()) if staging.exists() else []:
        if _newest(draft) < before:
            _delete(draft)
            removed.append(f"{layout.STAGING}/{draft.name}")
    return removed


def sweep_replaced(table: LakeTable, *, spare: Collection[str] = ()) -> list[str]:
    """Delete the files that commits removed from ``table``, whatever their age; return their paths, sorted.

    ``spare``: as in ``sweep``. Afterwards only the newest version can be read; a reader of an older one
    fails. Files that no commit added stay for a day: a writer may be about to commit them.
    """
    if not table.exists:
        return []
    handle = open_delta(table.folder)
    found = handle.vacuum(retention_hours=0, dry_run=True, enforce_retention_duration=False, full=False)
    in_log = _in_log(table, handle)
    replaced = {unquote(path) for path in found} | in_log.gone_vectors()
    replaced -= in_log.needed(datetime.now(UTC)) | set(spare)
    if not storage_of(table.folder).is_local:
        # Whatever the store's clock says: no commit adds a file again that a commit removed.
        removed = _sweep_objects(table.folder, replaced, datetime.max.replace(tzinfo=UTC))
        # ``sweep`` finds the rest: files removed longer than a week ago, and those of dead writers.
        removed += sweep(table, spare=spare)
        _forget_strays(table, spare)
        return sorted(removed)
    staging = table.folder / layout.STAGING
    removed = [
        target
        for target in sorted(_targets(table.folder, replaced))
        if _remove_if_old(table.folder / target, staging, time.time())
    ]
    return sorted([*removed, *sweep(table, spare=spare)])


def sweepable(
    table: LakeTable, older_than: timedelta = timedelta(days=1), *, spare: Collection[str] = ()
) -> tuple[int, int]:
    """Return how many files ``sweep`` would delete, without unfinished writes, and how many bytes that would
    free."""
    if not table.exists:
        return 0, 0
    if not storage_of(table.folder).is_local:
        before = datetime.now(UTC) - older_than
        objects = _objects_of(
            table.folder, _unreferenced(table, open_delta(table.folder), older_than, spare), before
        )
        return len(objects), sum(each.bytes for each in objects)
    limit = time.time() - older_than.total_seconds()
    sizes: list[int] = []
    for target in _targets(table.folder, _unreferenced(table, open_delta(table.folder), older_than, spare)):
        path = table.folder / target
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_mtime < limit:
                files = _content(path) if path.is_dir() else (path,)
                sizes += map(freed_by, files)
    return len(sizes), sum(sizes)


def _objects_of(folder: Path, unreferenced: Collection[str], before: datetime) -> list[Kept]:
    """Return the objects of ``unreferenced`` written before ``before``; younger ones may be about to be
    committed. Objects cannot be renamed, so none is moved aside first."""
    return [
        each
        for each in storage_of(folder).listed(folder)
        if each.written < before
        and each.path.suffix in _SUFFIXES
        and each.path.relative_to(folder).as_posix() in unreferenced
    ]


def _sweep_objects(folder: Path, unreferenced: Collection[str], before: datetime) -> list[str]:
    """Delete the objects, and their copies on this machine."""
    storage, removed = storage_of(folder), []
    for each in _objects_of(folder, unreferenced, before):
        with failpoint("lake.sweep_delete", each.path):
            storage.unlink(each.path)
        removed.append(each.path.relative_to(folder).as_posix())
    return sorted(removed)


def _forget_strays(table: LakeTable, spare: Collection[str]) -> None:
    """Delete local copies of files that the newest version does not hold; another machine may have swept
    the originals."""
    folder, files = table.folder, table.open().all_files()
    held = {file.path for file in files} | set(spare)
    held |= {file.vector.path for file in files if file.vector is not None and file.vector.path is not None}
    for copy in storage_of(folder).copies(folder):
        path = copy.relative_to(folder).as_posix()
        if path not in held and not layout.is_state(path):
            # No failpoint: a copy, which is downloaded again when somebody needs it.
            copy.unlink(missing_ok=True)


def freed_by(file: Path) -> int:
    """Return the bytes that deleting ``file`` frees: 0 for a file on disk that another table shares."""
    storage = storage_of(file)
    if not storage.is_local:
        return storage.size(file) or 0
    found = file.stat()
    return found.st_size if found.st_nlink == 1 else 0


def _unreferenced(
    table: LakeTable, handle: DeltaTable, older_than: timedelta, spare: Collection[str]
) -> set[str]:
    """Return the files that no commit added, or that a commit removed longer ago than ``older_than``."""
    found = handle.vacuum(
        retention_hours=math.ceil(older_than / timedelta(hours=1)),
        dry_run=True,
        enforce_retention_duration=False,
        full=True,
    )
    since = datetime.now(UTC) - older_than
    needed = _in_log(table, handle).needed(since)
    if older_than > _REMEMBERED:
        needed |= left_since(table.folder, handle.version(), since)
    return {unquote(path) for path in found} - needed - set(spare)


def _in_log(table: LakeTable, handle: DeltaTable) -> LogFiles:
    """Return what the log says of files, for a table that may have deletion vectors; else an empty result.

    delta-rs alone would be wrong for such a table: it lists vector files that the table needs, and files that
    left just now but got a vector long ago.
    """
    return files_in_log(table.folder, handle.version()) if has_vectors(handle) else LogFiles()


def _targets(folder: Path, unreferenced: set[str]) -> set[str]:
    """Return unit folders without a referenced file, and unreferenced files elsewhere.

    A unit with a referenced file was committed, so no writer places it again, and its other files can be
    deleted one by one.
    """
    targets = set()
    units: dict[str, list[str]] = {}
    for path in unreferenced:
        if path.startswith(f"{layout.STAGING}/") or not path.endswith(_SUFFIXES):
            continue
        unit = layout.unit_of(path)
        if unit is None:
            targets.add(path)
        else:
            units.setdefault(unit, []).append(path)
    for unit, paths in units.items():
        held = {file.relative_to(folder).as_posix() for file in _content(folder / unit)}
        targets |= {unit} if held <= unreferenced else set(paths)
    return targets


def _content(folder: Path) -> list[Path]:
    """Return the files below ``folder`` that a log may name."""
    return [file for file in folder.rglob("*") if file.suffix in _SUFFIXES]


def _remove_if_old(target: Path, staging: Path, limit: float) -> bool:
    # With its suffix: an erasure looks for rows in every data file of the table's folder.
    aside = staging / f"{layout.SWEPT}{uuid.uuid4().hex}{target.suffix if target.is_file() else ''}"
    # No failpoint: making a folder that exists already does no harm.
    staging.mkdir(mode=0o700, exist_ok=True)
    try:
        if target.stat().st_mtime >= limit:
            return False
        with failpoint("lake.sweep", target):
            os.rename(target, aside)
    except FileNotFoundError:
        return False
    if aside.stat().st_mtime >= limit:
        with failpoint("lake.sweep", target):
            os.rename(aside, target)
        return False
    _delete(aside)
    return True


def _delete(path: Path) -> None:
    """Delete a folder, or the single file that a sweep had moved aside."""
    with failpoint("lake.sweep_delete", path):
        if path.is_dir():
            # A killed writer's own clean-up may delete in it at the same time.
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _newest(draft: Path) -> float:
    times = [draft.stat().st_mtime]
    for file in draft.rglob("*"):
        try:
            times.append(file.stat().st_mtime)
        except FileNotFoundError:
            continue
    return max(times)
