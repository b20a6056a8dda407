"""Tell copies of an event from collisions, where values landed encrypted.

Comparing landed bytes is not enough. One event may land plain, land encrypted, and land again without the
values of a subject that was erased meanwhile. So images are decrypted before they are compared, and the order
of their members does not matter.

If the key of one copy was destroyed, nobody can say what that copy held. Then all copies at its position are
compared by the columns that are readable at rest, so an erased event that comes again is a duplicate. If that
copy lacks some of these columns, because its contract encrypted more, images are not compared at all.

The identity of an event may contain a hash of what was delivered. This hash depends on the form in which the
event landed; the identities that ``place_of`` returns do not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Sequence
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
from omnisupport_ingest.contracts.names import TableName
from omnisupport_ingest.contracts.subject_ciphers import DIGEST, SubjectKey, keyed_identity
from omnisupport_ingest.contracts.subject_keys import SubjectKeys
from omnisupport_ingest.json_values import compact

HASHED = (
    *("epoch", "commit_lsn", "ordinal", "op", "source_schema", "source_table", "key", "before", "after"),
    *("unchanged", "moved_from_key", "source_ts"),
)
"""The columns that make up the content of an event."""

PLACE, CONTENT, SHOWN, BARE, ERASED = "place", "content", "shown", "bare", "erased"
"""The columns that ``with_contents`` adds. ``PLACE``: the identity that tells events of one position apart.
``CONTENT``, ``SHOWN``, ``BARE``: hashes of the content, of what is readable at rest, and of all but the
images. ``ERASED``: by which of these the copies of a position must be compared (``BY_CONTENT``, ``BY_SHOWN``,
``BY_BARE``); the highest value at a position counts."""

BY_CONTENT, BY_SHOWN, BY_BARE = 0, 1, 2

UNSORTED = "f-"
"""Prefix of batch names that do not sort in the order of landing (``landing.names.file_batch_id``)."""

ADDED = pa.schema([*((name, pa.int64()) for name in (CONTENT, SHOWN, BARE)), (ERASED, pa.int8())])

_IMAGES = ("before", "after")
_PLACED = ["source_schema", "source_table", *_IMAGES, "unchanged", "source_ts", "identity", "envelope"]
_BEFORE_DIGEST = -len('"0123456789abcdef"]')
_NOTHING: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class _Image:
    """A row image to compare.

    ``whole``: all of it. ``readable``: its columns that are readable at rest. ``compared``: how its copies
    must be compared (``BY_CONTENT``, ``BY_SHOWN`` or ``BY_BARE``).
    """

    whole: str | None
    readable: str | None
    compared: int


@dataclass(frozen=True)
class Contents:
    """Computes by what copies of the events of one source are compared.

    ``contracts``: those of the source. ``keys``: the subjects' keys of the home; None if it has none. Without
    keys nothing landed encrypted, and the hash of what landed is the content.
    """

    contracts: tuple[TableContract, ...] = ()
    keys: SubjectKeys | None = None

    @property
    def needed(self) -> tuple[str, ...]:
        """The columns of an event that ``of`` reads."""
        return ("event_hash",) if self.keys is None else (*HASHED, "event_hash", "identity", "envelope")

    def of(self, events: pa.RecordBatch) -> list[pa.Array]:
        """Return the columns ``ADDED`` of ``events``.

        Raises ``SubjectKeysUnreadable`` if a key is missing that was not destroyed.
        """
        landed, none = events.column("event_hash"), pa.array(np.zeros(len(events), np.int8))
        if self.keys is None:
            return [landed, landed, landed, none]
        rows = np.flatnonzero([each not in self._plain for each in _tables(events)])
        if not len(rows):
            return [landed, landed, landed, none]
        few = events.take(pa.array(rows))
        found = self._images(few)
        erased = np.zeros(len(events), np.int8)
        erased[rows] = np.max([[each.compared for each in images] for images in found.values()], axis=0)
        mask = np.zeros(len(events), np.bool_)
        mask[rows] = True
        of_few: tuple[dict[str, list[str | None]], ...] = (
            {name: [each.whole for each in images] for name, images in found.items()},
            {name: [each.readable for each in images] for name, images in found.items()},
            {name: [None] * len(few) for name in found},
        )
        return [
            *(pc.replace_with_mask(landed, pa.array(mask), _hashes(few, each)) for each in of_few),
            pa.array(erased),
        ]

    def place_of(self, events: pa.RecordBatch) -> pa.Array:
        """Return the identities that tell ``events`` of one position apart, in whatever form each landed."""
        identities = events.column("identity")
        if self.keys is None or identities.null_count == len(identities):
            return identities
        holds = np.asarray(pc.fill_null(pc.match_substring_regex(identities, DIGEST), False))
        rows = np.flatnonzero(holds & [each not in self._as_they_landed for each in _tables(events)])
        if not len(rows):
            return identities
        places: list[str | None] = identities.to_pylist()
        few = events.select(_PLACED).take(pa.array(rows)).to_pylist()
        known = self._keys_in([event[name] for event in few] for name in _IMAGES)
        for row, event in zip(rows.tolist(), few, strict=True):
            places[row] = self._place(event, known)
        return pa.array(places, pa.string())

    def _place(self, event: dict[str, Any], known: dict[bytes, SubjectKey]) -> str:
        table: TableName = (event["source_schema"], event["source_table"])
        identity: str = event["identity"]
        start = compact(table)[:-1]
        if identity.startswith(f"{start},"):
            if table not in self._encrypted:
                return identity
            # Hash what is readable now: it is the same whether the event landed plain, encrypted, or by
            # another contract.
            unsent = sorted(event["unchanged"] or ())
            shown = [self._shown_in(table, event[name], unsent, known) for name in _IMAGES]
            text = json.dumps([*shown, unsent, event["source_ts"].isoformat()])
            return f"{identity[:_BEFORE_DIGEST]}{hashlib.sha256(text.encode()).hexdigest()}"
        delivered = event["envelope"]
        if delivered is None or delivered.startswith(f"{{{MARK}"):
            return identity
        # The event landed plain. Today it would land encrypted, with this identity.
        return keyed_identity(identity, self._digest_key)

    def _shown_in(
        self, table: TableName, image: str | None, unsent: Collection[str], known: dict[bytes, SubjectKey]
    ) -> str | None:
        """Return the readable columns of an image. It is decrypted only if it lacks one of them at rest."""
        if image is None:
            return None
        if MARK in image:
            head = read_image(without_values(image, (), None)) or {}
            if not self._readable.get(table, _NOTHING).difference(head, unsent):
                return self._shown(table, head)
        return self._of_image(table, image, unsent, known).readable

    def _images(self, events: pa.RecordBatch) -> dict[str, list[_Image]]:
        images = {name: events.column(name).to_pylist() for name in _IMAGES}
        known = self._keys_in(images.values())
        return {
            name: [
                self._of_image(table, image, unsent or (), known)
                for table, image, unsent in zip(
                    _tables(events), images[name], events.column("unchanged").to_pylist(), strict=True
                )
            ]
            for name in _IMAGES
        }

    @cached_property
    def _digest_key(self) -> bytes:
        assert self.keys is not None, "the home has keys"
        return self.keys.digest_key()

    @cached_property
    def _encrypted(self) -> frozenset[TableName]:
        """The tables whose contract says encrypted."""
        return frozenset(each.table_name for each in self.contracts if each.encrypted_subject is not None)

    @cached_property
    def _as_they_landed(self) -> frozenset[TableName]:
        """The tables whose contract does not say encrypted, so that their identities land unchanged."""
        every = frozenset(each.table_name for each in self.contracts)
        return every - self._encrypted

    @cached_property
    def _plain(self) -> frozenset[TableName]:
        """The tables whose events never land encrypted, and never did."""
        return frozenset(each.table_name for each in self.contracts if not maybe_encrypted_columns(each))

    @cached_property
    def _readable(self) -> dict[TableName, frozenset[str]]:
        """By table, the columns that land readable whether or not its contract encrypts the others."""
        return {
            each.table_name: frozenset(column.name for column in each.source_columns).difference(
                maybe_encrypted_columns(each)
            )
            for each in self.contracts
        }

    def _keys_in(self, images: Iterable[Sequence[str | None]]) -> dict[bytes, SubjectKey]:
        assert self.keys is not None, "the home has keys"
        ids = {key_id(each) for of in images for each in of if each is not None and MARK in each}
        return dict(self.keys.by_id(each for each in ids if each is not None))

    def _of_image(
        self, table: TableName, image: str | None, unsent: Collection[str], known: dict[bytes, SubjectKey]
    ) -> _Image:
        if image is None:
            return _Image(None, None, BY_CONTENT)
        text = image
        if MARK in image:
            each = key_id(image)
            key = None if each is None else known[each]
            if key is None or key.secret is None:
                head = read_image(without_values(image, (), None)) or {}
                shown = self._shown(table, head)
                lacks = self._readable.get(table, _NOTHING).difference(head, unsent)
                return _Image(shown, shown, BY_BARE if lacks else BY_SHOWN)
            text = decrypted(image, key, ".".join(table).encode())
        row = read_image(text)
        return _Image(text if row is None else _canonical(row), self._shown(table, row), BY_CONTENT)

    def _shown(self, table: TableName, row: dict[str, Any] | None) -> str:
        readable = self._readable.get(table, _NOTHING)
        return _canonical({name: value for name, value in (row or {}).items() if name in readable})


AS_LANDED = Contents()
"""Takes what landed as the content."""


def with_contents(batches: Iterable[pa.RecordBatch], contents: Contents) -> Iterator[pa.RecordBatch]:
    """Add the columns ``ADDED`` and ``PLACE`` to ``batches`` of events."""
    for batch in batches:
        yield pa.RecordBatch.from_arrays(
            [*batch.columns, *contents.of(batch), contents.place_of(batch)],
            names=[*batch.schema.names, *ADDED.names, PLACE],
        )


def _tables(events: pa.RecordBatch) -> Iterator[TableName]:
    columns = (events.column(name).to_pylist() for name in ("source_schema", "source_table"))
    return zip(*columns, strict=True)


def _hashes(events: pa.RecordBatch, images: dict[str, list[str | None]]) -> pa.Int64Array:
    columns = {name: events.column(name) for name in HASHED}
    columns |= {name: pa.array(texts, pa.string()) for name, texts in images.items()}
    # Only events of one identity are compared, and it depends on the form in which an event landed.
    columns["identity"] = pa.nulls(len(events), pa.string())
    return event_hashes(pa.table(columns))


def _canonical(row: dict[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
