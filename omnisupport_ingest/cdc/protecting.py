"""Protecting events: what is left of personal values once an event is judged, by the policies of its
contract.

This is the one place where policies are applied: between the verdict on an event and its row in
``deduped_events`` or ``quarantine``. Judging sees the values that landed, so verdicts, collisions and reviews
do not depend on policies; every layer above has protected values alone. Of both row images the columns of the
lake stay, with their values protected; a text that cannot be read is gone whole, and so is the text as it was
delivered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from omnisupport_ingest.cdc.event_hashes import event_hashes
from omnisupport_ingest.cdc.protected_images import FEW, protect_images
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.contracts.names import TableName
from omnisupport_ingest.contracts.protection import Protection, Secrets, needs_protection

_IMAGES = ("before", "after")

_CONTENT_HASH = r',"[0-9a-f]{16}"\]$'
"""The end of an identity that a hash of the event's content is part of (``sources.debezium.events``)."""

WITHOUT_VALUES = frozenset("tb")
"""Operations that bring no value of a row: the range of keys that a snapshot end has is no value either."""

_UNCHANGED = pa.array(sorted(WITHOUT_VALUES))
_KEYLESS = pa.array(["t", "b", "m"])
"""Operations whose ``after`` is no row: the boundary of a snapshot has a range of keys there."""

_ACCEPTED = "accepted"
"""The verdict (``judging.ACCEPTED``, which is imported by nothing that it imports)."""


@dataclass(frozen=True)
class Protections:
    """What protects the tables of one source. False where no table needs it."""

    by_table: Mapping[TableName, Protection]
    contracted: frozenset[TableName]

    @classmethod
    def of(cls, contracts: Iterable[TableContract], secrets: Secrets) -> Protections:
        every = list(contracts)
        return cls(
            {each.table_name: Protection(each, secrets) for each in every if needs_protection(each)},
            frozenset(each.table_name for each in every),
        )

    def __bool__(self) -> bool:
        return bool(self.by_table)


def protect_batches(
    batches: Iterable[pa.RecordBatch], protections: Protections, *, few: int = FEW
) -> Iterator[pa.RecordBatch]:
    """Protect judged events: columns of ``RAW_TYPE``, ``verdict``, and any others.

    An accepted event has its hash made anew of what is left, and its identity no hash of what landed; in
    quarantine both are the name of the event, and stay. The text of an event as it was delivered goes with
    every table that is protected or has no contract: in a line that could not be told apart, any table's
    values may stand. So do the images of a table without a contract, and the content of logical messages: of
    what nobody has described, nobody knows what is personal.
    """
    for batch in batches:
        yield _protected(batch, protections, few) if protections and batch.num_rows else batch


def _protected(batch: pa.RecordBatch, protections: Protections, few: int) -> pa.RecordBatch:
    columns = {name: batch.column(name) for name in batch.schema.names}
    none = pa.array(np.zeros(batch.num_rows, np.bool_))
    others = reduce(pc.or_, (_of_table(batch, place) for place in protections.contracted), none)
    delivered = pc.invert(others)
    for place, protection in protections.by_table.items():
        here = _of_table(batch, place)
        delivered = pc.or_(delivered, here)
        rows = pc.and_(here, pc.invert(pc.is_in(batch.column("op"), _KEYLESS)))
        if not rows.true_count:
            continue
        for name in _IMAGES:
            images = columns[name].filter(rows)
            if images.null_count < len(images):
                columns[name] = pc.replace_with_mask(
                    columns[name], rows, protect_images(images, protection, few=few)
                )
    undescribed = pc.and_(
        pc.fill_null(pc.invert(others), True), pc.invert(pc.is_in(batch.column("op"), _UNCHANGED))
    )
    for name in _IMAGES:
        columns[name] = pc.if_else(undescribed, pa.scalar(None, pa.string()), columns[name])
    columns["envelope"] = pc.if_else(delivered, pa.scalar(None, pa.string()), columns["envelope"])
    protected = reduce(pc.or_, (_of_table(batch, place) for place in protections.by_table), undescribed)
    changed = pc.and_(protected, pc.equal(columns["verdict"], _ACCEPTED))
    if changed.true_count:
        events = pa.table(columns).filter(changed)
        columns["event_hash"] = pc.replace_with_mask(columns["event_hash"], changed, event_hashes(events))
        told = pc.replace_substring_regex(columns["identity"], _CONTENT_HASH, "]")
        columns["identity"] = pc.if_else(changed, told, columns["identity"])
    return pa.RecordBatch.from_arrays(
        [columns[field.name].cast(field.type) for field in batch.schema], schema=batch.schema
    )


def _of_table(batch: pa.RecordBatch, place: TableName) -> pa.BooleanArray:
    schema, table = place
    found = pc.and_(
        pc.equal(batch.column("source_schema"), schema), pc.equal(batch.column("source_table"), table)
    )
    return pc.fill_null(found, False)
