"""Whose changes those of a partition described by its own name are, also long after they committed."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from omnisupport_ingest.landing.lost_changes import LostChanges
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.sources.postgres.catalog.partition_roots import PartitionRoots
from omnisupport_ingest.sources.postgres.catalog.partitions import (
    KnownPartitions,
    Partition,
    PartitionRecords,
    Stay,
)
from omnisupport_ingest.sources.postgres.protocol.pgoutput import Relation
from omnisupport_ingest.sources.postgres.snapshot.snapshot import Snapshots
from omnisupport_ingest_tests.sources.postgres.partitioned_logs import make_logs, same
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest, contract

ROOT, OWN = "logs", "logs_1"


def part(name: str = OWN) -> Partition:
    return Partition(f"public.{name}", "1/1", 7, True)


def known(since: int | None, certain: int, left: tuple[int, int] | None = None) -> KnownPartitions:
    """A note about the partition ``1``, which is one now if ``since`` is given; with its last stay."""
    return KnownPartitions(
        {} if since is None else {"1": part()},
        Lsn(certain),
        {"1": Lsn(since)} if since else {},
        {} if left is None else {"1": Stay(Lsn(left[0]), Lsn(left[1]))},
    )


ATTACHED = [
    pytest.param(None, 50, ROOT, id="nothing is known of its table"),
    pytest.param(known(0, 100), 50, ROOT, id="always"),
    pytest.param(known(0, 100), 200, ROOT, id="always, and since the last look"),
    pytest.param(known(60, 100), 50, OWN, id="before it was one"),
    pytest.param(known(60, 100), 60, ROOT, id="perhaps the first that it was one for"),
    pytest.param(known(None, 100), 99, OWN, id="the last look has not seen it yet"),
    pytest.param(known(None, 100), 100, ROOT, id="attached since the last look"),
    pytest.param(known(60, 100, (10, 40)), 39, ROOT, id="attached anew, in its first stay"),
    pytest.param(known(60, 100, (10, 40)), 40, OWN, id="attached anew, between its stays"),
    pytest.param(known(60, 100, (10, 40)), 9, OWN, id="attached anew, before its first stay"),
]
DETACHED = [
    pytest.param(None, 50, OWN, None, id="nothing is known of its table"),
    pytest.param(known(0, 100), 99, ROOT, None, id="left since the last look, of before"),
    pytest.param(known(0, 100), 100, OWN, 100, id="left since the last look, before or after it"),
    pytest.param(known(60, 100), 59, OWN, None, id="left since the last look, before it was one"),
    pytest.param(known(None, 100, (10, 40)), 39, ROOT, None, id="in its last stay"),
    pytest.param(known(None, 100, (10, 40)), 40, OWN, None, id="after its last stay"),
    pytest.param(known(None, 100, (10, 40)), 9, OWN, None, id="before its last stay"),
]


def name_of(
    source: SourceUnderTest, folder: Path, note: KnownPartitions | None, at: int, *then: str
) -> tuple[str, LostChanges]:
    """The name for a change at ``at``, as far as ``note`` and, after ``then``, the catalog tell."""
    source.sql(
        "CREATE TABLE logs (id int PRIMARY KEY, v text) PARTITION BY RANGE (id)",
        "CREATE TABLE logs_1 PARTITION OF logs FOR VALUES FROM (0) TO (10)",
    )
    ((oid,),) = source.query("SELECT 'logs_1'::regclass::oid::bigint")
    if note is not None:
        mine = {str(oid): each for each in note.partitions.values()}
        since, left = ({str(oid): each for each in of.values()} for of in (note.since, note.left))
        PartitionRecords(folder, 1).write("logs", KnownPartitions(mine, note.certain, since, left))
    source.sql(*then)
    lost = LostChanges(folder, 1)
    with source.connected() as connection:
        roots = PartitionRoots(connection, folder, 1, [contract("logs", ("id", "v"))], lost)
        _, name = roots.name_of(Relation(oid, "public", "logs_1", "d", ()), at)
    return name, lost


@pytest.mark.parametrize(("note", "at", "name"), ATTACHED)
def test_change_of_a_table_that_is_a_partition_by_now(
    source: SourceUnderTest, tmp_path: Path, note: KnownPartitions | None, at: int, name: str
) -> None:
    found, lost = name_of(source, tmp_path, note, at)
    assert found == name
    assert lost.all() == ()


@pytest.mark.parametrize("then", ["ALTER TABLE logs DETACH PARTITION logs_1", "DROP TABLE logs_1"])
@pytest.mark.parametrize(("note", "at", "name", "lost_from"), DETACHED)
def test_change_of_a_table_that_is_no_partition_by_now(
    source: SourceUnderTest,
    tmp_path: Path,
    note: KnownPartitions | None,
    at: int,
    name: str,
    lost_from: int | None,
    then: str,
) -> None:
    found, lost = name_of(source, tmp_path, note, at, then)
    assert found == name
    assert [each.lost_from for each in lost.all()] == ([] if lost_from is None else [Lsn(lost_from)])


def test_partition_that_is_dropped_before_its_changes_are_read_was_its_tables(
    source: SourceUnderTest,
) -> None:
    make_logs(source, f"CREATE PUBLICATION {source.slot} FOR TABLE logs")
    source.sql("UPDATE logs SET v = 'its last' WHERE id = 3", "DELETE FROM logs WHERE id = 4")
    capture = source.capture()
    epoch = source.store.current_epoch()
    assert epoch is not None
    snapshots = Snapshots(capture._epoch(source.dsn, epoch), source.tables)
    # Capture looks at the catalogs while its stream is behind.
    snapshots.look_at_partitions(threading.Event())
    source.sql("DROP TABLE logs_1")
    source.catch_up()
    assert [(event.op, event.source_table) for event in source.changes()] == [("u", "logs"), ("d", "logs")]
    assert same(source)


def test_looks_remember_stays_as_long_as_they_may_be_read() -> None:
    one = KnownPartitions({"1": part(), "2": part("logs_2")}, Lsn(100))
    two = one.followed_by({"2": part("logs_2"), "3": part("logs_3")}, Lsn(120), Lsn(150), Lsn(0))
    assert two.left == {"1": Stay(Lsn(0), Lsn(120))}
    assert two.stay_of("2") == Stay(Lsn(0), Lsn(150))
    assert two.stay_of("3") == Stay(Lsn(120), Lsn(150))
    assert two.stay_of("1") is None
    three = two.followed_by({"1": part(), "2": part("logs_2")}, Lsn(160), Lsn(180), Lsn(110))
    assert three.left == {"1": Stay(Lsn(0), Lsn(120)), "3": Stay(Lsn(120), Lsn(160))}
    assert three.stay_of("1") == Stay(Lsn(160), Lsn(180))
    four = three.followed_by(three.partitions, Lsn(180), Lsn(200), Lsn(170))
    assert four.left == {}
    assert four.stay_of("1") == Stay(Lsn(0), Lsn(200))


def test_note_of_partitions_is_read_as_it_was_written_and_one_of_before_stays_were_kept(
    tmp_path: Path,
) -> None:
    records = PartitionRecords(tmp_path, 1)
    note = known(60, 100, (10, 40))
    records.write("logs", note)
    assert records.read("logs") == note
    (file,) = tmp_path.glob("partitions-*.json")
    content = json.loads(file.read_text())
    del content["since"], content["left"]
    file.write_text(json.dumps(content))
    assert records.read("logs") == KnownPartitions(note.partitions, note.certain)
