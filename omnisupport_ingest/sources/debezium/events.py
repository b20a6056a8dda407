"""A change as the event that lands: its position, its identity, its images."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from omnisupport_ingest.contracts.load import TableContract
from omnisupport_ingest.landing.rows import LandedEvent
from omnisupport_ingest.sources.debezium.changes import Change
from omnisupport_ingest.sources.debezium.faults import LineFault
from omnisupport_ingest.sources.debezium.handling import Handling
from omnisupport_ingest.sources.debezium.images import Images, Reader
from omnisupport_ingest.sources.debezium.positions import SNAPSHOT_BASE, TIME, TRANSACTION, order_of, packed

DEFAULT_SCHEMA = "public"
"""The schema of a table that neither the event, its topic nor a contract places."""

_START = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)
_HASH_DIGITS = 16


class Events:
    """Makes the landed events of one source. ``contracts``: of that source."""

    def __init__(self, contracts: Sequence[TableContract], handling: Handling) -> None:
        self._contracts = {(each.schema, each.table): each for each in contracts}
        self._schemas: dict[str, set[str]] = {}
        for each in contracts:
            self._schemas.setdefault(each.table, set()).add(each.schema)
        self._readers: dict[tuple[str, str], Reader] = {}
        self._handling = handling

    def contract_of(self, event: LandedEvent) -> TableContract | None:
        return self._contracts.get((event.source_schema, event.source_table))

    def event(self, change: Change, epoch: int, row: int, envelope: str) -> LandedEvent:
        """``change`` of line ``row`` as an event of ``epoch``; ``LineFault`` if it cannot land.

        ``misplaced`` is left to the caller, who knows the events before it.
        """
        place = (self._schema_of(change), change.table)
        images = self._reader(place).read(change)
        commit_lsn, ordinal = _position(change)
        return LandedEvent(
            epoch=epoch,
            commit_lsn=commit_lsn,
            ordinal=ordinal,
            op=change.op,
            source_ts=change.ts,
            tx_id=change.tx_id,
            lsn=change.lsn,
            source_schema=place[0],
            source_table=place[1],
            key=images.key,
            before=images.before,
            after=images.after,
            unchanged=images.unchanged,
            moved_from_key=images.moved_from,
            chunk_id=None,
            identity=_identity(change, place, images),
            misplaced=False if change.lsn is None else None,
            file_row=row,
            envelope=envelope,
        )

    def _reader(self, place: tuple[str, str]) -> Reader:
        if place not in self._readers:
            self._readers[place] = Reader(self._contracts.get(place), self._handling)
        return self._readers[place]

    def _schema_of(self, change: Change) -> str:
        if change.schema is not None:
            return change.schema
        known = self._schemas.get(change.table, set())
        if len(known) > 1:
            raise LineFault(
                f"it does not say the schema of its table {change.table!r}, and contracts name it in several",
                "Add source.schema to add.fields.",
            )
        return next(iter(known), DEFAULT_SCHEMA)


def _position(change: Change) -> tuple[int, int]:
    """``commit_lsn`` and ``ordinal``; see ``positions``."""
    if change.lsn is None:
        return 0, packed((change.ts - _START) // _MILLISECOND, None)
    ordinal = packed(change.lsn, change.total_order)
    if change.op == "r" and not change.commit_before:
        ordinal += SNAPSHOT_BASE
    return change.commit_before or 0, ordinal


def _identity(change: Change, place: tuple[str, str], images: Images) -> str | None:
    """What tells apart events at one position; null where a position has one event alone."""
    order = order_of(change.lsn, change.total_order)
    if order == TRANSACTION:
        return None
    if order == TIME:
        # Without the content: two of them at one time are a contradiction that a person must see.
        return _compact([*place, images.key])
    told = [*place, images.key, change.op]
    if change.op == "r" or (images.key is None and change.op != "t"):
        # A row that is read again is a later reading, never a collision; of a row without a key nothing
        # else says which one it is.
        content = [images.before, images.after, images.unchanged, change.ts.isoformat()]
        told.append(hashlib.sha256(_compact(content).encode()).hexdigest()[:_HASH_DIGITS])
    return _compact(told)


def _compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
