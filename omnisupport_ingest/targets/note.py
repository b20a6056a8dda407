"""The note of a target: what the last sync left there, in one table per schema.

Schema and table are made in a short transaction of their own, under a lock of the schema. So two targets of
one schema that nobody has synced yet do not wait for each other.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from psycopg2.extensions import connection as Connection

from omnisupport_ingest.contracts.model import TableContract, TargetPolicy
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.sources.postgres.session.quoting import identifier, literal, qualified
from omnisupport_ingest.targets.columns import TargetColumn
from omnisupport_ingest.targets.lake_rows import CurrentState

NOTES = "_omnisupport_targets"
"""The table, in the schema of a target, that records which version of the lake each target has."""

_TYPES = "types"
_COLUMNS = (
    "table_name text PRIMARY KEY, source text NOT NULL, contract text NOT NULL, table_id text NOT NULL,"
    " delta_version bigint NOT NULL, entry text NOT NULL, position text NOT NULL,"
    f" watermark timestamp with time zone, synced_at timestamp with time zone NOT NULL, {_TYPES} jsonb"
)


@dataclass(frozen=True, slots=True)
class SyncRecord:
    """What a target records of its last sync: the version of the dimension, and its position.

    ``types``: the columns that the sync wrote, with their types; None in the note of an older program.
    """

    table_id: str
    version: int
    entry: str
    position: str
    watermark: datetime | None
    synced_at: datetime
    source: str
    contract: str
    types: dict[str, str] | None

    def is_retyped(self, columns: Sequence[TargetColumn]) -> bool:
        """Return whether the sync wrote one of ``columns`` with another type, or did not write it."""
        return self.types is not None and any(self.types.get(each.name) != each.pg_type for each in columns)


def prepare_notes(connection: Connection, policy: TargetPolicy) -> None:
    """Make the schema of the target and its table of notes as they must be, and commit that."""
    notes = qualified(policy.schema, NOTES)
    whole = (
        f"SELECT 1 FROM pg_attribute WHERE attrelid = to_regclass({literal(notes)}) AND attname = '{_TYPES}'"
    )
    with connection.cursor() as cursor:
        cursor.execute(whole)
        if cursor.fetchone() is None:
            # The first syncs of two targets do this one after the other: CREATE … IF NOT EXISTS alone would
            # fail when both run at once.
            lock = literal(f"omnisupport notes of {policy.schema}")
            cursor.execute(f"SELECT pg_advisory_xact_lock(hashtextextended({lock}, 0))")
            # No failpoint: if the process dies here, the next sync finds an empty table of notes or makes it.
            # A role that may not make schemas may use one that is there, so look first.
            cursor.execute(f"SELECT 1 FROM pg_namespace WHERE nspname = {literal(policy.schema)}")
            if cursor.fetchone() is None:
                cursor.execute(f"CREATE SCHEMA {identifier(policy.schema)}")
            cursor.execute(f"CREATE TABLE IF NOT EXISTS {notes} ({_COLUMNS})")
            cursor.execute(whole)
            if cursor.fetchone() is None:
                cursor.execute(f"ALTER TABLE {notes} ADD COLUMN {_TYPES} jsonb")
    connection.commit()


def read_note(cursor: Any, policy: TargetPolicy) -> SyncRecord | None:
    """Return what the target records of its last sync; None if it records nothing."""
    notes, table = qualified(policy.schema, NOTES), qualified(policy.schema, policy.table)
    cursor.execute(f"SELECT to_regclass({literal(notes)}), to_regclass({literal(table)})")
    if None in cursor.fetchone():
        return None
    # The table of an older program has no types.
    cursor.execute(
        "SELECT table_id, delta_version, entry, position, watermark, synced_at, source, contract,"
        f" to_jsonb(n) -> '{_TYPES}' FROM {notes} n WHERE table_name = {literal(policy.table)}"
    )
    row = cursor.fetchone()
    return None if row is None else SyncRecord(*row)


def commit_note(
    cursor: Any, contract: TableContract, policy: TargetPolicy, state: CurrentState, types: dict[str, str]
) -> None:
    """Record that the target has ``state``, in columns of ``types``, and commit the sync."""
    values = {
        "table_name": policy.table,
        "source": contract.source,
        "contract": contract.name,
        "table_id": state.snapshot.table_id,
        "delta_version": state.snapshot.version,
        "entry": state.entry,
        "position": state.position,
        "watermark": state.watermark,
        _TYPES: json.dumps(types),
    }
    names, new = ", ".join(values), ", ".join(f"excluded.{name}" for name in (*values, "synced_at"))
    with failpoint("target.commit", f"{policy.schema}.{policy.table}"):
        cursor.execute(
            f"INSERT INTO {qualified(policy.schema, NOTES)} ({names}, synced_at)"
            f" VALUES ({', '.join(['%s'] * len(values))}, now()) ON CONFLICT (table_name) DO UPDATE SET"
            f" ({names}, synced_at) = ROW ({new})",
            tuple(values.values()),
        )
        cursor.connection.commit()
