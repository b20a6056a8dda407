"""A cluster of three brokers: one is lost and comes back, leaders change, answers are slow.

Whatever happens, every record lands once, and while something cannot be read, its partition is named.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
from confluent_kafka import Message

from omnisupport_ingest.contracts.in_force import contracts_in_force
from omnisupport_ingest.contracts.sources import sources_in_force
from omnisupport_ingest.home import Home
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.sources.kafka import client, run
from omnisupport_ingest.sources.kafka.client import Cluster
from omnisupport_ingest.sources.kafka.errors import KafkaUnreachable
from omnisupport_ingest.sources.kafka.run import KafkaSource
from omnisupport_ingest.sources.kafka.sync import KafkaInlet
from omnisupport_ingest_tests.cli.command import command, environment
from omnisupport_ingest_tests.sources.debezium.recorded import SOURCE, TABLES, contract
from omnisupport_ingest_tests.sources.kafka.mocked import SeveralBrokers, several_brokers
from omnisupport_ingest_tests.sources.kafka.topics import Reader, changes

pytestmark = pytest.mark.full

TOPIC = "spread"
PARTITIONS = 6
RECORDS = 24
"""Records of each partition; partition ``n`` has the keys from ``1000 * n`` on."""

LITTLE_AHEAD = {
    "queued.min.messages": "1",
    "queued.max.messages.kbytes": "64",
    "fetch.message.max.bytes": "20000",
    "fetch.max.bytes": "1000512",
    # So that a test does not wait long for a client that asks again.
    "topic.metadata.refresh.fast.interval.ms": "100",
    "reconnect.backoff.max.ms": "500",
}
"""The client has not read everything before something happens."""


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[SeveralBrokers]:
    monkeypatch.setattr(client, "_ID_SECONDS", 0.3)
    monkeypatch.setattr(run, "KafkaInlet", partial(KafkaInlet, patience_seconds=4.0))
    with several_brokers(3) as found:
        found.make_topic(TOPIC, PARTITIONS)
        yield found


@pytest.fixture
def reader(cluster: SeveralBrokers, tmp_path: Path) -> Reader:
    return Reader(tmp_path, cluster.broker.address, TOPIC, batch_rows=20, secured=LITTLE_AHEAD)


def fill(cluster: SeveralBrokers, first: int = 0, count: int = RECORDS) -> list[int]:
    """Send ``count`` records to each partition, in batches of a few; return their keys."""
    for number in range(PARTITIONS):
        large = [(key, value | {"pad": "x" * 3000}) for key, value in changes(1000 * number + first, count)]
        for start in range(0, count, 6):
            cluster.broker.produce(TOPIC, large[start : start + 6], number)
    return [1000 * number + first + each for number in range(PARTITIONS) for each in range(count)]


def once_landed(
    reader: Reader, monkeypatch: pytest.MonkeyPatch, happens: Callable[[], None]
) -> Callable[[], bool]:
    """Have something happen to the cluster when the first batch of a sync has landed; return whether it
    has, before everything was read."""
    consume, done = Cluster.consume, False

    def consumed(cluster: Cluster, count: int, seconds: float) -> Sequence[Message]:
        nonlocal done
        if not done and reader.spans():
            done = True
            assert len(reader.keys()) < PARTITIONS * RECORDS
            happens()
        return consume(cluster, min(count, 10), seconds)

    monkeypatch.setattr(Cluster, "consume", consumed)
    return lambda: done


def test_leaders_that_change_while_they_are_read_cost_nothing(
    cluster: SeveralBrokers, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = fill(cluster)

    def elected() -> None:
        for number in range(PARTITIONS):
            cluster.lead(TOPIC, number, (number + 1) % 3 + 1)

    has_happened = once_landed(reader, monkeypatch, elected)
    report = reader.sync()
    assert has_happened() and report.finished and report.faults == []
    assert reader.keys() == keys, "each of them once"
    assert reader.sync().batches == []


def test_a_broker_that_is_lost_while_another_takes_its_partitions_costs_nothing(
    cluster: SeveralBrokers, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = fill(cluster)

    def failed_over() -> None:
        cluster.lose(2)
        cluster.lead(TOPIC, 1, 3)
        cluster.lead(TOPIC, 4, 1)

    has_happened = once_landed(reader, monkeypatch, failed_over)
    assert reader.sync().finished and has_happened()
    assert reader.keys() == keys
    cluster.bring_back(2)
    cluster.lead(TOPIC, 1, 2)
    keys += fill(cluster, first=RECORDS, count=5)
    assert reader.sync().finished
    assert reader.keys() == sorted(keys)


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_broker_that_is_lost_with_its_partitions_holds_up_only_them_in_that_sync(
    comes_back: bool, cluster: SeveralBrokers, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = fill(cluster)
    of_it = [each for each in keys if each // 1000 in (1, 4)]
    has_happened = once_landed(reader, monkeypatch, partial(cluster.lose, 2))
    if comes_back:
        consume, waited = Cluster.consume, 0

        def returns(read: Cluster, count: int, seconds: float) -> Sequence[Message]:
            nonlocal waited
            found = consume(read, count, seconds)
            waited = 0 if found else waited + 1
            if has_happened() and waited == 2:
                cluster.bring_back(2)
            return found

        monkeypatch.setattr(Cluster, "consume", returns)
        assert reader.sync().finished
        assert reader.keys() == keys
        return
    with pytest.raises(KafkaUnreachable) as silent:
        reader.sync()
    assert has_happened()
    assert any(f"{TOPIC}[{number}]" in silent.value.problem for number in (1, 4))
    landed = reader.keys()
    assert [each for each in landed if each not in of_it] == [each for each in keys if each not in of_it]
    assert len(landed) < len(keys) and len(set(landed)) == len(landed)
    again = reader.sync()
    assert not again.finished and again.batches == []
    assert reader.keys() == landed
    cluster.bring_back(2)
    assert reader.sync().finished
    assert reader.keys() == keys


def test_the_other_partitions_land_while_some_have_no_leader(cluster: SeveralBrokers, reader: Reader) -> None:
    keys = fill(cluster)
    assert reader.sync().finished
    keys += fill(cluster, first=RECORDS, count=5)
    cluster.lose(2)
    away = [each for each in keys if each // 1000 in (1, 4) and each % 1000 >= RECORDS]

    report = reader.sync()
    assert reader.keys() == sorted(set(keys) - set(away))
    assert not report.finished
    assert [type(each) for each in report.faults] == [KafkaUnreachable] * 2
    for number, fault in zip((1, 4), report.faults, strict=True):
        assert f"the offsets of {TOPIC}[{number}]" in fault.problem
    arrival = report.batches[-1].arrival
    assert arrival.watermark == arrival.watermark_before, "nobody knows what waits in those"

    cluster.bring_back(2)
    assert reader.sync().finished
    assert reader.keys() == sorted(keys), "each of them once"


def test_a_topic_is_not_begun_while_a_partition_has_no_leader(
    cluster: SeveralBrokers, reader: Reader
) -> None:
    keys = fill(cluster)
    cluster.lose(2)
    with pytest.raises(KafkaUnreachable, match=rf"the offsets of {TOPIC}\[1\]"):
        reader.sync()
    assert reader.store.current_epoch() is None, "its first offset is not known"
    cluster.bring_back(2)
    assert reader.sync().finished
    assert reader.keys() == keys


def test_slow_answers_only_take_longer(cluster: SeveralBrokers, reader: Reader) -> None:
    keys = fill(cluster)
    for each in (1, 2, 3):
        cluster.slow(each, 250)
    assert reader.sync().finished
    assert reader.keys() == keys
    assert [each.behind for each in reader.source.lags()] == [0] * PARTITIONS


def test_answers_that_are_too_slow_are_named_and_cost_nothing(
    cluster: SeveralBrokers, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = fill(cluster)
    cluster.slow(2, 8000)
    monkeypatch.setattr(client, "ANSWER_SECONDS", 4.0)
    with pytest.raises(KafkaUnreachable) as slow:
        reader.sync()
    assert cluster.broker.address in slow.value.problem
    assert reader.store.current_epoch() is None, "nothing has begun"
    cluster.slow(2, 0)
    monkeypatch.setattr(client, "ANSWER_SECONDS", 10.0)
    assert reader.sync().finished
    assert reader.keys() == keys


def test_a_lost_broker_is_named_by_status_and_alarms_until_it_is_back(
    cluster: SeveralBrokers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    contracts = tmp_path / "contracts" / "data"
    contracts.mkdir(parents=True)
    (contracts / "customers.json").write_text(json.dumps(contract("customers", *TABLES["customers"])))
    with environment(home=str(tmp_path / "home"), contracts_dir=str(contracts)):
        address = cluster.broker.address
        made = command(*("sources", "new", SOURCE, "--kind", "kafka", "--servers", address, "--topic", TOPIC))
        assert made.code == 0, made.output
        settings = Settings()
        home = Home.open(settings.home, settings.window_size)
        fill(cluster, count=3)
        in_force = contracts_in_force(settings)
        definition = sources_in_force(settings, in_force).find(SOURCE)
        KafkaSource.of(definition, in_force, home, settings).sync()
        fill(cluster, first=3, count=2)

        cluster.lose(2)
        shown = command("source", "status", SOURCE, "--json")
        problem = json.loads(shown.out)["problem"]
        assert shown.code == 1 and f"{TOPIC}[1]" in problem["problem"] and problem["fix"]
        found = {each["kind"]: each for each in json.loads(command("alarms", "--json").out)["problems"]}
        assert found[f"away {SOURCE}"]["fix"] == f"omnisupport-ingest source status {SOURCE}"

        cluster.bring_back(2)
        shown = command("source", "status", SOURCE, "--json")
        assert (shown.code, json.loads(shown.out)["behind"]) == (0, 2 * PARTITIONS)
        kinds = [each["kind"] for each in json.loads(command("alarms", "--json").out)["problems"]]
        assert f"away {SOURCE}" not in kinds
