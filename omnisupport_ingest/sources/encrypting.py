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

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from omnisupport_ingest.contracts.at_rest import readable_columns
from omnisupport_ingest.contracts.encrypted_images import Split, encrypt_images
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.contracts.subject_keys import SubjectKey, SubjectKeys, row_subject

_IMAGES = ("before", "after")
_KEYLESS = pa.array(["t", "b", "m"])
"""Operations without a row: the ``after`` of a snapshot's boundary is a range of keys."""

_MOST_KEYS = 50_000
"""Keys kept in memory, about 2 KB each."""


class EncryptedLanding:
    """Encrypts the events of one source. ``contracts``: asked for those that are captured by now.

    The threads that write batches may call it together.
    """

    def __init__(
        self, source: str, keys: SubjectKeys, contracts: Callable[[], Iterable[TableContract]]
    ) -> None:
        self._source, self._keys, self._contracts = source, keys, contracts
        self._known: dict[tuple[str, str], SubjectKey] = {}
        self._lock = threading.Lock()

    def __call__(self, events: pa.Table) -> pa.Table:
        """``events`` (a table with the columns of ``EVENT_SCHEMA``) as they land."""
        for contract in {each.full_name: each for each in self._contracts()}.values():
            if contract.subject is not None:
                events = self._of_table(events, contract)
        return events

    def _of_table(self, events: pa.Table, contract: TableContract) -> pa.Table:
        assert contract.subject is not None, "its values are encrypted"
        here = pc.and_(
            pc.and_(
                pc.equal(events.column("source_schema"), contract.schema),
                pc.equal(events.column("source_table"), contract.table),
            ),
            pc.invert(pc.is_in(events.column("op"), _KEYLESS)),
        ).combine_chunks()
        split = Split(readable_columns(contract), contract.subject.column)
        for name in _IMAGES:
            place = events.schema.get_field_index(name)
            images = events.column(place).combine_chunks()
            mask = pc.and_(here, images.is_valid())
            if not mask.true_count:
                continue
            rows = pa.array(np.flatnonzero(np.asarray(mask)))
            made = encrypt_images(
                images.take(rows),
                events.column("key").take(rows).combine_chunks(),
                split,
                contract.full_name.encode(),
                lambda whose: self._keys_of(contract, whose),
            )
            field = events.schema.field(place)
            events = events.set_column(place, field, pc.replace_with_mask(images, mask, made))
        return events

    def _keys_of(self, contract: TableContract, whose: Sequence[tuple[bool, str]]) -> list[SubjectKey]:
        assert contract.subject is not None, "its values are encrypted"
        names = {True: contract.subject.name, False: row_subject(contract.full_name)}
        wanted = [(names[named], text) for named, text in whose]
        with self._lock:
            new = [each for each in wanted if each not in self._known]
            if new:
                found = self._keys.keys_of([(self._source, *each) for each in new])
                if len(self._known) + len(new) > _MOST_KEYS:
                    self._known = {each: self._known[each] for each in wanted if each in self._known}
                self._known |= dict(zip(new, found, strict=True))
            return [self._known[each] for each in wanted]
