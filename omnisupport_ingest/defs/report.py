"""The report as an asset: the page with plots, written to the home every hour.

`omnisupport-ingest report` writes the same page.
"""

from datetime import UTC, datetime

import dagster as dg

from omnisupport_ingest.defs.lost_runs import run_executor
from omnisupport_ingest.defs.metadata import docs_metadata
from omnisupport_ingest.defs.step_errors import unquoted
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.report import page
from omnisupport_ingest.runtime.dagster_home import BESIDE, BESIDE_TAG


@dg.asset(
    name="report",
    group_name="reports",
    description="One HTML page with plots: freshness, lag, latency, events, faults, growth and cost of runs. "
    "Made from the manifests of landed batches and the tables' Delta logs; no value of a row is in it.",
    kinds={"html"},
    metadata=docs_metadata("operate.md#the-report"),
)
@unquoted
def report_page(
    context: dg.AssetExecutionContext, workspace: dg.ResourceParam[Workspace]
) -> dg.MaterializeResult[None]:
    """Write the page to the home."""
    sources = page.collect(workspace)
    path = workspace.home.path / page.FILE_NAME
    size = page.write(workspace, path, sources)
    context.log.info(f"Wrote {path}.")
    return dg.MaterializeResult(
        metadata={
            "page": dg.MetadataValue.path(str(path)),
            "bytes": dg.MetadataValue.int(size),
            "made_at": dg.MetadataValue.timestamp(datetime.now(UTC)),
            "numbers": dg.MetadataValue.json(page.document(str(workspace.home.path), sources)["sources"]),
        }
    )


def build_report() -> dg.Definitions:
    """Return the asset, its job and its schedule. The first page is written at minute 20 of an hour."""
    job = dg.define_asset_job(
        "write_report",
        selection=[report_page],
        description="Writes the report of all sources to the home.",
        executor_def=run_executor,
        tags={BESIDE_TAG: BESIDE},
    )
    hourly = dg.ScheduleDefinition(
        name="hourly_report",
        job=job,
        cron_schedule="20 * * * *",
        default_status=dg.DefaultScheduleStatus.RUNNING,
        description="Writes the report at minute 20 of every hour.",
    )
    return dg.Definitions(assets=[report_page], jobs=[job], schedules=[hourly])
