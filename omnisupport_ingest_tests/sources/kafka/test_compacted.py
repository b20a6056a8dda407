"""Batches of records as compaction leaves them land whole: offsets without a record are no gap.

Compaction takes records out of a batch and leaves its first and last offset as they were, also of a batch
that has no record any more (Kafka's documentation, "Message Format"). No broker of the tests compacts, so
such batches are sent to one as they are. It keeps them so, which each test looks at first.
"""

from __future__ import annotations

import socket
import struct
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition

from omnisupport_ingest_tests.sources.kafka.broker import Broker, encoded
from omnisupport_ingest_tests.sources.kafka.topics import Reader, changes

_PRODUCE, _VERSION = 0, 3
_LOCAL = 30.0


@pytest.fixture
def topic() -> str:
    return f"c{uuid.uuid4().hex[:8]}"


@pytest.fixture
def reader(broker: Broker, topic: str, tmp_path: Path) -> Reader:
    return Reader(tmp_path, broker.address, topic)


def test_offsets_that_compaction_took_are_passed(broker: Broker, topic: str, reader: Reader) -> None:
    broker.make_topic(topic)
    send_batch(broker, topic, {1: 1, 3: 3}, last=4)
    send_batch(broker, topic, {}, last=4)
    send_batch(broker, topic, {0: 10, 1: 11}, last=1)
    assert offsets(broker, topic, 4) == [1, 3, 10, 11]
    report = reader.sync()
    assert (report.records, report.faults) == (4, [])
    assert reader.keys() == [1, 3, 10, 11]
    (span,) = reader.spans()
    assert (span.start, span.next, span.records, span.gone) == (0, 12, 4, 0)
    assert reader.sync().batches == []


def test_a_topic_whose_end_was_compacted_is_gone_on_with(broker: Broker, topic: str, reader: Reader) -> None:
    broker.make_topic(topic)
    send_batch(broker, topic, {0: 1}, last=4)
    assert reader.sync().records == 1
    assert [(each.start, each.next) for each in reader.spans()] == [(0, 5)]
    assert reader.sync().batches == []
    send_batch(broker, topic, {2: 7}, last=3)
    assert offsets(broker, topic, 2) == [0, 7]
    report = reader.sync()
    assert (report.records, report.faults) == (1, [])
    assert reader.keys() == [1, 7]
    assert sum(each.gone for each in reader.spans()) == 0
    assert reader.sync().batches == []


def test_a_record_that_compaction_took_before_it_was_read_is_passed(
    broker: Broker, topic: str, tmp_path: Path
) -> None:
    reader = Reader(tmp_path, broker.address, topic, batch_rows=2)
    broker.make_topic(topic)
    send_batch(broker, topic, {number: number for number in range(2)}, last=1)
    assert reader.sync().records == 2
    send_batch(broker, topic, {4: 6, 9: 11}, last=9)
    assert reader.sync().faults == []
    assert reader.keys() == [0, 1, 6, 11]


def send_batch(broker: Broker, topic: str, keys: Mapping[int, int], *, last: int) -> None:
    """Send one batch of creates of customers to partition 0: of ``keys``, by their offset in the batch, whose
    last offset is ``last``."""
    body = b"".join(_record(offset, *next(changes(key, 1))) for offset, key in keys.items())
    now = int(time.time() * 1000)
    checked = struct.pack("!hiqqqhii", 0, last, now, now, -1, -1, -1, len(keys)) + body
    batch = struct.pack("!ibI", -1, 2, crc32c(checked)) + checked
    records = struct.pack("!qi", 0, len(batch)) + batch
    request = (
        struct.pack("!hhi", _PRODUCE, _VERSION, 1)
        + _text("tests")
        + struct.pack("!hhi", -1, -1, 30_000)
        + struct.pack("!i", 1)
        + _text(topic)
        + struct.pack("!iii", 1, 0, len(records))
        + records
    )
    host, port = broker.address.split(":")
    with socket.create_connection((host, int(port)), _LOCAL) as client:
        client.sendall(struct.pack("!i", len(request)) + request)
        answer = _received(client, struct.unpack("!i", _received(client, 4))[0])
    error = struct.unpack_from("!h", answer, 4 + 4 + 2 + len(topic) + 4 + 4)[0]
    assert error == 0, f"the broker refuses the batch: {error}"


def offsets(broker: Broker, topic: str, count: int) -> list[int]:
    """The offsets of the first ``count`` records that the broker holds."""
    consumer = Consumer({"bootstrap.servers": broker.address, "group.id": topic})
    try:
        consumer.assign([TopicPartition(topic, 0, 0)])
        found = consumer.consume(count, timeout=_LOCAL)
        return [each.offset() for each in found]
    finally:
        consumer.close()


def _record(offset: int, key: Any, value: Any) -> bytes:
    content = b"\0" + _varint(0) + _varint(offset)
    for part in (encoded(key) or b"", encoded(value) or b""):
        content += _varint(len(part)) + part
    content += _varint(0)
    return _varint(len(content)) + content


def _varint(number: int) -> bytes:
    rest, found = number << 1, bytearray()
    while rest > 127:
        found.append(rest & 127 | 128)
        rest >>= 7
    found.append(rest)
    return bytes(found)


def _text(text: str) -> bytes:
    return struct.pack("!h", len(text)) + text.encode()


def crc32c(content: bytes) -> int:
    """The checksum of a batch (Castagnoli)."""
    found = 0xFFFFFFFF
    for byte in content:
        found ^= byte
        for _ in range(8):
            found = found >> 1 ^ 0x82F63B78 * (found & 1)
    return found ^ 0xFFFFFFFF


def _received(client: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        more = client.recv(count - len(found))
        assert more, "the broker ended the connection"
        found += more
    return found
