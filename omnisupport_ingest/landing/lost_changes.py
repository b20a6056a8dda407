"""Record stretches of the log in which changes of single tables may be missing (missed changes).

Changes are missed when a table was not published for a time, or when rows left it with a partition. The table
is read again in the same epoch, so the stream has no gap and an older snapshot of the table stays whole. Only
this record shows that the states in between are no states of the source. A stretch is recorded before
anything is done about it, and its record stays.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.landing.encoding import content_of, decode
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.records import Format, encode
from omnisupport_ingest.storage import storage_of, update

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class LostStretch:
    """A stretch of missed changes of ``table``. It begins at ``lost_from``; the stream has all changes that
    committed below.

    Attributes:
        lost_to: a snapshot of the whole table covers the stretch if all of its chunks were read at this LSN
            or above. None until such a snapshot is about to be planned.
        mended: from this LSN on the table equals the source again without such a snapshot; None if it does
            not.
        whole: whether only a snapshot of the whole table covers the stretch, and not a single chunk.
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


Stretches = tuple[LostStretch, ...]


@dataclass(frozen=True, slots=True)
class LostInEpoch:
    """All stretches of one epoch, as the file stores them."""

    epoch: int
    stretches: tuple[LostStretch, ...]
    format_version: int = FORMAT_VERSION


_FORMAT = Format(LostInEpoch, FORMAT_VERSION)


class LostChanges:
    """The record of one epoch of one source, in its landing folder.

    One process writes it, and it is thread-safe; in a bucket another machine's capture may, whose stretches
    stay. Every change is durable when the call returns.
    """

    def __init__(self, folder: Path, epoch: int) -> None:
        """``folder``: the landing folder of the source."""
        self._path, self._epoch = folder / f"lost-changes-e{epoch:06d}.json", epoch
        self._lock = threading.Lock()

    def all(self) -> tuple[LostStretch, ...]:
        """Return every stretch, in the order in which they were noticed. Raises the errors of
        ``encoding.decode``."""
        try:
            return self._stretches(content_of(self._path))
        except FileNotFoundError:
            return ()

    def add(
        self, table: str, reason: str, lost_from: Lsn, lost_to: Lsn | None = None, *, whole: bool = True
    ) -> None:
        """Record that changes of ``table`` may be missing.

        A stretch that is recorded already is not recorded twice; an open one may only begin earlier.
        """
        new = LostStretch(table, reason, datetime.now(UTC), lost_from, lost_to, whole=whole)
        self._change(lambda recorded: _with(recorded, new))

    def will_be_read(self, table: str, at: Lsn) -> None:
        """Record that a snapshot of the whole ``table`` is about to be planned, with all chunks at ``at`` or
        above.

        It covers the changes that were missed until now.
        """
        self._end_stretches(table, lambda each: replace(each, lost_to=at))

    def was_mended(self, table: str, at: Lsn) -> None:
        """Record that ``table`` equals the source from ``at`` on, without a snapshot of the whole table."""
        self._end_stretches(table, lambda each: each if each.whole else replace(each, mended=at))

    def _end_stretches(self, table: str, ended: Callable[[LostStretch], LostStretch]) -> None:
        self._change(
            lambda recorded: tuple(
                ended(each) if each.table == table and each.open else each for each in recorded
            )
        )

    def _change(self, change: Callable[[Stretches], Stretches]) -> None:
        """Replace the stretches by what ``change`` makes of them; it gets those that the storage has now."""

        def changed(content: bytes | None) -> bytes | None:
            recorded = self._stretches(content)
            now = change(recorded)
            return None if now == recorded else encode(LostInEpoch(self._epoch, now))

        with self._lock:
            recorded = self.all()
            # The copy of an object may be old, so it does not tell whether anything changes.
            if not storage_of(self._path).is_local or change(recorded) != recorded:
                with failpoint("landing.lost_changes"):
                    update(self._path, changed)

    def _stretches(self, content: bytes | None) -> Stretches:
        return () if content is None else decode(_FORMAT, content, self._path).stretches


def _with(recorded: Stretches, new: LostStretch) -> Stretches:
    """Return ``recorded`` with ``new``, unless it is among them; an open stretch only begins earlier."""
    same = [each for each in recorded if each.table == new.table and each.whole == new.whole]
    if any(
        (each.open if new.lost_to is None else each.lost_to == new.lost_to)
        and each.lost_from <= new.lost_from
        for each in same
    ):
        return recorded
    still_open = [each for each in same if each.open]
    if new.lost_to is None and still_open:
        earlier = {each: replace(each, lost_from=new.lost_from) for each in still_open[:1]}
        return tuple(earlier.get(each, each) for each in recorded)
    return (*recorded, new)
