"""What a check found, as a value: passed or not, one sentence, and the numbers behind it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class CheckFinding:
    """``summary`` is one sentence for a person, ``numbers`` name what was counted (never row values)."""

    passed: bool
    summary: str
    numbers: dict[str, int | float] = field(default_factory=dict)
