"""Debezium's records in Kafka: sent as its server sends them, and the definition by which we read them.

Each table has a topic of its own, ``<prefix>.<schema>.<table>``, with several partitions. Key, value and
headers are the bytes that the connector's converters wrote, the key chooses the partition as Java's producer
does (murmur2), and a tombstone is a record without a value. A topic is made when its first record comes, as
Kafka Connect does (``topic.creation.default.partitions``).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from omnisupport_ingest_tests.sources.kafka.broker import Broker
from parity.debezium import TOPIC
from parity.modes import Modes

PARTITIONS = 3

_BATCH_ROWS = 150
"""So small that the records of a run land in several batches."""

_FLUSH_SECONDS = 60


@dataclass
class Topics:
    """The topics of one engine, on the broker at ``address``."""

    address: str
    _made: set[str] = field(default_factory=set)
    _refused: KafkaError | None = None

    def __post_init__(self) -> None:
        self._broker = Broker(self.address)
        settings = {"partitioner": "murmur2_random", "acks": "all", "linger.ms": "5"}
        self._producer = Producer({"bootstrap.servers": self.address, **settings})

    def send(
        self, topic: str, key: str | None, value: str | None, headers: Sequence[tuple[str, str]]
    ) -> None:
        """Send a record; None: it has no key, or is a tombstone."""
        if topic not in self._made:
            self._broker.make_topic(topic, PARTITIONS)
            self._made.add(topic)
        sent: list[tuple[str, str | bytes | None]] = [(name, text.encode()) for name, text in headers]
        self._producer.produce(
            topic,
            key=None if key is None else key.encode(),
            value=None if value is None else value.encode(),
            headers=sent,
            on_delivery=self._delivered,
        )
        self._producer.poll(0)

    def _delivered(self, error: KafkaError | None, _: Message) -> None:
        self._refused = self._refused or error

    def flush(self) -> None:
        """Wait until the broker has all records. Raises ``KafkaException`` if it does not take them."""
        if left := self._producer.flush(_FLUSH_SECONDS):
            raise KafkaException(f"The broker has not taken {left} records.")
        if self._refused is not None:
            raise KafkaException(self._refused)


def write_definition(path: Path, source: str, address: str, modes: Modes) -> None:
    """Write the definition of ``source``: all topics of the engine, on the broker at ``address``."""
    document = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "name": source,
        "kind": "kafka",
        "description": "What Debezium's engine has captured, in topics.",
        "kafka": {
            "topics": [f"^{TOPIC}\\."],
            "settings": {"bootstrap.servers": address, "fetch.wait.max.ms": "50"},
            "batch_rows": _BATCH_ROWS,
        },
        **({"events": dict(modes.events)} if modes.events else {}),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2))
