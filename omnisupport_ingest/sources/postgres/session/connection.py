"""Opens connections to the source, with every setting pinned that decides how values become text.

The snapshot reads values over a normal connection, the stream over a replication connection. Both must write
a value as the same text. So both get the same settings from here, whatever the defaults of the server, the
database or the role are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg2
from psycopg2.extensions import connection as Connection
from psycopg2.extensions import make_dsn, parse_dsn
from psycopg2.extras import LogicalReplicationConnection

from omnisupport_ingest.contracts.named_secrets import NamedSecret
from omnisupport_ingest.sources.postgres.session.connect_errors import (
    DatabaseLabel,
    connection_error,
    first_line,
    label_of,
)
from omnisupport_ingest.sources.postgres.session.errors import BadDsn, SourceUnavailable
from omnisupport_ingest.sources.postgres.session.silence import (
    DEFAULT_SECONDS,
    Awaited,
    AwaitedCursor,
    AwaitedReplicationCursor,
    Silence,
)

VALUE_SETTINGS: dict[str, str] = {
    "DateStyle": "ISO",
    "IntervalStyle": "postgres",
    "TimeZone": "UTC",
    "extra_float_digits": "3",
    "bytea_output": "hex",
    "lc_monetary": "C",
    "xmlbinary": "base64",
    # Decide whether names of types, and of objects that a value refers to (``regclass``), are quoted and have
    # a schema.
    "search_path": "public",
    "quote_all_identifiers": "off",
}
"""Settings that decide how PostgreSQL writes values as text; recorded with each epoch."""

QUOTING_SETTINGS: dict[str, str] = {
    # With "off" a backslash would begin an escape in the strings that ``quoting.literal`` writes.
    "standard_conforming_strings": "on",
    # With "off" the NULL in the literal of an array (a key, for example) would be a text.
    "array_nulls": "on",
    # With "on" the ``= NULL`` in a row filter that is read back would become ``IS NULL``.
    "transform_null_equals": "off",
}
"""Settings that decide how PostgreSQL reads the SQL that we write. Settings for strings with escapes
(``E'…'``: ``backslash_quote``, ``escape_string_warning``) and for XML (``xmloption``) are left out, because
we write neither. A setting of the connection overrides those of ``ALTER ROLE``, ``ALTER DATABASE`` and the
server's files."""

_SESSION_SETTINGS: dict[str, str] = {
    # Reading a large table, or waiting for a slot, may take longer than a role's default allows.
    "statement_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    # A row-level security policy must make the read fail, never hide rows.
    "row_security": "off",
}

_SQL_SETTINGS: dict[str, str] = {
    # A long wait for a table lock is reported, and capture is started again. Without a limit, a waiting
    # statement could not be stopped. Making a slot waits for transactions, which this limit does not concern.
    "lock_timeout": "10s",
}

_NEWER_TIMEOUTS: tuple[tuple[int, str], ...] = (
    (140000, "idle_session_timeout"),
    (170000, "transaction_timeout"),
)
"""Newer timeouts that must not end a long read or the decoding of a large transaction, by server version."""

_DEFAULTS: dict[str, str] = {
    "connect_timeout": "10",
    # A server that vanishes without closing the connection is noticed in about a minute.
    "keepalives_idle": "30",
    "keepalives_interval": "10",
    "keepalives_count": "3",
}

_SILENCE = "tcp_user_timeout"
"""Parameter of a connection string: how long the server may be silent, in milliseconds. libpq uses it to
limit the time until sent data is acknowledged. ``silence`` handles a server that sends nothing."""


def with_silence(dsn: str, seconds: float) -> str:
    """Return ``dsn`` with ``seconds`` as the tolerated silence, unless it sets one itself.

    A ``dsn`` that cannot be read is returned unchanged; connecting with it raises ``BadDsn``.
    """
    try:
        parameters = dsn_parts(dsn)
    except BadDsn:
        return dsn
    return at_place_of(dsn, make_dsn(**({_SILENCE: max(1, round(seconds * 1000))} | parameters)))


def at_place_of(dsn: str, changed: str) -> str:
    """Return ``changed``, which was made from ``dsn``, so that messages name it as they name ``dsn``."""
    return NamedSecret(changed, dsn.place) if isinstance(dsn, NamedSecret) else changed


def connect(
    dsn: str, *, application_name: str = "omnisupport-ingest", label: DatabaseLabel | None = None
) -> Connection:
    """Open a connection for SQL, in autocommit.

    Raises ``BadDsn``, ``SourceRefused`` or ``SourceUnavailable``; they name the database by ``label`` (None:
    as a source).
    """
    return _connect(dsn, application_name, {}, replication=False, label=label)


def connect_replication(
    dsn: str, *, application_name: str = "omnisupport-ingest", decoding_memory: int | None = None
) -> Connection:
    """Open a connection to the walsender of the database in ``dsn`` (replication commands and SQL).

    ``decoding_memory``: bytes that the server may use for transactions that it decodes (65,536 or more);
    None: the server's own setting. Raises as ``connect`` does.
    """
    more = {} if decoding_memory is None else {"logical_decoding_work_mem": f"{decoding_memory // 1024}kB"}
    return _connect(dsn, application_name, more, replication=True)


