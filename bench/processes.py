"""Measure the memory and processor time of a tree of processes, from /proc (Linux)."""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


def tree(root: int) -> list[int]:
    """``root`` and every process below it that is there now."""
    children: dict[int, list[int]] = defaultdict(list)
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            fields = _fields(int(folder.name))
            if fields is not None:
                children[int(fields[1])].append(int(folder.name))
    found, waiting = [], [root]
    while waiting:
        pid = waiting.pop()
        found.append(pid)
        waiting += children[pid]
    return found


def peak_memory_mb(root: int | None = None, *, called: str | None = None) -> float:
    """The sum of each process's highest resident memory, in MB: no less than what they held at once.

    ``called``: only the processes that are called so.
    """
    pids = tree(os.getpid() if root is None else root)
    return sum(_peak(pid) for pid in pids if called is None or program(pid) == called)


def memory_mb(root: int) -> float:
    """What ``root`` and all below it hold now, in MB: memory that several share counts once."""
    return sum(_shared_out(pid) for pid in tree(root))


def parent(pid: int) -> int:
    """The process that ``pid`` was started by."""
    fields = _fields(pid)
    assert fields is not None, f"process {pid} is gone"
    return int(fields[1])


def processor_seconds(root: int) -> dict[int, float]:
    """User and system time so far, by process, of ``root`` and all below it."""
    found = {}
    for pid in tree(root):
        fields = _fields(pid)
        if fields is not None:
            found[pid] = (int(fields[11]) + int(fields[12])) / _TICKS
    return found


def spent(before: dict[int, float], after: dict[int, float]) -> float:
    """Processor seconds between two looks, of the processes that are there at the second."""
    return sum(seconds - before.get(pid, 0.0) for pid, seconds in after.items())


@dataclass
class Spent:
    """Processor seconds of a stretch; known at its end."""

    seconds: float = 0.0


def with_children(root: int) -> float:
    """User and system time so far of ``root``, of all below it, and of those of its children that ended."""
    total = 0
    for pid in tree(root):
        fields = _fields(pid)
        if fields is not None:
            total += sum(int(fields[place]) for place in ((11, 12, 13, 14) if pid == root else (11, 12)))
    return total / _TICKS


def _fields(pid: int) -> list[str] | None:
    """The fields of ``/proc/<pid>/stat`` from the state on; None if the process has gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return text[text.rindex(")") + 2 :].split()


def program(pid: int) -> str:
    """What the process ``pid`` is called; empty if it has gone."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _shared_out(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) / 1024 for line in lines if line.startswith("Pss:"))


def _peak(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:"))
