"""``sync NAME`` of a source without a log: one that is read by cursors, or Kafka topics.

New rows or records land; then everything that has landed goes through every layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from omnisupport_ingest.cli.render import clock, counted, echo_json, say_err
from omnisupport_ingest.cli.stopping import interrupt_on_terminate
from omnisupport_ingest.cli.views import pass_progress
from omnisupport_ingest.cli.waiting_events import say_waiting
from omnisupport_ingest.contracts.model import table_named
from omnisupport_ingest.read.lake_keys import dimension_keys
from omnisupport_ingest.sources.kafka.offsets import Ways
from omnisupport_ingest.sources.kafka.run import KafkaSource
from omnisupport_ingest.sources.query.run import QuerySource
from omnisupport_ingest.verify.one_pass import one_pass

if TYPE_CHECKING:
    from omnisupport_ingest.contracts.sources import SourceDefinition
    from omnisupport_ingest.landing.manifest import Manifest
    from omnisupport_ingest.layers.workspace import Workspace
    from omnisupport_ingest.sources.kafka.sync import KafkaReport
    from omnisupport_ingest.sources.query.compare import Comparison
    from omnisupport_ingest.sources.query.sync import SyncReport
    from omnisupport_ingest.verify.runs import FinishedRun

# --- a source that is read by cursors ----------------------------------------------------------------------


def sync_query(
    workspace: Workspace,
    definition: SourceDefinition,
    refresh: str | None,
    tables: Sequence[str],
    *,
    compare: bool,
    as_json: bool,
) -> int:
    """Read what is new by the cursors of ``definition``, and print it; return the exit code.

    ``refresh``: why ``tables`` (empty: all) are read whole, in a new epoch; None: no table is read whole.
    ``compare``: also compare the keys with the lake.
    """
    source = QuerySource.of(definition, workspace.contracts, workspace.home)
    anew = [table_named(each, source.tables) for each in tables] or list(source.tables)

    def landed(batch: Manifest) -> None:
        if batch.rows:
            say_err(f"  landed {counted(batch.rows, 'row')}")

    compared = None
    with (
        interrupt_on_terminate(),
        one_pass(workspace.settings, workspace.home, "sync", pass_progress()) as the_pass,
    ):
        the_pass.say(f"Reading {definition.name} by its cursors …")
        report = source.sync(anew=anew if refresh is not None else (), reason=refresh or "", landed=landed)
        runs = the_pass.materialize(workspace)
        if compare and report.finished:
            # The lake now has everything that has landed.
            the_pass.say(f"Comparing the keys of {definition.name} with the lake …")
            lake = dimension_keys(workspace.current(), definition.name)
            try:
                compared = source.compare(lake)
                report.faults += compared.faults
            finally:
                for each in lake.values():
                    each.close()
            runs += the_pass.materialize(workspace)
    if as_json:
        echo_json(_query_document(report, runs, compared))
    else:
        _show_query(report, runs)
        if compared is not None:
            _show_comparison(compared)
    return _ended(workspace, report)


def _query_document(
    report: SyncReport, runs: Sequence[FinishedRun], compared: Comparison | None
) -> dict[str, Any]:
    """Return the pass for ``--json``: counts and names; of the rows only cursors, no keys and no other
    values."""
    return {
        "source": report.source,
        "clock": report.clock.isoformat(),
        "finished": report.finished,
        "batches": len(report.batches),
        "tables": [asdict(each) for each in report.tables],
        "faults": [{"problem": each.problem, "fix": each.fix} for each in report.faults],
        "compared": None if compared is None else [asdict(each) for each in compared.tables],
        "runs": [asdict(run) for run in runs],
    }


def _show_query(report: SyncReport, runs: Sequence[FinishedRun]) -> None:
    for each in report.tables:
        if each.blocked:
            click.echo(
                f"{each.table}: not read, as its schema or key has changed and a person has to "
                "decide. See: omnisupport-ingest contracts changes"
            )
            continue
        if each.refused:
            click.echo(f"{each.table}: refused, as the error says.")
            continue
        how = "read whole" if each.full else "read from its cursor"
        again = f", {each.again:,} met again" if each.again else ""
        state = "" if each.finished else "; the next sync goes on with it"
        click.echo(f"{each.table}: {how}, {counted(each.landed, 'row')} landed{again}{state}.")
        if each.behind:
            click.echo(
                f"  {counted(each.behind, 'row')} came with a lower cursor than before; a person must decide "
                "which version counts (quarantine list, out_of_order_event)."
            )
        if each.went_back:
            click.echo(
                "  Its highest cursor is lower than before: the newest rows were deleted, or the source was "
                f'restored from a backup. After a restore: sync {report.source} --full-refresh "restored"'
            )
    click.echo(
        f"Source {report.source} is read up to {clock(report.clock)}: "
        f"{counted(len(report.batches), 'batch')}, {_runs_of(report.source, runs)}"
    )


def _ended(workspace: Workspace, report: SyncReport | KafkaReport) -> int:
    """Print what waits and what went wrong; return the exit code. Raises the first fault now, when all that
    could be read is in the lake."""
    say_waiting(workspace, report.source)
    for fault in report.faults[1:]:
        say_err(str(fault))
    if report.faults:
        raise report.faults[0]
    return 0


def _runs_of(source: str, runs: Sequence[FinishedRun]) -> str:
    """Return how many of ``runs`` took in ``source``, and which other sources had batches that waited."""
    own = [each for each in runs if each.source == source]
    others = sorted({each.source for each in runs} - {source})
    more = f" The pass took in what waited of {', '.join(others)}, too." if others else ""
    return f"{counted(len(own), 'run')}.{more}"


def _show_comparison(comparison: Comparison) -> None:
    for each in comparison.tables:
        more = "; there are more: sync with --full-refresh" if each.more_missed else ""
        more += "" if each.finished else "; a pause ended it before the last key"
        click.echo(
            f"{each.table}: keys compared by {counted(each.checksums, 'checksum')}, "
            f"{counted(each.keys_read, 'key')} read; {counted(each.deleted, 'delete')} noticed, "
            f"{counted(each.missed, 'missed row')} read{more}."
        )


# --- Kafka topics ------------------------------------------------------------------------------------------


def sync_kafka(
    workspace: Workspace, definition: SourceDefinition, accept_gap: str, new_epoch: str, *, as_json: bool
) -> int:
    """Land what is new in the topics of ``definition``, and print it; return the exit code.

    ``accept_gap``, ``new_epoch``: the reason to continue after a gap, or to begin an epoch; empty if not
    requested.
    """
    source = KafkaSource.of(definition, workspace.contracts, workspace.home, workspace.settings)

    def landed(batch: Manifest) -> None:
        say_err(f"  landed {counted(batch.rows, 'event')} as {batch.batch_id}")

    with (
        interrupt_on_terminate(),
        one_pass(workspace.settings, workspace.home, "sync", pass_progress()) as the_pass,
    ):
        the_pass.say(f"Reading the topics of {definition.name} …")
        report = source.sync(ways=Ways(accept_gap, new_epoch), landed=landed)
        runs = the_pass.materialize(workspace)
    if as_json:
        echo_json(_kafka_document(report, runs))
    else:
        _show_kafka(report, runs)
    return _ended(workspace, report)


def _kafka_document(report: KafkaReport, runs: Sequence[FinishedRun]) -> dict[str, Any]:
    """Return the pass for ``--json``: counts, names and offsets, no value of a record."""
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
        "parked": [
            {"topic": each.topic, "partition": each.partition, "offset": each.offset, "table": each.table}
            for each in report.parked.values()
        ],
        "faults": [{"problem": each.problem, "fix": each.fix} for each in report.faults],
        "runs": [asdict(each) for each in runs],
    }


def _show_kafka(report: KafkaReport, runs: Sequence[FinishedRun]) -> None:
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
            f"{counted(report.odd, 'record')} that cannot be read go to quarantine. The first is {topic}"
            f"[{partition}], offset {offset}: {fault.problem}. {fault.fix}"
        )
    for name in report.missing:
        click.echo(f"The topic {name}, of which records have landed, is not on the cluster any more.")
    end = "to their ends" if report.finished else "up to the given end"
    click.echo(
        f"Source {report.source}: topics read {end}, {counted(report.records, 'record')} in "
        f"{counted(len(report.batches), 'batch')}, {_runs_of(report.source, runs)}"
    )
