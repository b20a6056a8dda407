"""A watched folder: lands each complete file in ``<inbox>/<source>``, then moves it away.

A file goes to ``landed/``, or to ``refused/`` with the reason beside it. A crash between landing and moving
is harmless: the file is found again, and its content is known to have landed. A file that can be neither
landed nor refused stays where it is and does not block the others, unless its source is ordered by arrival:
then the files after it wait, as they would land below it. The files of a paused source stay until it is
resumed.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from omnisupport_ingest.durable import replace, sync_folder
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.foreign import printable
from omnisupport_ingest.sources.debezium.faults import FileChanged, FileRefused, FilesPaused
from omnisupport_ingest.sources.debezium.land import FileLanding
from omnisupport_ingest.sources.debezium.lines import content_of
from omnisupport_ingest.sources.packed import PACKED

_log = logging.getLogger(__name__)

ENDINGS = tuple(plain + packed for plain in (".jsonl", ".json") for packed in ("", *PACKED))
LANDED, REFUSED = "landed", "refused"
SETTLED_SECONDS = 2.0
"""Seconds that a file must have been unchanged to count as complete."""

_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
"""Errors of a file system without hard links. Linux also gives EPERM for a file of another user, which may be
renamed (``fs.protected_hardlinks``, proc_sys_fs(5))."""

_State = tuple[int, int, int, int]
"""Device, inode, size and modification time of a file: what shows that it was replaced or written to."""


@dataclass(frozen=True, slots=True)
class Taken:
    """The outcome for a file: where it is now, and how it landed or why it did not."""

    path: Path
    source: str
    landing: FileLanding | None
    refused: IngestError | None


class NotTaken(IngestError):
    """A file of the inbox could be neither landed nor refused, for a reason that nobody foresaw. The others
    go on; those after it in a source ordered by arrival wait.

    Fix: Move it out of the inbox, and report what ``omnisupport-ingest --debug land`` says of it.
    """


@dataclass
class Inbox:
    """The watched folder ``root``. ``land`` lands a file for a source, as ``land.land`` does.

    ``by_arrival``: whether the events of a source are ordered by the landing of their files. ``paused``:
    whether a source is paused; its files wait, and nothing else is asked about them.
    """

    root: Path
    land: Callable[[Path, str], FileLanding]
    settled_seconds: float = SETTLED_SECONDS
    by_arrival: Callable[[str], bool] = lambda _: False
    paused: Callable[[str], bool] = lambda _: False
    _seen: dict[Path, tuple[_State, float]] = field(default_factory=dict, init=False, repr=False)

    def look(self) -> Iterator[Taken]:
        """Take every complete file, by source and name.

        An error that is not the fault of a file (a full disk, for example) is raised after the other files
        were tried; its file stays where it is. If there are several, the first is raised. An error that is
        neither ours nor the system's is raised as ``NotTaken``.
        """
        failed: list[Exception] = []
        waiting = list(self._waiting(failed))
        there = frozenset(waiting)
        self._seen = {path: seen for path, seen in self._seen.items() if path in there}
        for _, files in groupby(waiting, key=lambda path: path.parent):
            yield from self._of_source(list(files), failed)
        if failed:
            raise failed[0]

    def _of_source(self, files: Sequence[Path], failed: list[Exception]) -> Iterator[Taken]:
        """Take the complete ones of ``files``, which are of one source. Errors are added to ``failed``."""
        source = files[0].parent.name
        try:
            if self.paused(source):
                return
            in_order = self.by_arrival(source)
        except (IngestError, OSError) as error:
            failed.append(error)
            return
        for path in files:
            try:
                taken = self._take(path) if self._complete(path) else None
            except FilesPaused:
                return
            except (IngestError, OSError) as error:
                failed.append(error)
                taken = None
            except Exception as error:
                failed.append(_not_taken(path, error, in_order=in_order))
                taken = None
            if taken is not None:
                yield taken
            if in_order and (taken is None or taken.path == path):
                return

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
        now = _state_of(status)
        seen, since = self._seen.get(path, (None, 0.0))
        if seen != now:
            self._seen[path] = (now, time.monotonic())
            return time.time() - status.st_mtime >= self.settled_seconds
        return time.monotonic() - since >= self.settled_seconds

    def _take(self, path: Path) -> Taken | None:
        """Land ``path`` and move it away. A file that was replaced or written to meanwhile stays for the next
        look; None if nothing became of it."""
        source = path.parent.name
        try:
            before = _Before(_state_of(path.stat()))
        except FileNotFoundError:
            return None
        try:
            landing = self.land(path, source)
        except FileChanged:
            raise
        except FileRefused as error:
            moved = _moved(path, before, REFUSED, reason=f"{error}\n")
            return None if moved is None else Taken(moved, source, None, error)
        if landing.manifest.file is not None:
            before.content = landing.manifest.file.sha256
        return Taken(_moved(path, before, LANDED) or path, source, landing, None)


def _not_taken(path: Path, error: Exception, *, in_order: bool) -> NotTaken:
    # The text of a foreign error may quote a row.
    waiting = " The files after it wait, because its source is ordered by arrival." if in_order else ""
    return NotTaken(
        f"{printable(path)} could not be taken: unexpected {type(error).__name__}.{waiting}",
        fix="Move the file out of the inbox, and report it with what `omnisupport-ingest --debug land` "
        "says of it.",
    )


def _is_one(path: Path) -> bool:
    return not path.name.startswith(".") and path.name.endswith(ENDINGS) and path.is_file()


def _state_of(status: os.stat_result) -> _State:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


@dataclass
class _Before:
    """How a file was before it was taken. ``content``: SHA-256 of what landed of it; None if unknown."""

    state: _State
    content: str | None = None
    _same: set[_State] = field(default_factory=set, init=False)

    def is_still(self, path: Path) -> bool:
        """Whether ``path`` is the same file, or another with the content that landed.

        A network file system may show another time or inode of a file that nobody wrote to.
        """
        try:
            now = _state_of(path.stat())
            if now == self.state or now in self._same:
                return True
            if self.content is None or _size_of(now) != _size_of(self.state):
                return False
            if content_of(path).sha256 != self.content or _size_of(_state_of(path.stat())) != _size_of(now):
                return False
        except (FileRefused, OSError):
            return False
        self._same.add(now)
        return True


def _size_of(state: _State) -> int:
    return state[2]


def _moved(path: Path, before: _Before, folder: str, *, reason: str | None = None) -> Path | None:
    """Move ``path`` to ``folder`` beside it, under a free name there, and write its ``reason``.

    Returns the new path; None, and moves nothing, if the file is not as it was ``before``: what its writer
    has put there since then has not landed.
    """
    moved = _move(path, before, folder, reason)
    if moved is None and path.exists():
        _log.warning("%s changed while it was taken, and stays in the inbox.", printable(path))
    return moved


def _move(path: Path, before: _Before, folder: str, reason: str | None) -> Path | None:
    target = path.parent / folder
    # No failpoint: a folder: one that is there already is as good.
    target.mkdir(exist_ok=True, mode=0o700)
    number = 0
    while True:
        if not before.is_still(path):
            return None
        moved = target / (path.name if number == 0 else f"{path.name}.{number}")
        try:
            linked = _link(path, moved)
        except FileExistsError:
            number += 1
            continue
        except FileNotFoundError:
            return None
        if reason is not None:
            # The reason is written before the file leaves the inbox: after a crash in between, the file is
            # judged again.
            with failpoint("inbox.reason", moved):
                replace(moved.with_name(f"{moved.name}.reason.txt"), reason.encode())
        if not (before.is_still(path) and (not linked or before.is_still(moved))):
            _take_back(moved)
            return None
        with failpoint("inbox.unlink", path):
            try:
                if linked:
                    os.unlink(path)
                else:
                    os.rename(path, moved)
            except OSError:
                # Else each look would leave another name behind.
                _take_back(moved)
                raise
            sync_folder(target)
            sync_folder(path.parent)
        if not linked and not before.is_still(moved):
            # Written to just before it was renamed.
            _give_back(moved, path)
            return None
        return moved


def _link(path: Path, moved: Path) -> bool:
    """Make the link ``moved`` to ``path``. Where that is not possible, make an empty file, for ``path`` to be
    renamed to, and return False. Raises ``FileExistsError`` if there is a file."""
    try:
        # Unlike a rename, a link does not replace an existing file.
        with failpoint("inbox.link", moved):
            os.link(path, moved)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        # No failpoint: one that stays after a crash is an empty file with a free name.
        os.close(os.open(moved, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        return False
    return True


def _give_back(moved: Path, path: Path) -> None:
    """Put a file that was renamed back into the inbox; under another name if there is a new file by now."""
    number = 0
    while True:
        back = path if number == 0 else path.with_name(f"{number}-{path.name}")
        try:
            linked = _link(moved, back)
        except FileExistsError:
            number += 1
            continue
        if linked:
            _take_back(moved)
        else:
            # No failpoint: a file that is written to in this very moment, and a crash here, too.
            os.rename(moved, back)
            moved.with_name(f"{moved.name}.reason.txt").unlink(missing_ok=True)
        return


def _take_back(moved: Path) -> None:
    """Remove what was made of a file that turned out to have changed: it stands in the inbox."""
    # No failpoint: a link that stays only shows a file twice.
    moved.with_name(f"{moved.name}.reason.txt").unlink(missing_ok=True)
    moved.unlink()
