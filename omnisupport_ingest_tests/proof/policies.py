"""What contracts of the proof say of personal data, and what is left of a value then, in the oracle's words.

A value under a policy is worked out here anew, from what the documentation says of it. A token is random, so
it is looked up in the home's map: two values never share one there.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

KEEP, DROP, MASK, HASH, TOKENIZE = "keep", "drop", "mask", "hash", "tokenize"

KEYS: Mapping[str, str] = {
    "k1": "the first secret of the proof, long enough",
    "k2": "the other secret of the proof, long enough",
}
"""The secret keys of hashes, by their ids."""

_DIGITS = "[0-9]+"
_NO_BLANK = r"[^\t\n\f\r ]"


@dataclass(frozen=True)
class Policy:
    """What becomes of the values of a column. ``mask``: which, where they are masked."""

    policy: str
    mask: str = ""

    @property
    def plain(self) -> bool:
        return self.policy == KEEP

    @property
    def document(self) -> dict[str, str]:
        """The entry in a contract."""
        entry = {"policy": self.policy, "note": "Drawn by lot."}
        if self.policy == MASK:
            entry["mask"] = self.mask
        if self.mask == "pattern":
            entry |= {"pattern": _DIGITS, "replacement": "#"}
        return entry

    def left_of(self, text: str, secrets: Secrets) -> str:
        """What is left of a value, in a column that the lake has."""
        if self.policy == HASH:
            return secrets.hash_of(text)
        if self.policy == TOKENIZE:
            return secrets.token_of(text)
        if self.mask == "name":
            hidden = re.sub(rf"({_NO_BLANK}){_NO_BLANK}*", r"\1***", text)
            return hidden if re.search(_NO_BLANK, text) else "***"
        if self.mask == "pattern":
            return re.sub(_DIGITS, "#", text) if re.search(_DIGITS, text) else "***"
        assert self.mask == "text", self
        return "***"


@dataclass(frozen=True)
class Secrets:
    """``key``: the id of the key by which values are hashed. ``tokens``: the file of the home's map."""

    key: str = "k1"
    tokens: Path | None = None
    _known: dict[str, str] = field(default_factory=dict, init=False, repr=False, compare=False)

    def hash_of(self, text: str) -> str:
        secret = KEYS[self.key].encode()
        hashed = blake2b(text.encode("utf-8", "surrogatepass"), key=secret, person=b"value", digest_size=20)
        return f"{self.key}:{hashed.hexdigest()}"

    def token_of(self, text: str) -> str:
        """The token of ``text``; where it has none, words that no layer holds."""
        if text not in self._known:
            assert self.tokens is not None, "whoever tokenizes has a map"
            with closing(sqlite3.connect(self.tokens)) as base:
                found = base.execute("SELECT token FROM tokens WHERE value = ?", (text,)).fetchone()
            if found is None:
                return f"no token of {text}"
            self._known[text] = found[0]
        return self._known[text]


@dataclass(frozen=True)
class Protecting:
    """What the contracts of a home say of personal data.

    ``policies``: by table and column. ``subjects``: by table of which values land encrypted, the column that
    says whose they are. ``key``: the id of the key by which values are hashed.
    """

    policies: Mapping[str, Mapping[str, Policy]]
    subjects: Mapping[str, str] = field(default_factory=dict)
    key: str = "k1"


_KEEP = Policy(KEEP)
_PERSONAL: Mapping[str, Mapping[str, Policy]] = {
    "tickets": dict.fromkeys(("status", "note", "body", "cost", "note_2", "cost_2"), _KEEP),
    "agents": dict.fromkeys(("note", "body", "tags", "rate", "note_2", "rate_2"), _KEEP),
}
"""What every contract says of personal data, at the least. Of a table with no such column nothing is
decrypted that landed encrypted by an earlier contract, so copies of it would be other events."""


def _with(tickets: Mapping[str, Policy], agents: Mapping[str, Policy]) -> Mapping[str, Mapping[str, Policy]]:
    return {"tickets": {**_PERSONAL["tickets"], **tickets}, "agents": {**_PERSONAL["agents"], **agents}}


PROTECTIONS: tuple[Protecting, ...] = (
    Protecting(_PERSONAL),
    Protecting(
        _with(
            {"body": Policy(MASK, "name"), "note": Policy(HASH), "cost": Policy(DROP)},
            {"note": Policy(TOKENIZE), "body": Policy(HASH), "note_2": Policy(MASK, "text")},
        )
    ),
    Protecting(
        _with({"status": Policy(TOKENIZE), "note_2": Policy(HASH), "note": Policy(DROP)}, {}),
        {"tickets": "lane"},
        "k2",
    ),
    Protecting(
        _with(
            {"note": Policy(MASK, "pattern"), "body": Policy(HASH), "cost_2": Policy(DROP)},
            {"body": Policy(TOKENIZE), "note": Policy(HASH), "rate": Policy(DROP), "tags": Policy(DROP)},
        ),
        {"tickets": "id", "agents": "lane"},
    ),
)
"""What the contracts of a home may say by turns; with the first one all values are kept, and land plain.
One of them protects one table, and leaves events of the other as they landed."""
