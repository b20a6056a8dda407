"""A partition that cannot be read stops alone: the report names it, and the others lose nothing by it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from confluent_kafka import KafkaError, Message

from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.sources.kafka.client import Cluster
from omnisupport_ingest.sources.kafka.errors import KafkaRefused, KafkaUnreachable
from omnisupport_ingest_tests.sources.kafka.broker import Broker
from omnisupport_ingest_tests.sources.kafka.topics import Reader, changes


@pytest.fixture
def two_topics(broker: Broker, prefix: str) -> tuple[str, str]:
    """A topic with records, all of one fetch, and one without."""
    topic, other = f"{prefix}a", f"{prefix}b"
    broker.make_topic(topic)
    broker.make_topic(other)
    broker.produce(topic, changes(1, 5), **{"linger.ms": 200})
    return topic, other


def sync_beside(error: Message, reader: Reader, monkeypatch: pytest.MonkeyPatch) -> Sequence[IngestError]:
    """Have the client deliver ``error`` behind the first record, with the others in its queue."""
    consume, told = Cluster.consume, False

    def beside(cluster: Cluster, count: int, seconds: float) -> Sequence[Message]:
        nonlocal told
        found = list(consume(cluster, 1, seconds))
        if not told and any(each.error() is None for each in found):
            told = True
            found.append(error)
        return found

    monkeypatch.setattr(Cluster, "consume", beside)
    faults = reader.sync().faults
    assert told
    return faults


def test_a_topic_that_is_deleted_while_it_is_read_costs_no_record_of_another(
    two_topics: tuple[str, str], reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART)
    (fault,) = sync_beside(Message(topic=two_topics[1], partition=0, error=gone), reader, monkeypatch)
    assert reader.keys() == [1, 2, 3, 4, 5]
    assert isinstance(fault, KafkaUnreachable) and f"{two_topics[1]}[0]" in fault.problem
    assert "deleted" in fault.problem


@pytest.mark.parametrize(
    ("code", "fix"),
    [
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, "READ"),
        (KafkaError.MSG_SIZE_TOO_LARGE, r"receive.message.max.bytes"),
        (KafkaError._BAD_COMPRESSION, "compression"),
    ],
)
def test_a_partition_that_the_client_cannot_read_stops_alone_with_its_fix(
    code: int, fix: str, two_topics: tuple[str, str], reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = Message(topic=two_topics[1], partition=0, error=KafkaError(code))
    (fault,) = sync_beside(error, reader, monkeypatch)
    assert isinstance(fault, KafkaRefused) and f"{two_topics[1]}[0]" in fault.problem
    assert fix in fault.fix
    assert reader.keys() == [1, 2, 3, 4, 5]


def test_an_error_that_stops_everything_names_where_it_came(
    two_topics: tuple[str, str], reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = Message(topic=two_topics[1], partition=0, error=KafkaError(KafkaError.UNKNOWN))
    with pytest.raises(KafkaUnreachable, match=rf"{two_topics[1]}\[0\]"):
        sync_beside(error, reader, monkeypatch)
    assert reader.keys() == [1], "what was read has landed"
