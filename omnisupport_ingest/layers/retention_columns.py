"""The columns of ``retention_ledger``: what retention removed from which window, before and after it did."""

from __future__ import annotations

from pyspark.sql import types as T

from omnisupport_ingest.lake.ledger import SEQUENCE

RETENTION_TYPE = T.StructType(
    [
        T.StructField("layer", T.StringType()),
        T.StructField("window", T.StringType()),
        T.StructField("step", T.StringType()),
        T.StructField("landed_until", T.TimestampType()),
        T.StructField("files", T.LongType()),
        T.StructField("events", T.LongType()),
        T.StructField("bytes", T.LongType()),
        T.StructField("why", T.StringType()),
        T.StructField("removed_by", T.StringType()),
        T.StructField("removed_at", T.TimestampType()),
        T.StructField(SEQUENCE, T.LongType()),
    ]
)
"""``layer`` is ``landing`` or ``raw``, ``step`` is ``begun`` or ``done``. ``landed_until``: files of batches
that landed later are not meant. ``files``, ``events`` and ``bytes``: how much it was. Then why, who and when;
``sequence`` numbers the commits."""
