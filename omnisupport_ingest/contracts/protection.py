"""Protecting values by the policies of a contract.

This defines every policy but ``drop``, which removes the column: a function from a column of PostgreSQL's
texts to a column of protected texts. Each text is protected by itself, whatever other rows come with it; NULL
stays NULL.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Mapping
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
    """Secrets that protecting events needs: the ``keys`` of hashes, the map of ``tokens``, and the keys of
    ``subjects`` that decrypt what landed encrypted (None: the home has none).
    """

    keys: HashKeys = field(default_factory=HashKeys)
    tokens: TokenMap | None = None
    subjects: SubjectKeys | None = None


@dataclass(frozen=True)
class Protection:
    """Protects the rows of the table of ``contract``."""

    contract: TableContract
    secrets: Secrets = field(default_factory=Secrets)

    @cached_property
    def columns(self) -> Mapping[str, Protect]:
        """The functions that protect values, by column of the lake."""
        return {
            column.name: self._of(column)
            for column in self.contract.source_columns
            if not is_plain(column) and column.pii != DROP
        }

    @cached_property
    def kept(self) -> Container[str]:
        """The columns of rows in the lake; columns without a policy that are not in the contract are dropped
        too.
        """
        return frozenset(self.contract.column_names)

    def row(self, image: Mapping[str, str | None]) -> dict[str, str | None]:
        """Return one row image, protected, with its columns in order."""
        return {
            name: value if value is None or name not in self.columns else self.value(name, value)
            for name, value in image.items()
            if name in self.kept
        }

    def value(self, name: str, text: str) -> str:
        """Return one text of the protected column ``name``, protected."""
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
    """Whether events of the table are changed after landing: by a policy, or by decryption."""
    return contract.encrypted_subject is not None or not all(map(is_plain, contract.source_columns))


def has_policy(contracts: Iterable[TableContract], policy: str) -> bool:
    """Whether a column of ``contracts`` has ``policy``."""
    return any(column.pii == policy for each in contracts for column in each.source_columns)


def hashing(key: HashKey) -> Protect:
    """Return the function that hashes a column of texts with ``key``."""
    return _distinct(lambda texts: [key.hash_of(text) for text in texts])


def _of_numbers(protect: Protect) -> Protect:
    """Return ``protect`` for whole numbers, which normalises their texts first (``007``, ``+7``)."""

    def spelled(text: str) -> str:
        return str(int(text)) if _NUMBER.fullmatch(text) else text

    return lambda texts: protect(_distinct(lambda found: [spelled(text) for text in found])(texts))


def _distinct(make: Callable[[list[str]], list[str]]) -> Protect:
    """Return a function that applies ``make`` once to each distinct text of a column."""

    def protect(texts: pa.StringArray) -> pa.StringArray:
        encoded = texts.dictionary_encode()
        made = pa.array(make(encoded.dictionary.to_pylist()), pa.string())
        return made.take(encoded.indices)

    return protect
