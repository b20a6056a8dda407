"""The words of a manifest: what may be done about a fault of a delivery, and how a delivery is loaded.

The refusals of ``contracts/seed_manifest.schema.json`` say what a load mode cannot do about a kind of fault.
"""

from __future__ import annotations

from collections.abc import Mapping

ACCEPT, WARN, QUARANTINE, REJECT = ACTIONS = ("accept", "warn", "quarantine", "reject")
"""Policies, the mildest first. ``reject``: nothing of the delivery lands, and the command says why."""

FULL_SNAPSHOT, INCREMENTAL, BACKFILL = ROW_MODES = ("full_snapshot", "incremental_cursor", "backfill")
CDC, REPLAY = "cdc", "replay"
MODES = (*ROW_MODES, CDC, REPLAY)
"""Load modes: three whose files hold rows, one whose files hold Debezium events, one without files."""


OPTIONAL: Mapping[str, str] = {
    "license": REJECT,
    "duplicate_delivery": ACCEPT,
    "missing_file": REJECT,
}
"""What holds where a manifest does not name the kind of fault; the other kinds must be named."""
