"""The position of a Debezium event, and how it is made.

``commit_lsn`` is ``source.sequence[0]``, the end of the transaction that committed before the event's own, or
0 where the connector gives none. ``ordinal`` is ``source.lsn`` in the upper 49 bits and
``transaction.total_order`` (0 if there is none) in the lower 14.

Why this is the order of a row's changes: a change of a row waits for the lock of the transaction that changed
the row before. An insert waits in the unique index for the transaction that holds its key. A truncate waits
for all. So of two changes of one key, the one that committed first has the lower LSN, and ``sequence[0]``,
which never falls along the stream, agrees. (A deferrable key may break this, so tables with one must not come
this way.) Changes of *different* keys may be in another order, which does not affect any fold. Several rows
may share one LSN (a row that changes its key, a COPY): their ``total_order``s are neighbours, fewer than
2^14, so the lower bits keep them apart.

A row that a snapshot read is not a change and waits for no lock: a transaction that was in progress has lower
LSNs and commits after. ``sequence[0]`` tells: what commits later has the higher one. So a row of an
incremental snapshot stands where the stream had it. A row of the connector's first snapshot has no
``sequence[0]``, and neither has the first transaction after it, which may have been in progress; so such a
row gets a negative ordinal, its LSN still in the upper bits: below every change, as nothing of the stream
came before it.
"""

from __future__ import annotations

from omnisupport_ingest.sources.debezium.faults import LineFault

TRANSACTION, LSN, TIME = "transaction", "lsn", "time"
"""What orders the events of a source: log position and order in the transaction, log position alone, or the
commit time alone."""

BINLOG, CHANGE_LSN = "binlog", "change_lsn"
"""What orders the events of other connectors: MySQL's binary log, SQL Server's log."""

ARRIVAL = "arrival"
"""Events are ordered as they come in their files or their partition; a definition says so."""

ORDER_BITS = 14
LSN_LIMIT = 1 << 49
SNAPSHOT_BASE = -(1 << 63)
"""Added to the ordinals of rows of a first snapshot, so that they stand below every change."""


def packed(upper: int, total_order: int | None) -> int:
    """Return ``upper`` (an LSN, or milliseconds) and the lower bits of ``total_order`` as one ordinal."""
    if not 0 <= upper < LSN_LIMIT:
        raise LineFault(
            "its source.lsn (or its time) does not fit 49 bits, which is what a position has room for",
            "Land events of a log of less than 512 TiB; a wrong LSN must be corrected where it was made.",
        )
    return (upper << ORDER_BITS) | ((total_order or 0) & ((1 << ORDER_BITS) - 1))


def order_of(lsn: int | None, total_order: int | None) -> str:
    """Return the order of an event with these facts."""
    if lsn is None:
        return TIME
    return LSN if total_order is None else TRANSACTION


def lsn_in(ordinal: int) -> int:
    """Return the LSN that ``packed`` put into ``ordinal``, which may be of a change or of a snapshot row."""
    return (ordinal - SNAPSHOT_BASE if ordinal < 0 else ordinal) >> ORDER_BITS
