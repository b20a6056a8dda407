"""The tables of the landing index, and how one manifest changes them."""

from __future__ import annotations

import functools
import json
import sqlite3
import uuid
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from omnisupport_ingest.json_values import from_plain
from omnisupport_ingest.landing.manifest import Manifest
from omnisupport_ingest.landing.names import chunk_prefix, offsets_prefix, stream_prefix
from omnisupport_ingest.landing.standing import BatchLine, EpochStanding, LandedPart
from omnisupport_ingest.position import Lsn, Position
from omnisupport_ingest.records import encode_line
from omnisupport_ingest.sqlite_index import IndexDamaged, checksum, require_checksum

FORMAT_VERSION = 1

TABLES = """
CREATE TABLE meta (one INTEGER PRIMARY KEY, made_for TEXT, stamp INTEGER, era TEXT, newest INTEGER,
    batches INTEGER, digest INTEGER);
CREATE TABLE batch (number INTEGER PRIMARY KEY, id TEXT UNIQUE, size INTEGER, changed INTEGER, line TEXT,
    windows TEXT, crc INTEGER);
CREATE TABLE part ("window" TEXT, batch TEXT, number INTEGER, facts TEXT, crc INTEGER,
    PRIMARY KEY ("window", batch, number)) WITHOUT ROWID;
CREATE TABLE "window" ("window" TEXT PRIMARY KEY, parts INTEGER, digest INTEGER, batches INTEGER,
    names INTEGER) WITHOUT ROWID;
CREATE TABLE reach (epoch INTEGER, last TEXT, batch TEXT, number INTEGER, first TEXT, "window" TEXT,
    PRIMARY KEY (epoch, last, batch, number)) WITHOUT ROWID;
CREATE TABLE epoch (number INTEGER PRIMARY KEY, standing TEXT, crc INTEGER);
"""
"""``epoch.standing`` is empty if it must be computed again, and NULL before it is computed first."""


BEHIND = "\U0010ffff"
"""Sorts behind every character of a name."""

Starts = Mapping[int, Lsn]
"""Where the stream of each epoch starts, from the epoch's record."""


def connect(file: Path) -> sqlite3.Connection:
    uri = f"{file.absolute().as_uri()}?mode=rw"
    db = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=60, check_same_thread=False)
    try:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute("PRAGMA cell_size_check = ON")
    except BaseException:
        db.close()
        raise
    return db


def insert(db: sqlite3.Connection, manifest: Manifest, size: int, changed: int) -> None:
    """Add a manifest, except to the standing of its epoch (see ``step``)."""
    batch_id = manifest.batch_id
    line, windows = BatchLine.of(manifest).to_text(), json.dumps(manifest.windows)
    crc = checksum(batch_id, line, windows)
    # No failpoint: landing.index is around this transaction, or the index is in memory.
    db.execute("UPDATE meta SET newest = newest + 1, batches = batches + 1, digest = digest + ?", (crc,))
    db.execute(
        "INSERT INTO batch VALUES ((SELECT newest FROM meta), ?, ?, ?, ?, ?, ?)",
        (batch_id, size, changed, line, windows, crc),
    )
    db.execute("INSERT INTO epoch VALUES (?, NULL, 0) ON CONFLICT DO NOTHING", (manifest.epoch,))
    for number, file in enumerate(manifest.files):
        part = LandedPart.of(manifest, file)
        facts = part.to_text()
        crc = checksum(part.window, batch_id, facts)
        db.execute("INSERT INTO part VALUES (?, ?, ?, ?, ?)", (part.window, batch_id, number, facts, crc))
        db.execute(
            'INSERT INTO "window" VALUES (?, 1, ?, 0, 0) ON CONFLICT DO UPDATE SET parts = parts + 1, '
            "digest = digest + excluded.digest",
            (part.window, crc),
        )
        reach = part.epoch, sortable(part.last), batch_id, number, sortable(part.first), part.window
        db.execute("INSERT INTO reach VALUES (?, ?, ?, ?, ?, ?)", reach)
    for window in manifest.windows:
        db.execute(
            'UPDATE "window" SET batches = batches + 1, names = names + ? WHERE "window" = ?',
            (digest_of([batch_id]), window),
        )


def digest_of(names: Iterable[str]) -> int:
    """Return a digest of ``names`` that does not depend on their order."""
    return sum(zlib.crc32(name.encode()) for name in names)


