"""A partitioned table to test with, and what can become of its partitions."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from omnisupport_ingest.landing.manifest import Manifest
from omnisupport_ingest.sources.postgres.capture import added_tables
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest, contract, folded
from omnisupport_ingest_tests.waiting import PATIENCE, until

COLUMNS = ("id", "v")


def make_logs(source: SourceUnderTest, *first: str) -> None:
    """A partitioned table, captured up to now: a leaf, one with partitions, and a default.

    ``first``: what is done when it is there, before anything is captured.
    """
    source.sql(
        "CREATE TABLE logs (id int PRIMARY KEY, v text) PARTITION BY RANGE (id)",
        "CREATE TABLE logs_1 PARTITION OF logs FOR VALUES FROM (0) TO (10)",
        "CREATE TABLE logs_2 PARTITION OF logs FOR VALUES FROM (10) TO (30) PARTITION BY RANGE (id)",
        "CREATE TABLE logs_2a PARTITION OF logs_2 FOR VALUES FROM (10) TO (20)",
        "CREATE TABLE logs_2b PARTITION OF logs_2 FOR VALUES FROM (20) TO (30)",
        "CREATE TABLE logs_rest PARTITION OF logs DEFAULT",
        "INSERT INTO logs SELECT g, 'old' FROM generate_series(1, 39) g",
    )
    source.sql(*first)
    source.tables.append(contract("logs", COLUMNS))
    source.catch_up()


def snapshots(source: SourceUnderTest) -> int:
    """How often the whole table was read."""
    return sum(1 for each in source.manifests() if each.chunk and each.chunk.boundary)


def same(source: SourceUnderTest) -> bool:
    return folded(source.events(), "logs") == source.rows("logs", COLUMNS)


OLD_TABLE = (
    "CREATE TABLE older (id int PRIMARY KEY, v text)",
    "INSERT INTO older SELECT g, 'attached' FROM generate_series(50, 59) g",
)
ATTACH = "ALTER TABLE logs ATTACH PARTITION older FOR VALUES FROM (50) TO (60)"
DETACH = "ALTER TABLE logs DETACH PARTITION logs_1"
REATTACH = "ALTER TABLE logs ATTACH PARTITION logs_1 FOR VALUES FROM (0) TO (10)"
WITHIN = (
    "CREATE TABLE deeper (id int PRIMARY KEY, v text) PARTITION BY RANGE (id)",
    "CREATE TABLE deeper_1 PARTITION OF deeper FOR VALUES FROM (60) TO (65)",
    "INSERT INTO deeper SELECT g, 'attached' FROM generate_series(60, 64) g",
    "ALTER TABLE logs ATTACH PARTITION deeper FOR VALUES FROM (60) TO (70)",
)
NEW_AND_FILLED = (
    "CREATE TABLE logs_7 PARTITION OF logs FOR VALUES FROM (70) TO (80)",
    "INSERT INTO logs VALUES (70, 'new'), (71, 'new')",
)
FILLED_WHERE_MADE = (
    "BEGIN; CREATE TABLE made (id int PRIMARY KEY, v text); INSERT INTO made VALUES (80, 'before');"
    " ALTER TABLE logs ATTACH PARTITION made FOR VALUES FROM (80) TO (90); COMMIT",
)
CHANGES = [
    pytest.param((*OLD_TABLE, ATTACH), 1, id="attached"),
    pytest.param(WITHIN, 1, id="attached with partitions of its own"),
    pytest.param(NEW_AND_FILLED, 1, id="made and filled", marks=pytest.mark.slow),
    pytest.param(FILLED_WHERE_MADE, 1, id="made, filled and attached at once", marks=pytest.mark.slow),
    pytest.param((DETACH,), 2, id="detached"),
    pytest.param(
        (DETACH, "UPDATE logs_1 SET v = 'aside'", REATTACH), 2, id="detached, changed, attached anew"
    ),
    pytest.param(("ALTER TABLE logs_2 DETACH PARTITION logs_2a",), 2, id="detached below"),
    pytest.param(("DROP TABLE logs_1",), 2, id="dropped", marks=pytest.mark.slow),
    pytest.param(("DROP TABLE logs_2",), 2, id="dropped with its partitions", marks=pytest.mark.slow),
    pytest.param(("TRUNCATE logs_2b",), 2, id="truncated"),
    pytest.param(
        ("TRUNCATE logs_2b", "INSERT INTO logs VALUES (21, 'again')"),
        2,
        id="truncated and filled",
        marks=pytest.mark.slow,
    ),
    pytest.param((*OLD_TABLE, ATTACH, "DROP TABLE logs_1"), 2, id="one attached, one dropped"),
    pytest.param(
        ("CREATE TABLE logs_9 PARTITION OF logs FOR VALUES FROM (90) TO (99)",), 1, id="made and empty"
    ),
]


@contextmanager
def followed(source: SourceUnderTest) -> Iterator[threading.Event]:
    """Capture follows meanwhile; gives what is set at its end. What it ends with is raised."""
    stop, failures, streamed, over = threading.Event(), [], threading.Event(), threading.Event()
    capture = source.capture()

    def landed(batch: Manifest) -> None:
        if batch.stream is not None:
            streamed.set()

    capture._landed = landed

    def run() -> None:
        try:
            capture.run(None, stop)
        except BaseException as error:
            failures.append(error)
        over.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        source.sql("UPDATE logs SET v = 'started' WHERE id = 39")
        assert streamed.wait(PATIENCE)
        yield over
    finally:
        stop.set()
        thread.join()
    for failure in failures:
        raise failure


def right_after(logs: SourceUnderTest, statements: Sequence[str], reads: int) -> None:
    """After ``statements`` while capture is stopped, the table has been read ``reads`` times and is right."""
    logs.sql(*statements)
    logs.sql("UPDATE logs SET v = 'after' WHERE id IN (16, 25, 35, 52)")
    logs.catch_up()
    assert same(logs)
    assert snapshots(logs) == reads
    logs.sql("UPDATE logs SET v = 'later' WHERE id % 5 = 0")
    logs.catch_up()
    assert same(logs)
    assert snapshots(logs) == reads


def right_beside(logs: SourceUnderTest, statements: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """After ``statements`` while capture follows, the table becomes right by itself."""
    monkeypatch.setattr(added_tables, "PARTITION_SECONDS", 0.3)
    with followed(logs):
        assert same(logs) or snapshots(logs) == 1
        logs.sql(*statements, "UPDATE logs SET v = 'after' WHERE id IN (16, 25, 35, 52)")
        until(lambda: same(logs))
