"""``source snapshot``: have tables, or a range of a table's keys, read again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

import click

from omnisupport_ingest.cli.opening import existing_home, open_settings
from omnisupport_ingest.cli.source_opening import contracted_tables, log_of, open_source_dsn
from omnisupport_ingest.foreign import Unreadable, parse_json

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

    from omnisupport_ingest.contracts.model import TableContract
    from omnisupport_ingest.home import Home
    from omnisupport_ingest.key_range import KeyRange
    from omnisupport_ingest.landing.store import LandingStore
    from omnisupport_ingest.settings import Settings


@click.command()
@click.argument("tables", nargs=-1, required=True, metavar="TABLE...")
@click.option("--from", "start", metavar="KEY", help="Only rows whose key is KEY or above.")
@click.option("--to", "end", metavar="KEY", help="Only rows whose key is KEY or below.")
@click.option("--reason", default="", help="Why; stands in the snapshot's plan.")
@click.option("--source", metavar="NAME", help="A log of the home.  [default: that of the settings]")
def snapshot(
    tables: tuple[str, ...], start: str | None, end: str | None, reason: str, source: str | None
) -> None:
    """Have all rows of one or more tables read again, while their changes go on being captured.

    Rows that are no longer there count as deleted from then on. TABLE is the name of a contract. The capture
    that follows the source begins within a second; if none runs, the next one does it. Until the stream
    has passed what was read the table is incomplete, and `verify` refuses it: watch `source status`.

    A table whose contract was added while capture runs joins it so, and nothing else stops for that. It is
    checked first, as by `preflight`. For its assets load Dagster's definitions again: Deployment, Reload.

    With --from, --to or both, only the rows of that range of one table's keys are read, and only of them
    are those that are gone counted as deleted. KEY is the value of the key's first column; of a key of
    several columns, a JSON array of the values of the first few, '["eu", 5]'. Ranges are for keys of
    integers, uuid, date, and text in the collation C: those that the lake orders as the server does.

    \b
    Examples:
      omnisupport-ingest source snapshot tickets --reason "was out of the publication for an hour"
      omnisupport-ingest source snapshot tickets --from 1000 --to 1999

    Exit code: 0 asked for, 2 usage or settings, 4 the source does not answer, 5 a new table cannot be
    captured as it is.
    """
    from omnisupport_ingest.contracts.model import table_named
    from omnisupport_ingest.landing.store import LandingStore
    from omnisupport_ingest.sources.postgres.capture.added_tables import adds_tables, not_captured
    from omnisupport_ingest.sources.postgres.session.lease import Lease
    from omnisupport_ingest.sources.postgres.snapshot.requests import SnapshotRequests

    settings = log_of(open_settings(), source)
    home = existing_home(settings)
    known = contracted_tables(settings)
    chosen = list(dict.fromkeys(table_named(name, known) for name in tables))
    store = LandingStore(home.landing, settings.source)
    running = Lease.is_held(home.run, settings.source)
    new = not_captured(store, chosen) if running and adds_tables(store) else ()
    scope = None
    if start is not None or end is not None:
        if len(chosen) > 1:
            raise click.UsageError("--from and --to are keys of one table; name one.")
        if new:
            raise click.UsageError(f"{chosen[0].name} has never been read. Ask for all of it first.")
        scope = _key_range(settings, home, chosen[0], start, end)
    _require_ready(settings, home, store, new)
    requests = SnapshotRequests(store.folder)
    for name in (each.name for each in chosen):
        asked = requests.write(name, reason, scope)
        what = name if scope is None else f"{name}, keys {scope}"
        click.echo(f"{what}: {'asked for.' if asked else 'was asked for already.'}")
    if new:
        click.echo(
            f"{', '.join(each.name for each in new)} joins the capture that runs; the others go on. For its "
            "assets load Dagster's definitions again: Deployment, Reload."
        )
    if running:
        click.echo("Progress: omnisupport-ingest source status")
    else:
        click.echo("No capture is running; the next one reads them: omnisupport-ingest up")


def _require_ready(settings: Settings, home: Home, store: LandingStore, new: Sequence[TableContract]) -> None:
    """Raise what the capture would refuse ``new`` tables for, before it is asked; tell what it warns of."""
    from omnisupport_ingest.sources.postgres.capture.added_tables import added_table_findings
    from omnisupport_ingest.sources.postgres.preflight import Severity, require_ready

    if not new:
        return
    with _connected(settings, home) as connection:
        found = added_table_findings(connection, store, settings.publication, new)
    require_ready(found)
    for each in found:
        if each.severity is Severity.WARNS:
            click.echo(f"Warning: {each.problem}\nFix: {each.fix}", err=True)


@contextmanager
def _connected(settings: Settings, home: Home) -> Iterator[Connection]:
    from omnisupport_ingest.errors import IngestError
    from omnisupport_ingest.sources.postgres.session.connection import connect

    dsn = open_source_dsn(settings, home)
    if isinstance(dsn, IngestError):
        raise dsn
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
    """The values of a bound: one, or those of a JSON array."""
    if text is None or not text.startswith("["):
        return None if text is None else [text]
    try:
        values = parse_json(text)
    except Unreadable as error:
        raise click.UsageError(f"{option} {text} is no JSON array: {error}.") from error
    if not all(isinstance(value, str | int) and not isinstance(value, bool) for value in values):
        raise click.UsageError(f"{option} {text}: the values of a key are texts or whole numbers.")
    return [str(value) for value in values]
