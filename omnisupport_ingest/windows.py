"""Event-time windows: to which window an event belongs, and how windows join into ranges.

The window of an event depends on its commit time, never on its arrival, so a redelivered event has the same
window as before. (If a position comes again with another commit time, ``landing/first_windows.py`` puts it
into its first window.) Times are UTC throughout; datetimes are timezone-aware.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from omnisupport_ingest.errors import IngestError

KEY_FORMAT = "%Y-%m-%dT%H%M"
"""``strftime`` format of a window's key: its start to the minute, without characters that a path must
escape."""

OUT_OF_RANGE = "out-of-range"
"""The sentinel partition, for events with an impossible time: before the first window, or further ahead of
the landing clock than any clock error explains."""

MAX_AHEAD = timedelta(days=1)
"""How far the commit time of an event may lie ahead of the landing clock."""

_SIZE = re.compile(r"minutes:([1-9][0-9]?)")


class WindowSizeRefused(IngestError):
    """``OMNISUPPORT_WINDOW`` is not the name of a window size.

    Fix: Write ``hourly``, ``daily``, or ``minutes:N`` where N divides 60.
    """

    exit_code = 2


class WindowUnknown(IngestError):
    """A text names no window of this lake.

    Fix: Name a window by its start in UTC, like 2026-01-31T0900, or by a time in it.
    """

    exit_code = 2


@dataclass(frozen=True, slots=True)
class WindowSize:
    """``hourly``, ``daily`` or ``minutes:N`` where N divides an hour."""

    minutes: int

    def __post_init__(self) -> None:
        if self.minutes not in (60, 24 * 60) and (self.minutes < 1 or 60 % self.minutes):
            raise ValueError(f"{self.minutes} minutes do not divide an hour")

    @classmethod
    def parse(cls, text: str) -> WindowSize:
        """Read the form that ``str`` writes. Raises ``WindowSizeRefused``, which names the accepted forms."""
        named = {"hourly": 60, "daily": 24 * 60}
        if text in named:
            return cls(named[text])
        match = _SIZE.fullmatch(text)
        try:
            if match is None:
                raise ValueError(text)
            return cls(int(match.group(1)))
        except ValueError:
            raise WindowSizeRefused(
                f"OMNISUPPORT_WINDOW is {text[:60]!r}, which is not a window size.",
                fix="Use hourly, daily, or minutes:N where N divides 60 (minutes:1, minutes:15).",
            ) from None

    def __str__(self) -> str:
        return {60: "hourly", 24 * 60: "daily"}.get(self.minutes, f"minutes:{self.minutes}")

    @property
    def length(self) -> timedelta:
        return timedelta(minutes=self.minutes)

    @property
    def cron(self) -> str:
        """The cron schedule that ticks at the start of every window."""
        if self.minutes == 24 * 60:
            return "0 0 * * *"
        return "0 * * * *" if self.minutes == 60 else f"*/{self.minutes} * * * *"


@dataclass(frozen=True, slots=True)
class WindowRange:
    """The windows from ``first`` to ``last``, both included, without a gap between them."""

    first: str
    last: str


@dataclass(frozen=True, slots=True)
class WindowGrid:
    """All windows of one lake: their size and the start of the first one."""

    size: WindowSize
    first: datetime

    def __post_init__(self) -> None:
        if self.first != self.truncate(self.first):
            raise ValueError(f"{self.first.isoformat()} is not the start of a window")

    def truncate(self, moment: datetime) -> datetime:
        """Return the start of the window that contains ``moment``, whether or not the grid reaches it."""
        moment = moment.astimezone(UTC)
        midnight = moment.replace(hour=0, minute=0, second=0, microsecond=0)
        return midnight + (moment - midnight) // self.size.length * self.size.length

    def key_of(self, moment: datetime, landed_at: datetime) -> str:
        """Return the key of the window of an event with commit time ``moment``, or ``OUT_OF_RANGE``."""
        if moment < self.first or moment > landed_at + MAX_AHEAD:
            return OUT_OF_RANGE
        return self.truncate(moment).strftime(KEY_FORMAT)

    def start_of(self, key: str) -> datetime:
        """Return the start of the window ``key``. Raises ``WindowUnknown`` if the grid has no such window."""
        try:
            start = datetime.strptime(key, KEY_FORMAT).replace(tzinfo=UTC)
        except ValueError:
            raise self._unknown(key) from None
        if start != self.truncate(start) or start < self.first:
            raise self._unknown(key)
        return start

    def named(self, text: str) -> str:
        """Return the key of the window that a person means by ``text``: its key, or any time in it (ISO 8601;
        UTC without an offset).

        Raises ``WindowUnknown`` if the grid has no such window.
        """
        if text == OUT_OF_RANGE:
            return text
        try:
            moment = datetime.fromisoformat(text)
            start = self.truncate(moment if moment.tzinfo else moment.replace(tzinfo=UTC))
        except (ValueError, OverflowError):
            # Not the text of a time, or of a time that does not exist in UTC.
            raise self._unknown(text) from None
        if start < self.first:
            raise self._unknown(text)
        return start.strftime(KEY_FORMAT)

    def _unknown(self, text: str) -> WindowUnknown:
        return WindowUnknown(
            f"{text!r} is not a window of this lake ({self.size} windows since "
            f"{self.first.strftime(KEY_FORMAT)}).",
            fix=f"Name a window by its start in UTC, like {self.first.strftime(KEY_FORMAT)}, or by a time in "
            f"it, like {self.first.strftime('%Y-%m-%dT%H:%M')}.",
        )

    def end_of(self, key: str) -> datetime:
        return self.start_of(key) + self.size.length

    def keys_between(self, first: str, last: str) -> list[str]:
        """Return the keys of all windows from ``first`` to ``last``, both included."""
        start, end = self.start_of(first), self.start_of(last)
        count = (end - start) // self.size.length + 1
        return [(start + i * self.size.length).strftime(KEY_FORMAT) for i in range(count)]

    def ranges(self, keys: Iterable[str]) -> list[WindowRange]:
        """Return the fewest ranges without a gap that contain exactly ``keys`` (repeats allowed, any
        order)."""
        ranges: list[WindowRange] = []
        for key in sorted(set(keys)):
            if ranges and self.end_of(ranges[-1].last) == self.start_of(key):
                ranges[-1] = WindowRange(ranges[-1].first, key)
            else:
                ranges.append(WindowRange(key, key))
        return ranges


def without_sentinel(keys: Sequence[str]) -> list[str]:
    """Return ``keys`` without the sentinel."""
    return [key for key in keys if key != OUT_OF_RANGE]
