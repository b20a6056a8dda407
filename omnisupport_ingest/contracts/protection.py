"""Protecting values: what the policies of a contract make of columns of texts.

The one meaning of every policy but ``drop``, which leaves the column out: a function from a column of
PostgreSQL's texts to one of protected texts. Each text is protected by itself, so it does not matter which
rows come together; NULL stays NULL.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial

import pyarrow as pa

from omnisupport_ingest.contracts.masking import masked
from omnisupport_ingest.contracts.model import Column, TableContract
from omnisupport_ingest.contracts.pg_types import INTEGERS
from omnisupport_ingest.contracts.pii_keys import HashKey, HashKeys
from omnisupport_ingest.contracts.pii_policies import DROP, HASH, MASK, TOKENIZE, is_plain
from omnisupport_ingest.contracts.subject_keys import SubjectKeys
from omnisupport_ingest.contracts.token_map import TokenMap

_NUMBER = re.compile(r"[+-]?[0-9]{1,40}")

Protect = Callable[[pa.StringArray], pa.StringArray]


@dataclass(frozen=True)
class Secrets:
    """What events need beside their contract: the ``keys`` of hashes, the ``tokens`` given so far, and the
    keys of ``subjects`` that decrypt what landed encrypted (null: the home has none)."""

    keys: HashKeys = field(default_factory=HashKeys)
    tokens: TokenMap | None = None
    subjects: SubjectKeys | None = None


@dataclass(frozen=True)
class Protection:
    """What becomes of the rows of one table of a contract that has policies."""

    contract: TableContract
    secrets: Secrets = field(default_factory=Secrets)

    @cached_property
    def columns(self) -> Mapping[str, Protect]:
        """By column of the lake whose values are protected, what protects them."""
        return {
            column.name: self._of(column)
            for column in self.contract.source_columns
            if not is_plain(column) and column.pii != DROP
        }

    @cached_property
    def kept(self) -> frozenset[str]:
        """The columns that rows of the lake have. Others, of which no policy speaks, go with the dropped
        ones."""
        return frozenset(self.contract.column_names)

    def row(self, image: Mapping[str, str | None]) -> dict[str, str | None]:
        """One row image, protected, in its order."""
        return {
            name: value if value is None or name not in self.columns else self.value(name, value)
            for name, value in image.items()
            if name in self.kept
        }

    def value(self, name: str, text: str) -> str:
        """One text of the column ``name`` of ``columns``, protected."""
        protected: str = self.columns[name](pa.array([text], pa.string()))[0].as_py()
        return protected

    def _of(self, column: Column) -> Protect:
        if column.pii == MASK:
            assert column.mask is not None, "a masked column says how"
            return partial(masked, column.mask)
        if column.pii == HASH:
            protect = hashing(self.secrets.keys.current)
        else:
            assert column.pii == TOKENIZE and self.secrets.tokens is not None, "tokens are kept by the home"
            protect = _distinct(self.secrets.tokens.tokens_of)
        return _of_numbers(protect) if column.type.kind in INTEGERS else protect


def needs_protection(contract: TableContract) -> bool:
    """Whether events of its table do not stay as they landed: a policy changes values, or they landed
    encrypted."""
    return contract.subject is not None or not all(map(is_plain, contract.source_columns))


def has_policy(contracts: Iterable[TableContract], policy: str) -> bool:
    """Whether a column of ``contracts`` has ``policy``."""
    return any(column.pii == policy for each in contracts for column in each.source_columns)


def hashing(key: HashKey) -> Protect:
    """What hashes a column of texts with ``key``."""
    return _distinct(lambda texts: [key.hash_of(text) for text in texts])


def _of_numbers(protect: Protect) -> Protect:
    """Protect whole numbers: one number has one text, however a file spells it (``007``, ``+7``)."""

    def spelled(text: str) -> str:
        return str(int(text)) if _NUMBER.fullmatch(text) else text

    return lambda texts: protect(_distinct(lambda found: [spelled(text) for text in found])(texts))


def _distinct(make: Callable[[list[str]], list[str]]) -> Protect:
    """Each distinct text is made another one once."""

    def protect(texts: pa.StringArray) -> pa.StringArray:
        encoded = texts.dictionary_encode()
        made = pa.array(make(encoded.dictionary.to_pylist()), pa.string())
        return made.take(encoded.indices)

    return protect
