"""Keep the newest keys of subjects in blocks, so that making many keys at once, durably, costs little.

Ids are hashes. So each key that goes straight into the B-tree ``keys`` changes another page, which is written
and journaled. Therefore the keys of one call are one row of ``recent``: their ids joined in ascending order,
and their secrets in the same order. When blocks hold enough keys for the pages of ``keys``, all are moved
there in the order of ids, so one write of a page adds several keys.

An entry in ``keys`` counts more than a block: a destroyed key has an entry there, and zeros as its secret in
the block.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

ID_BYTES = 9
"""Size of a key's id, which is a keyed hash of its subject. 9 bytes are exactly 12 characters of base64. That
any two of 100 million subjects share an id has the odds of one in a million."""

SECRET_BYTES = 64

TABLE = """
CREATE TABLE IF NOT EXISTS recent (number INTEGER PRIMARY KEY, ids BLOB NOT NULL, secrets BLOB NOT NULL);
"""

FEW = 500
"""Fewer new keys than this go straight into ``keys``, so that there are few blocks."""

_LEAST, _MOST = 1 << 16, 1 << 20
_PER_PAGE = 4
"""Blocks are moved once they hold so many keys per page of the file, but at least ``_LEAST`` keys; ``_MOST``
are always moved."""

_PREFIX_BYTES = 8

_NUMBERED = "WITH RECURSIVE numbers(n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM numbers WHERE n + 1 < :count)"
_ID = f"substr(:ids, {ID_BYTES} * n + 1, {ID_BYTES})"
_INSERT = f"""
{_NUMBERED} INSERT OR IGNORE INTO keys (id, secret)
SELECT {_ID}, substr(:secrets, {SECRET_BYTES} * n + 1, {SECRET_BYTES}) FROM numbers
"""
_FIND = f"{_NUMBERED} SELECT id, secret FROM numbers CROSS JOIN keys ON id = {_ID}"

Numbers = npt.NDArray[np.uint64]


def find(base: sqlite3.Connection, ids: Iterable[bytes]) -> dict[bytes, bytes | None]:
    """Return the secrets of those of ``ids`` that have a key, in ``keys`` or in a block; None if it is
    destroyed.

    Call it within a transaction. Otherwise another process may move or destroy a key between the two
    look-ups: then the key is found in neither, or its zeros are taken for its secret.
    """
    assert base.in_transaction, "tree and blocks are looked at together"
    # Sorted, so that ids on one page are looked up one after another.
    # No failpoint: a SELECT, put together above.
    wanted = sorted(ids)
    if not wanted:
        return {}
    found: dict[bytes, bytes | None] = dict(
        base.execute(_FIND, {"ids": b"".join(wanted), "count": len(wanted)})
    )
    left = [each for each in wanted if each not in found] if found else wanted
    for number, hits in _in_blocks(base, left):
        (secrets,) = base.execute("SELECT secrets FROM recent WHERE number = ?", (number,)).fetchone()
        found |= {each: secrets[row * SECRET_BYTES : (row + 1) * SECRET_BYTES] for each, row in hits}
    return found


def add(base: sqlite3.Connection, ids: Sequence[bytes], secrets: bytes) -> None:
    """Add keys as a block, within the open transaction. ``ids``: ascending. ``secrets``: joined, in their
    order."""
    # No failpoint: the one of the transaction, in subject_keys.
    base.execute("INSERT INTO recent (ids, secrets) VALUES (?, ?)", (b"".join(ids), secrets))
    (size,) = base.execute("SELECT sum(length(ids)) FROM recent").fetchone()
    (pages,) = base.execute("PRAGMA page_count").fetchone()
    if size // ID_BYTES >= min(_MOST, max(_LEAST, _PER_PAGE * pages)):
        _move(base)


def overwrite(base: sqlite3.Connection, ids: Iterable[bytes]) -> None:
    """Overwrite the secrets of ``ids`` in blocks with zeros, within the open transaction. Their entries in
    ``keys`` must exist."""
    for number, hits in _in_blocks(base, sorted(ids)):
        (found,) = base.execute("SELECT secrets FROM recent WHERE number = ?", (number,)).fetchone()
        secrets = bytearray(found)
        for _, row in hits:
            secrets[row * SECRET_BYTES : (row + 1) * SECRET_BYTES] = bytes(SECRET_BYTES)
        # No failpoint: the one of the transaction, in subject_keys.
        base.execute("UPDATE recent SET secrets = ? WHERE number = ?", (secrets, number))


def _move(base: sqlite3.Connection) -> None:
    """Move all keys of blocks into ``keys``."""
    blocks = base.execute("SELECT ids, secrets FROM recent").fetchall()
    ids = np.frombuffer(b"".join(each for each, _ in blocks), f"S{ID_BYTES}")
    order = np.argsort(ids, kind="stable")
    secrets = np.frombuffer(b"".join(each for _, each in blocks), f"V{SECRET_BYTES}")[order]
    # A destroyed key keeps its entry.
    # No failpoint: the one of the transaction, in subject_keys.
    base.execute(_INSERT, {"ids": ids[order].tobytes(), "secrets": secrets.tobytes(), "count": len(ids)})
    base.execute("DELETE FROM recent")


def _in_blocks(
    base: sqlite3.Connection, wanted: Sequence[bytes]
) -> Iterator[tuple[int, list[tuple[bytes, int]]]]:
    """Yield the number of each block that has some of ``wanted`` (ascending), and these ids with their
    indices in the block."""
    if wanted:
        prefixes = _prefixes(b"".join(wanted))
        for number, block in base.execute("SELECT number, ids FROM recent").fetchall():
            if hits := _hits(block, wanted, prefixes):
                yield number, hits


def _hits(block: bytes, wanted: Sequence[bytes], prefixes: Numbers) -> list[tuple[bytes, int]]:
    """Return those of ``wanted`` (ascending) that ``block`` has, each with its index there."""
    of_block = _prefixes(block)
    at = np.searchsorted(of_block, prefixes)
    alike = np.flatnonzero(of_block[np.minimum(at, len(of_block) - 1)] == prefixes)
    found: list[tuple[bytes, int]] = []
    for place, row in zip(alike.tolist(), at[alike].tolist(), strict=True):
        # Ids may share all bytes but the last.
        while block[row * ID_BYTES : row * ID_BYTES + _PREFIX_BYTES] == wanted[place][:_PREFIX_BYTES]:
            if block[row * ID_BYTES : (row + 1) * ID_BYTES] == wanted[place]:
                found.append((wanted[place], row))
            row += 1
    return found


def _prefixes(ids: bytes) -> Numbers:
    """Return the first bytes of each of ``ids`` as numbers that sort as the ids do."""
    table = np.frombuffer(ids, np.uint8).reshape(-1, ID_BYTES)[:, :_PREFIX_BYTES]
    return np.ascontiguousarray(table).view(">u8").ravel().astype(np.uint64)
