"""``contracts withdraw`` and ``sources retire``: remove a table or a source from the home; the plan is
printed first."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple

import click

from omnisupport_ingest.cli.opening import existing_home, open_settings, source_dsn_or_error
from omnisupport_ingest.cli.render import counted, size, some
from omnisupport_ingest.contracts.named_secrets import ConnectionMissing
from omnisupport_ingest.contracts.sources import SourceKind, log_settings, sources_in_force
from omnisupport_ingest.contracts.withdrawn import is_numbered
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.read.verified import forget_verified
from omnisupport_ingest.runtime.home_lock import HomeLock
from omnisupport_ingest.sources.postgres.session.errors import BadDsn, SourceRefused, SourceUnavailable
from omnisupport_ingest.sources.postgres.session.lease import take_lease
from omnisupport_ingest.wording import agreeing

if TYPE_CHECKING:
    from omnisupport_ingest.contracts.model import TableContract
    from omnisupport_ingest.home import Home
    from omnisupport_ingest.settings import Settings
    from omnisupport_ingest.withdrawal import Withdrawal

_drop_data = click.option(
    "--drop-data", is_flag=True, help="Delete its files too. Without this they stay as they are."
)
_yes = click.option("--yes", "-y", is_flag=True, help="Do not ask.")


@click.command()
@click.argument("name")
@click.option("--source", metavar="NAME", help="The source of the table, where several have one of its name.")
@_drop_data
@_yes
def withdraw(name: str, source: str | None, drop_data: bool, yes: bool) -> None:
    """Withdraw the table NAME: its contract, its assets, its entry in the publication. Prints the plan first.

    Also for a table that has left the publication, or is gone at the source. The contract is moved to the
    folder `withdrawn` beside the contracts, and the table leaves the definition of its source; put both back
    and have the table read again (`source snapshot`) to undo this. Dimension, history and net changes stay on
    disk unless --drop-data; nobody updates them any more. Its events stay in landing, raw and deduped, which
    hold every table of the source.

    An interrupted call is finished by the same call: NAME means the same table, withdrawn or not. Refused
    where it may be one of two, for the last table of a captured log (`sources retire`), and while the
    platform or a capture of the source runs.

    \b
    Example:
      omnisupport-ingest contracts withdraw invoices

    Exit code: 0 done, 1 refused, 2 usage or settings, 3 no home, 6 the platform or a capture runs.
    """
    from omnisupport_ingest import withdrawal

    settings = open_settings()
    home = existing_home(settings)
    contract = withdrawal.contract_to_withdraw(settings, name, source)
    with _alone(home, [contract.source], "contracts withdraw"):
        plan = withdrawal.plan_table(settings, home, contract)
        if not plan.contracts:
            click.echo(f"{contract.source}.{contract.name} is withdrawn already; this is of what it left.")
        _say(plan, drop_data=drop_data)
        log = _log_of(settings, home, contract.source)
        stays = None
        if log is not None:
            stays = _stays_published(log, contract)
            leaves = f"{contract.full_name} leaves it, where this role may alter it."
            click.echo(stays or f"Publication {log.settings.publication}: {leaves}")
        if not yes:
            click.confirm("Withdraw it?", abort=True)
        for moved in withdrawal.take_out_contracts(settings, home, plan):
            click.echo(f"The contract is in {moved}.")
        if log is not None and stays is None:
            _leave_publication(log, contract)
        if drop_data:
            forget_verified(home, contract)
            click.echo(f"{counted(withdrawal.drop_data(plan.data), 'folder')} deleted.")


@click.command()
@click.argument("name")
@_drop_data
@_yes
def retire(name: str, drop_data: bool, yes: bool) -> None:
    """Retire the source NAME: its contracts, its definition, its slot and publication. Prints the plan first.

    Contracts and definition are moved to the folder `withdrawn` beside the contracts. Of a captured
    source, slot and publication are dropped as `source drop` does; what cannot be dropped is named with its
    SQL, also where the server does not answer or its connection is not set: the rest is done all the same.
    Landing and lake of the source stay unless --drop-data.

    An interrupted call is finished by the same call. Refused while the platform or a capture of it runs.

    \b
    Example:
      omnisupport-ingest sources retire shop

    Exit code: 0 done, 1 refused, 2 usage or settings, 3 no home, 4 the source went away meanwhile, 6 the
    platform or a capture runs.
    """
    from omnisupport_ingest import withdrawal
    from omnisupport_ingest.sources.postgres.capture.drop import drop_capture

    settings = open_settings()
    home = existing_home(settings)
    with _alone(home, [], "sources retire"):
        plan = withdrawal.plan_source(settings, home, name)
        _say(plan, drop_data=drop_data)
        log = _log_of(settings, home, name)
        dsn = _say_what_leaves(log, home) if log is not None else None
        if not yes:
            click.confirm("Retire it?", abort=True)
        # The slot first, while the definition still names its server and the contracts still exist.
        if log is not None and dsn is not None:
            drop_capture(dsn, log.settings, home)
        for moved in withdrawal.take_out_contracts(settings, home, plan):
            click.echo(f"A contract is in {moved}.")
        withdrawal.take_out_definition(plan)
        if drop_data:
            click.echo(f"{counted(withdrawal.drop_data(plan.data), 'folder')} deleted.")
        click.echo(f"{name} is retired.")


def _say(plan: Withdrawal, *, drop_data: bool) -> None:
    """Print what happens to the files of contracts, to assets, windows and data."""
    names = [each.name for each in plan.contracts]
    if names:
        shown = some([f"{plan.source}/dim_{name}" for name in names])
        gone = "gone from Dagster at the next start; their records stay"
        click.echo(f"Assets {shown}, with history and target: {gone}.")
    if plan.windows:
        click.echo(
            f"{counted(plan.windows, 'window')} of {plan.source}: judged again, as the source has other "
            "contracts then."
        )
    if plan.unnamed is not None:
        click.echo(f"{plan.unnamed.file}, {plan.unnamed.place}: {plan.unnamed.entry} is taken out.")
    for file, to in plan.to.items():
        beside = "; what was withdrawn earlier under its name stays beside it" if is_numbered(to) else ""
        click.echo(f"{file}: moves to {to}{beside}.")
    for each in plan.data:
        in_use = f", {size(each.bytes)} in use" if each.bytes else ""
        click.echo(f"{each.folder}{in_use}: {'DELETED' if drop_data else 'stays'}.")
    for what, copies in plan.stays.items():
        click.echo(f"{what}: {some(copies)} {agreeing(len(copies), 'stays', 'stay')}.")


def _alone(home: Home, sources: list[str], command: str) -> ExitStack:
    """Return the locks that give this command the home alone: no platform and no capture of ``sources``
    runs."""
    with ExitStack() as taken:
        taken.enter_context(HomeLock(home, command))
        for source in sources:
            taken.enter_context(take_lease(home.run, source))
        return taken.pop_all()


class _Log(NamedTuple):
    """The ``settings`` of a log, and its connection string or the error that explains why there is none
    now."""

    settings: Settings
    dsn: str | IngestError


def _log_of(settings: Settings, home: Home, source: str) -> _Log | None:
    """Return the log of ``source``; None if it is not captured."""
    definition = next((each for each in sources_in_force(settings).all if each.name == source), None)
    if definition is None or definition.kind is not SourceKind.LOG:
        return None
    try:
        log = log_settings(settings, definition)
    except ConnectionMissing as error:
        # The names of slot and publication are known even without a connection.
        return _Log(log_settings(settings, definition, connected=False), error)
    return _Log(log, source_dsn_or_error(log, home))


def _say_what_leaves(log: _Log, home: Home) -> str | None:
    """Print what happens to slot and publication; return the connection string, None if the source does not
    answer."""
    from omnisupport_ingest.sources.postgres.capture.drop import plan_drop, plan_unasked

    dsn: str | None = None
    try:
        if isinstance(log.dsn, IngestError):
            raise log.dsn
        leaving, dsn = plan_drop(log.dsn, log.settings, home), log.dsn
    except (BadDsn, ConnectionMissing, SourceRefused, SourceUnavailable) as error:
        click.echo(f"The source does not answer: {error.problem}")
        leaving = plan_unasked(log.settings, home)
    for label, dropped in (("Slot", leaving.slot), ("Publication", leaving.publication)):
        if dropped is not None:
            click.echo(f"{label} {dropped}: goes.")
    for each in leaving.stays:
        click.echo(f"Stays: {each}")
    return dsn


def _stays_published(log: _Log, contract: TableContract) -> str | None:
    """Return why the table stays in the publication; None if it can leave, or if the source does not
    answer."""
    from omnisupport_ingest.sources.postgres.session.connection import connect
    from omnisupport_ingest.withdrawal import stays_published

    if isinstance(log.dsn, IngestError):
        return None
    try:
        connection = connect(log.dsn)
    except IngestError:
        # Reported later, when the table is taken out.
        return None
    try:
        return stays_published(log.settings, connection, log.settings.publication, contract)
    finally:
        connection.close()


def _leave_publication(log: _Log, contract: TableContract) -> None:
    from omnisupport_ingest.sources.postgres.catalog.publication import drop_statement
    from omnisupport_ingest.sources.postgres.session.connection import connect
    from omnisupport_ingest.withdrawal import leave_publication

    publication = log.settings.publication
    statement: str | None = drop_statement(publication, [contract.table_name])
    try:
        if isinstance(log.dsn, IngestError):
            raise log.dsn
        connection = connect(log.dsn)
    except IngestError as error:
        click.echo(f"The source does not answer: {error.problem}")
    else:
        try:
            statement = leave_publication(connection, publication, contract)
        finally:
            connection.close()
    if statement is None:
        click.echo(f"{contract.full_name} is not in publication {publication}.")
    else:
        click.echo(f"Still published. Run as the owner of the publication: {statement}")
