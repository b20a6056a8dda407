"""Writes files that survive a power cut (fsync of the file and of its folder), and opens lock files."""

from __future__ import annotations

import errno
import os
import stat
import uuid
from pathlib import Path

from omnisupport_ingest.errors import IngestError


def sync_folder(folder: Path) -> None:
    """Make the names in ``folder`` durable (fsync)."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    """Make the content of ``path`` durable (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class LockUnusable(IngestError):
    """Something that is no regular file stands where a lock file belongs.

    Fix: Move it away, and run the same again.
    """

    exit_code = 3


def open_lock(path: Path, *, create: bool = True) -> int:
    """Return a descriptor of the lock file ``path``; only its owner can read the file, and child processes do
    not inherit the descriptor.

    Never waits. Raises ``LockUnusable`` if there is a pipe or anything else that is no regular file, and
    ``FileNotFoundError`` if the file is missing and not to be created (``create``).
    """
    try:
        flags = os.O_RDWR | os.O_CREAT if create else os.O_RDONLY
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as problem:
        if problem.errno not in (errno.EISDIR, errno.ELOOP, errno.ENXIO):
            raise
        raise _no_lock(path) from None
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise _no_lock(path)


def _no_lock(path: Path) -> LockUnusable:
    return LockUnusable(
        f"{path} should be a lock file, and is no regular file.",
        fix="Move away what is there, and try again.",
    )


def create_exclusively(path: Path, content: bytes) -> bool:
    """Create ``path`` with all of ``content``, durable, readable by its owner only.

    Returns whether this call created it; False if it existed. No reader ever sees a part of it: the content
    is first written under another name, then linked to ``path``, which fails if ``path`` exists (POSIX
    ``link``).
    """
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    # No failpoint: its callers put one around the call.
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(draft, path)
        except FileExistsError:
            return False
        sync_folder(path.parent)
        return True
    finally:
        os.unlink(draft)


def replace(path: Path, content: bytes) -> None:
    """Write ``content`` to ``path`` in one durable step: readers see the old or the new file."""
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    # No failpoint: its callers put one around the call.
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)
    sync_folder(path.parent)
