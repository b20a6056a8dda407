"""Makes the event that lands from a change: its position, its identity, its images."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta

from omnisupport_ingest.contracts.at_rest import readable_columns
from omnisupport_ingest.contracts.load import TableContract
from omnisupport_ingest.contracts.names import TableName
from omnisupport_ingest.json_values import compact
from omnisupport_ingest.landing.rows import LandedEvent
from omnisupport_ingest.position import ODD
from omnisupport_ingest.sources.debezium.changes import Change
from omnisupport_ingest.sources.debezium.faults import LineFault
from omnisupport_ingest.sources.debezium.handling import Handling, LineContext
from omnisupport_ingest.sources.debezium.images import NO_IMAGES, Images, Reader
from omnisupport_ingest.sources.debezium.positions import ARRIVAL, SNAPSHOT_BASE, TIME, TRANSACTION, packed

DEFAULT_SCHEMA = "public"
"""The schema of a table for which event, topic and contract name none."""

NOT_READ = "?"
"""Schema and table of a line that cannot be read, if nothing names the table of its file."""

_START = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)
_HASH_DIGITS = 16


class Events:
    """Makes the landed events of one source. ``contracts``: those of that source."""

    def __init__(self, contracts: Sequence[TableContract], handling: Handling) -> None:
        self._contracts = {each.table_name: each for each in contracts}
        self._schemas: dict[str, set[str]] = {}
        for each in contracts:
            self._schemas.setdefault(each.table, set()).add(each.schema)
        self._readers: dict[TableName, Reader] = {}
        self._handling = handling

    def contract_of(self, event: LandedEvent) -> TableContract | None:
        return self._contracts.get((event.source_schema, event.source_table))

    def event(self, change: Change, epoch: int, row: int | None, envelope: str) -> LandedEvent:
        """Return ``change`` of line ``row`` (None: of no file) as an event of ``epoch``.

        Raises ``LineFault`` if it cannot land. The caller, who knows the events before it, sets
        ``misplaced``.
        """
        table_name = (self._schema_of(change), change.table)
        images = self._reader(table_name).read(change)
        return self._event(change, table_name, images, epoch, row)._replace(envelope=envelope)

    def odd_event(self, change: Change, epoch: int, row: int | None, envelope: str) -> LandedEvent:
        """Return ``change``, which ``event`` refuses, as an event that judging surely keeps out
        (``malformed_image``).

        If its key can be read, the event is of that row, and says which columns it carried; else it is of no
        row. Raises ``LineFault`` if not even its position can be read.
        """
        table_name, images = (change.schema or DEFAULT_SCHEMA, change.table), NO_IMAGES
        with suppress(LineFault):
            table_name = (self._schema_of(change), change.table)
            images = self._reader(table_name).read_oddly(change)
        event = self._event(change, table_name, images, epoch, row)
        op = "u" if change.op == "t" else change.op
        return event._replace(op=op, identity=_odd_identity(envelope), misplaced=None, envelope=envelope)

    def unread_event(
        self, moment: datetime | None, context: LineContext, epoch: int, row: int | None, envelope: str
    ) -> LandedEvent:
        """Return a line that is not a change as an event of no row, below all others, for quarantine.

        ``moment``: its time; None if unknown: it is then in no window.
        """
        named = self._handling.table_of(context.name)
        return LandedEvent(
            epoch=epoch,
            commit_lsn=0,
            ordinal=SNAPSHOT_BASE,
            op="u",
            source_ts=moment or _START,
            tx_id=None,
            lsn=None,
            source_schema=named.schema if named else NOT_READ,
            source_table=named.table if named else NOT_READ,
            key=None,
            before=None,
            after=None,
            unchanged=None,
            moved_from_key=None,
            chunk_id=None,
            identity=_odd_identity(envelope),
            misplaced=None,
            file_row=row,
            envelope=envelope,
        )

    def _event(
        self, change: Change, table_name: TableName, images: Images, epoch: int, row: int | None
    ) -> LandedEvent:
        contract = self._contracts.get(table_name)
        readable = None
        if contract is not None and contract.encrypted_subject is not None:
            readable = readable_columns(contract)
        event = _event(change, table_name, images, epoch, row)
        return event._replace(identity=_identity(change, table_name, images, readable))

    def _reader(self, table_name: TableName) -> Reader:
        if table_name not in self._readers:
            self._readers[table_name] = Reader(self._contracts.get(table_name), self._handling)
        return self._readers[table_name]

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


def _event(change: Change, table_name: TableName, images: Images, epoch: int, row: int | None) -> LandedEvent:
    """Return the event without its identity."""
    commit_lsn, ordinal = _position(change)
    return LandedEvent(
        epoch=epoch,
        commit_lsn=commit_lsn,
        ordinal=ordinal,
        op=change.op,
        source_ts=change.ts,
        tx_id=change.tx_id,
        lsn=change.lsn,
        source_schema=table_name[0],
        source_table=table_name[1],
        key=images.key,
        before=images.before,
        after=images.after,
        unchanged=images.unchanged,
        moved_from_key=images.moved_from,
        chunk_id=None,
        identity=None,
        misplaced=False if change.order == TIME else None,
        file_row=row,
    )


def _position(change: Change) -> tuple[int, int]:
    """Return ``commit_lsn`` and ``ordinal`` of the change; see ``positions``."""
    if change.position is not None:
        return change.position
    if change.lsn is None:
        return 0, packed((change.ts - _START) // _MILLISECOND, None)
    ordinal = packed(change.lsn, change.total_order)
    if change.op == "r" and not change.commit_before:
        ordinal += SNAPSHOT_BASE
    return change.commit_before or 0, ordinal


def _identity(
    change: Change, table_name: TableName, images: Images, readable: frozenset[str] | None
) -> str | None:
    """Return what distinguishes events at one position; None if a position has only one event.

    ``readable``: the columns that land readable while the others are encrypted; None if nothing is encrypted.
    An identity holds no hash of encrypted values: it would remain when the key is destroyed.
    """
    order = change.order
    if order in (TRANSACTION, ARRIVAL):
        return None
    if order == TIME:
        # Without the content: two of them at one time are a contradiction that a person must see.
        return compact([*table_name, images.key])
    parts = [*table_name, images.key, change.op]
    if change.op == "r" or (images.key is None and change.op != "t"):
        # A row that is read again is a later reading, never a collision; for a row without a key, only the
        # content says which row it is.
        row_images = (_only(images.before, readable), _only(images.after, readable))
        content = [*row_images, images.unchanged, change.ts.isoformat()]
        parts.append(hashlib.sha256(compact(content).encode()).hexdigest()[:_HASH_DIGITS])
    return compact(parts)


def _only(image: str | None, names: frozenset[str] | None) -> str | None:
    if image is None or names is None:
        return image
    return compact({name: value for name, value in json.loads(image).items() if name in names})


def _odd_identity(envelope: str) -> str:
    """Return the identity of an odd line: a hash of its text, so a corrected line is another event."""
    return compact([ODD, hashlib.sha256(envelope.encode()).hexdigest()[:_HASH_DIGITS]])
