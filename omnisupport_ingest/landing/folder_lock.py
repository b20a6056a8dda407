"""One live writer per data folder, told apart from a dead one by the kernel.

The lock is ``flock`` on the folder itself: it ends with its process, however that dies, so what is
found unlocked and without a manifest is garbage and may be cleared.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import weakref
from pathlib import Path

from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.locks import try_lock


class FolderLock:
    """A held lock on ``folder``; made by ``take``. It ends with ``release`` or with the process."""

    def __init__(self, folder: Path, descriptor: int) -> None:
        self.folder = folder
        self._close = weakref.finalize(self, os.close, descriptor)

    @classmethod
    def take(cls, folder: Path) -> FolderLock | None:
        """Lock ``folder``, making it if it is not there; none if another writer holds it."""
        while True:
            # No failpoint: a folder: one that is there already is as good.
            folder.mkdir(exist_ok=True, mode=0o700)
            try:
                descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            except FileNotFoundError:
                continue
            if not try_lock(descriptor):
                os.close(descriptor)
                return None
            if _is_still(folder, descriptor):
                return cls(folder, descriptor)
            # A writer removed its folder between our open and our lock: lock the new one.
            os.close(descriptor)

    def remove_contents(self) -> None:
        """Delete everything in the folder."""
        for entry in list(os.scandir(self.folder)):
            with failpoint("landing.clear", self.folder.name):
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path)
                else:
                    os.unlink(entry.path)

    def release(self) -> None:
        """Let go of the folder, removing it if it is empty."""
        if self._close.alive:
            with contextlib.suppress(OSError):  # a folder that holds data stays
                # No failpoint: only an empty folder goes, and then nothing is lost.
                self.folder.rmdir()
            self._close()


def _is_still(folder: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(folder), os.fstat(descriptor))
    except FileNotFoundError:
        return False
