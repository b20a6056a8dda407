"""The health of a captured source in Dagster: a check on the landing asset, and a sensor that raises alarms.

The sensor reports the result of the check, so the check is as recent as the sensor's last tick, and its
numbers are plotted. The alarm is sent before the cursor moves: a tick that could not send it is repeated.
"""

from dataclasses import dataclass
from datetime import UTC, datetime

import dagster as dg

from omnisupport_ingest.contracts.sources import SourceDefinition, log_settings
from omnisupport_ingest.defs import keys
from omnisupport_ingest.defs.step_errors import unquoted
from omnisupport_ingest.defs.tick_cursor import TickCursor
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.runtime.alarm import send_alarm
from omnisupport_ingest.sources.postgres.capture.health import Health, source_health
from omnisupport_ingest.sources.postgres.preflight.source_check import contracted_tables
from omnisupport_ingest.sources.postgres.slot.retention import Level, SlotWarning

CHECK = "source_healthy"

INTERVAL_SECONDS = 60

_OBSERVED_EVERY_SECONDS = 600
"""How often an unchanged health is recorded; recording every tick would fill the event log. A change is
recorded at once."""


@dataclass(frozen=True, slots=True)
class HealthCursor(TickCursor):
    """The health that was last sent as an alarm, and when it was last recorded (seconds since 1970)."""

    level: int = 0
    problems: tuple[str, ...] = ()
    recorded_at: float = 0.0


def source_health_check(definition: SourceDefinition) -> dg.AssetChecksDefinition:
    """Return the check of a captured source; it queries the server, with the rights of the capture role."""
    source = definition.name

    @dg.asset_check(
        asset=keys.landing_key(source),
        name=CHECK,
        description="Whether slot, kept WAL and publication of the source are well, with time to spare.",
    )
    @unquoted
    def check(workspace: dg.ResourceParam[Workspace]) -> dg.AssetCheckResult:
        health = _health(workspace, definition)
        return dg.AssetCheckResult(
            passed=health.level is Level.WELL,
            severity=_severity(health),
            description=health.summary,
            metadata=_metadata(health),
        )

    return check


def source_health_sensor(definition: SourceDefinition) -> dg.SensorDefinition:
    """Return the sensor of a captured source; it runs unless a person stops it."""
    source = definition.name

    @dg.sensor(
        name=f"source_health_{source}",
        asset_selection=dg.AssetSelection.assets(keys.landing_key(source)),
        minimum_interval_seconds=INTERVAL_SECONDS,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description=f"Watches slot, kept WAL and publication of {source}; calls the alarm command or webhook "
        "when its health changes.",
    )
    def source_health_changes(
        context: dg.SensorEvaluationContext, workspace: dg.ResourceParam[Workspace]
    ) -> dg.SensorResult:
        last, now = HealthCursor.from_text(context.cursor), datetime.now(UTC)
        health = _health(workspace, definition)
        changed = (health.level, health.kinds) != (last.level, last.problems)
        if changed:
            send_alarm(workspace.settings, health.document(now))
        due = changed or now.timestamp() - last.recorded_at >= _OBSERVED_EVERY_SECONDS
        recorded_at = now.timestamp() if due else last.recorded_at
        return dg.SensorResult(
            skip_reason=dg.SkipReason(health.summary),
            cursor=HealthCursor(int(health.level), health.kinds, recorded_at).to_text(),
            asset_events=_events(health) if due else [],
        )

    return source_health_changes


def _health(workspace: Workspace, definition: SourceDefinition) -> Health:
    tables = contracted_tables(workspace.contracts, definition.name)
    try:
        settings = log_settings(workspace.settings, definition)
    except IngestError as wrong:
        return Health(definition.name, Level.ALARM, (SlotWarning(wrong.problem, wrong.fix, Level.ALARM),))
    return source_health(settings, workspace.home, tables)


def _events(health: Health) -> list[dg.AssetObservation | dg.AssetCheckEvaluation]:
    asset = keys.landing_key(health.source)
    return [
        dg.AssetObservation(asset, metadata=_metadata(health)),
        dg.AssetCheckEvaluation(
            asset_key=asset,
            check_name=CHECK,
            passed=health.level is Level.WELL,
            severity=_severity(health),
            description=health.summary,
            metadata=_metadata(health),
        ),
    ]


def _severity(health: Health) -> dg.AssetCheckSeverity:
    return dg.AssetCheckSeverity.ERROR if health.level is Level.ALARM else dg.AssetCheckSeverity.WARN


def _metadata(health: Health) -> dict[str, dg.MetadataValue]:
    return {
        name: dg.MetadataValue.int(value) if isinstance(value, int) else dg.MetadataValue.float(value)
        for name, value in health.numbers.items()
    }
