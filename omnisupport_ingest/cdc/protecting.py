"""Protect the personal values in judged events, by the policies of their contracts.

Policies are applied here and nowhere else: between the verdict on an event and its row in ``deduped_events``
or ``quarantine``. Judging sees the values that landed, so verdicts, collisions and reviews do not depend on
policies. Every later layer has protected values only. Both row images keep the columns of the lake, with
protected values. An image that cannot be read is removed, and so is the text of the event as it was
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

CONTENT_HASH = r',"[0-9a-f]{16}"\]$'
"""Matches the end of an identity that contains a hash of the event's content (``sources.debezium.events``).
"""

WITHOUT_VALUES = frozenset("tb")
"""Operations without values of a row. The key range of a snapshot end is no such value."""

_UNCHANGED = pa.array(sorted(WITHOUT_VALUES))
_KEYLESS = pa.array(["t", "b", "m"])
"""Operations whose ``after`` is no row. A snapshot end has its key range there."""

_ACCEPTED = "accepted"
"""The verdict ``judging.ACCEPTED``. ``judging`` imports this module, so it cannot be imported here."""


@dataclass(frozen=True)
class Protections:
    """Protects the tables of one source. False if no event needs it.

    ``undescribed``: whether events without a contract are protected.
    """

    by_table: Mapping[TableName, Protection]
    contracted: frozenset[TableName]
    undescribed: bool

    @classmethod
    def of(cls, contracts: Iterable[TableContract], secrets: Secrets) -> Protections:
        every = list(contracts)
        by_table = {each.table_name: Protection(each, secrets) for each in every if needs_protection(each)}
        return cls(by_table, frozenset(each.table_name for each in every), undescribed=bool(by_table))

    def __bool__(self) -> bool:
        return bool(self.by_table) or self.undescribed


def protect_batches(
    batches: Iterable[pa.RecordBatch], protections: Protections, *, few: int = FEW
) -> Iterator[pa.RecordBatch]:
    """Protect judged events: columns of ``RAW_TYPE``, ``verdict``, and any others.

    An accepted event gets the hash of what is left, and its identity loses the hash of what landed. In
    quarantine both name the event, so they stay.

    The text as delivered is removed from events of tables that are protected or have no contract: a line that
    could not be parsed may hold values of any table. Events without a contract also lose their row images,
    and logical messages their content, because nobody has said what in them is personal.
    """
    for batch in batches:
        yield _protected(batch, protections, few) if protections and batch.num_rows else batch


def _protected(batch: pa.RecordBatch, protections: Protections, few: int) -> pa.RecordBatch:
    columns = {name: batch.column(name) for name in batch.schema.names}
    none = pa.array(np.zeros(batch.num_rows, np.bool_))
    others = reduce(pc.or_, (_of_table(batch, place) for place in protections.contracted), none)
    delivered = pc.invert(others) if protections.undescribed else none
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
    undescribed = none
    if protections.undescribed:
        undescribed = pc.and_(
            pc.fill_null(pc.invert(others), True), pc.invert(pc.is_in(batch.column("op"), _UNCHANGED))
        )
    # Images are long: most batches have none to remove, so they are not copied.
    if undescribed.true_count:
        for name in _IMAGES:
            columns[name] = pc.if_else(undescribed, pa.scalar(None, pa.string()), columns[name])
    if delivered.true_count:
        columns["envelope"] = pc.if_else(delivered, pa.scalar(None, pa.string()), columns["envelope"])
    protected = reduce(pc.or_, (_of_table(batch, place) for place in protections.by_table), undescribed)
    changed = pc.and_(protected, pc.equal(columns["verdict"], _ACCEPTED))
    if changed.true_count:
        identities = pc.replace_substring_regex(columns["identity"], CONTENT_HASH, "]")
        columns["identity"] = pc.if_else(changed, identities, columns["identity"])
        events = pa.table(columns).filter(changed)
        columns["event_hash"] = pc.replace_with_mask(columns["event_hash"], changed, event_hashes(events))
    return pa.RecordBatch.from_arrays(
        [columns[field.name].cast(field.type) for field in batch.schema], schema=batch.schema
    )


def _of_table(batch: pa.RecordBatch, place: TableName) -> pa.BooleanArray:
    schema, table = place
    found = pc.and_(
        pc.equal(batch.column("source_schema"), schema), pc.equal(batch.column("source_table"), table)
    )
    return pc.fill_null(found, False)
