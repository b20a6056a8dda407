"""How many examples a property draws: all of them in `make test-all`, a seventh in `make test`.

The profile of Hypothesis decides, as it does for a property that names no number (``conftest.py``).
"""

from __future__ import annotations

from hypothesis import settings

_ALL = 100
"""What a profile says that leaves no example out; Hypothesis's own number."""


def examples(count: int) -> int:
    """``count``, or the share of it that the profile takes; never more, for exploring has its own clock."""
    share = min(_ALL, settings.default.max_examples)
    return max(1, count * share // _ALL)
