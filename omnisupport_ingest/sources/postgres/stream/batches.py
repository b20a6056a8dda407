"""Cutting the stream into batches that chain: each begins exactly where the one before it ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta

import numpy as np

from omnisupport_ingest.contracts.names import TableName
from omnisupport_ingest.landing.manifest import Manifest, RelationVersion, StreamSpan
from omnisupport_ingest.landing.names import stream_batch_id
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.landing.writer import BatchWriter, EventBlock
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.sources.postgres.protocol.change_block import ChangeBlock
from omnisupport_ingest.sources.postgres.protocol.frames import Transactions
from omnisupport_ingest.sources.postgres.protocol.pgoutput import Begin, Commit, begin_of
from omnisupport_ingest.windows import MAX_AHEAD, OUT_OF_RANGE, WindowGrid

_ONE_SIDE = MAX_AHEAD // timedelta(microseconds=1)
"""Microseconds between two times out of range that are both before the first window, or both too far ahead:
all windows together are longer.
"""


def by_window(
    transactions: Transactions, window_of: Callable[[Begin], str]
) -> Iterator[tuple[str, Transactions]]:
    """Yield ``transactions`` in their order, each time as many as are of one window, with the window.

    Neighbours may be of the same one.
    """
    count, micros = transactions.total, transactions.commit_micros
    lowest, highest = int(micros.argmin()), int(micros.argmax())
    windows = {window_of(begin_of(transactions, each)) for each in (lowest, highest)}
    # Windows follow one another in time: what lies between two times of a window is of it. The times that are
    # out of range lie on both sides of all windows, and farther apart.
    if len(windows) == 1 and (OUT_OF_RANGE not in windows or micros[highest] - micros[lowest] < _ONE_SIDE):
        yield windows.pop(), transactions
        return
    yield from by_window(transactions.between(0, count // 2), window_of)
    yield from by_window(transactions.between(count // 2, count), window_of)


class StreamBatches:
    """The end of the durable chain, and the open batch on top of it, if any."""

    def __init__(
        self, store: LandingStore, grid: WindowGrid, epoch: int, end_of_chain: Lsn, settings: Settings
    ) -> None:
        self.end = end_of_chain
        """Everything that committed below this LSN is durable in landing."""
        self.relations: dict[TableName, RelationVersion] = {}
        """The schemas of tables as the stream last described them; every batch records them."""
        self.in_transaction = False
        self.recovered_from: Lsn | None = None
        """What the next batch records of a recovery (see ``StreamSpan``)."""
        self.meanwhile: Callable[[], None] = lambda: None
        """Called about once a second while ``add``, ``seal`` or ``seal_idle`` waits for the disk."""
        self._store, self._grid, self._epoch = store, grid, epoch
        self._max_bytes, self._max_seconds = settings.batch_max_bytes, settings.batch_max_seconds
        self._skew = timedelta(seconds=settings.max_clock_skew_seconds)
        self._writer: BatchWriter | None = None
        self._opened = 0.0
        self._first: Begin | None = None
        self._last: Begin | None = None
        self._received_end = end_of_chain

    @property
    def pending(self) -> bool:
        """Whether transactions, or parts of one, are received and not durable."""
        return self._writer is not None

    @property
    def received_end(self) -> Lsn:
        """The end of the last transaction received."""
        return self._received_end

    def begin(self, transaction: Begin) -> None:
        """Begin a transaction; opens a batch if none is open."""
        if self._writer is None:
            self._writer = self._open()
            self._opened = time.monotonic()
            self._first = transaction
        self._last = transaction
        self.in_transaction = True

    def window_of(self, transaction: Begin) -> str:
        """Return the window of a transaction."""
        assert self._writer is not None
        return self._writer.window_of(transaction.commit_ts)

    def add(self, changes: ChangeBlock) -> None:
        """Add changes of transactions that began since the batch was opened, all of one window."""
        if changes.rows:
            assert self._writer is not None, "a change outside a transaction"
            highest = changes.highest_ts
            window = self._writer.window_of(highest)
            self._writer.add_block(EventBlock(window, changes.rows, changes.size, highest, changes.table))

    def commit(self, transaction: Commit) -> None:
        """End a transaction: the batch may be cut here."""
        self._received_end = Lsn(transaction.end_lsn)
        self.in_transaction = False

    def due(self, collected: int) -> bool:
        """Return whether the open batch, with ``collected`` more bytes, is large or old enough to be cut."""
        writer = self._writer
        return writer is not None and (writer.bytes + collected >= self._max_bytes or self.seconds_left <= 0)

    def fitting(self, transactions: Transactions, collected: int, until: Lsn | None) -> int:
        """Return how many of ``transactions`` the open batch takes: up to and with the first that makes it
        large enough, with ``collected`` more bytes, or that ends at or above ``until``.
        """
        assert self._writer is not None
        rows, count = transactions.rows, transactions.total
        sizes = np.concatenate((np.zeros(1, np.int64), np.cumsum(rows.ends - rows.starts)))
        sizes = sizes[np.append(transactions.firsts[1:], len(rows.starts))]
        fitting = int(np.searchsorted(sizes, self._max_bytes - self._writer.bytes - collected)) + 1
        if until is not None:
            fitting = min(fitting, int(np.searchsorted(transactions.end_lsns, until.value)) + 1)
        return min(fitting, count)

    @property
    def seconds_left(self) -> float:
        """Seconds until the open batch reaches its age."""
        return self._opened + self._max_seconds - time.monotonic()

    def seal(self) -> Manifest:
        """Land the open batch, which must end at a commit. Returns once it is durable."""
        writer, first, last = self._writer, self._first, self._last
        assert writer is not None and first is not None and last is not None and not self.in_transaction
        span = StreamSpan(
            previous_end_lsn=self.end,
            end_lsn=self._received_end,
            start_lsn=Lsn(first.commit_lsn),
            last_commit_lsn=Lsn(last.commit_lsn),
            last_xid=last.xid,
            first_commit_ts=first.commit_ts,
            last_commit_ts=last.commit_ts,
            recovered_from=self.recovered_from,
        )
        return self._land(writer, span, None)

    def seal_idle(self, end: Lsn, clock: datetime | None) -> Manifest:
        """Land an empty batch up to ``end``: everything that the source has below it has landed.

        ``clock``: a server time up to which this is known, for the watermark, or None.
        """
        assert not self.pending, "an idle stretch begins where everything received is durable"
        self._received_end = end
        span = StreamSpan(self.end, end, None, None, None, None, None, self.recovered_from)
        return self._land(self._open(), span, clock)

    def abandon(self) -> None:
        """Discard what is not durable; the source sends it again."""
        if self._writer is not None:
            self._writer.abandon()
            self._writer = None

    def _open(self) -> BatchWriter:
        batch_id = stream_batch_id(self._epoch, self.end)
        writer = BatchWriter(self._store, self._grid, self._epoch, batch_id)
        writer.meanwhile = self.meanwhile
        return writer

    def _land(self, writer: BatchWriter, span: StreamSpan, clock: datetime | None) -> Manifest:
        self._writer = writer
        manifest = writer.seal(
            stream=span,
            relations=tuple(self.relations[name] for name in sorted(self.relations)),
            confirmed_clock=clock,
            max_clock_skew=self._skew,
        )
        self._writer = None
        self.end = span.end_lsn
        self.recovered_from = None
        return manifest
