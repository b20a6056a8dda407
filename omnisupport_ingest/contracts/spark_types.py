"""A contract's columns as typed Spark columns: without loss, and without ever failing a job.

A value that its typed column cannot hold (``NaN`` in a numeric, the date ``infinity``, a
two-dimensional array) becomes NULL and does not *fit*; the dimension keeps its exact text beside it.
All expressions are Spark's own functions. Whether a text is a value of its type at all is a question for
``pg_values``.
"""

from __future__ import annotations

from pyspark.sql import Column
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from omnisupport_ingest.contracts import model
from omnisupport_ingest.contracts.pg_text import READERS
from omnisupport_ingest.contracts.pg_types import Kind

_SPARK_TYPES: dict[Kind, DataType] = {
    Kind.BOOLEAN: BooleanType(),
    Kind.SHORT: ShortType(),
    Kind.INTEGER: IntegerType(),
    Kind.LONG: LongType(),
    Kind.FLOAT: FloatType(),
    Kind.DOUBLE: DoubleType(),
    Kind.NUMERIC_TEXT: StringType(),
    Kind.DATE: DateType(),
    Kind.TIMESTAMP: TimestampType(),
    Kind.TIMESTAMPTZ: TimestampType(),
    Kind.BINARY: BinaryType(),
    Kind.TEXT_ARRAY: ArrayType(StringType()),
    Kind.INTEGER_ARRAY: ArrayType(LongType()),
    Kind.TEXT: StringType(),
}


def spark_type(column: model.Column) -> DataType:
    """The Spark type of the typed form of ``column``."""
    pg_type = column.type
    if pg_type.kind is Kind.DECIMAL:
        return DecimalType(pg_type.precision, pg_type.scale)
    return _SPARK_TYPES[pg_type.kind]


def spark_schema(contract: model.TableContract) -> StructType:
    """The typed columns of ``contract`` in its order; all nullable, as NULL also means "does not fit"."""
    return StructType([StructField(column.name, spark_type(column), True) for column in contract.columns])


def typed(text: Column, column: model.Column) -> Column:
    """``text`` (a string column of PostgreSQL's own text of a value) as ``spark_type(column)``.

    NULL where ``text`` is NULL, is no value of the type, or does not fit. Never raises, in ANSI
    mode either.
    """
    pg_type = column.type
    return READERS[pg_type.kind](text, pg_type)
