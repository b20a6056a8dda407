"""The Spark types of a contract's columns; their values are those of ``typed_values``."""

from __future__ import annotations

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
    """Return the Spark type of the typed ``column``."""
    pg_type = column.type
    if pg_type.kind is Kind.DECIMAL:
        return DecimalType(pg_type.precision, pg_type.scale)
    return _SPARK_TYPES[pg_type.kind]


def spark_schema(contract: model.TableContract) -> StructType:
    """Return the typed columns of ``contract`` in order; all nullable, as NULL also means "does not fit"."""
    return StructType([StructField(column.name, spark_type(column), True) for column in contract.columns])
