"""Begins an epoch of a source: creates its slot, and records the facts that later identify the source.

If a slot of the configured name exists that this home has not created, it belongs to somebody else and is
left alone.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import closing

from psycopg2.extensions import connection as Connection

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.landing.accepted_losses import AcceptedLosses
from omnisupport_ingest.landing.epochs import EpochFacts, EpochRecord
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.sources.postgres.capture.parked import ready_tables
from omnisupport_ingest.sources.postgres.catalog.publication import ensure_publication
from omnisupport_ingest.sources.postgres.preflight import Finding, Severity, preflight
from omnisupport_ingest.sources.postgres.preflight.shared_database import shared_database_findings
from omnisupport_ingest.sources.postgres.preflight.source_check import landed_key_findings
from omnisupport_ingest.sources.postgres.session.connection import VALUE_SETTINGS, connect
from omnisupport_ingest.sources.postgres.session.server import (
    SLOT_WAIT_SECONDS,
    server_facts,
    slot_facts,
    wait_until_free,
)
from omnisupport_ingest.sources.postgres.slot.home_identity import HomeIdentity
from omnisupport_ingest.sources.postgres.slot.home_slot import (
    ExpectedSlot,
    Presence,
    SlotIntent,
    end_of_chain,
    expected_slot,
)
from omnisupport_ingest.sources.postgres.slot.slot import create_slot, drop_slot, slot_taken

_log = logging.getLogger(__name__)


class EpochStart:
    """Begins the epochs of one source. The caller must hold the lease of the source."""

    def __init__(
        self,
        settings: Settings,
        store: LandingStore,
        tables: Sequence[TableContract],
        stop: threading.Event | None = None,
        identity: HomeIdentity | None = None,
    ) -> None:
        """``tables``: tables that the publication must contain. ``stop``: ends the wait for a new slot.
        ``identity``: knows which slots belong to the home; None: all that its epochs name."""
        self._settings, self._store, self._tables = settings, store, tuple(tables)
        self._stop, self._identity = stop or threading.Event(), identity
        self._intent = SlotIntent(store.folder)

    def findings(self, dsn: str, slot: ExpectedSlot | None = None) -> tuple[Finding, ...]:
        """Run the preflight, log its warnings, return all findings. ``slot``: None: the expected slot."""
        findings = preflight(
            dsn,
            self._tables,
            publication=self._settings.publication,
            slot=slot or expected_slot(self._store, self._settings.slot),
            slot_wait_seconds=SLOT_WAIT_SECONDS,
        )
        landed = landed_key_findings(self._store, self._tables)
        findings = (*shared_database_findings(dsn, self._settings), *landed, *findings)
        for each in findings:
            if each.severity is Severity.WARNS:
                _log.warning("%s Fix: %s", each.problem, each.fix)
        return findings

    def first(self, dsn: str, connection: Connection) -> EpochRecord:
        """Begin the first epoch of this home. Raises ``SlotInUse`` if its slot is taken, ``SlotNotMade``."""
        if self._intent.covers(self._settings.slot):
            # An earlier first start crashed after it created the slot and before it recorded the epoch.
            drop_slot(connection, self._settings.slot)
        return self._begin(dsn, connection, "first start")

    def next(self, dsn: str, reason: str, *, loss_accepted_by: str | None = None) -> EpochRecord:
        """Repair a gap: begin an epoch with a new slot. Everything that has landed stays.

        The epoch records ``reason``. ``loss_accepted_by``: the person who decided that tables read before are
        not read again; a record then names what may be missing. Raises ``PreflightFailed``, ``SlotInUse`` and
        ``SlotNotMade``.
        """
        before = self._store.current_epoch()
        lost_from = None
        if before is not None and loss_accepted_by is not None:
            # Only then, because a chain with a gap within landing has no known end.
            lost_from = end_of_chain(self._store, before).end
        slot = self._slot_to_recreate(dsn)
        ready, _ = ready_tables(self.findings(dsn, slot), self._tables)
        with closing(connect(dsn)) as connection:
            ensure_publication(connection, self._settings.publication, ready)
            if slot.presence is Presence.EITHER:
                wait_until_free(connection, slot.name, SLOT_WAIT_SECONDS)
                drop_slot(connection, slot.name)
            epoch = self._begin(dsn, connection, reason)
        if loss_accepted_by is not None:
            lost_to = epoch.facts.consistent_point if epoch.facts is not None else None
            lsns_go_back = lost_from is not None and lost_to is not None and lost_to < lost_from
            AcceptedLosses(self._store.folder).accept(
                epoch.number,
                loss_accepted_by,
                reason,
                lost_from,
                lost_to,
                of_another_history=lsns_go_back or (before is not None and not _same_history(before, epoch)),
            )
        return epoch

    def _slot_to_recreate(self, dsn: str) -> ExpectedSlot:
        """Return the configured slot. It may exist only if this home has created it."""
        slot, server = self._settings.slot, server_facts(dsn).system_identifier
        ours = self._intent.covers(slot) or any(
            each.facts is not None and (each.facts.slot, each.facts.system_identifier) == (slot, server)
            for each in self._store.epochs()
            if self._identity is None or self._identity.owns(self._settings.source, each.number)
        )
        return ExpectedSlot(slot, Presence.EITHER if ours else Presence.FREE)

    def _begin(self, dsn: str, connection: Connection, reason: str) -> EpochRecord:
        slot = self._settings.slot
        if slot_facts(connection, slot) is not None:
            raise slot_taken(slot)
        self._intent.record(slot)
        point = create_slot(dsn, slot, self._stop)
        server = server_facts(dsn)
        facts = EpochFacts(
            server.system_identifier,
            server.timeline,
            slot,
            point,
            server.database,
            server.version,
            dict(VALUE_SETTINGS),
        )
        epoch = self._store.begin_epoch(reason, facts)
        self._intent.clear()
        return epoch


def _same_history(one: EpochRecord, other: EpochRecord) -> bool:
    """Return whether both epochs are of one server, timeline and database, so that LSNs are comparable."""
    if one.facts is None or other.facts is None:
        return False
    return (one.facts.system_identifier, one.facts.timeline, one.facts.database) == (
        other.facts.system_identifier,
        other.facts.timeline,
        other.facts.database,
    )
