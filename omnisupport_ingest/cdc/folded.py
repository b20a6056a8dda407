"""Folded rows: their columns, and how the state of the fold is written down in them.

A folded row keeps what a later merge may still need:

``_cdc_life_start``        position of the latest ``c`` or ``r``; a new life inherits nothing
``_cdc_alive``             position of the latest event that leaves the key alive
``_cdc_deletes``           deletes that may still matter: the last one below ``_cdc_alive``, all above
``_cdc_column_positions``  deciding position of each column that ``_cdc_alive`` did not decide
``_cdc_unresolved``        columns without a value here: never carried, or carried by a quarantined event
``_cdc_first``             lowest position folded in
``_cdc_moved_from_key``    old key, where a key change began this life and left a column unsent
``_cdc_doubt``             position of the latest quarantined delete: does the row exist?

While rows merge, each of the contract's columns is packed as a *cell* with its deciding position;
``as_folded`` writes cells down as plain columns and what is left to say, ``unpack`` reads them back.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from omnisupport_ingest.cdc.envelope import POSITION_TYPE
from omnisupport_ingest.contracts.load import TableContract
from omnisupport_ingest.contracts.spark_types import spark_schema, typed

KEY, ENDED, TRUNCATE, BOUNDARY = "key", "ended", "truncate", "boundary"

EXISTENCE = "*"
"""Stands among the unresolved columns where a quarantined delete leaves open whether the row exists."""

DELETE_TYPE = T.StructType([T.StructField("position", POSITION_TYPE), T.StructField("at", T.TimestampType())])

_STATE_FIELDS = [
    T.StructField("_cdc_kind", T.StringType()),
    T.StructField("_cdc_key", T.StringType()),
    T.StructField("_cdc_ended_at", POSITION_TYPE),
    T.StructField("_cdc_op", T.StringType()),
    T.StructField("_cdc_position", POSITION_TYPE),
    T.StructField("_cdc_first", POSITION_TYPE),
    T.StructField("_cdc_source_ts", T.TimestampType()),
    T.StructField("_cdc_alive", POSITION_TYPE),
    T.StructField("_cdc_updated_at", T.TimestampType()),
    T.StructField("_cdc_life_start", POSITION_TYPE),
    T.StructField("_cdc_moved_from_key", T.StringType()),
    T.StructField("_cdc_deletes", T.ArrayType(DELETE_TYPE)),
    T.StructField("_cdc_doubt", POSITION_TYPE),
    T.StructField("_cdc_column_positions", T.MapType(T.StringType(), POSITION_TYPE)),
    T.StructField("_cdc_unresolved", T.ArrayType(T.StringType())),
    T.StructField("_cdc_exact", T.MapType(T.StringType(), T.StringType())),
    T.StructField("_cdc_batch_id", T.StringType()),
    T.StructField("_cdc_ingested_at", T.TimestampType()),
    T.StructField("_cdc_row_hash", T.LongType()),
]

GROUP = ("window", "_cdc_kind", "_cdc_key", "_cdc_ended_at")
"""What a folded row stands for: rows that agree in these are merged into one."""


def folded_type(contract: TableContract) -> T.StructType:
    """Schema of ``dim_<table>``: the window, the contract's columns typed, the state of the fold."""
    return T.StructType(
        [T.StructField("window", T.StringType()), *spark_schema(contract).fields, *_STATE_FIELDS]
    )


_CELL = "struct<p:struct<epoch:int,commit_lsn:bigint,ordinal:bigint>,known:boolean,v:{type},exact:string>"
"""A column's latest entry: deciding position, whether its value is known, the typed value, and the
exact text where the type cannot hold the value. Cells compare by position first; an accepted event
(``known``) beats a quarantined one at the same position."""


def cell_name(column: str) -> str:
    return f"_cell_{column}"


