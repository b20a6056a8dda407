"""Divides the stream into batches that form a chain: each begins exactly where the one before ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import datetime, timedelta
from functools import partial
from typing import NamedTuple

import numpy as np

from omnisupport_ingest.contracts.names import TableName
from omnisupport_ingest.landing.manifest import Manifest, RelationVersion, StreamSpan
from omnisupport_ingest.landing.names import stream_batch_id
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.landing.writer import BatchWriter, Covered, EventBlock
from omnisupport_ingest.landing.writer_threads import WriterThreads, awaited
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.sources.postgres.protocol.change_block import ChangeBlock
from omnisupport_ingest.sources.postgres.protocol.frames import Transactions
from omnisupport_ingest.sources.postgres.protocol.pgoutput import Begin, Commit, begin_of
from omnisupport_ingest.windows import MAX_AHEAD, OUT_OF_RANGE, WindowGrid

_ALL_WINDOWS = MAX_AHEAD // timedelta(microseconds=1)
"""The span of all windows in microseconds. If two times are out of range and less than this apart, both are
before the first window, or both are after the last one."""


def by_window(
    transactions: Transactions, window_of: Callable[[Begin], str]
) -> Iterator[tuple[str, Transactions]]:
    """Divide ``transactions`` into groups of one window each; yield (window, group) in order.

    Two consecutive groups may have the same window. ``window_of``: returns the window of a transaction.
    """
    count, micros = transactions.total, transactions.commit_micros
    lowest, highest = int(micros.argmin()), int(micros.argmax())
    windows = {window_of(begin_of(transactions, each)) for each in (lowest, highest)}
    # If the lowest and the highest time are in the same window, so are all others. The exception is out of
    # range: one time may be before all windows, and the other after them.
    within = OUT_OF_RANGE not in windows or micros[highest] - micros[lowest] < _ALL_WINDOWS
    if len(windows) == 1 and within:
        yield windows.pop(), transactions
        return
    yield from by_window(transactions.between(0, count // 2), window_of)
    yield from by_window(transactions.between(count // 2, count), window_of)


class _Landing(NamedTuple):
    """A batch that ends at ``end`` and is landing. ``done`` completes when the batch is durable."""

    writer: BatchWriter
    end: Lsn
    done: Future[Manifest]


class StreamBatches:
    """The durable chain's end, the batch that is landing (if any), and the open batch (if any)."""

    def __init__(
        self, store: LandingStore, grid: WindowGrid, epoch: int, end_of_chain: Lsn, settings: Settings
    ) -> None:
        self.end = end_of_chain
        """Everything that committed below this LSN is durable in landing."""
        self.relations: dict[TableName, RelationVersion] = {}
        """The schemas of tables as the stream last described them. Every batch records them."""
        self.in_transaction = False
        self.recovered_from: Lsn | None = None
        """The recovery that the next batch records (see ``StreamSpan``); None if there was none."""
        self.meanwhile: Callable[[], None] = lambda: None
        """Called about once a second while ``add``, ``landed`` or ``seal_idle`` waits for the disk."""
        self._store, self._grid, self._epoch = store, grid, epoch
        self._max_bytes, self._max_seconds = settings.batch_max_bytes, settings.batch_max_seconds
        self._skew = timedelta(seconds=settings.max_clock_skew_seconds)
        self._threads = WriterThreads()
        self._landing: _Landing | None = None
        self._writer: BatchWriter | None = None
        self._opened_at = 0.0
        self._first_transaction: Begin | None = None
        self._last_transaction: Begin | None = None
        self._received_end = end_of_chain

    @property
    def pending(self) -> bool:
        """Whether a batch is open: a transaction began since the last batch was sealed."""
        return self._writer is not None

    @property
    def landing(self) -> bool:
        """Whether a batch is landing."""
        return self._landing is not None

    @property
    def last_end(self) -> Lsn:
        """The end of the last batch, whether durable or landing. The open batch begins here."""
        return self.end if self._landing is None else self._landing.end

    @property
    def received_end(self) -> Lsn:
        """The end of the last transaction received."""
        return self._received_end

    def begin(self, transaction: Begin) -> None:
        """Begin a transaction. Opens a batch if none is open."""
        if self._writer is None:
            self._writer = self._open()
            self._opened_at = time.monotonic()
            self._first_transaction = transaction
        self._last_transaction = transaction
        self.in_transaction = True

    def window_of(self, transaction: Begin) -> str:
        """Return the window of a transaction. A batch must be open."""
        assert self._writer is not None
        return self._writer.window_of(transaction.commit_ts)

    def add(self, changes: ChangeBlock) -> None:
        """Add changes of transactions that began since the batch was opened. All must be of one window."""
        if changes.rows:
            assert self._writer is not None, "a change outside a transaction"
            highest = changes.highest_ts
            window = self._writer.window_of(highest)
            table = partial(changes.table, self._store.divisions_as_landed)
            self._writer.add_block(EventBlock(window, changes.rows, changes.size, highest, table))

    def commit(self, transaction: Commit) -> None:
        """End a transaction. The batch may be sealed here."""
        self._received_end = Lsn(transaction.end_lsn)
        self.in_transaction = False

    def due(self, collected: int) -> bool:
        """Return whether the open batch, with ``collected`` more bytes, is large or old enough to seal."""
        writer = self._writer
        return writer is not None and (writer.bytes + collected >= self._max_bytes or self.seconds_left <= 0)

    def count_that_fits(self, transactions: Transactions, collected: int, until: Lsn | None) -> int:
        """Return how many of ``transactions`` go into the open batch.

        The last of these fills the batch, which gets ``collected`` more bytes too, or ends at or above
        ``until``.
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
        """Seconds until the open batch reaches its maximum age."""
        return self._opened_at + self._max_seconds - time.monotonic()

    def seal(self) -> None:
        """Start landing the open batch. It must end at a commit, and no other batch may be landing.

        Transactions received from now on go into the next batch. ``landed`` returns this one when it is
        durable.
        """
        writer, first, last = self._writer, self._first_transaction, self._last_transaction
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
        self._writer = None
        self._land(writer, span, None)

    def landed(self, *, wait: bool) -> Manifest | None:
        """Return the batch that was landing, once, if it is durable now; else None.

        ``wait``: wait until it is durable. Raises the error that landing it raised.
        """
        if self._landing is None or not (wait or self._landing.done.done()):
            return None
        manifest = awaited(self._landing.done, self.meanwhile)
        self.end, self._landing = self._landing.end, None
        return manifest

    def seal_idle(self, end: Lsn, clock: datetime | None) -> Manifest:
        """Land an empty batch that ends at ``end``; return it when it is durable.

        Everything that the source has below ``end`` must have landed. ``clock``: the server time up to which
        this is known, for the watermark; None if unknown.
        """
        assert not self.pending, "an idle stretch begins where everything received has been sealed"
        self._received_end = end
        span = StreamSpan(self.end, end, None, None, None, None, None, self.recovered_from)
        self._land(self._open(), span, clock)
        manifest = self.landed(wait=True)
        assert manifest is not None
        return manifest

    def close(self) -> Manifest | None:
        """Discard the open batch, which the source sends again. Return the landing batch if it is durable."""
        landed = None
        if self._landing is not None:
            if self._landing.done.exception() is None:
                landed = self.landed(wait=True)
            else:
                self._landing.writer.abandon()
                self._landing = None
        if self._writer is not None:
            self._writer.abandon()
            self._writer = None
        self._threads.close()
        return landed

    def _open(self) -> BatchWriter:
        batch_id = stream_batch_id(self._epoch, self.last_end)
        writer = BatchWriter(self._store, self._grid, self._epoch, batch_id)
        writer.share(self._threads)
        writer.meanwhile = self.meanwhile
        return writer

    def _land(self, writer: BatchWriter, span: StreamSpan, clock: datetime | None) -> None:
        assert self._landing is None, "the batch before is landing"
        covered = Covered(
            stream=span,
            relations=tuple(self.relations[name] for name in sorted(self.relations)),
            confirmed_clock=clock,
            max_clock_skew=self._skew,
        )
        self._landing = _Landing(writer, span.end_lsn, writer.begin_seal(covered))
        self.recovered_from = None
