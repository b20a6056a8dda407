"""Is the replication slot free for us, or ours?"""

from __future__ import annotations

import time
from collections.abc import Iterator

from psycopg2.extensions import connection as Connection

from omnisupport_ingest.sources.postgres.preflight.findings import Finding, Severity, taken_slot
from omnisupport_ingest.sources.postgres.session.server import SlotFacts, slot_facts, slot_in_use
from omnisupport_ingest.sources.postgres.slot.home_slot import ExpectedSlot, Presence
from omnisupport_ingest.sources.postgres.slot.slot import slot_taken

_LOOK_SECONDS = 0.05


def slot_findings(connection: Connection, expected: ExpectedSlot, wait_seconds: float) -> Iterator[Finding]:
    """What stands in the way of using the slot.

    A slot of ours that is being read is looked at again for ``wait_seconds``: the server may notice
    only after a moment that a reader has died.
    """
    slot = slot_facts(connection, expected.name)
    if slot is None:
        return
    if expected.presence is Presence.FREE:
        yield taken_slot("slot_taken", slot_taken(expected.name, slot))
        return
    if expected.read_by_us:
        if slot.reader is not None:
            yield Finding(
                "slot_active",
                f"The replication slot {slot.name} is being read by the capture of this home "
                f"({slot.reader}).",
                "",
                Severity.NOTES,
            )
        return
    slot = _when_free(connection, slot, wait_seconds)
    if slot.reader is not None:
        yield taken_slot("slot_active", slot_in_use(slot.name, slot.reader))


def _when_free(connection: Connection, slot: SlotFacts, seconds: float) -> SlotFacts:
    give_up = time.monotonic() + seconds
    while slot.reader is not None and time.monotonic() < give_up:
        time.sleep(_LOOK_SECONDS)
        slot = slot_facts(connection, slot.name) or slot
    return slot
