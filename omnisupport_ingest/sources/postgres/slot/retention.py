"""How much longer the server can keep the WAL that a slot needs, and when to warn.

Only pure functions of facts: this module reads nothing from the server. All sizes are in bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import IntEnum

from omnisupport_ingest.position import Lsn
from omnisupport_ingest.sources.postgres.session.server import SlotFacts

WARN_BELOW_SHARE, ALARM_BELOW_SHARE = 0.25, 0.1
"""Warn, and raise the alarm, if a smaller share than this of ``max_slot_wal_keep_size`` is left."""

WARN_WITHIN, ALARM_WITHIN = timedelta(hours=24), timedelta(hours=1)
"""Warn, and raise the alarm, if nobody reads the slot and a limit is reached sooner than this."""

_MINIMUM_SPAN = timedelta(seconds=60)
"""A rate that is measured over a shorter time means nothing."""


@dataclass(frozen=True, slots=True)
class WalMark:
    """The end of the WAL at a point in time."""

    lsn: Lsn
    at: datetime


@dataclass(frozen=True, slots=True)
class WalLimits:
    """The limits of the WAL that the server keeps. ``limit``: ``max_slot_wal_keep_size``; None if not set.

    ``disk_free``: free bytes on the server's disk; None if unknown (a server on another machine).
    """

    limit: int | None
    disk_free: int | None


@dataclass(frozen=True, slots=True)
class Forecast:
    """When the server can no longer keep the WAL. ``rate``: WAL bytes per second lately; None if unknown.

    ``ends_at``: the nearest limit: ``max_slot_wal_keep_size`` (the server gives the slot up) or ``disk`` (it
    is full); None if neither is known. ``left``: bytes until that limit. ``seconds``: time until then if
    nobody reads the slot.
    """

    rate: float | None
    ends_at: str | None
    left: int | None
    seconds: float | None


class Level(IntEnum):
    """How serious a danger is. ``ALARM``: changes are being lost, or soon will be, unless somebody acts."""

    WELL = 0
    WARNING = 1
    ALARM = 2


@dataclass(frozen=True, slots=True)
class SlotWarning:
    """A problem and its fix."""

    problem: str
    fix: str
    level: Level = Level.WARNING

    @property
    def kind(self) -> str:
        """The problem without its digits: with other numbers it is the same problem."""
        return "".join(letter for letter in self.problem if not letter.isdigit())


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Bytes of WAL kept for the slot from which on to warn, and from which on to raise the alarm."""

    warning: int
    alarm: int


def wal_rate(earlier: WalMark | None, now: WalMark) -> float | None:
    """Return the WAL bytes per second between two marks; None if they are less than a minute apart."""
    if earlier is None or now.at - earlier.at < _MINIMUM_SPAN:
        return None
    written = max(0, now.lsn.value - earlier.lsn.value)
    return written / (now.at - earlier.at).total_seconds()


def forecast(slot: SlotFacts, limits: WalLimits, rate: float | None) -> Forecast:
    """Return the nearest limit, and when it is reached if nobody reads the slot meanwhile."""
    ends = []
    if limits.limit is not None and slot.safe_bytes is not None:
        ends.append((max(0, slot.safe_bytes), "max_slot_wal_keep_size"))
    if limits.disk_free is not None:
        ends.append((limits.disk_free, "disk"))
    if not ends:
        return Forecast(rate, None, None, None)
    left, end = min(ends)
    return Forecast(rate, end, left, left / rate if rate else None)


def warnings(
    slot: SlotFacts, limits: WalLimits, ahead: Forecast, start_reading: str, thresholds: Thresholds
) -> Iterator[SlotWarning]:
    """Yield every danger to the slot. ``start_reading``: the fix that starts its capture again."""
    remedy = _remedy(slot, limits, ahead, start_reading)
    kept = slot.retained_bytes or 0
    too_much = thresholds.alarm if kept >= thresholds.alarm else thresholds.warning
    if kept >= too_much:
        yield SlotWarning(
            f"The server keeps {_gigabytes(kept)} of WAL for the slot {slot.name}, over the "
            f"{_gigabytes(too_much)} that are set as too much.",
            remedy,
            Level.ALARM if kept >= thresholds.alarm else Level.WARNING,
        )
    if slot.wal_status == "unreserved":
        yield SlotWarning(
            f"The slot {slot.name} is past max_slot_wal_keep_size: the server may remove WAL that it needs "
            "at its next checkpoint, and the capture would have to begin again with a snapshot.",
            remedy,
            Level.ALARM,
        )
        return
    share = None if not limits.limit or slot.safe_bytes is None else slot.safe_bytes / limits.limit
    if share is not None and share < WARN_BELOW_SHARE:
        yield SlotWarning(
            f"{max(0.0, share):.0%} of max_slot_wal_keep_size is left for the slot {slot.name}; at none the "
            "server gives the slot up.",
            remedy,
            Level.ALARM if share < ALARM_BELOW_SHARE else Level.WARNING,
        )
    elif slot.reader is None and ahead.seconds is not None and ahead.seconds < WARN_WITHIN.total_seconds():
        yield SlotWarning(
            f"Nobody reads the slot {slot.name}, and the server keeps its WAL: at the rate of late, "
            f"{'the disk is full' if ahead.ends_at == 'disk' else 'max_slot_wal_keep_size is reached'} in "
            f"{ahead.seconds / 3600:.1f} hours.",
            remedy,
            Level.ALARM if ahead.seconds < ALARM_WITHIN.total_seconds() else Level.WARNING,
        )
    elif slot.reader is None and ahead.ends_at is None:
        yield SlotWarning(
            f"Nobody reads the slot {slot.name}, and nothing limits the WAL that the server keeps for it: it "
            "can fill the server's disk.",
            remedy,
        )


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB"


def _remedy(slot: SlotFacts, limits: WalLimits, ahead: Forecast, start_reading: str) -> str:
    first = (
        start_reading
        if slot.reader is None
        else "End the transaction that holds the slot back, if there is one: SELECT pid, xact_start, state "
        "FROM pg_stat_activity WHERE backend_xid IS NOT NULL ORDER BY xact_start;"
    )
    if ahead.ends_at == "disk":
        return f"{first} Or make room on the server's disk."
    size = "50GB" if limits.limit is None else f"{2 * limits.limit // (1024 * 1024)}MB"
    return (
        f"{first} {'Or give it more room' if limits.limit else 'And set a limit'}: ALTER SYSTEM SET "
        f"max_slot_wal_keep_size = '{size}'; SELECT pg_reload_conf();"
    )
