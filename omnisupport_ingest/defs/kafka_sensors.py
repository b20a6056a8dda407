"""The sensor of a source of Kafka topics: ``topics_<source>`` lands new records; ``wal_batches_<source>``
then requests runs of their windows.

Its cursor only displays the offset of every partition. The offsets that count are in the last manifest, so a
lost, rewound or wrong cursor changes nothing.
"""

import json

import dagster as dg

from omnisupport_ingest.contracts.sources import SourceDefinition
from omnisupport_ingest.defs import keys
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.sources.kafka.run import KafkaSource
from omnisupport_ingest.sources.kafka.sync import KafkaReport
from omnisupport_ingest.wording import counted

TICK_SECONDS = 25.0
"""Seconds that a tick reads; the next tick continues. Dagster ends a tick after a minute."""

_LEAST_INTERVAL = 5


def topics_sensor(definition: SourceDefinition) -> dg.SensorDefinition:
    """Return the sensor that reads the topics; it runs unless a person stops it."""

    @dg.sensor(
        name=f"topics_{definition.name}",
        minimum_interval_seconds=max(_LEAST_INTERVAL, int(definition.sync_every.total_seconds())),
        default_status=dg.DefaultSensorStatus.RUNNING,
        description=f"Lands new records of the topics of {definition.name}; wal_batches_{definition.name} "
        "then requests runs of their windows.",
    )
    def topics(
        context: dg.SensorEvaluationContext, workspace: dg.ResourceParam[Workspace]
    ) -> dg.SensorResult:
        try:
            workspace = workspace.current()
            now = workspace.definition(definition.name)
            source = KafkaSource.of(now, workspace.contracts, workspace.home, workspace.settings)
            report = source.sync(seconds=TICK_SECONDS)
        except IngestError as error:
            # The tick shows as skipped, with the fix; the next one tries again.
            return dg.SensorResult(skip_reason=f"{error.problem} Fix: {error.fix}", cursor=context.cursor)
        offsets = {f"{topic}[{number}]": span.next for (topic, number), span in report.spans.items()}
        for fault in report.faults:
            context.log.error(f"{fault.problem} Fix: {fault.fix}")
        with failpoint("sensor.answer"):
            return dg.SensorResult(
                skip_reason=_summary(report),
                cursor=json.dumps(offsets) if offsets else context.cursor,
                asset_events=[_observed(definition.name, report)] if report.batches else [],
            )

    return topics


def _summary(report: KafkaReport) -> str:
    more = "" if report.finished or report.faults else " The next tick goes on."
    faults = "".join(f" {each.problem} Fix: {each.fix}" for each in report.faults)
    gone = f" Not on the cluster any more: {', '.join(report.missing)}." if report.missing else ""
    landed = f"{counted(report.records, 'record')} landed in {counted(len(report.batches), 'batch')}."
    return f"{landed}{more}{gone}{faults}"


def _observed(source: str, report: KafkaReport) -> dg.AssetObservation:
    entries = {
        "batches": dg.MetadataValue.int(len(report.batches)),
        "records": dg.MetadataValue.int(report.records),
        "odd records": dg.MetadataValue.int(report.odd),
    }
    for (topic, number), span in report.spans.items():
        entries[f"{topic}[{number}] next offset"] = dg.MetadataValue.int(span.next)
    return dg.AssetObservation(keys.landing_key(source), metadata=entries)
