"""Compute the arrival facts of a batch: above all the watermark, how far the source's commit times have come.

The watermark is a heuristic. PostgreSQL takes a commit's time before it writes the commit record, so an
earlier event may still follow; it is then late, and its window is replayed.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from omnisupport_ingest.landing.manifest import ArrivalFacts, Manifest
from omnisupport_ingest.windows import MAX_AHEAD


def stream_facts(
    previous: Manifest | None,
    epoch: int,
    commit_times: tuple[datetime, ...],
    *,
    confirmed_clock: datetime | None,
    landed_at: datetime,
    max_clock_skew: timedelta,
) -> ArrivalFacts:
    """Return the facts of a batch of ``epoch`` (of the stream, or of events from a file) after ``previous``.

    The watermark is ``min(max(highest commit time, confirmed_clock), landed_at) - max_clock_skew`` and never
    moves back within an epoch. A new epoch starts without it: its server may be restored from a backup, with
    clocks and commits in the past.

    Args:
        previous: the last batch of this kind from the source, of this epoch or an earlier one.
        commit_times: of the batch. A time too far ahead of ``landed_at`` cannot be right and does not count.
        confirmed_clock: a server clock up to which the caller knows that everything has landed; None: not
            known.
    """
    before = previous.arrival if previous is not None else None
    same_epoch = previous is not None and previous.epoch == epoch
    carried = before if same_epoch else None
    known = [moment for moment in commit_times if moment <= landed_at + MAX_AHEAD]
    if carried is not None and carried.highest_commit_ts is not None:
        known.append(carried.highest_commit_ts)
    highest = max(known, default=None)
    reached = [moment for moment in (highest, confirmed_clock) if moment is not None]
    watermark = min(max(reached), landed_at) - max_clock_skew if reached else None
    if carried is not None and carried.watermark is not None:
        watermark = max(carried.watermark, watermark) if watermark else carried.watermark
    return ArrivalFacts(
        landed_at=landed_at,
        watermark_before=before.watermark if before else None,
        watermark=watermark,
        highest_commit_ts_before=before.highest_commit_ts if before else None,
        highest_commit_ts=highest,
    )


def unchanged_facts(previous: Manifest | None, landed_at: datetime) -> ArrivalFacts:
    """Return the facts of a chunk: it keeps the watermark as it is."""
    if previous is None:
        return ArrivalFacts(landed_at, None, None, None, None)
    watermark, highest = previous.arrival.watermark, previous.arrival.highest_commit_ts
    return ArrivalFacts(landed_at, watermark, watermark, highest, highest)


def delivery_facts(reached: datetime | None, complete: datetime | None, landed_at: datetime) -> ArrivalFacts:
    """Return the facts of a delivery of rows without a cursor.

    The watermark is ``min(complete, landed_at)`` and never moves back. Such rows have no commit times.

    Args:
        reached: the highest watermark of the source before; None: it has none.
        complete: up to when the source is complete with the delivery; None: not known.
    """
    moment = None if complete is None else min(complete, landed_at)
    watermark = max((each for each in (reached, moment) if each is not None), default=None)
    return ArrivalFacts(landed_at, reached, watermark, None, None)
