"""When an event is late, and when it is too late, from facts that were frozen as its batch landed.

The verdict depends on the watermark that the batch found, never on today's: after hours of downtime
events that landed in time are ordinary work, whatever is closed by now.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta

from omnisupport_ingest.contracts.model import DEFAULT_ALLOWED_LATENESS, TableContract

ALWAYS_REPLAYED = frozenset("rb")
"""Operations that are never too late: what a snapshot read is the newest that is known of its rows."""


def closes_at(window_end: datetime, allowed: timedelta) -> datetime:
    """The watermark at which a window closes."""
    return window_end + allowed


def is_late(watermark_before: datetime | None, window_end: datetime, allowed: timedelta) -> bool:
    """Whether an event landed in a window that the watermark of its arrival had closed."""
    return watermark_before is not None and watermark_before >= closes_at(window_end, allowed)


def is_too_late(watermark_before: datetime | None, source_ts: datetime, longest: timedelta) -> bool:
    """Whether an event lay further behind the watermark of its arrival than its contract allows."""
    return watermark_before is not None and watermark_before - source_ts > longest


def allowed_of_source(contracts: Iterable[TableContract]) -> timedelta:
    """How long a window of the source stays open after its end: until it is closed for every table."""
    return max((each.allowed_lateness for each in contracts), default=DEFAULT_ALLOWED_LATENESS)
