"""How Spark's work is done in a home: in how many partitions and Arrow batches, and by which kernels.

What a home holds is small, so production would fold it in one partition, and give a worker all of it at once.
Nor would anything be done by whole columns, which begins with some events of one table in a batch. The bounds
are lowered instead, and who groups rows by their key is watched. Work that is cut is done by no single task.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from random import Random
from unittest.mock import patch

from pyspark.sql import DataFrame, SparkSession

from omnisupport_ingest.cdc import current, fold, history, ordinary
from omnisupport_ingest.lake import file_tasks

_BATCH = "spark.sql.execution.arrow.maxRecordsPerBatch"
_EVENTS_OF_A_LANE = 40
"""About how many there are of a table, so that a home of any size is cut into few parts."""


@dataclass(frozen=True)
class Cut:
    """``rows_of_a_part``: from how many rows on there are several partitions, null: as in production.
    ``rows_of_a_batch``: how many an Arrow batch has at the most. ``few``: so many events of a table in a
    batch, or fewer, are judged and folded one by one; 0: whatever is ordinary is done by whole columns."""

    rows_of_a_part: int | None
    rows_of_a_batch: int
    few: int = ordinary.FEW


WHOLE = Cut(None, 64)
"""Partitions as in production; batches so small that small homes too have events of a group in several."""


def cut_for(rng: Random, lanes: int) -> Cut:
    """How the work of a home with so many lanes is cut, by lot."""
    whole = rng.random() < 0.4
    cut = WHOLE if whole else Cut(lanes * _EVENTS_OF_A_LANE, rng.choice((5, 17, 64)))
    return replace(cut, few=rng.choice((0, 0, ordinary.FEW)))


@contextmanager
def cutting(spark: SparkSession, cut: Cut) -> Iterator[list[int]]:
    """Cut what is done meanwhile; gives the list of partitions that rows were grouped into, filled as they
    are."""
    grouped: list[int] = []
    by_group = fold.by_group

    def watched(frame: DataFrame, columns: list[str], partitions: int | None) -> DataFrame:
        grouped.append(partitions or 1)
        return by_group(frame, columns, partitions)

    before = spark.conf.get(_BATCH)
    with ExitStack() as patched:
        for module in (fold, current, history):
            patched.enter_context(patch.object(module, "by_group", watched))
        if cut.rows_of_a_part is not None:
            patched.enter_context(patch.object(file_tasks, "FEW_ROWS", 0))
            patched.enter_context(patch.object(fold, "_ROWS_OF_ONE_PART", 0))
            patched.enter_context(patch.object(fold, "_ROWS_OF_A_PART", cut.rows_of_a_part))
        patched.enter_context(patch.object(ordinary, "FEW", cut.few))
        spark.conf.set(_BATCH, str(cut.rows_of_a_batch))
        try:
            yield grouped
        finally:
            spark.conf.set(_BATCH, str(before))
