"""Folders that no other user of the machine can enter: for Unix sockets, and for the files that Spark spills.

The rights of a socket or temporary file depend on the umask of its process, and its folder is usually shared
by all users. In a folder of mode 0700 neither matters.
"""

from __future__ import annotations

import os
import shutil
import socket
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.locks import try_lock, wait_for_lock
from omnisupport_ingest.settings import Settings

_LONGEST_FOLDER = 76
"""Bytes of a folder's path that leave room for the name of a socket: 104 in all on macOS, 108 on Linux."""

_LINK = "sockets"
_PREFIX = "omnisupport-"
_SCRATCH = f"{_PREFIX}spark-"


class NoScratch(IngestError):
    """The folder for Spark's temporary files cannot be made.

    Fix: Make room there or give the right, or set ``OMNISUPPORT_SPARK_LOCAL_DIR`` to another folder.
    """

    exit_code = 4


def socket_folder(run: Path) -> Path:
    """Return the folder for the sockets of a home: its folder ``run``, if the path is short enough.

    Otherwise it is a private folder in the machine's temporary folder. A link in ``run`` leads to it, so that
    the next start finds it again.
    """
    if len(os.fsencode(run)) <= _LONGEST_FOLDER:
        return run
    link = run / _LINK
    if link.is_symlink():
        target = link.readlink()
        if _is_private(target):
            return target
        # No failpoint: tells what runs now; nothing in it outlives a restart.
        link.unlink()
    target = Path(tempfile.mkdtemp(prefix=_PREFIX))
    link.symlink_to(target)
    return target


def remove_socket_folder(run: Path) -> None:
    """Remove the folder that ``socket_folder`` made outside of the home, if there is one."""
    link = run / _LINK
    if link.is_symlink() and _is_private(target := link.readlink()):
        # No failpoint: tells what runs now; nothing in it outlives a restart.
        shutil.rmtree(target, ignore_errors=True)


def socket_answers(path: Path, *, seconds: float = 0.5) -> bool:
    """Whether something accepts connections on the Unix socket at ``path`` within ``seconds``."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(seconds)
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


@dataclass
class Scratch:
    """A folder for the files that one Spark spills and shuffles. A lock, which ends with this process, marks
    it as in use."""

    path: Path
    _descriptor: int

    @classmethod
    def take(cls, settings: Settings) -> Scratch:
        """Make such a folder, and remove those that killed processes left behind. Raises ``NoScratch`` if
        that fails."""
        parent = (settings.spark_local_dir or settings.home / "run").absolute()
        try:
            if settings.spark_local_dir is None:
                # No failpoint: scratch that is removed, also that of a killed process, before it is made
                # again.
                parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            _remove_left_behind(parent)
            while True:
                path = Path(tempfile.mkdtemp(prefix=_SCRATCH, dir=parent))
                descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
                wait_for_lock(descriptor)
                # Before it was locked, another start may have removed it as left behind.
                if path.exists():
                    break
                os.close(descriptor)
            (path / "tmp").mkdir(mode=0o700)
        except OSError as error:
            raise NoScratch(
                f"The folder for Spark's temporary files cannot be made in {parent}: {error.strerror}.",
                fix="Make room or give the right to write there, or set OMNISUPPORT_SPARK_LOCAL_DIR to "
                "another folder, which must exist.",
            ) from error
        return cls(path, descriptor)

    @property
    def tmp(self) -> Path:
        """The folder that Spark uses as the machine's temporary folder."""
        return self.path / "tmp"

    def remove(self) -> None:
        """Remove the folder with everything in it."""
        # No failpoint: scratch files, which the next command removes if this process is killed.
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._descriptor)


def _remove_left_behind(parent: Path) -> None:
    """Remove our folders in ``parent`` that no living process has locked."""
    for path in parent.glob(f"{_SCRATCH}*"):
        if not _is_private(path):
            continue
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            if try_lock(descriptor):
                # No failpoint: scratch that is removed, also that of a killed process, before it is made
                # again.
                shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(descriptor)


def _is_private(path: Path) -> bool:
    """Whether ``path`` is a folder of this user, not a link, that no other user may enter."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077
