"""Net changes that depend on other keys, or on a person, and so cannot update a row by themselves.

A key change with an unsent column ties two keys together, and a quarantined delete leaves open whether a row
exists. Such rows are folded from the net changes of all windows (``cdc.current``). They are rare: the footers
of most files show that there are none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime

import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from omnisupport_ingest.cdc.current import current_state
from omnisupport_ingest.cdc.event_fold import ENDED, KEY
from omnisupport_ingest.cdc.fold import merge_rows, partitions_for
from omnisupport_ingest.cdc.stored import STATE, state_of_fold, stored_type
from omnisupport_ingest.cdc.table_ends import TABLE_END_COLUMNS, TableEnd, table_ends_in
from omnisupport_ingest.cdc.updating import CHANGE, GONE, SET
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.lake.layout import LakeFile
from omnisupport_ingest.lake.snapshot import TableSnapshot
from omnisupport_ingest.lake.wanted_rows import Wanted, few_keys, keys_frame, reading_wanted


def keyless_in(files: Iterable[LakeFile]) -> Iterator[TableEnd]:
    """Yield the truncates and snapshot ends among the folded rows of ``files``."""
    for file in files:
        with pq.ParquetFile(file.uri) as parquet:
            if _kinds(parquet) == {KEY}:
                continue
            yield from table_ends_in(parquet.read(columns=list(TABLE_END_COLUMNS)))


def files_with_ties(files: Iterable[LakeFile]) -> list[LakeFile]:
    """Return those of ``files`` in which the row of some key depends on more than the key's own state."""
    found = []
    for file in files:
        with pq.ParquetFile(file.uri) as parquet:
            if ENDED in _kinds(parquet) or not all(
                _only_nulls(parquet, leaf) for leaf in ("_cdc_moved_from_key", "_cdc_doubt.epoch")
            ):
                found.append(file)
    return found


def holds_ended_lives(files: Iterable[LakeFile]) -> bool:
    """Whether a key change ended a row in any of ``files``."""
    for file in files:
        with pq.ParquetFile(file.uri) as parquet:
            if ENDED in _kinds(parquet):
                return True
    return False


def _kinds(parquet: pq.ParquetFile) -> set[str]:
    """Return the kinds of the rows, by the footer. The column itself is read only for row groups whose
    statistics do not tell, such as one with a snapshot end beside rows.
    """
    index = _leaf(parquet, "_cdc_kind")
    kinds: set[str] = set()
    untold = []
    for number in range(parquet.metadata.num_row_groups):
        found = parquet.metadata.row_group(number).column(index).statistics
        if found is not None and found.has_min_max and found.min == found.max:
            kinds.add(found.min)
        else:
            untold.append(number)
    if untold:
        kinds |= {*pc.unique(parquet.read_row_groups(untold, columns=["_cdc_kind"])["_cdc_kind"]).to_pylist()}
    return kinds


def _only_nulls(parquet: pq.ParquetFile, leaf: str) -> bool:
    index = _leaf(parquet, leaf)
    groups = (parquet.metadata.row_group(number) for number in range(parquet.metadata.num_row_groups))
    statistics = (group.column(index).statistics for group in groups)
    return all(each is not None and each.has_null_count and not each.num_values for each in statistics)


def _leaf(parquet: pq.ParquetFile, name: str) -> int:
    schema = parquet.schema
    return next(index for index in range(len(schema)) if schema.column(index).path == name)


def tied_keys_in(rows: DataFrame) -> DataFrame:
    """The keys of the net changes ``rows`` that cannot be merged by their own state: ``_cdc_key``."""
    return rows.where(_ties_or_doubt() & F.col("_cdc_key").isNotNull()).select("_cdc_key")


def _ties_or_doubt() -> Column:
    return _ties() | F.col("_cdc_doubt").isNotNull()


