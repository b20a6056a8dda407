"""Which processes are at work in a data folder, as the operating system tells it."""

from __future__ import annotations

import re
from pathlib import Path

import psutil

from omnisupport_ingest.foreign import read_file

_PID = re.compile(r"[0-9]{1,9}")


def live_postmaster(data: Path) -> int | None:
    """The pid in ``postmaster.pid`` if that process is a server at work in ``data``.

    Process ids are used again (in a container the same few, at every start) and a killed child may
    stay as a zombie, so the pid alone proves nothing; the working folder of a server is its data.
    """
    try:
        first = read_file(data / "postmaster.pid").decode().split("\n", 1)[0].strip()
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    pid = int(first) if _PID.fullmatch(first) else 0
    return pid if pid and _works_in(pid, data) else None


def _works_in(pid: int, data: Path) -> bool:
    try:
        return Path(psutil.Process(pid).cwd()) == data.resolve()
    except (psutil.Error, OSError):
        return False


def any_at_work(data: Path) -> bool:
    """Whether any process works in ``data``: the server or, after its death, one of its sessions."""
    return any(_works_in(pid, data) for pid in psutil.pids())


def remove_stale_locks(data: Path, socket: Path) -> None:
    """Remove the lock files of a dead server whose pid somebody else has now.

    PostgreSQL would take that somebody for a server. Safe only when no process works in the data.
    """
    for lock in (data / "postmaster.pid", *socket.glob(".s.PGSQL.*.lock")):
        lock.unlink(missing_ok=True)
