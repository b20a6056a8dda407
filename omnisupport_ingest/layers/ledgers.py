"""The columns of the ledgers in the lake: reviews, erasures, what retention removed, and policies.

A ledger is a table that no run of a window makes, so no replay can restore it.
"""

from __future__ import annotations

from pathlib import Path

from pyspark.sql import types as T

from omnisupport_ingest.cdc.envelope import POSITION_TYPE
from omnisupport_ingest.lake.ledger import SEQUENCE, Ledger
from omnisupport_ingest.lake.table_spec import TableSpec

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
"""``review_ledger``: one row per decision of a person on one quarantined event. ``identity_hash``: SHA-256 of
the event's ``identity``, so that no value of a row is here. ``reason``: why the event was in quarantine.
``sequence`` numbers the commands.
"""

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
"""``erasure_ledger``: one row per key whose events a person had erased. ``key_hash``: SHA-256 of the key,
never the key. The events above ``after`` (NULL: from the first one) and up to ``through`` are erased.
``windows``: those that may hold such events. ``sequence`` numbers the commands.
"""

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
"""``retention_ledger``: what retention removes from a window, with one row before the removal and one after
it.

``layer``: ``landing``, ``raw``, ``quarantine`` or ``history``; ``step``: ``begun`` or ``done``.
``landed_until``: files (in quarantine: events) of batches that landed later stay. ``files``, ``events`` (in a
history: versions) and ``bytes``: how much is removed. ``table``: for quarantine and history, the name in the
lake. ``ended_before``: for a history, versions that ended before are removed. ``sequence`` numbers the
commits.
"""

POLICY_TYPE = T.StructType(
    [
        T.StructField("version", T.StringType()),
        T.StructField("source_schema", T.StringType()),
        T.StructField("source_table", T.StringType()),
        T.StructField("policies", T.StringType()),
        T.StructField(SEQUENCE, T.LongType()),
    ]
)
"""``policy_ledger``: the policies for personal data of the contracts by which sealed windows were judged.

``version``: of a contract, as the states of windows name it; ``source_schema``, ``source_table``: its table.
``policies``: ``StoredTable`` of the events that it judged, as JSON. ``sequence`` numbers the commits.
"""


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
