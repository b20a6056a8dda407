"""Checks on the rows of a dimension, on Spark; numbers and names only, never row values."""

from __future__ import annotations

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from omnisupport_ingest.checks.findings import CheckFinding
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.contracts.sources import SourceKind, sources_in_force
from omnisupport_ingest.lake.layout import WHOLE_TABLE
from omnisupport_ingest.layers.dimension.dimensions import known_live_rows
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.wording import counted


def keys_unique(workspace: Workspace, spark: SparkSession, contract: TableContract) -> CheckFinding:
    """Check that the dimension has one row per key."""
    rows = _rows_of(workspace, spark, contract)
    per_key = rows.groupBy("_cdc_key").count().agg(F.sum("count"), F.count_if(F.col("count") > 1))
    total, repeated = per_key.collect()[0]
    numbers: dict[str, int | float] = {"rows": total or 0, "keys_repeated": repeated}
    if repeated:
        summary = (
            f"With more than one row: {counted(repeated, 'key')}. Find the rows that differ from the source: "
            f"omnisupport-ingest verify {contract.source} --table {contract.name} --full"
        )
        return CheckFinding(False, summary, numbers)
    return CheckFinding(True, "Every key has one row.", numbers)


def no_unresolved_cells(workspace: Workspace, spark: SparkSession, contract: TableContract) -> CheckFinding:
    """Check that no cell of the live rows is unresolved. (An unresolved cell is never shown as plain
    NULL.)"""
    live = _live(_rows_of(workspace, spark, contract))
    unresolved = F.coalesce(F.size("_cdc_unresolved"), F.lit(0))
    rows, cells = live.agg(F.count_if(unresolved > 0), F.sum(F.greatest(unresolved, F.lit(0)))).collect()[0]
    numbers: dict[str, int | float] = {"rows_unresolved": rows, "cells_unresolved": cells or 0}
    if rows:
        summary = (
            f"Unresolved: {counted(cells, 'cell')} of {counted(rows, 'live row')}, which no accepted event "
            "carried. Release what waits, if anything does (omnisupport-ingest quarantine list --source "
            f"{contract.source}), "
            f"or {_read_again(workspace, contract)}"
        )
        return CheckFinding(False, summary, numbers)
    return CheckFinding(True, "No cell of the live rows is unresolved.", numbers)


def _read_again(workspace: Workspace, contract: TableContract) -> str:
    """Return how the source sends whole rows again."""
    kind = sources_in_force(workspace.settings, workspace.contracts).find(contract.source).kind
    if kind is SourceKind.LOG:
        return (
            "read the table: omnisupport-ingest source snapshot "
            f"{contract.full_name} --source {contract.source}"
        )
    if kind is SourceKind.QUERY:
        return (
            f"read the table: omnisupport-ingest sync {contract.source} --table {contract.name} "
            '--full-refresh "unresolved cells"'
        )
    return "have these rows delivered again, whole"


def meets_contract(workspace: Workspace, spark: SparkSession, contract: TableContract) -> CheckFinding:
    """Check that the live rows without unresolved cells pass the contract's pandera schema."""
    # Imported here: every process that makes definitions imports this module, and pandera would take as long
    # as a fifth of the definitions.
    from omnisupport_ingest.contracts.pandera_schema import failures

    broken = failures(known_live_rows(_rows_of(workspace, spark, contract)), contract)
    numbers: dict[str, int | float] = {"checks_broken": len(broken)}
    if broken:
        named = ", ".join(f"{name} ({counted(rows, 'row')})" for name, rows in broken.items())
        summary = (
            f"Broken: {named}. Find the events of a row: omnisupport-ingest explain {contract.name} "
            f"--source {contract.source} --key KEY"
        )
        return CheckFinding(False, summary, numbers)
    return CheckFinding(True, f"Live rows meet contract {contract.full_name} {contract.version}.", numbers)


def _rows_of(workspace: Workspace, spark: SparkSession, contract: TableContract) -> DataFrame:
    snapshot = workspace.dimension(contract).open()
    return snapshot.read(spark, snapshot.files(WHOLE_TABLE))


def _live(rows: DataFrame) -> DataFrame:
    return rows.where(~F.col("_cdc_is_deleted"))
