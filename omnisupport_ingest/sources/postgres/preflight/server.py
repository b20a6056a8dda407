"""Checks whether the server can do logical decoding, has capacity for one more reader, and has the slot free.

The session must be with PostgreSQL itself, not with a pooler, and a replication connection must be possible.
The slot must not exist, or must be ours.
"""

from __future__ import annotations

from collections.abc import Iterator

from psycopg2.extensions import connection as Connection

from omnisupport_ingest.sources.postgres.preflight.findings import Finding, Severity, taken_slot
from omnisupport_ingest.sources.postgres.session.connection import (
    QUOTING_SETTINGS,
    VALUE_SETTINGS,
    connect_replication,
    one_row,
)
from omnisupport_ingest.sources.postgres.session.errors import SlotInUse, SourceRefused, SourceUnavailable
from omnisupport_ingest.sources.postgres.session.quoting import identifier, literal
from omnisupport_ingest.sources.postgres.session.server import (
    STANDBY,
    slot_facts,
    standby_fix,
    wait_until_free,
)
from omnisupport_ingest.sources.postgres.slot.home_slot import ExpectedSlot, Presence
from omnisupport_ingest.sources.postgres.slot.slot import slot_taken


def session_findings(connection: Connection) -> Iterator[Finding]:
    """Yield signs of a pooler between us and the server."""
    to_postgres = f"Set host and port in {connection.label.setting} to PostgreSQL itself."
    (pid,) = one_row(connection, "SELECT pg_backend_pid()")
    if pid != connection.info.backend_pid:
        yield Finding(
            "pooler",
            f"A connection pooler such as PgBouncer answers in place of the server: the session runs in "
            f"process {pid}, the connection names process {connection.info.backend_pid}. It does not keep a "
            "session, or refuses replication.",
            to_postgres,
        )
    # A pooler may accept the settings of a connection and forget them. DateStyle has a second part, which is
    # ignored.
    changed = [
        name
        for name, value in (VALUE_SETTINGS | QUOTING_SETTINGS).items()
        if one_row(connection, "SELECT current_setting(%s)", (name,))[0].split(",")[0] != value
    ]
    if changed:
        yield Finding(
            "session_settings",
            f"The session does not keep the settings that it was opened with: {', '.join(changed)}. Values "
            "would be written as other text in the snapshot than in the stream, or read as others.",
            to_postgres,
        )


def replication_findings(dsn: str) -> Iterator[Finding]:
    """Yield a finding if no replication connection can be opened. A rule or a pooler may prevent it."""
    try:
        connection = connect_replication(dsn)
    except (SourceRefused, SourceUnavailable) as error:
        yield Finding(
            "replication_connection",
            f"SQL works, but a replication connection does not. {error.problem}",
            error.fix,
        )
        return
    connection.close()


OLDEST_VERSION = 13
"""The first version with ``publish_via_partition_root`` and with the slot's ``wal_status``."""

_PUBLICATION_FIX = {13: "14.18", 14: "14.18", 15: "15.13", 16: "16.9", 17: "17.5"}
"""By major version, the first release in which open transactions notice a changed publication (release notes
of May 2025, logical replication). Since version 18, every release does."""

_RESTART = "-- then restart PostgreSQL"
SUGGESTED_LIMIT = "50GB"
"""Suggested for ``max_slot_wal_keep_size`` if none is set. An order of magnitude, not a measurement."""


def server_findings(connection: Connection, slot: str) -> Iterator[Finding]:
    """Yield what is wrong with the server itself. ``slot``: the name of ours, which is not counted."""
    if connection.server_version < OLDEST_VERSION * 10_000:
        yield Finding(
            "server_version",
            f"The server is PostgreSQL {connection.server_version // 10_000}; capture needs "
            f"{OLDEST_VERSION} or newer.",
            f"Upgrade the server to PostgreSQL {OLDEST_VERSION} or newer (pg_upgrade).",
        )
    yield from minor_findings(connection.server_version)
    standby, wal_level, encoding = one_row(
        connection,
        "SELECT pg_is_in_recovery(), current_setting('wal_level'), current_setting('server_encoding')",
    )
    if standby:
        yield Finding("standby", STANDBY, standby_fix(connection))
    if wal_level != "logical":
        yield Finding(
            "wal_level",
            f"wal_level is {wal_level}; logical decoding needs logical.",
            f"ALTER SYSTEM SET wal_level = 'logical';  {_RESTART}",
        )
    if encoding == "SQL_ASCII":
        yield Finding(
            "encoding",
            "The database has the encoding SQL_ASCII, so its text cannot be read as UTF-8 with certainty.",
            "Dump the database and restore it into one created with ENCODING 'UTF8'.",
        )
    # Capture keeps one slot. A snapshot and a comparison each need another one for a short time.
    yield from _headroom(
        connection,
        "max_replication_slots",
        f"SELECT count(*) FROM pg_replication_slots WHERE slot_name <> {literal(slot)}",
    )
    yield from _headroom(
        connection,
        "max_wal_senders",
        "SELECT count(*) FROM pg_stat_replication WHERE application_name <> 'omnisupport-ingest'",
    )
    yield from _retention(connection)


