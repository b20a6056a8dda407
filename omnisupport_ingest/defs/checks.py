"""Asset checks: which finding belongs to which asset. No check blocks a run.

Dagster makes a check depend on its asset, and skips the check if the asset was not made. So one table that
waits or fails would disable the checks of all layers and of every other table. The checks of layers and
tables therefore depend on the deduped events alone, and wait until the run has tried every table
(``_after_tables``).
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from datetime import UTC, datetime

import dagster as dg
from dagster_pyspark import LazyPySparkResource
from pyspark.sql import SparkSession

from omnisupport_ingest.checks import content_checks, quality_checks, window_checks
from omnisupport_ingest.checks import lake_checks as checks
from omnisupport_ingest.checks.findings import CheckFinding
from omnisupport_ingest.contracts import quality
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.defs import keys
from omnisupport_ingest.defs.costly_checks import leaves_out
from omnisupport_ingest.defs.step_errors import unquoted
from omnisupport_ingest.lake.layout import WHOLE_TABLE
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.runtime.spark import LONG_ROWS, has_session, session_apart
from omnisupport_ingest.runtime.spark_errors import named_spark_errors

FRESH = "fresh"
"""Name of the check that a dimension keeps its service level."""

_CheckKeys = Set[dg.AssetCheckKey]

_Session = Callable[[Workspace, LazyPySparkResource], SparkSession]
"""Returns the session with which a check reads rows."""

_WARN = dg.AssetCheckSeverity.WARN
_ERROR = dg.AssetCheckSeverity.ERROR
_SEVERITIES = {quality.WARN: _WARN, quality.ERROR: _ERROR}

_ENDS = {
    dg.DagsterEventType.STEP_SUCCESS,
    dg.DagsterEventType.STEP_FAILURE,
    dg.DagsterEventType.STEP_SKIPPED,
}

_LAST = {"dagster/priority": "-1"}
"""A run executes its steps one by one; steps with this priority come after those that make tables."""

_TABLES_OF_A_STEP = 16
"""Number of tables whose checks are one step. Dagster plans every output of a step, even those that a run
leaves out; so a run over one table plans the checks of these tables, and not of all."""

RETRY_SECONDS = 15.0
"""Seconds between two tries of a run's last checks while another run writes its table."""

_MAX_RETRIES = 100_000


