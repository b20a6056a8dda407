"""Whether sources that share one database capture each table by one slot alone.

A table in two publications would land in both chains; so would one that was moved to another slot and is
still in the publication of the first. If the sources read different databases, their shared watermark would
be wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace

from psycopg2.extensions import connection as Connection

from omnisupport_ingest.contracts.databases import Database, databases
from omnisupport_ingest.contracts.in_force import contracts_in_force
from omnisupport_ingest.contracts.model import Contracts, TableContract
from omnisupport_ingest.contracts.sources import SourceDefinition, load_sources, sources_folder
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.sources.postgres.catalog.publication import drop_statement, read_publication
from omnisupport_ingest.sources.postgres.preflight.findings import Finding
from omnisupport_ingest.sources.postgres.session.connection import connect
from omnisupport_ingest.sources.postgres.session.server import server_facts


def shared_database_findings(dsn: str, settings: Settings) -> tuple[Finding, ...]:
    """Return a finding for each thing that only one of the sources of a database may have, and two have.

    Empty for a source without a shared database. ``settings``: of the source that ``dsn`` connects to. Raises
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
    """Return a finding for each of ``tables`` that another source of the database has a contract for, or
    publishes.

    For tables that are added to a running capture.
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
        # Contracts need not be read for the many that share no database.
        return None, Contracts(())
    contracts = contracts_in_force(settings)
    found = databases(definitions, contracts)
    return next((each for each in found if settings.source in each.names), None), contracts


def _elsewhere(dsn: str, settings: Settings, database: Database) -> Iterator[Finding]:
    """Yield a finding for each source that captures another database than the one of ``dsn``."""
    here = None
    for other in database.others(settings.source):
        try:
            epoch = LandingStore(settings.home.expanduser() / "landing", other.name).current_epoch()
        except (IngestError, OSError):
            # The other source reports a fault of its landing when it starts.
            continue
        if epoch is None or epoch.facts is None:
            continue
        here = here or server_facts(dsn)
        there = epoch.facts
        if (here.system_identifier, here.database) != (there.system_identifier, there.database):
            yield Finding(
                "divided",
                f"{settings.source} and {other.name} are said to share database {database.name}, but the "
                f"first reads {here.database} of server {here.system_identifier}, and the second reads "
                f"{there.database} of server {there.system_identifier}.",
                "Correct the connection of one of them, or take `database` out of its definition.",
            )


def _published_by_both(
    connection: Connection, settings: Settings, other: SourceDefinition, contracts: Contracts
) -> Iterator[Finding]:
    """Yield a finding for each table of one source that the publication of the other has, too."""
    own = settings.source
    yield from _doubled(connection, settings.publication, own, other.name, contracts.of_source(other.name))
    yield from _doubled(connection, other.log.publication, other.name, own, contracts.of_source(own))


def _doubled(
    connection: Connection, publication: str | None, sender: str, own: str, tables: Sequence[TableContract]
) -> Iterator[Finding]:
    """Yield a finding if the ``publication`` of ``sender`` has some of ``tables``, which are of ``own``."""
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
