"""The lock of a data folder: at most one live writer has it, and the kernel releases it when the writer dies.

The lock is ``flock`` on the folder itself. A folder that is unlocked and has no manifest was left by a dead
writer and may be removed.
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
    """A held lock on ``folder``, made by ``take``. It ends with ``release`` or with the process."""

    def __init__(self, folder: Path, descriptor: int) -> None:
        self.folder = folder
        self._close = weakref.finalize(self, os.close, descriptor)

    @classmethod
    def take(cls, folder: Path) -> FolderLock | None:
        """Lock ``folder``, and create it if it is missing. Returns None if another writer holds it."""
        while True:
            # No failpoint: making a folder that exists already does no harm.
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
            # A writer removed its folder after we opened it and before we locked it. Lock the new one.
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
        """Release the lock; remove the folder if it is empty."""
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
