"""Stretches of the log in which changes of single tables may be missing, though their epoch goes on.

A table that was not published for a time, or that rows left with a partition, is read again in the same
epoch. The chain of the stream has no gap there, and an older snapshot of the table is still whole: nothing
else says that what lies between is no state of the source. So a stretch is written down as soon as it is
known of, before anything is done about it, and stays.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.landing.encoding import content_of, decode, encode
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.storage import replace as replace_file

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class LostStretch:
    """What committed to ``table`` below ``lost_from`` is in the stream; what did above it may be missing.

    ``lost_to``: a snapshot of all of the table whose chunks all stand there or above has it; null until one
    is about to be planned. ``mended``: where the table is as the source was without such a snapshot, None if
    that is not so. ``whole``: whether it takes such a snapshot, and not a chunk alone.
    """

    table: str
    reason: str
    noticed_at: datetime
    lost_from: Lsn
    lost_to: Lsn | None = None
    mended: Lsn | None = None
    whole: bool = True

    @property
    def open(self) -> bool:
        """Whether the stretch has no known end yet."""
        return self.lost_to is None and self.mended is None


@dataclass(frozen=True, slots=True)
class LostInEpoch:
    """All stretches of one epoch, as the file stores them."""

    epoch: int
    stretches: tuple[LostStretch, ...]
    format_version: int = FORMAT_VERSION


class LostChanges:
    """The record of one epoch of one source, in its landing folder. Written by one process; thread-safe.

    Every change of it is durable when the call returns.
    """

    def __init__(self, folder: Path, epoch: int) -> None:
        """``folder``: the landing folder of the source."""
        self._path, self._epoch = folder / f"lost-changes-e{epoch:06d}.json", epoch
        self._lock = threading.Lock()

    def all(self) -> tuple[LostStretch, ...]:
        """Every stretch, in the order in which they were noticed; errors as of a manifest."""
        try:
            content = content_of(self._path)
        except FileNotFoundError:
            return ()
        return decode(LostInEpoch, content, self._path, newest=FORMAT_VERSION).stretches

    def add(
        self, table: str, reason: str, lost_from: Lsn, lost_to: Lsn | None = None, *, whole: bool = True
    ) -> None:
        """Changes of ``table`` may be missing. A stretch that is known of already stays as it is; one that
        still goes on may turn out to have begun earlier."""
        with self._lock:
            recorded = self.all()
            known = (
                each.table == table
                and each.whole == whole
                and (each.open if lost_to is None else each.lost_to == lost_to)
                and each.lost_from <= lost_from
                for each in recorded
            )
            if any(known):
                return
            goes_on = [each for each in recorded if each.table == table and each.whole == whole and each.open]
            if lost_to is None and goes_on:
                earlier = {each: replace(each, lost_from=lost_from) for each in goes_on[:1]}
                self._write([earlier.get(each, each) for each in recorded])
                return
            new = LostStretch(table, reason, datetime.now(UTC), lost_from, lost_to, whole=whole)
            self._write((*recorded, new))

    def will_be_read(self, table: str, at: Lsn) -> None:
        """A snapshot of all of ``table`` is about to be planned, whose chunks will all stand at ``at`` or
        above: it has what was lost till now."""
        self._settle(table, lambda each: replace(each, lost_to=at))

    def was_mended(self, table: str, at: Lsn) -> None:
        """From ``at`` on ``table`` has what was missing and did not take a snapshot of all of it."""
        self._settle(table, lambda each: each if each.whole else replace(each, mended=at))

    def _settle(self, table: str, settled: Callable[[LostStretch], LostStretch]) -> None:
        with self._lock:
            recorded = self.all()
            changed = tuple(settled(each) if each.table == table and each.open else each for each in recorded)
            if changed != recorded:
                self._write(changed)

    def _write(self, stretches: Sequence[LostStretch]) -> None:
        with failpoint("landing.lost_changes"):
            replace_file(self._path, encode(LostInEpoch(self._epoch, tuple(stretches))))
