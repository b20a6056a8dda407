"""The keys of subjects, which encrypt personal values before they land. They are kept apart from landing and
lake.

A subject is a person, or whatever else personal values belong to: one value of one kind of subject in a
source. Its key is made when a value of it first lands, and is durable before that value is. Destroying the
key erases every copy of what it encrypted: in landing, in raw, and in backups of both. A destroyed key leaves
an entry, so the subject gets no other key, and values of it that are delivered or read again stay unreadable.

The keys are one SQLite file, in a folder that only its owner can read. The file names subjects by keyed
hashes. A note beside that folder says which file the home uses, so a lost file is noticed. A new file in its
place would give erased subjects keys again, and no backup could be restored beside it.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import sqlite3
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path

from omnisupport_ingest.contracts import erased_subjects, recent_keys
from omnisupport_ingest.contracts.recent_keys import ID_BYTES, SECRET_BYTES
from omnisupport_ingest.contracts.subject_ciphers import KEY_BYTES, SubjectKey
from omnisupport_ingest.durable import create_exclusively, sync_folder
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.foreign import read_file
from omnisupport_ingest.sealed_requests import Address
from omnisupport_ingest.visiting import asked, asked_instead, require_here

FILE = erased_subjects.FILE
"""Path of the file of keys, below the home."""

NOTE = "subject_keys"
"""Path of the note that says which file of keys the home uses, below the home."""

_NOTE_BYTES = 16
_WAIT_SECONDS = 60.0
_CACHE_KIBIBYTES = 64 * 1024


class SubjectKeysUnreadable(IngestError):
    """The keys of subjects cannot be read or written, or one is missing that nobody destroyed.

    Fix: Stop capture, and restore ``keys/`` of the home from its newest backup. Nothing landed without its
    key.
    """

    exit_code = 3


@dataclass(frozen=True, slots=True)
class ErasedIds:
    """The ids of all erased subjects of a home, and the secret of which they are keyed hashes."""

    ids: frozenset[bytes]
    secret: bytes = field(repr=False)

    def among(self, subjects: Sequence[tuple[str, str, str]]) -> list[bool]:
        """Return whether each of ``subjects`` (source, name, value) is erased."""
        return [each in self.ids for each in _hashed(self.secret, subjects)]


@dataclass(frozen=True, slots=True)
class SubjectKeys:
    """The keys in the file ``path``.

    ``service``: the address at which a task on a machine without the home requests keys. Such a task only
    reads.
    """

    path: Path
    service: Address | None = field(default=None, compare=False)

    @property
    def made(self) -> bool:
        """Whether the file exists."""
        require_here(self.path)
        return self.path.exists()

    @property
    def file_id(self) -> tuple[int, int] | None:
        """Device and inode of the file: they differ if another file takes its place. None if there is no
        file."""
        try:
            found = self.path.stat()
        except FileNotFoundError:
            return None
        return found.st_dev, found.st_ino

    def ids_of(self, subjects: Sequence[tuple[str, str, str]]) -> list[bytes]:
        """Return the ids that the keys of ``subjects`` have or would have, without making keys; empty without
        a file."""
        if not self.made:
            return []
        with self._open() as base:
            return _ids(base, subjects)

    def keys_of(self, subjects: Sequence[tuple[str, str, str]]) -> list[SubjectKey]:
        """Return the keys of distinct ``subjects`` (source, name, value); missing ones are made. Durable on
        return.

        Raises ``SubjectKeysUnreadable`` if the home had a file of keys and it is not there.
        """
        with self._open() as base, failpoint("pii.subject_keys", "keys"):
            self._note(base)
            ids = _ids(base, subjects)
            base.execute("BEGIN IMMEDIATE")
            known = _known(base, ids)
            new = sorted(each for each in ids if each not in known)
            drawn = os.urandom(SECRET_BYTES * len(new))
            made = [
                SubjectKey(each, drawn[start : start + SECRET_BYTES])
                for each, start in zip(new, range(0, len(drawn), SECRET_BYTES), strict=True)
            ]
            if len(new) < recent_keys.FEW:
                each_new = ((each.id, each.secret) for each in made)
                base.executemany("INSERT INTO keys (id, secret) VALUES (?, ?)", each_new)
            else:
                recent_keys.add(base, new, drawn)
            base.execute("COMMIT")
        known |= zip(new, made, strict=True)
        return [known[each] for each in ids]

    def digest_key(self) -> bytes:
        """Return the key of ``digest``, the same for the whole home. It is made with the file, and lost with
        it."""
        if (service := asked_instead(self.path, self.service)) is not None:
            return bytes.fromhex(asked(service, {"digest_key": True}, SubjectKeysUnreadable))
        with self._open() as base, failpoint("pii.subject_keys", "digests"):
            self._note(base)
            (secret,) = base.execute("SELECT secret FROM store").fetchone()
        return blake2b(key=secret, digest_size=KEY_BYTES, person=b"digests").digest()

    def living(self, ids: Collection[bytes]) -> set[bytes]:
        """Return those of ``ids`` whose key exists and is not destroyed."""
        if not self.made:
            return set()
        with self._open() as base:
            base.execute("BEGIN")
            return {each.id for each in _known(base, ids).values() if each.secret is not None}

    def known(self, ids: Collection[bytes]) -> set[bytes]:
        """Return those of ``ids`` that have or had a key."""
        if not self.made:
            return set()
        with self._open() as base:
            base.execute("BEGIN")
            return {*_known(base, ids)}

    def destroyed(self, ids: Collection[bytes]) -> set[bytes]:
        """Return those of ``ids`` whose key is destroyed."""
        if not self.made:
            return set()
        with self._open() as base:
            base.execute("BEGIN")
            return {each.id for each in _known(base, ids).values() if each.secret is None}

    def erased(self) -> ErasedIds | None:
        """Return all subjects whose key is destroyed, or that must never get one; None if there are none.

        Raises ``SubjectKeysUnreadable`` if the home had a file of keys and it is not there: nobody knows then
        who was erased.
        """
        if not self.made:
            if self._noted.exists():
                raise self._another("is not there, though it says which subjects are erased")
            return None
        with self._open() as base:
            ids = frozenset(each for (each,) in base.execute("SELECT id FROM keys WHERE secret IS NULL"))
            (secret,) = base.execute("SELECT secret FROM store").fetchone()
        return ErasedIds(ids, secret) if ids else None

    def make(self) -> None:
        """Make the file if there is none. Raises ``SubjectKeysUnreadable`` if the home had one."""
        with self._open() as base:
            self._note(base)

    def by_id(self, ids: Iterable[bytes]) -> Mapping[bytes, SubjectKey]:
        """Return the keys of ``ids``, destroyed ones too. Raises ``SubjectKeysUnreadable`` if the file lacks
        one."""
        wanted = list(dict.fromkeys(ids))
        if not wanted:
            return {}
        if (service := asked_instead(self.path, self.service)) is not None:
            found_secrets = asked(service, {"by_id": [each.hex() for each in wanted]}, SubjectKeysUnreadable)
            return {
                each: SubjectKey(each, None if secret is None else bytes.fromhex(secret))
                for each, secret in zip(wanted, found_secrets, strict=True)
            }
        if not self.made:
            raise self._missing()
        with self._open() as base:
            base.execute("BEGIN")
            found = _known(base, wanted)
        if len(found) < len(wanted):
            raise self._missing()
        return {each: found[each] for each in wanted}

    def destroy(self, ids: Iterable[bytes]) -> int:
        """Destroy the keys of ``ids`` and overwrite their secrets. Durable on return.

        Return how many of them existed until now. A subject that has no key yet cannot get one any more.
        Raises ``SubjectKeysUnreadable`` if the file is not the one of this home: its keys would stay.
        """
        when, wanted = datetime.now(UTC).isoformat(), [*dict.fromkeys(ids)]
        with self._open() as base, failpoint("pii.subject_keys", "destroy"):
            self._note(base)
            base.execute("BEGIN IMMEDIATE")
            living = [each for each in _known(base, wanted).values() if each.secret is not None]
            for each in wanted:
                base.execute(
                    "UPDATE keys SET secret = NULL, destroyed_at = ? WHERE id = ? AND secret IS NOT NULL",
                    (when, each),
                )
                base.execute("INSERT OR IGNORE INTO keys VALUES (?, NULL, ?)", (each, when))
            recent_keys.overwrite(base, wanted)
            base.execute("COMMIT")
        return len(living)

    def name_windows(self, source: str, windows: Mapping[bytes, Iterable[str]]) -> None:
        """Record the windows of ``source`` that hold values of keys; they are made again once these are
        destroyed."""
        with self._open() as base, failpoint("pii.subject_keys", "windows"):
            self._note(base)
            base.execute("BEGIN IMMEDIATE")
            base.executemany(
                "INSERT OR IGNORE INTO windows VALUES (?, ?, ?)",
                ((source, window, each) for each, named in windows.items() for window in named),
            )
            base.execute("COMMIT")

    def windows_of(self, source: str, ids: Collection[bytes]) -> set[str]:
        """Return the windows of ``source`` that were named for keys ``ids``."""
        if not self.made:
            return set()
        with self._open() as base:
            rows = base.execute("SELECT window, id FROM windows WHERE source = ?", (source,)).fetchall()
        return {window for window, each in rows if each in ids}

    def note_names(self, source: str, names: Mapping[str, erased_subjects.ErasedName]) -> None:
        """Record ``names``, of the subjects by table, that are erased; the first name of a table counts."""
        with self._open() as base, failpoint("pii.subject_keys", "names"):
            self._note(base)
            base.execute("BEGIN IMMEDIATE")
            erased_subjects.note(base, source, names)
            base.execute("COMMIT")

    def destroyed_by_window(self, source: str) -> dict[str, str]:
        """Return, for each window of ``source`` that holds values of destroyed keys, the SHA-256 of their
        ids."""
        if not self.made:
            return {}
        with self._open() as base:
            rows = base.execute(
                # The windows of a key are named before it is destroyed: until then nothing is to be made
                # again.
                "SELECT window, id FROM windows JOIN keys USING (id)"
                " WHERE source = ? AND secret IS NULL ORDER BY window, id",
                (source,),
            ).fetchall()
        found: dict[str, hashlib._Hash] = {}
        for window, each in rows:
            found.setdefault(window, hashlib.sha256()).update(each)
        return {window: digest.hexdigest() for window, digest in found.items()}

    def _missing(self) -> SubjectKeysUnreadable:
        return SubjectKeysUnreadable(
            f"{self.path} lacks the key of values that landed encrypted, and knows of no destruction.",
            fix="Restore the file from its newest backup: without the key nobody can read these values. "
            "Nothing was changed.",
        )

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        require_here(self.path)
        try:
            if not self.path.exists():
                self._make()
            with closing(sqlite3.connect(self.path, timeout=_WAIT_SECONDS, isolation_level=None)) as base:
                # SQLite commits by deleting the journal. Only EXTRA makes that durable: after a loss of
                # power, a journal that came back would remove new keys, or restore a destroyed one.
                base.execute("PRAGMA synchronous = EXTRA")
                # New keys change pages everywhere in the file: keep all of them in memory until the one
                # commit.
                base.execute(f"PRAGMA cache_size = -{_CACHE_KIBIBYTES}")
                # Overwrite destroyed secrets in the file. The journal still has them; it is deleted with the
                # commit.
                base.execute("PRAGMA secure_delete = ON")
                # No failpoint: empty tables, which a file of a former version lacks.
                base.execute(recent_keys.TABLE)
                base.execute(erased_subjects.TABLE)
                base.execute(_ERASED)
                yield base
        except sqlite3.Error as problem:
            raise SubjectKeysUnreadable(
                f"The keys of subjects in {self.path} cannot be used: {problem}.",
                fix="Restore the file from its newest backup. Nothing landed without its key.",
            ) from None

    def _make(self) -> None:
        """Make the whole file under another name, then link it. If two processes do, the second uses the
        first one's."""
        if self._noted.exists():
            raise self._another("is not there, though values have landed encrypted")
        folder = self.path.parent
        # No failpoint: its folder, and a draft that is no store of keys until pii.subject_keys links it.
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = folder / f".{self.path.name}.{secrets.token_hex(8)}"
        os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        try:
            with closing(sqlite3.connect(draft, isolation_level=None)) as base:
                base.execute("PRAGMA synchronous = FULL")
                base.executescript(_TABLES)
                base.execute("INSERT INTO store VALUES (1, ?)", (secrets.token_bytes(KEY_BYTES),))
            with failpoint("pii.subject_keys", "store"):
                try:
                    os.link(draft, self.path)
                except FileExistsError:
                    return
                sync_folder(folder)
                sync_folder(folder.parent)
        finally:
            draft.unlink(missing_ok=True)

    @property
    def _noted(self) -> Path:
        return self.path.parent.parent / NOTE

    def _note(self, base: sqlite3.Connection) -> None:
        """Record which file of keys the home uses, before anything lands by a key; refuse another file."""
        (secret,) = base.execute("SELECT secret FROM store").fetchone()
        own = hashlib.blake2b(key=secret, digest_size=_NOTE_BYTES, person=b"note").hexdigest()
        if not self._noted.exists():
            with failpoint("pii.subject_keys", "note"):
                create_exclusively(self._noted, f"{own}\n".encode())
        if read_file(self._noted).strip() != own.encode():
            raise self._another("is not the one by which values have landed encrypted in this home")

    def _another(self, problem: str) -> SubjectKeysUnreadable:
        return SubjectKeysUnreadable(
            f"The file of keys {self.path} {problem} ({self._noted}).",
            fix="Stop the capture, restore keys/ from its newest backup, and start again. Only if there is "
            "none, and what landed encrypted is lost for good: move that note away, and other keys are made.",
        )


