"""The fold as Spark runs it: events of a key, in position order, to its state.

It may be taken in parts, in any order, any number of times (the algebra is in ``life``). Spark reads
and groups; folding and typing are done on Arrow batches (``event_fold``, ``row_fold``, ``typed_rows``),
which costs a tenth of the same in column expressions: a wide table's state is thousands of them.

Rows of kind ``truncate`` and ``boundary`` have no key: they end the life of every key of the table,
or of a range of its keys, with a lower position. Rows of kind ``ended`` keep the life that a key change
ended, for the new key takes unsent columns from it. These rows alone are not free of order: a part that
folded events of the old key from both sides of the change, before the change was known, kept only the
later ones.
Within a window that cannot happen (what is appended lies above what is there, else the window is
folded again from its events); across windows ``current`` finds it and leaves the column unresolved.
"""

from __future__ import annotations

import math
from functools import partial, reduce
from operator import and_

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from omnisupport_ingest.cdc import ordinary
from omnisupport_ingest.cdc.event_fold import TableColumns
from omnisupport_ingest.cdc.folded import STATE_NAMES, folded_type, row_hash
from omnisupport_ingest.cdc.key_changes import OLD_KEY_ENDED
from omnisupport_ingest.cdc.row_fold import merge_groups
from omnisupport_ingest.cdc.typed_fold import EVENT_COLUMNS, fold_typed
from omnisupport_ingest.cdc.typed_rows import EXACT, typed_batches
from omnisupport_ingest.contracts.load import TableContract
from omnisupport_ingest.contracts.spark_types import spark_schema

_ROWS_OF_ONE_PART = 20_000
_ROWS_OF_A_PART = 100_000
_BYTES_OF_ONE_PART = 16 * 1024 * 1024
_BYTES_OF_A_PART = 32 * 1024 * 1024
"""Of compressed files; in memory the same is several times as large."""

_EVENT_IDENTITY = ("window", "epoch", "commit_lsn", "ordinal", "identity")
"""Where an event stands; two that were accepted never stand at one place."""


def table_columns_of(contract: TableContract) -> TableColumns:
    """The columns of ``contract`` as the fold's workers know them."""
    return TableColumns(
        tuple(column.name for column in contract.columns),
        tuple(contract.key),
        tuple((each.name, each.default.text) for each in contract.columns if each.default is not None),
    )


def fold_events(events: DataFrame, contract: TableContract, *, partitions: int | None = None) -> DataFrame:
    """Fold the events of one table, window by window.

    In: columns of ``RAW_TYPE`` and ``withheld`` (boolean: the event is in quarantine), any order,
    repeats allowed. Out: ``folded_type(contract)``, one row per group. ``partitions``: in how many
    parts the work is cut; null: as many as the session shuffles into.
    """
    grouped = by_group(to_fold(events), ["window", "key"], partitions)
    fold = partial(
        fold_typed,
        table_columns=table_columns_of(contract),
        columns=contract.columns,
        state=STATE_NAMES,
        few=ordinary.FEW,
    )
    return grouped.mapInArrow(fold, folded_type(contract))


def to_fold(events: DataFrame) -> DataFrame:
    """The events that the fold takes, by the columns it needs of them, and a copy of each ``c`` of a key
    change under the old key, by which that key's group learns where its life ended (``OLD_KEY_ENDED``).

    Events whose key is missing, or NULL in part, are left out: they are in quarantine and of no row."""
    parts = F.from_json("key", "array<string>")
    broken = F.col("key").contains("null") & F.exists(parts, lambda part: part.isNull())
    row_events = F.col("op").isin("c", "u", "d", "r") & F.col("key").isNotNull() & ~broken
    folded = events.where(row_events | F.col("op").isin("t", "b"))
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


def without_voided(events: DataFrame) -> DataFrame:
    """``events`` but for withheld events whose place an accepted event of the same window has.

    It voids them whatever key they name: of two events that collided one was released, and the other
    one never was. Where nothing is withheld, Spark finds that nothing is to be joined.
    """
    accepted, withheld = events.where(~F.col("withheld")), events.where(F.col("withheld"))
    places = accepted.select(*(F.col(name).alias(f"_at_{name}") for name in _EVENT_IDENTITY))
    same = reduce(and_, (F.col(name).eqNullSafe(F.col(f"_at_{name}")) for name in _EVENT_IDENTITY))
    return accepted.unionByName(withheld.join(places, same, "left_anti"))


def merge_rows(rows: DataFrame, contract: TableContract, *, partitions: int | None = None) -> DataFrame:
    """Merge folded rows to one per group; in and out ``folded_type(contract)``.

    A life that a key change ended also takes in what other rows of that key hold below its end.
    """
    kind = folded_type(contract)
    grouped = by_group(rows.select(*_quoted(kind.names)), ["window", "_cdc_key"], partitions)
    return hashed(grouped.mapInArrow(partial(merge_groups, table_columns=table_columns_of(contract)), kind))


def hashed(rows: DataFrame) -> DataFrame:
    """Folded ``rows``, each with its hash: that which it has, or else worked out now."""
    computed = row_hash(rows.drop("_cdc_row_hash"))
    return rows.withColumn("_cdc_row_hash", F.coalesce("_cdc_row_hash", computed))


def partitions_for(rows: int, size: int) -> int:
    """In how many parts to fold ``rows`` events or folded rows whose files have ``size`` bytes.

    One where a shuffle costs more than it gains, else so many that a worker, which holds a part whole,
    needs no more than some hundred megabytes.
    """
    if rows <= _ROWS_OF_ONE_PART and size <= _BYTES_OF_ONE_PART:
        return 1
    return 2 * math.ceil(max(rows / _ROWS_OF_A_PART, size / _BYTES_OF_A_PART) / 2)


def by_group(frame: DataFrame, columns: list[str], partitions: int | None) -> DataFrame:
    """``frame`` with rows that agree in ``columns`` in one partition; one partition costs no shuffle."""
    if partitions is None:
        return frame.repartition(*columns)
    return frame.coalesce(1) if partitions == 1 else frame.repartition(partitions, *columns)


def with_types(texts: DataFrame, contract: TableContract) -> DataFrame:
    """The contract's columns by their types, the others as they are, and ``_cdc_exact``: the exact text
    where a type cannot hold the value."""
    types = spark_schema(contract)
    others = [field for field in texts.schema.fields if field.name not in types.names]
    exact = T.StructField(EXACT, T.MapType(T.StringType(), T.StringType()))
    schema = T.StructType([*others, *types.fields, exact])
    columns, order = tuple(contract.columns), tuple(schema.names)
    return texts.mapInArrow(partial(typed_batches, columns=columns, order=order), schema)


def _quoted(names: list[str]) -> list[str]:
    return [f"`{name}`" for name in names]
