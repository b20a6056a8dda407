"""Errors of sources that are read by queries."""

from __future__ import annotations

from omnisupport_ingest.errors import IngestError


class QueryRefused(IngestError):
    """The source, its definition or a contract does not allow reading by a cursor."""

    exit_code = 5


class AnotherDatabase(IngestError):
    """The connection leads to another database than the one of the saved cursors."""

    exit_code = 7


class QueryPaused(IngestError):
    """Somebody has paused the source."""
