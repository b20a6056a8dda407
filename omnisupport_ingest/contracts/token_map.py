"""The map of tokens: which random token stands for which value, kept apart from the lake.

A token reveals nothing of its value without the map. One value has one token in every table, also after a
rebuild, so the map is backed up with the home. It is an SQLite file with mode 0600. The workers that judge
events add to it, each column of a batch in one transaction, before a file of the lake contains the token.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.sealed_requests import Address
from omnisupport_ingest.visiting import asked, asked_instead, require_here

FILE = "pii_tokens.sqlite"

PREFIX = "tok_"
"""Begins every token; 32 random hexadecimal digits follow."""

NO_MAP = "none"
"""The version of a map that does not exist yet."""

_WAIT_SECONDS = 60.0
_AT_ONCE = 500


class TokenMapUnreadable(IngestError):
    """The map of tokens cannot be read or written, so no value was given a token.

    Fix: Restore ``pii_tokens.sqlite`` from a backup of the home, and run the same again.
    """

    exit_code = 3


@dataclass(frozen=True, slots=True)
class TokenMap:
    """The map in the file ``path``.

    ``service``: the address at which a task on a machine without the home requests tokens.
    """

    path: Path
    service: Address | None = field(default=None, compare=False)

    def version(self) -> str:
        """Return an id of the map, which differs if the map was lost and made again; ``NO_MAP``
        without one.
        """
        if not self.path.exists():
            return NO_MAP
        with self._open() as base:
            if base.execute("SELECT 1 FROM sqlite_master WHERE name = 'tokens'").fetchone() is None:
                # Another process is making it, or was killed while it did.
                return NO_MAP
            return str(base.execute("SELECT name FROM map").fetchone()[0])

    def make(self) -> None:
        """Make the map if it does not exist. Durable on return."""
        if self.version() != NO_MAP:
            return
        with failpoint("pii.tokens", "map"):
            os.close(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
            with self._open() as base:
                _tables(base)

    def tokens_of(self, texts: Sequence[str]) -> list[str]:
        """Return the tokens of the distinct ``texts``; new ones are made. Durable on return.

        The map must exist.
        """
        if not texts:
            return []
        if (service := asked_instead(self.path, self.service)) is not None:
            found: list[str] = asked(service, {"tokens_of": list(texts)}, TokenMapUnreadable)
            return found
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
        """Return the value of ``token``; None if the map has no such token."""
        if not self.path.exists():
            return None
        with self._open() as base:
            found = base.execute("SELECT value FROM tokens WHERE token = ?", (token,)).fetchone()
        return None if found is None else found[0]

    def token_of(self, text: str) -> str | None:
        """Return the token of a value; None if it has none. Makes none."""
        if not self.path.exists():
            return None
        with self._open() as base:
            return _known(base, [text]).get(text)

    def forget(self, token: str) -> bool:
        """Remove ``token`` and its value; return whether it existed. The value gets another token if it comes
        again.
        """
        if not self.path.exists():
            return False
        with self._open() as base, failpoint("pii.tokens", "forget"):
            return base.execute("DELETE FROM tokens WHERE token = ?", (token,)).rowcount > 0

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        require_here(self.path)
        try:
            with closing(sqlite3.connect(self.path, timeout=_WAIT_SECONDS, isolation_level=None)) as base:
                base.execute("PRAGMA synchronous = FULL")
                # Overwrite deleted content in the file. For every connection: whoever adds tokens moves
                # entries to other pages, and the former place would keep a copy that no deletion overwrites.
                base.execute("PRAGMA secure_delete = ON")
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
