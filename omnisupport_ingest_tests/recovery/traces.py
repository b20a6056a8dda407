"""What a process left in the folders of the lake, and what readers find in the tables."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum

import pyarrow as pa

from omnisupport_ingest.cdc.fold import table_columns_of
from omnisupport_ingest.cdc.row_fold import merge_groups
from omnisupport_ingest.contracts.load import TableContract
from omnisupport_ingest.lake import layout
from omnisupport_ingest.lake.checkpoint import Checkpoint
from omnisupport_ingest.lake.delta import open_delta
from omnisupport_ingest.lake.table import LakeTable
from omnisupport_ingest.layers import checkpoints
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest_tests.layers.story import SOURCE


class Moment(Enum):
    """How far a unit of work was when its process died."""

    WRITING = "Spark writes its files"
    STAGED = "Spark wrote all, nothing is in its place"
    PLACED = "the files are in their place, no version holds them"
    COMMITTED = "a new version holds the files"


@dataclass(frozen=True)
class Trace:
    """What stands in the folder of one table: versions after the empty one, unit folders, drafts."""

    version: int = 0
    units: frozenset[str] = frozenset()
    unfinished: frozenset[str] = frozenset()
    finished: frozenset[str] = frozenset()

    @classmethod
    def of(cls, table: LakeTable) -> Trace:
        if not table.exists:
            return cls()
        for _ in range(50):
            try:
                return cls._seen(table)
            except FileNotFoundError:
                # The JVM of a killed process is still clearing up.
                time.sleep(0.1)
        return cls._seen(table)

    @classmethod
    def _seen(cls, table: LakeTable) -> Trace:
        folder = table.folder
        drafts = set((folder / layout.STAGING).glob("*"))
        finished = {draft for draft in drafts if (draft / "_SUCCESS").exists()}
        units = {
            layout.unit_of(file.relative_to(folder).as_posix()) for file in folder.rglob("g*/**/*.parquet")
        }
        return cls(
            version=open_delta(folder).version(),
            units=frozenset(unit for unit in units if unit),
            unfinished=frozenset(draft.name for draft in drafts - finished),
            finished=frozenset(draft.name for draft in finished),
        )

    def since(self, before: Trace) -> Moment | None:
        """How far the newest work got that ``before`` had not seen; ``None`` if nothing is new."""
        if self.version > before.version:
            return Moment.COMMITTED
        if self.units > before.units:
            return Moment.PLACED
        if self.finished > before.finished:
            return Moment.STAGED
        return Moment.WRITING if self.unfinished > before.unfinished else None


def tables(workspace: Workspace) -> Iterator[tuple[str, LakeTable]]:
    """Every table of the story by its layer, in the order in which a run commits to them."""
    (contract,) = workspace.contracts.of_source(SOURCE)
    yield "raw", workspace.raw(SOURCE)
    yield "quarantine", workspace.quarantine(SOURCE)
    yield "deduped", workspace.deduped(SOURCE)
    yield "net_changes", workspace.net_changes(contract)
    yield "dim", workspace.dimension(contract)


def traces(workspace: Workspace) -> dict[str, Trace]:
    return {name: Trace.of(table) for name, table in tables(workspace)}


@dataclass(frozen=True)
class Content:
    """A table as its readers see it: the checkpoint's hash and counts per window, and its rows.

    Physical split, generations, versions and times are left out: they may differ between two
    homes of the same content.
    """

    windows: frozenset[tuple[object, ...]]
    rows: tuple[str, ...]


def contents(workspace: Workspace) -> dict[str, Content]:
    """The content of every table; fails where a checkpoint counts other rows than the table has."""
    (contract,) = workspace.contracts.of_source(SOURCE)
    return {
        name: _content(table, contract if name == "net_changes" else None)
        for name, table in tables(workspace)
    }


def _content(table: LakeTable, folded: TableContract | None) -> Content:
    """``folded``: the contract, where the table holds what each run folded; its parts are merged here."""
    found = checkpoints.read([table])
    held = open_delta(table.folder).to_pyarrow_table()
    assert len(held) == sum(each.rows for each in found)
    if folded is not None:
        found = tuple(replace(each, rows=0) for each in found)
        merged = merge_groups(held.combine_chunks().to_batches(), table_columns_of(folded), few=held.num_rows)
        # A merged row has no hash before Spark computes it.
        held = pa.Table.from_batches(merged, held.schema).drop_columns("_cdc_row_hash")
    # Windows of the quarantine without rows may or may not have been committed.
    windows = frozenset(_facts(each) for each in found if each.rows or each.layer != "quarantine")
    return Content(windows, tuple(sorted(repr(sorted(row.items())) for row in held.to_pylist())))


def _facts(each: Checkpoint) -> tuple[object, ...]:
    counts = (each.rows, each.raw, each.deduped, each.duplicates, each.quarantined, each.batches)
    place = (each.window, each.cursor, each.watermark, each.last_batch_id, each.lsn_start, each.lsn_end)
    return (*place, *counts, each.content_hash)
