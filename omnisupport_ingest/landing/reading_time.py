"""For how long chunks of snapshots were being read, without the waiting for other tables and the pauses.

When the reading of a chunk began is not recorded. Two facts are, and the later one counts. One is the
server's clock at the chunk's low watermark; it can be much too early, as one mark serves several chunks while
the source writes no WAL or a long transaction is under way. The other is the landing of the chunks whose rows
were read before. Those are told by their ordinals, which are taken as rows are read; a chunk without rows has
none, and is taken to follow the landing before its own. Of chunks read side by side one may land a little
after the other began; where they are of one table that takes nothing from it, as its seconds count once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from datetime import datetime, timedelta
from itertools import accumulate

from omnisupport_ingest.landing.manifest import Manifest


class ReadingTime:
    """How long the chunks of one epoch took to read."""

    def __init__(self, landed: Iterable[Manifest], server_ahead: timedelta) -> None:
        """``landed``: all that has landed in the epoch of the snapshots of all tables.

        ``server_ahead``: by how much the server's clock is ahead of the clock that ``landed_at`` is of.
        """
        # A boundary has an ordinal from before the first row, and lands after the last one.
        chunks = [each for each in landed if each.chunk is not None and not each.chunk.boundary]
        with_rows = sorted((_last_ordinal(each), each.arrival.landed_at) for each in chunks if each.files)
        self._ordinals = [ordinal for ordinal, _ in with_rows]
        self._landed_by = list(accumulate((at for _, at in with_rows), max))
        self._landings = sorted(each.arrival.landed_at for each in chunks)
        self._server_ahead = server_ahead

    def seconds(self, chunks: Iterable[Manifest]) -> float:
        """The seconds in which one or more of ``chunks`` were being read, each second once."""
        total = timedelta(0)
        covered: datetime | None = None
        for begin, end in sorted((self._began(each), each.arrival.landed_at) for each in chunks):
            start = begin if covered is None else max(begin, covered)
            # Where a clock was set back a chunk ends before it begins.
            total += max(timedelta(0), end - start)
            covered = end if covered is None else max(covered, end)
        return total.total_seconds()

    def _began(self, batch: Manifest) -> datetime:
        """Return the latest time that is known to lie before the reading of a chunk began."""
        assert batch.chunk is not None, "a chunk of a snapshot"
        began = batch.chunk.clock - self._server_ahead
        before = self._landed_before(batch)
        return began if before is None else max(began, before)

    def _landed_before(self, batch: Manifest) -> datetime | None:
        """When the last of the chunks landed that had been read before ``batch`` was; None without one."""
        if batch.files:
            earlier = bisect_left(self._ordinals, min(file.first.ordinal for file in batch.files))
            return self._landed_by[earlier - 1] if earlier else None
        earlier = bisect_left(self._landings, batch.arrival.landed_at)
        return self._landings[earlier - 1] if earlier else None


def _last_ordinal(batch: Manifest) -> int:
    return max(file.last.ordinal for file in batch.files)