_ERASED = "CREATE INDEX IF NOT EXISTS erased ON keys (id) WHERE secret IS NULL"
"""Finds the few erased subjects among millions that live."""

_TABLES = """
CREATE TABLE store (one INTEGER PRIMARY KEY CHECK (one = 1), secret BLOB NOT NULL);
CREATE TABLE keys (id BLOB PRIMARY KEY, secret BLOB, destroyed_at TEXT) WITHOUT ROWID;
CREATE TABLE windows (source TEXT, window TEXT, id BLOB, PRIMARY KEY (source, window, id)) WITHOUT ROWID;
"""
"""The tables of a new file, besides ``recent_keys.TABLE`` and ``erased_subjects.TABLE``."""


def _ids(base: sqlite3.Connection, subjects: Sequence[tuple[str, str, str]]) -> list[bytes]:
    """Return the id of each subject's key."""
    (secret,) = base.execute("SELECT secret FROM store").fetchone()
    return _hashed(secret, subjects)


def _hashed(secret: bytes, subjects: Iterable[tuple[str, str, str]]) -> list[bytes]:
    """Return a keyed hash of each of ``subjects`` (source, name, value)."""
    ids = []
    of, begun = ("", ""), blake2b()
    for source, name, value in subjects:
        # Nearly always all subjects have the same source and name.
        if (source, name) != of:
            of = source, name
            begun = blake2b(_text(f"{source}\0{name}\0"), key=secret, digest_size=ID_BYTES)
        hashed = begun.copy()
        hashed.update(_text(value))
        ids.append(hashed.digest())
    return ids


def _text(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _known(base: sqlite3.Connection, ids: Collection[bytes]) -> dict[bytes, SubjectKey]:
    """Return the existing keys by their ids. Call it within a transaction."""
    return {each: SubjectKey(each, secret) for each, secret in recent_keys.find(base, ids).items()}
