"""Which process is meant, by facts that no clock moves.

A process id alone is used again, in a container the same few at every start. A start time of day tells two
processes of one id apart only as long as the clock is not set: Linux works it out anew, from the clock, at
every question. What the kernel keeps is the number of ticks after boot at which a process began, and a random
id of the boot. Those are compared here, exactly.
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Self

import psutil

_PROC = Path("/proc")
_BOOT_ID = _PROC / "sys/kernel/random/boot_id"
_STATE, _START_TICKS = 0, 19
"""Fields 3 and 22 of ``/proc/<pid>/stat`` (Linux ``proc(5)``), counted from after the command's name."""

_LARGEST = (1 << 31) - 1
"""Beyond it no process has a number; below 1, ``kill`` means many of them."""

_LONGEST_TEXT = 200

_GONE = frozenset("ZXx")
"""States of a process that has ended and was not yet asked for."""


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """One process of this machine, and no other that is given its number later.

    ``started`` and ``boot`` are None in a record that an earlier version made: it names a number alone, and
    whatever process has that number counts as the one that is meant.
    """

    pid: int
    started: int | None = None
    """On Linux: clock ticks from boot to the start. Elsewhere: the start that the kernel noted down, in
    microseconds of the clock of that moment; it is kept as it was, so setting the clock does not move it."""
    boot: str | None = None
    """Id of the boot, without dashes. Empty where the system has none."""

    @classmethod
    def of(cls, pid: int) -> Self | None:
        """Return the process that has ``pid`` now; None if there is none, or if it has ended.

        Of a process that may not be looked at, the number alone is known.
        """
        if not 1 <= pid <= _LARGEST:
            return None
        try:
            return cls(pid, *_start_of(pid))
        except _NoProcess:
            return None
        except PermissionError:
            return cls(pid)

    @classmethod
    def current(cls) -> Self:
        """Return the identity of the process that calls."""
        identity = cls.of(os.getpid())
        assert identity is not None, "the caller runs"
        return identity

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Read what ``text`` wrote, or a bare process id of an earlier version; None if it is neither."""
        pid, *rest = text.strip().split(".")
        if not pid.isascii() or not pid.isdigit() or len(rest) not in (0, 2) or len(text) > _LONGEST_TEXT:
            return None
        if not rest:
            return cls(int(pid))
        started, boot = rest
        return cls(int(pid), int(started), boot) if started.isascii() and started.isdigit() else None

    @property
    def text(self) -> str:
        """The identity for a record: ``parse`` reads it. It has no character that a path could not have."""
        if self.started is None:
            return str(self.pid)
        return f"{self.pid}.{self.started}.{self.boot}"

    def is_of_this_boot(self) -> bool:
        """Whether it began on this machine since its last start, as far as the record says; else nothing that
        this machine knows tells whether it runs."""
        return self.boot is None or self.boot == _boot_id()

    def lives(self) -> bool:
        """Whether this process runs now; one that has ended and is still listed does not."""
        now = type(self).of(self.pid)
        if now is None:
            return False
        return now == self or None in (now.started, self.started)


@contextmanager
def scratch_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """A folder in ``parent``, named by ``prefix`` and this process, for what no file may keep or memory has
    no room for. It is gone in the end; what killed processes left goes now."""
    remove_left_behind(parent, prefix)
    # No failpoint: scratch files, which the next call removes if this process is killed.
    with TemporaryDirectory(prefix=f"{prefix}{ProcessIdentity.current().text}-", dir=parent) as scratch:
        yield Path(scratch)


def remove_left_behind(parent: Path, prefix: str) -> None:
    """Remove the folders that killed processes left; they may hold rows of the source."""
    for left in parent.glob(f"{prefix}*"):
        process = ProcessIdentity.parse(left.name.removeprefix(prefix).partition("-")[0])
        if process is None or not process.lives():
            # No failpoint: scratch files, which the next call removes if this process is killed.
            shutil.rmtree(left, ignore_errors=True)


class _NoProcess(Exception):
    """No process has that number, or the one that had it has ended."""


def _start_of(pid: int) -> tuple[int, str]:
    if platform.system() == "Linux":
        return _start_on_linux(pid)
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            raise _NoProcess
        return int(process.create_time() * 1_000_000), ""
    except psutil.NoSuchProcess:
        raise _NoProcess from None
    except psutil.AccessDenied:
        raise PermissionError from None


def _start_on_linux(pid: int) -> tuple[int, str]:
    try:
        line = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        # Mounted with hidepid, /proc does not show the processes of others.
        return _unseen(pid)
    # The name is in parentheses and may have any character, parentheses too.
    fields = line.rpartition(")")[2].split()
    if fields[_STATE] in _GONE:
        raise _NoProcess
    return int(fields[_START_TICKS]), _boot_id()


def _unseen(pid: int) -> tuple[int, str]:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        raise _NoProcess from None
    # It is there: `PermissionError` says so by itself, and so does an answer.
    raise PermissionError


def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text().strip().replace("-", "")
    except OSError:
        return ""
