"""Captures of a database of its own, and what has landed of its snapshots."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from omnisupport_ingest.contracts.model import Contracts
from omnisupport_ingest.landing.completeness import incomplete_now
from omnisupport_ingest.landing.lost_changes import LostChanges
from omnisupport_ingest.landing.manifest import ChunkSpan, Manifest
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.sources.postgres.capture.capture import Capture
from omnisupport_ingest.sources.postgres.session.server import current_wal_lsn
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest, contract, folded

COLUMNS = ("id", "v")


def chunks(source: SourceUnderTest, table: str = "tickets") -> list[ChunkSpan]:
    """The landed chunks of ``table`` by number, without boundaries."""
    spans = [batch.chunk for batch in source.manifests() if batch.chunk is not None]
    found = [span for span in spans if span.table == table and not span.boundary]
    return sorted(found, key=lambda span: span.chunk)


def capture(
    source: SourceUnderTest, landed: Callable[[Manifest], None], until_lsn: Lsn | None = None
) -> None:
    """Capture up to now; ``landed`` is called with each batch."""
    running = Capture(source.settings, source.home, Contracts(tuple(source.tables)), landed)
    running.run(until_lsn or current_wal_lsn(source.dsn), threading.Event())


@contextmanager
def following(source: SourceUnderTest) -> Iterator[threading.Thread]:
    """A capture that follows, on a thread; what it fails with is raised before an assertion of the block."""
    stop, failed = threading.Event(), list[BaseException]()

    def run() -> None:
        try:
            source.capture().run(None, stop)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield thread
    except AssertionError as error:
        if failed:
            raise failed[0] from error
        raise
    finally:
        stop.set()
        thread.join()
    if failed:
        raise failed[0]


def complete(source: SourceUnderTest, table: str = "tickets") -> bool:
    epoch = source.store.current_epoch()
    if epoch is None:
        return False
    batches = source.manifests()
    lost = LostChanges(source.store.folder, epoch.number).all()
    return incomplete_now(batches, table, epoch.number, lost) is None


def same_as_source(source: SourceUnderTest, table: str = "tickets") -> bool:
    return folded(source.events(), table) == source.rows(table, COLUMNS)


def make_tickets(source: SourceUnderTest) -> None:
    """A table of 1,000 rows, read in chunks of 100 by three connections."""
    source.sql(
        "CREATE TABLE tickets (id int PRIMARY KEY, v text)",
        "INSERT INTO tickets SELECT g, 'old' FROM generate_series(1, 1000) g",
    )
    source.tables.append(contract("tickets", COLUMNS))
    source.overrides |= {"snapshot_chunk_rows": 100, "snapshot_threads": 3}


def make_papers(source: SourceUnderTest, first: int, last: int) -> None:
    """A table with a column that a key change does not send, read in chunks of 100, one at a time."""
    source.sql(
        "CREATE TABLE papers (id int PRIMARY KEY, v text, long text)",
        "ALTER TABLE papers ALTER long SET STORAGE EXTERNAL",
        f"INSERT INTO papers SELECT n, 'old', repeat(n::text, 3000) FROM generate_series({first}, {last}) n",
    )
    source.tables.append(contract("papers", ("id", "v", "long")))
    source.overrides |= {"snapshot_chunk_rows": 100, "snapshot_threads": 1}
