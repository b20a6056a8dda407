"""Landing Kafka records, beside a plain consumer of the same library that writes them as JSON Lines.

Both read the same topic from a broker process of its own (Tansu, in memory), from its beginning to its end.
The plain consumer neither reads the events nor makes anything durable: it is what the client alone allows.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path

import click
from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition

from bench.report import Run, alternate, conclude
from omnisupport_ingest_tests.sources.debezium.told import customer, envelope
from omnisupport_ingest_tests.sources.kafka.broker import Broker, running_broker
from omnisupport_ingest_tests.sources.kafka.topics import Reader

_TOPIC = "bench"
_PARTITIONS = 4
_BODY = "The export starts and the bar reaches ninety percent, then nothing happens for an hour. " * 4


def produce(broker: Broker, rows: int) -> None:
    """Fill the topic with creates and updates, some 900 bytes each."""
    broker.make_topic(_TOPIC, _PARTITIONS)
    producer = Producer({"bootstrap.servers": broker.address, "queue.buffering.max.messages": 1_000_000})
    for number in range(rows):
        key = number % (rows // 2 or 1)
        op = "c" if key == number else "u"
        value = envelope(op, customer(key, name=f"n{number}", full_name=_BODY), lsn=1000 + number, order=1)
        producer.produce(
            _TOPIC,
            key=json.dumps({"id": key}),
            value=json.dumps(value),
            partition=key % _PARTITIONS,
        )
        producer.poll(0)
    assert producer.flush(120) == 0


def plain(broker: Broker, path: Path, rows: int) -> Run:
    """What the client alone does: records as they come, a line of JSON each."""
    began, worked = time.perf_counter(), time.process_time()
    settings = {
        "bootstrap.servers": broker.address,
        "group.id": "plain",
        "enable.auto.commit": "false",
        "enable.partition.eof": "true",
        "fetch.wait.max.ms": "50",
    }
    consumer = Consumer(settings)
    consumer.assign([TopicPartition(_TOPIC, number, 0) for number in range(_PARTITIONS)])
    ended: set[int] = set()
    count = 0
    with path.open("wb") as out:
        while len(ended) < _PARTITIONS:
            for message in consumer.consume(5_000, 0.5):
                error = message.error()
                if error is not None:
                    assert error.code() == KafkaError._PARTITION_EOF, error
                    ended.add(message.partition() or 0)
                    continue
                out.write(b'{"key":%s,"value":%s}\n' % (message.key(), message.value()))
                count += 1
        out.flush()
        os.fsync(out.fileno())
    consumer.close()
    assert count == rows, f"{count} records came"
    return Run(time.perf_counter() - began, {"cpu_seconds": time.process_time() - worked})


def ours(broker: Broker, folder: Path, rows: int) -> Run:
    """One sync into a new home; the broker's records as durable batches with manifests."""
    reader = Reader(folder, broker.address, _TOPIC)
    began, worked = time.perf_counter(), time.process_time()
    report = reader.sync()
    taken, worked = time.perf_counter() - began, time.process_time() - worked
    assert (report.records, report.odd) == (rows, 0)
    peak = next(
        int(line.split()[1]) / 1024
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM")
    )
    return Run(taken, {"peak_mb": peak, "cpu_seconds": worked})


@click.command()
@click.option("--rows", default=100_000, show_default=True)
@click.option("--repeats", default=3, show_default=True)
def main(rows: int, repeats: int) -> None:
    """Measure both in alternation."""
    with (
        tempfile.TemporaryDirectory(prefix="bench-kafka-") as name,
        running_broker(Path(name) / "log") as broker,
    ):
        folder = Path(name)
        produce(broker, rows)
        homes = (folder / f"home{number}" for number in range(repeats))
        result = alternate(
            rows,
            repeats,
            "a plain consumer",
            lambda: plain(broker, folder / "plain.jsonl", rows),
            lambda: ours(broker, next(homes), rows),
        )
        for whose, runs in (("a plain consumer", result.yardstick), ("ours", result.ours)):
            worked = min(run.seen["cpu_seconds"] for run in runs)
            click.echo(f"processor time of {whose}: {1e6 * worked / rows:.0f} µs a record")
        conclude("kafka", "Landing records of a topic", result, floor=0.0, memory_limit=None)


if __name__ == "__main__":
    main()
