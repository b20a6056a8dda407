"""A watched folder: lands each complete file in ``<inbox>/<source>``, then moves it away.

A file goes to ``landed/``, or to ``refused/`` with the reason beside it. A crash between landing and moving
is harmless: the file is found again, and its content is known to have landed. A file that can be neither
landed nor refused stays where it is and does not block the others.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from omnisupport_ingest.durable import replace, sync_folder
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.foreign import printable
from omnisupport_ingest.sources.debezium.faults import FileRefused
from omnisupport_ingest.sources.debezium.land import FileLanding
from omnisupport_ingest.sources.packed import PACKED

ENDINGS = tuple(plain + packed for plain in (".jsonl", ".json") for packed in ("", *PACKED))
LANDED, REFUSED = "landed", "refused"
SETTLED_SECONDS = 2.0
"""Seconds that a file must have been unchanged to count as complete."""

_SEEN = tuple[int, int, int]
"""Inode, size and modification time of a file."""


@dataclass(frozen=True, slots=True)
class Taken:
    """The outcome for a file: where it is now, and how it landed or why it did not."""

    path: Path
    source: str
    landing: FileLanding | None
    refused: IngestError | None


class NotTaken(IngestError):
    """A file of the inbox could be neither landed nor refused, for a reason that nobody foresaw. The others
    go on.

    Fix: Move it out of the inbox, and report what ``omnisupport-ingest --debug land`` says of it.
    """


@dataclass
class Inbox:
    """The watched folder ``root``. ``land`` lands a file for a source, as ``land.land`` does."""

    root: Path
    land: Callable[[Path, str], FileLanding]
    settled_seconds: float = SETTLED_SECONDS
    _seen: dict[Path, tuple[_SEEN, float]] = field(default_factory=dict, init=False, repr=False)

    def look(self) -> Iterator[Taken]:
        """Take every complete file, by source and name.

        An error that is not the fault of a file (a full disk, for example) is raised after the other files
        were tried; its file stays where it is. If there are several, the first is raised. An error that is
        neither ours nor the system's is raised as ``NotTaken``.
        """
        failed: list[Exception] = []
        waiting = list(self._waiting(failed))
        self._seen = {path: seen for path, seen in self._seen.items() if path in set(waiting)}
        for path in waiting:
            try:
                taken = self._take(path) if self._complete(path) else None
            except (IngestError, OSError) as error:
                failed.append(error)
            except Exception as error:
                failed.append(_not_taken(path, error))
            else:
                if taken is not None:
                    yield taken
        if failed:
            raise failed[0]

    def waits(self) -> bool:
        """Whether there are files, even if they may not be complete yet."""
        return any(True for _ in self._waiting([]))

    def _waiting(self, failed: list[Exception]) -> Iterator[Path]:
        """Yield every file. Errors that hide the files of a folder are added to ``failed``."""
        # No failpoint: a folder: one that is there already is as good.
        self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        for folder in sorted(each for each in self.root.iterdir() if not each.name.startswith(".")):
            try:
                files = sorted(each for each in folder.iterdir() if _is_one(each)) if folder.is_dir() else ()
            except OSError as error:
                failed.append(error)
            else:
                yield from files

    def _complete(self, path: Path) -> bool:
        try:
            status = path.stat()
        except FileNotFoundError:
            return False
        now: _SEEN = (status.st_ino, status.st_size, status.st_mtime_ns)
        seen, since = self._seen.get(path, (None, 0.0))
        if seen != now:
            self._seen[path] = (now, time.monotonic())
            return time.time() - status.st_mtime >= self.settled_seconds
        return time.monotonic() - since >= self.settled_seconds

    def _take(self, path: Path) -> Taken:
        source = path.parent.name
        try:
            landing = self.land(path, source)
        except FileRefused as error:
            moved = _moved(path, REFUSED, reason=f"{error}\n")
            return Taken(moved, source, None, error)
        return Taken(_moved(path, LANDED), source, landing, None)


def _not_taken(path: Path, error: Exception) -> NotTaken:
    # The text of a foreign error may quote a row.
    return NotTaken(
        f"{printable(path)} could not be taken: unexpected {type(error).__name__}.",
        fix="Move the file out of the inbox, and report it with what `omnisupport-ingest --debug land` "
        "says of it.",
    )


def _is_one(path: Path) -> bool:
    return not path.name.startswith(".") and path.name.endswith(ENDINGS) and path.is_file()


def _moved(path: Path, folder: str, *, reason: str | None = None) -> Path:
    """Move ``path`` to ``folder`` beside it, under a free name there, and write its ``reason``. Returns the
    new path."""
    target = path.parent / folder
    # No failpoint: a folder: one that is there already is as good.
    target.mkdir(exist_ok=True, mode=0o700)
    number = 0
    while True:
        moved = target / (path.name if number == 0 else f"{path.name}.{number}")
        try:
            # Unlike a rename, a link does not replace an existing file.
            with failpoint("inbox.link", moved):
                os.link(path, moved)
        except FileExistsError:
            number += 1
            continue
        if reason is not None:
            # The reason is written before the file leaves the inbox: after a crash in between, the file is
            # judged again.
            with failpoint("inbox.reason", moved):
                replace(moved.with_name(f"{moved.name}.reason.txt"), reason.encode())
        with failpoint("inbox.unlink", path):
            os.unlink(path)
            sync_folder(target)
            sync_folder(path.parent)
        return moved
