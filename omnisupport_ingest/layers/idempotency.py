"""The idempotency key of a unit of work: what makes doing it twice the same as doing it once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

from omnisupport_ingest.layers.plan import WindowPlan

LOGIC_VERSION = 6
"""Version of what the layers do with their input; raised when the same input gives another output."""


def idempotency_key(
    *, layer: str, table: str, window: str, inputs: Iterable[str], versions: Iterable[str]
) -> str:
    """SHA-256 of layer, table, window, the set of input units and the versions of logic and contracts.

    Never of a run or a time: two runs that do the same work have the same key.
    """
    return _digest([layer, table, window, sorted(set(inputs)), sorted(set(versions))])


def unit_key(work: Iterable[tuple[str, WindowPlan]]) -> str:
    """The key of what is written in one go for several windows, each with its idempotency key and plan.

    The rows written follow from what is read, not only from what the window holds afterwards: two
    appends that end at the same inputs may have begun at different ones.
    """
    return _digest(sorted([key, plan.window, plan.work.value, sorted(plan.read)] for key, plan in work))


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, separators=(",", ":")).encode()).hexdigest()
