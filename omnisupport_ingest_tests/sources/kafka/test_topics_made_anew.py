"""Topics that were made anew or gained partitions, and what a new epoch does then."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from omnisupport_ingest.sources.debezium.handling import Handling, NamedTable
from omnisupport_ingest.sources.kafka.client import Cluster
from omnisupport_ingest.sources.kafka.errors import KafkaRefused, RecordsGone, TopicReplaced
from omnisupport_ingest.sources.kafka.offsets import UNDECIDED, Ways
from omnisupport_ingest.sources.kafka.run import preflight
from omnisupport_ingest_tests.sources.debezium.told import customer
from omnisupport_ingest_tests.sources.kafka.broker import Broker
from omnisupport_ingest_tests.sources.kafka.topics import Reader, changes, holding

MADE_ANEW = Ways(new_epoch="topic made anew")


def test_a_topic_made_anew_with_more_partitions_waits_as_a_whole_and_begins_as_a_whole(
    broker: Broker, prefix: str, reader: Reader
) -> None:
    topic = f"{prefix}a"
    broker.make_topic(topic)
    broker.produce(topic, changes(1, 3))
    reader.sync()
    broker.make_anew(topic, 2)
    broker.produce(topic, changes(5, 5))
    broker.produce(topic, changes(11, 2), 1)
    for _ in range(2):
        (fault,) = reader.sync().faults
        assert isinstance(fault, TopicReplaced)
        assert reader.keys() == [1, 2, 3], "none of its partitions lands in the old epoch"
    source = reader.source
    found = preflight(source.definition, source.inlet.contracts, reader.store.folder.parent)
    assert [each.check for each in found] == ["offsets"]
    assert reader.sync(MADE_ANEW).faults == []
    assert reader.keys() == [1, 2, 3, 5, 6, 7, 8, 9, 11, 12]
    assert {row["epoch"] for row in reader.rows() if row["commit_lsn"] and "11" in row["key"]} == {2}
    assert reader.sync().batches == []


def test_a_topic_made_anew_with_fewer_partitions_forgets_those_of_the_old_one(
    broker: Broker, prefix: str, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = f"{prefix}a"
    broker.make_topic(topic, 2)
    broker.produce(topic, changes(1, 3))
    broker.produce(topic, changes(11, 1), 1)
    reader.sync()
    broker.make_anew(topic, 2)
    broker.produce(topic, changes(5, 5))
    broker.produce(topic, changes(12, 3), 1)
    with monkeypatch.context() as one:
        holding(one, lambda held: [each for each in held if each.partition == 0])
        assert reader.sync(MADE_ANEW).faults == []
    # Then the second partition is added.
    assert reader.sync().faults == []
    assert reader.keys() == [1, 2, 3, 5, 6, 7, 8, 9, 11, 12, 13, 14]


def test_an_added_partition_whose_first_records_retention_took_is_a_gap(
    broker: Broker, prefix: str, reader: Reader, one_partition: pytest.MonkeyPatch
) -> None:
    topic = f"{prefix}a"
    broker.make_topic(topic, 2)
    broker.produce(topic, changes(1, 2))
    reader.sync()
    one_partition.undo()
    broker.produce(topic, changes(11, 4), 1)
    hold_from(2, one_partition)
    (gap,) = reader.sync().faults
    assert isinstance(gap, RecordsGone) and "Partition 1" in gap.problem
    assert "offsets 0 to 1 were deleted" in gap.problem and "--accept-gap" in gap.fix
    assert reader.keys() == [1, 2]
    assert reader.sync(Ways(accept_gap="tables were read again")).faults == []
    assert reader.keys() == [1, 2, 13, 14]
    span = reader.spans()[-1]
    assert (span.start, span.next, span.gone) == (0, 4, 2)
    assert reader.sync().batches == []


def hold_from(low: int, patch: pytest.MonkeyPatch) -> None:
    """The cluster says that partition 1 begins at ``low``: the broker of the tests deletes nothing."""
    holding(patch, lambda held: [replace(each, low=low * each.partition) for each in held])


def test_partitions_of_a_cluster_without_ids_can_be_added_by_a_new_epoch(
    broker: Broker, prefix: str, tmp_path: Path, one_partition: pytest.MonkeyPatch
) -> None:
    handling = Handling(tables=(NamedTable("*", "public", "customers"),), order="arrival", bare_rows=True)
    reader = Reader(tmp_path, broker.address, prefix, handling)
    topic = f"{prefix}a"
    broker.make_topic(topic, 2)
    one_partition.setattr(Cluster, "_ids", lambda *_: {})
    broker.produce(topic, [({"id": number}, customer(number)) for number in (1, 2)])
    reader.sync()
    one_partition.undo()
    one_partition.setattr(Cluster, "_ids", lambda *_: {})
    broker.make_anew(topic, 2)
    # As many as have landed: no offset says that it is another topic.
    broker.produce(topic, [({"id": number}, customer(number)) for number in (3, 4)])
    broker.produce(topic, [({"id": 5}, customer(5))], 1)
    with pytest.raises(KafkaRefused, match="has a partition 1 that it did not have"):
        reader.sync(UNDECIDED)
    assert reader.sync(MADE_ANEW).faults == []
    assert reader.keys() == [1, 2, 3, 4, 5]
    assert reader.sync().batches == []


def test_a_new_epoch_without_a_record_is_not_begun_and_says_so(
    broker: Broker, prefix: str, reader: Reader
) -> None:
    topic = f"{prefix}a"
    broker.make_topic(topic)
    broker.produce(topic, changes(1, 3))
    reader.sync()
    broker.make_anew(topic)
    (fault,) = reader.sync(MADE_ANEW).faults
    assert isinstance(fault, KafkaRefused) and "No epoch was begun" in fault.problem
    assert "--new-epoch" in fault.fix
    assert [each.number for each in reader.store.epochs()] == [1]
    broker.produce(topic, changes(5, 1))
    assert reader.sync(MADE_ANEW).faults == []
    assert reader.keys() == [1, 2, 3, 5]
    (fault,) = reader.sync(MADE_ANEW).faults
    assert "No epoch was begun" in fault.problem, "everything has landed"
