"""Cutting the stream into batches that chain: each begins exactly where the one before it ends."""

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


class _Landing(NamedTuple):
    """A batch that ends at ``end`` and is landing: ``done`` says when it is durable."""

    writer: BatchWriter
    end: Lsn
    done: Future[Manifest]


class StreamBatches:
    """The end of the durable chain; on top of it the batch that is landing, if one is, and the open batch, if
    one is.
    """

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
        """Called about once a second while ``add``, ``landed`` or ``seal_idle`` waits for the disk."""
        self._store, self._grid, self._epoch = store, grid, epoch
        self._max_bytes, self._max_seconds = settings.batch_max_bytes, settings.batch_max_seconds
        self._skew = timedelta(seconds=settings.max_clock_skew_seconds)
        self._threads = WriterThreads()
        self._landing: _Landing | None = None
        self._writer: BatchWriter | None = None
        self._opened = 0.0
        self._first: Begin | None = None
        self._last: Begin | None = None
        self._received_end = end_of_chain

    @property
    def pending(self) -> bool:
        """Whether a batch is open: transactions, or parts of one, are received and in no batch that lands."""
        return self._writer is not None

    @property
    def landing(self) -> bool:
        """Whether a batch is landing."""
        return self._landing is not None

    @property
    def last_end(self) -> Lsn:
        """Where the last batch ends, durable or landing, and the open one begins."""
        return self.end if self._landing is None else self._landing.end

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
            table = partial(changes.table, self._store.division_as_landed)
            self._writer.add_block(EventBlock(window, changes.rows, changes.size, highest, table))

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

    def seal(self) -> None:
        """Begin to land the open batch, which must end at a commit; no other may be landing.

        What is received meanwhile goes into the next one. ``landed`` says when it is durable.
        """
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
        self._writer = None
        self._land(writer, span, None)

    def landed(self, *, wait: bool) -> Manifest | None:
        """Return the batch that was landing, once: it is durable. None if there is none.

        None, too, if it is not durable yet, unless to ``wait``. Raises what landing it has raised.
        """
        if self._landing is None or not (wait or self._landing.done.done()):
            return None
        manifest = awaited(self._landing.done, self.meanwhile)
        self.end, self._landing = self._landing.end, None
        return manifest

    def seal_idle(self, end: Lsn, clock: datetime | None) -> Manifest:
        """Land an empty batch up to ``end``: everything that the source has below it has landed. Returns once
        it is durable.

        ``clock``: a server time up to which this is known, for the watermark, or None.
        """
        assert not self.pending, "an idle stretch begins where everything received has been sealed"
        self._received_end = end
        span = StreamSpan(self.end, end, None, None, None, None, None, self.recovered_from)
        self._land(self._open(), span, clock)
        manifest = self.landed(wait=True)
        assert manifest is not None
        return manifest

    def close(self) -> Manifest | None:
        """Discard what is open; the source sends it again. Returns as ``landed``, None if landing failed."""
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
