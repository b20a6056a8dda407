"""Snapshots while the stream is followed: on a thread of their own, those asked for later too."""

from __future__ import annotations

import threading
import time

from omnisupport_ingest.sources.postgres.capture.new_tables import NewTables
from omnisupport_ingest.sources.postgres.snapshot.snapshot import Snapshots

_LOOK_SECONDS = 0.5
"""How often a request for a snapshot is looked for: a look into a folder, empty as a rule."""

PARTITION_SECONDS = 10.0
"""How often partitions that came or left are looked for, where a table has some: a query on the catalog."""


class SnapshotsBeside:
    """As a context: reads what is due until the context ends, which waits for the chunks in hand to stop.

    ``stop`` is for what runs in the context: set when the caller's stop is, or when a snapshot failed.
    Nothing is read before ``proved`` is set: the server may be one that was put back to an earlier state.
    """

    def __init__(
        self, snapshots: Snapshots, new: NewTables, stop: threading.Event, proved: threading.Event
    ) -> None:
        """``new``: looked for between two snapshots."""
        self._snapshots, self._new = snapshots, new
        self._over, self._proved = threading.Event(), proved
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="snapshots")
        self.stop: threading.Event = _Either(stop, self._over)

    def __enter__(self) -> SnapshotsBeside:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def raise_failure(self) -> None:
        """Raise what a snapshot failed with, if one did."""
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            while not self._proved.wait(_LOOK_SECONDS):
                if self._over.is_set():
                    return
            snapshots, next_partitions = self._snapshots, time.monotonic()
            snapshots.look_at_partitions(self._over)
            snapshots.take(self._over)
            while not self._over.is_set():
                self._new.look(self._over)
                if snapshots.asked:
                    snapshots.take(self._over)
                if not snapshots.settled:
                    snapshots.read_moved(self._over)
                if snapshots.watches_partitions and time.monotonic() >= next_partitions:
                    snapshots.look_at_partitions(self._over)
                    next_partitions = time.monotonic() + PARTITION_SECONDS
                self._over.wait(_LOOK_SECONDS)
        except BaseException as error:
            self._failure = error
            self._over.set()


class _Either(threading.Event):
    """Set while one of two events is. Only the thread that follows asks, as the first may look at files."""

    def __init__(self, first: threading.Event, second: threading.Event) -> None:
        super().__init__()
        self._first, self._second = first, second

    def is_set(self) -> bool:
        return self._first.is_set() or self._second.is_set()
