"""The map of tokens: which random token stands for which value, kept apart from the lake.

A token says nothing of its value; who may read the map may look it up. The same value has the same token in
every table, and a rebuild gives it again: the map is the record of that, so it is backed up with the home. It
is one SQLite file with mode 0600; the workers that judge events add to it, each column of a batch in one
transaction, before any file of the lake names the token.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.failpoints import failpoint

FILE = "pii_tokens.sqlite"

PREFIX = "tok_"
"""Begins every token; 32 random hexadecimal digits follow."""

NO_MAP = "none"
"""Stands for a map that is not there yet."""

_WAIT_SECONDS = 60.0
_AT_ONCE = 500


class TokenMapUnreadable(IngestError):
    """The map of tokens cannot be read or written; no token was given."""

    exit_code = 3


@dataclass(frozen=True, slots=True)
class TokenMap:
    """The map in the file ``path``."""

    path: Path

    def version(self) -> str:
        """Tells another map: one that was lost and begun anew gives other tokens. ``NO_MAP`` without one."""
        if not self.path.exists():
            return NO_MAP
        with self._open() as base:
            if base.execute("SELECT 1 FROM sqlite_master WHERE name = 'tokens'").fetchone() is None:
                # Whoever makes it was killed, or is at it.
                return NO_MAP
            return str(base.execute("SELECT name FROM map").fetchone()[0])

    def make(self) -> None:
        """Make the map if it is not there. Durable then."""
        if self.version() != NO_MAP:
            return
        with failpoint("pii.tokens", "map"):
            os.close(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
            with self._open() as base:
                _tables(base)

    def tokens_of(self, texts: Sequence[str]) -> list[str]:
        """The tokens of ``texts``, which are distinct; who has none yet is given one. Durable then.

        The map is made already.
        """
        if not texts:
            return []
        with self._open() as base:
            known = _known(base, texts)
            new = [text for text in texts if text not in known]
            if new:
                with failpoint("pii.tokens", "tokens"):
                    base.execute("BEGIN IMMEDIATE")
                    base.executemany(
                        "INSERT OR IGNORE INTO tokens VALUES (?, ?)",
                        ((text, PREFIX + secrets.token_hex(16)) for text in new),
                    )
                    base.execute("COMMIT")
                # Another worker may have been first.
                known |= _known(base, new)
        return [known[text] for text in texts]

    def value_of(self, token: str) -> str | None:
        """The value that ``token`` stands for; None if the map has no such token."""
        if not self.path.exists():
            return None
        with self._open() as base:
            found = base.execute("SELECT value FROM tokens WHERE token = ?", (token,)).fetchone()
        return None if found is None else found[0]

    def token_of(self, text: str) -> str | None:
        """The token of a value; None if it has none. Gives none."""
        if not self.path.exists():
            return None
        with self._open() as base:
            return _known(base, [text]).get(text)

    def forget(self, token: str) -> bool:
        """Take ``token`` and its value out; whether it was there. Seen again, the value gets another
        token."""
        if not self.path.exists():
            return False
        with self._open() as base, failpoint("pii.tokens", "forget"):
            # What is deleted is overwritten, so the file has no byte of it.
            base.execute("PRAGMA secure_delete = ON")
            return base.execute("DELETE FROM tokens WHERE token = ?", (token,)).rowcount > 0

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        try:
            with closing(sqlite3.connect(self.path, timeout=_WAIT_SECONDS, isolation_level=None)) as base:
                base.execute("PRAGMA synchronous = FULL")
                yield base
        except sqlite3.Error as problem:
            raise TokenMapUnreadable(
                f"The map of tokens {self.path} cannot be used: {problem}.",
                fix="Restore it from a backup of the home. Without it, move the file away: values then get "
                "other tokens, and every window with tokens is made again.",
            ) from None


def _tables(base: sqlite3.Connection) -> None:
    base.execute("BEGIN IMMEDIATE")
    # No failpoint: inside pii.tokens, where the map is made.
    base.execute("CREATE TABLE IF NOT EXISTS map (one INTEGER PRIMARY KEY CHECK (one = 1), name TEXT)")
    base.execute("INSERT OR IGNORE INTO map VALUES (1, ?)", (secrets.token_hex(8),))
    base.execute(
        "CREATE TABLE IF NOT EXISTS tokens (value TEXT PRIMARY KEY, token TEXT NOT NULL UNIQUE) WITHOUT ROWID"
    )
    base.execute("COMMIT")


def _known(base: sqlite3.Connection, texts: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for start in range(0, len(texts), _AT_ONCE):
        some = texts[start : start + _AT_ONCE]
        marks = ", ".join("?" * len(some))
        found |= dict(
            base.execute(f"SELECT value, token FROM tokens WHERE value IN ({marks})", some).fetchall()
        )
    return found
