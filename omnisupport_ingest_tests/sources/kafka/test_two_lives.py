"""A connector that was set up anew: nothing of its second life lands in the epoch of the first."""

from __future__ import annotations

from typing import Any

import pytest

from omnisupport_ingest.sources.kafka.client import Cluster
from omnisupport_ingest.sources.kafka.errors import RecordRefused
from omnisupport_ingest.sources.kafka.offsets import Ways
from omnisupport_ingest.sources.kafka.run import preflight
from omnisupport_ingest_tests.sources.debezium.told import customer, envelope
from omnisupport_ingest_tests.sources.kafka.broker import Broker
from omnisupport_ingest_tests.sources.kafka.topics import Reader, changes

SET_UP_ANEW = Ways(new_epoch="connector set up anew")


def told(op: str, number: int, lsn: int, before_lsn: int | None = None) -> tuple[Any, Any]:
    """A row of customer ``number``; without ``before_lsn``, one of a first snapshot."""
    return {"id": number}, envelope(op, customer(number), lsn=lsn, before_lsn=before_lsn, order=1)


@pytest.fixture
def topic(broker: Broker, prefix: str) -> str:
    broker.make_topic(f"{prefix}a", 2)
    return f"{prefix}a"


def test_a_connector_that_was_set_up_anew_stops_its_source_until_a_person_says_so(
    broker: Broker, topic: str, reader: Reader
) -> None:
    """Other partitions wait too: nothing tells of which life their records are. They had landed before."""
    broker.produce(topic, changes(1, 2))
    broker.produce(topic, [told("r", 7, 5000), told("c", 8, 5010, 5005)])
    broker.produce(topic, changes(11, 2), 1)
    for _ in range(2):
        report = reader.sync()
        (fault,) = report.faults
        assert isinstance(fault, RecordRefused) and "a[0], offset 2: " in fault.problem
        assert "two lives" in fault.problem and "--new-epoch" in fault.fix
        assert "other partitions" in fault.problem and not report.finished
        assert reader.keys() == [1, 2], "what stands before it in its partition has landed"
    assert len(reader.store.batch_ids()) == 1
    # A person may have to say it again where records of the first life are left.
    (fault,) = reader.sync(SET_UP_ANEW).faults
    assert "a[1], offset 0: " in fault.problem and reader.keys() == [1, 2, 7, 8]
    # The broker says that a topic ends where its last batch begins.
    broker.produce(topic, [told("c", 9, 5020, 5015)])
    assert len(reader.sync().faults) == 1
    assert reader.sync(SET_UP_ANEW).faults == []
    assert reader.keys() == [1, 2, 7, 8, 9, 11, 12]
    assert reader.sync().faults == []


def test_records_below_those_of_the_first_life_do_not_land_beside_them(
    broker: Broker, topic: str, reader: Reader
) -> None:
    """After the server was restored, positions start lower: alone such a record shows nothing."""
    broker.produce(topic, [told("r", 1, 800)])
    broker.produce(topic, [told("c", 11, 9000, 8990)], 1)
    assert reader.sync().faults == []
    broker.produce(topic, [told("c", 2, 510, 505)])
    broker.produce(topic, [told("r", 11, 500)], 1)
    (fault,) = reader.sync().faults
    assert "two lives" in fault.problem
    assert reader.keys() == [1, 11]
    assert reader.sync(SET_UP_ANEW).faults == []
    assert {(row["epoch"], row["commit_lsn"]) for row in reader.rows() if "11" in row["key"]} == {
        (1, 8990),
        (2, 0),
    }
    broker.produce(topic, [told("c", 12, 530, 520)], 1)
    assert reader.sync().faults == []
    assert reader.keys() == [1, 2, 11, 11, 12]


def test_while_a_person_is_waited_for_no_record_is_read(
    broker: Broker, topic: str, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large backlog of another partition could else land before the record that shows the second life."""
    broker.produce(topic, changes(1, 1))
    broker.produce(topic, [told("r", 7, 5000)])
    (first,) = reader.sync().faults

    def none(*_: object) -> None:
        raise AssertionError("records are read")

    with monkeypatch.context() as patch:
        patch.setattr(Cluster, "consume", none)
        (again,) = reader.sync().faults
        assert str(again) == str(first)
        source, landing = reader.source, reader.store.folder.parent
        (finding,) = preflight(source.definition, source.inlet.contracts, landing)
        assert (finding.check, finding.problem) == ("two_lives", first.problem)
        (note,) = reader.store.folder.glob("two-lives-*")
        note.write_text("not what we write")
        (unreadable,) = reader.sync().faults
        assert isinstance(unreadable, RecordRefused) and "--new-epoch" in unreadable.fix
    assert reader.sync(SET_UP_ANEW).faults == [] and reader.keys() == [1, 7]
