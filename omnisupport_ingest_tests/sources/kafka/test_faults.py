"""Clusters that do not do as they should: records deleted before they were read, brokers that are gone.

Tansu deletes nothing, so these are told by librdkafka's mock cluster, which keeps 5 MB of a partition.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
from confluent_kafka import Message

from omnisupport_ingest.contracts.kafka_topics import KafkaTopics
from omnisupport_ingest.sources.kafka import client, run, sync
from omnisupport_ingest.sources.kafka.client import Cluster, check_settings
from omnisupport_ingest.sources.kafka.errors import (
    KafkaRefused,
    KafkaUnreachable,
    RecordsGone,
    TopicReplaced,
)
from omnisupport_ingest.sources.kafka.offsets import Held, Ways
from omnisupport_ingest.sources.kafka.sync import KafkaInlet
from omnisupport_ingest_tests.sources.kafka.broker import Broker, mock_cluster, running_broker
from omnisupport_ingest_tests.sources.kafka.front import front
from omnisupport_ingest_tests.sources.kafka.topics import Reader, changes, holding

pytestmark = pytest.mark.full

TOPIC = "mocked"


@pytest.fixture(autouse=True)
def short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mock cluster tells no ids, and never says so."""
    monkeypatch.setattr(client, "ANSWER_SECONDS", 3.0)
    monkeypatch.setattr(client, "_ID_SECONDS", 0.3)


@pytest.fixture
def mock() -> Iterator[Broker]:
    with mock_cluster() as cluster:
        yield cluster


@pytest.fixture
def reader(mock: Broker, tmp_path: Path) -> Reader:
    return Reader(tmp_path, mock.address, TOPIC)


def overtake(mock: Broker, topic: str = TOPIC) -> None:
    """Write so much that the first records of partition 0 of ``topic`` are deleted."""
    large = os.urandom(400_000).hex()
    values = ((key, value | {"pad": large}) for key, value in changes(100, 9))
    for each in values:
        mock.produce(topic, [each])


def test_retention_that_overtook_us_is_a_gap_and_other_partitions_go_on(mock: Broker, reader: Reader) -> None:
    mock.produce(TOPIC, changes(1, 2))
    assert reader.sync().faults == []
    overtake(mock)
    mock.produce(TOPIC, changes(50, 1), 1)
    for _ in range(2):
        report = reader.sync()
        (gap,) = report.faults
        assert isinstance(gap, RecordsGone) and "offsets 2 to " in gap.problem and not report.finished
    assert reader.keys() == [1, 2, 50], "the partition with the gap stands, the other one has landed"
    (lag,) = [each for each in reader.source.lags() if each.gone]
    assert reader.sync(Ways(accept_gap="tables were read again")).faults == []
    span = reader.spans()[-1]
    assert (span.start, span.gone, span.accepted) == (2, lag.gone, "tables were read again")
    assert reader.keys()[-1] == 108
    assert reader.sync().batches == []


