"""Turns a read of the past into row counts, or into a file per table.

All tables are folded before the first file is written, so a fault in one table leaves no incomplete set of
files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from omnisupport_ingest import progress
from omnisupport_ingest.lake.drafts import Drafts
from omnisupport_ingest.lake.staged_frames import write_frame
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.processes import scratch_folder
from omnisupport_ingest.read.as_of import Reading
from omnisupport_ingest.read.export import Format, write_file

_SCRATCH = "as-of-"
"""Prefix of folders that hold rows until the files are written; the identity of the process follows."""


@dataclass(frozen=True, slots=True)
class TableAsOf:
    """One table: its live and its softly deleted rows, and how many live ones have an unknown value.

    ``path`` and ``bytes`` of the file, None without one.
    """

    table: str
    live: int
    deleted: int
    unresolved: int
    path: str | None = None
    bytes: int | None = None


def count_tables(reading: Reading, spark: SparkSession) -> list[TableAsOf]:
    """Count the rows of each table of ``reading``."""
    counts = []
    for contract in progress.each(reading.contracts, lambda each: f"folding {each.name}"):
        with reading.table_folded_once(spark, contract) as rows:
            counts.append(_counted(contract.name, rows))
    return counts


def write_tables(
    workspace: Workspace,
    reading: Reading,
    spark: SparkSession,
    paths: Mapping[str, Path],
    form: Format,
    *,
    deleted: bool,
) -> list[TableAsOf]:
    """Write each table of ``reading`` to the file that ``paths`` has for its name, by ``export``'s rules."""
    with scratch_folder(workspace.home.run, _SCRATCH) as scratch:
        states, counts = {}, {}
        for contract in progress.each(reading.contracts, lambda each: f"folding {each.name}"):
            drafts = Drafts.beside(spark, workspace.dimension(contract).folder, scratch / contract.name)
            try:
                with reading.table_folded_once(spark, contract) as rows:
                    whole = write_frame(rows, drafts, ())
            finally:
                drafts.clear_objects()
            states[contract.name] = [str(file) for file in sorted(whole.glob("*.parquet"))]
            counts[contract.name] = _counted_in(contract.name, states[contract.name])
        written_tables = []
        for contract in reading.contracts:
            path, files = paths[contract.name], states[contract.name]
            written = write_file(contract, files, path, form, deleted=deleted, home=workspace.home.path)
            count = counts[contract.name]
            written_tables.append(
                TableAsOf(count.table, count.live, count.deleted, count.unresolved, str(path), written.bytes)
            )
    return written_tables


def _counted(name: str, rows: DataFrame) -> TableAsOf:
    deleted = F.col("_cdc_is_deleted")
    live, gone, unresolved = rows.agg(
        F.count_if(~deleted),
        F.count_if(deleted),
        F.count_if(~deleted & (F.size("_cdc_unresolved") > 0)),
    ).collect()[0]
    return TableAsOf(name, live, gone, unresolved)


def _counted_in(name: str, files: Sequence[str]) -> TableAsOf:
    """Count the rows of the table ``name`` in ``files``."""
    live = gone = unresolved = 0
    for file in files:
        rows = pq.read_table(file, columns=["_cdc_is_deleted", "_cdc_unresolved"], partitioning=None)
        lives = pc.invert(rows["_cdc_is_deleted"])
        count = pc.fill_null(pc.list_value_length(rows["_cdc_unresolved"]), 0)
        live += pc.sum(lives).as_py() or 0
        gone += pc.sum(rows["_cdc_is_deleted"]).as_py() or 0
        unresolved += pc.sum(pc.and_(lives, pc.greater(count, 0))).as_py() or 0
    return TableAsOf(name, live, gone, unresolved)
