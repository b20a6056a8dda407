"""The idempotency key of a unit of work: what makes doing it twice the same as doing it once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

LOGIC_VERSION = 1
"""Version of what the stages do with their input; raised when the same input gives another output."""


def idempotency_key(
    *, layer: str, table: str, window: str, inputs: Iterable[str], versions: Iterable[str]
) -> str:
    """SHA-256 of layer, table, window, the set of input units and the versions of logic and contracts.

    Never of a run or a time: two runs that do the same work have the same key.
    """
    return _digest([layer, table, window, sorted(set(inputs)), sorted(set(versions))])


def unit_key(keys: Iterable[str]) -> str:
    """The key of several windows' work that is written in one go."""
    return _digest(sorted(keys))


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, separators=(",", ":")).encode()).hexdigest()
