"""Errors of reading from the source database."""

from __future__ import annotations

from collections.abc import Mapping

from omnisupport_ingest.errors import IngestError


class BadDsn(IngestError):
    """A connection string cannot be read. It is never repeated: it may hold a password.

    Fix: Percent-encode special characters in a URL, or quote them in the form ``host=… dbname=…``.
    """

    exit_code = 2


class SourceUnavailable(IngestError):
    """The source cannot be reached, has ended the connection, or has fallen silent.

    Fix: Start the server, or see what stands between. A capture that follows tries again by itself, and goes
    on where landing ends.
    """

    exit_code = 4


class TableUnreadable(SourceUnavailable):
    """One table, or a row of it, cannot be read, and the others can.

    Fix: Act on the message, then ``omnisupport-ingest source snapshot TABLE``.

    ``table``: its full name.
    """

    def __init__(self, problem: str, *, fix: str, table: str) -> None:
        super().__init__(problem, fix=fix)
        self.table = table


class TableDropped(SourceUnavailable):
    """A table was dropped after capture had found it and before it was published, several times in a row.

    Fix: Start capture again: it looks again which tables there are.
    """


class SourceRefused(IngestError):
    """The source answers, and refuses the connection until a person has changed something: a password, a
    right, a database, a rule of ``pg_hba.conf``, TLS, a pooler, a standby.

    Fix: Change what the message names; ``omnisupport-ingest preflight`` checks again.
    """

    exit_code = 5


class PreflightFailed(IngestError):
    """The source, or a table of it, is not set up for capture.

    Fix: Run the SQL that the message lists; ``omnisupport-ingest preflight`` checks again.
    """

    exit_code = 5


class ColumnsNotSent(PreflightFailed):
    """The publication does not send columns that a contract names.

    Fix: Run the SQL that ``omnisupport-ingest preflight`` prints, or take the columns out of the contract.

    ``table``: its full name.
    """

    def __init__(self, problem: str, *, fix: str, table: str) -> None:
        super().__init__(problem, fix=fix)
        self.table = table


class SlotInUse(IngestError):
    """Another process reads the replication slot, or another home has made it.

    Fix: Stop that reader, or set ``OMNISUPPORT_SLOT`` to another name.
    """

    exit_code = 6


class CaptureRunning(IngestError):
    """Another process reads this source into this home already, or has not stopped yet.

    Fix: Leave it running; or stop it, and run the command again.
    """

    exit_code = 6


class CapturePaused(IngestError):
    """Somebody has paused the capture of this source into this home.

    Fix: End the pause: ``omnisupport-ingest source resume``.
    """


class CaptureRestarts(Exception):
    """Raised when capture has ended because a person requested a restart. The caller must run it again."""


class NotRestartable(IngestError):
    """A restart was requested, and no capture follows the source now, or it has not started again in time.

    Fix: See in ``omnisupport-ingest source status`` why it does not run; start it with ``omnisupport-ingest
    up``.
    """


class GapInSource(IngestError):
    """Nothing proves that the slot continues what has landed: changes may be missing. Nothing more lands.

    Fix: Find out what happened, then choose a repair (``omnisupport-ingest source repair --mode MODE``).
    """

    exit_code = 7


class AnotherSource(GapInSource):
    """The connection string leads to another server or database than the one that was captured.

    Fix: Correct ``OMNISUPPORT_SOURCE_DSN``. Choose a repair only if the source has moved for good: it is
    never repaired by itself.
    """


class SlotMoved(GapInSource):
    """The slot has gone on further than this home has landed, or stands where it never was: somebody else
    reads it, or batches are missing at the end of landing.

    Fix: See first that no copy of this home captures. Put missing batches back, or choose a repair: it is
    never repaired by itself.
    """


class NotOurSlot(GapInSource):
    """The slot of the epoch belongs to the home that this one is a copy of.

    Fix: Set ``OMNISUPPORT_SLOT`` to another name, and begin an epoch: ``omnisupport-ingest capture
    --new-epoch "a copy of another home"``.
    """


class TableMissedChanges(GapInSource):
    """Changes of single tables may be missing, or capture cannot follow these tables. It leaves them out, and
    the others go on.

    Fix: Correct what the message names, then ``omnisupport-ingest source snapshot TABLE --reason "what
    happened"``.

    ``reasons``: by the name of its contract, what is wrong with each table.
    """

    def __init__(self, problem: str, *, fix: str, reasons: Mapping[str, str]) -> None:
        super().__init__(problem, fix=fix)
        self.reasons = dict(reasons)


class SchemaChangeBlocked(IngestError):
    """The schema of a table has changed, and its contract says that a person decides first. Other tables go
    on.

    Fix: See ``omnisupport-ingest contracts changes``, correct the contract, then ``omnisupport-ingest source
    snapshot TABLE``.

    ``reasons``: what has changed, by the names of the contracts.
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
    """A row is larger than capture may take into memory, and there is no other table to go on with.

    Fix: Raise ``OMNISUPPORT_MAX_ROW_BYTES`` where there is memory for about five times as much, and start
    capture again. Nothing was confirmed, so nothing is lost.

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
    """The server sent something that the replication protocol does not allow at this point.

    Fix: Start capture again: it goes on where landing ends. If it comes again, see what stands between (a
    proxy, a pooler), and report it with the version of the server.
    """
