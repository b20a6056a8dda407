"""The keys of subjects, by which personal values are encrypted before they land; kept apart from landing and
lake.

A subject is a person or whatever else personal values are of: one value of one kind of a source. Its key is
made when a value of it lands first, and is durable before that value is. To destroy it is to erase every copy
of what it encrypted, in landing, in raw, in backups of both. A destroyed key leaves its entry: the subject is
given no other one, so nothing of it that is delivered or read again can be read.

The keys are one SQLite file in a folder of its own, for its owner only. Subjects stand in it as keyed hashes.
A note beside that folder says which file it is, so that one that is lost is missed: one that was begun anew
would give erased subjects keys again, and a backup could not be restored beside it.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import sqlite3
from binascii import a2b_base64, b2a_base64
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import blake2b
from itertools import repeat
from pathlib import Path

import numpy as np
import pyarrow as pa
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from omnisupport_ingest.contracts import recent_keys
from omnisupport_ingest.contracts.recent_keys import ID_BYTES, SECRET_BYTES
from omnisupport_ingest.durable import create_exclusively, sync_folder
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.foreign import read_file
from omnisupport_ingest.sealed_requests import Address
from omnisupport_ingest.visiting import asked, asked_instead, require_here

FILE = "keys/subjects.sqlite"
"""Where the keys are, below the home."""

NOTE = "subject_keys"
"""Which file of keys the home has begun, below the home."""

NONCE_BYTES = 12
"""As AES-GCM has it (NIST SP 800-38D, 8.2)."""

DIGEST = r'"[0-9a-f]{16}"\]$'
"""The end of an identity that holds a hash of what was delivered. A regular expression for Python and RE2."""

_MOST_LETTERS = int(np.iinfo(np.int32).max)
"""Of one array of texts."""

_KEY_BYTES = SECRET_BYTES // 2
_NOTE_BYTES = 16
_WAIT_SECONDS = 60.0
_CACHE_KIBIBYTES = 64 * 1024


class SubjectKeysUnreadable(IngestError):
    """The keys of subjects cannot be read or written, or one is missing that nobody destroyed.

    Fix: Stop capture, and restore ``keys/`` of the home from its newest backup. Nothing landed without its
    key.
    """

    exit_code = 3


@dataclass(slots=True)
class SubjectKey:
    """The key of one subject. ``secret`` is None once it is destroyed."""

    id: bytes
    secret: bytes | None = field(repr=False)
    _cipher: AESGCM | None = field(default=None, init=False, repr=False, compare=False)

    def encrypted(self, text: bytes, of: bytes) -> bytes:
        """``text`` encrypted: id, nonce, and what AES-GCM makes of it. The key is not destroyed.

        The nonce is a keyed hash of ``text`` and ``of`` (the table), so the same text of the same subject and
        table is the same anew; that two are equal is all it tells (synthetic nonces: RFC 5297, 1.3.3).
        """
        return a2b_base64(encrypt_each([self], pa.array([text], pa.binary()), of)[0].as_py())

    def decrypted(self, body: bytes, of: bytes) -> bytes:
        """What ``encrypted`` made ``body``, without its id, from; ``InvalidTag`` if it is no such body."""
        if self._cipher is None:
            assert self.secret is not None, "the key is not destroyed"
            self._cipher = AESGCM(self.secret[:_KEY_BYTES])
        return self._cipher.decrypt(body[:NONCE_BYTES], body[NONCE_BYTES:], of)


def encrypt_each(
    keys: Iterable[SubjectKey], texts: pa.StringArray | pa.BinaryArray, of: bytes
) -> pa.StringArray:
    """What ``SubjectKey.encrypted`` makes of each of ``texts`` with its key, in base64; empty where the key
    is destroyed.

    One loop, and one call of base64, as this is most of what landing encrypted costs.
    """
    bodies: list[bytes] = []
    begin = of + b"\0"
    for key, text in zip(keys, texts.cast(pa.binary()).to_pylist(), strict=True):
        secret, cipher = key.secret, key._cipher
        if secret is None:
            bodies.append(b"")
            continue
        # AES-256 has the first half of the secret, the hash that makes nonces the other one.
        nonce = blake2b(begin + text, key=secret[_KEY_BYTES:], digest_size=NONCE_BYTES).digest()
        if cipher is None:
            cipher = key._cipher = AESGCM(secret[:_KEY_BYTES])
        bodies.append(key.id + nonce + cipher.encrypt(nonce, text, of))
    return _in_base64(bodies)


def _in_base64(bodies: Sequence[bytes]) -> pa.StringArray:
    """Each of ``bodies`` in base64, all by one call: each is filled up to whole triples, whose letters for
    what was filled in are the padding."""
    sizes = np.fromiter(map(len, bodies), np.int64, len(bodies))
    missing = -sizes % 3
    filled = map(bytes.ljust, bodies, (sizes + missing).tolist(), repeat(b"\0"))
    whole = b"".join(filled)
    letters = np.frombuffer(bytearray(b2a_base64(whole, newline=False)), np.uint8)
    if len(letters) > _MOST_LETTERS:
        raise pa.ArrowCapacityError("What is encrypted of one row group has more than 2 GB in base64.")
    offsets = np.zeros(len(bodies) + 1, np.int32)
    np.cumsum((sizes + missing) // 3 * 4, out=offsets[1:])
    for count in (1, 2):
        letters[offsets[1:][missing >= count] - count] = ord("=")
    return pa.StringArray.from_buffers(len(bodies), pa.py_buffer(offsets), pa.py_buffer(letters))


@dataclass(frozen=True, slots=True)
class SubjectKeys:
    """The keys in the file ``path``.

    ``service``: where a task asks for them on a machine without the home, which only reads them.
    """

    path: Path
    service: Address | None = field(default=None, compare=False)

    @property
    def made(self) -> bool:
        """Whether the file is there."""
        require_here(self.path)
        return self.path.exists()

    @property
    def file_id(self) -> tuple[int, int] | None:
        """Tells another file in its place; null: none is there."""
        try:
            found = self.path.stat()
        except FileNotFoundError:
            return None
        return found.st_dev, found.st_ino

    def ids_of(self, subjects: Sequence[tuple[str, str, str]]) -> list[bytes]:
        """The ids that the keys of ``subjects`` have or would have, none without a file; no key is made."""
        if not self.made:
            return []
        with self._open() as base:
            return _ids(base, subjects)

    def keys_of(self, subjects: Sequence[tuple[str, str, str]]) -> list[SubjectKey]:
        """The keys of distinct ``subjects`` (source, name, value), made where there are none.

        Durable then. ``SubjectKeysUnreadable`` if the file that the home had is not there.
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
        """The key of ``digest``, the same for all of the home: made with the file, and lost with it."""
        if (service := asked_instead(self.path, self.service)) is not None:
            return bytes.fromhex(asked(service, {"digest_key": True}, SubjectKeysUnreadable))
        with self._open() as base, failpoint("pii.subject_keys", "digests"):
            self._note(base)
            (secret,) = base.execute("SELECT secret FROM store").fetchone()
        return blake2b(key=secret, digest_size=_KEY_BYTES, person=b"digests").digest()

    def living(self, ids: Collection[bytes]) -> set[bytes]:
        """Those of ``ids`` whose key is there, and not destroyed."""
        if not self.made:
            return set()
        with self._open() as base:
            base.execute("BEGIN")
            return {each.id for each in _known(base, ids).values() if each.secret is not None}

    def by_id(self, ids: Iterable[bytes]) -> Mapping[bytes, SubjectKey]:
        """The keys of ``ids``, destroyed ones too. ``SubjectKeysUnreadable`` if the file lacks one."""
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
        """Destroy the keys of ``ids``; how many were there until now. Durable then, and overwritten.

        Who has no key yet is given none any more.
        """
        when, wanted = datetime.now(UTC).isoformat(), [*dict.fromkeys(ids)]
        with self._open() as base, failpoint("pii.subject_keys", "destroy"):
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
        """Note the windows of ``source`` that hold what destroyed keys encrypted: they are made again."""
        with self._open() as base, failpoint("pii.subject_keys", "windows"):
            base.execute("BEGIN IMMEDIATE")
            base.executemany(
                "INSERT OR IGNORE INTO windows VALUES (?, ?, ?)",
                ((source, window, each) for each, named in windows.items() for window in named),
            )
            base.execute("COMMIT")

    def destroyed_by_window(self, source: str) -> dict[str, str]:
        """By window of ``source`` that holds what destroyed keys encrypted, the SHA-256 of their ids."""
        if not self.made:
            return {}
        with self._open() as base:
            rows = base.execute(
                "SELECT window, id FROM windows WHERE source = ? ORDER BY window, id", (source,)
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
                # A commit is the deletion of the journal. Durable is that with EXTRA alone: after a loss of
                # power a journal that came back would take keys away, or bring a destroyed one back.
                base.execute("PRAGMA synchronous = EXTRA")
                # New keys fall on pages anywhere: all of them stay in memory until the one commit.
                base.execute(f"PRAGMA cache_size = -{_CACHE_KIBIBYTES}")
                # What is destroyed is overwritten in the file. The journal, which has it, is deleted with it.
                base.execute("PRAGMA secure_delete = ON")
                # No failpoint: an empty table, which a file of a former version lacks.
                base.execute(recent_keys.TABLE)
                yield base
        except sqlite3.Error as problem:
            raise SubjectKeysUnreadable(
                f"The keys of subjects in {self.path} cannot be used: {problem}.",
                fix="Restore the file from its newest backup. Nothing landed without its key.",
            ) from None

    def _make(self) -> None:
        """Make the file under another name, whole, and link it: who comes second finds the first one's."""
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
                base.execute("INSERT INTO store VALUES (1, ?)", (secrets.token_bytes(_KEY_BYTES),))
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
        """Note which file of keys the home has, before anything lands by a key; refuse another one."""
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


def digest(text: str, key: bytes) -> str:
    """16 hexadecimal digits for ``text``, which nobody can try values against who has not got the ``key``
    (``SubjectKeys.digest_key``)."""
    return blake2b(text.encode("utf-8", "surrogatepass"), key=key, digest_size=8).hexdigest()


def keyed_identity(identity: str, key: bytes) -> str:
    """``identity``, which ends in a hash of what was delivered (``DIGEST``), with the ``digest`` of that."""
    start, end = -len('0123456789abcdef"]'), -len('"]')
    return f'{identity[:start]}{digest(identity[start:end], key)}"]'


def row_subject(table: str) -> str:
    """The name of the subjects that the rows of ``table`` are which do not say whose they are."""
    return f"row of {table}"


_TABLES = """
CREATE TABLE store (one INTEGER PRIMARY KEY CHECK (one = 1), secret BLOB NOT NULL);
CREATE TABLE keys (id BLOB PRIMARY KEY, secret BLOB, destroyed_at TEXT) WITHOUT ROWID;
CREATE TABLE windows (source TEXT, window TEXT, id BLOB, PRIMARY KEY (source, window, id)) WITHOUT ROWID;
"""
"""And ``recent_keys.TABLE``."""


def _ids(base: sqlite3.Connection, subjects: Sequence[tuple[str, str, str]]) -> list[bytes]:
    """The id of the key of each subject: a keyed hash of it."""
    (secret,) = base.execute("SELECT secret FROM store").fetchone()
    ids = []
    of, begun = ("", ""), blake2b()
    for source, name, value in subjects:
        # Nearly always all are of one name.
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
    """The keys that are there, by their ids. Within an open transaction."""
    return {each: SubjectKey(each, secret) for each, secret in recent_keys.find(base, ids).items()}
