"""The ``retention_ledger`` of a source: what retention removed from which window, before and after it did."""

from __future__ import annotations

from pathlib import Path

from pyspark.sql import types as T

from omnisupport_ingest.lake.ledger import SEQUENCE, Ledger
from omnisupport_ingest.lake.table import TableSpec

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
        T.StructField("table", T.StringType()),
        T.StructField("ended_before", T.TimestampType()),
        T.StructField(SEQUENCE, T.LongType()),
    ]
)
"""``layer`` is ``landing``, ``raw``, ``quarantine`` or ``history``, ``step`` is ``begun`` or ``done``.
``landed_until``: files (of quarantine: events) of batches that landed later are not meant. ``files``,
``events`` (of a history: versions) and ``bytes``: how much it was. Then why, who and when. ``table``: of a
quarantine or history, the name in the lake; ``ended_before``: of a history, which is of no window, the
versions that ended before. ``sequence`` numbers the commits."""


def retention_ledger(lake: Path, source: str) -> Ledger:
    """The ledger of ``source`` below the folder ``lake``; no contract is needed to read it."""
    return Ledger(
        lake,
        TableSpec(
            path=f"{source}/retention_ledger",
            schema=RETENTION_TYPE,
            partition_by=(),
            description=f"What retention removed from the layers of {source}, when and why.",
        ),
    )
