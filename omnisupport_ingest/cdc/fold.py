"""The fold as Spark runs it: from the events of each key, in position order, to the state of the key.

It makes ``net_changes/<table>`` from ``deduped_events`` and ``quarantine``, window by window. The fold may be
taken in parts, in any order, any number of times (``life`` has the algebra). Spark reads and groups. Its
workers fold and type Arrow batches (``event_fold``, ``row_fold``, ``typed_rows``): column expressions for a
wide table would be thousands of nodes and cost ten times as much.

A folded row has a kind. ``key``: the state of a key. ``truncate`` and ``boundary`` (snapshot end): rows
without a key, which end the life of every key of the table, or of a key range, with a lower position.
``ended``: a life that a key change ended, kept because the new key takes unsent columns from it.

Rows of kind ``ended`` are the one part of the fold that depends on order. If events of the old key from both
sides of a key change were folded before the change was known, only the later ones were kept. Within a window
this cannot happen: appended events lie above those that are there, else the window is folded again from its
events. (Events that a sealed window withholds lie anywhere; a sealed window with such rows is folded again.)
Across windows ``current_rows`` detects it and leaves the column unresolved.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial, reduce
from operator import and_

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from omnisupport_ingest.cdc import ordinary
from omnisupport_ingest.cdc.event_fold import TableColumns
from omnisupport_ingest.cdc.folded import STATE_NAMES, folded_type, row_hash
from omnisupport_ingest.cdc.key_changes import OLD_KEY_ENDED
from omnisupport_ingest.cdc.life import PositionTuple
from omnisupport_ingest.cdc.row_fold import merge_groups
from omnisupport_ingest.cdc.typed_fold import EVENT_COLUMNS, fold_typed
from omnisupport_ingest.cdc.typed_rows import EXACT, typed_batches
from omnisupport_ingest.contracts.load import TableContract
from omnisupport_ingest.contracts.model import PositionRange
from omnisupport_ingest.contracts.spark_types import spark_schema

_ROWS_OF_ONE_PART = 20_000
_ROWS_OF_A_PART = 100_000
_BYTES_OF_ONE_PART = 16 * 1024 * 1024
_BYTES_OF_A_PART = 32 * 1024 * 1024
"""Sizes of a part of the work, in rows and in bytes of compressed files; in memory the bytes are several
times as many."""

_EVENT_IDENTITY = ("window", "epoch", "commit_lsn", "ordinal", "identity")
"""What identifies an accepted event; no two accepted events share it."""


def table_columns_of(contract: TableContract) -> TableColumns:
    """Return the columns of ``contract`` as the fold's workers know them."""
    return TableColumns(
        tuple(column.name for column in contract.columns),
        tuple(contract.key),
        tuple((each.name, each.default.text) for each in contract.columns if each.default is not None),
        contract.other_keys,
    )


def fold_events(events: DataFrame, contract: TableContract, *, partitions: int | None = None) -> DataFrame:
    """Fold the events of one table, window by window.

    Args:
        events: columns of ``RAW_TYPE`` and ``withheld`` (boolean: the event is in quarantine), any order,
            repeats allowed.
        partitions: number of parts of the work; None: as many as the session shuffles into.

    Returns:
        One row per group, schema ``folded_type(contract)``.
    """
    grouped = by_group(to_fold(events, contract.other_keys), ["window", "key"], partitions)
    fold = partial(
        fold_typed,
        table_columns=table_columns_of(contract),
        columns=contract.columns,
        state=STATE_NAMES,
        few=ordinary.FEW,
    )
    return grouped.mapInArrow(fold, folded_type(contract))


