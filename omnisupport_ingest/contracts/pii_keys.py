"""The secret keys with which personal values are hashed.

``OMNISUPPORT_PII_KEYS`` lists keys as ``id=env:VARIABLE`` or ``id=file:PATH``, separated by commas. Every
value is hashed with the first, the current key. The others are former keys that are still in force: with them
people and ``verify`` recognise hashes in windows that are not made again yet. A hash begins with the id of
its key. The secrets are in the variables and files only.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from functools import cached_property

from omnisupport_ingest.contracts.named_secrets import ConnectionMissing, secret_in
from omnisupport_ingest.errors import IngestError

SETTING = "OMNISUPPORT_PII_KEYS"

SHORTEST_SECRET = 32
"""Least length of a secret in characters; a shorter one could be guessed, and with it every hash."""

NO_KEY = "none"
"""The version of the current key if there is none, or its secret cannot be read."""

_ENTRY = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,31})=(env|file):(.+)")
_DIGEST_BYTES = 20
_LONGEST_KEY = 64


class PiiKeyMissing(IngestError):
    """A contract hashes a column, and the key for that is not named, is not there, or is too short.

    Fix: Make a secret and name it in ``OMNISUPPORT_PII_KEYS``. No event was judged without it.
    """

    exit_code = 2


@dataclass(frozen=True, slots=True)
class NamedKey:
    """Where a key is: ``how`` (``env`` or ``file``) and the ``name`` of the variable or file."""

    id: str
    how: str
    name: str


@dataclass(frozen=True)
class HashKey:
    """A key. Every hash begins with its ``id``."""

    id: str
    secret: bytes = field(repr=False)

    def hash_of(self, text: str) -> str:
        """Return the hash of a value's text: ``<id>:<40 hexadecimal digits>``, the same in every table."""
        hashed = self._keyed.copy()
        hashed.update(text.encode("utf-8", "surrogatepass"))
        return f"{self.id}:{hashed.hexdigest()}"

    def check(self) -> str:
        """Return a check value that differs for another secret under the same id, and reveals no secret."""
        return hashlib.blake2b(key=self._of_fit_size, person=b"check", digest_size=8).hexdigest()

    @cached_property
    def _keyed(self) -> hashlib.blake2b:
        return hashlib.blake2b(key=self._of_fit_size, person=b"value", digest_size=_DIGEST_BYTES)

    @property
    def _of_fit_size(self) -> bytes:
        return self.secret if len(self.secret) <= _LONGEST_KEY else hashlib.blake2b(self.secret).digest()

    def __getstate__(self) -> dict[str, object]:
        # The cached hash objects cannot be pickled; a worker makes them again.
        return {"id": self.id, "secret": self.secret}


@dataclass(frozen=True, slots=True)
class HashKeys:
    """The keys in force, the ``current`` one first; empty if no contract hashes."""

    all: tuple[HashKey, ...] = ()

    @property
    def current(self) -> HashKey:
        """The key with which values are hashed; it exists if a contract hashes."""
        return self.all[0]


def named_keys(setting: str | None) -> tuple[NamedKey, ...]:
    """Return the keys that the setting names. Raises ``PiiKeyMissing`` if it is malformed."""
    found: dict[str, NamedKey] = {}
    for entry in (each.strip() for each in (setting or "").split(",")):
        if not entry:
            continue
        parts = _ENTRY.fullmatch(entry)
        if parts is None:
            # The entry may be the secret itself, so it is not quoted.
            raise PiiKeyMissing(
                f"Entry {len(found) + 1} of {SETTING} does not name a key.",
                fix="Write id=env:VARIABLE or id=file:PATH, with commas between keys, the current one first. "
                "The secret itself never stands there.",
            )
        key = NamedKey(*parts.groups())
        if found.setdefault(key.id, key) is not key:
            raise PiiKeyMissing(
                f"{SETTING} names the key {key.id!r} twice.", fix="Give each key an id of its own."
            )
    return tuple(found.values())


def keys_in_force(setting: str | None) -> HashKeys:
    """Return the keys with their secrets, at least one. Raises ``PiiKeyMissing`` if one is missing or
    unfit."""
    if not named_keys(setting):
        raise PiiKeyMissing(
            f"A contract hashes a column (x-cdc.pii), and {SETTING} names no key.",
            fix="Make a secret (openssl rand -hex 32), put it into a variable or a file with mode 0600, and "
            f"name that: {SETTING}=2026a=env:NAME or {SETTING}=2026a=file:/path. See docs/privacy.md.",
        )
    return HashKeys(tuple(map(_with_secret, named_keys(setting))))


def current_version(setting: str | None) -> str:
    """Return the version of the current key: its id and check value; ``NO_KEY`` without a key. Never raises.

    So a window that was made with another key, or another secret under its id, is recognised as stale.
    """
    try:
        named = named_keys(setting)
        key = _with_secret(named[0]) if named else None
    except PiiKeyMissing:
        return NO_KEY
    return NO_KEY if key is None else f"{key.id}.{key.check()}"


def _with_secret(named: NamedKey) -> HashKey:
    try:
        secret = secret_in(named.how, named.name, f"{SETTING} (key {named.id})", "secret")
    except ConnectionMissing as missing:
        raise PiiKeyMissing(missing.problem, fix=missing.fix) from None
    if len(secret) < SHORTEST_SECRET:
        raise PiiKeyMissing(
            f"The secret of the key {named.id} has {len(secret)} characters.",
            fix=f"Take one of {SHORTEST_SECRET} at least, that nobody can guess: openssl rand -hex 32",
        )
    return HashKey(named.id, secret.encode())
