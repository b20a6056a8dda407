"""Define the columns of folded rows (``net_changes/<table>``): the state that a later merge may need.

``_cdc_life_start``        position of the latest ``c`` or ``r``; a new life inherits nothing
``_cdc_alive``             position of the latest event that leaves the key alive
``_cdc_deletes``           deletes that may still matter: the last one below ``_cdc_alive``, all above
``_cdc_column_positions``  deciding position of each column that ``_cdc_alive`` did not decide
``_cdc_unresolved``        columns without a value here: never carried, or carried by a quarantined event
``_cdc_first``             lowest position folded in
``_cdc_moved_from_key``    old key, where a key change began this life and left a column unsent
``_cdc_doubt``             position of the latest quarantined delete, which leaves open whether the row
                           exists; on a quarantined truncate or snapshot end its own position
``_cdc_vouched``           position of the latest accepted event that leaves the key alive; it, or a new life,
                           settles a doubt below it
``_cdc_scope``             on a snapshot end, the key range that it ends (``key_range``); NULL: the table
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from omnisupport_ingest.cdc.envelope import POSITION_TYPE
from omnisupport_ingest.contracts.load import TableContract
from omnisupport_ingest.contracts.spark_types import spark_schema

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
    T.StructField("_cdc_vouched", POSITION_TYPE),
    T.StructField("_cdc_scope", T.StringType()),
    T.StructField("_cdc_column_positions", T.MapType(T.StringType(), POSITION_TYPE)),
    T.StructField("_cdc_unresolved", T.ArrayType(T.StringType())),
    T.StructField("_cdc_exact", T.MapType(T.StringType(), T.StringType())),
    T.StructField("_cdc_batch_id", T.StringType()),
    T.StructField("_cdc_ingested_at", T.TimestampType()),
    T.StructField("_cdc_row_hash", T.LongType()),
]

STATE_NAMES = tuple(field.name for field in _STATE_FIELDS)
"""The columns beside the window and the contract's."""


def folded_type(contract: TableContract) -> T.StructType:
    """Schema of ``net_changes/<table>``: the window, the contract's columns typed, the state of the fold."""
    return T.StructType(
        [T.StructField("window", T.StringType()), *spark_schema(contract).fields, *_STATE_FIELDS]
    )


def row_hash(folded: DataFrame) -> Column:
    """64-bit hash of a folded row without the batch that brought it and the time it landed.

    Maps have no order, so they are hashed as their sorted entries.
    """
    parts: dict[str, Column] = {}
    for field in folded.schema.fields:
        if field.name in ("_cdc_batch_id", "_cdc_ingested_at"):
            continue
        column = F.col(f"`{field.name}`")
        is_map = isinstance(field.dataType, T.MapType)
        parts[field.name] = F.array_sort(F.map_entries(column)) if is_map else column
    # A hash skips NULLs, so which columns are NULL is hashed too. ``_cdc_scope`` was added later and is left
    # out here, so that rows without it keep their hash.
    nulls = (
        F.when(part.isNull(), "1").otherwise("0") for name, part in parts.items() if name != "_cdc_scope"
    )
    return F.xxhash64(F.concat_ws("", *nulls), *parts.values())
