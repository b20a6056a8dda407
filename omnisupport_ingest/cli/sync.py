"""``sync``: one whole pass from a source to the dimensions, for cron and for a first try.

A log is captured up to its present end; cursors and Kafka topics land what is new. Then everything that has
landed goes through every layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from omnisupport_ingest.cli.errors import FINDINGS
from omnisupport_ingest.cli.opening import (
    log_of,
    open_home,
    open_settings,
    options_as,
    require_source_in_use,
)
from omnisupport_ingest.cli.render import counted, echo_json, size
from omnisupport_ingest.cli.stopping import interrupt_on_terminate
from omnisupport_ingest.cli.sync_query_kafka import sync_kafka, sync_query
from omnisupport_ingest.cli.views import pass_progress, proof_document, show_proof
from omnisupport_ingest.cli.waiting_events import say_waiting
from omnisupport_ingest.contracts.sources import SourceDefinition, SourceKind, SourceUnknown, sources_in_force
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.sources.postgres.embedded.dsn import source_dsn
from omnisupport_ingest.sources.postgres.session.connection import connect
from omnisupport_ingest.sources.postgres.session.server import slot_facts
from omnisupport_ingest.verify.one_pass import FULL, IN_SAMPLE, NONE, Synced, one_pass, sync_log

if TYPE_CHECKING:
    from omnisupport_ingest.home import Home
    from omnisupport_ingest.landing.manifest import Manifest
    from omnisupport_ingest.settings import Settings

_DROP = "omnisupport-ingest source drop"
"""The command that drops slot and publication."""


@dataclass(frozen=True, slots=True)
class _Options:
    """The options that only some kinds of sources have, as ``sync`` describes them."""

    verify: str | None
    refresh: str | None
    tables: tuple[str, ...]
    compare: bool
    accept_gap: str | None
    new_epoch: str | None


@click.command()
@click.argument("name", required=False)
@click.option(
    "--verify",
    type=click.Choice(["none", "sample", "full"]),
    help="Compare source and lake at the end.  [default: sample for a configured source, full for the "
    "embedded one]",
)
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as one JSON document.")
@click.option(
    "--full-refresh",
    "refresh",
    metavar="WHY",
    help="A source read by cursors: begin an epoch, and read its tables whole.",
)
@click.option(
    "--table",
    "tables",
    multiple=True,
    metavar="TABLE",
    help="With --full-refresh: only this table; repeatable.",
)
@click.option(
    "--compare",
    is_flag=True,
    help="A source read by cursors: also compare its keys with the lake, which finds deletes.",
)
@click.option(
    "--accept-gap",
    metavar="WHY",
    help="Kafka topics: go on after a gap, records that were deleted before they were read.",
)
@click.option(
    "--new-epoch",
    metavar="WHY",
    help="Kafka topics: begin an epoch; new records are later than everything that has landed.",
)
@options_as("options", _Options)
def sync(name: str | None, as_json: bool, options: _Options) -> int:
    """Take everything from a source into the lake once, compare both, and exit. For cron.

    NAME is a source of the home (`sources list`); by default it is the one that the settings name.

    The pass checks the source, reads the tables that have no snapshot, lands everything that had committed at
    the start, takes it through every layer, and compares. Spark runs during the pass; daemon and webserver do
    not. The Dagster instance of the home records the runs, so the UI of `up` shows them. Without
    OMNISUPPORT_SOURCE_DSN the source is the embedded PostgreSQL, which also runs during the pass.

    It is refused while `up` or another pass runs on the home, so a cron job that overlaps itself does no
    harm. The next pass continues one that was stopped or failed; the lake holds whole windows, never a part
    of one.

    A source of the kind query is read by the cursors of its contracts: the first time whole, then from where
    each table stands. It is not compared, as its rows may change while they are read. A source of the kind
    kafka is read from the offsets of its last manifest to the end of every partition.

    `verify --help` says what a sample can find. To be exact, the comparison waits for every open transaction
    of the server that has written, in any database; after some seconds standard error names them. By then the
    lake has what has landed, and Ctrl-C ends the wait.

    Events of the source that wait in quarantine do not change the exit code. Standard error says how many
    there are, and with which command to look at them.

    \b
    Example:
      OMNISUPPORT_SOURCE_DSN=postgresql://me@db.example/shop omnisupport-ingest sync --verify full
      omnisupport-ingest sync shop_replica

    Exit code: 0 done and nothing differs; 1 a difference, a failed run or a missing batch; 2 usage,
    settings or contract; 4 source, Java or Spark does not answer; 5 the source is not set up; 6 the
    home, the slot or the capture is in use; 7 a gap in the source, or a service failed.
    """
    settings = open_settings()
    open_home(settings)
    workspace = Workspace.open(settings)
    definition = _definition(workspace, name)
    _check_options(definition.kind, options)
    if definition.kind is SourceKind.QUERY:
        refresh, tables = options.refresh, options.tables
        return sync_query(workspace, definition, refresh, tables, compare=options.compare, as_json=as_json)
    if definition.kind is SourceKind.KAFKA:
        accept_gap, new_epoch = options.accept_gap or "", options.new_epoch or ""
        return sync_kafka(workspace, definition, accept_gap, new_epoch, as_json=as_json)
    return _sync_log(workspace, definition.name, options.verify, as_json=as_json)


def _definition(workspace: Workspace, name: str | None) -> SourceDefinition:
    """Return the source called ``name``, or that of the settings. Raises ``SourceUnknown`` for a source of
    files."""
    settings = workspace.settings
    if name is None:
        require_source_in_use(settings, workspace.contracts)
    definition = sources_in_force(settings, workspace.contracts).find(name or settings.source)
    if definition.kind is SourceKind.FILES:
        raise SourceUnknown(
            f"{definition.name} comes as files: there is nothing to connect to.",
            fix=f"omnisupport-ingest land FILE --source {definition.name}, then: omnisupport-ingest "
            "materialize",
        )
    return definition


def _check_options(kind: SourceKind, options: _Options) -> None:
    """Raise a usage error if ``options`` do not fit a source of this ``kind``, or if a reason is missing."""
    if kind is not SourceKind.LOG and options.verify is not None:
        raise click.UsageError("--verify is for a source that is captured.")
    if kind is not SourceKind.KAFKA and (options.accept_gap is not None or options.new_epoch is not None):
        raise click.UsageError("--accept-gap and --new-epoch are for a source of Kafka topics.")
    if kind is not SourceKind.QUERY and (options.refresh is not None or options.tables or options.compare):
        raise click.UsageError("--full-refresh, --table and --compare are for a source read by cursors.")
    if options.refresh is None and options.tables:
        raise click.UsageError("--table goes with --full-refresh.")
    reasons = (
        ("--full-refresh", options.refresh),
        ("--accept-gap", options.accept_gap),
        ("--new-epoch", options.new_epoch),
    )
    for option, why in reasons:
        if why is not None and not why.strip():
            raise click.UsageError(f"{option} needs the reason, which is recorded.")


def _sync_log(workspace: Workspace, name: str, verify: str | None, *, as_json: bool) -> int:
    source = log_of(workspace.settings, name)
    comparison = {None: FULL if source.source_dsn is None else IN_SAMPLE, "none": NONE}.get(verify, verify)
    with (
        interrupt_on_terminate(),
        one_pass(workspace.settings, workspace.home, "sync", pass_progress()) as the_pass,
    ):
        done = sync_log(the_pass, replace(workspace, settings=source), comparison or FULL)
        slot = slot_left(source, workspace.home)
    if slot is not None and source.source != workspace.settings.source:
        slot = replace(slot, remove_with=f"{_DROP} {source.source}")
    if as_json:
        echo_json(_log_document(done, slot))
    else:
        _show_log(done, slot)
    say_waiting(workspace, done.source)
    if the_pass.left_out is not None:
        # Raised at the end, when all the other tables are in the lake.
        raise the_pass.left_out
    return 0 if done.holds else FINDINGS


def _log_document(done: Synced, slot: SlotLeft | None) -> dict[str, Any]:
    """Return the pass for ``--json``: counts and names, no key and no value of a row."""
    return {
        "source": done.source,
        "lsn": str(done.lsn),
        "landed": _landed(done.landed),
        "runs": [asdict(run) for run in done.runs],
        "verify": None if done.proof is None else proof_document(done.proof),
        "slot": None if slot is None else asdict(slot),
    }


def _landed(batches: Sequence[Manifest]) -> dict[str, Any]:
    changes = [batch for batch in batches if batch.stream is not None]
    # A table is read in many chunks; its snapshot is complete with the snapshot end.
    snapshots = {batch.chunk.table for batch in batches if batch.chunk is not None and batch.chunk.boundary}
    return {
        "batches": len(batches),
        "changes": sum(batch.rows for batch in changes),
        "snapshots": sorted(snapshots),
    }


def _show_log(done: Synced, slot: SlotLeft | None) -> None:
    if done.proof is not None:
        show_proof(done.proof)
        click.echo()
    counts = _landed(done.landed)
    snapshots = f"{counted(len(counts['snapshots']), 'snapshot')} and " if counts["snapshots"] else ""
    click.echo(
        f"Source {done.source} is in the lake up to {done.proof.lsn if done.proof else done.lsn}: "
        f"{snapshots}{counted(counts['changes'], 'change')} landed, {counted(len(done.runs), 'run')}."
    )
    if slot is not None:
        click.echo(slot.message)


@dataclass(frozen=True, slots=True)
class SlotLeft:
    """The slot that a pass leaves on the source.

    ``retained_bytes``: WAL that the server keeps for it now. ``safe_bytes``: WAL that may still be written
    before the server invalidates the slot; None: no limit. ``remove_with``: the command that drops it.
    """

    name: str
    retained_bytes: int
    safe_bytes: int | None
    remove_with: str = _DROP

    @property
    def message(self) -> str:
        """What the slot costs the server, and how to remove it."""
        limit = (
            "The server sets no limit to that (max_slot_wal_keep_size), so a forgotten slot fills its disk."
            if self.safe_bytes is None
            else f"After {size(self.safe_bytes)} more (max_slot_wal_keep_size) the server gives the slot up, "
            "which leaves a gap."
        )
        return (
            f"The replication slot {self.name} stays on the server for the next pass. Until then the server "
            f"keeps all WAL from there, {size(self.retained_bytes)} now. {limit} If there is no next pass, "
            f"remove the slot: {self.remove_with}"
        )


def slot_left(settings: Settings, home: Home) -> SlotLeft | None:
    """Return the slot of ``settings`` on the source; None if it does not exist."""
    with closing(connect(source_dsn(settings, home))) as connection:
        slot = slot_facts(connection, settings.slot)
    return None if slot is None else SlotLeft(slot.name, slot.retained_bytes or 0, slot.safe_bytes)
