"""Sensors of a source that is read by cursors: ``cursor_<source>`` lands new rows, ``compare_<source>``
requests the comparison of its keys when it is due.

The cursor of ``cursor_<source>`` holds, by table, the value of the cursor column up to which everything has
landed. It moves only when a batch is durable. After a cursor was set back by hand, or lost with a tick that
died, the next tick reads again from there; rows that have landed are recognized. A cursor that was set ahead
is ignored.
"""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import dagster as dg

from omnisupport_ingest.contracts.sources import SourceDefinition
from omnisupport_ingest.defs import keys
from omnisupport_ingest.defs.lost_runs import run_executor
from omnisupport_ingest.defs.run_history import unfinished
from omnisupport_ingest.defs.step_errors import unquoted
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.foreign import Unreadable, parse_json
from omnisupport_ingest.layers.scheduling.pending import pending_windows
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.read.lake_keys import dimension_keys
from omnisupport_ingest.runtime.dagster_home import BESIDE, BESIDE_TAG
from omnisupport_ingest.sources.postgres.capture.requests import PauseRequest
from omnisupport_ingest.sources.query.run import QuerySource
from omnisupport_ingest.sources.query.sync import SyncReport
from omnisupport_ingest.wording import counted

TICK_SECONDS = 30.0
"""Seconds that a tick reads; the next tick continues. Dagster ends a tick after a minute."""

_LEAST_INTERVAL = 5


def cursor_sensor(definition: SourceDefinition) -> dg.SensorDefinition:
    """Return the sensor that reads the source; it runs unless a person stops it."""

    @dg.sensor(
        name=f"cursor_{definition.name}",
        minimum_interval_seconds=max(_LEAST_INTERVAL, int(definition.sync_every.total_seconds())),
        default_status=dg.DefaultSensorStatus.RUNNING,
        description=f"Lands new rows of {definition.name}, by the cursors of its contracts; "
        f"wal_batches_{definition.name} then requests runs of their windows.",
    )
    def cursor(
        context: dg.SensorEvaluationContext, workspace: dg.ResourceParam[Workspace]
    ) -> dg.SensorResult:
        try:
            workspace = workspace.current()
            now = workspace.definition(definition.name)
            source = QuerySource.of(now, workspace.contracts, workspace.home)
            report = source.sync(seconds=TICK_SECONDS, no_further_than=_cursors(context.cursor))
        except IngestError as error:
            # The tick shows as skipped, with the fix; the cursor stays, and the next one tries again.
            return dg.SensorResult(skip_reason=f"{error.problem} Fix: {error.fix}", cursor=context.cursor)
        cursors = {each.table: each.cursor for each in report.tables}
        for fault in report.faults:
            context.log.error(f"{fault.problem} Fix: {fault.fix}")
        with failpoint("sensor.answer"):
            return dg.SensorResult(
                skip_reason=_summary(report),
                cursor=json.dumps(cursors),
                asset_events=[_observed(definition.name, report)] if report.batches else [],
            )

    return cursor


