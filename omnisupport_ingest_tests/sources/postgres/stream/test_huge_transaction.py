"""One transaction of many million rows: capture's memory does not grow with it.

Ten million rows by ``make test-huge``, which takes some minutes each, 1.5 GB of WAL and 2 GB beside it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self

import pytest

from omnisupport_ingest.position import Lsn
from omnisupport_ingest.sources.postgres.session.server import current_wal_lsn
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest, contract
from omnisupport_ingest_tests.waiting import PATIENCE

LIMIT_MB = 600

sizes = pytest.mark.parametrize(
    "rows",
    [pytest.param(1_000_000, marks=pytest.mark.slow), pytest.param(10_000_000, marks=pytest.mark.huge)],
)


@pytest.fixture
def many(source: SourceUnderTest) -> SourceUnderTest:
    """A source with an empty table, captured up to now."""
    source.sql("CREATE TABLE many (id bigint PRIMARY KEY, v text)")
    source.tables.append(contract("many", ("id", "v")))
    source.catch_up()
    return source


class Watched:
    """A capture process and the most memory that it was seen to have."""

    def __init__(self, source: SourceUnderTest, until: Lsn | None) -> None:
        self.began = time.monotonic()
        self.peak_mb = 0.0
        self.process = source.capture_process(until=until, overrides=source.overrides)

    def wait(self, condition: Callable[[], bool], within: float) -> float:
        """Wait until it has ended or ``condition`` holds; seconds since its start."""
        while self.process.poll() is None and not condition():
            assert time.monotonic() - self.began < within, "capture did not get there"
            self.look()
            time.sleep(0.05)
        return time.monotonic() - self.began

    def look(self) -> None:
        try:
            lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            return
        found = [int(line.split()[1]) / 1000 for line in lines if line.startswith("VmHWM")]
        self.peak_mb = max([self.peak_mb, *found])

    def files_without_name(self) -> int:
        """How many files it has open that nobody else can see."""
        links = []
        for each in Path(f"/proc/{self.process.pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # Closed since it was listed.
                links.append(each.readlink())
        # Of those in the home; what it says may go to such a file of the test's own.
        return sum(link.name.endswith("(deleted)") and link.parent.name == "run" for link in links)

    def end(self) -> None:
        self.process.terminate()
        _, errors = self.process.communicate(timeout=PATIENCE)
        assert self.process.returncode == 0, errors

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate(timeout=PATIENCE)


def sent_early(source: SourceUnderTest) -> int:
    """Bytes that the server has sent of transactions that had not committed."""
    ((sent,),) = source.query(
        "SELECT stream_bytes FROM pg_stat_replication_slots WHERE slot_name = current_database()"
    )
    return int(sent or 0)


@sizes
@pytest.mark.parametrize("early", [True, False], ids=["in-progress", "afterwards"])
def test_memory_does_not_grow_with_a_transaction(many: SourceUnderTest, rows: int, early: bool) -> None:
    many.overrides["stream_transactions"] = early
    many.sql(f"INSERT INTO many SELECT g, 'row ' || g FROM generate_series(1, {rows}) g")
    before = len(many.store.batch_ids())
    with Watched(many, current_wal_lsn(many.dsn)) as capture:
        seconds = capture.wait(lambda: False, within=rows / 1000)
        capture.end()
    print(f"\n{rows:,} rows: {seconds:.0f} s, at most {capture.peak_mb:.0f} MB")
    assert (sent_early(many) > 0) == early
    (batch,) = (each for each in many.manifests()[before:] if each.rows)
    assert batch.rows == rows and all(file.ordered for file in batch.files)
    assert min(file.first.ordinal for file in batch.files) == 0
    assert max(file.last.ordinal for file in batch.files) == 2 * (rows - 1)
    assert 0 < capture.peak_mb < LIMIT_MB


@sizes
def test_nothing_is_left_of_a_transaction_that_was_rolled_back(many: SourceUnderTest, rows: int) -> None:
    before, within = len(many.store.batch_ids()), rows / 1000
    with Watched(many, None) as capture:
        with many.connected() as writer, writer.cursor() as cursor:
            cursor.execute(f"BEGIN; INSERT INTO many SELECT g, 'row ' || g FROM generate_series(1, {rows}) g")
            capture.wait(lambda: capture.files_without_name() == 1, within)
        many.sql("INSERT INTO many VALUES (-1)")
        capture.wait(lambda: any(each.rows for each in many.store.landed().batches[before:]), within)
        seconds = capture.wait(lambda: capture.files_without_name() == 0, within)
        capture.look()
        capture.end()
    print(f"\n{rows:,} rows rolled back: {seconds:.0f} s, at most {capture.peak_mb:.0f} MB")
    assert sent_early(many) > 0
    (batch,) = (each for each in many.manifests()[before:] if each.rows)
    assert batch.rows == 1
    assert 0 < capture.peak_mb < LIMIT_MB
