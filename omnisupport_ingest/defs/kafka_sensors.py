"""The sensor of a source of Kafka topics: ``topics_<source>`` lands what is new; ``wal_batches_<source>``
then asks for the windows.

Its cursor only shows how far every partition is. The offsets that count stand in the last manifest, so a
lost, rewound or made-up cursor changes nothing.
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

TICK_SECONDS = 25.0
"""How long a tick reads; what is left is for the next one. Dagster ends a tick after a minute."""

_LEAST_INTERVAL = 5


def topics_sensor(definition: SourceDefinition) -> dg.SensorDefinition:
    """The sensor that reads the topics; running unless somebody stops it."""

    @dg.sensor(
        name=f"topics_{definition.name}",
        minimum_interval_seconds=max(_LEAST_INTERVAL, int(definition.sync_every.total_seconds())),
        default_status=dg.DefaultSensorStatus.RUNNING,
        description=f"Lands what is new in the topics of {definition.name}; wal_batches_{definition.name} "
        "then asks for the windows.",
    )
    def topics(
        context: dg.SensorEvaluationContext, workspace: dg.ResourceParam[Workspace]
    ) -> dg.SensorResult:
        try:
            source = KafkaSource.of(definition, workspace.contracts, workspace.home, workspace.settings)
            report = source.sync(seconds=TICK_SECONDS)
        except IngestError as error:
            # The tick is told as skipped with the fix; the next one tries again.
            return dg.SensorResult(skip_reason=f"{error.problem} Fix: {error.fix}", cursor=context.cursor)
        stands = {f"{topic}[{number}]": span.next for (topic, number), span in report.spans.items()}
        for fault in report.faults:
            context.log.error(f"{fault.problem} Fix: {fault.fix}")
        with failpoint("sensor.answer"):
            return dg.SensorResult(
                skip_reason=_told(report),
                cursor=json.dumps(stands) if stands else context.cursor,
                asset_events=[_observed(definition.name, report)] if report.batches else [],
            )

    return topics


def _told(report: KafkaReport) -> str:
    more = "" if report.finished or report.faults else " The next tick goes on."
    faults = "".join(f" {each.problem} Fix: {each.fix}" for each in report.faults)
    gone = f" Not on the cluster any more: {', '.join(report.missing)}." if report.missing else ""
    return f"{report.records} records landed in {len(report.batches)} batches.{more}{gone}{faults}"


def _observed(source: str, report: KafkaReport) -> dg.AssetObservation:
    entries = {
        "batches": dg.MetadataValue.int(len(report.batches)),
        "records": dg.MetadataValue.int(report.records),
        "odd records": dg.MetadataValue.int(report.odd),
    }
    for (topic, number), span in report.spans.items():
        entries[f"{topic}[{number}] next offset"] = dg.MetadataValue.int(span.next)
    return dg.AssetObservation(keys.landing_key(source), metadata=entries)
