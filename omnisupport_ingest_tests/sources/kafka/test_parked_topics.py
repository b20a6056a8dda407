"""A table whose contract lost its key keeps its own partitions waiting, and no other one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Message

from omnisupport_ingest.checks.quality_checks import schemas_as_contracted
from omnisupport_ingest.contracts.landed_keys import LandedKeyChanged
from omnisupport_ingest.read.schema_changes import waiting_keys
from omnisupport_ingest.sources.kafka import client, records
from omnisupport_ingest.sources.kafka.client import Cluster
from omnisupport_ingest.sources.kafka.errors import RecordsGone
from omnisupport_ingest.sources.kafka.offsets import Ways
from omnisupport_ingest.sources.kafka.parked import ParkedPartitions
from omnisupport_ingest_tests.sources.debezium.recorded import SOURCE
from omnisupport_ingest_tests.sources.debezium.told import customer, envelope
from omnisupport_ingest_tests.sources.kafka.broker import Broker, mock_cluster
from omnisupport_ingest_tests.sources.kafka.test_faults import overtake
from omnisupport_ingest_tests.sources.kafka.topics import Reader, changes, others


@pytest.fixture
def topics(broker: Broker, prefix: str, reader: Reader) -> tuple[str, str]:
    """The topic of customers, of two partitions, and that of the other table; of both tables rows have
    landed."""
    mine, other = f"{prefix}customers", f"{prefix}toasty"
    broker.make_topic(mine, 2)
    broker.make_topic(other)
    broker.produce(mine, changes(1, 3))
    broker.produce(other, others(501, 1))
    assert reader.sync().finished
    return mine, other


def offsets(reader: Reader) -> dict[str, int]:
    """Where every partition goes on, by what the newest manifest says."""
    file = reader.store.read(reader.store.batch_ids()[-1]).file
    assert file is not None and file.offsets is not None
    return {f"{each.topic.rpartition('.')[2]}{each.partition}": each.next for each in file.offsets}


def test_a_table_without_its_key_keeps_its_own_topic_waiting_and_all_others_go_on(
    broker: Broker, topics: tuple[str, str], reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, other = topics
    reader.give_key("email")
    broker.produce(mine, changes(4, 2))
    broker.produce(mine, changes(11, 1), 1)
    broker.produce(other, others(502, 2))
    report = reader.sync()
    (fault,) = report.faults
    assert isinstance(fault, LandedKeyChanged) and not report.finished
    assert "public.customers the key (email)" in fault.problem and "has the key (id)" in fault.problem
    assert f"{mine}[0] at offset 3, {mine}[1] at offset 0 wait" in fault.problem
    assert "x-cdc.key" in fault.fix and "retention" in fault.fix
    assert reader.keys() == [1, 2, 3, 501, 502, 503]
    assert offsets(reader) == {"customers0": 3, "customers1": 0, "toasty0": 3}
    assert reader.store.manifests()[-1].arrival.watermark == reader.store.manifests()[0].arrival.watermark

    # What waits is not even read again; what is new of the others lands.
    broker.produce(other, others(504, 1))
    consume, read = Cluster.consume, set[str | None]()

    def watched(cluster: Cluster, count: int, seconds: float) -> Sequence[Message]:
        found = consume(cluster, count, seconds)
        read.update(each.topic() for each in found if each.error() is None)
        return found

    monkeypatch.setattr(Cluster, "consume", watched)
    (again,) = reader.sync().faults
    assert str(again) == str(fault) and read == {other}
    assert offsets(reader) == {"customers0": 3, "customers1": 0, "toasty0": 4}
    assert reader.sync().batches == []
    lags = {(each.held.topic, each.held.partition): each for each in reader.source.lags()}
    assert [lags[place].parked for place in sorted(lags)] == ["public.customers", "public.customers", ""]

    # A person is told which table it is and what helps.
    (key,) = waiting_keys(reader.recorder.workspace, SOURCE)
    assert (
        key.parked
        and key.table == "customers"
        and "nothing of it lands: partitions of a topic wait" in key.what
    )
    assert "x-cdc.key is id, with its columns readable and in required" in key.edit
    check = schemas_as_contracted(reader.recorder.workspace, SOURCE, ["customers", "toasty"])
    assert not check["customers"].passed and "nothing of it lands" in check["customers"].summary
    assert check["toasty"].passed

    reader.give_key("id")
    report = reader.sync()
    assert report.finished and report.parked == {}
    assert reader.keys() == [1, 2, 3, 4, 5, 11, 501, 502, 503, 504], "each landed once"
    assert {each["key"] for each in reader.rows() if each["source_table"] == "customers"} == {
        f'["{number}"]' for number in (1, 2, 3, 4, 5, 11)
    }
    assert [each.parked for each in reader.source.lags()] == ["", "", ""]
    assert reader.store.landed().gap is None and reader.sync().batches == []
    epoch = reader.store.current_epoch()
    assert epoch is not None and ParkedPartitions(reader.store, epoch.number).read() == {}


def test_a_partition_that_carries_several_tables_waits_before_the_first_row_of_that_one(
    broker: Broker, prefix: str, topics: tuple[str, str], reader: Reader
) -> None:
    """So many rows that most are read by blocks; the offset is exact anyhow."""
    both = f"{prefix}both"
    broker.make_topic(both, 2)
    reader.give_key("email")
    broker.produce(both, [*others(600, 200), *changes(20, 100), *others(800, 100)])
    broker.produce(both, others(900, 150), 1)
    (fault,) = reader.sync().faults
    assert f"{both}[0] at offset 200 waits" in fault.problem
    assert offsets(reader)["both0"] == 200 and offsets(reader)["both1"] == 150
    landed = [1, 2, 3, 501, *range(600, 800), *range(900, 1050)]
    assert reader.keys() == landed, "the other partition of the topic has no row of it"
    broker.produce(both, others(1050, 1), 1)
    assert len(reader.sync().faults) == 1 and offsets(reader)["both1"] == 151
    reader.give_key("id")
    assert reader.sync().finished
    assert reader.keys() == sorted([*landed, *range(20, 120), *range(800, 900), 1050])


def test_all_partitions_that_wait_are_found_in_one_reading_of_a_round(
    broker: Broker, prefix: str, topics: tuple[str, str], reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each other one would read the round once more, and a tick of the sensor ends after a minute."""
    many = f"{prefix}many"
    broker.make_topic(many, 12)
    for partition in range(12):
        broker.produce(many, [*others(600 + partition, 1), *changes(20 + partition, 1)], partition)
    reader.give_key("email")
    readings = []
    read = records.RoundReading.parts

    def counted(reading: records.RoundReading, epoch: int) -> Iterator[Any]:
        readings.append(reading)
        return read(reading, epoch)

    monkeypatch.setattr(records.RoundReading, "parts", counted)
    report = reader.sync()
    assert len(report.parked) == 12 and len(readings) == 2 * len(report.batches)
    (fault,) = report.faults
    assert "and 7 more partitions wait" in fault.problem
    assert reader.keys() == [1, 2, 3, 501, *range(600, 612)]
    reader.give_key("id")
    assert reader.sync().finished
    assert reader.keys() == [1, 2, 3, *range(20, 32), 501, *range(600, 612)]