@contextmanager
def source_errors(doing: str) -> Iterator[None]:
    """Turn operational errors into ``SourceUnavailable``. ``doing``: completes "while …" in its message."""
    try:
        yield
    except (psycopg2.OperationalError, psycopg2.InterfaceError) as error:
        raise SourceUnavailable(
            f"The source database failed while {doing}: {first_line(error)}.",
            fix="Start the database again if it is down, or act on its message; capture then continues "
            "where landing ends.",
        ) from error


class _SqlConnection(Connection):  # type: ignore[misc]  # psycopg2 ships no types
    """A connection whose ``commit`` and ``rollback`` are watched for silence, as its cursors are."""

    silence: Silence
    label: DatabaseLabel

    def commit(self) -> None:
        with Awaited(self, self.silence):
            super().commit()

    def rollback(self) -> None:
        with Awaited(self, self.silence):
            super().rollback()


class _ReplicationConnection(LogicalReplicationConnection):  # type: ignore[misc]
    silence: Silence
    label: DatabaseLabel


def _connect(
    dsn: str,
    application_name: str,
    more: dict[str, str],
    *,
    replication: bool,
    label: DatabaseLabel | None = None,
) -> Connection:
    label = label or label_of(dsn)
    dsn_parameters = dsn_parts(dsn, label)
    pinned = _SESSION_SETTINGS | ({} if replication else _SQL_SETTINGS) | more
    parameters = _DEFAULTS | dsn_parameters
    parameters["options"] = _options(dsn_parameters, VALUE_SETTINGS | QUOTING_SETTINGS | pinned)
    parameters["client_encoding"] = "UTF8"
    parameters["application_name"] = application_name
    kind = _ReplicationConnection if replication else _SqlConnection
    try:
        connection = kind(make_dsn(**parameters))
    except psycopg2.OperationalError as error:
        raise connection_error(error, dsn_parameters, label) from None
    connection.silence = Silence(int(dsn_parameters.get(_SILENCE, "0")) / 1000 or DEFAULT_SECONDS, parameters)
    connection.label = label
    connection.cursor_factory = AwaitedReplicationCursor if replication else AwaitedCursor
    if not replication:
        # A replication connection is in autocommit from the start.
        connection.autocommit = True
    _lift_newer_timeouts(connection)
    return connection


def writer_dsn(dsn: str) -> str:
    """Return ``dsn`` with the pinned settings for values and quoting, for a program that writes to the
    source.

    Names and texts then mean the same on every server. Raises ``BadDsn``.
    """
    parameters = dsn_parts(dsn)
    return str(
        make_dsn(**(parameters | {"options": _options(parameters, VALUE_SETTINGS | QUOTING_SETTINGS)}))
    )


def connect_writer(dsn: str) -> Connection:
    """Open a connection for a program that writes to the source, in transactions that the program commits.

    Raises ``BadDsn``, ``SourceRefused`` or ``SourceUnavailable``.
    """
    try:
        return psycopg2.connect(writer_dsn(dsn))
    except psycopg2.OperationalError as error:
        raise connection_error(error, dsn_parts(dsn), label_of(dsn)) from None


def _options(parameters: dict[str, str], pinned: dict[str, str]) -> str:
    options = " ".join(f"-c {name}={value}" for name, value in pinned.items())
    return f"{parameters.get('options', '')} {options}".strip()


def _lift_newer_timeouts(connection: Connection) -> None:
    """Lift timeouts that only newer servers know. As options, an older server would refuse them."""
    known = [name for since, name in _NEWER_TIMEOUTS if connection.server_version >= since]
    if known:
        with source_errors("setting up a session"), connection.cursor() as cursor:
            cursor.execute("SELECT " + ", ".join(f"set_config('{name}', '0', false)" for name in known))


def dsn_parts(dsn: str, label: DatabaseLabel | None = None) -> dict[str, str]:
    """Return the parts of ``dsn``. Raises ``BadDsn`` without quoting it: any part may hold a password.

    ``label``: how the error names the database, as in ``connect``.
    """
    label = label or label_of(dsn)
    try:
        parameters: dict[str, str] = parse_dsn(dsn)
    except psycopg2.ProgrammingError:
        parameters = {"port": "unreadable"}
    # A password with an unencoded "/" or "@" slips into the port, the host or the database.
    ports = parameters.get("port", "5432").split(",")
    slipped = any("@" in parameters.get(name, "") for name in ("host", "port", "dbname"))
    if slipped or not all(port.isdigit() for port in ports):
        raise BadDsn(
            f"The connection string of {label.name} ({label.setting}) cannot be read.",
            fix="Write it as postgresql://user@host:5432/database or host=… dbname=… user=…, with "
            "special characters percent-encoded in the first form and quoted in the second.",
        ) from None
    return parameters


def one_row(connection: Connection, query: str, parameters: tuple[object, ...] | None = None) -> Any:
    """Return the first row of ``query`` as a tuple; None if there is no row. Raises psycopg2's errors."""
    with connection.cursor() as cursor:
        # No failpoint: a SELECT, put together elsewhere.
        cursor.execute(query, parameters)
        return cursor.fetchone()
