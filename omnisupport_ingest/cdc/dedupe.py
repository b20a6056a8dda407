"""Mark copies and collisions among raw events, and let Spark's workers judge them (``judging``).

The dedupe key is the position. Same position and same content is a duplicate: the copy that landed first
counts, the others are dropped and counted. Same position and different content is a collision: neither can be
trusted, so both go to quarantine. For values that landed encrypted, ``contents`` defines what content is.

An event whose first copy landed after a newer epoch had begun goes to quarantine too. Judging uses only facts
that were frozen when the batch landed, so a rebuild reaches the same verdicts as the first run.
"""

from __future__ import annotations

from functools import partial

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F
from pyspark.sql import types as T

from omnisupport_ingest.cdc import contents as of_contents
from omnisupport_ingest.cdc import ordinary
from omnisupport_ingest.cdc.contents import AS_LANDED, Contents, with_contents
from omnisupport_ingest.cdc.judging import JudgingRules, judge_batches
from omnisupport_ingest.visiting import Visit, visiting

DEDUPE_KEY = "(epoch, commit_lsn, ordinal)"
"""The dedupe key, as checkpoints name it. Where a source's positions are not unique, ``identity`` belongs to
it."""


_ADDED = (
    T.StructField("late", T.BooleanType()),
    T.StructField("rules", T.ArrayType(T.StringType())),
    T.StructField("reason", T.StringType()),
    T.StructField("verdict", T.StringType()),
    T.StructField("detector", T.StringType()),
    T.StructField("review_state", T.StringType()),
)
"""What judging adds to the columns of raw events."""


_CONTENT_TYPE = (
    *(
        T.StructField(name, T.LongType())
        for name in (of_contents.CONTENT, of_contents.SHOWN, of_contents.BARE)
    ),
    T.StructField(of_contents.ERASED, T.ByteType()),
    T.StructField(of_contents.PLACE, T.StringType()),
)


def mark_copies(raw: DataFrame, contents: Contents = AS_LANDED, visit: Visit | None = None) -> DataFrame:
    """Add ``copy`` (1 = landed first of its content) and ``collision`` (the position has two contents).

    Dedupe is local to a window, so it costs one shuffle by window and position. ``visit``: gives tasks access
    to the home, whose keys they need.
    """
    content, identity = "event_hash", "identity"
    events = raw
    # Find the order of arrival. The landing clock may go back. So may the watermark: where an epoch begins
    # with a snapshot, the first batch of its stream still has the watermark of the previous epoch. Names of
    # capture's batches sort in the order of landing, so they decide. Names of batches from files do not sort:
    # there the watermark decides, and copies with the same watermark are judged alike.
    sorts = F.col("file_row").isNull()
    if contents.keys is not None:
        described = T.StructType([*raw.schema.fields, *_CONTENT_TYPE])
        events = raw.mapInArrow(visiting(visit, partial(with_contents, contents=contents)), described)
        content, identity = of_contents.CONTENT, of_contents.PLACE
        # Names of batches that were read by cursor do not sort either, and a copy that landed in another form
        # may be judged otherwise.
        sorts &= ~F.col("batch_id").startswith(of_contents.UNSORTED)
    place = ("window", "epoch", "commit_lsn", "ordinal", identity)
    position = Window.partitionBy(*place)
    if contents.keys is not None:
        compared = F.max(of_contents.ERASED).over(position)
        compared = (
            F.when(compared == of_contents.BY_BARE, F.col(of_contents.BARE))
            .when(compared == of_contents.BY_SHOWN, F.col(of_contents.SHOWN))
            .otherwise(F.col(content))
        )
        events = events.withColumn(content, compared)
    arrival = Window.partitionBy(*place, content).orderBy(
        "newest_epoch_before",
        F.when(sorts, F.col("batch_id")),
        "watermark_before",
        "landed_at",
        "batch_id",
        "file_row",
    )
    return events.select(
        *raw.columns,
        F.row_number().over(arrival).alias("copy"),
        (F.min(content).over(position) != F.max(content).over(position)).alias("collision"),
    )


def mark_distinct(raw: DataFrame) -> DataFrame:
    """Add the columns of ``mark_copies`` without a shuffle, to events whose positions are known to be
    distinct."""
    return raw.select("*", F.lit(1).alias("copy"), F.lit(False).alias("collision"))


def judge(marked: DataFrame, judging_rules: JudgingRules, visit: Visit | None = None) -> DataFrame:
    """Judge marked raw events by ``judging_rules``.

    In: the columns of ``mark_copies``. Out: the raw columns, without ``copy`` and ``collision``, and ``late``
    (it landed in a closed window), ``rules`` (names of broken ones), ``reason`` (a scenario of the decision
    table), ``verdict``, ``detector`` and ``review_state``.

    Tables without a contract have no rules; their events are judged by position and time alone. The values of
    erased events are removed (``judging.to_store``). ``visit``: as in ``mark_copies``; tasks also need the
    home's tokens.
    """
    kept = (field for field in marked.schema.fields if field.name not in ("copy", "collision"))
    look = partial(judge_batches, judging_rules=judging_rules, few=ordinary.FEW)
    return marked.mapInArrow(visiting(visit, look), T.StructType([*kept, *_ADDED]))
