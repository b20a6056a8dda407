"""Reading the current state: all folded rows of a table → one row per key, alive or softly deleted.

Here meet what a single window cannot know: the key's rows from every window, the truncates and
boundaries of the table, and the columns that a key change did not send.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from omnisupport_ingest.cdc import fold, folded
from omnisupport_ingest.contracts.load import TableContract
from omnisupport_ingest.contracts.spark_types import spark_schema

_LINKS_FOLLOWED = 4
"""Rounds of following key changes back; each doubles the reach, so chains of 16 changes, each of which
left the column unsent, are followed; a longer one leaves it unresolved, which is counted and shown."""


def published_type(contract: TableContract) -> T.StructType:
    """Schema of the published table: the contract's columns, then what the platform knows of the row."""
    return T.StructType(
        [
            *spark_schema(contract).fields,
            T.StructField("_cdc_key", T.StringType()),
            T.StructField("_cdc_op", T.StringType()),
            T.StructField("_cdc_epoch", T.IntegerType()),
            T.StructField("_cdc_commit_lsn", T.LongType()),
            T.StructField("_cdc_ordinal", T.LongType()),
            T.StructField("_cdc_source_ts", T.TimestampType()),
            T.StructField("_cdc_updated_at", T.TimestampType()),
            T.StructField("_cdc_is_deleted", T.BooleanType()),
            T.StructField("_cdc_deleted_at", T.TimestampType()),
            T.StructField("_cdc_unresolved", T.ArrayType(T.StringType())),
            T.StructField("_cdc_exact", T.MapType(T.StringType(), T.StringType())),
            T.StructField("_cdc_batch_id", T.StringType()),
            T.StructField("_cdc_ingested_at", T.TimestampType()),
            T.StructField("_cdc_row_hash", T.LongType()),
        ]
    )


def current_state(rows: DataFrame, contract: TableContract) -> DataFrame:
    """Fold all windows into the current state.

    In: ``folded_type(contract)`` rows of any windows. Out: ``published_type(contract)``, one row
    per key. ``_cdc_unresolved`` of a live row names the columns whose value is not known; they are
    NULL in their column, and ``folded.EXISTENCE`` among them says that the row itself may be gone.
    """
    everywhere = rows.withColumn("window", F.lit(""))
    of_keys = fold.merge_rows(everywhere.where(F.col("_cdc_kind") != folded.ENDED), contract)
    ends = of_keys.where(F.col("_cdc_kind").isin(folded.TRUNCATE, folded.BOUNDARY)).agg(
        F.collect_list(
            F.struct(F.col("_cdc_position").alias("position"), F.col("_cdc_source_ts").alias("at"))
        ).alias("_table_ends")
    )
    lives = _lives(of_keys.where(F.col("_cdc_kind") == folded.KEY), ends, contract)
    ended = rows.where(F.col("_cdc_kind") == folded.ENDED)
    if _plain_columns(contract) and not ended.isEmpty():
        lives = _take_from(_old_lives(rows, ended, ends, contract), lives, contract)
    return _published(lives, contract)


def _old_lives(rows: DataFrame, ended: DataFrame, ends: DataFrame, contract: TableContract) -> DataFrame:
    """The lives that key changes ended, each with what it knows, chains and swaps followed back.

    Pointer doubling: in each round every life takes what the life it points to knows, and then
    points to where that one points. They are few (key changes that left a column unsent), so each
    round is written down: the plan would otherwise double with it.
    """
    of_keys = rows.join(F.broadcast(ended.select("_cdc_key").distinct()), "_cdc_key", "left_semi")
    merged = fold.merge_rows(of_keys.withColumn("window", F.lit("")).select(*rows.columns), contract)
    lives = _lives(merged.where(F.col("_cdc_kind") == folded.ENDED), ends, contract)
    hidden = (F.col("_cdc_key") == F.col("_hidden_key")) & (F.col("_cdc_ended_at") == F.col("_hidden_at"))
    lives = lives.where(F.col("_end").isNull())
    lives = lives.join(F.broadcast(_hidden(of_keys)), hidden, "left_anti").localCheckpoint()
    for _ in range(_LINKS_FOLLOWED):
        if lives.where(F.col("_from_key").isNotNull()).isEmpty():
            break
        lives = _take_from(lives, lives, contract).localCheckpoint()
    return lives


def _lives(merged: DataFrame, ends: DataFrame, contract: TableContract) -> DataFrame:
    """The life of each row's latest living event: when it began and ended, its cells still valid."""
    reach = F.filter(
        "_table_ends",
        lambda d: (
            (d.position > F.col("_cdc_first"))
            & (F.col("_cdc_ended_at").isNull() | (d.position < F.col("_cdc_ended_at")))
        ),
    )
    joined = merged.crossJoin(F.broadcast(ends)).withColumn("_ends", F.concat("_cdc_deletes", reach))
    alive = F.col("_cdc_alive")
    after = F.array_sort(F.filter("_ends", lambda d: alive.isNull() | (d.position > alive)))
    # NULL where the latest living event began no life that reaches here: a `u` whose `c` is unknown.
    begins = fold.life_begins(alive, F.col("_cdc_life_start"), F.col("_ends"))
    facts = joined.select("*", F.get(after, F.lit(0)).alias("_end"), begins.alias("_begins"))
    doubt, end = F.col("_cdc_doubt"), F.col("_end")
    counts = doubt.isNotNull() & (end.isNull() | (end.position > doubt) | (doubt < alive))
    facts = facts.withColumn("_doubted", F.when(counts, doubt))
    cells = []
    for column in _plain_columns(contract):
        unknown = F.array_contains("_cdc_unresolved", column)
        decided = F.coalesce(F.col("_cdc_column_positions")[column], F.when(~unknown, alive))
        valid = decided.isNotNull() & (F.col("_begins").isNull() | (decided >= F.col("_begins")))
        valid = valid & (F.col("_doubted").isNull() | (decided > F.col("_doubted")))
        cell = F.struct(
            decided.alias("p"),
            (~unknown).alias("known"),
            F.col(f"`{column}`").alias("v"),
            F.col("_cdc_exact")[column].alias("exact"),
        )
        cells.append(F.when(valid, cell).alias(_cell(column)))
    # The old key matters only while the life that the key change began is the current one.
    moved = F.when(
        (F.col("_cdc_life_start") >= F.col("_begins"))
        & (F.col("_doubted").isNull() | (F.col("_cdc_life_start") > F.col("_doubted"))),
        F.col("_cdc_moved_from_key"),
    )
    return facts.select(
        *[name for name in facts.columns if name not in ("_cdc_moved_from_key", "_table_ends", "_ends")],
        moved.alias("_from_key"),
        F.when(moved.isNotNull(), fold.ended_by(F.col("_cdc_life_start"))).alias("_from_at"),
        *cells,
    )


