"""Identifies a process by facts that do not depend on any clock.

A process id alone is reused; in a container the same few come back at every start. A start time of day
distinguishes two processes with one id only while nobody sets the clock: at every query, Linux computes it
from the clock. What the kernel keeps is the number of ticks from boot to the start of the process, and a
random id of the boot. These are compared here, exactly.
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
"""Fields 3 and 22 of ``/proc/<pid>/stat`` (Linux ``proc(5)``), counted from the field after the command's
name."""

_LARGEST = (1 << 31) - 1
"""No process has a higher number; a number below 1 means a group of processes for ``kill``."""

_LONGEST_TEXT = 200

_GONE = frozenset("ZXx")
"""States of a process that has ended and whose parent has not yet read its exit code."""


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """One process of this machine, distinct from every later process with the same number.

    ``started`` and ``boot`` are None in a record of an earlier version, which has only a number: whatever
    process has that number counts as the recorded one.
    """

    pid: int
    started: int | None = None
    """On Linux: clock ticks from boot to the start. Elsewhere: the start that the kernel recorded, in
    microseconds of its clock at that time; it is stored, so setting the clock does not change it."""
    boot: str | None = None
    """Id of the boot, without dashes; empty if the system has none."""

    @classmethod
    def of(cls, pid: int) -> Self | None:
        """Return the process that has ``pid`` now; None if there is none, or if it has ended.

        For a process that this user may not inspect, only the number is known.
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
        """Return the identity of the calling process."""
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
        """The identity as text for a record, which ``parse`` reads. It has only characters that a path may
        have."""
        if self.started is None:
            return str(self.pid)
        return f"{self.pid}.{self.started}.{self.boot}"

    def is_of_this_boot(self) -> bool:
        """Whether the process began on this machine since its last boot, according to the record. If not,
        this machine cannot know whether it runs."""
        return self.boot is None or self.boot == _boot_id()

    def lives(self) -> bool:
        """Whether this process runs now. A process that has ended and is still listed does not."""
        now = type(self).of(self.pid)
        if now is None:
            return False
        return now == self or None in (now.started, self.started)


SCRATCH = ("as-of-", "equality-", "keys-", "proof-", "repair-", "superseded-", "target-")
"""Prefixes of the scratch folders in the folder ``run`` of a home."""


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
    assert prefix in SCRATCH, "erasures and sweeps look for every scratch folder"
    for left in parent.glob(f"{prefix}*"):
        process = ProcessIdentity.parse(left.name.removeprefix(prefix).partition("-")[0])
        if process is None or not process.lives():
            # No failpoint: scratch files, which the next call removes if this process is killed.
            shutil.rmtree(left, ignore_errors=True)


def remove_all_left_behind(parent: Path) -> None:
    """Remove every scratch folder in ``parent`` that a killed process left."""
    for prefix in SCRATCH:
        remove_left_behind(parent, prefix)


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
        # If /proc is mounted with hidepid, it does not show the processes of other users.
        return _unseen(pid)
    # The name is in parentheses and may contain any character, even parentheses.
    fields = line.rpartition(")")[2].split()
    if fields[_STATE] in _GONE:
        raise _NoProcess
    return int(fields[_START_TICKS]), _boot_id()


def _unseen(pid: int) -> tuple[int, str]:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        raise _NoProcess from None
    # The process exists: ``kill`` either succeeded, or raised `PermissionError` itself.
    raise PermissionError


def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text().strip().replace("-", "")
    except OSError:
        return ""
