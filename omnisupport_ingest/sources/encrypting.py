"""Encrypts events before they land: the personal part of every row image, by the key of its subject.

Events that are captured, delivered or consumed are encrypted when a batch writes them as a row group
(``landing.writer``), by whole columns. Rows that are read by queries are encrypted as they are read, because
a lookback compares them with what landed (``query.events``). Keys are durable before anything that they
encrypt is written. So a crash in between leaves unused keys, and never a value without a key.

A subject is the value of the contract's subject column. If a row image has no such value (NULL, or not sent),
its row is the subject: the key of the row, within its table.

A line or record is kept beside its event only if it could not be read; it is then encrypted whole.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from omnisupport_ingest.contracts.at_rest import readable_columns, rows_in_line
from omnisupport_ingest.contracts.encrypted_images import (
    Split,
    Whose,
    encrypt_divided,
    encrypt_images,
    encrypt_whole,
)
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.contracts.names import TableName
from omnisupport_ingest.contracts.subject_ciphers import DIGEST, keyed_identity
from omnisupport_ingest.contracts.subject_keys import FILE, SubjectKeys
from omnisupport_ingest.home import Home
from omnisupport_ingest.landing.rows import EVENT_SCHEMA, Division, LandedEvent
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.position import UNREAD
from omnisupport_ingest.sources.encrypting_apart import EncryptingProcess, KnownKeys

_IMAGES = ("before", "after")
_WITHOUT_VALUES = pa.array(["t", "b"])
"""Operations without values of a row: the ``after`` of a snapshot end is a key range."""

_NOTHING = Split(frozenset(), "")
"""The readable part of an image that no contract describes."""


@dataclass(frozen=True, slots=True)
class _Table:
    """A table: its full name, how its images are split, and the name of its subjects (None: not named)."""

    name: str
    split: Split
    subject: str | None


class EncryptedLanding:
    """Encrypts the events of one source. ``contracts`` returns the contracts of the tables captured now.

    If any contract says encrypted, images that no contract describes, and logical messages, are encrypted
    whole, by a key of their row or table, because it is unknown what in them is personal. The hash in an
    identity is keyed, so that nobody can test guessed values against it without the home's keys. Events of a
    table whose contract says plain stay as they are. Several writing threads may call it at the same time.
    """

    def __init__(
        self, source: str, keys: SubjectKeys, contracts: Callable[[], Iterable[TableContract]]
    ) -> None:
        self._keys, self._contracts = keys, contracts
        self._known, self._apart = KnownKeys(source, keys), EncryptingProcess(source, keys)
        self._digest_key: bytes | None = None
        self._divided: dict[str, _Table] = {}
        self._lock = threading.Lock()

    def __call__(self, events: pa.Table) -> pa.Table:
        """Return ``events`` (a table with the columns of ``EVENT_SCHEMA`` or ``DIVIDED_SCHEMA``) as they
        land."""
        events, done = self._with_divided(events)
        contracts = {each.full_name: each for each in self._contracts()}
        if all(each.encrypted_subject is None for each in contracts.values()):
            return events
        events = self._with_identities(self._with_envelopes(events, contracts), contracts)
        named = pc.binary_join_element_wise(events["source_schema"], events["source_table"], ".")
        for full_name in named.unique().to_pylist():
            contract = contracts.get(full_name)
            if contract is None:
                of_table, table = pc.equal(named, full_name), _Table(full_name, _NOTHING, None)
                events = self._encrypted(events, of_table, table, done)
            elif (subject := contract.encrypted_subject) is not None:
                split = Split(readable_columns(contract), subject.column)
                table = _Table(full_name, split, subject.name)
                events = self._encrypted(events, pc.equal(named, full_name), table, done)
        return events

    def close(self) -> None:
        """End the process that encrypts large blocks, if there is one."""
        self._apart.close()

    def divisions(self, table_names: Sequence[TableName]) -> list[Division | None]:
        """Return how the images of each table may arrive divided; None for a table whose images land as they
        are.

        ``__call__`` then encrypts their values in this way, even if the contract has changed by then.
        """
        contracts = {each.full_name: each for each in self._contracts()}
        return [
            self._division(full_name, contracts.get(full_name)) for full_name in map(".".join, table_names)
        ]

    def _division(self, full_name: str, contract: TableContract | None) -> Division | None:
        if contract is None or (subject := contract.encrypted_subject) is None:
            return None
        split = Split(readable_columns(contract), subject.column)
        self._divided[full_name] = _Table(full_name, split, subject.name)
        return Division(split.readable, split.subject)

    def identity(self, event: LandedEvent) -> str | None:
        """Return the ``identity`` of ``event`` as it lands."""
        contracts = {each.full_name: each for each in self._contracts()}
        if all(each.encrypted_subject is None for each in contracts.values()):
            return event.identity
        contract = contracts.get(f"{event.source_schema}.{event.source_table}")
        plain = event.identity is None or (contract is not None and contract.encrypted_subject is None)
        return event.identity if plain else self._keyed(event.identity or "")

    def _keyed(self, identity: str) -> str:
        if not re.search(DIGEST, identity):
            return identity
        with self._lock:
            if self._digest_key is None:
                self._digest_key = self._keys.digest_key()
        return keyed_identity(identity, self._digest_key)

    def _with_identities(self, events: pa.Table, contracts: dict[str, TableContract]) -> pa.Table:
        column = events.column("identity")
        if column.null_count == len(column):
            return events
        mask = pc.fill_null(pc.match_substring_regex(column, DIGEST), False)
        plain = [name for name, each in contracts.items() if each.encrypted_subject is None]
        named = pc.binary_join_element_wise(events["source_schema"], events["source_table"], ".")
        mask = pc.and_not(mask, pc.is_in(named, pa.array(plain, pa.string()))).combine_chunks()
        if not mask.true_count:
            return events
        made = [self._keyed(each) for each in column.filter(mask).to_pylist()]
        return _with(events, "identity", pc.replace_with_mask(column.combine_chunks(), mask, pa.array(made)))

    def _with_envelopes(self, events: pa.Table, contracts: dict[str, TableContract]) -> pa.Table:
        """Return ``events`` without the delivered lines, whose content is in the images. A line that could
        not be read stays and is encrypted whole; lines of a table whose contract says plain stay as they are.
        """
        column = events.column("envelope")
        if column.null_count == len(column):
            return events
        texts: list[str | None] = column.to_pylist()
        names = zip(events["source_schema"].to_pylist(), events["source_table"].to_pylist(), strict=True)
        waiting: dict[str, list[int]] = {}
        identities = events.column("identity").to_pylist()
        for row, full_name in enumerate(map(".".join, names)):
            contract = contracts.get(full_name)
            if texts[row] is None or (contract is not None and contract.encrypted_subject is None):
                continue
            if (identities[row] or "").startswith(UNREAD):
                waiting.setdefault(full_name, []).append(row)
            else:
                texts[row] = None
        for full_name, rows in waiting.items():
            contract = contracts.get(full_name)
            subject = contract.encrypted_subject if contract is not None else None
            table = _Table(full_name, _NOTHING, subject.name if subject else None)
            few = events.select(["key", *_IMAGES, "envelope"]).take(pa.array(rows)).to_pylist()
            found = encrypt_whole(
                [str(each["envelope"]) for each in few],
                [_whose(each, subject.column if subject else None) for each in few],
                full_name.encode(),
                partial(self._known.of, table.name, table.subject),
            )
            for row, text in zip(rows, found, strict=True):
                texts[row] = text
        return _with(events, "envelope", pa.array(texts, pa.string()))

    def _with_divided(self, events: pa.Table) -> tuple[pa.Table, dict[str, pa.BooleanArray]]:
        """Return ``events`` with the columns of ``EVENT_SCHEMA``, their divided images encrypted; and by
        image, for which events that was done."""
        if events.num_columns == len(EVENT_SCHEMA):
            return events, {}
        found, done = events.select(EVENT_SCHEMA.names), dict[str, pa.BooleanArray]()
        named = pc.binary_join_element_wise(events["source_schema"], events["source_table"], ".")
        for name in _IMAGES:
            done[name] = _one_chunk(events.column(f"{name}_hidden")).is_valid()
            for full_name in named.filter(done[name]).unique().to_pylist():
                mask = pc.and_(done[name], pc.equal(named, full_name)).combine_chunks()
                few = events.select([name, f"{name}_hidden", f"{name}_subject", "key"])
                if mask.true_count == len(mask):
                    found = _with(found, name, self._of_divided(few, full_name))
                else:
                    encrypted = self._of_divided(few.filter(mask), full_name)
                    images = _one_chunk(found.column(name))
                    found = _with(found, name, pc.replace_with_mask(images, mask, encrypted))
        return found, done

    def _of_divided(self, events: pa.Table, full_name: str) -> pa.StringArray:
        """Return the images of one table; ``events`` has their parts, the subject and the key of the row."""
        table = self._divided[full_name]
        assert table.subject is not None, "images are divided by the contract's subject"
        if (images := self._apart.encrypted(full_name, table.subject, events)) is not None:
            return images
        readable, hidden, subjects, rows = map(_one_chunk, events.columns)
        keys_of = partial(self._known.of, full_name, table.subject)
        return encrypt_divided(readable, hidden, Whose.said(subjects, rows), full_name.encode(), keys_of)

    def _encrypted(
        self, events: pa.Table, of_table: pa.ChunkedArray, table: _Table, done: dict[str, pa.BooleanArray]
    ) -> pa.Table:
        """Return ``events`` with the images of one table encrypted, except those that are ``done``."""
        with_values = pc.and_not(of_table, pc.is_in(events.column("op"), _WITHOUT_VALUES)).combine_chunks()
        for name in _IMAGES:
            index = events.schema.get_field_index(name)
            images = _one_chunk(events.column(index))
            mask = pc.and_(with_values, images.is_valid())
            if name in done:
                mask = pc.and_not(mask, done[name])
            if not mask.true_count:
                continue
            rows = pa.array(np.flatnonzero(np.asarray(mask)))
            encrypted = encrypt_images(
                images.take(rows),
                events.column("key").take(rows).combine_chunks(),
                table.split,
                table.name.encode(),
                partial(self._known.of, table.name, table.subject),
            )
            events = _with(events, name, pc.replace_with_mask(images, mask, encrypted))
        return events


def encrypting_store(home: Home, source: str, contracts: Iterable[TableContract]) -> LandingStore:
    """Return the landing of ``source`` in ``home``, which encrypts before writing what ``contracts`` say."""
    fixed = tuple(contracts)
    encrypting = EncryptedLanding(source, SubjectKeys(home.path / FILE), lambda: fixed)
    return LandingStore(home.landing, source, as_landed=encrypting, identity_as_landed=encrypting.identity)


def _one_chunk(column: pa.ChunkedArray) -> pa.Array:
    """Return ``column`` as one array; no copy if it already is one."""
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _with(events: pa.Table, name: str, column: pa.Array) -> pa.Table:
    index = events.schema.get_field_index(name)
    return events.set_column(index, events.schema.field(index), column)


def _whose(event: dict[str, str | None], subject: str | None) -> tuple[bool, str]:
    """Return whose key encrypts an event that could not be read as a change.

    (True, the value of column ``subject`` in its line or an image); without one (False, its row's key).
    """
    for name in ("after", "before", "envelope"):
        for row in rows_in_line(event[name]):
            value = row.get(subject) if subject is not None else None
            if isinstance(value, str):
                return True, value
    return False, event["key"] or ""