def _hidden(rows: DataFrame) -> DataFrame:
    """Ended lives below which some window may hold events it no longer shows.

    A window that folded events of the old key from both sides of the end kept only the later ones,
    so nothing can be said of the earlier: the columns stay unresolved. This takes commit times that
    run against log order across a window's edge.
    """
    ended = rows.where(F.col("_cdc_kind") == folded.ENDED).select(
        F.col("window").alias("_ended_window"), "_cdc_key", F.col("_cdc_ended_at").alias("_at")
    )
    across = rows.where(F.col("_cdc_kind") == folded.KEY).select(
        "window", "_cdc_key", "_cdc_first", "_cdc_position"
    )
    return (
        across.join(F.broadcast(ended), "_cdc_key")
        .where(
            (F.col("window") != F.col("_ended_window"))
            & (F.col("_cdc_first") < F.col("_at"))
            & (F.col("_cdc_position") > F.col("_at"))
        )
        .select(F.col("_cdc_key").alias("_hidden_key"), F.col("_at").alias("_hidden_at"))
        .distinct()
    )


def _take_from(old: DataFrame, lives: DataFrame, contract: TableContract) -> DataFrame:
    """Fill the cells that ``lives`` lack from the lives they point to, and point on from there."""
    columns = _plain_columns(contract)
    names = ["_from_key", "_from_at", *(_cell(column) for column in columns)]
    known = old.select(
        F.col("_cdc_key").alias("_old_key"),
        F.col("_cdc_ended_at").alias("_old_at"),
        *(F.col(name).alias(f"_old{name}") for name in names),
    )
    linked = lives.join(
        F.broadcast(known),
        (F.col("_from_key") == F.col("_old_key")) & (F.col("_from_at") == F.col("_old_at")),
        "left",
    )
    return linked.select(
        *(name for name in lives.columns if name not in names),
        F.col("_old_from_key").alias("_from_key"),
        F.col("_old_from_at").alias("_from_at"),
        *(F.coalesce(_cell(c), F.col(f"_old{_cell(c)}")).alias(_cell(c)) for c in columns),
    )


def _published(lives: DataFrame, contract: TableContract) -> DataFrame:
    values: list[Column] = []
    plain = _plain_columns(contract)
    for column in contract.columns:
        in_key = column.name in contract.key
        values.append(F.col(f"`{column.name}`") if in_key else F.col(_cell(column.name)).v.alias(column.name))
    unknown = F.array_compact(
        F.array(
            *(F.when(F.col(_cell(c)).isNull() | ~F.col(_cell(c)).known, F.lit(c)) for c in plain),
            F.when(
                F.col("_cdc_doubt").isNotNull()
                & (F.col("_cdc_alive").isNull() | (F.col("_cdc_doubt") > F.col("_cdc_alive")))
                & F.col("_end").isNull(),
                F.lit(folded.EXISTENCE),
            ),
        )
    )
    exact = F.array_compact(
        F.array(
            F.lit(None).cast("struct<key:string,value:string>"),
            *(
                F.when(
                    F.col(_cell(c)).exact.isNotNull(),
                    F.struct(F.lit(c).alias("key"), F.col(_cell(c)).exact.alias("value")),
                )
                for c in plain
            ),
        )
    )
    ended = F.col("_end").isNotNull()
    gone, gone_at = ended, F.col("_end").at
    if contract.soft_delete_column is not None:
        mark = F.col(_cell(contract.soft_delete_column)).v
        gone = ended | mark.isNotNull()
        is_time = isinstance(spark_schema(contract)[contract.soft_delete_column].dataType, T.TimestampType)
        gone_at = F.when(ended, gone_at).when(mark.isNotNull(), mark if is_time else F.col("_cdc_updated_at"))
    last = F.col("_cdc_position")
    state = lives.select(
        *values,
        "_cdc_key",
        "_cdc_op",
        last.epoch.alias("_cdc_epoch"),
        last.commit_lsn.alias("_cdc_commit_lsn"),
        last.ordinal.alias("_cdc_ordinal"),
        "_cdc_source_ts",
        "_cdc_updated_at",
        gone.alias("_cdc_is_deleted"),
        gone_at.alias("_cdc_deleted_at"),
        unknown.alias("_cdc_unresolved"),
        F.map_from_entries(exact).alias("_cdc_exact"),
        "_cdc_batch_id",
        "_cdc_ingested_at",
    )
    return state.withColumn("_cdc_row_hash", folded.row_hash(state)).select(*published_type(contract).names)


def _plain_columns(contract: TableContract) -> list[str]:
    return [column.name for column in contract.columns if column.name not in contract.key]


def _cell(column: str) -> str:
    return f"_cell_{column}"
