"""The preflight of the configured source, as its home sees it: with the slot and chain it has."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

from omnisupport_ingest.contracts.model import Contracts, TableContract
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.home import Home
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.sources.postgres.preflight import Finding, Severity, preflight
from omnisupport_ingest.sources.postgres.preflight.continuity import continuity_findings, published_findings
from omnisupport_ingest.sources.postgres.preflight.landed_keys import landed_key_findings
from omnisupport_ingest.sources.postgres.session.connection import connect
from omnisupport_ingest.sources.postgres.session.errors import SourceRefused, SourceUnavailable
from omnisupport_ingest.sources.postgres.session.lease import Lease
from omnisupport_ingest.sources.postgres.slot.home_identity import HomeCopied, HomeIdentity
from omnisupport_ingest.sources.postgres.slot.home_slot import ExpectedSlot, Presence, expected_slot

NO_PROOF = {"standby", "replication_right", "replication_connection", "server_version"}
"""Findings without whose repair the server cannot be asked for the proof of continuity."""


def contracted_tables(contracts: Contracts, source: str) -> tuple[TableContract, ...]:
    """The contracts of ``source``; ``IngestError`` if there are none, so that nothing is to capture."""
    tables = contracts.of_source(source)
    if not tables:
        raise IngestError(
            f"No contract names the source {source!r}.",
            fix="Make them (omnisupport-ingest contracts new --all; `status` says where the home has its "
            "contracts), or set OMNISUPPORT_SOURCE to a source that has some: "
            + (", ".join(contracts.sources()) or "there are none"),
        )
    return tables


def check_source(
    dsn: str, settings: Settings, home: Home | None, tables: Sequence[TableContract]
) -> tuple[Finding, ...]:
    """Every finding about the source at ``dsn``, the worst first; a home is not needed.

    A source that cannot be reached, or refuses the connection, is the only finding then.
    ``BadDsn`` if ``dsn`` cannot be read.
    """
    store = LandingStore(home.landing, settings.source) if home is not None else None
    if home is not None:
        try:
            HomeIdentity(home).look()
        except HomeCopied as copied:
            return (Finding("home_copied", copied.problem, copied.fix, raises=HomeCopied),)
    slot = ExpectedSlot(settings.slot, Presence.FREE)
    if home is not None and store is not None:
        running = Lease.is_held(home.run, settings.source)
        slot = replace(expected_slot(store, settings.slot), read_by_us=running)
    try:
        found = preflight(dsn, tables, publication=settings.publication, slot=slot)
        if store is not None and not {each.check for each in found} & NO_PROOF:
            proof = list(continuity_findings(dsn, store))
            if not proof:
                with closing(connect(dsn)) as connection:
                    proof += published_findings(connection, store, settings.publication, tables)
            found = (*proof, *found)
        if store is not None:
            found = (*landed_key_findings(store, tables), *found)
    except (SourceRefused, SourceUnavailable) as error:
        return (Finding("connection", error.problem, error.fix, Severity.BLOCKS),)
    return found
