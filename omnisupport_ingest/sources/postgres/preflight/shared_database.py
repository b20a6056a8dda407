"""Checks that sources that share a database capture each table by only one slot.

A table in two publications would land in both chains. So would a table that was moved to another slot but is
still in the publication of the first. If the sources actually read different databases, their shared
watermark would be wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace

from psycopg2.extensions import connection as Connection

from omnisupport_ingest.contracts.databases import Database, databases
from omnisupport_ingest.contracts.in_force import contracts_in_force
from omnisupport_ingest.contracts.model import Contracts, TableContract
from omnisupport_ingest.contracts.sources import SourceDefinition, load_sources, log_settings, sources_folder
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.landing.epochs import EpochFacts
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.sources.postgres.catalog.publication import drop_statement, read_publication
from omnisupport_ingest.sources.postgres.preflight.findings import Finding
from omnisupport_ingest.sources.postgres.session.connection import connect
from omnisupport_ingest.sources.postgres.session.server import ServerFacts, server_facts


def shared_database_findings(dsn: str, settings: Settings) -> tuple[Finding, ...]:
    """Return a finding for everything that two sources of a database share and only one may have.

    Empty for a source that shares no database. ``settings``: of the source that ``dsn`` connects to. Raises
    ``SourceRefused`` or ``SourceUnavailable``.
    """
    database, contracts = _database(settings)
    if database is None:
        return ()
    found = [Finding("divided", each.problem, each.fix) for each in database.shared(contracts)]
    found += _elsewhere(dsn, settings, database)
    with closing(connect(dsn)) as connection:
        for other in database.others(settings.source):
            found += _published_by_both(connection, settings, other, contracts)
    return tuple(found)


def shared_table_findings(
    connection: Connection, settings: Settings, tables: Sequence[TableContract]
) -> tuple[Finding, ...]:
    """Return a finding for each of ``tables`` that another source of the database contracts or publishes.

    Used for tables that are added to a running capture.
    """
    database, contracts = _database(settings)
    if database is None:
        return ()
    names = {each.full_name: each.name for each in tables}
    found = [
        Finding("divided", each.problem, each.fix, table=names[each.table])
        for each in database.shared(contracts)
        if each.table in names
    ]
    for other in database.others(settings.source):
        for table in tables:
            doubled = _doubled(connection, other.log.publication, other.name, settings.source, [table])
            found += [replace(each, table=table.name) for each in doubled]
    return tuple(found)


def _database(settings: Settings) -> tuple[Database | None, Contracts]:
    definitions = load_sources(sources_folder(settings))
    if not any(each.name == settings.source and each.database is not None for each in definitions):
        # Most sources share no database; for them the contracts need not be read.
        return None, Contracts(())
    contracts = contracts_in_force(settings)
    found = databases(definitions, contracts)
    return next((each for each in found if settings.source in each.names), None), contracts


def _elsewhere(dsn: str, settings: Settings, database: Database) -> Iterator[Finding]:
    """Yield a finding for each source that captures another database than the one at ``dsn``.

    What another source has landed may be of a server that both have left since: then its definition counts.
    """
    here: _Place | None = None
    for other in database.others(settings.source):
        try:
            epoch = LandingStore(settings.home / "landing", other.name).current_epoch()
        except (IngestError, OSError):
            # When the other source starts, it reports the fault of its landing itself.
            continue
        if epoch is None or epoch.facts is None:
            continue
        here = here or _place(server_facts(dsn))
        there: _Place | None = _place(epoch.facts)
        if there != here and not other.embedded:
            there = _now_at(settings, other)
        if there is not None and there != here:
            yield Finding(
                "divided",
                f"{settings.source} and {other.name} are said to share database {database.name}, but the "
                f"first reads {here[1]} of server {here[0]}, and the second reads {there[1]} of server "
                f"{there[0]}.",
                "Correct the connection of one of them, or take `database` out of its definition.",
            )


_Place = tuple[str, str]
"""System identifier of a server, and the name of a database."""


def _place(facts: ServerFacts | EpochFacts) -> _Place:
    return facts.system_identifier, facts.database


def _now_at(settings: Settings, other: SourceDefinition) -> _Place | None:
    """Return where the definition of ``other`` leads now; None if that server does not answer: when that
    source starts, it reports this itself."""
    try:
        dsn = log_settings(settings, other).source_dsn
        return _place(server_facts(dsn.get_secret_value())) if dsn is not None else None
    except IngestError:
        return None


def _published_by_both(
    connection: Connection, settings: Settings, other: SourceDefinition, contracts: Contracts
) -> Iterator[Finding]:
    """Yield findings if the publication of one of the two sources publishes tables of the other."""
    own = settings.source
    yield from _doubled(connection, settings.publication, own, other.name, contracts.of_source(other.name))
    yield from _doubled(connection, other.log.publication, other.name, own, contracts.of_source(own))


def _doubled(
    connection: Connection, publication: str | None, sender: str, own: str, tables: Sequence[TableContract]
) -> Iterator[Finding]:
    """Yield a finding if ``publication`` of ``sender`` publishes some of ``tables``, which ``own`` has."""
    published = read_publication(connection, publication) if publication is not None else None
    if published is None:
        return
    both = sorted(name for each in tables if published.covers(name := each.table_name))
    if not both:
        return
    named = ", ".join(".".join(each) for each in both)
    yield Finding(
        "divided",
        f"Publication {publication} of {sender} publishes {named}, which {own} captures: "
        "it would land twice.",
        f"Make {publication} one of single tables, not of all or of a schema: those of {sender}."
        if published.all_tables
        else drop_statement(published.name, both),
    )
