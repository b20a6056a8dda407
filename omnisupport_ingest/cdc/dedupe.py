"""Judging raw events: accepted, duplicate, or quarantined with a reason.

The dedupe key is the position. Same position and same content is a duplicate: the copy that landed
first counts, the others are dropped and counted. Same position and different content is a
collision: neither can be trusted, so both go to quarantine.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from omnisupport_ingest.cdc.envelope import IMAGE_OPS, image
from omnisupport_ingest.contracts.load import TableContract
from omnisupport_ingest.contracts.rules import broken_rules
from omnisupport_ingest.windows import OUT_OF_RANGE

DEDUPE_KEY = "(epoch, commit_lsn, ordinal)"
"""The dedupe key, as checkpoints name it."""

ACCEPTED, DUPLICATE, QUARANTINED = "accepted", "duplicate", "quarantined"


def mark_copies(raw: DataFrame) -> DataFrame:
    """Add ``copy`` (1 = landed first of its content) and ``collision`` (position has two contents).

    Dedupe is local to a window, so one shuffle by window and position is all it costs.
    """
    place = Window.partitionBy("window", "epoch", "commit_lsn", "ordinal")
    arrival = Window.partitionBy("window", "epoch", "commit_lsn", "ordinal", "event_hash").orderBy(
        "landed_at", "batch_id"
    )
    return raw.select(
        "*",
        F.row_number().over(arrival).alias("copy"),
        (F.min("event_hash").over(place) != F.max("event_hash").over(place)).alias("collision"),
    )


def mark_distinct(raw: DataFrame) -> DataFrame:
    """The columns of ``mark_copies`` for events whose positions are known to be distinct: no shuffle."""
    return raw.select("*", F.lit(1).alias("copy"), F.lit(False).alias("collision"))


def judge(marked: DataFrame, contracts: Sequence[TableContract]) -> DataFrame:
    """Add ``verdict``, ``reason``, ``detector`` and ``rules`` to marked raw events.

    In: the columns of ``mark_copies``. Out: the raw columns, without ``copy`` and ``collision``.
    Tables without a contract have no rules; their events are judged by position alone.
    """
    carries_image = F.col("op").isin(*IMAGE_OPS)
    malformed = carries_image & (F.col("_image").isNull() | F.col("key").isNull())
    # A column of its own: every rule looks into the image, and it is parsed once.
    parsed = marked.withColumn("_image", F.when(carries_image, image(F.col("after"))))
    judged = parsed.withColumn("rules", _rules_of(contracts, carries_image, F.col("_image"))).select(
        "*",
        F.when(F.col("window") == OUT_OF_RANGE, "out_of_range")
        .when(F.col("collision"), "collision")
        .when(malformed, "malformed_image")
        .when(F.size("rules") > 0, "row_rule")
        .alias("reason"),
    )
    return judged.select(
        "*",
        F.when(F.col("copy") > 1, DUPLICATE)
        .when(F.col("reason").isNotNull(), QUARANTINED)
        .otherwise(ACCEPTED)
        .alias("verdict"),
        F.when(F.col("reason") == "out_of_range", "window")
        .when(F.col("reason") == "collision", "dedupe_key")
        .when(F.col("reason") == "malformed_image", "envelope")
        .when(F.col("reason") == "row_rule", "contract")
        .alias("detector"),
    ).drop("copy", "collision", "_image")


def _rules_of(contracts: Sequence[TableContract], carries_image: Column, after: Column) -> Column:
    none = F.array().cast("array<string>")
    rules: Column = none
    for contract in contracts:
        of_table = (F.col("source_schema") == contract.schema) & (F.col("source_table") == contract.table)
        rules = F.when(of_table & carries_image, broken_rules(contract, after)).otherwise(rules)
    return F.coalesce(rules, none)
