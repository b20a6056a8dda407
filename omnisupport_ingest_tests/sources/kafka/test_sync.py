"""Topics land once, in the order of their offsets, from where landing says; over the wire."""

from __future__ import annotations

import json
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from omnisupport_ingest.contracts.kafka_topics import KafkaTopics
from omnisupport_ingest.landing.errors import ChainContested
from omnisupport_ingest.landing.schema_changes import SchemaChanges
from omnisupport_ingest.sources.debezium.handling import Handling, NamedTable
from omnisupport_ingest.sources.kafka import sync as sync_module
from omnisupport_ingest.sources.kafka.client import Cluster
from omnisupport_ingest.sources.kafka.errors import (
    KafkaPaused,
    KafkaRefused,
    KafkaUnreachable,
    TopicReplaced,
)
from omnisupport_ingest.sources.kafka.offsets import Held, Ways, landed_offsets
from omnisupport_ingest.sources.postgres.capture.requests import PauseRequest
from omnisupport_ingest.sources.postgres.session.errors import CaptureRunning
from omnisupport_ingest.sources.postgres.session.lease import take_lease
from omnisupport_ingest_tests.sources.debezium.recorded import DEFAULTS, SOURCE, Recorder
from omnisupport_ingest_tests.sources.debezium.told import TS, customer, envelope, flat
from omnisupport_ingest_tests.sources.kafka.broker import Broker, encoded
from omnisupport_ingest_tests.sources.kafka.topics import Reader, changes, holding
from omnisupport_ingest_tests.waiting import until

MADE_ANEW = Ways(new_epoch="topic made anew")


def test_topics_by_pattern_land_and_reading_goes_on_behind_them(
    broker: Broker, prefix: str, reader: Reader
) -> None:
    broker.make_topic(f"{prefix}a", 2)
    broker.make_topic(f"{prefix}b")
    broker.make_topic(f"other.{prefix}c")
    broker.produce(f"{prefix}a", changes(1, 3), 0)
    broker.produce(f"{prefix}a", [*changes(11, 2), ({"id": 11}, None)], 1)
    broker.produce(f"{prefix}b", changes(21, 1))
    broker.produce(f"other.{prefix}c", changes(31, 1))
    report = reader.sync()
    assert (report.records, report.events, report.finished) == (7, 6, True)
    assert reader.keys() == [1, 2, 3, 11, 12, 21]
    assert [
        (each.topic[len(prefix) :], each.partition, each.start, each.next, each.records)
        for each in reader.spans()
    ] == [("a", 0, 0, 3, 3), ("a", 1, 0, 3, 3), ("b", 0, 0, 1, 1)]
    assert reader.store.batch_ids() == [f"e000001-k-{0:019d}"]
    broker.produce(f"{prefix}a", changes(4, 1), 0)
    assert reader.sync().records == 1
    assert reader.keys() == [1, 2, 3, 4, 11, 12, 21]
    # The second batch goes on where the offsets of all partitions, 3 + 3 + 1, were.
    assert reader.store.batch_ids()[1] == f"e000001-k-{7:019d}"
    last = reader.store.read(reader.store.batch_ids()[1]).file
    assert last is not None and [each.next for each in last.offsets or ()] == [4, 3, 1]
    assert reader.sync().batches == []


def test_an_empty_topic_is_never_another_one(broker: Broker, prefix: str, reader: Reader) -> None:
    broker.make_topic(f"{prefix}a", 2)
    assert reader.sync().batches == []
    broker.produce(f"{prefix}a", changes(1, 5), 1, **{"linger.ms": 200})
    for _ in range(3):
        assert reader.sync().faults == []
    assert reader.keys() == [1, 2, 3, 4, 5]
    assert [each.behind for each in reader.source.lags()] == [0, 0]


