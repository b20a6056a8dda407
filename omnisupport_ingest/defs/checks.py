"""Asset checks: which finding belongs to which asset. None blocks a run; each keeps its own colour."""

from collections.abc import Callable
from datetime import UTC, datetime

import dagster as dg
from dagster_pyspark import LazyPySparkResource
from pyspark.sql import SparkSession

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.defs import keys
from omnisupport_ingest.stages import checks, content_checks
from omnisupport_ingest.stages.findings import CheckFinding
from omnisupport_ingest.stages.workspace import Workspace

_WARN = dg.AssetCheckSeverity.WARN
_ERROR = dg.AssetCheckSeverity.ERROR


def build_log_checks(source: str) -> list[dg.AssetChecksDefinition]:
    """The checks of one source that read landing and logs alone, cheap enough for every run."""
    landing, deduped = keys.landing_key(source), keys.deduped_key(source)
    rows: list[tuple[dg.AssetKey, str, Callable[[Workspace, str], CheckFinding], dg.AssetCheckSeverity]] = [
        (landing, "chain_unbroken", checks.chain_unbroken, _ERROR),
        (landing, "sentinel_empty", checks.sentinel_empty, _ERROR),
        (landing, "watermark_fresh", _watermark_fresh_now, _WARN),
        (deduped, "counts_add_up", checks.counts_add_up, _ERROR),
        (deduped, "no_collisions", checks.no_collisions, _ERROR),
    ]
    return [
        _log_check(asset=asset, name=name, source=source, finding=finding, severity=severity)
        for asset, name, finding, severity in rows
    ]


def build_content_checks(contract: TableContract) -> list[dg.AssetChecksDefinition]:
    """The checks of one published table that read its rows with Spark."""
    return [
        _content_check(contract=contract, name=name, finding=finding)
        for name, finding in (
            ("keys_unique", content_checks.keys_unique),
            ("no_unresolved_cells", content_checks.no_unresolved_cells),
            ("meets_contract", content_checks.meets_contract),
        )
    ]


def _log_check(
    *,
    asset: dg.AssetKey,
    name: str,
    source: str,
    finding: Callable[[Workspace, str], CheckFinding],
    severity: dg.AssetCheckSeverity,
) -> dg.AssetChecksDefinition:
    @dg.asset_check(asset=asset, name=name, description=_description(finding))
    def check(workspace: dg.ResourceParam[Workspace]) -> dg.AssetCheckResult:
        return _result(finding(workspace, source), severity)

    return check


def _content_check(
    *,
    contract: TableContract,
    name: str,
    finding: Callable[[Workspace, SparkSession, TableContract], CheckFinding],
) -> dg.AssetChecksDefinition:
    @dg.asset_check(asset=keys.published_key(contract), name=name, description=_description(finding))
    def check(workspace: dg.ResourceParam[Workspace], pyspark: LazyPySparkResource) -> dg.AssetCheckResult:
        return _result(finding(workspace, pyspark.spark_session, contract), _ERROR)

    return check


def _watermark_fresh_now(workspace: Workspace, source: str) -> CheckFinding:
    """Whether the watermark of what has landed is near the clock; old backfills do not move it."""
    return checks.watermark_fresh(workspace, source, datetime.now(UTC))


def _result(finding: CheckFinding, severity: dg.AssetCheckSeverity) -> dg.AssetCheckResult:
    return dg.AssetCheckResult(
        passed=finding.passed,
        severity=severity,
        description=finding.summary,
        metadata={
            name: dg.MetadataValue.int(value) if isinstance(value, int) else dg.MetadataValue.float(value)
            for name, value in finding.numbers.items()
        },
    )


def _description(finding: Callable[..., CheckFinding]) -> str:
    return (finding.__doc__ or "").strip().partition("\n\n")[0]