def minor_findings(version: int) -> Iterator[Finding]:
    """Yield known data losses of the release ``version``, a number like ``server_version_num``."""
    major, minor = divmod(version, 10_000)
    fixed = _PUBLICATION_FIX.get(major)
    if fixed is not None and (major, minor) < tuple(map(int, fixed.split("."))):
        yield Finding(
            "server_release",
            f"PostgreSQL {major}.{minor} may not send changes of a table that is added to the publication "
            f"while a transaction writes to it: a fault of the server, which {fixed} mends.",
            "Upgrade the server to the newest release of its version. Until then, add a table only while "
            "nothing writes to it.",
            Severity.WARNS,
        )


def right_findings(connection: Connection) -> Iterator[Finding]:
    """Yield a finding if this role may not use replication."""
    user, may_replicate, on_rds = one_row(
        connection,
        "SELECT rolname::text, rolreplication OR rolsuper OR EXISTS (SELECT FROM pg_roles cloud"
        " WHERE cloud.rolname = 'rds_replication' AND pg_has_role(current_user, cloud.oid, 'MEMBER')),"
        " EXISTS (SELECT FROM pg_roles cloud WHERE cloud.rolname = 'rds_replication')"
        " FROM pg_roles WHERE rolname = current_user",
    )
    if not may_replicate:
        yield Finding(
            "replication_right",
            f"Role {user} may not use replication.",
            f"GRANT rds_replication TO {identifier(user)};"
            if on_rds
            else f"ALTER ROLE {identifier(user)} REPLICATION;",
        )


_NEEDED = 2
"""Slots, and senders, that capture has at the most."""


def _headroom(connection: Connection, setting: str, used_query: str) -> Iterator[Finding]:
    (limit,) = one_row(connection, f"SELECT current_setting({literal(setting)})::int")
    (used,) = one_row(connection, used_query)
    if limit - used < _NEEDED:
        yield Finding(
            setting,
            f"{setting} is {limit} and {used} are in use by others; capture needs {_NEEDED}.",
            f"ALTER SYSTEM SET {setting} = {used + _NEEDED + 2};  {_RESTART}",
        )


def _retention(connection: Connection) -> Iterator[Finding]:
    """Yield findings about settings for how long the server keeps WAL for an unread slot."""
    limit, idle = one_row(
        connection,
        "SELECT current_setting('max_slot_wal_keep_size'),"
        " nullif(current_setting('idle_replication_slot_timeout', true), '0')",
    )
    if limit == "-1":
        yield Finding(
            "max_slot_wal_keep_size",
            "max_slot_wal_keep_size is not set: WAL that is kept for a slot which nobody reads can fill the "
            "server's disk.",
            f"ALTER SYSTEM SET max_slot_wal_keep_size = '{SUGGESTED_LIMIT}';  -- what the disk can spare; "
            "then SELECT pg_reload_conf();",
            Severity.WARNS,
        )
    if idle:
        yield Finding(
            "idle_replication_slot_timeout",
            f"idle_replication_slot_timeout is {idle}: the server gives a slot up after so long without a "
            "reader, so a capture that stands still for longer must begin again with a snapshot.",
            "ALTER SYSTEM SET idle_replication_slot_timeout = 0;  -- then SELECT pg_reload_conf();",
            Severity.WARNS,
        )


def slot_findings(connection: Connection, expected: ExpectedSlot, wait_seconds: float) -> Iterator[Finding]:
    """Yield what prevents the use of the slot.

    If a slot of ours is being read, wait up to ``wait_seconds``: the server may need a moment to notice that
    a reader has died.
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
    try:
        wait_until_free(connection, slot.name, wait_seconds)
    except SlotInUse as error:
        yield taken_slot("slot_active", error)
