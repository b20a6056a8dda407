"""Decide whether an event is late or too late, from facts that were frozen when its batch landed.

Judging uses it. The verdict depends on the watermark that the batch found, not on today's: events that landed
in time are ordinary even if they are processed hours later, when their window is closed.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta

from omnisupport_ingest.contracts.model import DEFAULT_ALLOWED_LATENESS, TableContract

ALWAYS_REPLAYED = frozenset("rb")
"""Operations that are never too late: nothing newer than a snapshot row is known of its row."""


def closes_at(window_end: datetime, allowed: timedelta) -> datetime:
    """Return the watermark at which a window closes."""
    return window_end + allowed


def is_late(watermark_before: datetime | None, window_end: datetime, allowed: timedelta) -> bool:
    """Whether the event's window was closed, by the watermark before its batch."""
    return watermark_before is not None and watermark_before >= closes_at(window_end, allowed)


def is_too_late(watermark_before: datetime | None, source_ts: datetime, longest: timedelta) -> bool:
    """Whether the event is further behind the watermark before its batch than its contract allows
    (``longest``)."""
    return watermark_before is not None and watermark_before - source_ts > longest


def allowed_of_source(contracts: Iterable[TableContract]) -> timedelta:
    """Return how long after its end a window of the source stays open: the longest time that a contract
    allows."""
    return max((each.allowed_lateness for each in contracts), default=DEFAULT_ALLOWED_LATENESS)
