"""``preflight``: check that a source is set up, and print the SQL for what is missing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from omnisupport_ingest.cli import render
from omnisupport_ingest.cli.errors import FINDINGS
from omnisupport_ingest.cli.opening import (
    contracted_tables,
    has_log,
    home_if_any,
    log_of,
    open_settings,
    source_dsn_or_error,
)
from omnisupport_ingest.cli.sources import query_findings
from omnisupport_ingest.contracts.in_force import contracts_in_force
from omnisupport_ingest.contracts.sources import SourceKind, SourceUnknown, sources_in_force
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.sources.kafka.run import preflight as kafka_findings
from omnisupport_ingest.sources.postgres.preflight import Finding, Severity, blocking
from omnisupport_ingest.sources.postgres.preflight.source_check import check_source
from omnisupport_ingest.sources.postgres.session.connect_errors import destination
from omnisupport_ingest.sources.postgres.session.connection import dsn_parts

if TYPE_CHECKING:
    from omnisupport_ingest.settings import Settings


@click.command()
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def preflight(name: str | None, as_json: bool) -> int:
    """Check everything that must be true at the source before capture can run; change nothing.

    NAME is a source of the home (`sources list`); by default it is the one that the settings name.

    For a log the command checks server, rights, publication, tables, keys and slot; for a source that is
    read by cursors, tables, types and indexes; for Kafka topics, settings, cluster, topics, and whether the
    offsets where reading goes on are still there. Every finding has the SQL that repairs it. capture and sync
    make the same checks before they change anything.

    \b
    Example:
      OMNISUPPORT_SOURCE_DSN="host=db.example dbname=shop user=omnisupport_capture" \\
        omnisupport-ingest preflight

    Exit code: 0 nothing blocks, 1 something does, 2 usage or settings.
    """
    settings = open_settings()
    if name is not None and not has_log(settings, name):
        return _preflight_other(settings, name, as_json=as_json)
    settings = log_of(settings, name)
    tables = contracted_tables(settings)
    home = home_if_any(settings)
    dsn = source_dsn_or_error(settings, home)
    if isinstance(dsn, IngestError):
        where = "the embedded PostgreSQL"
        findings: tuple[Finding, ...] = (Finding("connection", dsn.problem, dsn.fix),)
    else:
        where = destination(dsn_parts(dsn))
        findings = check_source(dsn, settings, home, tables)
    blocked = bool(blocking(findings))
    if as_json:
        render.echo_json(_document(settings.source, findings, ready=not blocked))
    else:
        counted = render.counted(len(tables), "table")
        click.echo(f"Checked {where}, for {counted} of {settings.source}.\n")
        _print(findings, "capture", len(tables))
    return FINDINGS if blocked else 0


def _preflight_other(settings: Settings, name: str, *, as_json: bool) -> int:
    definition = sources_in_force(settings).find(name)
    if definition.kind is SourceKind.KAFKA:
        landing = settings.home / "landing"
        findings = kafka_findings(definition, contracts_in_force(settings), landing)
    elif definition.kind is SourceKind.QUERY:
        findings = query_findings(settings, definition)
    else:
        raise SourceUnknown(
            f"{name} is a source of the kind {definition.kind}: its files come, nothing is read from it.",
            fix="Check a file before it lands: omnisupport-ingest manifest load FILE --dry-run. Or name "
            "another source: omnisupport-ingest sources list",
        )
    blocked = bool(blocking(findings))
    if as_json:
        render.echo_json(_document(name, findings, ready=not blocked))
    else:
        click.echo(f"Checked {name} ({definition.connection}).\n")
        _print(findings, "reading")
    return FINDINGS if blocked else 0


def _document(source: str, findings: tuple[Finding, ...], *, ready: bool) -> dict[str, object]:
    return {
        "source": source,
        "ready": ready,
        "findings": [
            {"severity": each.severity.value, "check": each.check, "what": each.problem, "fix": each.fix}
            for each in findings
        ],
    }


def _print(findings: tuple[Finding, ...], work: str, tables: int = 0) -> None:
    """Print ``findings`` and their summary.

    ``work``: what they may block. ``tables``: number of tables; those with a problem of their own are left
    out of the work.
    """
    for each in findings:
        render.finding(each.problem, each.fix, kind=each.severity.value, width=7)
    if findings:
        click.echo()
    blocking = [each for each in findings if each.severity is Severity.BLOCKS]
    left_out = {each.table for each in blocking}
    if not blocking:
        click.echo(f"Nothing blocks the {work}.")
        return
    if None not in left_out and len(left_out) < tables:
        verdict = f"The {work} leaves out {render.counted(len(left_out), 'table')}; the others go on."
    else:
        verb = "finding blocks" if len(blocking) == 1 else "findings block"
        verdict = f"{len(blocking)} {verb} the {work}."
    click.echo(f"{verdict} Run the fixes, then this command again.")
