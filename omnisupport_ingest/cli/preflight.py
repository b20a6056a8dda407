"""``preflight``: is the source set up for capture? Everything that is not, with the SQL for it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from omnisupport_ingest.cli.opening import open_settings
from omnisupport_ingest.cli.query_status import has_log
from omnisupport_ingest.cli.source_opening import contracted_tables, home_if_any, log_of, open_source_dsn

if TYPE_CHECKING:
    from omnisupport_ingest.settings import Settings
    from omnisupport_ingest.sources.postgres.preflight import Finding

BLOCKED = 1
"""Exit code when something blocks the capture."""


@click.command()
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def preflight(name: str | None, as_json: bool) -> int:
    """Check everything that must be true at the source before capture can run; change nothing.

    NAME is a source of the home (`sources list`); without it, the one that the settings name. Of one that is
    read by cursors, tables, types and indexes are looked at.

    Server, rights, publication, tables, keys and slot are looked at, and every finding is listed with
    the SQL that repairs it. capture and sync make the same check before they touch anything.

    \b
    Example:
      OMNISUPPORT_SOURCE_DSN="host=db.example dbname=shop user=omnisupport_capture" \\
        omnisupport-ingest preflight

    Exit code: 0 nothing blocks, 1 something does, 2 usage or settings.
    """
    from omnisupport_ingest.errors import IngestError
    from omnisupport_ingest.sources.postgres.preflight import Finding, blocking
    from omnisupport_ingest.sources.postgres.preflight.source_check import check_source
    from omnisupport_ingest.sources.postgres.session.connect_errors import destination
    from omnisupport_ingest.sources.postgres.session.connection import dsn_parts

    settings = open_settings()
    if name is not None and not has_log(settings, name):
        return _preflight_query(settings, name, as_json=as_json)
    settings = log_of(settings, name)
    tables = contracted_tables(settings)
    home = home_if_any(settings)
    dsn = open_source_dsn(settings, home)
    if isinstance(dsn, IngestError):
        where = "the embedded PostgreSQL"
        found: tuple[Finding, ...] = (Finding("connection", dsn.problem, dsn.fix),)
    else:
        where = destination(dsn_parts(dsn))
        found = check_source(dsn, settings, home, tables)
    blocked = bool(blocking(found))
    if as_json:
        click.echo(json.dumps(_document(settings.source, found, ready=not blocked), indent=2))
    else:
        click.echo(f"Checked {where}, for {len(tables)} tables of {settings.source}.\n")
        _print(found)
    return BLOCKED if blocked else 0


def _preflight_query(settings: Settings, name: str, *, as_json: bool) -> int:
    from omnisupport_ingest.cli.sources import query_findings
    from omnisupport_ingest.contracts.sources import SourceKind, SourceUnknown, sources_in_force
    from omnisupport_ingest.sources.postgres.preflight import blocking

    definition = sources_in_force(settings).find(name)
    if definition.kind is not SourceKind.QUERY:
        raise SourceUnknown(
            f"{name} is a source of the kind {definition.kind}, of which nothing is asked here.",
            fix="Name a source of the kind postgres_log or query: omnisupport-ingest sources list",
        )
    found = query_findings(settings, definition)
    blocked = bool(blocking(found))
    if as_json:
        click.echo(json.dumps(_document(name, found, ready=not blocked), indent=2))
    else:
        click.echo(f"Checked {name} ({definition.connection}).\n")
        _print(found)
    return BLOCKED if blocked else 0


def _document(source: str, found: tuple[Finding, ...], *, ready: bool) -> dict[str, object]:
    return {
        "source": source,
        "ready": ready,
        "findings": [
            {"severity": each.severity.value, "check": each.check, "what": each.problem, "fix": each.fix}
            for each in found
        ],
    }


def _print(found: tuple[Finding, ...]) -> None:
    from omnisupport_ingest.sources.postgres.preflight import Severity

    colours = {Severity.BLOCKS: "red", Severity.WARNS: "yellow", Severity.NOTES: None}
    for each in found:
        label = click.style(f"{each.severity.value:<7}", fg=colours[each.severity], bold=True)
        click.echo(f"{label} {each.problem}")
        if each.fix:
            click.echo(f"        Fix: {each.fix}")
    count = {severity: sum(each.severity is severity for each in found) for severity in Severity}
    if found:
        click.echo()
    if count[Severity.BLOCKS]:
        verb = "finding blocks" if count[Severity.BLOCKS] == 1 else "findings block"
        click.echo(f"{count[Severity.BLOCKS]} {verb} the capture. Run the fixes, then this command again.")
    else:
        click.echo("Nothing blocks the capture.")
