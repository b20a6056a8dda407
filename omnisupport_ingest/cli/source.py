"""``source``: prepare, watch, pause, restart, repair and leave the database that capture reads."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import click

from omnisupport_ingest.cli.opening import (
    contracted_tables,
    existing_home,
    log_of,
    open_settings,
    require_source_dsn,
    source_named,
)
from omnisupport_ingest.cli.render import Commands, say_err, size
from omnisupport_ingest.cli.source_connect import connect
from omnisupport_ingest.cli.source_repair import repair, snapshot
from omnisupport_ingest.cli.source_status import status
from omnisupport_ingest.sources.postgres.capture.requests import PauseRequest
from omnisupport_ingest.sources.postgres.capture.state import request_restart, wait_for_restart
from omnisupport_ingest.sources.postgres.session.errors import CaptureRunning
from omnisupport_ingest.sources.postgres.session.lease import is_captured, take_lease
from omnisupport_ingest.sources.postgres.slot.home_identity import HomeIdentity

if TYPE_CHECKING:
    from omnisupport_ingest.home import Home
    from omnisupport_ingest.settings import Settings
    from omnisupport_ingest.sources.postgres.capture.drop import DropPlan

_STOP_SECONDS = 30.0
"""Seconds that ``pause`` waits for the capture to stop; it may be in the middle of a transaction."""

_RESTART_SECONDS = 60.0
"""Seconds that ``restart`` waits for the capture to stop and to pass the checks of a start."""


@click.group(cls=Commands)
def source() -> None:
    """Prepare, watch, connect to, pause, restart, repair and leave the source database."""


for command in (status, snapshot, repair, connect):
    source.add_command(command)


@source.command()
@click.argument("name", required=False)
@click.option("--role", default=None, help="Name of the role.  [default: omnisupport_capture]")
@click.option("--database", default=None, help="Name of the database.  [default: that of the source]")
def grants(name: str | None, role: str | None, database: str | None) -> None:
    """Print the SQL that creates a role for capture, with the least rights that suffice.

    NAME is a captured source (`sources list`); by default the one that the settings name.

    The command connects to nothing, and with --database it needs no connection string. It needs the contracts
    of the source: the role may read their tables. An administrator runs its output; the owner of the tables
    may run the second part instead. Then OMNISUPPORT_SOURCE_DSN names the role, or for NAME what its
    definition names.

    \b
    Example:
      omnisupport-ingest source grants --database shop | psql -d shop

    Exit code: 0 printed, 2 usage, settings or a contract.
    """
    from omnisupport_ingest.sources.postgres.catalog.publication import DEFAULT_ROLE, grants_sql
    from omnisupport_ingest.sources.postgres.embedded.server import database_of
    from omnisupport_ingest.sources.postgres.session.connection import dsn_parts

    settings = log_of(open_settings(), name, connected=database is None)
    if database is None:
        dsn = settings.source_dsn
        embedded = database_of(settings.source)
        database = embedded if dsn is None else dsn_parts(dsn.get_secret_value()).get("dbname")
    if database is None:
        raise click.UsageError("The connection string names no database; give its name as --database.")
    click.echo(grants_sql(role or DEFAULT_ROLE, database, settings.publication, contracted_tables(settings)))


@source.command()
@click.argument("name", required=False)
@click.option("--reason", default="", help="Why; `source status` shows it.")
def pause(name: str | None, reason: str) -> None:
    """Stop capturing the source until `source resume`, also across restarts.

    NAME is a source of the home (`sources list`); by default it is the one that the settings name.

    A running capture stops at the end of its next batch, within seconds; under `up` it waits for the resume.
    The slot stays, so nothing is lost. The server keeps the WAL until then: watch it with `source status`.
    Files of a paused source do not land: `land` and `manifest load` refuse them, and in the inbox they wait.

    \b
    Example:
      omnisupport-ingest source pause --reason "maintenance of the database"

    Exit code: 0 paused, 2 usage or settings, 3 no home, 6 the pause is set, and the capture has not stopped
    within 30 seconds.
    """
    from omnisupport_ingest.landing.store import LandingStore

    settings = source_named(open_settings(), name)
    home = existing_home(settings)
    was_running = is_captured(home.run, settings.source)
    set_pause = PauseRequest(LandingStore(home.landing, settings.source).folder).write(reason)
    give_up = time.monotonic() + _STOP_SECONDS
    while is_captured(home.run, settings.source):
        if time.monotonic() > give_up:
            raise CaptureRunning(
                f"The pause is set, but the capture of {settings.source} has not stopped after "
                f"{_STOP_SECONDS:.0f} seconds.",
                fix="It stops when the step it is in is over; watch it: omnisupport-ingest source status "
                f"{settings.source}",
            )
        time.sleep(0.1)
    stopped = "The capture has stopped." if was_running else "No capture was running."
    click.echo(f"{settings.source} is paused {set_pause}. {stopped}")
    resume = f"omnisupport-ingest source resume {name or ''}".rstrip()
    click.echo(f"It goes on, and the server of a captured source keeps its WAL until then, with: {resume}")


@source.command()
@click.argument("name", required=False)
def resume(name: str | None) -> None:
    """End the pause. A waiting capture, under `up` or in a terminal, goes on within seconds.

    NAME is a source of the home (`sources list`); by default it is the one that the settings name.

    \b
    Example:
      omnisupport-ingest source resume

    Exit code: 0 done, also if the source was not paused; 2 usage or settings; 3 no home.
    """
    from omnisupport_ingest.landing.store import LandingStore

    settings = source_named(open_settings(), name)
    home = existing_home(settings)
    if PauseRequest(LandingStore(home.landing, settings.source).folder).clear():
        click.echo(f"{settings.source} is no longer paused; a capture that waits goes on where it stopped.")
    else:
        click.echo(f"{settings.source} was not paused.")


@source.command()
@click.argument("name", required=False)
@click.option("--reason", default="", help="Why; the log of capture has it.")
def restart(name: str | None, reason: str) -> None:
    """Start the running capture of the source again, after its next batch.

    NAME is a captured source (`sources list`); by default the one that the settings name.

    The process stays, under `up` or in a terminal. It connects again, makes all checks of a start, and
    reads the contracts again, so that the table of a new contract gets its snapshot. A snapshot or a
    transaction that it was reading is read again. The command waits for the start and prints how it went.

    The settings stay those of the process. For other settings, or a new version of the program, stop `up` (or
    `capture`) and start it again.

    Refused if there is nothing to restart: the source is paused, no capture runs, or the capture ends by
    itself (`sync`, `capture --once`).

    \b
    Example:
      omnisupport-ingest source restart --reason "contract of invoices added"

    Exit code: 0 it runs again, 1 it is paused, has failed again or there is nothing to restart, 2 usage,
    settings or a contract.
    """
    from omnisupport_ingest.landing.store import LandingStore

    settings = log_of(open_settings(), name)
    home = existing_home(settings)
    # Read here first: a running capture must not be ended if it could not read its contracts again.
    contracted_tables(settings)
    folder = LandingStore(home.landing, settings.source).folder
    before = request_restart(home.run, folder, settings.source, reason)
    say_err(f"Requested process {before.pid} to start again …")
    after = wait_for_restart(folder, settings.source, before, seconds=_RESTART_SECONDS)
    click.echo(f"{settings.source} is captured again by process {after.pid}; it goes on where it stopped.")


@source.command()
@click.argument("name", required=False)
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
def drop(name: str | None, yes: bool) -> None:
    """Drop the slot and the publication that capture created on the source. Landing and lake stay.

    NAME is a captured source (`sources list`); by default the one that the settings name.

    Afterwards the server keeps no WAL for this home, and what commits from then on is not captured. A later
    capture needs --new-epoch, which reads every table again. Refused while capture runs.

    \b
    Example:
      omnisupport-ingest source drop

    Exit code: 0 dropped, or nothing of ours was there; 2 usage or settings; 3 no home; 4 the source does not
    answer; 5 it refuses; 6 capture runs, somebody reads the slot, or the home is a copy.
    """
    from omnisupport_ingest.sources.postgres.capture.drop import drop_capture, plan_drop
    from omnisupport_ingest.sources.postgres.catalog.publication import DEFAULT_ROLE
    from omnisupport_ingest.sources.postgres.session.connection import dsn_parts

    settings = log_of(open_settings(), name)
    home = existing_home(settings)
    dsn = require_source_dsn(settings, home)
    plan = plan_drop(dsn, settings, home)
    _print_plan(plan)
    if plan.slot is None and plan.publication is None:
        click.echo("Nothing of ours is there to drop.")
        return
    if not yes:
        click.confirm("Drop this?", abort=True)
    done = drop_capture(dsn, settings, home)
    named = [f"slot {done.slot}"] if done.slot else []
    named += [f"publication {done.publication}"] if done.publication else []
    click.echo(f"Dropped: {', '.join(named) or 'nothing, it was gone already'}.")
    # Of a role with another name it is not known what else it owns.
    if dsn_parts(dsn).get("user") == DEFAULT_ROLE:
        click.echo(
            f"Stays: the role {DEFAULT_ROLE}, which may still replicate. If nobody else uses it, an "
            f"administrator runs, in each of its databases, DROP OWNED BY {DEFAULT_ROLE}; then DROP ROLE "
            f"{DEFAULT_ROLE};"
        )


def _print_plan(plan: DropPlan) -> None:
    if plan.slot is not None:
        click.echo(
            f"Slot {plan.slot}: goes, and with it {size(plan.retained_bytes)} of WAL kept for it. Changes "
            "that have not landed are never captured; a later capture needs --new-epoch, which reads every "
            "table again."
        )
    if plan.publication is not None:
        click.echo(f"Publication {plan.publication}: goes; capture created it, and no other slot uses it.")
    for each in plan.stays:
        click.echo(f"Stays: {each}")


@source.command()
@click.option("--take-over", is_flag=True, help="The original is gone for good: this home takes its slot.")
@click.option("--new-slot", is_flag=True, help="The original still captures: this home gets its own slot.")
def adopt(take_over: bool, new_slot: bool) -> None:
    """Decide who owns the replication slot, after this home was copied, restored or moved.

    The identity file of a home shows that it is a copy. Then capture, repair and drop are refused until this
    command, as only a person knows whether the original still exists: of two homes that read one slot, each
    would miss what the other has read. The source is not contacted.

    The decision holds for the slots of all captured sources. After --new-slot, set OMNISUPPORT_SLOT (and
    log.slot, where a definition has one) to another name, and begin an epoch for each: capture
    --new-epoch REASON.

    \b
    Examples:
      omnisupport-ingest source adopt --take-over
      omnisupport-ingest source adopt --new-slot

    Exit code: 0 done, 2 usage or settings, 3 no home, 6 a capture of this home runs.
    """
    from omnisupport_ingest.landing.store import LandingStore
    from omnisupport_ingest.sources.postgres.slot.home_slot import SlotIntent

    if take_over == new_slot:
        raise click.UsageError("Give one of --take-over and --new-slot.")
    settings = open_settings()
    home = existing_home(settings)
    logs, given_up = _captured(home, settings), dict[str, int]()
    with ExitStack() as leases:
        # A copied home refers to the slots of all its logs.
        for source in logs:
            leases.enter_context(take_lease(home.run, source))
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
    """Return the sources of which this home may have made a slot: its own, and those with an epoch of a
    server."""
    from omnisupport_ingest.landing.store import LandingStore
    from omnisupport_ingest.sources.postgres.slot.home_slot import SlotIntent

    landed = sorted(each.name for each in home.landing.iterdir() if each.is_dir())
    epochs = {name: LandingStore(home.landing, name).current_epoch() for name in landed}
    begun = {name for name, epoch in epochs.items() if epoch is not None and epoch.facts is not None}
    making = {name for name in landed if SlotIntent(home.landing / name).exists}
    return sorted({settings.source} | begun | making)