def to_fold(events: DataFrame, other_keys: Sequence[PositionRange] = ()) -> DataFrame:
    """Return the events that the fold uses, with the columns it needs (``EVENT_COLUMNS``).

    Each ``c`` of a key change is returned twice: under its own key, and under the old key with the operation
    ``OLD_KEY_ENDED``, so that the group of the old key knows where its life ended. Events whose key is
    missing or has a NULL part are left out: they are in quarantine and belong to no row. So are those in
    ``other_keys``, where events have another key, and snapshot ends there, which speak of rows by that key.
    """
    parts = F.from_json("key", "array<string>")
    broken = F.col("key").contains("null") & F.exists(parts, lambda part: part.isNull())
    row_events = F.col("op").isin("c", "u", "d", "r") & F.col("key").isNotNull() & ~broken
    row_events = row_events | F.col("op").eqNullSafe("b")
    for start, end in other_keys:
        within = _from(start) if end is None else _from(start) & ~_from(end)
        row_events = row_events & ~within
    folded = events.where(row_events | (F.col("op") == "t"))
    known = without_voided(folded).select(*EVENT_COLUMNS)
    left = known.where(F.col("moved_from_key").isNotNull() & ~F.col("withheld")).select(
        *(
            {"key": F.col("moved_from_key").alias("key"), "op": F.lit(OLD_KEY_ENDED).alias("op")}.get(
                name, F.col(name)
            )
            for name in EVENT_COLUMNS
        )
    )
    return known.unionByName(left)


def _from(start: PositionTuple) -> Column:
    epoch, lsn, ordinal = start
    of_lsn = (F.col("commit_lsn") > lsn) | ((F.col("commit_lsn") == lsn) & (F.col("ordinal") >= ordinal))
    return (F.col("epoch") > epoch) | ((F.col("epoch") == epoch) & of_lsn)


def without_voided(events: DataFrame) -> DataFrame:
    """Return ``events`` without withheld events whose position an accepted event of the same window has.

    The accepted event voids them whatever key they name: of two events that collided, one was released and
    the other never was. If nothing is withheld, Spark finds that there is nothing to join.
    """
    accepted, withheld = events.where(~F.col("withheld")), events.where(F.col("withheld"))
    accepted_at = accepted.select(*(F.col(name).alias(f"_at_{name}") for name in _EVENT_IDENTITY))
    same = reduce(and_, (F.col(name).eqNullSafe(F.col(f"_at_{name}")) for name in _EVENT_IDENTITY))
    return accepted.unionByName(withheld.join(accepted_at, same, "left_anti"))


def merge_rows(rows: DataFrame, contract: TableContract, *, partitions: int | None = None) -> DataFrame:
    """Merge folded rows to one per group; in and out ``folded_type(contract)``.

    A life that a key change ended also takes in what other rows of that key hold below its end.
    """
    kind = folded_type(contract)
    grouped = by_group(rows.select(*_quoted(kind.names)), ["window", "_cdc_key"], partitions)
    return hashed(grouped.mapInArrow(partial(merge_groups, table_columns=table_columns_of(contract)), kind))


def hashed(rows: DataFrame) -> DataFrame:
    """Return folded ``rows`` with ``_cdc_row_hash``, computed where it is NULL."""
    computed = row_hash(rows.drop("_cdc_row_hash"))
    return rows.withColumn("_cdc_row_hash", F.coalesce("_cdc_row_hash", computed))


def partitions_for(rows: int, size: int) -> int:
    """Return in how many parts to fold ``rows`` events or folded rows whose files have ``size`` bytes.

    One part where a shuffle costs more than it gains. Else so many that a worker, which holds a whole part,
    needs at most some hundred megabytes.
    """
    if rows <= _ROWS_OF_ONE_PART and size <= _BYTES_OF_ONE_PART:
        return 1
    return 2 * math.ceil(max(rows / _ROWS_OF_A_PART, size / _BYTES_OF_A_PART) / 2)


def by_group(frame: DataFrame, columns: list[str], partitions: int | None) -> DataFrame:
    """Put rows that agree in ``columns`` into one partition. ``partitions`` of 1 needs no shuffle."""
    if partitions is None:
        return frame.repartition(*columns)
    return frame.coalesce(1) if partitions == 1 else frame.repartition(partitions, *columns)


def with_types(texts: DataFrame, contract: TableContract) -> DataFrame:
    """Convert the contract's columns from text to their types, and add ``_cdc_exact``: the exact texts of
    values that their type cannot hold."""
    types = spark_schema(contract)
    others = [field for field in texts.schema.fields if field.name not in types.names]
    exact = T.StructField(EXACT, T.MapType(T.StringType(), T.StringType()))
    schema = T.StructType([*others, *types.fields, exact])
    columns, order = tuple(contract.columns), tuple(schema.names)
    return texts.mapInArrow(partial(typed_batches, columns=columns, order=order), schema)


def _quoted(names: list[str]) -> list[str]:
    return [f"`{name}`" for name in names]