def build_log_checks(source: str, contracts: Sequence[TableContract]) -> list[dg.AssetChecksDefinition]:
    """Return the checks of one source that read only landing and logs, cheap enough for every run.

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
        ("windows_settled", window_checks.windows_settled, _WARN),
        ("replays_explained", window_checks.replays_explained, _ERROR),
    ]
    return [
        *(
            _log_check(asset=asset, name=name, source=source, finding=finding, severity=severity)
            for asset, name, finding, severity in rows
        ),
        *(
            _layers_check(source, contracts, name=name, finding=finding, severity=severity)
            for name, finding, severity in of_every_layer
        ),
        *(
            _table_checks(source, contracts, group, name=f"complete_{number}_{source}")
            for number, group in enumerate(_groups_of(contracts))
        ),
    ]


def build_content_checks(contracts: Sequence[TableContract]) -> list[dg.AssetChecksDefinition]:
    """Return the checks of the dimensions of one source that read their rows with Spark.

    ``contracts``: all of the source.
    """

    def session(workspace: Workspace, pyspark: LazyPySparkResource) -> SparkSession:
        # Every dimension of the source: the first check of an audit chooses the session for the others.
        if not has_session() and any(_rows(workspace, each) >= LONG_ROWS for each in contracts):
            return session_apart(workspace.settings)
        spark: SparkSession = pyspark.spark_session
        return spark

    return [check for contract in contracts for check in _content_checks(contract, session)]


def _rows(workspace: Workspace, contract: TableContract) -> int:
    # A dimension that cannot be read fails only its own checks, which say why.
    with suppress(Exception):
        return sum(file.rows for file in workspace.dimension(contract).open().files(WHOLE_TABLE))
    return 0


def _content_checks(contract: TableContract, session: _Session) -> list[dg.AssetChecksDefinition]:
    listed = [
        ("keys_unique", content_checks.keys_unique),
        ("no_unresolved_cells", content_checks.no_unresolved_cells),
        ("meets_contract", content_checks.meets_contract),
    ]
    if contract.quality.references:
        listed.append(("references_kept", quality_checks.references_kept))
    return [
        _content_check(contract=contract, name=name, finding=finding, session=session)
        for name, finding in listed
    ]


def _log_check(
    *,
    asset: dg.AssetKey,
    name: str,
    source: str,
    finding: Callable[[Workspace, str], CheckFinding],
    severity: dg.AssetCheckSeverity,
) -> dg.AssetChecksDefinition:
    @dg.asset_check(asset=asset, name=name, description=_description(finding), op_tags=_LAST)
    @unquoted
    def check(
        context: dg.AssetCheckExecutionContext, workspace: dg.ResourceParam[Workspace]
    ) -> dg.AssetCheckResult:
        return _result(finding(_looking_once(context, workspace), source), severity)

    return check


def _layers_check(
    source: str,
    contracts: Sequence[TableContract],
    *,
    name: str,
    finding: Callable[[Workspace, str], CheckFinding],
    severity: dg.AssetCheckSeverity,
) -> dg.AssetChecksDefinition:
    """Return a check of the deduped events that reads every layer, so it runs after the later ones."""
    deduped = keys.deduped_key(source)

    def findings(workspace: Workspace, _: _CheckKeys) -> Iterator[dg.AssetCheckResult]:
        yield _result(finding(workspace, source), severity, asset=deduped, name=name)

    return _after_tables(
        source,
        contracts,
        name=f"{'__'.join(deduped.path)}_{name}",
        specs=[dg.AssetCheckSpec(name, asset=deduped, description=_description(finding))],
        findings=findings,
    )


def _groups_of(contracts: Sequence[TableContract]) -> list[Sequence[TableContract]]:
    return [
        contracts[start : start + _TABLES_OF_A_STEP] for start in range(0, len(contracts), _TABLES_OF_A_STEP)
    ]


def _table_checks(
    source: str, contracts: Sequence[TableContract], group: Sequence[TableContract], *, name: str
) -> dg.AssetChecksDefinition:
    """Return the checks of the dimensions of ``group``, contract expectations included, as the step ``name``.

    Landing is read once for all of them. ``contracts``: all of the source.
    """
    asset_of = {contract.name: keys.dimension_key(contract) for contract in group}
    listed: Mapping[str, Callable[[Workspace, str, Collection[str]], dict[str, CheckFinding]]] = {
        "complete": checks.tables_complete,
        FRESH: _tables_fresh_now,
        "schema_as_contracted": quality_checks.schemas_as_contracted,
        "rules_kept": quality_checks.rules_kept,
        "volume_expected": quality_checks.volume_expected,
        "not_quiet": quality_checks.not_quiet,
    }
    of_some = {
        "volume_expected": {each.name for each in group if each.quality.volume is not None},
        "not_quiet": {each.name for each in group if (f := each.quality.freshness) and f.quiet},
    }

    def findings(workspace: Workspace, chosen: _CheckKeys) -> Iterator[dg.AssetCheckResult]:
        for check_name, of_tables in listed.items():
            tables = [
                table for table, asset in asset_of.items() if dg.AssetCheckKey(asset, check_name) in chosen
            ]
            for table, finding in of_tables(workspace, source, tables).items():
                yield _result(finding, _WARN, asset=asset_of[table], name=check_name)

    return _after_tables(
        source,
        contracts,
        name=name,
        specs=[
            dg.AssetCheckSpec(check_name, asset=asset, description=_description(of_tables))
            for table, asset in asset_of.items()
            for check_name, of_tables in listed.items()
            if table in of_some.get(check_name, asset_of)
        ],
        findings=findings,
    )


def _after_tables(
    source: str,
    contracts: Sequence[TableContract],
    *,
    name: str,
    specs: Sequence[dg.AssetCheckSpec],
    findings: Callable[[Workspace, _CheckKeys], Iterator[dg.AssetCheckResult]],
) -> dg.AssetChecksDefinition:
    """Return one step with checks that a run makes after it has tried each of its tables.

    ``findings``: yields the results of the given checks.
    """
    events = "events"
    dimensions = {keys.dimension_key(contract) for contract in contracts}

    @dg.op(
        name=name,
        ins={events: dg.In(dg.Nothing)},
        out={spec.get_python_identifier(): dg.Out(dg.Nothing, is_required=False) for spec in specs},
        tags=_LAST,
    )
    @unquoted
    def evaluate(
        context: dg.OpExecutionContext, workspace: dg.ResourceParam[Workspace]
    ) -> Iterator[dg.AssetCheckResult]:
        if _tables_unfinished(context.instance, context.run_id, source, dimensions):
            # Another run writes the table. While this step sleeps, the run can do nothing else.
            raise dg.RetryRequested(max_retries=_MAX_RETRIES, seconds_to_wait=RETRY_SECONDS)
        yield from findings(_looking_once(context, workspace), context.selected_asset_check_keys)

    made: dg.AssetChecksDefinition = dg.AssetChecksDefinition.create(
        keys_by_input_name={events: keys.deduped_key(source)},
        node_def=evaluate,
        check_specs_by_output_name={spec.get_python_identifier(): spec for spec in specs},
        can_subset=True,
    )
    return made


def _looking_once(
    context: dg.AssetCheckExecutionContext | dg.OpExecutionContext, workspace: Workspace
) -> Workspace:
    """Return the workspace for all checks of logs that a run makes in a row; it looks at each table once."""
    return workspace.looking_once(f"{context.run.run_id}, checks, {context.retry_number}")


def _tables_unfinished(
    instance: dg.DagsterInstance, run_id: str, source: str, tables: set[dg.AssetKey]
) -> bool:
    """Return whether a step of the run that makes one of ``tables`` has not ended yet.

    If raw or deduped events failed, Dagster starts no step of a table and records nothing about it.
    """
    events = {keys.raw_key(source), keys.deduped_key(source)}
    planned = [
        (entry.step_key, entry.dagster_event.asset_key)
        for entry in instance.all_logs(run_id, of_type=dg.DagsterEventType.ASSET_MATERIALIZATION_PLANNED)
        if entry.dagster_event is not None
    ]
    of_tables = {step for step, asset in planned if asset in tables}
    of_events = {step for step, asset in planned if asset in events}
    if not of_tables:
        return False
    ended = {entry.step_key: entry.dagster_event for entry in instance.all_logs(run_id, of_type=_ENDS)}
    for step in of_events:
        event = ended.get(step)
        if event is not None and event.event_type != dg.DagsterEventType.STEP_SUCCESS:
            return False
    return not of_tables <= ended.keys()


def _content_check(
    *,
    contract: TableContract,
    name: str,
    finding: Callable[[Workspace, SparkSession, TableContract], CheckFinding],
    session: _Session,
) -> dg.AssetChecksDefinition:
    asset = keys.dimension_key(contract)

    @dg.multi_asset_check(
        name=f"{'__'.join(asset.path)}_{name}",
        specs=[dg.AssetCheckSpec(name, asset=asset, description=_description(finding))],
        can_subset=True,
    )
    @unquoted
    def check(
        context: dg.AssetCheckExecutionContext,
        workspace: dg.ResourceParam[Workspace],
        pyspark: LazyPySparkResource,
    ) -> Iterator[dg.AssetCheckResult]:
        if leaves_out(context, f"It reads all rows: {keys.audit_job_name(contract.source)} checks it."):
            return
        with named_spark_errors(workspace.settings):
            # Spark may take a minute to start, and the choice of a session looks at every table in turn.
            spark = session(workspace, pyspark)
            # Reading rows may take minutes, so later checks of logs look again.
            workspace = workspace.looking_once(f"{context.run.run_id}, {contract.name}, {name}")
            found = finding(workspace, spark, contract)
        yield _result(found, _ERROR, asset=asset, name=name)

    return check


def _watermark_fresh_now(workspace: Workspace, source: str) -> CheckFinding:
    """Check that the watermark of landing is close to the clock; old backfills do not move it."""
    return checks.watermark_fresh(workspace, source, datetime.now(UTC))


def _tables_fresh_now(workspace: Workspace, source: str, names: Collection[str]) -> dict[str, CheckFinding]:
    """Check that the dimension shows what was committed until shortly before now."""
    return checks.tables_fresh(workspace, source, datetime.now(UTC), names)


def _quarantine_not_rising_now(workspace: Workspace, source: str) -> CheckFinding:
    """Check that no reason holds more undiscarded events in quarantine than a day ago."""
    return checks.quarantine_not_rising(workspace, source, datetime.now(UTC))


def _result(
    finding: CheckFinding,
    severity: dg.AssetCheckSeverity,
    *,
    asset: dg.AssetKey | None = None,
    name: str | None = None,
) -> dg.AssetCheckResult:
    metadata: dict[str, dg.MetadataValue] = {
        name: dg.MetadataValue.int(value) if isinstance(value, int) else dg.MetadataValue.float(value)
        for name, value in finding.numbers.items()
    }
    if finding.samples:
        metadata["keys"] = dg.MetadataValue.json({rule: list(keys) for rule, keys in finding.samples.items()})
    return dg.AssetCheckResult(
        asset_key=asset,
        check_name=name,
        passed=finding.passed,
        severity=severity if finding.severity is None else _SEVERITIES[finding.severity],
        description=finding.summary,
        metadata=metadata,
    )


def evaluation(finding: CheckFinding, asset: dg.AssetKey, name: str) -> dg.AssetCheckEvaluation:
    """Return ``finding`` as what a sensor records of a check that only warns."""
    result = _result(finding, _WARN, asset=asset, name=name)
    return dg.AssetCheckEvaluation(
        asset_key=asset,
        check_name=name,
        passed=result.passed,
        severity=result.severity,
        description=result.description,
        metadata=result.metadata,
    )


def _description(finding: Callable[..., object]) -> str:
    return (finding.__doc__ or "").strip().partition("\n\n")[0]
