"""Compute the current state of a table from the net changes of all its windows: one row per key, alive or
softly deleted.

This makes ``dim_<table>`` anew; ``updating`` updates it in place instead. Spark's workers compute the lives
of each key (``current_rows``). This module gives them the table ends, and then fills columns that a key
change did not send from the life that it ended, along chains and swaps.
"""

from __future__ import annotations

from datetime import datetime
from functools import partial

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from omnisupport_ingest.cdc import columnar
from omnisupport_ingest.cdc.current_rows import current_groups
from omnisupport_ingest.cdc.envelope import POSITION_TYPE
from omnisupport_ingest.cdc.event_fold import ENDED, KEY
from omnisupport_ingest.cdc.fold import by_group, table_columns_of
from omnisupport_ingest.cdc.folded import folded_type, row_hash
from omnisupport_ingest.cdc.table_ends import TableEnd, TableEnds
from omnisupport_ingest.contracts.load import TableContract
from omnisupport_ingest.contracts.spark_types import spark_schema

_MOST_ROUNDS = 64
"""Rounds of following key changes back. Each round doubles the reach, so no chain is too long; the limit only
stops a damaged table from being followed without end."""


_SYSTEM_COLUMNS: tuple[tuple[str, T.DataType, str], ...] = (
    ("_cdc_key", T.StringType(), "The key, its parts as one JSON array."),
    ("_cdc_op", T.StringType(), "Operation of the last event: c, u, d, r (snapshot row) or t (truncate)."),
    ("_cdc_epoch", T.IntegerType(), "Epoch of the last event: with the next two its position."),
    ("_cdc_commit_lsn", T.LongType(), "LSN of the last event's commit, as a number."),
    ("_cdc_ordinal", T.LongType(), "Place of the last event in its transaction."),
    ("_cdc_source_ts", T.TimestampType(), "When the last event was committed at the source."),
    ("_cdc_updated_at", T.TimestampType(), "When the latest event that left the row alive was committed."),
    (
        "_cdc_is_deleted",
        T.BooleanType(),
        "Deleted at the source, or marked so there; the last known values stay.",
    ),
    ("_cdc_deleted_at", T.TimestampType(), "When it was deleted, or marked so; NULL while it is alive."),
    (
        "_cdc_unresolved",
        T.ArrayType(T.StringType()),
        "Columns whose value is not known: their NULL is not the source's. *: the row itself may be gone.",
    ),
    (
        "_cdc_exact",
        T.MapType(T.StringType(), T.StringType()),
        "Exact text of values that the type of their column cannot hold, by column.",
    ),
    ("_cdc_batch_id", T.StringType(), "Batch that the last event landed with."),
    ("_cdc_ingested_at", T.TimestampType(), "When that batch landed."),
    ("_cdc_row_hash", T.LongType(), "Hash of what the row says, but batch and landing time."),
)

SYSTEM_COLUMNS = {name: described for name, _, described in _SYSTEM_COLUMNS}
"""The platform's own columns of a dimension: description for people by column."""


def current_type(contract: TableContract) -> T.StructType:
    """Schema of the current state: the contract's columns, then ``SYSTEM_COLUMNS``."""
    known = (T.StructField(name, of_type) for name, of_type, _ in _SYSTEM_COLUMNS)
    return T.StructType([*spark_schema(contract).fields, *known])