@pytest.mark.parametrize(
    "first",
    [
        (None, envelope("c", customer(9, updated_at=True), lsn=2000, order=1)),
        ({"id": 9}, envelope("d", customer(9), lsn=2000, order=1)),
    ],
    ids=["a line that cannot be read", "a delete"],
)
def test_no_event_of_the_table_is_passed_whatever_it_is(
    broker: Broker, topics: tuple[str, str], reader: Reader, first: tuple[Any, Any]
) -> None:
    reader.give_key("email")
    broker.produce(topics[0], [({"id": 1}, None), first])
    (fault,) = reader.sync().faults
    assert f"{topics[0]}[0] at offset 4 waits" in fault.problem, "behind the tombstone, which is no event"
    assert len(reader.rows()) == 4
    reader.give_key("id")
    reader.sync()
    assert len(reader.rows()) == 5


def test_a_new_epoch_does_not_let_the_table_in(
    broker: Broker, topics: tuple[str, str], reader: Reader
) -> None:
    reader.give_key("email")
    broker.produce(topics[0], changes(4, 1))
    for new_epoch in ("", "set up anew", ""):
        broker.produce(topics[1], others(510 + len(reader.keys()), 1))
        (fault,) = reader.sync(Ways(new_epoch=new_epoch)).faults
        assert "[0] at offset 3 waits" in fault.problem
    assert offsets(reader)["customers0"] == 3
    reader.give_key("id")
    assert reader.sync().finished and reader.keys().count(4) == 1


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_text("not what we write")])
def test_without_its_note_a_partition_is_read_again_and_waits_at_the_same_record(
    broker: Broker, topics: tuple[str, str], reader: Reader, damage: Callable[[Path], object]
) -> None:
    reader.give_key("email")
    broker.produce(topics[0], changes(4, 2))
    (fault,) = reader.sync().faults
    (note,) = reader.store.folder.glob("parked-topics-*")
    damage(note)
    assert [each.parked for each in reader.source.lags()] == ["", "", ""]
    assert [str(each) for each in reader.sync().faults] == [str(fault)]
    assert {each.parked for each in reader.source.lags()} == {"public.customers", ""}


@pytest.fixture
def mocked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Broker, Reader]]:
    """A cluster that deletes records, and a reader of all its topics; of customers a row has landed."""
    monkeypatch.setattr(client, "ANSWER_SECONDS", 3.0)
    monkeypatch.setattr(client, "_ID_SECONDS", 0.3)
    with mock_cluster() as mock:
        reader = Reader(tmp_path, mock.address, "mocked")
        mock.produce("mocked.first", changes(1, 1))
        assert reader.sync().finished
        reader.give_key("email")
        yield mock, reader


@pytest.mark.full
@pytest.mark.parametrize("topic", ["mocked.first", "mocked"])
def test_retention_that_overtakes_a_topic_that_waits_is_a_gap(
    mocked: tuple[Broker, Reader], topic: str
) -> None:
    """Also of a topic of which nothing has landed when it was told to wait."""
    mock, reader = mocked
    mock.produce(topic, changes(50, 2))
    offset = 1 if topic == "mocked.first" else 0
    (fault,) = reader.sync().faults
    assert isinstance(fault, LandedKeyChanged) and f"{topic}[0] at offset {offset} waits" in fault.problem
    overtake(mock, topic)
    for key in ("email", "id"):
        reader.give_key(key)
        mock.produce("mocked.first", changes(70, 1), 1)
        (gap, *_) = reader.sync().faults
        assert isinstance(gap, RecordsGone) and f"offsets {offset} to " in gap.problem
        assert [each.held.topic for each in reader.source.lags() if each.gone] == [topic]
    assert reader.sync(Ways(accept_gap="tables were read again")).finished
    (span,) = [each for each in reader.spans() if each.gone]
    assert (span.topic, span.start) == (topic, offset)
