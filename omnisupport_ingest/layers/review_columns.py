"""The columns of ``review_ledger``: one row per decision of a person on one quarantined event."""

from __future__ import annotations

from pyspark.sql import types as T

from omnisupport_ingest.lake.ledger import SEQUENCE

REVIEW_TYPE = T.StructType(
    [
        T.StructField("epoch", T.IntegerType()),
        T.StructField("commit_lsn", T.LongType()),
        T.StructField("ordinal", T.LongType()),
        T.StructField("event_hash", T.LongType()),
        T.StructField("identity_hash", T.StringType()),
        T.StructField("window", T.StringType()),
        T.StructField("source_schema", T.StringType()),
        T.StructField("source_table", T.StringType()),
        T.StructField("reason", T.StringType()),
        T.StructField("decision", T.StringType()),
        T.StructField("reviewer", T.StringType()),
        T.StructField("why", T.StringType()),
        T.StructField("reviewed_at", T.TimestampType()),
        T.StructField(SEQUENCE, T.LongType()),
    ]
)
"""Which event (``identity_hash`` is the SHA-256 of ``identity``, so that no value of a row stands here)
and its window and table; the ``reason`` for which it was in quarantine; what was decided, by whom, why
and when; ``sequence`` numbers the commands."""
