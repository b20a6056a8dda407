"""The content by which copies of an event are told from collisions, where values landed encrypted.

Landed bytes do not do: the same event may land plain, encrypted, and without the values of a subject that was
erased meanwhile. So its images are compared decrypted, whatever the order of their members. Where one copy at
a position was of a destroyed key, nobody can say what it held: then all of them are compared by the columns
that are readable at rest, and the erased event that comes again is a duplicate.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from omnisupport_ingest.cdc.event_hashes import event_hashes
from omnisupport_ingest.cdc.images import read_image
from omnisupport_ingest.contracts.at_rest import maybe_encrypted_columns
from omnisupport_ingest.contracts.encrypted_images import MARK, decrypted, key_id, without_values
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.contracts.subject_keys import SubjectKey, SubjectKeys

HASHED = (
    *("epoch", "commit_lsn", "ordinal", "op", "source_schema", "source_table", "key", "before", "after"),
    *("unchanged", "moved_from_key", "source_ts"),
)
"""The columns of an event that are its content."""

CONTENT, SHOWN, ERASED = "content", "shown", "erased"
"""The columns that ``with_contents`` adds: the hash of the content, the hash of what is readable at rest, and
whether a key of the event was destroyed."""

ADDED = pa.schema([(CONTENT, pa.int64()), (SHOWN, pa.int64()), (ERASED, pa.bool_())])

_IMAGES = ("before", "after")
_NOTHING: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Contents:
    """Finds the contents of events of one source. ``contracts``: of it. ``keys``: of the home's subjects;
    None if it has none, then nothing landed encrypted, and the hash of what landed is the content."""

    contracts: tuple[TableContract, ...] = ()
    keys: SubjectKeys | None = None

    @property
    def needed(self) -> tuple[str, ...]:
        """The columns of an event that ``of`` reads."""
        return ("event_hash",) if self.keys is None else (*HASHED, "event_hash")

    def of(self, events: pa.RecordBatch) -> list[pa.Array]:
        """The columns ``ADDED`` of ``events``; ``SubjectKeysUnreadable`` if a key is missing that was not
        destroyed."""
        landed, none = events.column("event_hash"), pa.array(np.zeros(len(events), np.bool_))
        if self.keys is None:
            return [landed, landed, none]
        rows = np.flatnonzero([each not in self._plain for each in _tables(events)])
        if not len(rows):
            return [landed, landed, none]
        few = events.take(pa.array(rows))
        images = {name: few.column(name).to_pylist() for name in _IMAGES}
        known = self._keys_in(images.values())
        erased = np.zeros(len(events), np.bool_)
        content: dict[str, list[str | None]] = {}
        shown: dict[str, list[str | None]] = {}
        for name in _IMAGES:
            content[name], shown[name] = [], []
            for row, (table, image) in enumerate(zip(_tables(few), images[name], strict=True)):
                whole, readable, is_erased = self._of_image(table, image, known)
                content[name].append(whole)
                shown[name].append(readable)
                erased[rows[row]] |= is_erased
        mask = np.zeros(len(events), np.bool_)
        mask[rows] = True
        return [
            *(pc.replace_with_mask(landed, pa.array(mask), _hashes(few, each)) for each in (content, shown)),
            pa.array(erased),
        ]

    @cached_property
    def _plain(self) -> frozenset[tuple[str, str]]:
        """The tables of which nothing lands encrypted, or did."""
        return frozenset(
            (each.schema, each.table) for each in self.contracts if not maybe_encrypted_columns(each)
        )

    @cached_property
    def _readable(self) -> dict[tuple[str, str], frozenset[str]]:
        """The columns of each table that land as they are, whatever its contract says of the others."""
        return {
            (each.schema, each.table): frozenset(column.name for column in each.source_columns).difference(
                maybe_encrypted_columns(each)
            )
            for each in self.contracts
        }

    def _keys_in(self, images: Iterable[Sequence[str | None]]) -> dict[bytes, SubjectKey]:
        assert self.keys is not None, "the home has keys"
        ids = {key_id(each) for of in images for each in of if each is not None and MARK in each}
        return dict(self.keys.by_id(each for each in ids if each is not None))

    def _of_image(
        self, table: tuple[str, str], image: str | None, known: dict[bytes, SubjectKey]
    ) -> tuple[str | None, str | None, bool]:
        """The whole of an image, what of it is readable at rest, and whether its key is destroyed."""
        if image is None:
            return None, None, False
        text = image
        if MARK in image:
            each = key_id(image)
            key = None if each is None else known[each]
            if key is None or key.secret is None:
                shown = self._shown(table, read_image(without_values(image, (), None)))
                return shown, shown, True
            text = decrypted(image, key, ".".join(table).encode())
        row = read_image(text)
        return text if row is None else _canonical(row), self._shown(table, row), False

    def _shown(self, table: tuple[str, str], row: dict[str, Any] | None) -> str:
        readable = self._readable.get(table, _NOTHING)
        return _canonical({name: value for name, value in (row or {}).items() if name in readable})


AS_LANDED = Contents()
"""The content is what landed."""


def with_contents(batches: Iterable[pa.RecordBatch], contents: Contents) -> Iterator[pa.RecordBatch]:
    """``batches`` of events with the columns ``ADDED``."""
    for batch in batches:
        yield pa.RecordBatch.from_arrays(
            [*batch.columns, *contents.of(batch)], names=[*batch.schema.names, *ADDED.names]
        )


def _tables(events: pa.RecordBatch) -> Iterator[tuple[str, str]]:
    columns = (events.column(name).to_pylist() for name in ("source_schema", "source_table"))
    return zip(*columns, strict=True)


def _hashes(events: pa.RecordBatch, images: dict[str, list[str | None]]) -> pa.Int64Array:
    columns = {name: events.column(name) for name in HASHED}
    columns |= {name: pa.array(texts, pa.string()) for name, texts in images.items()}
    return event_hashes(pa.table(columns))


def _canonical(row: dict[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
