"""The health of a captured source in Dagster: a check on the landing asset, and a sensor that raises alarms.

The sensor reports what the check would find, so the check is as fresh as the sensor's last tick, and a plot
of its numbers. People are told before the cursor moves: a tick that could not tell them is made again.
"""

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Self

import dagster as dg

from omnisupport_ingest.contracts.sources import SourceDefinition, log_settings
from omnisupport_ingest.defs import keys
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.foreign import Unreadable, parse_json
from omnisupport_ingest.json_values import from_note
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.runtime.alarm import send_alarm
from omnisupport_ingest.sources.postgres.capture.health import Health, source_health
from omnisupport_ingest.sources.postgres.preflight.source_check import contracted_tables
from omnisupport_ingest.sources.postgres.slot.retention import Level, Warned

CHECK = "source_healthy"

INTERVAL_SECONDS = 60

_OBSERVED_EVERY_SECONDS = 600
"""Every tick would fill the event log; a change is recorded at once."""


@dataclass(frozen=True, slots=True)
class HealthCursor:
    """What people were told last, and when it was last recorded (seconds since 1970)."""

    level: int = 0
    problems: tuple[str, ...] = ()
    recorded_at: float = 0.0

    def to_text(self) -> str:
        return json.dumps({"level": self.level, "problems": self.problems, "recorded_at": self.recorded_at})

    @classmethod
    def from_text(cls, text: str | None) -> Self:
        """Read what ``to_text`` wrote; anything else counts as a source that was well."""
        try:
            return from_note(cls, parse_json(text or "{}"))
        except Unreadable:
            return cls()


def source_health_check(definition: SourceDefinition) -> dg.AssetChecksDefinition:
    """The check of a captured source; it asks the server, with the rights of the capture role."""
    source = definition.name

    @dg.asset_check(
        asset=keys.landing_key(source),
        name=CHECK,
        description="Whether slot, kept WAL and publication of the source are well, with time to spare.",
    )
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
    """The sensor of a captured source; running unless somebody stops it."""
    source = definition.name

    @dg.sensor(
        name=f"source_health_{source}",
        asset_selection=dg.AssetSelection.assets(keys.landing_key(source)),
        minimum_interval_seconds=INTERVAL_SECONDS,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description=f"Watches slot, kept WAL and publication of {source}; tells the alarm command or webhook "
        "when its health changes.",
    )
    def source_health_changes(
        context: dg.SensorEvaluationContext, workspace: dg.ResourceParam[Workspace]
    ) -> dg.SensorResult:
        told, now = HealthCursor.from_text(context.cursor), datetime.now(UTC)
        health = _health(workspace, definition)
        news = (health.level, health.kinds) != (told.level, told.problems)
        if news:
            send_alarm(workspace.settings, health.document(now))
        due = news or now.timestamp() - told.recorded_at >= _OBSERVED_EVERY_SECONDS
        recorded_at = now.timestamp() if due else told.recorded_at
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
        return Health(definition.name, Level.ALARM, (Warned(wrong.problem, wrong.fix, Level.ALARM),))
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
