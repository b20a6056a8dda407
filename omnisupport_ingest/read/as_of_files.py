"""Turns a read of the past into row counts, or into a file per table.

All tables are folded before the first file is written, so a fault in one table leaves no incomplete set of
files.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from omnisupport_ingest import progress
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.processes import ProcessIdentity
from omnisupport_ingest.read.as_of import Reading
from omnisupport_ingest.read.export import Format, write_file
from omnisupport_ingest.read.export_ledger import note_export

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
    _remove_left_behind(workspace.home.run)
    own = f"{_SCRATCH}{ProcessIdentity.current().text}-"
    # No failpoint: scratch files, which the next command removes if this process is killed.
    with tempfile.TemporaryDirectory(prefix=own, dir=workspace.home.run) as scratch:
        states = {contract.name: Path(scratch) / contract.name for contract in reading.contracts}
        counts = {}
        for contract in progress.each(reading.contracts, lambda each: f"folding {each.name}"):
            uri = f"file://{states[contract.name]}"
            with reading.table_folded_once(spark, contract) as rows:
                rows.write.parquet(uri)
            counts[contract.name] = _counted(contract.name, spark.read.parquet(uri))
        written_tables = []
        for contract in reading.contracts:
            path = paths[contract.name]
            files = [str(file) for file in sorted(states[contract.name].glob("*.parquet"))]
            written = write_file(contract, files, path, form, deleted=deleted)
            note_export(workspace.home.path, f"{contract.source}.{contract.name}", path, written.rows)
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


def _remove_left_behind(folder: Path) -> None:
    """Remove the folders of killed reads; they hold rows of the source."""
    for scratch in folder.glob(f"{_SCRATCH}*"):
        process = ProcessIdentity.parse(scratch.name.removeprefix(_SCRATCH).partition("-")[0])
        if process is None or not process.lives():
            # No failpoint: scratch files, which the next command removes if this process is killed.
            shutil.rmtree(scratch, ignore_errors=True)
