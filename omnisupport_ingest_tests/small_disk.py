"""A small file system of its own, which a test can fill."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class Disk:
    """A file system of its own at ``path``."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def full(self, *, but: int = 0) -> Iterator[None]:
        """All the room is taken, except ``but`` bytes; it is there again afterwards."""
        ballast = self.path / "ballast"
        room = os.statvfs(self.path)
        free = room.f_bavail * room.f_frsize
        with ballast.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, free - but)
        try:
            yield
        finally:
            ballast.unlink()


@contextmanager
def small_disk(path: Path, megabytes: int) -> Iterator[Disk]:
    """A disk of ``megabytes`` at the new folder ``path``; skips the test if it may not be mounted."""
    path.mkdir()
    size = f"size={megabytes}m,mode=755"
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", path], capture_output=True)
    if mounted.returncode:
        pytest.skip("a small file system can only be mounted by root")
    try:
        yield Disk(path)
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)
