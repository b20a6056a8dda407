"""Rewrites the events of sealed windows without some of their values. Raw no longer has these events, so the
windows are rewritten from themselves.

One commit of ``deduped_events`` names the new files of both tables, as after judging (``quarantine``). An
event keeps its key, its position and its verdict. The tables above find other files than they have taken, and
fold these windows again.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

import pyarrow as pa
import pyarrow.parquet as pq

from omnisupport_ingest.lake import layout
from omnisupport_ingest.lake.commit import WindowChange
from omnisupport_ingest.lake.contenthash import hash_of_files
from omnisupport_ingest.lake.file_rows import batches_of
from omnisupport_ingest.lake.layout import LakeFile
from omnisupport_ingest.lake.snapshot import TableSnapshot
from omnisupport_ingest.lake.staging import StagedFiles, stage_folders
from omnisupport_ingest.lake.table import LakeTable, retrying
from omnisupport_ingest.layers.checkpoints import Identity
from omnisupport_ingest.layers.events import quarantine
from omnisupport_ingest.layers.events.quarantine_files import QuarantineFiles, may_have_any, named_by
from omnisupport_ingest.layers.plan import idempotency_key
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.storage import at_hand

Emptied = Callable[[pa.Table], pa.Table | None]
"""Returns rows of a file, which have the columns of its partition too, without the values to remove; None if
there are none. The state of a window says whether it was applied already."""


@dataclass(frozen=True, slots=True)
class Rewriting:
    """How one window is rewritten.

    ``of_quarantine`` and ``of_accepted``: applied to the rows of its files in each table; None: these stay.
    ``versions``: versions that the window then has (None: as before). ``why``: reasons for its checkpoint.
    ``tables``: only files that may have events of these are read (names at the source; None: all files).
    ``made_with``: what else the new values depend on: files that a killed call has left are used again only
    if this is the same.
    """

    of_quarantine: Emptied
    of_accepted: Emptied | None = None
    versions: tuple[str, ...] | None = None
    why: tuple[str, ...] = ()
    tables: frozenset[str] | None = None
    made_with: tuple[str, ...] = ()

    def accepted_in(self, files: Iterable[LakeFile]) -> list[LakeFile]:
        """Return those of the ``files`` of deduped events to read."""
        tables = self.tables
        return [each for each in files if tables is None or dict(each.partition)["source_table"] in tables]

    def withheld_in(self, files: Iterable[LakeFile]) -> list[LakeFile]:
        """Return those of the ``files`` of quarantine to read."""
        tables = self.tables
        return [each for each in files if tables is None or may_have_any(each, tables)]


def rewrite(
    workspace: Workspace,
    source: str,
    windows: Collection[str],
    wanted: Callable[[TableSnapshot], Mapping[str, Rewriting]],
    run_id: str,
) -> int:
    """Rewrite some of ``windows`` in one commit; return how many files were rewritten.

    ``wanted``: returns which of them to rewrite in a version of the deduped events, all with a state. It is
    called again if another process commits first. A second call changes nothing, and ends what a killed one
    began. The replaced files stay on disk until they are swept as old files.
    """
    deduped, quarantined = workspace.deduped(source), workspace.quarantine(source)
    identity = Identity(quarantine.LAYER, source, run_id)
    written: list[str] = []

    def attempt(judged: TableSnapshot) -> None:
        written.clear()
        planned = wanted(judged)
        if not planned:
            return
        files = QuarantineFiles(judged, quarantined.open())
        with _draft(deduped) as accepted, _draft(quarantined) as withheld:
            old = {
                window: (
                    _written(accepted, each.accepted_in(judged.files(window)), each.of_accepted),
                    _written(withheld, each.withheld_in(files.of(window)), each.of_quarantine),
                )
                for window, each in planned.items()
            }
            written.extend(file.path for both in old.values() for files in both for file in files)
            unit = idempotency_key(
                layer=quarantine.LAYER,
                table=quarantine.LAYER,
                window="",
                inputs=["without values", *written],
                versions=[
                    version
                    for each in planned.values()
                    for version in (*(each.versions or ()), *each.made_with)
                ],
            )
            generation = dict.fromkeys(planned, judged.version + 1)
            staged = stage_folders(deduped, [str(accepted)], unit=unit, generation=generation)
            beside = quarantine.stage(
                quarantined, [str(withheld)], sorted(planned), unit=unit, version=judged.version + 1
            )
        quarantine.add(quarantined, beside, identity)
        changes = [
            _change(judged, window, each, old[window], (staged, beside)) for window, each in planned.items()
        ]
        judged.commit([each for each in changes if each is not None], run_id=run_id)

    retrying(attempt, deduped)
    quarantine.settle(deduped, quarantined, sorted(windows), identity)
    return len(written)


def _change(
    judged: TableSnapshot,
    window: str,
    rewriting: Rewriting,
    old: tuple[Sequence[LakeFile], Sequence[LakeFile]],
    new: tuple[StagedFiles, StagedFiles],
) -> WindowChange | None:
    """Return the change of ``window`` in the deduped events; None if nothing of it changes.

    ``old``: the rewritten files, of accepted events and of quarantine; ``new``: what replaces them.
    """
    state = judged.state(window)
    assert state is not None, "only windows with a state are rewritten"
    versions = state.versions if rewriting.versions is None else rewriting.versions
    if not any(old) and versions == state.versions:
        return None
    leaving, left = ({file.path for file in files} for files in old)
    add, beside = (staged.of(window) for staged in new)
    companions = {*named_by(state)} - left | {file.path for file in beside}
    state = replace(state, versions=versions, companions=tuple(sorted(companions)))
    if any(old) and rewriting.why:
        checkpoint = replace(
            state.checkpoint,
            replaced_hash=state.checkpoint.content_hash,
            keys_changed=None,
            changed_by=rewriting.why,
        )
        state = replace(state, checkpoint=checkpoint)
    if add:
        folder, generation = judged.table.folder, judged.version + 1
        stay = [file.uri for file in judged.files(window) if file.path not in leaving]
        content = hash_of_files([*stay, *(at_hand(folder / file.path) for file in add)], "event_hash")
        stands_for = {path: of for path, of in state.compacted_units.items() if path not in leaving}
        checkpoint = replace(state.checkpoint, content_hash=str(content), generation=generation)
        state = replace(state, generation=generation, checkpoint=checkpoint, compacted_units=stands_for)
    return WindowChange(window, add, tuple(old[0]), state, replaces=False)


@contextmanager
def _draft(table: LakeTable) -> Iterator[Path]:
    """Yield a new folder for files of ``table``; it is deleted at the end."""
    draft = table.folder / layout.STAGING / uuid.uuid4().hex
    # No failpoint: a draft that no table names yet.
    draft.mkdir(mode=0o700, parents=True)
    try:
        yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _written(draft: Path, files: Iterable[LakeFile], emptied: Emptied | None) -> list[LakeFile]:
    """Write those of ``files`` that have values to remove below ``draft``, without these; return them."""
    found = []
    for file in files:
        if emptied is not None and any(emptied(rows) is not None for rows in _rows(file)):
            _write(draft, file, emptied)
            found.append(file)
    return found


def _write(draft: Path, file: LakeFile, emptied: Emptied) -> None:
    """Write ``file`` to its partition below ``draft``, with the same rows in the same order."""
    folder = draft.joinpath(*(part for part in PurePosixPath(file.path).parts[:-1] if "=" in part))
    # No failpoint: a draft that no table names yet.
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    schema = pq.read_schema(file.uri)
    with pq.ParquetWriter(
        folder / f"part-{uuid.uuid4().hex}.parquet", schema, compression="snappy"
    ) as writer:
        for rows in _rows(file):
            left = emptied(rows)
            writer.write_table((rows if left is None else left).select(schema.names).cast(schema))


def _rows(file: LakeFile) -> Iterator[pa.Table]:
    """Yield the rows of ``file``, with the columns of its partition."""
    schema = pq.read_schema(file.uri)
    for name, _ in file.partition:
        if name not in schema.names:
            schema = schema.append(pa.field(name, pa.string()))
    for batch in batches_of(file.uri, schema, dict(file.partition)):
        yield pa.Table.from_batches([batch])
