"""Landing and raw of topics are given up by age: offsets go on, and old events are judged as before."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest
from pyspark.sql import SparkSession

from omnisupport_ingest.layers.removed import LANDING, RAW, WindowSealed, refuse_sealed
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest_tests.retention.given_up import (
    KEPT,
    give_up,
    made_again,
    reasons,
    sealed,
    shown,
    take_all,
)
from omnisupport_ingest_tests.sources.debezium.recorded import SOURCE
from omnisupport_ingest_tests.sources.debezium.told import TS, customer, envelope
from omnisupport_ingest_tests.sources.kafka.broker import Broker
from omnisupport_ingest_tests.sources.kafka.topics import Reader

HOUR = 3_600_000
FIRST, SECOND = "2026-11-20T1600", "2026-11-20T1700"


def told(id: int, hours: float, lsn: int, op: str = "u", **values: Any) -> tuple[Any, Any]:
    """A record of a customer, so many hours after 16:00."""
    ts = TS + int(hours * HOUR)
    return {"id": id}, envelope(op, customer(id, **values), lsn=lsn, order=1, ts=ts)


def giving_up(reader: Reader) -> Workspace:
    """The home of ``reader`` with contracts that give up landing and raw, three weeks on."""
    recorder = reader.recorder
    for path in (recorder.folder / "contracts").glob("*.json"):
        document = json.loads(path.read_text())
        document["x-cdc"]["retention"] = KEPT
        path.write_text(json.dumps(document))
    recorder.workspace = Workspace.open(recorder.workspace.settings)
    recorder.now += timedelta(days=21)
    return recorder.workspace


@pytest.mark.slow
def test_topics_are_read_on_and_judged_as_before_once_their_windows_are_given_up(
    broker: Broker, reader: Reader, prefix: str, spark: SparkSession
) -> None:
    topic, at = f"{prefix}customers", giving_up(reader)
    broker.make_topic(topic)
    old = [told(1, 0, 1000, "c", name="first"), told(2, 1, 1100, "c", name="second")]
    live = told(1, 264, 9000, name="later")
    broker.produce(topic, [*old, live])
    assert reader.sync().finished
    take_all(at, SOURCE, spark)
    before = shown(at, SOURCE)
    planned = give_up(at, SOURCE)
    assert {(each.layer, each.window) for each in planned.doomed} == {
        (layer, window) for layer in (LANDING, RAW) for window in (FIRST, SECOND)
    }
    assert planned.refused == () and shown(at, SOURCE) == before

    # (a) The offsets are those of the manifests, which stay; what is sent again changes nothing.
    report = reader.sync()
    assert report.finished and report.batches == []
    broker.produce(topic, [*old, live])
    assert reader.sync().records == 3
    assert [(each.start, each.next) for each in reader.spans()] == [(0, 3), (3, 6)]
    take_all(at, SOURCE, spark)
    assert shown(at, SOURCE) == before

    # (b) An event of a live window goes in; (c) one of a sealed window waits, a row that was read, too.
    late = told(3, 0.1, 1010, "r")
    elsewhere = told(2, 264.2, 1100, name="another time for a position")
    broker.produce(topic, [told(2, 264.5, 9100, name="newer"), late, elsewhere])
    assert reader.sync().finished
    take_all(at, SOURCE, spark)
    rows = reader.recorder.state(spark, "customers")
    assert (rows[2,]["name"], "email" in rows[2,]["_cdc_unresolved"]) == ("newer", False)
    assert "email" in rows[3,]["_cdc_unresolved"]
    assert reasons(at, SOURCE) == {(FIRST, "too_late_arrival"): 2, (SECOND, "too_late_arrival"): 2}

    # (d) A replay is refused; (e) what is made again is the same.
    with pytest.raises(WindowSealed, match=FIRST):
        refuse_sealed(at, SOURCE, [FIRST])
    assert sealed(at, SOURCE) == {FIRST, SECOND}
    before = shown(at, SOURCE)
    assert made_again(at, SOURCE, spark) == before
