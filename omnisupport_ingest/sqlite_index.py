"""The shared parts of SQLite indexes: transactions, checksums of rows, and the detection of a copied index.

An index repeats what other files say (manifests, the log of a table, states of windows), so it need not be
repaired. A row with a wrong checksum, or a file that was copied here, raises ``IndexDamaged``, and the owner
of the index rebuilds it.
"""

from __future__ import annotations

import contextlib
import sqlite3
import zlib
from collections.abc import Iterator
from pathlib import Path


class IndexDamaged(Exception):
    """Raised when an index contradicts its own checksums, or is a copy of another file."""


@contextlib.contextmanager
def writing(db: sqlite3.Connection) -> Iterator[None]:
    """Run the block in a transaction that may write; roll it back if the block raises."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            db.execute("ROLLBACK")
        raise
    db.execute("COMMIT")


@contextlib.contextmanager
def reading(db: sqlite3.Connection) -> Iterator[None]:
    """Run the block in a transaction that only reads: all its queries see one state of the index."""
    db.execute("BEGIN")
    try:
        yield
    finally:
        db.execute("ROLLBACK")


def checksum(*parts: object) -> int:
    """Return the CRC-32 of ``parts`` as text."""
    return zlib.crc32("\0".join(map(str, parts)).encode())


def require_checksum(expected: int, *parts: object) -> None:
    """Raise ``IndexDamaged`` if the checksum of ``parts`` is not ``expected``."""
    if expected != checksum(*parts):
        raise IndexDamaged


def location_id(file: Path) -> int:
    """Return a number, made from the inodes of ``file`` and its folders, that a copy of the file does not
    have.

    A copy that was made while others write may contain pages of several moments, each of which looks sound.
    The number is stored as SQLite's ``application_id``: 32 bits with a sign; 0 means none.
    """
    inodes = [each.stat().st_ino for each in (file, file.parent, file.parent.parent)]
    return checksum(*inodes) & 0x7FFFFFFF or 1


def require_location(db: sqlite3.Connection, file: Path) -> None:
    """Raise ``IndexDamaged`` if ``file`` is a copy: its tables were made in another file."""
    if db.execute("PRAGMA application_id").fetchone() != (location_id(file),):
        raise IndexDamaged
