"""Cursors: how far a reading is in the order of ``(cursor column, key)``, and the positions of rows.

In a source without a log, only the cursor column orders the versions of a row. So the position follows from
its value: an event has the position ``(epoch, 0, ordinal)``, and the ordinal is the cursor as a number, times
``GENERATIONS``. The ordinals up to the next cursor are for later events of the same version. When the schema
of its table has changed, the same version has another image, which must not count as a contradiction; so each
schema change raises the ordinals of rows read afterwards by two. A delete found by a comparison stands one
above the row that it ends, and below any reading of it after a further change. Rows with the same cursor
value are distinguished by the key in the event's identity.

A time is counted in microseconds since 1970. ``infinity`` of PostgreSQL and times after the year 4253 count
as the highest number, times before our era as the lowest. A number counts as itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum

import pyarrow as pa
import pyarrow.compute as pc

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.contracts.pg_types import INTEGERS, Kind
from omnisupport_ingest.sources.query.advice import new_contract, read_anew
from omnisupport_ingest.sources.query.errors import QueryRefused

_GENERATION_BITS = 6
GENERATIONS = 1 << _GENERATION_BITS
"""Ordinals per cursor value: an even one for each schema of the table, and the odd one above it for a
delete."""

MOST_SCHEMAS = GENERATIONS // 2
"""The first so many schemas of a table have ordinals of their own; all later schemas share those of the
last."""

HIGHEST = (1 << (62 - _GENERATION_BITS)) - 1
"""The largest cursor as a number."""

NO_CURSOR = -HIGHEST - 2
"""The number of a NULL cursor: below every value."""

NULL_ORDINALS = range(NO_CURSOR << _GENERATION_BITS, -HIGHEST << _GENERATION_BITS)
"""The ordinals of rows without a cursor. As for any cursor, the first ones are even, one per schema; a
changed row gets the next even one of its key (``null_rows``)."""

END_ORDINAL = (NO_CURSOR << _GENERATION_BITS) - 1
"""The ordinal of the end of a full reading: below every row of its epoch."""

_TIMES = frozenset({Kind.TIMESTAMP, Kind.TIMESTAMPTZ, Kind.DATE})
_START = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


class CursorKind(Enum):
    """The kind of a cursor column's values."""

    TIME = "time"
    NUMBER = "number"


@dataclass(frozen=True, slots=True)
class KeysetPosition:
    """The place of a row in the order of a reading: the texts of its cursor (None: NULL) and of its key.

    The next page begins after it (keyset pagination).
    """

    cursor: str | None
    key: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CursorColumn:
    """The cursor of one table, from its contract.

    ``lookback``: in microseconds for a time, otherwise in the column's own numbers.
    """

    name: str
    pg_type: str
    kind: CursorKind
    lookback: int
    nullable: bool
    event_time: str | None

    @classmethod
    def of(cls, contract: TableContract) -> CursorColumn:
        """Return the cursor of ``contract``. Raises ``QueryRefused`` if it names none."""
        policy = contract.cursor
        if policy is None:
            raise QueryRefused(
                f"{contract.path} names no cursor, so {contract.full_name} cannot be read by one.",
                fix="Choose x-cdc.cursor.field by the reasons in its candidates. If it has none, a new "
                f"contract lists them: {new_contract(contract)}",
            )
        column = next(each for each in contract.source_columns if each.name == policy.field)
        kind = cursor_kind(column.type.kind)
        assert kind is not None, "the contract is checked when it is loaded"
        lookback = policy.lookback
        return cls(
            column.name,
            column.pg_type,
            kind,
            lookback // _MICROSECOND if isinstance(lookback, timedelta) else lookback,
            column.nullable,
            policy.event_time if policy.event_time != policy.field else None,
        )

    def needs(self, contract: TableContract) -> frozenset[str]:
        """Return the columns without which ``contract``, whose cursor this is, cannot be read.

        Without its soft-delete column, a deleted row would be alive again; without its subject's column, an
        erasure would miss rows that have landed.
        """
        needed = {*contract.key, self.name, self.event_time, contract.soft_delete_column}
        subject = None if contract.subject is None else contract.subject.column
        return frozenset(each for each in (*needed, subject) if each is not None)

    def numbers(self, texts: pa.StringArray) -> pa.Int64Array:
        """Return the cursors in PostgreSQL's ``texts`` as numbers; null for null, and for a text that is no
        time.

        Raises ``QueryRefused`` for a text that is no whole number, or is beyond ``HIGHEST``.
        """
        if self.kind is CursorKind.TIME:
            return _within(micros_of(texts))
        try:
            numbers = texts.cast(pa.int64())
        except pa.ArrowInvalid:
            numbers = None
        if numbers is None or _beyond(numbers):
            raise QueryRefused(
                f"The cursor column {self.name} has a value that is no whole number of at most 57 bits.",
                fix="Name another column as x-cdc.cursor.field: a time, or a number that only grows.",
            )
        return numbers

    def text(self, number: int) -> str:
        """Return ``number`` as a text that the source accepts as a value of the column; times are in UTC."""
        if self.kind is CursorKind.NUMBER:
            return str(number)
        moment = moment_of(number).replace(tzinfo=None)
        return moment.date().isoformat() if self.pg_type == "date" else moment.isoformat(sep=" ")