def test_records_deleted_while_they_are_read_are_a_gap(
    mock: Broker, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    mock.produce(TOPIC, changes(1, 2))
    reader.sync()

    def then_overtaken(held: list[Held]) -> list[Held]:
        overtake(mock)
        return held

    holding(monkeypatch, then_overtaken)
    (gap,) = reader.sync().faults
    assert isinstance(gap, RecordsGone)


def test_a_cluster_without_ids_that_has_not_what_landed_holds_another_topic(
    mock: Broker, reader: Reader
) -> None:
    mock.produce(TOPIC, changes(1, 3))
    reader.sync()
    with mock_cluster() as other:
        other.produce(TOPIC, changes(7, 1))
        moved = Reader(reader.recorder.folder / "moved", other.address, TOPIC)
        (reader.recorder.folder / "moved" / "home" / "landing").rename(reader.recorder.folder / "unused")
        (reader.recorder.folder / "moved" / "home" / "landing").symlink_to(
            reader.recorder.folder / "home" / "landing"
        )
        (fault,) = moved.sync().faults
        assert isinstance(fault, TopicReplaced)
        assert moved.sync(Ways(new_epoch="another cluster")).faults == []
        assert moved.keys() == [1, 2, 3, 7]


def test_a_cluster_that_does_not_answer_is_named_and_begins_nothing(tmp_path: Path) -> None:
    reader = Reader(tmp_path, "127.0.0.1:1", "t")
    with pytest.raises(KafkaUnreachable, match=r"bootstrap\.servers 127\.0\.0\.1:1\) cannot be read") as down:
        reader.sync()
    assert "Connection refused" in down.value.problem
    assert reader.store.current_epoch() is None


def test_a_broker_that_is_gone_costs_nothing_that_has_landed(tmp_path: Path) -> None:
    with running_broker(tmp_path / "log") as broker:
        broker.make_topic("t")
        broker.produce("t", changes(1, 3))
        reader = Reader(tmp_path, broker.address, "t")
        reader.sync()
    with pytest.raises(KafkaUnreachable):
        reader.sync()
    assert reader.keys() == [1, 2, 3]


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_broker_that_is_lost_while_it_is_read_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, comes_back: bool
) -> None:
    """It comes back within the patience of a sync, which goes on, or it does not: then the next one does."""
    monkeypatch.setattr(run, "KafkaInlet", partial(KafkaInlet, patience_seconds=3.0))
    # So that neither sync nor client has read all of it before the broker is lost.
    monkeypatch.setattr(sync, "ROUND_BYTES", 600_000)
    little_ahead = {
        "queued.min.messages": "1",
        "queued.max.messages.kbytes": "64",
        "fetch.message.max.bytes": "20000",
        "fetch.max.bytes": "1000512",
    }
    with front(tmp_path, tls=False) as before, running_broker(tmp_path / "log", before=before):
        broker = Broker(before.address, {"batch.num.messages": "1"})
        broker.make_topic("t")
        broker.produce("t", ((key, value | {"pad": "x" * 5000}) for key, value in changes(0, 300)))
        reader = Reader(tmp_path / "home", before.address, "t", batch_rows=100, secured=little_ahead)
        consume = Cluster.consume

        def cut_once(cluster: Cluster, count: int, seconds: float) -> Sequence[Message]:
            if reader.spans() and not before.was_cut:
                before.cut()
            elif before.was_cut and comes_back:
                before.mend()
            return consume(cluster, min(count, 40), seconds)

        monkeypatch.setattr(Cluster, "consume", cut_once)
        if not comes_back:
            began = time.monotonic()
            with pytest.raises(KafkaUnreachable):
                reader.sync()
            assert time.monotonic() - began < 40, "it does not wait for the client to tell the group"
            assert 100 <= len(reader.keys()) < 300, "it was lost before the end"
            before.mend()
        assert reader.sync().faults == []
        assert before.was_cut and reader.keys() == list(range(300)), "each of them once"


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"no.such.setting": "1"}, "no.such.setting"),
        ({"security.protocol": "TELNET"}, "security.protocol"),
        ({"security.protocol": "SSL", "ssl.ca.location": "/no/such/file"}, "ssl.ca.location"),
    ],
)
def test_settings_go_to_the_library_which_refuses_them(settings: dict[str, str], told: str) -> None:
    topics = KafkaTopics(("t",), {"bootstrap.servers": "127.0.0.1:1", **settings})
    with pytest.raises(KafkaRefused, match=told):
        check_settings("nova", topics)


def test_sasl_and_tls_settings_are_taken_and_no_secret_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOVA_PASSWORD", "hunter2-secret")
    settings = {
        "bootstrap.servers": "127.0.0.1:1",
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "SCRAM-SHA-512",
        "sasl.username": "me",
    }
    topics = KafkaTopics(("t",), settings, {"sasl.password": ("env", "NOVA_PASSWORD")})
    check_settings("nova", topics)
    wrong = KafkaTopics(("t",), settings, {"security.protocol": ("env", "NOVA_PASSWORD")})
    with pytest.raises(KafkaRefused) as refused:
        check_settings("nova", wrong)
    assert "hunter2" not in str(refused.value)
    assert json.dumps(topics.settings).count("hunter2") == 0
