"""``source repair`` and ``source snapshot``: request that tables are read again, after a gap or at will."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING

import click

from omnisupport_ingest.cli.errors import INTERRUPTED_EXIT_CODE
from omnisupport_ingest.cli.opening import (
    contracted_tables,
    deciding_person,
    existing_home,
    log_of,
    open_settings,
    require_source_dsn,
)
from omnisupport_ingest.cli.render import counted, say_err
from omnisupport_ingest.cli.stopping import stop_on_signal
from omnisupport_ingest.contracts.in_force import contracts_in_force
from omnisupport_ingest.contracts.model import TableContract, table_named
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.foreign import Unreadable, parse_json
from omnisupport_ingest.landing.accepted_losses import AcceptedLosses
from omnisupport_ingest.sources.postgres.session.lease import is_captured

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

    from omnisupport_ingest.home import Home
    from omnisupport_ingest.key_range import KeyRange
    from omnisupport_ingest.landing.store import LandingStore
    from omnisupport_ingest.settings import Settings
    from omnisupport_ingest.sources.postgres.capture.capture import Capture
    from omnisupport_ingest.sources.postgres.snapshot.compared_reading import Recovered

_RECOVERY, _RESNAPSHOT, _ACCEPT_LOSS = "recovery", "resnapshot", "accept-loss"


@click.command()
@click.argument("name", required=False)
@click.option(
    "--mode",
    type=click.Choice([_RECOVERY, _RESNAPSHOT, _ACCEPT_LOSS]),
    required=True,
    help="recovery: compare every table with the lake, and read again what differs. resnapshot: read every "
    "table again. accept-loss: read nothing again, and record what may be missing.",
)
@click.option("--reason", required=True, help="What happened; the record of the new epoch keeps it.")
@click.option("--by", default=None, help="Who decides.  [default: this user]")
def repair(name: str | None, mode: str, reason: str, by: str | None) -> None:
    """Begin a new epoch after a gap: the slot was lost, or the server was replaced or restored.

    NAME is a captured source (`sources list`); by default the one that the settings name.

    The command drops the slot if it still exists, and creates it again. Everything that has landed stays, and
    so does the history in the lake. It is refused while capture runs. A failed capture under `up` tries again
    by itself afterwards.

    The single changes in the gap are lost in every mode. After recovery or resnapshot the current state is
    right again, deleted rows included.

    \b
    recovery     This command compares every table with the lake, chunk by chunk: by checksums, and row by
                 row where they differ. Everything that landed must be in the lake. Equal chunks land
                 nothing, so their rows keep their history; the others land whole. If the command is
                 interrupted, the next capture reads the rest whole.
    resnapshot   The next capture reads every table, beside the stream. It does not need the lake.
    accept-loss  The next capture goes on with the stream alone. Landing records what is missing. The
                 tables stay incomplete until `source snapshot` reads them: the check `complete` stays red,
                 and `verify` and `as-of` refuse them.

    \b
    Examples:
      omnisupport-ingest source repair --mode recovery --reason "slot dropped by mistake"
      omnisupport-ingest source repair --mode accept-loss --reason "test system, restored on Monday"

    A table that does not fit its contract, or whose schema change waits for a decision, is left out of the
    new epoch. It is named, with its reason, when the rest is done.

    Exit code: 0 done, 1 the lake is behind what has landed, 2 usage or settings, 4 the source does not
    answer, 5 the source, or a table that is left out, is not set up for capture, 6 capture runs or the slot
    is in use, 7 tables are left out, 130 interrupted.
    """
    from omnisupport_ingest.landing.store import LandingStore
    from omnisupport_ingest.sources.postgres.capture.capture import Capture

    settings = log_of(open_settings(), name)
    home = existing_home(settings)
    contracts = contracts_in_force(settings)
    capture = Capture(settings, home, contracts)
    if mode == _RECOVERY:
        _recover(settings, capture, reason)
        return
    person = deciding_person(by)
    accepted_by = person if mode == _ACCEPT_LOSS else None
    epoch = capture.begin_new_epoch(reason, loss_accepted_by=accepted_by)
    click.echo(_begun(epoch.number, settings, reason))
    loss = AcceptedLosses(LandingStore(home.landing, settings.source).folder).of(epoch.number)
    every = "every table" if capture.left_out is None else "every other table"
    if loss is None:
        click.echo(f"The next capture reads {every} again: omnisupport-ingest up")
    else:
        if loss.of_another_history:
            click.echo(
                f"The source has another history than what has landed up to {loss.lost_from}: it may lack "
                "some of that, and what it committed since the two parted is not captured; accepted by "
                f"{loss.by}."
            )
        else:
            stretch = f"from {loss.lost_from} " if loss.lost_from is not None else ""
            click.echo(f"What committed {stretch}to {loss.lost_to} is not captured; accepted by {loss.by}.")
        click.echo("The tables stay incomplete until they are read: omnisupport-ingest source snapshot TABLE")
    capture.raise_left_out()


def _recover(settings: Settings, capture: Capture, reason: str) -> None:
    from omnisupport_ingest.layers.workspace import Workspace
    from omnisupport_ingest.read.dimension_rows import PinnedDimensions
    from omnisupport_ingest.sources.postgres.slot.slot import SlotNotMade

    with stop_on_signal() as stop:
        try:
            epoch, done = capture.recover(
                reason, PinnedDimensions(Workspace.open(settings)), stop, _show_recovered
            )
        except SlotNotMade:
            raise KeyboardInterrupt from None
    click.echo(_begun(epoch.number, settings, reason))
    if not done:
        click.echo("Interrupted. The next capture reads the rest whole: omnisupport-ingest up")
        click.get_current_context().exit(INTERRUPTED_EXIT_CODE)
    tables = "The tables" if capture.left_out is None else "The other tables"
    click.echo(f"{tables} are complete once capture has gone on from here: omnisupport-ingest up")
    capture.raise_left_out()


def _begun(epoch: int, settings: Settings, reason: str) -> str:
    return f"Epoch {epoch} of {settings.source} has begun: {reason}"


def _show_recovered(done: Recovered) -> None:
    same = done.chunks - done.read_again
    line = f"{done.table}: {same} of {counted(done.chunks, 'chunk')} are as in the lake"
    if done.by_rows > done.read_again:
        line += f" ({done.by_rows - done.read_again} by a comparison row by row)"
    if done.read_again:
        line += f", the others were read again ({counted(done.rows, 'row')})"
    if done.ended:
        line += f"; {counted(done.ended, 'row')} of the lake are gone from the source"
    click.echo(f"{line}.")


@click.command()
@click.argument("tables", nargs=-1, required=True, metavar="TABLE...")
@click.option("--from", "start", metavar="KEY", help="Only rows whose key is KEY or above.")
@click.option("--to", "end", metavar="KEY", help="Only rows whose key is KEY or below.")
@click.option("--reason", default="", help="Why; the plan of the snapshot keeps it.")
@click.option("--source", metavar="NAME", help="A captured source.  [default: that of the settings]")
def snapshot(
    tables: tuple[str, ...], start: str | None, end: str | None, reason: str, source: str | None
) -> None:
    """Have all rows of one or more tables read again, while capture goes on.

    TABLE is the name of a contract. A running capture begins within a second; otherwise the next one does
    it. Rows that no longer exist count as deleted from then on. The table is incomplete, and `verify` refuses
    it, until the stream has passed the snapshot: watch `source status`.

    This is also how a running capture gets a table whose contract is new; the other tables go on meanwhile.
    The table is checked first, as by `preflight`. To see its assets, load Dagster's definitions again:
    Deployment, Reload.

    With --from, --to or both, only that range of one table's keys is read, and only missing rows of the range
    count as deleted. KEY is the value of the key's first column, or a JSON array with the values of its first
    columns: '["eu", 5]'. Ranges are for keys of integers, uuid, date, and text in the collation C, which the
    lake orders as the server does.

    \b
    Examples:
      omnisupport-ingest source snapshot tickets --reason "was out of the publication for an hour"
      omnisupport-ingest source snapshot tickets --from 1000 --to 1999

    Exit code: 0 requested, 2 usage or settings, 4 the source does not answer, 5 a new table cannot be
    captured as it is, a table does not fit its contract, or capture has to start again to take that in.
    """
    from omnisupport_ingest.landing.store import LandingStore
    from omnisupport_ingest.sources.postgres.capture.added_tables import adds_tables, not_captured
    from omnisupport_ingest.sources.postgres.capture.parked import ParkedTables
    from omnisupport_ingest.sources.postgres.snapshot.requests import SnapshotRequests

    settings = log_of(open_settings(), source)
    home = existing_home(settings)
    known = contracted_tables(settings)
    chosen = list(dict.fromkeys(table_named(name, known) for name in tables))
    store = LandingStore(home.landing, settings.source)
    running = is_captured(home.run, settings.source)
    new = not_captured(store, chosen) if running and adds_tables(store) else ()
    scope = None
    if start is not None or end is not None:
        if len(chosen) > 1:
            raise click.UsageError("--from and --to are keys of one table; name one.")
        if new:
            raise click.UsageError(f"{chosen[0].name} has never been read. Request all of it first.")
        epoch = store.current_epoch()
        if epoch is not None and chosen[0].name in ParkedTables(store.folder, epoch.number).all():
            raise click.UsageError(
                f"{chosen[0].name} is left out, so all of it has to be read. Leave out --from and --to."
            )
        scope = _key_range(settings, home, chosen[0], start, end)
    _require_ready(settings, home, store, new)
    if running:
        _require_fit(settings, home, chosen, whole=scope is None)
        if scope is None:
            _require_in_force(settings, home, store, [each for each in chosen if each not in new])
    requests = SnapshotRequests(store.folder)
    for name in (each.name for each in chosen):
        is_new = requests.write(name, reason, scope)
        subject = name if scope is None else f"{name}, keys {scope}"
        click.echo(f"{subject}: {'requested.' if is_new else 'had been requested already.'}")
    if new:
        click.echo(
            f"The running capture adds {', '.join(each.name for each in new)}; the other tables go on. To "
            "see the new assets, load Dagster's definitions again: Deployment, Reload."
        )
    if running:
        click.echo(f"Progress: omnisupport-ingest source status {settings.source}")
    else:
        click.echo("No capture is running; the next one reads them: omnisupport-ingest up")


def _require_ready(settings: Settings, home: Home, store: LandingStore, new: Sequence[TableContract]) -> None:
    """Raise the errors with which capture would refuse ``new`` tables, before the request; print its
    warnings."""
    from omnisupport_ingest.sources.postgres.capture.added_tables import added_table_findings
    from omnisupport_ingest.sources.postgres.preflight import Severity, require_ready

    if not new:
        return
    with _connected(settings, home) as connection:
        findings = added_table_findings(connection, store, settings, new)
    require_ready(findings)
    for each in findings:
        if each.severity is Severity.WARNS:
            say_err(f"Warning: {each.problem}\nFix: {each.fix}")


def _require_fit(settings: Settings, home: Home, tables: Sequence[TableContract], *, whole: bool) -> None:
    """Raise an error that names those of ``tables`` that the source does not have, if the source answers.

    ``whole``: also those that do not fit their contracts. A running capture would read them, and the next
    start would leave them out.
    """
    from omnisupport_ingest.sources.postgres.catalog.live_table import read_live_tables
    from omnisupport_ingest.sources.postgres.preflight import Finding, require_ready
    from omnisupport_ingest.sources.postgres.preflight.contract_match import contract_findings

    findings: list[Finding] = []
    # A request to a running capture needs no connection of this command.
    with suppress(IngestError), _connected(settings, home) as connection:
        live = read_live_tables(connection, [each.table_name for each in tables])
        for each in tables:
            if whole or each.table_name not in live:
                findings += contract_findings(each, live.get(each.table_name))
    require_ready(findings)


def _require_in_force(
    settings: Settings, home: Home, store: LandingStore, tables: Sequence[TableContract]
) -> None:
    """Raise an error that names those of ``tables`` that the running capture reads by a former contract.

    By that one the read would not answer for what has changed. A parked table is added by its present one.
    """
    from omnisupport_ingest.sources.postgres.capture.outdated import outdated_tables
    from omnisupport_ingest.sources.postgres.capture.parked import ParkedTables
    from omnisupport_ingest.sources.postgres.preflight import Finding, require_ready

    epoch = store.current_epoch()
    parked = ParkedTables(store.folder, epoch.number).all() if epoch is not None else {}
    require_ready(
        Finding(
            "contract",
            f"The contract {each.name} has changed, and capture goes by the contract as it was at its start.",
            f"omnisupport-ingest source restart {settings.source}; then this command again",
            table=each.name,
        )
        for each in outdated_tables(home.path, settings.source, tables)
        if each.name not in parked
    )


@contextmanager
def _connected(settings: Settings, home: Home) -> Iterator[Connection]:
    from omnisupport_ingest.sources.postgres.session.connection import connect

    dsn = require_source_dsn(settings, home)
    with closing(connect(dsn)) as connection:
        yield connection


def _key_range(
    settings: Settings, home: Home, table: TableContract, start: str | None, end: str | None
) -> KeyRange:
    from omnisupport_ingest.sources.postgres.snapshot.key_ranges import key_range

    with _connected(settings, home) as connection:
        bounds = _bound("--from", start), _bound("--to", end)
        return key_range(connection, settings.publication, table, *bounds)


def _bound(option: str, text: str | None) -> list[str] | None:
    """Return the values of a bound: one text, or those of a JSON array."""
    if text is None or not text.startswith("["):
        return None if text is None else [text]
    try:
        values = parse_json(text)
    except Unreadable as error:
        raise click.UsageError(f"{option} {text} is no JSON array: {error}.") from error
    if not all(isinstance(value, str | int) and not isinstance(value, bool) for value in values):
        raise click.UsageError(f"{option} {text}: the values of a key are texts or whole numbers.")
    return [str(value) for value in values]
