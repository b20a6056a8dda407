"""The slot that a pass leaves on the source: what it holds there, and how to be rid of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omnisupport_ingest.home import Home
    from omnisupport_ingest.settings import Settings

DROP = "omnisupport-ingest source drop"
"""The command that removes slot and publication."""


@dataclass(frozen=True, slots=True)
class SlotLeft:
    """``retained_bytes``: WAL that the server keeps for the slot now. ``safe_bytes``: WAL that may still be
    written before the server gives the slot up, null if it never does. ``remove_with``:
    the command that drops it."""

    name: str
    retained_bytes: int
    safe_bytes: int | None
    remove_with: str = DROP

    @property
    def told(self) -> str:
        """The same in words."""
        limit = (
            "The server sets no limit to that (max_slot_wal_keep_size), so a forgotten slot fills its disk."
            if self.safe_bytes is None
            else f"After {size_text(self.safe_bytes)} more (max_slot_wal_keep_size) the server gives the "
            "slot up, which leaves a hole."
        )
        return (
            f"The replication slot {self.name} stays on the server, for the next pass to go on from. Until "
            f"then the server keeps all WAL from there, {size_text(self.retained_bytes)} now. {limit} If "
            f"there is no next pass, remove it: {self.remove_with}"
        )


def slot_left(settings: Settings, home: Home) -> SlotLeft | None:
    """The slot of ``settings`` on the source; none if it is not there."""
    from omnisupport_ingest.sources.postgres.session.connection import connect
    from omnisupport_ingest.sources.postgres.session.dsn import source_dsn
    from omnisupport_ingest.sources.postgres.session.server import slot_facts

    connection = connect(source_dsn(settings, home))
    try:
        slot = slot_facts(connection, settings.slot)
    finally:
        connection.close()
    return None if slot is None else SlotLeft(slot.name, slot.retained_bytes or 0, slot.safe_bytes)


def size_text(number: int) -> str:
    """``number`` of bytes for a person."""
    size = float(number)
    for unit in ("bytes", "kB", "MB"):
        if size < 1024:
            return f"{size:,.0f} {unit}"
        size /= 1024
    return f"{size:,.1f} GB"
