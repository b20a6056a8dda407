"""librdkafka's mock cluster of several brokers, which can lose one, answer slowly, and change leaders.

Its C functions (``rdkafka_mock.h``) are in the library that ``confluent-kafka`` brings; the Python client has
none of them. The brokers live in this process, each on a port of its own. What they do not do: elect leaders
(a test moves them), tell ids of topics, replicate (all brokers share one log).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from confluent_kafka import cimpl

from omnisupport_ingest_tests.sources.kafka.broker import Broker

_PRODUCER = 0


def _library() -> Any:
    library = ctypes.CDLL(cimpl.__file__)
    for name in ("rd_kafka_conf_new", "rd_kafka_new", "rd_kafka_mock_cluster_new"):
        getattr(library, name).restype = ctypes.c_void_p
    library.rd_kafka_mock_cluster_bootstraps.restype = ctypes.c_char_p
    return library


@dataclass(frozen=True)
class SeveralBrokers:
    """A cluster of brokers 1 to ``brokers``, and what may befall it."""

    broker: Broker
    brokers: int
    _library: Any
    _cluster: ctypes.c_void_p

    def make_topic(self, name: str, partitions: int) -> None:
        """Make a topic that is replicated to every broker; partition ``n`` is led by broker
        ``n % brokers + 1``."""
        self._do("topic_create", name.encode(), partitions, self.brokers)
        for partition in range(partitions):
            self.lead(name, partition, partition % self.brokers + 1)

    def lead(self, topic: str, partition: int, broker: int) -> None:
        """Make ``broker`` the leader of a partition: the one before refuses to serve it."""
        self._do("partition_set_leader", topic.encode(), partition, broker)

    def lose(self, broker: int) -> None:
        """Cut all connections of ``broker`` and let in none; it stays the leader of its partitions."""
        self._do("broker_set_down", broker)

    def bring_back(self, broker: int) -> None:
        self._do("broker_set_up", broker)

    def slow(self, broker: int, millis: int) -> None:
        """Have each answer of ``broker`` take ``millis``."""
        self._do("broker_set_rtt", broker, millis)

    def _do(self, what: str, *arguments: bytes | int) -> None:
        code = getattr(self._library, f"rd_kafka_mock_{what}")(self._cluster, *arguments)
        assert code == 0, f"{what}{arguments}: error {code}"


@contextmanager
def several_brokers(count: int) -> Iterator[SeveralBrokers]:
    """A mock cluster of ``count`` brokers, gone with the block."""
    library = _library()
    reason = ctypes.create_string_buffer(512)
    settings = ctypes.c_void_p(library.rd_kafka_conf_new())
    host = ctypes.c_void_p(library.rd_kafka_new(_PRODUCER, settings, reason, ctypes.c_size_t(len(reason))))
    assert host.value, reason.value
    cluster = ctypes.c_void_p(library.rd_kafka_mock_cluster_new(host, count))
    try:
        address = library.rd_kafka_mock_cluster_bootstraps(cluster).decode()
        yield SeveralBrokers(Broker(address), count, library, cluster)
    finally:
        library.rd_kafka_mock_cluster_destroy(cluster)
        library.rd_kafka_destroy(host)