def as_folded(facts: DataFrame, contract: TableContract) -> DataFrame:
    """Write cells down as typed columns, positions, unresolved columns and exact texts."""
    columns = [column for column in contract.columns if column.name not in contract.key]
    cell = {column.name: F.col(cell_name(column.name)) for column in columns}
    keys = F.from_json("_cdc_key", T.ArrayType(T.StringType()))
    values = []
    for column in contract.columns:
        if column.name in contract.key:
            text = F.get(keys, F.lit(contract.key.index(column.name)))
            values.append(typed(text, column).alias(column.name))
        else:
            values.append(cell[column.name].v.alias(column.name))
    with_cells = facts
    for column in columns:
        if cell_name(column.name) not in facts.columns:
            missing = F.lit(None).cast(_CELL.format(type=_type_of(contract, column.name)))
            with_cells = with_cells.withColumn(cell_name(column.name), missing)
    apart = [
        F.when(
            cell[c.name].p.isNotNull() & ((cell[c.name].p != F.col("_cdc_alive")) | ~cell[c.name].known),
            F.struct(F.lit(c.name).alias("key"), cell[c.name].p.alias("value")),
        )
        for c in columns
    ]
    unknown = [F.when(cell[c.name].p.isNull() | ~cell[c.name].known, F.lit(c.name)) for c in columns]
    exact = [
        F.when(
            cell[c.name].exact.isNotNull(),
            F.struct(F.lit(c.name).alias("key"), cell[c.name].exact.alias("value")),
        )
        for c in columns
    ]
    keyless = F.col("_cdc_kind").isin(TRUNCATE, BOUNDARY)
    folded = with_cells.select(
        *GROUP,
        *values,
        *(n for n in _FACTS),
        _map(apart, POSITION_TYPE).alias("_cdc_column_positions"),
        F.when(keyless, _array([])).otherwise(_array(unknown)).alias("_cdc_unresolved"),
        _map(exact, T.StringType()).alias("_cdc_exact"),
    )
    return folded.withColumn("_cdc_row_hash", row_hash(folded))


_FACTS = [
    "_cdc_op",
    "_cdc_position",
    "_cdc_first",
    "_cdc_source_ts",
    "_cdc_alive",
    "_cdc_updated_at",
    "_cdc_life_start",
    "_cdc_moved_from_key",
    "_cdc_deletes",
    "_cdc_doubt",
    "_cdc_batch_id",
    "_cdc_ingested_at",
]


def _type_of(contract: TableContract, name: str) -> str:
    return spark_schema(contract)[name].dataType.simpleString()


def _array(items: Sequence[Column]) -> Column:
    if not items:
        return F.array().cast("array<string>")
    return F.array_compact(F.array(*items))


def _map(entries: Sequence[Column], value_type: T.DataType) -> Column:
    empty = F.create_map().cast(T.MapType(T.StringType(), value_type))
    if not entries:
        return empty
    present = F.array_compact(F.array(*entries))
    return F.when(F.size(present) > 0, F.map_from_entries(present)).otherwise(empty)


def row_hash(folded: DataFrame) -> Column:
    """64-bit hash of everything a folded row says, but where and when it was ingested.

    Maps have no order, so they are hashed as their sorted entries.
    """
    parts: list[Column] = []
    for field in folded.schema.fields:
        if field.name in ("_cdc_batch_id", "_cdc_ingested_at"):
            continue
        column = F.col(field.name)
        parts.append(F.array_sort(F.map_entries(column)) if isinstance(field.dataType, T.MapType) else column)
    nulls = F.concat_ws("", *(F.when(part.isNull(), "1").otherwise("0") for part in parts))
    # A hash skips NULLs, so which columns are NULL is hashed with them.
    return F.xxhash64(nulls, *parts)


def unpack(rows: DataFrame, contract: TableContract) -> DataFrame:
    """The reverse of writing down: folded rows with their columns packed as cells again."""
    cells = []
    for column in contract.columns:
        if column.name in contract.key:
            continue
        unknown = F.array_contains("_cdc_unresolved", column.name)
        apart = F.col("_cdc_column_positions")[column.name]
        decided = F.coalesce(apart, F.when(~unknown, F.col("_cdc_alive")))
        cell = F.struct(
            decided.alias("p"),
            (~unknown).alias("known"),
            F.col(f"`{column.name}`").alias("v"),
            F.col("_cdc_exact")[column.name].alias("exact"),
        )
        cells.append(F.when(decided.isNotNull(), cell).alias(cell_name(column.name)))
    return rows.select(*GROUP, *_FACTS, *cells)
