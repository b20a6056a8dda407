"""Count personal values in files: of landing and raw, and of the tables downstream.

The callers (``subject_traces``, ``row_cells``) say what to look for. This module knows which files there are,
and how to count a file that is still being written or vanishes meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.lake import layout
from omnisupport_ingest.lake.table import LakeTable
from omnisupport_ingest.landing.integrity import sha256_of
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.storage import storage_of

LANDING, RAW = "landing", "raw_cdc_staging"


@dataclass(frozen=True, slots=True)
class Holding:
    """A file with personal values of a subject or a row: ``count`` images in landing and raw, ``count`` cells
    in a table.

    ``place``: landing, raw, or the path of a table in the lake. ``path`` is relative to the home."""

    place: str
    path: str
    sha256: str
    count: int


def held_files(table: LakeTable) -> Iterator[tuple[str, Path]]:
    """Yield the files of the newest version: the path in the table, and where it can be opened."""
    snapshot = table.look()
    for file in snapshot.all_files() if snapshot is not None else ():
        # Rows that a deletion vector hides are still in the file.
        yield file.path, Path(file.stored)


def left_over_files(table: LakeTable) -> Iterator[tuple[str, Path]]:
    """Yield the data files in the table's folder that its newest version does not hold."""
    storage, snapshot = storage_of(table.folder), table.look()
    held = {file.path for file in snapshot.all_files()} if snapshot is not None else set()
    found = {Path(folder, name) for folder, _, names in os.walk(table.folder) for name in names}
    if not storage.is_local:
        found |= {each.path for each in storage.listed(table.folder)}
    for file in sorted(found):
        path = file.relative_to(table.folder).as_posix()
        # A former version moved files aside without their suffix.
        is_data = file.suffix == ".parquet" or (not file.suffix and file.name.startswith(layout.SWEPT))
        if is_data and path not in held and not layout.is_state(path):
            yield path, storage.at_hand(file)


def files_of_table(files: Iterable[tuple[str, Path]], contract: TableContract) -> Iterator[tuple[str, Path]]:
    """Yield those of ``files`` with events in the partition of the table, or without such a partition."""
    for path, file in files:
        folders = dict(part.split("=", 1) for part in PurePosixPath(path).parts[:-1] if "=" in part)
        if unquote(folders.get("source_table", contract.table)) == contract.table:
            yield path, file


def count_cells(
    workspace: Workspace,
    table: LakeTable,
    files: Iterable[tuple[str, Path]],
    count_in: Callable[[Path], int],
    *,
    may_vanish: bool,
) -> list[Holding]:
    """Return those ``files`` of ``table`` in which ``count_in`` finds cells.

    ``may_vanish``: no version of the table names the files, so one may be gone or incomplete. An incomplete
    file counts as one cell.
    """
    found, home = [], workspace.home.path
    for _, file in files:
        try:
            if count := _count(file, count_in, may_be_draft=may_vanish):
                name = file.relative_to(home).as_posix()
                found.append(Holding(table.spec.path, name, sha256_of(file), count))
        except FileNotFoundError:
            if not may_vanish:
                raise
    return sorted(found, key=lambda each: each.path)


def _count(file: Path, count_in: Callable[[Path], int], *, may_be_draft: bool) -> int:
    try:
        return count_in(file)
    except FileNotFoundError:
        raise
    except (OSError, pa.ArrowInvalid, KeyError):
        # The file is incomplete, or a task wrote it for itself with other columns.
        if not may_be_draft:
            raise
        return 1


def landed_events(
    workspace: Workspace, source: str, columns: Sequence[str], windows: Collection[str] | None = None
) -> Iterator[tuple[str, Path, str, pa.RecordBatch]]:
    """Yield layer, file, window and the ``columns`` of the events of every file of landing and raw that
    exists. ``windows``: only of these."""
    store, raw = workspace.landing(source), workspace.raw(source).look()
    files = [
        (LANDING, store.path_of(file), file.window) for each in store.manifests() for file in each.files
    ] + [(RAW, Path(file.uri), file.window) for file in (raw.all_files() if raw is not None else ())]
    for layer, path, window in files:
        if (windows is None or window in windows) and path.exists():
            with pq.ParquetFile(path) as parquet:
                for batch in parquet.iter_batches(columns=list(columns)):
                    yield layer, path, window, batch


def former_raw_events(
    workspace: Workspace, source: str, columns: Sequence[str]
) -> Iterator[tuple[str, Path, str, pa.RecordBatch]]:
    """Yield as ``landed_events`` the events of files of raw that its newest version does not hold: retention
    removed them, or compaction replaced them, and no sweep came yet. The window is empty.

    A file that cannot be read whole is left out: a run is writing it, from landing, which has the events.
    """
    for _, path in left_over_files(workspace.raw(source)):
        try:
            batches = pq.read_table(path, columns=list(columns), partitioning=None).to_batches()
        except (OSError, pa.ArrowInvalid, KeyError):
            continue
        for batch in batches:
            yield RAW, path, "", batch


def holdings_of(workspace: Workspace, counts: Mapping[tuple[str, Path], int]) -> list[Holding]:
    """Return the files of landing and raw with their ``counts`` of images."""
    home = workspace.home.path
    return [
        Holding(layer, path.relative_to(home).as_posix(), sha256_of(path), count)
        for (layer, path), count in sorted(counts.items())
    ]
