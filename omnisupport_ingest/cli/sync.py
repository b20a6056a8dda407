"""``sync``: one whole pass from the source to the dimensions, for cron and for a first try."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from omnisupport_ingest.cli.counted import counted
from omnisupport_ingest.cli.one_pass import FinishedRun, OnePass, one_pass
from omnisupport_ingest.cli.opening import open_home, open_settings
from omnisupport_ingest.cli.slot_left import DROP, SlotLeft, slot_left
from omnisupport_ingest.cli.source_opening import log_of
from omnisupport_ingest.cli.stopping import interrupt_on_terminate
from omnisupport_ingest.cli.verify import NOT_THE_SAME, SAMPLE

if TYPE_CHECKING:
    from omnisupport_ingest.cli.proof import Proof
    from omnisupport_ingest.contracts.sources import SourceDefinition
    from omnisupport_ingest.landing.manifest import Manifest
    from omnisupport_ingest.position import Lsn
    from omnisupport_ingest.stages.workspace import Workspace


@dataclass(frozen=True)
class Synced:
    """What a pass did. ``proof``: null if it was not asked for; ``slot``: null if there is none."""

    source: str
    lsn: Lsn
    landed: list[Manifest]
    runs: list[FinishedRun]
    proof: Proof | None
    slot: SlotLeft | None

    @property
    def holds(self) -> bool:
        return self.proof is None or self.proof.holds

    def document(self) -> dict[str, Any]:
        """The same for a machine: counts and names, no key and no value of a row."""
        from omnisupport_ingest.cli.proof import proof_document

        slot = None if self.slot is None else asdict(self.slot)
        return {
            "source": self.source,
            "lsn": str(self.lsn),
            "landed": _landed(self.landed),
            "runs": [asdict(run) for run in self.runs],
            "verify": None if self.proof is None else proof_document(self.proof),
            "slot": slot,
        }


@click.command()
@click.argument("name", required=False)
@click.option(
    "--verify",
    type=click.Choice(["none", "sample", "full"]),
    help="Compare source and lake at the end. Default: sample for a configured source, full for the "
    "embedded one.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as one JSON document.")
@click.option(
    "--full-refresh",
    "refresh",
    metavar="WHY",
    help="Of a source read by cursors: begin an epoch, and read its tables whole.",
)
@click.option(
    "--table",
    "tables",
    multiple=True,
    metavar="TABLE",
    help="With --full-refresh: only this one; repeatable.",
)
@click.option(
    "--compare",
    is_flag=True,
    help="Of a source read by cursors: then compare its keys with the lake, which finds deletes.",
)
@click.option(
    "--accept-gap",
    metavar="WHY",
    help="Of Kafka topics: go on behind records that were deleted before they were read.",
)
@click.option(
    "--new-epoch",
    metavar="WHY",
    help="Of Kafka topics: begin an epoch; what comes now is later than all that has landed.",
)
def sync(
    name: str | None,
    verify: str | None,
    as_json: bool,
    refresh: str | None,
    tables: tuple[str, ...],
    compare: bool,
    accept_gap: str | None,
    new_epoch: str | None,
) -> int:
    """Take everything from a source into the lake once, prove it, and exit. For cron.

    NAME is a source of the home (`sources list`); without it, the one that the settings name.

    One pass: check the source, take the snapshot of tables that have none, land all that had
    committed at the start, take what has landed through every layer, compare. Spark runs for the
    time of the pass; neither daemon nor webserver does, but the runs stand in the Dagster instance of
    the home and show in the UI when `up` runs. Without OMNISUPPORT_SOURCE_DSN the source is the embedded
    PostgreSQL, started for the time of the pass.

    It is refused while `up` runs on the home, whose capture and sensor do this work, and while
    another pass runs, so a cron job that overlaps itself does no harm. A pass that was stopped or
    failed is continued by the next one; what is in the lake is whole windows, never a part of one.

    A source of the kind query is read by the cursors of its contracts: the first time whole, then from where
    each table stands. There is nothing to compare by then, as rows may change while they are read. One of the
    kind kafka is read from the offsets that its last manifest has, to the end of every partition.

    `verify --help` says what a sample can find and what it cannot. To be exact, comparing waits for every
    transaction of the server that has written and is not over, in any database: after some seconds they are
    named on standard error. What has landed is in the lake by then, and Ctrl-C ends the wait.

    \b
    Example:
      OMNISUPPORT_SOURCE_DSN=postgresql://me@db.example/shop omnisupport-ingest sync --verify full
      omnisupport-ingest sync shop_replica

    Exit code: 0 done and nothing differs; 1 a difference, a failed run or a missing batch; 2 usage,
    settings or contract; 4 source, Java or Spark does not answer; 5 the source is not set up; 6 the
    home, the slot or the capture is in use; 7 a hole in the source, or a service failed.
    """
    from omnisupport_ingest.contracts.sources import SourceKind
    from omnisupport_ingest.stages.workspace import Workspace

    settings = open_settings()
    home = open_home(settings)
    workspace = Workspace.open(settings)
    definition = _definition(workspace, name)
    if definition.kind is not SourceKind.LOG and verify is not None:
        raise click.UsageError("--verify is for a source that is captured.")
    if definition.kind is not SourceKind.KAFKA and (accept_gap is not None or new_epoch is not None):
        raise click.UsageError("--accept-gap and --new-epoch are for a source of Kafka topics.")
    if definition.kind is SourceKind.QUERY:
        return _sync_query(workspace, definition, refresh, tables, compare=compare, as_json=as_json)
    if refresh is not None or tables or compare:
        raise click.UsageError("--full-refresh, --table and --compare are for a source read by cursors.")
    if definition.kind is SourceKind.KAFKA:
        return _sync_kafka(workspace, definition, accept_gap, new_epoch, as_json=as_json)
    source = log_of(settings, definition.name)
    mode = verify or ("sample" if source.source_dsn is not None else "full")

    with (
        interrupt_on_terminate(),
        one_pass(settings, home, "sync", lambda line: click.echo(line, err=True)) as the_pass,
    ):
        done = _sync(the_pass, replace(workspace, settings=source), mode)
    if as_json:
        click.echo(json.dumps(done.document(), indent=2))
    else:
        _print(done)
    if the_pass.left_out is not None:
        # All the other tables are in the lake by now.
        raise the_pass.left_out
    return 0 if done.holds else NOT_THE_SAME


def _definition(workspace: Workspace, name: str | None) -> SourceDefinition:
    """The source called ``name``, or that of the settings; ``SourceUnknown`` for one of files."""
    from omnisupport_ingest.contracts.sources import SourceKind, SourceUnknown, sources_in_force

    settings = workspace.settings
    definition = sources_in_force(settings, workspace.contracts).find(name or settings.source)
    if definition.kind is SourceKind.FILES:
        raise SourceUnknown(
            f"{definition.name} comes as files: there is nothing to ask.",
            fix=f"omnisupport-ingest land FILE --source {definition.name}, then: omnisupport-ingest "
            "materialize",
        )
    return definition


def _sync_query(
    workspace: Workspace,
    definition: SourceDefinition,
    refresh: str | None,
    tables: tuple[str, ...],
    *,
    compare: bool,
    as_json: bool,
) -> int:
    from omnisupport_ingest.cli import query_sync
    from omnisupport_ingest.contracts.model import table_named
    from omnisupport_ingest.sources.query.run import QuerySource

    if (refresh is None and tables) or (refresh is not None and not refresh.strip()):
        raise click.UsageError("--full-refresh needs the reason, which is recorded; --table goes with it.")
    source = QuerySource.of(definition, workspace.contracts, workspace.home)
    anew = [table_named(each, source.tables) for each in tables] or list(source.tables)
    with (
        interrupt_on_terminate(),
        one_pass(
            workspace.settings, workspace.home, "sync", lambda line: click.echo(line, err=True)
        ) as the_pass,
    ):
        report, runs = query_sync.sync_query(
            the_pass, workspace, source, anew if refresh is not None else (), refresh or ""
        )
        compared = None
        if compare and report.finished:
            compared, more = query_sync.compare_query(the_pass, workspace, source)
            runs += more
    if as_json:
        click.echo(json.dumps(query_sync.document(report, runs, compared), indent=2))
        return 0
    query_sync.show(report, runs)
    if compared is not None:
        query_sync.show_comparison(compared)
    return 0


def _sync_kafka(
    workspace: Workspace,
    definition: SourceDefinition,
    accept_gap: str | None,
    new_epoch: str | None,
    *,
    as_json: bool,
) -> int:
    from omnisupport_ingest.cli import kafka
    from omnisupport_ingest.sources.kafka.offsets import Ways
    from omnisupport_ingest.sources.kafka.run import KafkaSource

    for option, why in (("--accept-gap", accept_gap), ("--new-epoch", new_epoch)):
        if why is not None and not why.strip():
            raise click.UsageError(f"{option} needs the reason, which is recorded.")
    settings = workspace.settings
    source = KafkaSource.of(definition, workspace.contracts, workspace.home, settings)
    with (
        interrupt_on_terminate(),
        one_pass(settings, workspace.home, "sync", lambda line: click.echo(line, err=True)) as the_pass,
    ):
        ways = Ways(accept_gap or "", new_epoch or "")
        report, runs = kafka.sync_kafka(the_pass, workspace, source, ways)
    if as_json:
        click.echo(json.dumps(kafka.document(report, runs), indent=2))
    else:
        kafka.show(report, runs)
    for fault in report.faults[1:]:
        click.echo(str(fault), err=True)
    if report.faults:
        # All other partitions are in the lake by now.
        raise report.faults[0]
    return 0


def _sync(the_pass: OnePass, workspace: Workspace, mode: str) -> Synced:
    """The pass over the log that the settings of ``workspace`` name."""
    from omnisupport_ingest.cli.proof import prove
    from omnisupport_ingest.sources.postgres.preflight.source_check import contracted_tables
    from omnisupport_ingest.sources.postgres.session.dsn import source_dsn
    from omnisupport_ingest.sources.postgres.session.server import current_wal_lsn

    settings = workspace.settings
    # A source without contracts is refused before anything starts.
    contracted_tables(workspace.contracts, settings.source)
    the_pass.start_source(settings)
    until = current_wal_lsn(source_dsn(settings, the_pass.home))
    the_pass.say(f"Capturing {settings.source} up to {until} …")
    landed = the_pass.capture(settings, workspace, until)
    # Before anything is compared: to be exact, a comparison waits for every open transaction of the server.
    runs = the_pass.materialize(workspace)
    proof = None
    if mode != "none":
        sample = SAMPLE if mode == "sample" else None
        the_pass.say(
            "Reading rows of the source to compare with: " + ("all" if sample is None else "a sample")
        )

        def advance(lsn: Lsn) -> None:
            landed.extend(the_pass.capture(settings, workspace, lsn))
            runs.extend(the_pass.materialize(workspace))

        proof = prove(workspace, the_pass.spark, advance=advance, sample=sample)
    slot = slot_left(settings, the_pass.home)
    if slot is not None and settings.source != the_pass.settings.source:
        slot = replace(slot, remove_with=f"{DROP} {settings.source}")
    return Synced(settings.source, until, landed, runs, proof, slot)


def _landed(batches: list[Manifest]) -> dict[str, Any]:
    changes = [batch for batch in batches if batch.stream is not None]
    # A table is read in many chunks, and its snapshot has ended with the boundary.
    snapshots = {batch.chunk.table for batch in batches if batch.chunk is not None and batch.chunk.boundary}
    return {
        "batches": len(batches),
        "changes": sum(file.rows for batch in changes for file in batch.files),
        "snapshots": sorted(snapshots),
    }


def _print(done: Synced) -> None:
    from omnisupport_ingest.cli.proof import print_proof

    if done.proof is not None:
        print_proof(done.proof)
        click.echo()
    counts = _landed(done.landed)
    snapshots = f"{counted(len(counts['snapshots']), 'snapshot')} and " if counts["snapshots"] else ""
    click.echo(
        f"Source {done.source} is in the lake up to {done.proof.lsn if done.proof else done.lsn}: "
        f"{snapshots}{counted(counts['changes'], 'change')} landed, {counted(len(done.runs), 'run')}."
    )
    if done.slot is not None:
        click.echo(done.slot.told)