def forget(db: sqlite3.Connection, batch_id: str) -> None:
    """Remove all that ``insert`` added; the standing of the epoch is then computed again."""
    epoch_of = "SELECT line, windows, crc FROM batch WHERE id = ?"
    # No failpoint: landing.index is around this transaction, or the index is in memory.
    line, windows, crc = db.execute(epoch_of, (batch_id,)).fetchone()
    db.execute("UPDATE meta SET batches = batches - 1, digest = digest - ?", (crc,))
    db.execute("DELETE FROM batch WHERE id = ?", (batch_id,))
    epoch = BatchLine.from_text(batch_id, line).epoch
    for window in json.loads(windows):
        rows = db.execute(
            'SELECT facts, crc FROM part WHERE "window" = ? AND batch = ?', (window, batch_id)
        ).fetchall()
        db.execute('DELETE FROM part WHERE "window" = ? AND batch = ?', (window, batch_id))
        db.execute(
            'UPDATE "window" SET parts = parts - ?, digest = digest - ?, batches = batches - 1, '
            'names = names - ? WHERE "window" = ?',
            (len(rows), sum(crc for _, crc in rows), digest_of([batch_id]), window),
        )
        for facts, _ in rows:
            last = sortable(LandedPart.from_text(window, batch_id, facts).last)
            db.execute(
                "DELETE FROM reach WHERE epoch = ? AND last = ? AND batch = ?", (epoch, last, batch_id)
            )
    db.execute('DELETE FROM "window" WHERE parts = 0')
    touch(db, epoch)


def touch(db: sqlite3.Connection, epoch: int) -> None:
    # No failpoint: landing.index is around this transaction, or the index is in memory.
    db.execute("UPDATE epoch SET standing = '' WHERE number = ? AND standing IS NOT NULL", (epoch,))


def step(db: sqlite3.Connection, line: BatchLine) -> None:
    """Advance the standing of the batch's epoch by one batch."""
    text, crc = db.execute("SELECT standing, crc FROM epoch WHERE number = ?", (line.epoch,)).fetchone()
    if not text:
        return
    require_checksum(crc, text)
    following = standing_in(text).with_next(line)
    if following is None:
        touch(db, line.epoch)
    else:
        _save(db, following)


def _save(db: sqlite3.Connection, standing: EpochStanding) -> None:
    text = encode_line(standing)
    db.execute("INSERT OR REPLACE INTO epoch VALUES (?, ?, ?)", (standing.epoch, text, checksum(text)))


def fold(db: sqlite3.Connection, starts: Starts) -> None:
    """Compute the standing of every epoch that needs it, from the lines of its batches."""
    totals = db.execute("SELECT count(*), sum(crc) FROM batch").fetchone()
    if (totals[0], totals[1] or 0) != db.execute("SELECT batches, digest FROM meta").fetchone():
        raise IndexDamaged
    for number, text in db.execute("SELECT number, standing FROM epoch").fetchall():
        start = starts.get(number)
        if text and standing_in(text).start == start:
            continue
        standing = EpochStanding.folded(number, start, _lines(db, number))
        if standing.chunks + standing.files == 0 and standing.last_stream is None:
            # No failpoint: landing.index is around this transaction, or the index is in memory.
            db.execute("DELETE FROM epoch WHERE number = ?", (number,))
        else:
            _save(db, standing)
        if text is not None:
            # Some batches may now be behind a gap, or no longer be.
            db.execute("UPDATE meta SET era = ?", (uuid.uuid4().hex,))


@functools.lru_cache(maxsize=64)
def standing_in(text: str) -> EpochStanding:
    return from_plain(EpochStanding, json.loads(text))


def _lines(db: sqlite3.Connection, epoch: int) -> Iterator[BatchLine]:
    """Yield the batches of an epoch. The names of stream batches sort in the order of the stream."""
    for prefix in (chunk_prefix(epoch), stream_prefix(epoch), offsets_prefix(epoch), "f-"):
        for batch_id, line, windows, crc in db.execute(
            "SELECT id, line, windows, crc FROM batch WHERE id >= ? AND id < ? ORDER BY id",
            (prefix, prefix + BEHIND),
        ):
            require_checksum(crc, batch_id, line, windows)
            batch_line = BatchLine.from_text(batch_id, line)
            if batch_line.epoch == epoch:
                yield batch_line


def sortable(position: Position) -> str:
    """Return LSN and ordinal as text that sorts in their order."""
    return f"{position.commit_lsn.value:016x}{position.ordinal + 10**19:020d}"
