"""Histories in Dagster: an asset per table with its checks, and a job that updates the histories of a source.

No ingest run waits for a history: the job runs every hour, and whenever a person launches it. If it has
millions of rows to make, it gets a Spark of its own.
"""

from collections.abc import Callable
from contextlib import suppress

import dagster as dg
from dagster_pyspark import LazyPySparkResource

from omnisupport_ingest.checks import history_checks
from omnisupport_ingest.checks.findings import CheckFinding
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.defs import keys
from omnisupport_ingest.defs.assets import TableAsset, lake_asset
from omnisupport_ingest.defs.dagster_storage import has_failed
from omnisupport_ingest.defs.hourly import hourly_schedule
from omnisupport_ingest.defs.lost_runs import run_executor
from omnisupport_ingest.defs.step_errors import unquoted
from omnisupport_ingest.defs.tables import source_lineage
from omnisupport_ingest.layers.histories import history
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.runtime.dagster_home import BESIDE, BESIDE_TAG
from omnisupport_ingest.runtime.spark import LONG_ROWS
from omnisupport_ingest.runtime.spark_errors import named_spark_errors


def build_history(workspace: Workspace, source: str) -> dg.Definitions:
    """Return the history assets of the tables of ``source``, their checks, job and hourly schedule."""
    contracts = workspace.contracts.of_source(source)

    def is_long(opened: Workspace, replay: bool) -> bool:
        # Every history of the source: the first that a run makes chooses the session for the others.
        return any(_rows_to_make(opened, each, replay=replay) >= LONG_ROWS for each in contracts)

    checks = [check for contract in contracts for check in history_asset_checks(contract)]
    job = dg.define_asset_job(
        keys.history_job_name(source),
        selection=dg.AssetSelection.assets(*(keys.history_key(contract) for contract in contracts))
        | dg.AssetSelection.checks(*checks),
        description=f"The history of every table of {source}, brought up to date with its events.",
        executor_def=run_executor,
        tags={keys.TAKE_NEW_TAG: "true", keys.SOURCE_TAG: source, BESIDE_TAG: BESIDE},
    )
    # Halfway between two audits.
    hourly = hourly_schedule(
        source, job.name, 35, f"Updates the histories of {source} at minute 35 of every hour."
    )
    return dg.Definitions(
        assets=[lake_asset(_history(workspace, contract, is_long)) for contract in contracts],
        asset_checks=checks,
        jobs=[job],
        schedules=[hourly],
    )


def _rows_to_make(workspace: Workspace, contract: TableContract, *, replay: bool) -> int:
    # A history that cannot be read fails only its own step, which says why.
    with suppress(Exception):
        return history.rows_to_make(workspace, contract, replay=replay)
    return 0


def _history(
    workspace: Workspace, contract: TableContract, is_long: Callable[[Workspace, bool], bool]
) -> TableAsset:
    """Return ``dim_<table>_history``: every version of every row; not partitioned."""
    spec = workspace.history(contract).spec
    return TableAsset(
        key=keys.history_key(contract),
        upstream=keys.deduped_key(contract.source),
        layer=keys.HISTORY,
        docs_page="history.md#the-history-table",
        spec=spec,
        description=f"{contract.description} {spec.description}",
        code_version=f"{history.HISTORY_VERSION}-{contract.fingerprint[:12]}",
        contracts=(contract,),
        contract=contract,
        partitions=None,
        lineage=source_lineage(contract),
        # Materialize in the UI rebuilds it, whether or not anything has changed.
        make=lambda run: [
            history.materialize(run.workspace, run.spark, contract, run.run_id, replay=run.replay)
        ],
        is_long=is_long,
    )


def history_asset_checks(contract: TableContract) -> list[dg.AssetChecksDefinition]:
    """Return the checks of one history, which read its rows with Spark: those of the last run, or all."""
    return [
        _check(contract=contract, finding=finding)
        for finding in (
            history_checks.open_rows_are_current_state,
            history_checks.versions_do_not_overlap,
        )
    ]


def _check(*, contract: TableContract, finding: Callable[..., CheckFinding]) -> dg.AssetChecksDefinition:
    description = (finding.__doc__ or "").strip().partition("\n\n")[0]
    key = dg.AssetCheckKey(keys.history_key(contract), finding.__name__)

    @dg.asset_check(asset=keys.history_key(contract), name=finding.__name__, description=description)
    @unquoted
    def check(
        context: dg.AssetCheckExecutionContext,
        workspace: dg.ResourceParam[Workspace],
        pyspark: LazyPySparkResource,
    ) -> dg.AssetCheckResult:
        with named_spark_errors(workspace.settings):
            # A check that a person launches, or of a rebuilt history, covers the whole history. So does one
            # that failed, until it passes: the last run may have written none of the files it failed for.
            whole = keys.TAKE_NEW_TAG not in context.run.tags or has_failed(context.instance, key)
            found = finding(workspace, pyspark.spark_session, contract, whole=whole)
        return dg.AssetCheckResult(
            passed=found.passed,
            severity=dg.AssetCheckSeverity.ERROR,
            description=found.summary,
            metadata=dict(found.numbers),
        )

    return check
