"""What a check found, as a value: passed or not, one sentence, and the numbers behind it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class CheckFinding:
    """``summary`` is one sentence for a person, ``numbers`` name what was counted (never row values).

    ``severity``: that of a finding that has one of its own, as of ``contracts.quality``; null: its check's.
    ``samples``: by rule or reference, a few keys of rows, of tables whose key is no personal data.
    """

    passed: bool
    summary: str
    numbers: dict[str, int | float] = field(default_factory=dict)
    severity: str | None = None
    samples: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