def cursor_kind(kind: Kind) -> CursorKind | None:
    """Return the cursor kind of a column of ``kind``; None if it cannot be a cursor."""
    if kind in _TIMES:
        return CursorKind.TIME
    return CursorKind.NUMBER if kind in INTEGERS else None


def ordinals(numbers: pa.Int64Array, schema_number: int = 0) -> pa.Int64Array:
    """Return the ordinals of rows with these cursors. ``schema_number``: number of schema changes of their
    table when they were read."""
    first = pc.multiply(pc.fill_null(numbers, NO_CURSOR), GENERATIONS)
    return pc.add(first, 2 * min(schema_number, MOST_SCHEMAS - 1))


def corrected(ordinal: int, table: TableContract) -> int:
    """Return the next ordinal for the version of a row of ``table`` at ``ordinal``. Raises ``QueryRefused``
    if none is left."""
    if (ordinal + 1) % GENERATIONS == 0:
        raise QueryRefused(
            f"One version of a row of {table.full_name} has been corrected so often by comparisons that no "
            "position is left: its cursor column does not change when the row does.",
            fix="Have the column set by a trigger, or read the table anew: "
            + read_anew(table.source, "REASON", table),
        )
    return ordinal + 1


def micros_of(texts: pa.StringArray) -> pa.Int64Array:
    """Return PostgreSQL's texts of times in microseconds since 1970; null for null and for any other text."""
    for zone in ("UTC", None):
        # Arrow reads a column in bulk if all of its texts have a zone, or none has.
        try:
            return texts.cast(pa.timestamp("us", zone)).cast(pa.int64())
        except pa.ArrowInvalid:
            continue
    return pa.array([_micros(each) for each in texts.to_pylist()], pa.int64())


def moment_of(micros: int) -> datetime:
    """Return the time of microseconds since 1970, cut to the range of ``datetime``."""
    try:
        return _START + timedelta(microseconds=micros)
    except OverflowError:
        return datetime.max.replace(tzinfo=UTC) if micros > 0 else datetime.min.replace(tzinfo=UTC)


def micros(moment: datetime) -> int:
    """Return a timezone-aware time in microseconds since 1970."""
    return (moment - _START) // _MICROSECOND


def _micros(text: str | None) -> int | None:
    if text is None:
        return None
    if text.startswith("-") or text.endswith(" BC"):
        return -HIGHEST
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        # ``infinity``, or a year with five digits.
        return HIGHEST if text == "infinity" or text[:5].isdigit() else None
    return micros(moment if moment.tzinfo else moment.replace(tzinfo=UTC))


def _beyond(numbers: pa.Int64Array) -> bool:
    bounds = pc.min_max(numbers).as_py()
    return bounds["min"] is not None and (bounds["min"] < -HIGHEST or bounds["max"] > HIGHEST)


def _within(numbers: pa.Int64Array) -> pa.Int64Array:
    """Return ``numbers``, with those beyond ``HIGHEST`` set to that limit: otherwise their ordinals would
    overflow."""
    most = pc.min_element_wise(numbers, HIGHEST, skip_nulls=False)
    return pc.max_element_wise(most, -HIGHEST, skip_nulls=False)
