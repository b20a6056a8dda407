"""Spark and the column kernel compute the same hash of an event."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from random import Random

import pyarrow as pa
from pyspark.sql import SparkSession

from omnisupport_ingest.cdc.envelope import LANDED_TYPE, event_hash
from omnisupport_ingest.cdc.event_hashes import event_hashes
from omnisupport_ingest.lake.schema import arrow_schema

TEXTS = (None, "", "a", "\x00", "é" * 3, "x" * 31, "y" * 32, "z" * 33, '{"id":"1"}', "𝄞 clef " * 40)
MANY_TEXTS = (*TEXTS, *(f"text number {number}" for number in range(20)))
IDENTITIES = (None, '["odd","1"]', '["odd","2"]', '["kept out","row",3,"a"]', '["public","notes","[1]"]')
NUMBERS = (0, 1, -1, 2**31 - 1, 2**62, -(2**63), 2**63 - 1)


def test_of_what_could_not_be_read_the_identity_says_which_event_it_is() -> None:
    same = {"epoch": 1, "commit_lsn": 0, "ordinal": 7, "op": "u", "source_schema": "s", "source_table": "t"}
    rows = [{**same, "identity": identity} for identity in IDENTITIES]
    hashes = event_hashes(
        pa.Table.from_pylist(rows, schema=arrow_schema(LANDED_TYPE, without=()))
    ).to_pylist()
    assert len(set(hashes)) == 4
    assert hashes[0] == hashes[-1]


def test_spark_and_whole_columns_give_an_event_the_same_hash(spark: SparkSession) -> None:
    rng = Random(2026)
    rows = [
        {
            "epoch": rng.choice((1, 2, -5, 2**31 - 1)),
            "commit_lsn": rng.choice(NUMBERS),
            "ordinal": rng.choice((*NUMBERS, None)),
            "op": rng.choice("cudrtb"),
            "source_ts": rng.choice(
                (None, datetime(1969, 1, 1, tzinfo=UTC) + timedelta(microseconds=rng.randrange(10**16)))
            ),
            "source_schema": rng.choice(TEXTS),
            "source_table": rng.choice(TEXTS),
            "key": rng.choice(MANY_TEXTS),
            "before": rng.choice(MANY_TEXTS),
            "after": rng.choice(MANY_TEXTS),
            "unchanged": rng.choice((None, [], ["b", "a"], ["é", "z", None], [""])),
            "moved_from_key": rng.choice(MANY_TEXTS),
            "identity": rng.choice(IDENTITIES),
        }
        for _ in range(2_000)
    ]
    events = pa.Table.from_pylist(rows, schema=arrow_schema(LANDED_TYPE, without=()))
    by_spark = spark.createDataFrame(events).select(event_hash().alias("hash")).toArrow()["hash"].to_pylist()
    assert event_hashes(events).to_pylist() == by_spark
    # A column in which few texts stand is hashed in another way than one of many.
    for count in (0, 1, 3, 20):
        assert event_hashes(events.slice(7, count)).to_pylist() == by_spark[7 : 7 + count]
