"""Asset checks: which finding belongs to which asset. None blocks a run; each keeps its own colour."""

from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime

import dagster as dg
from dagster_pyspark import LazyPySparkResource
from pyspark.sql import SparkSession

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.defs import keys
from omnisupport_ingest.runtime.spark_errors import named_spark_errors
from omnisupport_ingest.stages import checks, content_checks, window_checks
from omnisupport_ingest.stages.findings import CheckFinding
from omnisupport_ingest.stages.workspace import Workspace

_WARN = dg.AssetCheckSeverity.WARN
_ERROR = dg.AssetCheckSeverity.ERROR

_FRESH = "fresh"


def build_log_checks(source: str, contracts: Sequence[TableContract]) -> list[dg.AssetChecksDefinition]:
    """The checks of one source that read landing and logs alone, cheap enough for every run.

    ``contracts``: those of the source.
    """
    landing, deduped = keys.landing_key(source), keys.deduped_key(source)
    rows: list[tuple[dg.AssetKey, str, Callable[[Workspace, str], CheckFinding], dg.AssetCheckSeverity]] = [
        (landing, "chain_unbroken", checks.chain_unbroken, _ERROR),
        (landing, "sentinel_empty", checks.sentinel_empty, _ERROR),
        (landing, "watermark_fresh", _watermark_fresh_now, _WARN),
        (deduped, "counts_add_up", checks.counts_add_up, _ERROR),
        (deduped, "no_collisions", checks.no_collisions, _ERROR),
        (deduped, "epochs_in_order", checks.epochs_in_order, _ERROR),
        (deduped, "quarantine_not_rising", _quarantine_not_rising_now, _ERROR),
    ]
    of_every_layer = [
        (deduped, "windows_settled", window_checks.windows_settled, _WARN),
        (deduped, "replays_explained", window_checks.replays_explained, _ERROR),
    ]
    dimensions = [keys.dimension_key(contract) for contract in contracts]
    found = [
        _log_check(asset=asset, name=name, source=source, finding=finding, severity=severity, after=after)
        for listed, after in ((rows, ()), (of_every_layer, dimensions))
        for asset, name, finding, severity in listed
    ]
    return [*found, _table_checks(source, contracts)]


def build_content_checks(contract: TableContract) -> list[dg.AssetChecksDefinition]:
    """The checks of one dimension that read its rows with Spark."""
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
    after: Sequence[dg.AssetKey] = (),
) -> dg.AssetChecksDefinition:
    """``after``: the assets that a run which makes them makes first; a check of every layer would find the
    later ones pending else."""

    @dg.asset_check(asset=asset, name=name, description=_description(finding), additional_deps=after)
    def check(workspace: dg.ResourceParam[Workspace]) -> dg.AssetCheckResult:
        return _result(finding(workspace, source), severity)

    return check


def _table_checks(source: str, contracts: Sequence[TableContract]) -> dg.AssetChecksDefinition:
    """Two checks per dimension; landing is read once for all of them."""
    asset_of = {contract.name: keys.dimension_key(contract) for contract in contracts}

    @dg.multi_asset_check(
        name=f"complete_{source}",
        specs=[
            dg.AssetCheckSpec(name, asset=asset, description=_description(finding))
            for asset in asset_of.values()
            for name, finding in ((keys.COMPLETE, checks.tables_complete), (_FRESH, _tables_fresh_now))
        ],
    )
    def check(workspace: dg.ResourceParam[Workspace]) -> Iterator[dg.AssetCheckResult]:
        for check_name, findings in (
            (keys.COMPLETE, checks.tables_complete(workspace, source)),
            (_FRESH, _tables_fresh_now(workspace, source)),
        ):
            for name, finding in findings.items():
                yield _result(finding, _WARN, asset=asset_of[name], name=check_name)

    return check


def _content_check(
    *,
    contract: TableContract,
    name: str,
    finding: Callable[[Workspace, SparkSession, TableContract], CheckFinding],
) -> dg.AssetChecksDefinition:
    @dg.asset_check(asset=keys.dimension_key(contract), name=name, description=_description(finding))
    def check(workspace: dg.ResourceParam[Workspace], pyspark: LazyPySparkResource) -> dg.AssetCheckResult:
        with named_spark_errors(workspace.settings):
            return _result(finding(workspace, pyspark.spark_session, contract), _ERROR)

    return check


def _watermark_fresh_now(workspace: Workspace, source: str) -> CheckFinding:
    """Whether the watermark of what has landed is near the clock; old backfills do not move it."""
    return checks.watermark_fresh(workspace, source, datetime.now(UTC))


def _tables_fresh_now(workspace: Workspace, source: str) -> dict[str, CheckFinding]:
    """Whether the dimension shows what was committed until shortly before the clock."""
    return checks.tables_fresh(workspace, source, datetime.now(UTC))


def _quarantine_not_rising_now(workspace: Workspace, source: str) -> CheckFinding:
    """Whether no reason keeps more events in quarantine, not discarded, than a day ago."""
    return checks.quarantine_not_rising(workspace, source, datetime.now(UTC))


def _result(
    finding: CheckFinding,
    severity: dg.AssetCheckSeverity,
    *,
    asset: dg.AssetKey | None = None,
    name: str | None = None,
) -> dg.AssetCheckResult:
    return dg.AssetCheckResult(
        asset_key=asset,
        check_name=name,
        passed=finding.passed,
        severity=severity,
        description=finding.summary,
        metadata={
            name: dg.MetadataValue.int(value) if isinstance(value, int) else dg.MetadataValue.float(value)
            for name, value in finding.numbers.items()
        },
    )


def _description(finding: Callable[..., object]) -> str:
    return (finding.__doc__ or "").strip().partition("\n\n")[0]
