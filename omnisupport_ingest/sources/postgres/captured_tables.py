"""The tables that a capture has contracts of; more may join while it runs.

Those are handed to the thread that reads the stream, which takes them between two transactions. Whoever
hands them over waits for that: only then every change that is still to come is told by its contract.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.sources.postgres.row_events import KeyNotSent

_LOOK_SECONDS = 0.1
"""How often whoever waits looks whether to stop."""


class CapturedTables:
    """Shared by the thread that reads the stream and one other, which hands over one group at a time."""

    def __init__(self, tables: Iterable[TableContract]) -> None:
        self._all = tuple(tables)
        self._lock, self._answered = threading.Lock(), threading.Event()
        self._handed: tuple[TableContract, ...] = ()
        self._refused: KeyNotSent | None = None

    @property
    def all(self) -> tuple[TableContract, ...]:
        """Those that the stream is read for."""
        return self._all

    @property
    def any_handed_over(self) -> bool:
        """Whether some wait to be taken. Cheap."""
        return bool(self._handed)

    def hand_over(self, tables: Sequence[TableContract], stop: threading.Event) -> bool:
        """Wait until ``tables`` are taken; false if ``stop`` came first: then nobody takes them any more.

        ``KeyNotSent`` if the stream does not carry the key of one of them.
        """
        with self._lock:
            self._answered.clear()
            self._refused, self._handed = None, tuple(tables)
        while not self._answered.wait(_LOOK_SECONDS):
            if stop.is_set():
                with self._lock:
                    self._handed = ()
                break
        if self._refused is not None:
            raise self._refused
        return self._answered.is_set()

    def take(self, take_up: Callable[[Sequence[TableContract]], None]) -> None:
        """Have ``take_up`` take what is handed over; its ``KeyNotSent`` is raised where that waits."""
        with self._lock:
            if not self._handed:
                return
            try:
                take_up(self._handed)
                self._all += self._handed
            except KeyNotSent as error:
                self._refused = error
            self._handed = ()
            self._answered.set()
