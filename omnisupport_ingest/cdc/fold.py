"""The fold: events of a key, in position order, to its state; in parts, in any order, any number of times.

Every event becomes a folded row of its own, and folded rows merge by taking maxima: the latest life
start, the latest event that leaves the key alive, and per column the latest event that carried it.
A maximum does not care about order, grouping or repetition, so the fold is associative,
commutative and idempotent: a window folded in parts, replayed, or merged with others gives the
same state. (The state is a join-semilattice, as in state-based CRDTs: Shapiro et al., 2011.)

A folded row keeps what a later merge may still need:

``_cdc_life_start``        position of the latest ``c`` or ``r``; a new life inherits nothing
``_cdc_alive``             position of the latest event that leaves the key alive
``_cdc_deletes``           deletes that may still matter: the last one below ``_cdc_alive``, all above
``_cdc_column_positions``  deciding position of each column that ``_cdc_alive`` did not decide
``_cdc_unresolved``        columns without a value here: never carried, or carried by a quarantined event
``_cdc_first``             lowest position folded in
``_cdc_moved_from_key``    old key, where a key change began this life and left a column unsent
``_cdc_doubt``             position of the latest quarantined delete: does the row exist?

Rows of kind ``truncate`` and ``boundary`` have no key: they end the life of every key of the table
with a lower position. Rows of kind ``ended`` keep the life that a key change ended, for the new key
takes unsent columns from it.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from omnisupport_ingest.cdc.envelope import POSITION_TYPE, image, position
from omnisupport_ingest.contracts.load import TableContract
from omnisupport_ingest.contracts.pg_types import ALWAYS_FITS
from omnisupport_ingest.contracts.spark_types import spark_schema, typed

KEY, ENDED, TRUNCATE, BOUNDARY = "key", "ended", "truncate", "boundary"

EXISTENCE = "*"
"""Stands among the unresolved columns where a quarantined delete leaves open whether the row exists."""

_DELETE_TYPE = T.StructType(
    [T.StructField("position", POSITION_TYPE), T.StructField("at", T.TimestampType())]
)

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
    T.StructField("_cdc_deletes", T.ArrayType(_DELETE_TYPE)),
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


def fold_events(events: DataFrame, contract: TableContract) -> DataFrame:
    """Fold the events of one table, window by window.

    In: columns of ``RAW_TYPE`` and ``hole`` (boolean: the event is in quarantine), any order,
    repeats allowed. Out: ``folded_type(contract)``, one row per group.
    """
    keyed = events.where(F.col("op").isin("c", "u", "d", "r") & F.col("key").isNotNull())
    entries = _entries(keyed, contract)
    moves = keyed.where(F.col("moved_from_key").isNotNull())
    if not moves.isEmpty():
        entries = entries.unionByName(_ended_lives_of_events(keyed, moves, contract))
    keyless = _keyless(events.where(F.col("op").isin("t", "b") & ~F.col("hole")))
    merged = _merge(entries, contract)
    return merged.unionByName(_as_folded(keyless, contract)).select(*folded_type(contract).names)


def merge_rows(rows: DataFrame, contract: TableContract) -> DataFrame:
    """Merge folded rows to one per group; in and out ``folded_type(contract)``.

    A life that a key change ended also takes in what other rows of that key hold below its end.
    """
    keyless = rows.where(F.col("_cdc_kind").isin(TRUNCATE, BOUNDARY)).dropDuplicates(["window", *_PLACE])
    entries = _unpack(rows.where(F.col("_cdc_kind").isin(KEY, ENDED)), contract)
    ended = rows.where(F.col("_cdc_kind") == ENDED)
    if not ended.isEmpty():
        ends = ended.select("window", F.col("_cdc_key").alias("key"), F.col("_cdc_ended_at").alias("at"))
        entries = entries.unionByName(_ended_lives(entries, ends))
    merged = _merge(entries, contract)
    return merged.unionByName(keyless).select(*folded_type(contract).names)


_PLACE = ["_cdc_kind", "_cdc_position"]

_CELL = "struct<p:struct<epoch:int,commit_lsn:bigint,ordinal:bigint>,known:boolean,v:{type},exact:string>"
"""A column's latest entry: deciding position, whether its value is known, the typed value, and the
exact text where the type cannot hold the value. Cells compare by position first; an accepted event
(``known``) beats a quarantined one at the same position."""


def _cell_name(column: str) -> str:
    return f"_cell_{column}"


def _entries(keyed: DataFrame, contract: TableContract) -> DataFrame:
    """Every row event as a folded row of its own, its columns packed as cells."""
    parsed = keyed.select(
        "*",
        position().alias("_p"),
        F.when(F.col("op") != "d", image(F.col("after"))).alias("_after"),
        # An unsent column may stand in the old image (replica identity full).
        F.when(
            (F.size("unchanged") > 0) & F.col("before").isNotNull(),
            F.map_filter(image(F.col("before")), lambda name, _: F.array_contains("unchanged", name)),
        ).alias("_before"),
    )
    alive = F.col("op").isin("c", "u", "r")
    starts = F.col("op").isin("c", "r")
    none = F.lit(None)
    plain = [column for column in contract.columns if column.name not in contract.key]
    sent = {
        column.name: F.coalesce(
            F.map_contains_key("_after", F.lit(column.name))
            | F.map_contains_key("_before", F.lit(column.name)),
            F.map_contains_key("_after", F.lit(column.name)),
            F.map_contains_key("_before", F.lit(column.name)),
            F.lit(False),
        )
        for column in plain
    }
    texts = parsed.select(
        "*",
        *(
            F.coalesce(F.col("_after")[column.name], F.col("_before")[column.name]).alias(
                f"_text_{column.name}"
            )
            for column in plain
        ),
        *(sent[column.name].alias(f"_sent_{column.name}") for column in plain),
    )
    # Columns of their own, so that each value is typed once.
    values = texts.select(
        "*",
        *(typed(F.col(f"_text_{column.name}"), column).alias(f"_value_{column.name}") for column in plain),
    )
    known = ~F.col("hole")
    cells = []
    complete = F.lit(True)
    for column in plain:
        text, value = F.col(f"_text_{column.name}"), F.col(f"_value_{column.name}")
        exact = F.lit(None).cast("string")
        if column.type.kind not in ALWAYS_FITS:
            exact = F.when(known & value.isNull(), text)
        cell = F.struct(
            F.col("_p").alias("p"),
            known.alias("known"),
            F.when(known, value).alias("v"),
            exact.alias("exact"),
        )
        cells.append(F.when(alive & F.col(f"_sent_{column.name}"), cell).alias(_cell_name(column.name)))
        complete = complete & F.col(f"_sent_{column.name}")
    return values.select(
        "window",
        F.lit(KEY).alias("_cdc_kind"),
        F.col("key").alias("_cdc_key"),
        none.cast(POSITION_TYPE).alias("_cdc_ended_at"),
        F.col("op").alias("_cdc_op"),
        F.col("_p").alias("_cdc_position"),
        F.col("_p").alias("_cdc_first"),
        F.col("source_ts").alias("_cdc_source_ts"),
        F.when(alive, F.col("_p")).alias("_cdc_alive"),
        F.when(alive, F.col("source_ts")).alias("_cdc_updated_at"),
        F.when(starts, F.col("_p")).alias("_cdc_life_start"),
        # Where the image is complete, nothing will ever be taken from the old key.
        F.when(starts & ~complete & ~F.col("hole"), F.col("moved_from_key")).alias("_cdc_moved_from_key"),
        F.when(
            (F.col("op") == "d") & ~F.col("hole"),
            F.array(F.struct(F.col("_p").alias("position"), F.col("source_ts").alias("at"))),
        )
        .otherwise(F.array().cast(T.ArrayType(_DELETE_TYPE)))
        .alias("_cdc_deletes"),
        F.when((F.col("op") == "d") & F.col("hole"), F.col("_p")).alias("_cdc_doubt"),
        F.col("batch_id").alias("_cdc_batch_id"),
        F.col("landed_at").alias("_cdc_ingested_at"),
        *cells,
    )


def _ended_lives_of_events(keyed: DataFrame, moves: DataFrame, contract: TableContract) -> DataFrame:
    """The ended lives that the key changes among ``keyed`` call for.

    Key changes are few: their old keys' events are picked out before anything is parsed.
    """
    incomplete = _entries(moves, contract).where(F.col("_cdc_moved_from_key").isNotNull())
    ends = incomplete.select(
        "window", F.col("_cdc_moved_from_key").alias("key"), ended_by(F.col("_cdc_life_start")).alias("at")
    )
    old_keys = moves.select("window", F.col("moved_from_key").alias("key")).distinct()
    concerned = keyed.join(F.broadcast(old_keys), ["window", "key"], "left_semi").select(*keyed.columns)
    return _ended_lives(_entries(concerned, contract), ends)


def _ended_lives(entries: DataFrame, ends: DataFrame) -> DataFrame:
    """For each of ``ends`` (window, key, end): a row of kind ``ended``, and all that goes into it.

    That is every entry of the key below the end. The row stands even where there is none yet, so
    that it does not depend on what arrived first.
    """
    named = ends.select(
        F.col("window").alias("_end_window"), F.col("key").alias("_end_key"), F.col("at").alias("_end_at")
    ).distinct()
    of_key = (
        (F.col("window") == F.col("_end_window"))
        & (F.col("_cdc_key") == F.col("_end_key"))
        & (F.col("_cdc_kind") == KEY)
        & (F.col("_cdc_position") < F.col("_end_at"))
    )
    below = (
        entries.join(F.broadcast(named), of_key)
        .withColumn("_cdc_kind", F.lit(ENDED))
        .withColumn("_cdc_ended_at", F.col("_end_at"))
        .select(*entries.columns)
    )
    given = {"window": "_end_window", "_cdc_key": "_end_key", "_cdc_ended_at": "_end_at"}
    types = {field.name: field.dataType for field in entries.schema.fields}
    empty = named.select(
        *(
            F.lit(ENDED).alias(name)
            if name == "_cdc_kind"
            else F.col(given[name]).alias(name)
            if name in given
            else _nothing(types[name]).alias(name)
            for name in entries.columns
        )
    )
    return below.unionByName(empty)


def _nothing(data_type: T.DataType) -> Column:
    return F.array().cast(data_type) if isinstance(data_type, T.ArrayType) else F.lit(None).cast(data_type)


def ended_by(start: Column) -> Column:
    """Position of the ``d`` of a key change whose ``c`` began a life at ``start``: one ordinal below."""
    return F.struct(
        start.epoch.alias("epoch"), start.commit_lsn.alias("commit_lsn"), (start.ordinal - 1).alias("ordinal")
    )


def _merge(entries: DataFrame, contract: TableContract) -> DataFrame:
    """One row per group: the maxima, then the state written down in the columns of ``folded_type``."""
    cells = [name for name in entries.columns if name.startswith("_cell_")]
    merged = entries.groupBy(*GROUP).agg(
        F.max(
            F.struct("_cdc_position", "_cdc_op", "_cdc_source_ts", "_cdc_batch_id", "_cdc_ingested_at")
        ).alias("_last"),
        F.min("_cdc_first").alias("_cdc_first"),
        F.max(F.struct("_cdc_alive", "_cdc_updated_at")).alias("_latest"),
        F.max(F.struct("_cdc_life_start", "_cdc_moved_from_key")).alias("_start"),
        F.array_distinct(F.flatten(F.collect_list("_cdc_deletes"))).alias("_deletes"),
        F.max("_cdc_doubt").alias("_cdc_doubt"),
        *(F.max(name).alias(name) for name in cells),
    )
    facts = merged.select(
        *GROUP,
        "_last.*",
        "_cdc_first",
        "_latest.*",
        "_start.*",
        "_cdc_doubt",
        _deletes_that_matter().alias("_cdc_deletes"),
        *cells,
    )
    return _as_folded(_drop_what_ended(facts, cells), contract)


def _deletes_that_matter() -> Column:
    """The last delete below the latest living event, and all above it, in order.

    Deletes below that one cannot matter any more: life starts and living events only move up.
    """
    alive = F.col("_latest._cdc_alive")
    above = F.filter("_deletes", lambda d: alive.isNull() | (d.position > alive))
    below = F.filter("_deletes", lambda d: alive.isNotNull() & (d.position < alive))
    last_below = F.when(F.size(below) > 0, F.array(F.array_max(below))).otherwise(
        F.array().cast(T.ArrayType(_DELETE_TYPE))
    )
    return F.array_sort(F.concat(last_below, above))


def life_begins(alive: Column, start: Column, deletes: Column) -> Column:
    """Lowest position that can belong to the life of the latest living event.

    The later of the life's start and the last delete below ``alive``; cells below it are void.
    """
    below = F.filter(deletes, lambda d: d.position < alive)
    last_delete = F.when(F.size(below) > 0, F.array_max(below).position)
    return F.greatest(start, last_delete)


def _drop_what_ended(facts: DataFrame, cells: Sequence[str]) -> DataFrame:
    """Void the cells of earlier lives: no later merge can bring them back."""
    begins = life_begins(F.col("_cdc_alive"), F.col("_cdc_life_start"), F.col("_cdc_deletes"))
    facts = facts.withColumn("_begins", begins)
    return facts.select(
        *(name for name in facts.columns if name not in cells and name != "_begins"),
        *(
            F.when(F.col("_begins").isNull() | (F.col(name).p >= F.col("_begins")), F.col(name)).alias(name)
            for name in cells
        ),
    )


def _as_folded(facts: DataFrame, contract: TableContract) -> DataFrame:
    """Write cells down as typed columns, positions, unresolved columns and exact texts."""
    columns = [column for column in contract.columns if column.name not in contract.key]
    cell = {column.name: F.col(_cell_name(column.name)) for column in columns}
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
        if _cell_name(column.name) not in facts.columns:
            missing = F.lit(None).cast(_CELL.format(type=_type_of(contract, column.name)))
            with_cells = with_cells.withColumn(_cell_name(column.name), missing)
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


def _unpack(rows: DataFrame, contract: TableContract) -> DataFrame:
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
        cells.append(F.when(decided.isNotNull(), cell).alias(_cell_name(column.name)))
    return rows.select(*GROUP, *_FACTS, *cells)


def _keyless(events: DataFrame) -> DataFrame:
    """Truncates and boundaries as rows of their own."""
    none = F.lit(None)
    return events.select(
        "window",
        F.when(F.col("op") == "t", TRUNCATE).otherwise(BOUNDARY).alias("_cdc_kind"),
        none.cast("string").alias("_cdc_key"),
        none.cast(POSITION_TYPE).alias("_cdc_ended_at"),
        F.col("op").alias("_cdc_op"),
        position().alias("_cdc_position"),
        position().alias("_cdc_first"),
        F.col("source_ts").alias("_cdc_source_ts"),
        none.cast(POSITION_TYPE).alias("_cdc_alive"),
        none.cast("timestamp").alias("_cdc_updated_at"),
        none.cast(POSITION_TYPE).alias("_cdc_life_start"),
        none.cast("string").alias("_cdc_moved_from_key"),
        F.array().cast(T.ArrayType(_DELETE_TYPE)).alias("_cdc_deletes"),
        none.cast(POSITION_TYPE).alias("_cdc_doubt"),
        F.col("batch_id").alias("_cdc_batch_id"),
        F.col("landed_at").alias("_cdc_ingested_at"),
    ).dropDuplicates(["window", "_cdc_kind", "_cdc_position"])
