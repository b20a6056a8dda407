"""Compares contracts with the tables of their source: what differs, and whether it matters."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import click
from psycopg2.extensions import connection as Connection

from omnisupport_ingest.cli.opening import home_if_any, require_source_dsn, require_source_in_use
from omnisupport_ingest.cli.render import counted
from omnisupport_ingest.contracts.in_force import contracts_in_force
from omnisupport_ingest.contracts.model import ContractError, TableContract, table_named
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.sources.postgres.catalog.live_table import read_live_tables
from omnisupport_ingest.sources.postgres.catalog.publication import Publication, read_publication
from omnisupport_ingest.sources.postgres.preflight.contract_match import contract_findings
from omnisupport_ingest.sources.postgres.preflight.findings import Finding, Severity
from omnisupport_ingest.sources.postgres.session.connection import connect

_WORDS = {Severity.BLOCKS: "is left out of capture", Severity.WARNS: "matters", Severity.NOTES: "note"}


@dataclass(frozen=True, slots=True)
class Compared:
    """Each contract with its findings, the worst first. ``published``: the publication exists."""

    source: str
    publication: str
    published: bool
    tables: tuple[tuple[TableContract, tuple[Finding, ...]], ...]

    @property
    def matters(self) -> bool:
        """Whether a finding blocks or warns."""
        return any(
            finding.severity is not Severity.NOTES for _, findings in self.tables for finding in findings
        )


def compare(settings: Settings, only: Sequence[str]) -> Compared:
    """Compare the contracts of the source, or only those of the tables named, with its tables."""
    contracts = _chosen(settings, only)
    with closing(connect_to_source(settings)) as connection:
        live = read_live_tables(connection, [each.table_name for each in contracts])
        publication = read_publication(connection, settings.publication)
    compared = []
    for contract in contracts:
        table = live.get(contract.table_name)
        findings = [*contract_findings(contract, table)]
        if table is not None and table.is_logged and publication is not None:
            findings += _not_published(contract, publication)
        findings.sort(key=lambda finding: list(Severity).index(finding.severity))
        compared.append((contract, tuple(findings)))
    return Compared(settings.source, settings.publication, publication is not None, tuple(compared))


def connect_to_source(settings: Settings) -> Connection:
    """Return a connection to the source of ``settings``. Only the embedded server needs a home."""
    return connect(require_source_dsn(settings, home_if_any(settings)))


def _chosen(settings: Settings, only: Sequence[str]) -> list[TableContract]:
    require_source_in_use(settings)
    contracts = contracts_in_force(settings)
    of_source = contracts.of_source(settings.source)
    if not of_source:
        raise ContractError(
            f"No contract names the source {settings.source!r}.",
            fix=f"Make them: omnisupport-ingest contracts new --all --source {settings.source}. Sources that "
            f"have some: {', '.join(contracts.sources()) or 'none'}.",
        )
    named = [table_named(name, of_source) for name in only]
    return [each.as_captured for each in of_source if not only or each in named]


def _not_published(contract: TableContract, publication: Publication) -> list[Finding]:
    if publication.all_tables or contract.table_name in publication.tables:
        return []
    return [
        Finding(
            "publication",
            f"Publication {publication.name} does not cover {contract.full_name}; capture adds it if its "
            "role may.",
            "",
            Severity.NOTES,
        )
    ]


def show(compared: Compared) -> None:
    """Print what differs for each contract, and a summary."""
    width = max(len(contract.name) for contract, _ in compared.tables)
    for contract, findings in compared.tables:
        if not findings:
            click.echo(f"{contract.name:{width}}  as {contract.full_name} is")
        for finding in findings:
            click.echo(f"{contract.name:{width}}  {_WORDS[finding.severity]}: {finding.problem}")
            if finding.fix:
                click.echo(f"{'':{width}}    Fix: {finding.fix}")
    differing = sum(
        any(finding.severity is not Severity.NOTES for finding in findings) for _, findings in compared.tables
    )
    if not compared.published:
        click.echo(f"Publication {compared.publication} is not there yet; capture makes it.")
    click.echo(
        f"{counted(len(compared.tables), 'contract')} of {compared.source} compared with their tables: "
        f"{differing or 'none'} with a difference that matters."
    )


def document(compared: Compared) -> dict[str, Any]:
    """Return the comparison for ``--json``; ``severity`` is ``blocks``, ``warns`` or ``notes``."""
    return {
        "source": compared.source,
        "publication": {"name": compared.publication, "exists": compared.published},
        "matters": compared.matters,
        "contracts": [
            {
                "name": contract.name,
                "table": contract.full_name,
                "path": contract.path,
                "findings": [
                    {
                        "check": finding.check,
                        "severity": finding.severity.value,
                        "problem": finding.problem,
                        "fix": finding.fix or None,
                    }
                    for finding in findings
                ],
            }
            for contract, findings in compared.tables
        ],
    }
