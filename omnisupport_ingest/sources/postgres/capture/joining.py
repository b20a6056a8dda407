"""Tables whose contract is newer than the capture: which they are, and whether they can be captured."""

from __future__ import annotations

from collections.abc import Sequence

from psycopg2.extensions import connection as Connection

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.sources.postgres.capture.capture_record import CaptureRecords
from omnisupport_ingest.sources.postgres.catalog.published import recorded_tables
from omnisupport_ingest.sources.postgres.preflight import Finding, preflight_tables
from omnisupport_ingest.sources.postgres.preflight.landed_keys import landed_key_findings
from omnisupport_ingest.sources.postgres.preflight.server import minor_findings


def not_captured(store: LandingStore, tables: Sequence[TableContract]) -> tuple[TableContract, ...]:
    """Those of ``tables`` that no capture of the current epoch has known; none before its first start."""
    epoch = store.current_epoch()
    known = set() if epoch is None else recorded_tables(store.folder, epoch.number)
    return tuple(each for each in tables if known and each.full_name not in known)


def takes_up(store: LandingStore) -> bool:
    """Whether the last capture that began takes up new tables, if it still runs: it is one that follows."""
    record = CaptureRecords(store.folder).read()
    return record is not None and record.follows and record.ended is None


def joining_findings(
    connection: Connection, store: LandingStore, publication: str, tables: Sequence[TableContract]
) -> tuple[Finding, ...]:
    """Every finding about ``tables``, which are to join a capture that runs. ``SourceUnavailable``."""
    found = preflight_tables(connection, tables, publication=publication)
    return (*landed_key_findings(store, tables), *minor_findings(connection.server_version), *found)
