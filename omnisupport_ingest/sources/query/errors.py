"""Errors of sources that are read by queries."""

from __future__ import annotations

from omnisupport_ingest.errors import IngestError


class QueryRefused(IngestError):
    """A table cannot be read by its cursor as contract, definition and database are now.

    Fix: Correct what the message names, then sync again.
    """

    exit_code = 5


class AnotherDatabase(IngestError):
    """The connection leads to another database than that of the saved cursors.

    Fix: Correct the connection. If the database was moved or restored, read it anew: ``omnisupport-ingest
    sync NAME --full-refresh "why"``.
    """

    exit_code = 7


class QueryPaused(IngestError):
    """Somebody has paused a source that is read by a cursor.

    Fix: End the pause: ``omnisupport-ingest source resume NAME``.
    """
