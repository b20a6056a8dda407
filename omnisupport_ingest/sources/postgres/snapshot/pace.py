"""How fast a snapshot may read: so many rows a second, over all its connections."""

from __future__ import annotations

import threading
import time


class Pace:
    """``rows_per_second``: null for as fast as it goes. Thread-safe."""

    def __init__(self, rows_per_second: int | None) -> None:
        self._rate = rows_per_second
        self._lock = threading.Lock()
        self._free_at = time.monotonic()

    def take(self, rows: int, stop: threading.Event) -> None:
        """Wait until ``rows`` that were read fit the rate, or ``stop`` is set."""
        if self._rate is None:
            return
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + rows / self._rate
            free_at = self._free_at
        while not stop.is_set() and (left := free_at - time.monotonic()) > 0:
            time.sleep(min(left, 0.1))
