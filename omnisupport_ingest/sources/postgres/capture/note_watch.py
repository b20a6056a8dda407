"""Stopping at a note: a capture that runs looks for a file that a person's command left in the home."""

from __future__ import annotations

import threading
import time
from typing import Protocol

_LOOK_SECONDS = 0.5
"""How often a capture that runs looks for the note."""


class Note(Protocol):
    """A file that is there or not."""

    @property
    def present(self) -> bool: ...


class StopOrNote(threading.Event):
    """A stop that is also set while a note is there; what asks for ``is_set`` obeys both."""

    def __init__(self, stop: threading.Event, note: Note) -> None:
        super().__init__()
        self._stop, self._note = stop, note
        self._next_look = 0.0
        self.is_set()

    def is_set(self) -> bool:
        if self._stop.is_set() or super().is_set():
            return True
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + _LOOK_SECONDS
            if self._note.present:
                # It stays set if the note goes meanwhile: whoever saw it is stopping.
                self.set()
                return True
        return False

    @property
    def by_note(self) -> bool:
        """Whether the note has been seen, and not the stop."""
        return super().is_set() and not self._stop.is_set()