def lives_type(contract: TableContract) -> T.StructType:
    """Schema of the lives of keys: the current life of each key, and the lives that key changes ended.

    ``_open``: columns that no event of this life decided. The life of the key ``_from_key`` that ended at
    ``_from_at`` may fill them.
    """
    return T.StructType(
        [
            *spark_schema(contract).fields,
            T.StructField("_cdc_kind", T.StringType()),
            T.StructField("_cdc_key", T.StringType()),
            T.StructField("_cdc_ended_at", POSITION_TYPE),
            T.StructField("_cdc_op", T.StringType()),
            T.StructField("_cdc_position", POSITION_TYPE),
            T.StructField("_cdc_source_ts", T.TimestampType()),
            T.StructField("_cdc_updated_at", T.TimestampType()),
            T.StructField("_cdc_batch_id", T.StringType()),
            T.StructField("_cdc_ingested_at", T.TimestampType()),
            T.StructField("_ended", T.BooleanType()),
            T.StructField("_ended_time", T.TimestampType()),
            T.StructField("_cdc_unresolved", T.ArrayType(T.StringType())),
            T.StructField("_cdc_exact", T.MapType(T.StringType(), T.StringType())),
            T.StructField("_open", T.ArrayType(T.StringType())),
            T.StructField("_from_key", T.StringType()),
            T.StructField("_from_at", POSITION_TYPE),
        ]
    )


def current_state(
    rows: DataFrame,
    contract: TableContract,
    *,
    partitions: int | None = None,
    deleted_since: datetime | None = None,
) -> DataFrame:
    """Fold all windows into the current state.

    Args:
        rows: net changes of any windows, schema ``folded_type(contract)``.
        partitions: as in ``fold.fold_events``.
        deleted_since: leaves out rows that the source deleted before this moment; None: leaves out none. A
            row that is only marked as deleted stays.

    Returns:
        One row per key, schema ``current_type(contract)``. ``_cdc_unresolved`` of a live row names the
            columns without a known value, which are NULL. If ``current_rows.EXISTENCE`` is among the names,
            the row itself may be gone.
    """
    ends, has_key_changes = _table_ends(rows)
    keyed = rows.where(F.col("_cdc_kind").isin(KEY, ENDED)).select(
        *(f"`{name}`" for name in folded_type(contract).names)
    )
    grouped = by_group(keyed, ["_cdc_key"], partitions)
    found = grouped.mapInArrow(
        partial(current_groups, table_columns=table_columns_of(contract), ends=ends), lives_type(contract)
    )
    lives = found.where(F.col("_cdc_kind") == KEY)
    if has_key_changes:
        lives = fill_unsent(
            lives, follow_key_changes(found.where(F.col("_cdc_kind") == ENDED), contract), contract
        )
    if deleted_since is not None:
        lives = lives.where(~F.coalesce(_ended_before(deleted_since), F.lit(False)))
    return _dimension_rows(lives, contract)


def _ended_before(moment: datetime) -> Column:
    micros = columnar.micros_of(moment)
    return F.col("_ended") & (F.col("_ended_time") < F.timestamp_micros(F.lit(micros)))


def _table_ends(rows: DataFrame) -> tuple[TableEnds, bool]:
    """Return the table ends, and whether any key change ended a life that is still needed."""
    table_end = F.struct(
        "_cdc_position", F.unix_micros("_cdc_source_ts").alias("at"), "_cdc_doubt", "_cdc_scope"
    )
    counted = rows.where(F.col("_cdc_kind") != KEY).agg(
        F.count_if(F.col("_cdc_kind") == ENDED),
        F.collect_set(F.when(F.col("_cdc_kind") != ENDED, table_end)),
    )
    key_changes, found = counted.collect()[0]
    table_ends = (
        TableEnd(
            tuple(row["_cdc_position"]),
            row["at"],
            None if row["_cdc_doubt"] is None else tuple(row["_cdc_doubt"]),
            row["_cdc_scope"],
        )
        for row in found
    )
    return TableEnds.collect(table_ends), bool(key_changes)


def follow_key_changes(lives: DataFrame, contract: TableContract) -> DataFrame:
    """Fill the lives that key changes ended, each from the life before it, chains and swaps included.

    Pointer doubling: in each round every life takes what the life it points to knows, then points to where
    that one points. The rows are few (key changes that left a column unsent). Each round is checkpointed,
    else the plan would double with it.
    """
    lives = lives.localCheckpoint()
    for _ in range(_MOST_ROUNDS):
        if lives.where(F.col("_from_key").isNotNull()).isEmpty():
            break
        lives = fill_unsent(lives, lives, contract).localCheckpoint()
    return lives


