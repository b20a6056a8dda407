"""Encrypting events before they land: the personal part of every row image, by the key of its subject.

It is done where every way of capture passes, as a batch makes a row group of its events
(``landing.writer``), by whole columns. Keys are durable before the row group is written, so a crash in
between leaves keys that nothing needs, and never a value without a key.

A subject is the value of the contract's subject column. A row image that does not say it (NULL, or not sent)
is of its row: the key of the row stands for the subject, within its table.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from omnisupport_ingest.contracts.at_rest import readable_columns
from omnisupport_ingest.contracts.encrypted_images import Split, encrypt_images
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.contracts.subject_keys import SubjectKey, SubjectKeys, row_subject

_IMAGES = ("before", "after")
_WITHOUT_VALUES = pa.array(["t", "b"])
"""Operations that bring no value of a row: the ``after`` of a snapshot end is a range of keys."""

_NOTHING = Split(frozenset(), "")
"""What is readable of an image that no contract describes."""

_MOST_KEYS = 20_000
"""Keys kept in memory, about 2 KB each."""


@dataclass(frozen=True, slots=True)
class _Table:
    """A table: its full name, how its images are split, and the name of its subjects, if any."""

    name: str
    split: Split
    subject: str | None


class EncryptedLanding:
    """Encrypts the events of one source. ``contracts``: asked for those that are captured by now.

    Where one contract says encrypted, images that no contract describes, and logical messages, are encrypted
    whole, by a key of their row or table: of these nobody knows what is personal. The threads that write
    batches may call it together.
    """

    def __init__(
        self, source: str, keys: SubjectKeys, contracts: Callable[[], Iterable[TableContract]]
    ) -> None:
        self._source, self._keys, self._contracts = source, keys, contracts
        self._known: dict[tuple[str, str], SubjectKey] = {}
        self._known_of = keys.file_id
        self._lock = threading.Lock()

    def __call__(self, events: pa.Table) -> pa.Table:
        """``events`` (a table with the columns of ``EVENT_SCHEMA``) as they land."""
        contracts = {each.full_name: each for each in self._contracts()}
        if all(each.subject is None for each in contracts.values()):
            return events
        named = pc.binary_join_element_wise(events["source_schema"], events["source_table"], ".")
        for full_name in named.unique().to_pylist():
            contract = contracts.get(full_name)
            if contract is None:
                events = self._encrypted(
                    events, pc.equal(named, full_name), _Table(full_name, _NOTHING, None)
                )
            elif contract.subject is not None:
                split = Split(readable_columns(contract), contract.subject.column)
                table = _Table(full_name, split, contract.subject.name)
                events = self._encrypted(events, pc.equal(named, full_name), table)
        return events

    def _encrypted(self, events: pa.Table, of_table: pa.ChunkedArray, table: _Table) -> pa.Table:
        """``events`` with the images of one table encrypted."""
        with_values = pc.and_not(of_table, pc.is_in(events.column("op"), _WITHOUT_VALUES)).combine_chunks()
        for name in _IMAGES:
            index = events.schema.get_field_index(name)
            images = events.column(index).combine_chunks()
            mask = pc.and_(with_values, images.is_valid())
            if not mask.true_count:
                continue
            rows = pa.array(np.flatnonzero(np.asarray(mask)))
            encrypted = encrypt_images(
                images.take(rows),
                events.column("key").take(rows).combine_chunks(),
                table.split,
                table.name.encode(),
                partial(self._keys_of, table),
            )
            field = events.schema.field(index)
            events = events.set_column(index, field, pc.replace_with_mask(images, mask, encrypted))
        return events

    def _keys_of(self, table: _Table, whose: Sequence[tuple[bool, str]]) -> list[SubjectKey]:
        own = row_subject(table.name)
        wanted = [((table.subject if named else None) or own, text) for named, text in whose]
        with self._lock:
            if self._keys.file_id != self._known_of:
                # Lost or restored meanwhile: what is encrypted by a key that it lacks, nobody can read.
                self._known = {}
            new = [each for each in wanted if each not in self._known]
            if new:
                keys = self._keys.keys_of([(self._source, *each) for each in new])
                if len(self._known) + len(new) > _MOST_KEYS:
                    self._known = {each: self._known[each] for each in wanted if each in self._known}
                self._known |= dict(zip(new, keys, strict=True))
                self._known_of = self._keys.file_id
            return [self._known[each] for each in wanted]
