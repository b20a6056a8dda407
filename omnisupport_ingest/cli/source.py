"""``source``: prepare, watch, pause, restart, repair and leave the database that capture reads."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import click

from omnisupport_ingest.cli.opening import existing_home, open_settings
from omnisupport_ingest.cli.query_status import has_log, named_source, query_status
from omnisupport_ingest.cli.slot_left import size_text
from omnisupport_ingest.cli.source_connect import connect
from omnisupport_ingest.cli.source_opening import contracted_tables, log_of, open_source_dsn
from omnisupport_ingest.cli.source_repair import repair
from omnisupport_ingest.cli.source_snapshot import snapshot

if TYPE_CHECKING:
    from omnisupport_ingest.home import Home
    from omnisupport_ingest.settings import Settings
    from omnisupport_ingest.sources.postgres.capture.drop import Leaving

NOT_WELL = 1
"""Exit code of ``status`` when it warns, of a failed capture too."""

_STOP_SECONDS = 30.0
"""How long ``pause`` waits for a capture that is in the middle of a transaction."""

_RESTART_SECONDS = 60.0
"""How long ``restart`` waits for that, and for the checks of a start."""


@click.group()
def source() -> None:
    """Prepare, watch, connect to, pause, restart, repair and leave the source database."""


source.add_command(connect)
source.add_command(repair)
source.add_command(snapshot)


@source.command()
@click.argument("name", required=False)
@click.option("--role", default=None, help="Name of the role.  [default: omnisupport_capture]")
@click.option("--database", default=None, help="Name of the database.  [default: that of the source]")
def grants(name: str | None, role: str | None, database: str | None) -> None:
    """Print the SQL that makes a capture role with the least rights that suffice.

    NAME is a log of the home (`sources list`); without it, that of the settings.

    Nothing is connected to. An administrator runs the output, or hands the second part to the owner
    of the tables; then OMNISUPPORT_SOURCE_DSN names the role.

    \b
    Example:
      omnisupport-ingest source grants --database shop | psql -d shop
    """
    from omnisupport_ingest.sources.postgres.catalog.publication import DEFAULT_ROLE, grants_sql
    from omnisupport_ingest.sources.postgres.embedded.server import database_of
    from omnisupport_ingest.sources.postgres.session.connection import dsn_parts

    settings = log_of(open_settings(), name)
    if database is None:
        dsn = settings.source_dsn
        embedded = database_of(settings.source)
        database = embedded if dsn is None else dsn_parts(dsn.get_secret_value()).get("dbname")
    if database is None:
        raise click.UsageError("The connection string names no database; give its name as --database.")
    click.echo(grants_sql(role or DEFAULT_ROLE, database, settings.publication, contracted_tables(settings)))


@source.command()
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document, sizes in bytes.")
def status(name: str | None, as_json: bool) -> int:
    """Show the state of capture, its last error and lag, the slot and its kept WAL.

    NAME is a source of the home (`sources list`); without it, the one that the settings name. Of one that is
    read by cursors, where each table stands is shown; of Kafka topics, how far behind each partition is.

    RUNNING: a process captures; its host and process id are shown. PAUSED: by `source pause`. FAILED:
    the last start ended by an error or was killed, and none since has gone well; it may be trying
    again. STOPPED: it ended well, or never ran. The last error stays when capture runs again.

    The lag is the WAL after the landed one, and the watermark against the clock. A watermark only moves
    with the WAL of the server, so that of an idle source may be old though nothing is missing: then
    no WAL is left to land.

    The forecast warns before the server gives the slot up or its disk is full, and says what to do.

    \b
    Examples:
      omnisupport-ingest source status
      omnisupport-ingest source status --json | jq -r .state

    Exit code: 0 all is well, 1 capture has failed or there are warnings, 2 usage or settings.
    """
    from omnisupport_ingest.cli.source_view import print_status, status_document
    from omnisupport_ingest.sources.postgres.capture.status import source_status

    settings = open_settings()
    if name is not None and not has_log(settings, name):
        return query_status(settings, name, as_json=as_json)
    settings = log_of(settings, name)
    tables = contracted_tables(settings)
    home = existing_home(settings)
    found = source_status(open_source_dsn(settings, home), settings, home, tables)
    if as_json:
        click.echo(json.dumps(status_document(found), indent=2))
    else:
        print_status(found)
    return NOT_WELL if found.warnings else 0


@source.command()
@click.argument("name", required=False)
@click.option("--reason", default="", help="Why, for the next person who looks.")
def pause(name: str | None, reason: str) -> None:
    """Stop capturing the source until `source resume`, over restarts too.

    NAME is a source of the home (`sources list`); without it, the one that the settings name.

    A capture that runs stops where its next batch ends, within seconds; under `up` it waits for the
    resume. The slot stays, so nothing is lost, and the server keeps the WAL until then: watch it with
    `source status`.

    \b
    Example:
      omnisupport-ingest source pause --reason "maintenance of the database"
    """
    from omnisupport_ingest.landing.store import LandingStore
    from omnisupport_ingest.sources.postgres.capture.requests import PauseRequest
    from omnisupport_ingest.sources.postgres.session.errors import CaptureRunning
    from omnisupport_ingest.sources.postgres.session.lease import Lease

    settings = named_source(open_settings(), name)
    home = existing_home(settings)
    was_running = Lease.is_held(home.run, settings.source)
    set_pause = PauseRequest(LandingStore(home.landing, settings.source).folder).write(reason)
    give_up = time.monotonic() + _STOP_SECONDS
    while Lease.is_held(home.run, settings.source):
        if time.monotonic() > give_up:
            raise CaptureRunning(
                f"The pause is set, but the capture of {settings.source} has not stopped after "
                f"{_STOP_SECONDS:.0f} seconds.",
                fix="It stops when the step it is in is over; watch it: omnisupport-ingest source status",
            )
        time.sleep(0.1)
    stopped = "The capture has stopped." if was_running else "No capture was running."
    click.echo(f"{settings.source} is paused {set_pause}. {stopped}")
    resume = f"omnisupport-ingest source resume {name or ''}".rstrip()
    click.echo(f"It goes on, and the server of a log keeps its WAL until then, with: {resume}")


@source.command()
@click.argument("name", required=False)
def resume(name: str | None) -> None:
    """End the pause. A capture that waits, under `up` or by itself, goes on within seconds.

    NAME is a source of the home (`sources list`); without it, the one that the settings name.

    \b
    Example:
      omnisupport-ingest source resume
    """
    from omnisupport_ingest.landing.store import LandingStore
    from omnisupport_ingest.sources.postgres.capture.requests import PauseRequest

    settings = named_source(open_settings(), name)
    home = existing_home(settings)
    if PauseRequest(LandingStore(home.landing, settings.source).folder).clear():
        click.echo(f"{settings.source} is no longer paused; a capture that waits goes on where it stopped.")
    else:
        click.echo(f"{settings.source} was not paused.")


@source.command()
@click.argument("name", required=False)
@click.option("--reason", default="", help="Why; stands in the log of capture.")
def restart(name: str | None, reason: str) -> None:
    """Have the capture that follows the source start again, after its next batch.

    NAME is a log of the home (`sources list`); without it, that of the settings.

    It goes on by itself and in the same process, under `up` or alone in a terminal: connected anew, with
    all checks of a start, and with the contracts read again, so a new one's table gets its snapshot.
    Settings stay those of the process; for others, or for a new version, stop `up` (or `capture`) and
    start it again. What it is in the middle of is read again: a snapshot's table, a long transaction.
    The command waits for the start and tells how it went.

    Refused where there is nothing to restart: the source is paused, no capture runs, or it is one that
    ends by itself (`sync`, `capture --once`).

    \b
    Example:
      omnisupport-ingest source restart --reason "contract of invoices added"

    Exit code: 0 it runs again, 1 it is paused, has failed again or there is nothing to restart, 2 usage,
    settings or a contract.
    """
    from omnisupport_ingest.landing.store import LandingStore
    from omnisupport_ingest.sources.postgres.capture.state import request_restart, wait_for_restart

    settings = log_of(open_settings(), name)
    home = existing_home(settings)
    # The start reads them: a capture that runs is not ended for contracts that it cannot read.
    contracted_tables(settings)
    folder = LandingStore(home.landing, settings.source).folder
    before = request_restart(home.run, folder, settings.source, reason)
    click.echo(f"Asked process {before.pid} to start again …", err=True)
    after = wait_for_restart(folder, settings.source, before, seconds=_RESTART_SECONDS)
    click.echo(f"{settings.source} is captured again by process {after.pid}, it goes on where it stopped.")


@source.command()
@click.argument("name", required=False)
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
def drop(name: str | None, yes: bool) -> None:
    """Drop the slot and the publication that capture has made on the source. Landing and lake stay.

    NAME is a log of the home (`sources list`); without it, that of the settings.

    The server then keeps no WAL for this home. What commits from then on is not captured: a later
    capture needs --new-epoch, which takes a new snapshot of every table. Refused while capture runs.

    \b
    Example:
      omnisupport-ingest source drop
    """
    from omnisupport_ingest.errors import IngestError
    from omnisupport_ingest.sources.postgres.capture.drop import leave, plan_leaving

    settings = log_of(open_settings(), name)
    home = existing_home(settings)
    dsn = open_source_dsn(settings, home)
    if isinstance(dsn, IngestError):
        raise dsn
    plan = plan_leaving(dsn, settings, home)
    _print_plan(plan)
    if plan.slot is None and plan.publication is None:
        click.echo("Nothing of ours is there to drop.")
        return
    if not yes:
        click.confirm("Drop this?", abort=True)
    done = leave(dsn, settings, home)
    named = [f"slot {done.slot}"] if done.slot else []
    named += [f"publication {done.publication}"] if done.publication else []
    click.echo(f"Dropped: {', '.join(named) or 'nothing, it was gone already'}.")


def _print_plan(plan: Leaving) -> None:
    if plan.slot is not None:
        click.echo(
            f"Slot {plan.slot}: goes, and with it {size_text(plan.retained_bytes)} of WAL kept for it. "
            "Changes that have not landed are never captured; a later capture needs --new-epoch, which takes "
            "a new snapshot."
        )
    if plan.publication is not None:
        click.echo(f"Publication {plan.publication}: goes; capture has made it, and no other slot uses it.")
    for each in plan.stays:
        click.echo(f"Stays: {each}")


@source.command()
@click.option("--take-over", is_flag=True, help="The original is gone for good: its slot is this home's.")
@click.option(
    "--new-slot", is_flag=True, help="The original still captures: this home gets a slot of its own."
)
def adopt(take_over: bool, new_slot: bool) -> None:
    """Say whose the replication slot is, after this home was copied, restored or moved.

    A home knows by its identity file that it is a copy: capture, repair and drop are refused until this is
    said, as only a person knows whether the original still lives. Two homes that read one slot would each
    miss what the other has read. Nothing is asked of the source, and nothing changes there.

    It is said of the slots of all logs of the home. With --new-slot, set OMNISUPPORT_SLOT (and log.slot,
    where a definition gives one) to another name, and begin an epoch of each: capture --new-epoch REASON.

    \b
    Examples:
      omnisupport-ingest source adopt --take-over
      omnisupport-ingest source adopt --new-slot

    Exit code: 0 done, 2 usage or settings, 3 no home, 6 a capture of this home runs.
    """
    from omnisupport_ingest.landing.store import LandingStore
    from omnisupport_ingest.sources.postgres.session.lease import Lease
    from omnisupport_ingest.sources.postgres.slot.home_identity import HomeIdentity
    from omnisupport_ingest.sources.postgres.slot.home_slot import SlotIntent

    if take_over == new_slot:
        raise click.UsageError("Say one of --take-over and --new-slot.")
    settings = open_settings()
    home = existing_home(settings)
    logs, given_up = _captured(home, settings), dict[str, int]()
    with ExitStack() as held:
        # A copy has copied the slots of all of its logs.
        for source in logs:
            held.enter_context(Lease.take(home.run, source))
            store = LandingStore(home.landing, source)
            epoch = store.current_epoch()
            if new_slot and epoch is not None:
                given_up[source] = epoch.number
            if new_slot:
                SlotIntent(store.folder).clear()
        HomeIdentity(home).adopt(given_up)
    if take_over:
        click.echo("This home goes on with its replication slot. The original must not capture any more.")
    else:
        click.echo(
            "This home has left its replication slot to the original. Set OMNISUPPORT_SLOT to another name, "
            'then: omnisupport-ingest capture --new-epoch "a copy of another home"'
        )
        if len(logs) > 1:
            click.echo(f"The same for each of its logs, by name: {', '.join(logs)}.")


def _captured(home: Home, settings: Settings) -> list[str]:
    """The sources of which this home may have made a slot: its own, and those with an epoch of a server."""
    from omnisupport_ingest.landing.store import LandingStore
    from omnisupport_ingest.sources.postgres.slot.home_slot import SlotIntent

    landed = sorted(each.name for each in home.landing.iterdir() if each.is_dir())
    epochs = {name: LandingStore(home.landing, name).current_epoch() for name in landed}
    begun = {name for name, epoch in epochs.items() if epoch is not None and epoch.facts is not None}
    making = {name for name in landed if SlotIntent(home.landing / name).there}
    return sorted({settings.source} | begun | making)
