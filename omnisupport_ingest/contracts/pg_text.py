"""Reading the canonical text of each PostgreSQL type with Spark expressions that cannot fail.

``READERS`` gives the typed value per kind. Text is canonical: ``DateStyle=ISO``, ``TimeZone=UTC``,
``bytea_output=hex``.
"""

from __future__ import annotations

from collections.abc import Callable

from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql.types import DecimalType

from omnisupport_ingest.contracts.array_literals import array_of_longs, array_of_strings
from omnisupport_ingest.contracts.pg_types import Kind, PgType
from omnisupport_ingest.contracts.pg_values import LONGEST_NUMERIC

# Java's regular expressions: \z is the true end, where $ would let a line break follow. Casts alone
# would not do: Spark reads '1.5d' as a number, '10:00' as a time of today, and cuts '2026-11-21xyz'.
# Possessive, as in ``pg_values``: no long text is tried again at each of its digits.
_NUMBER = r"^[+-]?(\d++\.?+\d*+|\.\d++)([eE][+-]?\d{1,9})?\z"
_NOT_FINITE = r"^(NaN|[+-]?[Ii]nf(inity)?)\z"
_SOME_DIGIT_SET = r"^[^eE]*[1-9]"
_DAY = r"^\d{4}-\d\d-\d\d\z"
_MOMENT = r"^\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(\.\d{1,6})?(Z|[+-]\d\d(:?\d\d)?)?\z"
_WITH_ZONE = r"(Z|[+-]\d\d(:?\d\d)?)\z"
_BYTES = r"^\\x([0-9a-fA-F]{2})*+\z"


def is_number(text: Column) -> Column:
    """Whether ``text`` spells a number of any size, ``NaN`` and the infinities included."""
    return text.rlike(_NUMBER) | text.rlike(_NOT_FINITE)


def as_double(text: Column) -> Column:
    """The number that ``text`` spells, rounded to a double; NULL if it spells none.

    Spark orders ``NaN`` above every number, as PostgreSQL does.
    """
    return F.when(is_number(text), text.try_cast("double"))


def _boolean(text: Column, _: PgType) -> Column:
    return F.when(text.isin("t", "true"), F.lit(True)).when(text.isin("f", "false"), F.lit(False))


def _integer(spark_name: str) -> Callable[[Column, PgType], Column]:
    return lambda text, _: text.try_cast(spark_name)


def _floating(spark_name: str) -> Callable[[Column, PgType], Column]:
    def read(text: Column, _: PgType) -> Column:
        value = text.try_cast(spark_name)
        overflown = F.abs(value) == F.lit(float("inf"))
        underflown = (value == F.lit(0.0)) & text.rlike(_SOME_DIGIT_SET)
        return F.when((text.rlike(_NUMBER) & ~overflown & ~underflown) | text.rlike(_NOT_FINITE), value)

    return read


def _decimal(text: Column, pg_type: PgType) -> Column:
    # A cast rounds away digits that the scale has no room for; such a value does not fit.
    exact = rf"^[+-]?\d++(\.\d{{0,{pg_type.scale}}}0*)?\z"
    # The time that a cast takes grows with the square of the digits.
    held = text.rlike(exact) & (F.length(text) <= F.lit(LONGEST_NUMERIC))
    return F.when(held, text.try_cast(DecimalType(pg_type.precision, pg_type.scale)))


def _exact_text(text: Column, _: PgType) -> Column:
    return text


def _date(text: Column, _: PgType) -> Column:
    return F.when(text.rlike(_DAY), text.try_cast("date"))


def _timestamp(text: Column, _: PgType) -> Column:
    in_zone = F.when(text.rlike(_WITH_ZONE), text).otherwise(F.concat(text, F.lit("+00:00")))
    value = in_zone.try_cast("timestamp")
    # In another zone than UTC a time near an end of the calendar lies beyond it, where few readers follow.
    return F.when(text.rlike(_MOMENT) & F.year(value).between(1, 9999), value)


def _binary(text: Column, _: PgType) -> Column:
    return F.when(text.rlike(_BYTES), F.unhex(F.substr(text, F.lit(3))))


READERS: dict[Kind, Callable[[Column, PgType], Column]] = {
    Kind.BOOLEAN: _boolean,
    Kind.SHORT: _integer("smallint"),
    Kind.INTEGER: _integer("int"),
    Kind.LONG: _integer("bigint"),
    Kind.FLOAT: _floating("float"),
    Kind.DOUBLE: _floating("double"),
    Kind.DECIMAL: _decimal,
    Kind.NUMERIC_TEXT: _exact_text,
    Kind.DATE: _date,
    Kind.TIMESTAMP: _timestamp,
    Kind.TIMESTAMPTZ: _timestamp,
    Kind.BINARY: _binary,
    Kind.TEXT_ARRAY: lambda text, _: array_of_strings(text),
    Kind.INTEGER_ARRAY: lambda text, _: array_of_longs(text),
    Kind.TEXT: _exact_text,
}
"""Kind → (text column, type) → typed column, NULL where the text has no typed value."""
