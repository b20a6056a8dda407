"""When capture reads whole tables."""

from __future__ import annotations

from enum import StrEnum


class SnapshotMode(StrEnum):
    """``initial``: each table once in an epoch. ``when_needed``: also after a hole, by a new epoch.

    ``schema_only``: no rows by itself, only the form of each table. ``never``: nothing by itself.
    """

    INITIAL = "initial"
    WHEN_NEEDED = "when_needed"
    SCHEMA_ONLY = "schema_only"
    NEVER = "never"

    @property
    def reads_rows(self) -> bool:
        """Whether a table that this epoch has not read is read without being asked for."""
        return self in (SnapshotMode.INITIAL, SnapshotMode.WHEN_NEEDED)
