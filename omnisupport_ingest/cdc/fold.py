"""The fold: events of a key, in position order, to its state; in parts, in any order, any number of times.

Every event becomes a folded row of its own, and folded rows merge by taking maxima: the latest life
start, the latest event that leaves the key alive, and per column the latest event that carried it.
A maximum does not care about order, grouping or repetition, so the fold is associative,
commutative and idempotent: a window folded in parts, replayed, or merged with others gives the
same state. (The state is a join-semilattice, as in state-based CRDTs: Shapiro et al., 2011.)

Rows of kind ``truncate`` and ``boundary`` have no key: they end the life of every key of the table
with a lower position. Rows of kind ``ended`` keep the life that a key change ended, for the new key
takes unsent columns from it. These rows alone are not free of order: a part that folded events of
the old key from both sides of the change, before the change was known, kept only the later ones.
Within a window that cannot happen (what is appended lies above what is there, else the window is
folded again from its events); across windows ``current.py`` finds it and leaves the column unresolved.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from omnisupport_ingest.cdc.entries import entries_of, keyless_of
from omnisupport_ingest.cdc.folded import (
    BOUNDARY,
    DELETE_TYPE,
    ENDED,
    GROUP,
    KEY,
    TRUNCATE,
    as_folded,
    folded_type,
    unpack,
)
from omnisupport_ingest.contracts.load import TableContract


def fold_events(events: DataFrame, contract: TableContract) -> DataFrame:
    """Fold the events of one table, window by window.

    In: columns of ``RAW_TYPE`` and ``hole`` (boolean: the event is in quarantine), any order,
    repeats allowed. Out: ``folded_type(contract)``, one row per group.
    """
    keyed = events.where(F.col("op").isin("c", "u", "d", "r") & F.col("key").isNotNull())
    entries = entries_of(keyed, contract)
    moves = keyed.where(F.col("moved_from_key").isNotNull())
    if not moves.isEmpty():
        entries = entries.unionByName(_ended_lives_of_events(keyed, moves, contract))
    keyless = keyless_of(events.where(F.col("op").isin("t", "b") & ~F.col("hole")))
    merged = _merge(entries, contract)
    return merged.unionByName(as_folded(keyless, contract)).select(*folded_type(contract).names)


def merge_rows(rows: DataFrame, contract: TableContract) -> DataFrame:
    """Merge folded rows to one per group; in and out ``folded_type(contract)``.

    A life that a key change ended also takes in what other rows of that key hold below its end.
    """
    keyless = rows.where(F.col("_cdc_kind").isin(TRUNCATE, BOUNDARY)).dropDuplicates(["window", *_PLACE])
    entries = unpack(rows.where(F.col("_cdc_kind").isin(KEY, ENDED)), contract)
    ended = rows.where(F.col("_cdc_kind") == ENDED)
    if not ended.isEmpty():
        ends = ended.select("window", F.col("_cdc_key").alias("key"), F.col("_cdc_ended_at").alias("at"))
        entries = entries.unionByName(_ended_lives(entries, ends))
    merged = _merge(entries, contract)
    return merged.unionByName(keyless).select(*folded_type(contract).names)


_PLACE = ["_cdc_kind", "_cdc_position"]


def _ended_lives_of_events(keyed: DataFrame, moves: DataFrame, contract: TableContract) -> DataFrame:
    """The ended lives that the key changes among ``keyed`` call for.

    Key changes are few: their old keys' events are picked out before anything is parsed.
    """
    incomplete = entries_of(moves, contract).where(F.col("_cdc_moved_from_key").isNotNull())
    ends = incomplete.select(
        "window", F.col("_cdc_moved_from_key").alias("key"), ended_by(F.col("_cdc_life_start")).alias("at")
    )
    old_keys = moves.select("window", F.col("moved_from_key").alias("key")).distinct()
    concerned = keyed.join(F.broadcast(old_keys), ["window", "key"], "left_semi").select(*keyed.columns)
    return _ended_lives(entries_of(concerned, contract), ends)


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
    return as_folded(_drop_what_ended(facts, cells), contract)


def _deletes_that_matter() -> Column:
    """The last delete below the latest living event, and all above it, in order.

    Deletes below that one cannot matter any more: life starts and living events only move up.
    """
    alive = F.col("_latest._cdc_alive")
    above = F.filter("_deletes", lambda d: alive.isNull() | (d.position > alive))
    below = F.filter("_deletes", lambda d: alive.isNotNull() & (d.position < alive))
    last_below = F.when(F.size(below) > 0, F.array(F.array_max(below))).otherwise(
        F.array().cast(T.ArrayType(DELETE_TYPE))
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
