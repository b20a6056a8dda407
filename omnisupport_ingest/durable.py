"""Writing files so that they survive a power cut: fsync of the file and of its folder."""

from __future__ import annotations

import os
import uuid
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """Make the names in ``folder`` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    """Make the content of ``path`` durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def create_exclusively(path: Path, content: bytes) -> bool:
    """Create ``path`` with all of ``content``, durable, readable by its owner only.

    Returns whether this call created it: false if it was there before. No reader ever sees a part
    of it: the content is written under another name first and linked to ``path``, which fails if
    ``path`` exists (POSIX ``link``).
    """
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
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
    """Write ``content`` to ``path``, durable, in one step: readers see the old or the new file."""
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)
    sync_folder(path.parent)
