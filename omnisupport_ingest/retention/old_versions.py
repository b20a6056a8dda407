"""Versions of rows that ended before the limit a contract sets for its history, and their removal.

Open versions stay, whatever their age. The ledger records the time before which ended versions were removed,
so a history that is made again leaves out the same ones. ``as-of`` reads events and is not affected.
"""

from __future__ import annotations

import shutil
import uuid
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq

from omnisupport_ingest.cdc.columnar import micros_of
from omnisupport_ingest.cdc.history_update import ended
from omnisupport_ingest.cdc.stored import hashes_in
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.lake import layout
from omnisupport_ingest.lake.commit import WindowChange
from omnisupport_ingest.lake.contenthash import ContentHash
from omnisupport_ingest.lake.key_files import WrittenFile, write_again, written_file
from omnisupport_ingest.lake.layout import WHOLE_TABLE, LakeFile, StagedFile
from omnisupport_ingest.lake.live_rows import live_table
from omnisupport_ingest.lake.snapshot import TableSnapshot
from omnisupport_ingest.lake.staging import place_files
from omnisupport_ingest.lake.table import retrying
from omnisupport_ingest.layers.histories.history import LAYER
from omnisupport_ingest.layers.plan import idempotency_key
from omnisupport_ingest.layers.workspace import Workspace, order_of

_END = "_cdc_valid_to"


@dataclass(frozen=True, slots=True)
class OldVersions:
    """Versions of the history of ``table`` to remove: those that ended before ``ended_before``
    (timezone-aware).

    ``versions``: how many. ``keep``: how long the contract keeps them. ``files``: how many are rewritten
    without them; ``bytes``: about the share of these files that the versions take.
    """

    table: str
    keep: timedelta
    ended_before: datetime
    files: int
    versions: int
    bytes: int


def ends_before(keep: timedelta | None, watermark: datetime | None) -> datetime | None:
    """Return the time before which ended versions are removed, given ``keep``; None if all stay.

    It moves in whole hours, because each move rewrites files.
    """
    if keep is None or watermark is None:
        return None
    try:
        return (watermark - keep).replace(minute=0, second=0, microsecond=0)
    except OverflowError:
        return None


def old_versions(
    workspace: Workspace, contract: TableContract, watermark: datetime | None
) -> OldVersions | None:
    """Return the versions in the history of ``contract`` that it no longer keeps; None if there are none."""
    keep = contract.retention.history
    before, snapshot = ends_before(keep, watermark), workspace.history(contract).look()
    if keep is None or before is None or snapshot is None:
        return None
    files, versions, size = 0, 0, 0
    for file in _files_with_old(snapshot, before):
        found = _count(file, before)
        if found:
            files, versions = files + 1, versions + found
            size += file.bytes * found // file.rows
    return OldVersions(contract.name, keep, before, files, versions, size) if versions else None


def remove_versions(workspace: Workspace, contract: TableContract, before: datetime) -> tuple[int, int]:
    """Rewrite the history of ``contract`` without the versions that ended ``before``, in one commit.

    Returns how many files were rewritten or left the table, and about how many bytes that saves. A second
    call changes nothing. The replaced files stay on disk until they are swept as old files.
    """
    left = [0, 0]

    def attempt(snapshot: TableSnapshot) -> None:
        left[:] = _leave(snapshot, contract, before)

    if workspace.history(contract).look() is not None:
        retrying(attempt, workspace.history(contract))
    return left[0], left[1]


def _leave(snapshot: TableSnapshot, contract: TableContract, before: datetime) -> tuple[int, int]:
    state, order, table = snapshot.state(WHOLE_TABLE), order_of(contract), snapshot.table
    files = [file for file in _files_with_old(snapshot, before) if _count(file, before)]
    if state is None or not files:
        return 0, 0
    draft = table.folder / layout.STAGING / uuid.uuid4().hex
    # No failpoint: a draft that no table names yet.
    draft.mkdir(mode=0o700, parents=True)
    leaving, written = ContentHash(), dict[str, WrittenFile]()
    generation = snapshot.version + 1
    unit = idempotency_key(
        layer=LAYER,
        table=contract.full_name,
        window=WHOLE_TABLE,
        inputs=[snapshot.table_id, f"from:{snapshot.version}", f"ended_before:{before.isoformat()}"],
        versions=state.versions,
    )
    try:
        with failpoint("lake.write", draft):
            for file in files:
                rows = live_table(file)
                old = ended(rows, micros_of(before))
                leaving += ContentHash.of(hashes_in(rows.filter(old)))
                stay = rows.filter(pc.invert(old)).combine_chunks()
                if stay.num_rows:
                    made = write_again(Path(file.path), stay, order, draft)
                    written[made.name] = made
        add = []
        placed = place_files(table, draft, written, unit=unit, generation=generation) if written else ()
        for path in placed:
            # Another call may have placed files here before.
            made = written.get(Path(path).name) or written_file(table.folder / path, order)
            add.append(StagedFile(path, WHOLE_TABLE, (), made.rows, made.bytes, made.stats))
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    content = ContentHash.parse(state.checkpoint.content_hash) - leaving
    checkpoint = replace(state.checkpoint, rows=content.count, content_hash=str(content))
    after = replace(state, generation=generation, checkpoint=checkpoint)
    snapshot.commit([WindowChange(WHOLE_TABLE, tuple(add), tuple(files), after, replaces=False)])
    return len(files), sum(file.bytes for file in files) - sum(file.bytes for file in add)


def _files_with_old(snapshot: TableSnapshot, before: datetime) -> list[LakeFile]:
    """Return the files of a history that may hold versions that ended ``before``, by their footers."""
    return [file for file in snapshot.files(WHOLE_TABLE) if file.rows and _may_have(file, before)]


def _may_have(file: LakeFile, before: datetime) -> bool:
    with pq.ParquetFile(file.stored, pre_buffer=False) as parquet:
        footer, schema = parquet.metadata, parquet.schema
        place = next(leaf for leaf in range(len(schema)) if schema.column(leaf).path == _END)
        groups = [footer.row_group(number).column(place) for number in range(footer.num_row_groups)]
        known = [group.statistics for group in groups]
    # Without a minimum, every version of the row group is open, or nothing is known about it.
    return any(
        each is None or (each.min < before if each.has_min_max else each.null_count is None) for each in known
    )


def _count(file: LakeFile, before: datetime) -> int:
    return pc.sum(ended(live_table(file, columns=[_END]), micros_of(before))).as_py() or 0
