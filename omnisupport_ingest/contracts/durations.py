"""Durations in contracts: ISO 8601, such as ``PT1H`` and ``P7D``."""

from __future__ import annotations

import re
from datetime import timedelta

from omnisupport_ingest.foreign import shortened

_DURATION = re.compile(
    r"P(?=[0-9T])(?:([0-9]{1,6})W|(?:([0-9]{1,6})D)?"
    r"(?:T(?=[0-9])(?:([0-9]{1,6})H)?(?:([0-9]{1,6})M)?(?:([0-9]{1,6})S)?)?)"
)

LONGEST = timedelta(days=36_525)
"""A hundred years: added to the time of any event, it stays within ``datetime``."""


def parse_duration(text: str) -> timedelta:
    """Read weeks (``P2W``) or days, hours, minutes and seconds (``P1DT6H30M``); whole numbers.

    Years and months have no fixed length and are refused. Raises ``ValueError`` for anything else. Source of
    the format: ISO 8601-1:2019, 5.5.2.
    """
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ValueError(f"{shortened(text)} is not a duration like PT1H, P7D or P1DT6H30M")
    weeks, days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    length = timedelta(weeks=weeks, days=days, hours=hours, minutes=minutes, seconds=seconds)
    if length > LONGEST:
        raise ValueError(f"{text!r} is longer than {LONGEST.days:,} days")
    return length


def duration_text(length: timedelta | None) -> str:
    """Return ``length`` as contracts write it, in days and seconds (``P30D``, ``PT3600S``); None: ``no
    limit``.
    """
    if length is None:
        return "no limit"
    days, seconds = length.days, length.seconds
    return (f"P{days}D" if days or not seconds else "P") + (f"T{seconds}S" if seconds else "")
