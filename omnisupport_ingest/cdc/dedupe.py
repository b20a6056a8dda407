"""Judging raw events: accepted, duplicate, or quarantined with a reason.

The dedupe key is the position. Same position and same content is a duplicate: the copy that landed
first counts, the others are dropped and counted. Same position and different content is a
collision: neither can be trusted, so both go to quarantine.

An event whose first copy landed when a newer epoch had begun waits in quarantine too: its epoch was
given up, so nobody expected more of it. Only facts that were frozen when its batch landed say so, so
a rebuild judges as the first run did.
"""

from __future__ import annotations

from functools import partial

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F
from pyspark.sql import types as T

from omnisupport_ingest.cdc import ordinary
from omnisupport_ingest.cdc.envelope import RAW_TYPE, event_hash
from omnisupport_ingest.cdc.erasing import ERASED
from omnisupport_ingest.cdc.judging import ACCEPTED, JudgingRules, judge_and_erase, judge_batches

DEDUPE_KEY = "(epoch, commit_lsn, ordinal)"
"""The dedupe key, as checkpoints name it. Where a source's positions are not unique, ``identity``
stands beside it."""


_ADDED = (
    T.StructField("late", T.BooleanType()),
    T.StructField("rules", T.ArrayType(T.StringType())),
    T.StructField("reason", T.StringType()),
    T.StructField("verdict", T.StringType()),
    T.StructField("detector", T.StringType()),
    T.StructField("review_state", T.StringType()),
)

JUDGED_TYPE = T.StructType([*RAW_TYPE.fields, *_ADDED])
"""Raw events and what judging says of each (``judge``)."""


def mark_copies(raw: DataFrame) -> DataFrame:
    """Add ``copy`` (1 = landed first of its content) and ``collision`` (position has two contents).

    Dedupe is local to a window, so one shuffle by window and position is all it costs.
    """
    place = Window.partitionBy("window", "epoch", "commit_lsn", "ordinal", "identity")
    # The landing clock may go back, and so may the watermark where an epoch begins with a snapshot: its first
    # batch of the stream still has that of the epoch before. The names of capture's batches of an epoch sort
    # as they landed. Those of files do not: there the watermark tells, and where it is equal, copies are
    # judged alike.
    captured = F.when(F.col("file_row").isNull(), F.col("batch_id"))
    arrival = Window.partitionBy(
        "window", "epoch", "commit_lsn", "ordinal", "identity", "event_hash"
    ).orderBy("newest_epoch_before", captured, "watermark_before", "landed_at", "batch_id", "file_row")
    return raw.select(
        "*",
        F.row_number().over(arrival).alias("copy"),
        (F.min("event_hash").over(place) != F.max("event_hash").over(place)).alias("collision"),
    )


def mark_distinct(raw: DataFrame) -> DataFrame:
    """The columns of ``mark_copies`` for events whose positions are known to be distinct: no shuffle."""
    return raw.select("*", F.lit(1).alias("copy"), F.lit(False).alias("collision"))


def judge(marked: DataFrame, judging_rules: JudgingRules) -> DataFrame:
    """Judge marked raw events by ``judging_rules``.

    In: the columns of ``mark_copies``. Out: the raw columns, without ``copy`` and ``collision``, and
    ``late`` (it landed in a closed window), ``rules`` (broken ones), ``reason`` (a scenario of the
    decision table), ``verdict``, ``detector`` and ``review_state``. Tables without a contract have
    no rules; their events are judged by position and time alone. Erased events are without their values,
    and accepted ones have the hash of what is left; in quarantine the hash is the name of the event, and
    stays.
    """
    kept = (field for field in marked.schema.fields if field.name not in ("copy", "collision"))
    judged = T.StructType([*kept, *_ADDED])
    if not judging_rules.erasures:
        return marked.mapInArrow(
            partial(judge_batches, judging_rules=judging_rules, few=ordinary.FEW), judged
        )
    judged_and_erased = T.StructType([*judged.fields, T.StructField(ERASED, T.BooleanType())])
    erased = marked.mapInArrow(
        partial(judge_and_erase, judging_rules=judging_rules, few=ordinary.FEW), judged_and_erased
    )
    blanked = F.col(ERASED) & (F.col("verdict") == ACCEPTED)
    hashed = F.when(blanked, event_hash()).otherwise(F.col("event_hash"))
    return erased.withColumn("event_hash", hashed).drop(ERASED)