@contextmanager
def refolded(
    spark: SparkSession,
    net_changes: TableSnapshot,
    contract: TableContract,
    keys: DataFrame,
    *,
    deleted_since: datetime | None,
    doubted: bool,
) -> Iterator[DataFrame]:
    """Yield the rows that ``keys`` should have by the net changes of all windows: stored rows with
    ``CHANGE``.

    ``keys``: ``_cdc_key``, repeats allowed. Keys that key changes tie together are folded together. A key
    that should have no row is yielded as gone. ``doubted``: a truncate or snapshot end is in quarantine. The
    frame can be used until the ``with`` block ends.
    """
    with ExitStack() as kept:
        rows, wanted, parts = _of_few(spark, net_changes, keys, kept) or _of_many(spark, net_changes, keys)
        chosen = rows.where(F.col("_cdc_key").isNotNull())
        current = current_state(rows, contract, partitions=parts, deleted_since=deleted_since)
        once = chosen.withColumn("window", F.lit(""))
        merged = merge_rows(once, contract, partitions=parts)
        ended = (
            chosen.where(F.col("_cdc_kind") == ENDED)
            .select("_cdc_key")
            .distinct()
            .withColumn("_tied", F.lit(True))
        )
        refold = F.coalesce(F.col("_tied"), F.lit(doubted)) | _ties_or_doubt()
        states = (
            merged.where(F.col("_cdc_kind") == KEY)
            .join(ended, "_cdc_key", "left")
            .select("_cdc_key", state_of_fold(refold).alias(STATE))
        )
        there = current.join(states, "_cdc_key").withColumn(CHANGE, F.lit(SET))
        names = [*stored_type(contract).names, CHANGE]
        gone = wanted.join(current.select("_cdc_key"), "_cdc_key", "left_anti")
        # If the table is ordered by a whole-number key, the key column is needed to place the row.
        no_rows = gone.select(*(absent(contract, field) for field in there.select(*names).schema.fields))
        yield there.select(*(f"`{name}`" for name in names)).unionByName(no_rows)


def _of_few(
    spark: SparkSession, net_changes: TableSnapshot, keys: DataFrame, kept: ExitStack
) -> tuple[DataFrame, DataFrame, int] | None:
    """Return what ``_of_many`` returns, usable until ``kept`` is closed; None if the keys are not few.

    The cost is a look into each file.
    """
    schema, files = net_changes.table.spec.schema, net_changes.all_files()
    wanted = few_keys(keys)
    while wanted is not None:
        sought = Wanted("_cdc_key", tuple(sorted(wanted)), "_cdc_moved_from_key", {"_cdc_kind": (ENDED,)})
        rows = kept.enter_context(reading_wanted(spark, schema, files, sought))
        texts = (F.col(f"`{name}`") for name, of in rows.dtypes if of == "string")
        size = F.sum(F.octet_length(F.concat_ws("", *texts)))
        held, held_bytes, ties = rows.agg(F.count("*"), size, F.count_if(_ties())).collect()[0]
        tied = few_keys(_tied_keys(rows.where(_ties()))) if ties else frozenset[str]()
        if tied is not None and tied <= wanted:
            return rows, keys_frame(spark, wanted), partitions_for(held, held_bytes or 0)
        # Usually nothing ties keys. All ties were read with the first keys, so a second round is enough.
        wanted = None if tied is None else wanted | tied
    return None


def _of_many(
    spark: SparkSession, net_changes: TableSnapshot, keys: DataFrame
) -> tuple[DataFrame, DataFrame, int]:
    """Return the net changes of ``keys``, of keys tied to them, and without a key; these keys,
    each once; and the number of parts in which to fold them."""
    files = net_changes.all_files()
    with_ties, rows = files_with_ties(files), net_changes.read(spark, files)
    if with_ties:
        keys = keys.unionByName(_tied_keys(net_changes.read(spark, with_ties).where(_ties())))
    wanted = keys.distinct()
    chosen = rows.join(wanted, "_cdc_key", "left_semi")
    parts = partitions_for(sum(file.rows for file in files), sum(file.bytes for file in files))
    return chosen.unionByName(rows.where(F.col("_cdc_key").isNull())), wanted, parts


def _ties() -> Column:
    """Whether a net change ties two keys together."""
    return (F.col("_cdc_kind") == ENDED) | F.col("_cdc_moved_from_key").isNotNull()


def _tied_keys(rows: DataFrame) -> DataFrame:
    """The keys that ``rows`` tie together: ``_cdc_key``, repeats allowed."""
    old = rows.where(F.col("_cdc_moved_from_key").isNotNull())
    return rows.select("_cdc_key").unionByName(old.select(F.col("_cdc_moved_from_key").alias("_cdc_key")))


def absent(contract: TableContract, field: T.StructField) -> Column:
    """Return the value of the column ``field`` for a row that removes its key."""
    value = F.lit(None).cast(field.dataType)
    if field.name in contract.key:
        text = F.get(F.from_json("_cdc_key", "array<string>"), F.lit(contract.key.index(field.name)))
        value = text.try_cast(field.dataType)
    elif field.name == "_cdc_key":
        value = F.col("_cdc_key")
    elif field.name == CHANGE:
        value = F.lit(GONE)
    return value.alias(field.name)


def keys_in(snapshot: TableSnapshot, spark: SparkSession, files: Sequence[LakeFile]) -> DataFrame:
    """The keys of the net changes in ``files``: ``_cdc_key``, repeats allowed."""
    return snapshot.read(spark, files).where(F.col("_cdc_key").isNotNull()).select("_cdc_key")
