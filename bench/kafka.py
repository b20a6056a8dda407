"""Records of a topic to durable batches, beside Spark and DuckDB that write the same columns.

The topic (four partitions of Tansu, a broker in memory, whose own work is not counted) and the file have the
same records. Ours reads the topic. So does one job of Spark: a task for each partition reads by our client's
library, as Spark's own connector is in no registry of Python packages. The other peers read the file, so they
do less. A plain consumer writes what comes as JSON Lines: it neither reads the events nor keeps anything
durably. It shows what client and broker cost.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import click
from confluent_kafka import Producer

from bench.envelope_peers import Peers, Seen, in_turns, measured, report
from bench.envelopes import SHAPES, write_events
from bench.report import write_result
from omnisupport_ingest_tests.sources.kafka.broker import Broker, running_broker
from omnisupport_ingest_tests.sources.kafka.topics import Reader

if TYPE_CHECKING:
    from confluent_kafka import Message

_TOPIC = "bench"
_PARTITIONS = 4
_WARM = 20_000


def produce(broker: Broker, path: Path, rows: int) -> None:
    """Fill the topic with the lines of ``path``; a key stays in its partition."""
    broker.make_topic(_TOPIC, _PARTITIONS)
    producer = Producer({"bootstrap.servers": broker.address, "queue.buffering.max.messages": 1_000_000})
    with path.open("rb") as lines:
        for number, line in enumerate(lines):
            of_row = number % (rows // 2 or 1)
            key = json.dumps({"id": of_row}, separators=(",", ":"))
            producer.produce(_TOPIC, key=key, value=line.rstrip(b"\n"), partition=of_row % _PARTITIONS)
            producer.poll(0)
    assert producer.flush(120) == 0


def consumed(address: str, partitions: Sequence[int]) -> Iterator[list[Message]]:
    """Yield what is in ``partitions`` of the topic, many records at a time."""
    # Imported here, as this function goes to Spark's workers by value.
    from confluent_kafka import Consumer, KafkaError, TopicPartition

    settings = {
        "bootstrap.servers": address,
        "group.id": "plain",
        "enable.auto.commit": "false",
        "enable.partition.eof": "true",
        "fetch.wait.max.ms": "50",
    }
    consumer, ended = Consumer(settings), set[int]()
    consumer.assign([TopicPartition(_TOPIC, number, 0) for number in partitions])
    while len(ended) < len(partitions):
        came = consumer.consume(5_000, 0.5)
        errors = [(message, error) for message in came if (error := message.error()) is not None]
        for message, error in errors:
            assert error.code() == KafkaError._PARTITION_EOF, error
            ended.add(message.partition() or 0)
        yield [message for message in came if message.error() is None]
    consumer.close()


def values(address: str, partition: int) -> Iterator[list[bytes]]:
    """Yield the values of the records of ``partition``, many at a time. Runs in Spark's workers."""
    for some in consumed(address, [partition]):
        yield [message.value() or b"" for message in some]


def plain(broker: Broker, path: Path, rows: int) -> Seen:
    """What the client alone does: records as they come, a line of JSON each."""
    came = 0
    with measured(alone=True) as seen, path.open("wb") as out:
        for some in consumed(broker.address, range(_PARTITIONS)):
            for message in some:
                out.write(b'{"key":%s,"value":%s}\n' % (message.key(), message.value()))
            came += len(some)
        out.flush()
        os.fsync(out.fileno())
    assert came == rows, f"{came} records came"
    return seen()


def ours(broker: Broker, folder: Path, rows: int) -> Seen:
    """One sync into a new home; the broker's records as durable batches with manifests."""
    reader = Reader(folder, broker.address, _TOPIC)
    with measured(alone=True) as seen:
        found = reader.sync()
    assert (found.records, found.odd) == (rows, 0)
    return seen()


@click.command()
@click.option("--rows", default=200_000, show_default=True)
@click.option("--repeats", default=3, show_default=True)
def main(rows: int, repeats: int) -> None:
    """Measure the programs in turns."""
    with (
        tempfile.TemporaryDirectory(prefix="bench-kafka-") as name,
        running_broker(Path(name) / "log") as broker,
    ):
        folder, shape = Path(name), SHAPES["plain"]
        path, warm = folder / "events.jsonl", folder / "warm.jsonl"
        write_events(path, rows)
        write_events(warm, _WARM)
        produce(broker, path, rows)
        peers, homes = Peers(folder, shape.columns, shape.within or ""), count()
        peers.by_spark(warm, landed=True)
        programs: dict[str, Callable[[], Seen]] = {
            "ours, from the topic": lambda: ours(broker, folder / f"home{next(homes)}", rows),
            "Spark, from the topic": partial(
                peers.by_spark_from_tasks, partial(values, broker.address), _PARTITIONS
            ),
            "Spark, from a file": partial(peers.by_spark, path, landed=True),
            "DuckDB, from a file": partial(peers.by_duckdb, path, landed=True),
            "a plain consumer": lambda: plain(broker, folder / "plain.jsonl", rows),
        }
        found = in_turns(programs, repeats)
        size = path.stat().st_size / rows
        click.echo(f"{rows:,} records of {size:.0f} bytes, {repeats} runs each in turns, medians:")
        report(found, rows, judged="from a file")
        write_result("kafka", {"rows": rows, "bytes": size, "seconds_and_cpu": found})
        peers.stop()


if __name__ == "__main__":
    main()
