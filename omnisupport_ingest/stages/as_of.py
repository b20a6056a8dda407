"""The state of a table at a log position: the fold of the events below it.

A position at which a snapshot of the table was still being read, or that its stream has not reached,
is refused: what is known there is no state that the source ever had.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from omnisupport_ingest.cdc.current import current_state
from omnisupport_ingest.cdc.fold import fold_events
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.lake.layout import LakeFile
from omnisupport_ingest.landing.completeness import incomplete_at, is_captured
from omnisupport_ingest.position import Position
from omnisupport_ingest.stages.workspace import Workspace


class TableIncomplete(IngestError):
    """The state of a table was asked for where its snapshot and its stream do not reach."""


def require_complete(
    workspace: Workspace, source: str, contracts: Sequence[TableContract], position: Position
) -> None:
    """Refuse (``TableIncomplete``), by name, tables of ``source`` without a state at ``position``."""
    landed = workspace.landing(source).landed()
    if not is_captured(landed.batches):
        return
    found = [
        incomplete
        for contract in contracts
        if (incomplete := incomplete_at(landed.batches, contract.name, position)) is not None
    ]
    if not found:
        return
    problems = " ".join(each.problem for each in found)
    if landed.hole is not None and landed.hole.epoch == position.epoch:
        raise TableIncomplete(f"{problems} {landed.hole}", fix=landed.hole.fix)
    raise TableIncomplete(problems, fix=" ".join(dict.fromkeys(each.fix for each in found)))


def state_as_of(
    workspace: Workspace, spark: SparkSession, contract: TableContract, position: Position
) -> DataFrame:
    """The fold of every accepted or quarantined event below ``position``: ``published_type`` rows.

    ``TableIncomplete`` if the table has no state there.
    """
    require_complete(workspace, contract.source, [contract], position)
    return current_state(fold_events(_events(workspace, spark, contract, position), contract), contract)


def events_from(
    workspace: Workspace, spark: SparkSession, contract: TableContract, position: Position
) -> int:
    """How many accepted events of the table stand at ``position`` or above."""
    deduped = workspace.deduped(contract.source).open()
    files = [file for file in deduped.all_files() if _of_table(file, contract)]
    return deduped.read(spark, files).where(~_below(position)).count()


def _events(
    workspace: Workspace, spark: SparkSession, contract: TableContract, position: Position
) -> DataFrame:
    deduped, quarantine = (
        workspace.deduped(contract.source).open(),
        workspace.quarantine(contract.source).open(),
    )
    files = [file for file in deduped.all_files() if _of_table(file, contract)]
    accepted = deduped.read(spark, files).withColumn("hole", F.lit(False))
    named = {
        path
        for window in deduped.windows()
        if (state := deduped.state(window)) is not None
        for path in state.companions
    }
    held = [file for file in quarantine.all_files() if file.path in named]
    holes = quarantine.read(spark, held).withColumn("hole", F.lit(True)).select(*accepted.columns)
    of_table = (F.col("source_schema") == contract.schema) & (F.col("source_table") == contract.table)
    return accepted.unionByName(holes).where(of_table & _below(position))


def _of_table(file: LakeFile, contract: TableContract) -> bool:
    return ("source_table", contract.table) in file.partition


def _below(position: Position) -> Column:
    here = F.struct(
        F.lit(position.epoch).alias("epoch"),
        F.lit(position.commit_lsn.value).cast("bigint").alias("commit_lsn"),
        F.lit(position.ordinal).cast("bigint").alias("ordinal"),
    )
    return F.struct("epoch", "commit_lsn", "ordinal") < here
