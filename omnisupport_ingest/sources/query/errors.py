"""What can be wrong with a source that is asked by queries."""

from __future__ import annotations

from omnisupport_ingest.errors import IngestError


class QueryRefused(IngestError):
    """The source, its definition or a contract is not fit to be read by a cursor."""

    exit_code = 5


class AnotherDatabase(IngestError):
    """The connection leads to another database than the one that the cursors are of."""

    exit_code = 7


class QueryPaused(IngestError):
    """Somebody has paused the source."""