def fill_unsent(lives: DataFrame, old: DataFrame, contract: TableContract) -> DataFrame:
    """Fill the open columns of ``lives`` from the lives in ``old`` that they point to, and move the pointers
    on."""
    plain = [column.name for column in contract.columns if column.name not in contract.key]
    taken = [*plain, "_cdc_unresolved", "_cdc_exact", "_open", "_from_key", "_from_at"]
    known = old.select(
        F.col("_cdc_key").alias("_old_key"),
        F.col("_cdc_ended_at").alias("_old_at"),
        *(F.col(f"`{name}`").alias(f"_old_{name}") for name in taken),
    )
    named = (F.col("_from_key") == F.col("_old_key")) & (F.col("_from_at") == F.col("_old_at"))
    linked = lives.join(F.broadcast(known), named, "left")
    found = F.col("_old_key").isNotNull()
    # The columns that this life leaves open and the old life knows.
    fills = F.coalesce(
        F.when(found, F.array_except("_open", "_old__cdc_unresolved")), F.array().cast("array<string>")
    )
    linked = linked.withColumn("_fills", fills)
    columns = {
        name: F.when(F.array_contains("_fills", name), F.col(f"`_old_{name}`")).otherwise(F.col(f"`{name}`"))
        for name in plain
    }
    from_old = F.map_filter("_old__cdc_exact", lambda name, _: F.array_contains("_fills", name))
    still_open = F.when(found, F.array_intersect("_open", "_old__open")).otherwise(F.col("_open"))
    needed = F.size(still_open) > 0
    columns |= {
        "_cdc_unresolved": F.array_except("_cdc_unresolved", "_fills"),
        "_cdc_exact": F.when(found, F.map_concat("_cdc_exact", from_old)).otherwise(F.col("_cdc_exact")),
        "_open": still_open,
        "_from_key": F.when(needed, F.col("_old__from_key")),
        "_from_at": F.when(needed, F.col("_old__from_at")),
    }
    return linked.select(*(columns.get(name, F.col(f"`{name}`")).alias(name) for name in lives.columns))


def is_marked(contract: TableContract) -> Column:
    """Whether the soft-delete column of a row is set; never NULL. A value that its typed column cannot hold
    (the time ``infinity``) counts as set."""
    if contract.soft_delete_column is None:
        return F.lit(False)
    exact = F.col("_cdc_exact")[contract.soft_delete_column]
    return F.col(f"`{contract.soft_delete_column}`").isNotNull() | exact.isNotNull()


def _dimension_rows(lives: DataFrame, contract: TableContract) -> DataFrame:
    gone, gone_at = F.col("_ended"), F.col("_ended_time")
    if contract.soft_delete_column is not None:
        mark = F.col(f"`{contract.soft_delete_column}`")
        is_time = isinstance(spark_schema(contract)[contract.soft_delete_column].dataType, T.TimestampType)
        updated_at = F.col("_cdc_updated_at")
        marked_at = F.coalesce(mark, updated_at) if is_time else updated_at
        gone_at = F.when(gone, gone_at).when(is_marked(contract), marked_at)
        gone = gone | is_marked(contract)
    last = F.col("_cdc_position")
    state = lives.select(
        *(f"`{column.name}`" for column in contract.columns),
        "_cdc_key",
        "_cdc_op",
        last.epoch.alias("_cdc_epoch"),
        last.commit_lsn.alias("_cdc_commit_lsn"),
        last.ordinal.alias("_cdc_ordinal"),
        "_cdc_source_ts",
        "_cdc_updated_at",
        gone.alias("_cdc_is_deleted"),
        gone_at.alias("_cdc_deleted_at"),
        "_cdc_unresolved",
        "_cdc_exact",
        "_cdc_batch_id",
        "_cdc_ingested_at",
    )
    return state.withColumn("_cdc_row_hash", row_hash(state)).select(
        *(f"`{name}`" for name in current_type(contract).names)
    )
