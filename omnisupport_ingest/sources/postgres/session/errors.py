"""Errors of reading from the source database."""

from __future__ import annotations

from collections.abc import Mapping

from omnisupport_ingest.errors import IngestError


class BadDsn(IngestError):
    """The connection string of the source cannot be read. It is never repeated: it may hold a password."""

    exit_code = 2


class SourceUnavailable(IngestError):
    """The source cannot be reached, refuses the connection, or went away. Worth trying again later."""

    exit_code = 4


class TableUnreadable(SourceUnavailable):
    """One table, or a row of it, cannot be read, and the others can. ``table``: its full name."""

    def __init__(self, problem: str, *, fix: str, table: str) -> None:
        super().__init__(problem, fix=fix)
        self.table = table


class TableDropped(SourceUnavailable):
    """A table was dropped after capture had found it and before it was published. Worth looking again."""


class SourceRefused(IngestError):
    """The source answers and refuses the connection until a person has changed something.

    Reasons: a wrong password, a missing right or database, a rule of ``pg_hba.conf``, TLS, a pooler.
    """

    exit_code = 5


class PreflightFailed(IngestError):
    """The source is not set up for capture; the fix lists the SQL for every finding."""

    exit_code = 5


class ColumnsNotSent(PreflightFailed):
    """The publication does not send columns that a contract names. ``table``: its full name."""

    def __init__(self, problem: str, *, fix: str, table: str) -> None:
        super().__init__(problem, fix=fix)
        self.table = table


class SlotInUse(IngestError):
    """The replication slot belongs to another reader, or to another home."""

    exit_code = 6


class CaptureRunning(IngestError):
    """Another process holds the lease on capturing this source into this home."""

    exit_code = 6


class CapturePaused(IngestError):
    """Somebody has paused the capture of this source into this home."""


class CaptureRestarts(IngestError):
    """The capture has ended well because a person requested a restart; the caller starts it again."""


class NotRestartable(IngestError):
    """A restart was requested, and no capture follows the source now."""


class GapInSource(IngestError):
    """It cannot be proved that the slot continues what has landed: something may be missing."""

    exit_code = 7


class AnotherSource(GapInSource):
    """The connection string leads to another server or database than the one that was captured.

    Never repaired by itself: it may be a mistake.
    """


class SlotMoved(GapInSource):
    """The slot has gone on further than this home has landed, or stands where it never was.

    Never repaired by itself: a copy of this home may be reading it.
    """


class NotOurSlot(GapInSource):
    """The slot of the epoch belongs to the home that this one is a copy of."""


class TableMissedChanges(GapInSource):
    """Changes of single tables were not sent for a time, or do not fit their contracts. Others go on.

    ``tables``: the names of their contracts.
    """

    def __init__(self, problem: str, *, fix: str, tables: tuple[str, ...]) -> None:
        super().__init__(problem, fix=fix)
        self.tables = tables


class SchemaChangeBlocked(IngestError):
    """The schemas of tables have changed whose contracts want a person to decide first. Others go on.

    ``reasons``: what has changed, by the names of their contracts.
    """

    def __init__(self, reasons: Mapping[str, str]) -> None:
        super().__init__(
            " ".join(reasons.values()),
            fix="Look at the change (omnisupport-ingest contracts changes) and at what it means for the "
            "contract (omnisupport-ingest contracts propose TABLE). Then have the table read again, and "
            'capture takes it back: omnisupport-ingest source snapshot TABLE --reason "what was decided"',
        )
        self.reasons = dict(reasons)


class RowTooLarge(IngestError):
    """A row is larger than capture may take into memory.

    ``table``: its full name, empty for a message that is no row. ``size`` and ``limit`` in bytes.
    """

    def __init__(self, size: int, limit: int, table: str = "") -> None:
        subject = f"A row of {table}" if table else "A row or message"
        super().__init__(
            f"{subject} has {size:,} bytes as the source sends it; capture takes rows of up to {limit:,} "
            "(OMNISUPPORT_MAX_ROW_BYTES).",
            fix=f"Raise OMNISUPPORT_MAX_ROW_BYTES to {size} or more where there is memory for it, about "
            "five times as much, and start capture again: it goes on with this row, as nothing behind it "
            "was confirmed. To go on without the table, take it out of the publication and its contract "
            "away, and begin a new epoch, as what is in the log already is sent all the same: "
            'omnisupport-ingest capture --new-epoch "what happened"',
        )
        self.size, self.limit, self.table = size, limit, table


class ProtocolViolation(IngestError):
    """The server sent something that the replication protocol does not allow at this point."""
