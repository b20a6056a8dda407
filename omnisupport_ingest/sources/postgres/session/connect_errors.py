"""Errors for failed connections, each with its fix, recognised by the messages of the server and of libpq.

libpq gives no error code for a failed connection, only a text. Some servers translate their messages. An
unknown text gets a general fix.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from omnisupport_ingest.contracts.named_secrets import NamedSecret
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.sources.postgres.session.errors import SourceRefused, SourceUnavailable
from omnisupport_ingest.sources.postgres.session.quoting import identifier

_DSN = "{dsn}"
"""Placeholder in a fix for the setting that holds the connection string."""


@dataclass(frozen=True, slots=True)
class DatabaseLabel:
    """How messages name a database: its ``name``, and the ``setting`` that holds its connection string."""

    name: str
    setting: str


SOURCE = DatabaseLabel("the source", "OMNISUPPORT_SOURCE_DSN")


def label_of(dsn: str) -> DatabaseLabel:
    """Return how messages name the source at ``dsn``, and the setting or definition that holds it."""
    return DatabaseLabel(SOURCE.name, dsn.place) if isinstance(dsn, NamedSecret) else SOURCE


@dataclass(frozen=True, slots=True)
class _Known:
    """A failure whose message contains any of ``words``. ``refused``: a person must change something."""

    words: tuple[str, ...]
    fix: str
    refused: bool = True


_KNOWN = (
    _Known(
        ("password authentication failed", "no password supplied"),
        f"Correct the user in {_DSN}, and the password there or in ~/.pgpass (mode 0600, a line "
        "HOST:PORT:*:USER:PASSWORD). To set the password on the server, in psql: \\password {user}",
    ),
    _Known(
        ("unsupported startup parameter", "no such database", "server login has been failing"),
        f"Point {_DSN} at PostgreSQL itself: a connection pooler such as PgBouncer stands in between, and "
        "capture needs the server's own replication protocol and session.",
    ),
    _Known(
        (
            *("invalid sslmode", "invalid channel_binding", "invalid gssencmode"),
            *("invalid target_session_attrs", 'for connection option "'),
        ),
        f"Give this option in {_DSN} a value that it has: "
        "https://www.postgresql.org/docs/current/libpq-connect.html",
    ),
    _Known(
        ("server does not support SSL",),
        f"Turn TLS on at the server: ALTER SYSTEM SET ssl = on;  -- with its certificate in place. Or, on a "
        f"network that you trust, set sslmode=prefer in {_DSN}.",
    ),
    _Known(
        ("certificate verify failed", "root certificate file", "does not match host name"),
        f"Set sslrootcert in {_DSN} to the file of the authority that signed the server's certificate, and "
        "host to the name in the certificate.",
    ),
    _Known(
        ("valid client certificate",),
        f"Set sslcert and sslkey in {_DSN} to the certificate and key of this client.",
    ),
    _Known(
        ("must be superuser or replication role", "permission denied to start WAL sender"),
        "Run as a superuser: ALTER ROLE {user} REPLICATION;",
    ),
    _Known(("is not permitted to log in",), "Run as a superuser: ALTER ROLE {user} LOGIN;"),
    _Known(
        ("permission denied for database",),
        "Run as the owner of the database: GRANT CONNECT ON DATABASE {database} TO {user};",
    ),
    _Known(
        ("too many connections", "connection slots are reserved", "max_wal_senders"),
        "Close connections that nobody needs, or raise the limit that the message names.",
        refused=False,
    ),
    _Known(
        ("starting up", "shutting down", "not yet accepting connections", "in recovery mode"),
        "Wait until the server accepts connections.",
        refused=False,
    ),
    _Known(
        ("could not translate host name",),
        f"Correct the host name in {_DSN}, or make it known to this machine.",
        refused=False,
    ),
    _Known(
        ("Connection refused", "No such file or directory", "timeout expired", "timed out", "No route to"),
        f"Start the server, or correct host and port in {_DSN}; a firewall must let this machine through.",
        refused=False,
    ),
)
_GENERAL = f"Check host and port in {_DSN}, and that the server runs and accepts connections."
_MISSING = re.compile(r'(role|database) "[^"]*" does not exist')
_HBA_HOST = re.compile(r'host "([^"]+)"')


def connection_error(
    error: Exception, parameters: Mapping[str, str], label: DatabaseLabel = SOURCE
) -> IngestError:
    """Return our error for ``error``, raised while connecting to the database of ``label``.

    ``parameters``: the parts of the connection string. The result is ``SourceRefused`` if a person must
    change something, ``SourceUnavailable`` if the failure may pass by itself. It never contains a password.
    """
    kind, fix = _known(str(error), _with_variables(parameters), label)
    problem = f"Cannot connect to {destination(parameters, label.name)}: {first_line(error)}."
    return kind(problem, fix=fix.replace(_DSN, label.setting))


def _known(
    message: str, parameters: Mapping[str, str], label: DatabaseLabel
) -> tuple[type[SourceRefused | SourceUnavailable], str]:
    refusal = _refusal(message, parameters, label)
    if refusal is not None:
        return SourceRefused, refusal
    for known in _KNOWN:
        if any(words in message for words in known.words):
            return (SourceRefused if known.refused else SourceUnavailable), _filled(known.fix, parameters)
    return SourceUnavailable, _GENERAL


def destination(parameters: Mapping[str, str], server: str = SOURCE.name) -> str:
    """Return host, port, database and user of a connection string as a phrase for messages.

    What the string leaves out is named as libpq fills it in: from the service, else from its variables.
    """
    service = parameters.get("service") or os.environ.get("PGSERVICE")
    known = _with_variables(parameters)
    other = "default" if service is None else f"of the service {service}"
    host = known.get("host") or known.get("hostaddr") or f"the host {other}"
    port = known.get("port") or ("5432" if service is None else other)
    database, user = known.get("dbname", other), known.get("user", other)
    return f"{server} at {host}, port {port}, database {database}, user {user}"


def _with_variables(parameters: Mapping[str, str]) -> dict[str, str]:
    """Return ``parameters`` with what libpq takes from its variables; a service would come before these."""
    if "service" in parameters or os.environ.get("PGSERVICE"):
        return dict(parameters)
    names = {"host": "PGHOST", "port": "PGPORT", "dbname": "PGDATABASE", "user": "PGUSER"}
    return {name: os.environ[each] for name, each in names.items() if os.environ.get(each)} | {**parameters}


def first_line(error: Exception) -> str:
    """Return the first line of the message of ``error``, without a full stop. Later lines may quote data."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else "the connection is closed"


