"""Define the envelope: the Spark columns of an event in ``raw_cdc_staging``, ``deduped_events`` and
``quarantine``.

The payload (``before``, ``after``) stays the text that landed. The facts that the layers need to order,
compare and route events are columns of their own.
"""

from __future__ import annotations

from functools import reduce

from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql import types as T

from omnisupport_ingest.position import UNREAD

POSITION_TYPE = T.StructType(
    [
        T.StructField("epoch", T.IntegerType()),
        T.StructField("commit_lsn", T.LongType()),
        T.StructField("ordinal", T.LongType()),
    ]
)
"""Spark type of ``Position``. Spark compares structs field by field, so its order is that of positions."""

LANDED_TYPE = T.StructType(
    [
        T.StructField("epoch", T.IntegerType()),
        T.StructField("commit_lsn", T.LongType()),
        T.StructField("ordinal", T.LongType()),
        T.StructField("op", T.StringType()),
        T.StructField("source_ts", T.TimestampType()),
        T.StructField("tx_id", T.LongType()),
        T.StructField("lsn", T.LongType()),
        T.StructField("source_schema", T.StringType()),
        T.StructField("source_table", T.StringType()),
        T.StructField("key", T.StringType()),
        T.StructField("before", T.StringType()),
        T.StructField("after", T.StringType()),
        T.StructField("unchanged", T.ArrayType(T.StringType())),
        T.StructField("moved_from_key", T.StringType()),
        T.StructField("chunk_id", T.StringType()),
        T.StructField("identity", T.StringType()),
        T.StructField("misplaced", T.BooleanType()),
        T.StructField("file_row", T.LongType()),
        T.StructField("envelope", T.StringType()),
        T.StructField("batch_id", T.StringType()),
    ]
)
"""Spark schema of a landed data file (``landing.rows.LANDED_SCHEMA``)."""

_ARRIVAL = [
    T.StructField("landed_at", T.TimestampType()),
    T.StructField("watermark_before", T.TimestampType()),
    T.StructField("newest_epoch_before", T.IntegerType()),
    T.StructField("file_name", T.StringType()),
    T.StructField("event_hash", T.LongType()),
]

RAW_TYPE = T.StructType([T.StructField("window", T.StringType()), *LANDED_TYPE.fields, *_ARRIVAL])
"""Schema of ``raw_cdc_staging`` and ``deduped_events``: the window, the landed columns, the frozen arrival
facts of the batch (``file_name``: the input file that it was read from), and ``event_hash``."""

QUARANTINE_TYPE = T.StructType(
    [
        *RAW_TYPE.fields,
        T.StructField("reason", T.StringType()),
        T.StructField("detector", T.StringType()),
        T.StructField("rules", T.ArrayType(T.StringType())),
        T.StructField("review_state", T.StringType()),
    ]
)
"""Schema of ``quarantine``: the whole event, why it is here (``reason``), what found it (``detector``), the
names of the broken row rules, and the state of its review: ``open``, ``discarded``, or ``not_needed`` where
the decision table requires none. ``landed_at`` is the time at which the event was first seen."""

QUARANTINE_BY = ("window", "reason")
"""Partition columns of ``quarantine``."""


def event_hash() -> Column:
    """64-bit hash (xxHash64) of an event's position and content, without capture metadata.

    Two events at one position are the same event if and only if their hashes are equal. Of what was delivered
    and could not be read, only the identity says which it is.
    """
    unread = reduce(Column.__or__, (F.col("identity").startswith(start) for start in UNREAD))
    return F.xxhash64(
        "epoch",
        "commit_lsn",
        "ordinal",
        "op",
        "source_schema",
        "source_table",
        F.coalesce("key", F.lit("\x00")),
        F.coalesce("before", F.lit("\x00")),
        F.coalesce("after", F.lit("\x00")),
        F.coalesce(F.array_join(F.array_sort("unchanged"), "\x00"), F.lit("\x01")),
        F.coalesce("moved_from_key", F.lit("\x00")),
        "source_ts",
        F.when(unread, F.col("identity")),
    )