def comparison(definition: SourceDefinition) -> tuple[dg.JobDefinition, dg.SensorDefinition | None]:
    """Return the job that compares the source's keys, and the sensor that requests it (None if no interval is
    set)."""
    name = f"compare_{definition.name}"

    @dg.op(name=f"{name}_keys", out=dg.Out(dg.Nothing))
    @unquoted
    def compare_keys(context: dg.OpExecutionContext, workspace: dg.ResourceParam[Workspace]) -> None:
        source = QuerySource.of(definition, workspace.contracts, workspace.home)
        # A lake that is behind is no reason to act while the source is paused.
        source.raise_if_paused()
        lake = dimension_keys(workspace, definition.name)
        try:
            found = source.compare(lake)
        finally:
            for each in lake.values():
                each.close()
        if not found.finished:
            context.log.warning("A pause of the source ended the comparison before the last key.")
        context.add_output_metadata(
            {
                f"{each.table} {what}": dg.MetadataValue.int(number)
                for each in found.tables
                for what, number in (("deleted", each.deleted), ("missed", each.missed))
            }
        )
        for fault in found.faults[1:]:
            context.log.error(f"{fault.problem} Fix: {fault.fix}")
        if found.faults:
            # Raised at the end, when the other tables have been compared.
            raise found.faults[0]

    @dg.job(
        name=name,
        description=f"Compares the keys of {definition.name} with the lake: lands deletes, and rows that "
        "were missed.",
        executor_def=run_executor,
        tags={keys.SOURCE_TAG: definition.name, BESIDE_TAG: BESIDE},
    )
    def compare() -> None:
        compare_keys()

    if definition.compare_every is None:
        return compare, None
    seconds = int(definition.compare_every.total_seconds())

    @dg.sensor(
        name=name,
        job=compare,
        minimum_interval_seconds=min(max(_LEAST_INTERVAL, seconds), 300),
        default_status=dg.DefaultSensorStatus.RUNNING,
        description=f"Requests a comparison of {definition.name} every {seconds} seconds, once the lake has "
        "all that has landed.",
    )
    def due(
        context: dg.SensorEvaluationContext, workspace: dg.ResourceParam[Workspace]
    ) -> dg.SensorResult | dg.SkipReason:
        number = str(int(datetime.now(UTC).timestamp()) // seconds)
        if context.cursor == number:
            return dg.SkipReason("The next comparison is not due yet.")
        if PauseRequest(workspace.landing(definition.name).folder).present:
            return dg.SkipReason("The source is paused.")
        if unfinished(context.instance, name):
            return dg.SkipReason("The comparison before waits or goes on.")
        workspace = workspace.current()
        if workspace.landing(definition.name).current_epoch() is None:
            return dg.SkipReason("Nothing has landed yet.")
        if not pending_windows(workspace, definition.name).nothing:
            return dg.SkipReason("The lake does not have all yet that has landed.")
        return dg.SensorResult(run_requests=[dg.RunRequest(run_key=f"{name}/{number}")], cursor=number)

    return compare, due


def _cursors(text: str | None) -> Mapping[str, str | None]:
    """Return the cursors by table that a tick or a person set; any other text counts as no cursor."""
    try:
        found: Any = parse_json(text or "{}")
    except Unreadable:
        return {}
    if not isinstance(found, dict):
        return {}
    return {name: value for name, value in found.items() if value is None or isinstance(value, str)}


def _summary(report: SyncReport) -> str:
    rows = sum(each.landed for each in report.tables)
    state = "" if report.finished or report.faults else " The next tick goes on."
    back = [each.table for each in report.tables if each.went_back]
    warned = f" The highest cursor of {', '.join(back)} went back: restored from a backup?" if back else ""
    if blocked := [each.table for each in report.tables if each.blocked]:
        why = "as its schema or key has changed and a person has to decide"
        warned += f" Not read, {why}: {', '.join(blocked)}."
    warned += "".join(f" {each.problem} Fix: {each.fix}" for each in report.faults)
    at = f"{report.clock:%H:%M:%S} UTC"
    landed = f"{counted(rows, 'row')} landed in {counted(len(report.batches), 'batch')}"
    return f"{landed}, as of {at}.{state}{warned}"


def _observed(source: str, report: SyncReport) -> dg.AssetObservation:
    entries: dict[str, dg.MetadataValue] = {
        "source_clock": dg.MetadataValue.timestamp(report.clock),
        "batches": dg.MetadataValue.int(len(report.batches)),
    }
    for each in report.tables:
        entries[f"{each.table} landed"] = dg.MetadataValue.int(each.landed)
        entries[f"{each.table} cursor"] = dg.MetadataValue.text(each.cursor or "–")
    return dg.AssetObservation(keys.landing_key(source), metadata=entries)
