"""The columns of ``erasure_ledger``: one row per key whose events a person had erased, and how far."""

from __future__ import annotations

from pyspark.sql import types as T

from omnisupport_ingest.cdc.envelope import POSITION_TYPE
from omnisupport_ingest.lake.ledger import SEQUENCE

ERASURE_TYPE = T.StructType(
    [
        T.StructField("source_schema", T.StringType()),
        T.StructField("source_table", T.StringType()),
        T.StructField("key_hash", T.StringType()),
        T.StructField("after", POSITION_TYPE),
        T.StructField("through", POSITION_TYPE),
        T.StructField("windows", T.ArrayType(T.StringType())),
        T.StructField("erased_by", T.StringType()),
        T.StructField("why", T.StringType()),
        T.StructField("erased_at", T.TimestampType()),
        T.StructField(SEQUENCE, T.LongType()),
    ]
)
"""The table and the SHA-256 of the key, never the key; its events above ``after`` (null: from the first
one) and up to ``through`` are erased. ``windows``: those that may hold some of them. Then who, why and
when; ``sequence`` numbers the commands."""
