"""The newest keys of subjects, in blocks: how many keys are made at once, and durable, at little cost.

Ids are hashes, so a key that goes straight to its place in the B-tree ``keys`` touches a page of its own,
which is written and journaled. So the keys of one call are one row of ``recent``: their ids one after another
in their order, and their secrets in the same order. Blocks go into ``keys`` together, in the order of ids,
once they hold enough keys for its pages: then one write of a page brings several.

What stands in ``keys`` counts: a destroyed key has its entry there, and its secret in the block is zeros.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

ID_BYTES = 9
"""Of the id of a key, a keyed hash of its subject. 9 bytes are 12 characters of base64, whatever follows;
that two of 100 million subjects share an id has the odds of one in a million."""

SECRET_BYTES = 64

TABLE = """
CREATE TABLE IF NOT EXISTS recent (number INTEGER PRIMARY KEY, ids BLOB NOT NULL, secrets BLOB NOT NULL);
"""

FEW = 500
"""Fewer keys than this, made at once, go straight into ``keys``: so blocks stay few."""

_LEAST, _MOST = 1 << 16, 1 << 20
_PER_PAGE = 4
"""So many keys in blocks for each page of the file, between ``_LEAST`` and ``_MOST``, go into ``keys``."""

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
    """The secrets of those of ``ids`` that have a key, wherever it is; None if it is destroyed.

    Within an open transaction: else a key that another process moves or destroys between the two looks is in
    neither, or its zeros are taken for it.
    """
    assert base.in_transaction, "tree and blocks are looked at together"
    # So that those of one page are looked up one after another.
    wanted = in_order(ids)
    if not wanted:
        return {}
    # No failpoint: a SELECT, put together above.
    found: dict[bytes, bytes | None] = dict(
        base.execute(_FIND, {"ids": b"".join(wanted), "count": len(wanted)})
    )
    left = [each for each in wanted if each not in found] if found else wanted
    for number, hits in _in_blocks(base, left):
        (secrets,) = base.execute("SELECT secrets FROM recent WHERE number = ?", (number,)).fetchone()
        found |= {each: secrets[row * SECRET_BYTES : (row + 1) * SECRET_BYTES] for each, row in hits}
    return found


def in_order(ids: Iterable[bytes]) -> list[bytes]:
    """Return ``ids`` in an order that blocks may have: by their prefixes; those in order already as they
    are."""
    listed = [*ids]
    if len(listed) < 2:
        return listed
    prefixes = _prefixes(b"".join(listed))
    if bool((prefixes[1:] >= prefixes[:-1]).all()):
        return listed
    return [listed[place] for place in np.argsort(prefixes).tolist()]


def add(base: sqlite3.Connection, ids: Sequence[bytes], secrets: bytes) -> None:
    """Add keys, ``ids`` as ``in_order`` returns them, as a block, within the open transaction."""
    # No failpoint: the one of the transaction, in subject_keys.
    base.execute("INSERT INTO recent (ids, secrets) VALUES (?, ?)", (b"".join(ids), secrets))
    (size,) = base.execute("SELECT sum(length(ids)) FROM recent").fetchone()
    (pages,) = base.execute("PRAGMA page_count").fetchone()
    if size // ID_BYTES >= min(_MOST, max(_LEAST, _PER_PAGE * pages)):
        _move(base)


def overwrite(base: sqlite3.Connection, ids: Iterable[bytes]) -> None:
    """Make the secrets of ``ids`` in blocks zeros, within the open transaction; ``keys`` has entries of
    them."""
    for number, hits in _in_blocks(base, in_order(ids)):
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
    """Yield the numbers of the blocks that have some of ``wanted``, which are ``in_order``, with these and
    their places there."""
    if wanted:
        prefixes = _prefixes(b"".join(wanted))
        for number, block in base.execute("SELECT number, ids FROM recent").fetchall():
            if hits := _hits(block, wanted, prefixes):
                yield number, hits


def _hits(block: bytes, wanted: Sequence[bytes], prefixes: Numbers) -> list[tuple[bytes, int]]:
    """The ids of ``wanted``, which are in order, that ``block`` has, each with its place there."""
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
    """The first bytes of each of ``ids`` as numbers, which rise as the ids do."""
    table = np.frombuffer(ids, np.uint8).reshape(-1, ID_BYTES)[:, :_PREFIX_BYTES]
    return np.ascontiguousarray(table).view(">u8").ravel().astype(np.uint64)
