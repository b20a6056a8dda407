"""The code location that Dagster loads. Loading reads settings and contracts, and starts nothing."""

from collections.abc import Iterable
from typing import Any

import dagster as dg
from dagster_pyspark import LazyPySparkResource

from omnisupport_ingest import tracing
from omnisupport_ingest.contracts.in_force import record_in_force, settings_of_home
from omnisupport_ingest.contracts.kept import keep, usable
from omnisupport_ingest.contracts.sources import SourceKind, sources_in_force
from omnisupport_ingest.defs.assets import build_assets
from omnisupport_ingest.defs.checks import build_content_checks, build_log_checks
from omnisupport_ingest.defs.equality import build_equality
from omnisupport_ingest.defs.freshness import freshness_sensor
from omnisupport_ingest.defs.history import build_history
from omnisupport_ingest.defs.hourly import first_checks_sensor, hourly_jobs
from omnisupport_ingest.defs.jobs import JobContent, build_jobs
from omnisupport_ingest.defs.kafka_sensors import topics_sensor
from omnisupport_ingest.defs.late_arrivals import late_arrivals_sensor
from omnisupport_ingest.defs.lost_runs import run_executor
from omnisupport_ingest.defs.query_sensors import comparison, cursor_sensor
from omnisupport_ingest.defs.report import build_report
from omnisupport_ingest.defs.retention import build_retention
from omnisupport_ingest.defs.review_job import build_review_job
from omnisupport_ingest.defs.sensors import wal_batches_sensor
from omnisupport_ingest.defs.source_health import source_health_check, source_health_sensor
from omnisupport_ingest.defs.targets import build_targets
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.runtime.spark import session, session_conf
from omnisupport_ingest.settings import Settings, require_known_variables
from omnisupport_ingest.windows import KEY_FORMAT, WindowGrid


class SparkResource(LazyPySparkResource):
    """dagster-pyspark's lazy session, opened where the platform runs Spark.

    A step's first use chooses between the warm Spark Connect server and a JVM in this process. Loading the
    definitions must not choose: it must neither need Java nor fix an address.
    """

    workspace: dg.ResourceDependency[Workspace]

    def _init_session(self) -> None:
        # dagster-pyspark would build a session from its configuration alone; on Connect the builder needs the
        # server's address, which is known only now.
        if self._spark_session is None:
            self._spark_session = session(self.workspace.settings)


def build_resources(workspace: Workspace) -> dict[str, Any]:
    """Return the resources of the code location. None of them opens anything before it is used."""
    return {
        "workspace": workspace,
        "pyspark": SparkResource(spark_config=session_conf(workspace.settings), workspace=workspace),
    }


def window_partitions(grid: WindowGrid) -> dg.TimeWindowPartitionsDefinition:
    """Return the windows of ``grid`` as Dagster partitions with the same keys, the open window included."""
    return dg.TimeWindowPartitionsDefinition(
        start=grid.first, fmt=KEY_FORMAT, cron_schedule=grid.size.cron, timezone="UTC", end_offset=1
    )


def build_definitions(workspace: Workspace, notice: str | None = None) -> dg.Definitions:
    """Return assets, checks, jobs and sensors of every source that has contracts.

    ``notice``: stands above the descriptions of the assets from landing to dimensions.
    """
    partitions = window_partitions(workspace.grid)
    sources = sources_in_force(workspace.settings, workspace.contracts)
    assets = build_assets(workspace, partitions, sources)
    parts = [
        dg.Definitions(
            assets=assets if notice is None else _with_notice(assets, notice),
            resources=build_resources(workspace),
            executor=run_executor,
        ),
        build_report(),
    ]
    checking: dict[str, list[Any]] = {}
    for source in workspace.contracts.sources():
        contracts = workspace.contracts.of_source(source)
        log_checks = build_log_checks(source, contracts)
        content_checks = build_content_checks(contracts)
        definition = sources.find(source)
        captured = definition.kind is SourceKind.LOG
        # The check queries the server, which an ingest run does not need.
        asking_checks = [source_health_check(definition)] if captured else []
        jobs = build_jobs(
            workspace.contracts,
            source,
            log_checks=log_checks,
            audit_checks=[*content_checks, *asking_checks],
        )
        history = build_history(workspace, source)
        checking[source] = hourly_jobs(jobs, history)
        parts += [
            dg.Definitions(asset_checks=[*log_checks, *content_checks, *asking_checks]),
            jobs,
            history,
            build_targets(workspace, source),
            dg.Definitions(jobs=[build_review_job(source)]),
            dg.Definitions(
                sensors=[
                    wal_batches_sensor(
                        partitions=partitions,
                        captured=captured,
                        job=JobContent.of_ingest(workspace.contracts, source, log_checks),
                    ),
                    late_arrivals_sensor(source=source),
                    freshness_sensor(source, contracts),
                    *([source_health_sensor(definition)] if captured else []),
                ]
            ),
        ]
        if captured:
            parts.append(build_equality(workspace.settings, definition, contracts))
        if definition.kind is SourceKind.QUERY:
            compare, due = comparison(definition)
            due_sensors = [due] if due is not None else []
            parts.append(dg.Definitions(jobs=[compare], sensors=[cursor_sensor(definition), *due_sensors]))
        if definition.kind is SourceKind.KAFKA:
            parts.append(dg.Definitions(sensors=[topics_sensor(definition)]))
    if checking:
        parts.append(dg.Definitions(sensors=[first_checks_sensor(checking)]))
    return dg.Definitions.merge(*parts, build_retention())


def _with_notice(
    assets: Iterable[dg.AssetSpec | dg.AssetsDefinition], notice: str
) -> Iterable[dg.AssetSpec | dg.AssetsDefinition]:
    def noticed(spec: dg.AssetSpec) -> dg.AssetSpec:
        return spec.replace_attributes(description=f"**{notice}**\n\n{spec.description or ''}")

    return dg.map_asset_specs(noticed, assets)


_kept: dg.Definitions | None = None
"""The definitions that ``keep_definitions`` has loaded."""


@dg.definitions
def defs() -> dg.Definitions:
    """Definitions of the home that the settings name; ``IngestError`` says what is wrong with it."""
    return _kept if _kept is not None else _load()


def keep_definitions() -> None:
    """Load the definitions once for this process and its forks. The caller must see that they stay
    current."""
    global _kept
    _kept = _load()
    _kept.get_repository_def()
    workspace = (_kept.resources or {})["workspace"]
    for source in workspace.contracts.sources():
        # A fork then has the columns of every table, and need not work them out.
        list(workspace.windowed_tables(source))


def _load() -> dg.Definitions:
    require_known_variables()
    settings = settings_of_home(Settings())
    endpoint = settings.traces_endpoint
    tracing.send_to(endpoint.get_secret_value() if endpoint is not None else None)
    documents = usable(settings)
    workspace = Workspace.of(documents)
    if documents.refused is None:
        record_in_force(settings, workspace.home)
        keep(documents)
    else:
        dg.get_dagster_logger().error(documents.notice)
    return build_definitions(workspace, documents.notice)