def _refusal(message: str, parameters: Mapping[str, str], label: DatabaseLabel) -> str | None:
    """Return the fix for a refusal that also depends on the connection string; None for any other failure."""
    if "password authentication failed" in message:
        # If TLS is preferred, libpq tries again without it, and the second refusal only confuses.
        return None
    if "pg_hba.conf" in message:
        return _let_in(message, parameters)
    if missing := _MISSING.search(message):
        if missing[1] == "database":
            return f"Correct the database name in {_DSN}, or create the database: " + _filled(
                "CREATE DATABASE {database};", parameters
            )
        how = "."
        if label.name == SOURCE.name:
            of = "" if label is SOURCE else " NAME, for the role of a log"
            how = f"; this prints the SQL: omnisupport-ingest source grants{of}"
        return f"Correct the user in {_DSN}, or create the role{how}"
    return None


def _let_in(message: str, parameters: Mapping[str, str]) -> str:
    host = _HBA_HOST.search(message)
    address = "samehost" if host is None else f"{host[1]}/{128 if ':' in host[1] else 32}"
    kind = "local" if host is None or host[1] == "[local]" else "host"
    where = "" if kind == "local" else f" {address}"
    line = f"{kind} {parameters.get('dbname', 'all')} {parameters.get('user', 'all')}{where} scram-sha-256"
    allow = (
        f"add this line to the server's pg_hba.conf, above the one that rejects: {line}"
        "  -- then SELECT pg_reload_conf();"
    )
    if "no encryption" in message and parameters.get("sslmode") in ("disable", "allow"):
        return f"Set sslmode=require in {_DSN}: the server takes no unencrypted connection. Or {allow}"
    return allow[0].upper() + allow[1:]


def _filled(fix: str, parameters: Mapping[str, str]) -> str:
    user, database = parameters.get("user"), parameters.get("dbname")
    return fix.replace("{user}", identifier(user) if user else "<user>").replace(
        "{database}", identifier(database) if database else "<database>"
    )
