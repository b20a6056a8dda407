"""SCD type 2: from all events of a table to ``dim_<table>_history``, one row per version of each row.

A version holds from its position up to, not including, the position where the next one begins or the row
ends. The versions that hold at a position are the live rows of the fold of the events at or below it.
Positions order the versions, never times: where a server's clock was set back, a version ends at an earlier
time than it begins.

This makes the history from all events; ``history_update`` updates it in place.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F
from pyspark.sql import types as T

from omnisupport_ingest.cdc.current import fill_unsent, follow_key_changes, is_marked
from omnisupport_ingest.cdc.envelope import POSITION_TYPE
from omnisupport_ingest.cdc.event_fold import ENDED, KEY
from omnisupport_ingest.cdc.fold import by_group, table_columns_of, to_fold, with_types
from omnisupport_ingest.cdc.folded import row_hash
from omnisupport_ingest.cdc.history_rows import CHANGE_NOTHING, CLOSING, TableEvent, history_groups
from omnisupport_ingest.cdc.key_changes import OLD_KEY_ENDED
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.contracts.spark_types import spark_schema
from omnisupport_ingest.key_range import KeyRange

_INTERVAL = [
    T.StructField("_cdc_valid_from", T.TimestampType()),
    T.StructField("_cdc_valid_to", T.TimestampType()),
    T.StructField("_cdc_valid_from_position", POSITION_TYPE),
    T.StructField("_cdc_valid_to_position", POSITION_TYPE),
    T.StructField("_cdc_opened_by", T.StringType()),
    T.StructField("_cdc_closed_by", T.StringType()),
    T.StructField("_cdc_moved_from_key", T.StringType()),
]


def history_type(contract: TableContract) -> T.StructType:
    """Schema of ``dim_<table>_history``: the contract's columns, where the version holds, what is known of
    it."""
    return T.StructType(
        [
            *spark_schema(contract).fields,
            T.StructField("_cdc_key", T.StringType()),
            *_INTERVAL,
            T.StructField("_cdc_is_deleted", T.BooleanType()),
            T.StructField("_cdc_unresolved", T.ArrayType(T.StringType())),
            T.StructField("_cdc_exact", T.MapType(T.StringType(), T.StringType())),
            T.StructField("_cdc_batch_id", T.StringType()),
            T.StructField("_cdc_ingested_at", T.TimestampType()),
            T.StructField("_cdc_row_hash", T.LongType()),
        ]
    )


def versions_type(contract: TableContract) -> T.StructType:
    """Schema of what the workers return: versions and, with ``_cdc_ended_at``, lives that key changes ended.

    The contract's columns are text. ``_open``, ``_from_key`` and ``_from_at``: as in ``current.lives_type``.
    """
    return T.StructType(
        [
            *(T.StructField(column.name, T.StringType()) for column in contract.columns),
            T.StructField("_cdc_kind", T.StringType()),
            T.StructField("_cdc_key", T.StringType()),
            T.StructField("_cdc_ended_at", POSITION_TYPE),
            *_INTERVAL,
            T.StructField("_cdc_unresolved", T.ArrayType(T.StringType())),
            T.StructField("_cdc_batch_id", T.StringType()),
            T.StructField("_cdc_ingested_at", T.TimestampType()),
            T.StructField("_open", T.ArrayType(T.StringType())),
            T.StructField("_from_key", T.StringType()),
            T.StructField("_from_at", POSITION_TYPE),
        ]
    )


def history(
    events: DataFrame,
    contract: TableContract,
    *,
    partitions: int | None = None,
    keys: DataFrame | None = None,
) -> DataFrame:
    """Compute every version of every row of one table.

    Args:
        events: as in ``fold.fold_events``, of all windows.
        partitions: as in ``fold.fold_events``.
        keys: compute only the versions of these keys (``_cdc_key``, each once); None: of all. Keys that key
            changes tie to one of them must be among them.

    Returns:
        Schema ``history_type(contract)``. ``_cdc_valid_to`` and ``_cdc_valid_to_position`` are NULL in the
            last version of a row. ``_cdc_opened_by`` and ``_cdc_closed_by`` are operations, or ``moved`` for
            the two halves of a key change. ``_cdc_unresolved`` is as in ``current.current_state``. A
            quarantined event begins a version too, in which the columns it carried are unresolved.
    """
    known = to_fold(events, contract.other_keys)
    if keys is not None:
        chosen = known.join(F.broadcast(keys), F.col("key") == F.col("_cdc_key"), "left_semi")
        known = chosen.unionByName(known.where(F.col("key").isNull()))
    ends, has_key_changes = _table_events(known)
    grouped = by_group(known.where(F.col("key").isNotNull()), ["key"], partitions)
    texts = grouped.mapInArrow(
        partial(history_groups, table_columns=table_columns_of(contract), ends=ends), versions_type(contract)
    )
    found = with_types(texts, contract)
    versions = found.where(F.col("_cdc_kind") == KEY)
    if has_key_changes:
        versions = fill_unsent(
            versions, follow_key_changes(found.where(F.col("_cdc_kind") == ENDED), contract), contract
        )
    return _finished(versions, contract)


def _only_changes(versions: DataFrame, contract: TableContract) -> DataFrame:
    """Remove versions that begin where the one before ends and change nothing; the one before goes on.

    ``history_update.only_changes`` does the same on Arrow tables.
    """
    of_row = Window.partitionBy("_cdc_key").orderBy("_cdc_valid_from_position")
    exact = F.to_json(F.array_sort(F.map_entries("_cdc_exact")))
    compared = [
        *(F.col(f"`{column.name}`") for column in contract.columns),
        F.coalesce(F.array_sort("_cdc_unresolved"), F.array().cast("array<string>")),
        F.coalesce(exact, F.lit("[]")),
    ]
    follows = F.lag("_cdc_valid_to_position").over(of_row).eqNullSafe(F.col("_cdc_valid_from_position"))
    same = (
        F.col("_cdc_opened_by").isin(*CHANGE_NOTHING)
        & F.col("_cdc_valid_from_position").isNotNull()
        & follows
    )
    for value in compared:
        same = same & F.lag(value).over(of_row).eqNullSafe(value)
    marked = versions.withColumn("_same", F.coalesce(same, F.lit(False)))
    marked = marked.withColumn("_run", F.count_if(~F.col("_same")).over(of_row))
    run = Window.partitionBy("_cdc_key", "_run").orderBy("_cdc_valid_from_position")
    whole = run.rowsBetween(Window.unboundedPreceding, Window.unboundedFollowing)
    for name in CLOSING:
        marked = marked.withColumn(name, F.last(name).over(whole))
    return marked.where(~F.col("_same")).drop("_same", "_run")


def _table_events(known: DataFrame) -> tuple[tuple[TableEvent, ...], bool]:
    """Return the table's truncates and snapshot ends, by position, and whether any event is a key change."""
    table_event = F.struct(
        F.struct("epoch", "commit_lsn", "ordinal"),
        "op",
        "withheld",
        F.unix_micros("source_ts"),
        "batch_id",
        F.unix_micros("landed_at"),
        # The key range of a snapshot end; NULL for a truncate.
        "after",
    )
    key_changes, found = known.agg(
        F.count_if(F.col("op") == OLD_KEY_ENDED),
        F.collect_set(F.when(F.col("op").isin("t", "b"), table_event)),
    ).collect()[0]
    ends = [
        TableEvent(
            tuple(position),
            op,
            withheld,
            at,
            batch,
            landed,
            None if key_range is None else KeyRange.parse(key_range),
        )
        for position, op, withheld, at, batch, landed, key_range in found
    ]
    return distinct_table_events(ends), bool(key_changes)


def distinct_table_events(ends: Iterable[TableEvent]) -> tuple[TableEvent, ...]:
    """Return truncates and snapshot ends by position, each once."""
    ends = list(ends)
    accepted = {end.position for end in ends if not end.withheld}
    chosen = {
        (end.position, end.op != "t", "" if end.key_range is None else end.key_range.text): end
        # Copies differ only in their batch; sorting makes the choice independent of their order.
        for end in sorted(ends, key=lambda end: (end.landed_at or 0, end.batch_id or ""))
        # An accepted end voids a quarantined one at its position.
        if not (end.withheld and end.position in accepted)
    }
    return tuple(chosen[identity] for identity in sorted(chosen))


def _finished(versions: DataFrame, contract: TableContract) -> DataFrame:
    if contract.changed_only:
        versions = _only_changes(versions, contract)
    state = versions.withColumn("_cdc_is_deleted", is_marked(contract))
    names = [f"`{name}`" for name in history_type(contract).names if name != "_cdc_row_hash"]
    state = state.select(*names)
    return state.withColumn("_cdc_row_hash", row_hash(state))
