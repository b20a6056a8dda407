"""The ordinals of snapshot events: negative, and each given once."""

from __future__ import annotations

import threading

from omnisupport_ingest.landing.snapshot_plans import SnapshotPlans
from omnisupport_ingest.landing.store import LandingStore

FIRST_ORDINAL = -(1 << 48)
"""Ordinals of snapshot events count up from here, so they stay negative: below every change."""


class Ordinals:
    """The count of one epoch. It only grows, so a row that is read again is a later event, never a
    collision. Thread-safe."""

    def __init__(self, store: LandingStore, epoch: int) -> None:
        """Go on above what has landed or was given to a plan in ``epoch``."""
        standings = (each for each in store.epoch_standings() if each.epoch == epoch)
        used = [each.chunk_ordinal for each in standings if each.chunk_ordinal is not None]
        used += [plan.boundary_ordinal for plan in SnapshotPlans(store.folder).all(epoch)]
        self._lock = threading.Lock()
        self._next = max(used, default=FIRST_ORDINAL - 1) + 1

    def take(self, count: int = 1) -> int:
        """The first of ``count`` ordinals in a row."""
        with self._lock:
            first = self._next
            self._next += count
        return first
