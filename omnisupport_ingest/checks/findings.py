"""The result of a check as a value: passed or not, a summary, and the numbers behind it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class CheckFinding:
    """The result of a check.

    ``summary``: for a person. ``numbers``: counts by name, never values of rows. ``severity``: a severity of
    ``contracts.quality`` that overrides the check's; None for the check's own. ``samples``: a few keys of
    rows by rule or reference, for tables whose key is no personal data.
    """

    passed: bool
    summary: str
    numbers: dict[str, int | float] = field(default_factory=dict)
    severity: str | None = None
    samples: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
