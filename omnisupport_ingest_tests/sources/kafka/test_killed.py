"""A sync is killed at its failpoints; the next one ends with every record landed, and landed once."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import uuid
from collections import Counter
from pathlib import Path

import pytest

from omnisupport_ingest.failpoints import VARIABLE
from omnisupport_ingest.landing.schema_changes import SchemaChanges
from omnisupport_ingest.settings import PREFIX
from omnisupport_ingest.sources.kafka.offsets import Ways
from omnisupport_ingest_tests.sources.debezium.told import customer, envelope
from omnisupport_ingest_tests.sources.kafka.broker import Broker
from omnisupport_ingest_tests.sources.kafka.topics import Reader, changes, others
from omnisupport_ingest_tests.waiting import PATIENCE

POINTS = (
    "landing.epoch.before",
    "landing.epoch.after",
    "landing.schema_changes.before",
    "landing.schema_changes.after",
    "landing.data.before",
    "landing.data.after",
    "landing.manifest.before",
    "landing.manifest.after",
    "landing.index.before",
    "landing.index.after",
    "kafka.mirror.before",
    "kafka.mirror.after",
)

_PROGRAM = """
import sys
from pathlib import Path
from omnisupport_ingest_tests.sources.kafka.topics import Reader
reader = Reader(Path(sys.argv[1]), sys.argv[2], sys.argv[3], batch_rows=6)
for key in sys.argv[4:]:
    reader.give_key(key)
reader.sync()
"""

_CASES = [
    pytest.param(*case, marks=() if case == ("landing.manifest.after", 2) else pytest.mark.crash)
    for case in itertools.product(POINTS, (1, 2))
    if not case[0].startswith(("landing.epoch", "landing.schema_changes")) or case[1] == 1
]


def kill_at(point: str, folder: Path, broker: Broker, prefix: str, *keys: str) -> None:
    """Sync in a process that dies at ``point``; ``keys``: what customers get as their key before."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    ends = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(folder), broker.address, prefix, *keys],
        env={**inherited, VARIABLE: point},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert ends.returncode == -signal.SIGKILL, ends.stderr


@pytest.mark.parametrize(("point", "at"), _CASES)
def test_a_sync_that_is_killed_goes_on_where_it_was(
    tmp_path: Path, broker: Broker, point: str, at: int
) -> None:
    prefix = f"k{uuid.uuid4().hex[:8]}"
    broker.make_topic(prefix, 2)
    for partition in (0, 1):
        broker.produce(prefix, changes(100 * partition, 15), partition)
    kill_at(f"{point}:{at}", tmp_path, broker, prefix)
    reader = Reader(tmp_path, broker.address, prefix, batch_rows=6)
    for _ in range(2):
        assert reader.sync().finished
    # A round is landed or not, so not even a duplicate is left to dedupe.
    assert Counter(reader.keys()) == Counter([*range(15), *range(100, 115)])
    assert reader.store.landed().gap is None
    assert SchemaChanges(reader.store.folder).all() == ()


@pytest.mark.parametrize(
    "point", [pytest.param("kafka.two_lives.before", marks=pytest.mark.crash), "kafka.two_lives.after"]
)
def test_a_sync_that_is_killed_where_two_lives_meet_lands_nothing_of_the_second(
    tmp_path: Path, broker: Broker, point: str
) -> None:
    prefix = f"k{uuid.uuid4().hex[:8]}"
    broker.make_topic(prefix, 2)
    broker.produce(prefix, changes(1, 2))
    anew = envelope("r", customer(7), lsn=5000, before_lsn=None, order=1)
    broker.produce(prefix, [({"id": 7}, anew)])
    broker.produce(prefix, changes(11, 2), 1)
    kill_at(f"{point}:1", tmp_path, broker, prefix)
    reader = Reader(tmp_path, broker.address, prefix)
    for _ in range(2):
        (fault,) = reader.sync().faults
        assert "two lives" in fault.problem
        assert not {7, 11, 12} & set(reader.keys())
    reader.sync(Ways(new_epoch="set up anew"))
    reader.sync(Ways(new_epoch="set up anew"))
    assert reader.keys() == [1, 2, 7, 11, 12]


_PARKED_CASES = [
    pytest.param(*case, marks=() if case == ("kafka.parked.before", 1) else pytest.mark.crash)
    for case in itertools.product(
        ("kafka.parked.before", "kafka.parked.after", "landing.manifest.before", "landing.manifest.after"),
        (1, 2),
    )
]


@pytest.mark.parametrize(("point", "at"), _PARKED_CASES)
def test_a_sync_that_is_killed_beside_a_parked_table_passes_none_of_its_rows(
    tmp_path: Path, broker: Broker, point: str, at: int
) -> None:
    """Rounds of six records, so partitions begin to wait in one round, and others land in later ones."""
    prefix = f"k{uuid.uuid4().hex[:8]}"
    for name in ("a", "b"):
        broker.make_topic(f"{prefix}{name}", 2)
    broker.produce(f"{prefix}a", changes(1, 2))
    reader = Reader(tmp_path, broker.address, prefix, batch_rows=6)
    assert reader.sync().finished
    broker.produce(f"{prefix}a", changes(3, 9))
    broker.produce(f"{prefix}a", [*others(500, 3), *changes(30, 3)], 1)
    broker.produce(f"{prefix}b", others(600, 15))
    broker.produce(f"{prefix}b", [*others(700, 15), *changes(40, 3)], 1)
    kill_at(f"{point}:{at}", tmp_path, broker, prefix, "email")
    reader = Reader(tmp_path, broker.address, prefix, batch_rows=6)
    reader.give_key("email")
    landed = [1, 2, *range(500, 503), *range(600, 615), *range(700, 715)]
    for _ in range(2):
        (fault,) = reader.sync().faults
        assert "a[0] at offset 2" in fault.problem and "a[1] at offset 3" in fault.problem
        assert "b[1] at offset 15" in fault.problem
        assert Counter(reader.keys()) == Counter(landed)
    reader.give_key("id")
    for _ in range(2):
        assert reader.sync().finished
    assert Counter(reader.keys()) == Counter([*landed, *range(3, 12), *range(30, 33), *range(40, 43)])
    assert reader.store.landed().gap is None
