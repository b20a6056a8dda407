"""``sync NAME`` and ``source status NAME`` of a source of Kafka topics."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from omnisupport_ingest.cli.counted import counted
from omnisupport_ingest.cli.one_pass import FinishedRun, OnePass

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omnisupport_ingest.contracts.sources import SourceDefinition
    from omnisupport_ingest.home import Home
    from omnisupport_ingest.landing.manifest import Manifest
    from omnisupport_ingest.settings import Settings
    from omnisupport_ingest.sources.kafka.offsets import Ways
    from omnisupport_ingest.sources.kafka.run import KafkaSource
    from omnisupport_ingest.sources.kafka.sync import KafkaReport
    from omnisupport_ingest.stages.workspace import Workspace

NOT_WELL = 1
"""Exit code of ``source status`` where records were deleted before they landed, or nothing answers."""


def sync_kafka(
    the_pass: OnePass, workspace: Workspace, source: KafkaSource, ways: Ways
) -> tuple[KafkaReport, list[FinishedRun]]:
    """Land what is new in the topics of ``source``, then take it through every layer."""
    name = source.definition.name
    the_pass.say(f"Reading the topics of {name} …")

    def landed(batch: Manifest) -> None:
        the_pass.say(f"  landed {counted(batch.rows, 'event')} as {batch.batch_id}")

    report = source.sync(ways=ways, landed=landed)
    return report, the_pass.materialize(workspace)


def document(report: KafkaReport, runs: Sequence[FinishedRun]) -> dict[str, Any]:
    """What a machine is told of a sync: counts, names and offsets, no value of a record."""
    return {
        "source": report.source,
        "finished": report.finished,
        "records": report.records,
        "events": report.events,
        "odd": report.odd,
        "batches": [each.batch_id for each in report.batches],
        "partitions": [
            {"topic": each.topic, "partition": each.partition, "next": each.next}
            for each in report.spans.values()
        ],
        "missing": report.missing,
        "faults": [{"problem": each.problem, "fix": each.fix} for each in report.faults],
        "runs": [asdict(each) for each in runs],
    }


def show(report: KafkaReport, runs: Sequence[FinishedRun]) -> None:
    """Say what a sync did."""
    for batch in report.batches:
        for span in (batch.file.offsets if batch.file is not None else None) or ():
            if span.gone:
                click.echo(
                    f"{span.topic}[{span.partition}]: {counted(span.gone, 'offset')} from {span.start} on "
                    f"are a gap: {span.accepted}."
                )
    if report.first_odd is not None:
        (topic, partition), offset, fault = report.first_odd
        click.echo(
            f"{counted(report.odd, 'record')} that cannot be read, to quarantine. The first is {topic}"
            f"[{partition}], offset {offset}: {fault.problem}. {fault.fix}"
        )
    for name in report.missing:
        click.echo(f"The topic {name}, of which records have landed, is not on the cluster any more.")
    end = "to their ends" if report.finished else "as far as told"
    click.echo(
        f"Source {report.source}: topics read {end}, {counted(report.records, 'record')} in "
        f"{counted(len(report.batches), 'batch')}, {counted(len(runs), 'run')}."
    )


def kafka_status(settings: Settings, definition: SourceDefinition, home: Home, *, as_json: bool) -> int:
    """Print where each partition of a source stands, and how far behind it is; returns the exit code."""
    from omnisupport_ingest.contracts.in_force import contracts_in_force
    from omnisupport_ingest.errors import IngestError
    from omnisupport_ingest.sources.kafka.run import KafkaSource
    from omnisupport_ingest.sources.postgres.capture.requests import PauseRequest
    from omnisupport_ingest.sources.postgres.session.lease import Lease

    source = KafkaSource.of(definition, contracts_in_force(settings), home, settings)
    pause = PauseRequest(source.inlet.store.folder).read()
    running = Lease.is_held(home.run, definition.name)
    told: dict[str, Any] = {
        "source": definition.name,
        "state": "PAUSED" if pause is not None else "RUNNING" if running else "STOPPED",
        "connection": definition.connection,
        "partitions": [],
        "behind": None,
        "problem": None,
    }
    problem: IngestError | None = None
    try:
        lags = source.lags()
    except IngestError as error:
        lags, problem = [], error
        told["problem"] = {"problem": error.problem, "fix": error.fix}
    else:
        told["behind"] = sum(each.behind for each in lags)
    told["partitions"] = [
        {
            "topic": each.held.topic,
            "partition": each.held.partition,
            "landed": each.landed,
            "low": each.held.low,
            "end": each.held.end,
            "behind": each.behind,
            "gone": each.gone,
        }
        for each in lags
    ]
    if as_json:
        click.echo(json.dumps(told, indent=2))
    else:
        click.echo(f"{definition.name}: {told['state']}, {told['connection']}")
        for each in lags:
            stands = "nothing has landed" if each.landed is None else f"landed up to offset {each.landed}"
            gone = f"; {counted(each.gone, 'offset')} were deleted before: a gap" if each.gone else ""
            where = f"{each.held.topic}[{each.held.partition}]"
            click.echo(f"  {where}: {stands} of {each.held.end}, {each.behind} behind{gone}")
        if problem is not None:
            click.echo(f"{problem.problem}\nFix: {problem.fix}")
    return NOT_WELL if problem is not None or any(each.gone for each in lags) else 0
