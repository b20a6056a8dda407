"""The state of a table at a log position: the fold of the events below it."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from omnisupport_ingest.cdc.current import current_state
from omnisupport_ingest.cdc.fold import fold_events
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.lake.layout import LakeFile
from omnisupport_ingest.position import Position
from omnisupport_ingest.stages.workspace import Workspace


def state_as_of(
    workspace: Workspace, spark: SparkSession, contract: TableContract, position: Position
) -> DataFrame:
    """The fold of every accepted or quarantined event below ``position``: ``published_type`` rows."""
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
