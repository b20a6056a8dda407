"""The envelope: the columns of an event in ``raw_cdc_staging`` and ``deduped_events``.

The payload (``before``, ``after``) stays the opaque text that landed. What the layers need to order,
compare and route events stands beside it as columns of its own.
"""

from __future__ import annotations

from struct import Struct

import pyarrow as pa
import xxhash
from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql import types as T

POSITION_TYPE = T.StructType(
    [
        T.StructField("epoch", T.IntegerType()),
        T.StructField("commit_lsn", T.LongType()),
        T.StructField("ordinal", T.LongType()),
    ]
)
"""Spark form of ``Position``; structs compare field by field, so it orders as the value does."""

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
"""Spark form of a landed data file (``landing.rows.LANDED_SCHEMA``)."""

_ARRIVAL = [
    T.StructField("landed_at", T.TimestampType()),
    T.StructField("watermark_before", T.TimestampType()),
    T.StructField("newest_epoch_before", T.IntegerType()),
    T.StructField("file_name", T.StringType()),
    T.StructField("event_hash", T.LongType()),
]

RAW_TYPE = T.StructType([T.StructField("window", T.StringType()), *LANDED_TYPE.fields, *_ARRIVAL])
"""``raw_cdc_staging`` and ``deduped_events``: the landed columns, the window, the frozen arrival
facts of the batch (``file_name`` is that of the input file it was read from), and ``event_hash``."""

QUARANTINE_TYPE = T.StructType(
    [
        *RAW_TYPE.fields,
        T.StructField("reason", T.StringType()),
        T.StructField("detector", T.StringType()),
        T.StructField("rules", T.ArrayType(T.StringType())),
        T.StructField("review_state", T.StringType()),
    ]
)
"""``quarantine``: the whole event, why it is here (``reason``), what found it (``detector``), the
names of the broken row rules, and the state of its review (``open``, ``discarded``, or
``not_needed`` where the decision table asks for none). First seen: ``landed_at``."""


def event_hash() -> Column:
    """64-bit hash (xxHash64) of an event's position and content, without capture metadata.

    Two events at one position are the same event if and only if their hashes are equal.
    """
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
    )


def event_hashes(events: pa.Table) -> list[int]:
    """The same of ``events`` (columns of ``LANDED_TYPE``), event by event, without Spark.

    Spark's hash of several columns is that of each, seeded by the one before; it begins with 42, and NULL
    changes nothing. A number is its bytes, the lowest first.
    """
    columns: list[list[bytes | None]] = [
        [None if value is None else _INT32.pack(value) for value in events["epoch"].to_pylist()],
        *(_longs(events[name]) for name in ("commit_lsn", "ordinal")),
        *(_texts(events[name], None) for name in ("op", "source_schema", "source_table")),
        *(_texts(events[name], b"\x00") for name in ("key", "before", "after")),
        [
            b"\x01" if names is None else "\x00".join(sorted(filter(_is_text, names))).encode()
            for names in events["unchanged"].to_pylist()
        ],
        _texts(events["moved_from_key"], b"\x00"),
        _longs(events["source_ts"].cast(pa.int64())),
    ]
    hashes = []
    for values in zip(*columns, strict=True):
        found = 42
        for value in values:
            if value is not None:
                found = xxhash.xxh64_intdigest(value, found)
        hashes.append(found - (1 << 64) if found >> 63 else found)
    return hashes


_INT32, _INT64 = Struct("<i"), Struct("<q")


def _longs(column: pa.ChunkedArray) -> list[bytes | None]:
    return [None if value is None else _INT64.pack(value) for value in column.to_pylist()]


def _texts(column: pa.ChunkedArray, absent: bytes | None) -> list[bytes | None]:
    return [absent if value is None else value for value in column.cast(pa.binary()).to_pylist()]


def _is_text(value: str | None) -> bool:
    return value is not None