def test_what_the_group_says_decides_nothing_and_is_told(broker: Broker, prefix: str, reader: Reader) -> None:
    topic, name = f"{prefix}a", f"omnisupport-{SOURCE}"
    broker.make_topic(topic)
    broker.produce(topic, changes(1, 4))
    group = Consumer({"bootstrap.servers": broker.address, "group.id": name})
    group.commit(offsets=[TopicPartition(topic, 0, 3)], asynchronous=False)
    group.close()
    reader.sync()
    assert reader.keys() == [1, 2, 3, 4]
    until(lambda: broker.committed(name, topic) == 4)


def test_the_group_is_told_of_nothing_that_is_not_durable(
    broker: Broker, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = Reader(tmp_path, broker.address, prefix, batch_rows=4)
    broker.make_topic(f"{prefix}a")
    broker.produce(f"{prefix}a", changes(1, 12))
    tell, told = sync_module._Sync._mirror, []

    def watched(self: Any) -> None:
        durable = {place: span.next for place, span in landed_offsets(reader.store).items()}
        told.append({place: each.next for place, each in self._open.items()} == durable)
        tell(self)

    monkeypatch.setattr(sync_module._Sync, "_mirror", watched)
    reader.sync()
    assert len(told) >= 2 and all(told)


def test_the_same_events_are_the_same_by_file_and_by_topic(
    broker: Broker, prefix: str, reader: Reader, tmp_path: Path
) -> None:
    """All that a real Debezium wrote: positions, identities and contents agree to the last one."""
    broker.make_topic(f"{prefix}all")
    produce_recorded(broker, f"{prefix}all")
    report = reader.sync()
    files = Recorder(tmp_path / "files", "customers", "toasty")
    landing = files.land(DEFAULTS)
    assert landing.tally is not None and report.odd == landing.tally.odd == 0
    rows = comparable(reader.rows())
    assert rows == comparable(files.events())
    assert len(rows) > 100


def produce_recorded(broker: Broker, topic: str) -> None:
    """Send the recorded events as the connector did: key, value and headers."""
    producer = Producer({"bootstrap.servers": broker.address})
    for line in DEFAULTS.read_bytes().splitlines():
        record = json.loads(line)
        headers = [
            (each["key"], value if isinstance(value := each.get("value"), str) else json.dumps(value))
            for each in record.get("headers") or ()
        ]
        value = encoded(record["value"]) if record.get("value") is not None else None
        producer.produce(topic, key=encoded(record.get("key")), value=value, headers=headers)
    assert producer.flush(60) == 0


def comparable(rows: list[dict[str, Any]]) -> list[str]:
    left_out = {"batch_id", "file_row", "envelope"}
    plain = ({name: value for name, value in row.items() if name not in left_out} for row in rows)
    return sorted(json.dumps(row, default=str, sort_keys=True) for row in plain)


def test_an_odd_record_waits_in_quarantine_and_is_told_by_its_offset(
    broker: Broker, prefix: str, reader: Reader
) -> None:
    topic = f"{prefix}a"
    broker.make_topic(topic)
    injected = b'1,"key":{"id":9},"value":{"op":"d"}'
    broker.produce(topic, [*changes(1, 1), (b"\xff", b"not json"), (None, injected), *changes(2, 1)])
    report = reader.sync()
    assert report.odd == 2 and report.first_odd is not None
    assert report.first_odd[:2] == ((topic, 0), 1)
    assert reader.keys() == [1, 2]
    odd = [row for row in reader.rows() if row["key"] is None]
    texts = [json.loads(row["envelope"]) for row in odd]
    assert [each["value"] for each in texts] == ["not json", injected.decode()]
    assert [each["offset"] for each in texts] == [1, 2]
    assert all(row["source_ts"].year > 2000 for row in odd), "a record has a time of its own"


def test_a_key_that_is_a_text_keeps_no_event_out(broker: Broker, prefix: str, reader: Reader) -> None:
    broker.make_topic(f"{prefix}a")
    ((_, value),) = changes(1, 1)
    broker.produce(f"{prefix}a", [(b"customer-1", value), (b"", value | {"op": "u"}), (b"customer-1", b"")])
    assert reader.sync().odd == 0
    assert reader.keys() == [1, 1]


def test_a_record_without_a_time_is_no_event_at_the_time_of_its_record(
    broker: Broker, prefix: str, reader: Reader
) -> None:
    """By position the record's own time is no place: that would be a guess."""
    broker.make_topic(f"{prefix}a")
    row = {name: held for name, held in flat("u", customer(1)).items() if name != "__source_ts_ms"}
    broker.produce(f"{prefix}a", [({"id": 1}, row)])
    report = reader.sync()
    assert report.first_odd is not None and "no commit time" in report.first_odd[2].problem


def test_rows_without_a_position_are_ordered_by_their_offsets(
    broker: Broker, prefix: str, tmp_path: Path
) -> None:
    tables = (NamedTable("*.a", "public", "customers"), NamedTable("*.b", "public", "toasty"))
    handling = Handling(tables=tables, order="arrival", bare_rows=True, tombstones="delete")
    reader = Reader(tmp_path, broker.address, prefix, handling)
    broker.make_topic(f"{prefix}a")
    broker.make_topic(f"{prefix}b")
    broker.produce(f"{prefix}a", [({"id": 1}, customer(1, name=each)) for each in "ab"])
    broker.produce(f"{prefix}b", [({"id": 1}, {"id": 1, "big": "x", "small": "y"})])
    reader.sync()
    broker.produce(f"{prefix}a", [({"id": 1}, None)])
    reader.sync()
    rows = sorted(reader.rows(), key=lambda row: (row["source_table"], row["commit_lsn"]))
    assert [(row["source_table"], row["op"], row["commit_lsn"]) for row in rows] == [
        ("customers", "u", 0),
        ("customers", "u", 1),
        ("customers", "d", 2),
        ("toasty", "u", 0),
    ]
    assert len({(row["commit_lsn"], row["ordinal"]) for row in rows}) == 4, "each a position of its own"


def test_what_arrival_cannot_order_is_refused(
    broker: Broker, prefix: str, tmp_path: Path, one_partition: pytest.MonkeyPatch
) -> None:
    tables = (NamedTable("*", "public", "customers"),)
    handling = Handling(tables=tables, order="arrival", bare_rows=True)
    reader = Reader(tmp_path, broker.address, prefix, handling)
    broker.make_topic(f"{prefix}a", 2)
    broker.produce(f"{prefix}a", [({"id": 1}, customer(1))])
    reader.sync()
    one_partition.undo()
    with pytest.raises(KafkaRefused, match="has a partition 1 that it did not have"):
        reader.sync()
    with pytest.raises(KafkaRefused):
        reader.sync(MADE_ANEW)
    broker.make_anew(f"{prefix}a", 2)
    broker.produce(f"{prefix}a", [({"id": 2}, customer(2))], 1)
    (fault,) = reader.sync().faults
    assert isinstance(fault, TopicReplaced), "told once, not for each partition"
    reader.sync(MADE_ANEW)
    assert reader.keys() == [1, 2]
    other = Reader(tmp_path / "other", broker.address, f"{prefix}x", handling)
    for name in ("x1", "x2"):
        broker.make_topic(f"{prefix}{name}")
    with pytest.raises(KafkaRefused, match=r"x1 and .*x2 are both of public\.customers"):
        other.sync()


def test_partitions_and_topics_that_are_added_are_read_from_their_beginning(
    broker: Broker, prefix: str, reader: Reader, one_partition: pytest.MonkeyPatch
) -> None:
    broker.make_topic(f"{prefix}a", 2)
    broker.produce(f"{prefix}a", changes(1, 2))
    reader.sync()
    one_partition.undo()
    broker.make_topic(f"{prefix}b")
    broker.produce(f"{prefix}a", changes(11, 1), 1)
    broker.produce(f"{prefix}b", changes(21, 1))
    report = reader.sync()
    assert (report.records, report.faults) == (2, [])
    assert reader.keys() == [1, 2, 11, 21]


def test_the_ends_of_transactions_are_offsets_without_a_record(
    broker: Broker, prefix: str, reader: Reader
) -> None:
    """That rolled-back records do not land is the broker's word, which this one does not give."""
    topic = f"{prefix}a"
    broker.make_topic(topic)
    producer = Producer({"bootstrap.servers": broker.address, "transactional.id": prefix})
    producer.init_transactions(30)
    for number in (1, 2, 3):
        producer.begin_transaction()
        ((key, value),) = changes(number, 1)
        producer.produce(topic, key=encoded(key), value=encoded(value), partition=0)
        producer.flush(30)
        producer.commit_transaction(30)
    assert reader.sync().records == 3
    (span,) = reader.spans()
    assert (span.start, span.next, span.records) == (0, 6, 3)
    assert reader.sync().batches == []
    assert [each.behind for each in reader.source.lags()] == [0]


def test_a_topic_made_anew_is_never_taken_for_the_old_one(
    broker: Broker, prefix: str, reader: Reader
) -> None:
    topic, other = f"{prefix}a", f"{prefix}b"
    broker.make_topic(topic)
    broker.make_topic(other)
    broker.produce(topic, changes(1, 3))
    broker.produce(other, changes(21, 2))
    reader.sync()
    broker.make_anew(topic)
    # More than have landed: the offsets alone would say nothing.
    broker.produce(topic, changes(5, 5))
    broker.produce(other, changes(23, 1))
    report = reader.sync()
    (fault,) = report.faults
    assert isinstance(fault, TopicReplaced) and "--new-epoch" in fault.fix
    assert reader.keys() == [1, 2, 3, 21, 22, 23], "the other topic goes on"
    assert reader.sync(MADE_ANEW).faults == []
    assert reader.keys() == [1, 2, 3, 5, 6, 7, 8, 9, 21, 22, 23]
    assert [each.number for each in reader.store.epochs()] == [1, 2]
    assert reader.sync().batches == []


def test_a_topic_made_anew_is_not_read_while_the_cluster_does_not_tell_its_id(
    broker: Broker, prefix: str, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = f"{prefix}a"
    broker.make_topic(topic)
    broker.produce(topic, changes(1, 3))
    reader.sync()
    broker.make_anew(topic)
    broker.produce(topic, changes(5, 5))
    with monkeypatch.context() as unanswered:
        unanswered.setattr(Cluster, "_ids", lambda *_: {})
        with pytest.raises(KafkaUnreachable, match=f"the id of the topic {topic}"):
            reader.sync()
    assert reader.keys() == [1, 2, 3]
    (fault,) = reader.sync().faults
    assert isinstance(fault, TopicReplaced)


def test_a_topic_that_is_gone_is_named(broker: Broker, prefix: str, reader: Reader) -> None:
    for name in "ab":
        broker.make_topic(f"{prefix}{name}")
        broker.produce(f"{prefix}{name}", changes(1, 1))
    reader.sync()
    broker.delete(f"{prefix}a")
    report = reader.sync()
    assert (report.missing, report.faults) == ([f"{prefix}a"], [])
    broker.delete(f"{prefix}b")
    with pytest.raises(KafkaRefused, match="has no topic"):
        reader.sync()


def test_a_record_that_must_not_be_odd_stops_its_partition(
    broker: Broker, prefix: str, tmp_path: Path
) -> None:
    reader = Reader(tmp_path, broker.address, prefix, Handling(odd_lines="refuse"))
    broker.make_topic(f"{prefix}a")
    broker.produce(f"{prefix}a", [*changes(1, 1), (None, b"{}"), *changes(2, 1)])
    (fault,) = reader.sync().faults
    assert "a[0], offset 1: " in str(fault) and reader.keys() == [1]
    assert [(each.start, each.next) for each in reader.spans()] == [(0, 1)]


def test_many_records_land_in_rounds_of_bounded_size(broker: Broker, prefix: str, tmp_path: Path) -> None:
    reader = Reader(tmp_path, broker.address, prefix, batch_rows=1_000)
    broker.make_topic(f"{prefix}a")
    broker.produce(f"{prefix}a", changes(1, 2_500))
    reader.sync()
    found = reader.spans()
    assert reader.keys() == list(range(1, 2_501))
    assert [each.start for each in found[1:]] == [each.next for each in found[:-1]]
    assert len(found) >= 2 and max(each.records for each in found) < 2_500


def test_the_watermark_waits_for_the_partition_that_is_furthest_behind(
    broker: Broker, prefix: str, tmp_path: Path
) -> None:
    reader = Reader(tmp_path, broker.address, prefix, batch_rows=10)
    broker.make_topic(f"{prefix}a", 2)
    for partition in (0, 1):
        broker.produce(f"{prefix}a", changes(100 * partition, 50), partition)
    reader.sync()
    manifests = reader.store.manifests()
    nothing_of_one = [
        each.arrival.watermark
        for each in manifests
        if each.file is not None and 0 in [span.next for span in each.file.offsets or ()]
    ]
    assert set(nothing_of_one) <= {None}
    assert manifests[-1].arrival.watermark is not None


def test_two_that_go_on_at_the_same_offsets_cannot_both_land(
    broker: Broker, prefix: str, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.make_topic(f"{prefix}a")
    broker.produce(f"{prefix}a", changes(1, 2))
    reader.sync()
    # It looked before the other one had landed.
    monkeypatch.setattr(sync_module, "standing_offsets", lambda _: {})
    with pytest.raises(ChainContested):
        reader.sync()
    assert reader.keys() == [1, 2]


def test_a_pause_and_another_sync_keep_it_from_reading(reader: Reader) -> None:
    PauseRequest(reader.store.folder).write("moving")
    with pytest.raises(KafkaPaused, match="moving"):
        reader.sync()
    PauseRequest(reader.store.folder).clear()
    with take_lease(reader.source.run, SOURCE), pytest.raises(CaptureRunning):
        reader.sync()


def test_offsets_of_many_partitions_are_asked_for_together(broker: Broker, tmp_path: Path) -> None:
    topic = f"m{uuid.uuid4().hex[:8]}"
    broker.make_topic(topic, 200)
    broker.produce(topic, changes(1, 3), 150)
    topics = KafkaTopics((topic,), {"bootstrap.servers": broker.address})
    with Cluster("many", topics) as cluster:

        class OneByOne:
            """The consumer, but for the call that asks for one partition."""

            list_topics, poll, close = (
                cluster.consumer.list_topics,
                cluster.consumer.poll,
                cluster.consumer.close,
            )

        cluster.consumer = OneByOne()
        found = cluster.held()
    assert [each.partition for each in found] == list(range(200))
    assert {each.partition: each.end for each in found if each.end}.keys() == {150}


def test_a_cluster_that_takes_long_to_say_what_it_holds_leaves_a_tick_its_time(
    broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = f"l{uuid.uuid4().hex[:8]}."
    broker.make_topic(f"{prefix}a")
    broker.produce(f"{prefix}a", changes(1, 3))
    reader = Reader(tmp_path, broker.address, prefix)

    def slowly(held: list[Held]) -> list[Held]:
        time.sleep(1.2)
        return held

    holding(monkeypatch, slowly)
    reader.sync(seconds=1)
    assert reader.keys() == [1, 2, 3]


def test_a_column_that_comes_is_told_once_with_the_offset_of_its_first_row(
    broker: Broker, prefix: str, reader: Reader
) -> None:
    broker.make_topic(f"{prefix}a", 2)

    def more(first: int, count: int) -> list[tuple[Any, Any]]:
        return [
            ({"id": n}, envelope("c", customer(n, more=1), lsn=1000 + n, order=1, ts=TS + n))
            for n in range(first, first + count)
        ]

    broker.produce(f"{prefix}a", changes(1, 3), 0)
    reader.sync()
    # Few are read one by one, many at once.
    broker.produce(f"{prefix}a", more(11, 2), 0)
    reader.sync()
    broker.produce(f"{prefix}a", more(101, 300), 1)
    broker.produce(f"{prefix}a", changes(21, 1), 1)
    reader.sync()
    (change,) = SchemaChanges(reader.store.folder).all()
    assert (change.kind, change.column, change.place) == (
        "column_added",
        "more",
        f"{prefix}a[0], offset 3",
    )
    assert (change.rows, change.after) == (2, "")
