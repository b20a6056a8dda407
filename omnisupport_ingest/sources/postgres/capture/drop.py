"""Drops the slot and the publication that capture has created on a source."""

from __future__ import annotations

from dataclasses import dataclass

from omnisupport_ingest.home import Home
from omnisupport_ingest.landing.epochs import EpochRecord
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.sources.postgres.catalog.publication import drop_publication, read_publication
from omnisupport_ingest.sources.postgres.session.connection import connect, one_row, source_errors
from omnisupport_ingest.sources.postgres.session.lease import take_lease
from omnisupport_ingest.sources.postgres.session.quoting import identifier, literal
from omnisupport_ingest.sources.postgres.session.server import server_facts, slot_facts, slot_in_use
from omnisupport_ingest.sources.postgres.slot.home_identity import HomeIdentity
from omnisupport_ingest.sources.postgres.slot.home_slot import (
    ExpectedSlot,
    Presence,
    SlotIntent,
    expected_slot,
)
from omnisupport_ingest.sources.postgres.slot.slot import drop_slot
from omnisupport_ingest.storage import storage_of


@dataclass(frozen=True, slots=True)
class DropPlan:
    """What is dropped (None: nothing). ``stays``: what is not, each with the reason and the SQL to drop it.

    ``retained_bytes``: bytes of WAL that the server keeps for the dropped slot.
    """

    slot: str | None
    retained_bytes: int
    publication: str | None
    stays: tuple[str, ...]


def plan_drop(dsn: str, settings: Settings, home: Home) -> DropPlan:
    """Return what ``drop_capture`` would drop at the source at ``dsn``.

    Raises ``CaptureRunning`` while a capture of this home runs, ``SlotInUse`` while another process reads
    from the slot, ``HomeCopied``, ``SourceRefused`` and ``SourceUnavailable``.
    """
    with take_lease(home.run, settings.source):
        HomeIdentity(home).look()
        return _make_plan(dsn, settings, home)


def plan_unasked(settings: Settings, home: Home) -> DropPlan:
    """Return what stays at a source that cannot be reached, with the SQL to drop it; drop nothing.

    Raises ``CaptureRunning`` while a capture of this home runs, and ``HomeCopied``.
    """
    with take_lease(home.run, settings.source):
        HomeIdentity(home).look()
        expected, epoch = _expected(settings, home)
    stays = []
    owned = epoch is None or HomeIdentity(home).owns(settings.source, epoch.number)
    if expected.presence is not Presence.FREE and owned:
        stays.append(
            f"Slot {expected.name}, if its server comes back: it would keep WAL for it without end. There: "
            f"SELECT pg_drop_replication_slot({literal(expected.name)});"
        )
    stays.append(
        f"Publication {settings.publication}, if its server comes back. If nobody else uses it: "
        f"DROP PUBLICATION IF EXISTS {identifier(settings.publication)};"
    )
    return DropPlan(None, 0, None, tuple(stays))


def drop_capture(dsn: str, settings: Settings, home: Home) -> DropPlan:
    """Drop the slot, then the publication, that this home's capture has created; return what was dropped.

    Raises as ``plan_drop`` does, and ``PreflightFailed`` if the role may not drop the publication.
    """
    # Hold the lease, so that no capture starts between the plan and the end.
    with take_lease(home.run, settings.source):
        HomeIdentity(home).look()
        plan = _make_plan(dsn, settings, home)
        connection = connect(dsn)
        try:
            if plan.slot is not None:
                drop_slot(connection, plan.slot)
                SlotIntent(home.landing / settings.source).clear()
            if plan.publication is not None:
                drop_publication(connection, plan.publication)
        finally:
            connection.close()
        return plan


def _make_plan(dsn: str, settings: Settings, home: Home) -> DropPlan:
    expected, epoch = _expected(settings, home)
    server = server_facts(dsn)
    stays: list[str] = []
    slot_to_drop: str | None = None
    connection = connect(dsn)
    try:
        slot = slot_facts(connection, expected.name)
        if slot is not None:
            another_server = (
                epoch is not None
                and epoch.facts is not None
                and epoch.facts.system_identifier != server.system_identifier
            )
            ours = epoch is None or HomeIdentity(home).owns(settings.source, epoch.number)
            if expected.presence is Presence.FREE or another_server or not ours:
                stays.append(
                    f"Slot {slot.name}: this home has not made it. If nobody uses it: "
                    f"SELECT pg_drop_replication_slot({literal(slot.name)});"
                )
            elif slot.reader is not None:
                raise slot_in_use(slot.name, slot.reader)
            else:
                slot_to_drop = slot.name
        publication = read_publication(connection, settings.publication)
        with source_errors("looking for other readers of the publication"):
            (others,) = one_row(
                connection,
                "SELECT array_agg(slot_name::text) FROM pg_replication_slots WHERE plugin = 'pgoutput'"
                " AND database = current_database() AND slot_name IS DISTINCT FROM %s",
                (slot_to_drop,),
            )
    finally:
        connection.close()
    name = settings.publication
    drop_by_hand = f"DROP PUBLICATION {identifier(name)};"
    publication_to_drop: str | None = None
    if publication is not None and not publication.made_by_capture:
        stays.append(f"Publication {name}: capture has not made it. If nobody uses it: {drop_by_hand}")
    elif publication is not None and others:
        stays.append(
            f"Publication {name}: the database has other slots that may use it ({', '.join(others)}). "
            f"If they do not: {drop_by_hand}"
        )
    elif publication is not None:
        publication_to_drop = name
    retained = (slot.retained_bytes or 0) if slot is not None and slot_to_drop else 0
    return DropPlan(slot_to_drop, retained, publication_to_drop, tuple(stays))


def _expected(settings: Settings, home: Home) -> tuple[ExpectedSlot, EpochRecord | None]:
    """Return the slot that capture would use, and the epoch. Creates no landing if there is none."""
    folder = home.landing / settings.source
    if not folder.is_dir() and not any(True for _ in storage_of(folder).listed(folder)):
        return ExpectedSlot(settings.slot, Presence.FREE), None
    store = LandingStore(home.landing, settings.source)
    return expected_slot(store, settings.slot), store.current_epoch()
