"""Cursors: where in the order of ``(cursor column, key)`` a reading stands, and what position a row has.

A source without a log says of a row only what its cursor column says. So that value *is* the order of a
row's versions: an event stands at ``(epoch, 0, ordinal)``, and its ordinal is the cursor as a number with
room below it for what a later comparison finds out of the same version (``GENERATIONS``). Of rows with
one cursor value the key tells which is which; it stands in the event's identity.

A time counts microseconds since 1970; what PostgreSQL calls ``infinity``, and times before 2600 BC or
after 6500, count as the highest or lowest. A number counts as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum

import pyarrow as pa
import pyarrow.compute as pc

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.contracts.pg_types import INTEGERS, Kind
from omnisupport_ingest.sources.query.errors import QueryRefused

_GENERATION_BITS = 6
GENERATIONS = 1 << _GENERATION_BITS
"""How often a comparison may correct one version of a row."""

HIGHEST = (1 << (62 - _GENERATION_BITS)) - 1
"""The largest cursor as a number."""

NO_CURSOR = -HIGHEST - 2
"""What a row whose cursor is NULL counts as: below every value."""

BOUNDARY_ORDINAL = (NO_CURSOR << _GENERATION_BITS) - 1
"""Where the end of a full reading stands: below every row of its epoch."""

_TIMES = frozenset({Kind.TIMESTAMP, Kind.TIMESTAMPTZ, Kind.DATE})
_START = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


class CursorKind(Enum):
    """What a cursor column counts."""

    TIME = "time"
    NUMBER = "number"


@dataclass(frozen=True, slots=True)
class Place:
    """A row in the order of a reading: the texts of its cursor (null: it is NULL) and of its key."""

    cursor: str | None
    key: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CursorColumn:
    """The cursor of one table, as its contract names it.

    ``lookback``: in what ``number`` counts: microseconds, or the numbers themselves.
    """

    name: str
    pg_type: str
    kind: CursorKind
    lookback: int
    nullable: bool
    event_time: str | None

    @classmethod
    def of(cls, contract: TableContract) -> CursorColumn:
        """That of ``contract``; ``QueryRefused`` if it names none."""
        policy = contract.cursor
        if policy is None:
            raise QueryRefused(
                f"{contract.path} names no cursor, so {contract.full_name} cannot be read by one.",
                fix="Add x-cdc.cursor with the field; `contracts new` proposes the columns that can be one.",
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

    def numbers(self, texts: pa.StringArray) -> pa.Int64Array:
        """The cursors in PostgreSQL's ``texts`` as numbers, null where there is none.

        ``QueryRefused`` for a text that is none.
        """
        if self.kind is CursorKind.TIME:
            return micros_of(texts)
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
        """``number`` as a text that the source reads as a value of the column; times are cut to UTC."""
        if self.kind is CursorKind.NUMBER:
            return str(number)
        moment = moment_of(number).replace(tzinfo=None)
        return moment.date().isoformat() if self.pg_type == "date" else moment.isoformat(sep=" ")


def cursor_kind(kind: Kind) -> CursorKind | None:
    """What a column of ``kind`` counts as a cursor; null if its values are no order that can be counted."""
    if kind in _TIMES:
        return CursorKind.TIME
    return CursorKind.NUMBER if kind in INTEGERS else None


def ordinals(numbers: pa.Int64Array) -> pa.Int64Array:
    """The ordinals of rows with these cursors."""
    return pc.multiply(pc.fill_null(numbers, NO_CURSOR), GENERATIONS)


def corrected(ordinal: int) -> int:
    """The next ordinal of the version at ``ordinal``; ``QueryRefused`` if none is left."""
    if (ordinal + 1) % GENERATIONS == 0:
        raise QueryRefused(
            f"One version of a row has been corrected {GENERATIONS - 1} times by comparisons: its cursor "
            "column does not change when the row does.",
            fix="Have the column set by a trigger, or read the tables anew: sync NAME --full-refresh REASON",
        )
    return ordinal + 1


def micros_of(texts: pa.StringArray) -> pa.Int64Array:
    """Times as PostgreSQL writes them, in microseconds since 1970; null for null, or for what is no time."""
    plain = pc.replace_substring_regex(texts, r"\+00(:00)?$", "")
    try:
        return plain.cast(pa.timestamp("us")).cast(pa.int64())
    except pa.ArrowInvalid:
        return pa.array([_micros(each) for each in plain.to_pylist()], pa.int64())


def moment_of(micros: int) -> datetime:
    """A time in microseconds since 1970, within what a datetime holds."""
    try:
        return _START + timedelta(microseconds=micros)
    except OverflowError:
        return datetime.max.replace(tzinfo=UTC) if micros > 0 else datetime.min.replace(tzinfo=UTC)


def micros(moment: datetime) -> int:
    """A timezone-aware time in microseconds since 1970."""
    return (moment - _START) // _MICROSECOND


def _micros(text: str | None) -> int | None:
    if text is None:
        return None
    if text.startswith("-") or text.endswith(" BC"):
        return -HIGHEST
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        # ``infinity``, or a year of five digits.
        return HIGHEST if text == "infinity" or text[:5].isdigit() else None
    return micros(moment if moment.tzinfo else moment.replace(tzinfo=UTC))


def _beyond(numbers: pa.Int64Array) -> bool:
    bounds = pc.min_max(numbers).as_py()
    return bounds["min"] is not None and (bounds["min"] < -HIGHEST or bounds["max"] > HIGHEST)
