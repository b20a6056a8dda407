"""Readers of other engines while dimensions are updated, closed and replayed: whole versions only."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import duckdb
import polars as pl
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from omnisupport_ingest.lake.table import LakeTable
from omnisupport_ingest.layers.dimension import dimensions, net_changes
from omnisupport_ingest.layers.events import deduped, raw
from omnisupport_ingest_tests.layers.story import FIRST, SOURCE, START, Change, Commit, Story

KEYS = range(1, 9)
LATER_WINDOW = "2026-01-01T1400"
ROUNDS = 4


class Reader:
    """Reads a table again and again in a thread and keeps what it saw, or the first error it met."""

    def __init__(self, table: LakeTable) -> None:
        self._folder = str(table.folder)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.reads = 0
        self.titles: set[frozenset[str]] = set()
        """The titles that stood in the rows of one read together."""
        self.keys: set[tuple[int, ...]] = set()
        self.error: Exception | None = None

    @contextmanager
    def at_work(self) -> Iterator[Reader]:
        self._thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                for rows in self._read():
                    self.keys.add(tuple(sorted(id for id, _ in rows)))
                    self.titles.add(frozenset(title for _, title in rows))
                    self.reads += 1
        except Exception as error:
            self.error = error

    def last(self) -> list[list[tuple[int, str]]]:
        """What a reader finds now."""
        return list(self._read())

    def _read(self) -> Iterator[list[tuple[int, str]]]:
        delta = DeltaTable(self._folder)
        with duckdb.connect() as connection:
            yield connection.read_parquet(delta.file_uris()).select("id, title").fetchall()
        yield pl.read_delta(self._folder, columns=["id", "title"]).rows()


@pytest.fixture
def story(tmp_path: Path) -> Story:
    told = Story(tmp_path / "told")
    told.clock = START + timedelta(hours=3)
    return told


@pytest.mark.slow
def test_readers_see_one_version_of_a_dimension_or_the_next_while_windows_close_and_are_replayed(
    story: Story, spark: SparkSession
) -> None:
    def take(*windows: str, replay: bool = False) -> None:
        for layer in (raw, deduped):
            layer.materialize(story.workspace, spark, SOURCE, windows, "run", replay=replay)
        net_changes.materialize(story.workspace, spark, story.contract, windows, "run", replay=replay)
        dimensions.update(story.workspace, spark, story.contract, "run", whole=replay)

    def put(lsn: int, op: str, title: str, hour: int = 0) -> Commit:
        return Commit(lsn, hour * 3600, [Change(op, key, {"title": title, "body": None}) for key in KEYS])

    story.land(put(10, "c", "round 0"))
    take(FIRST)
    with Reader(story.workspace.dimension(story.contract)).at_work() as reader:
        for number in range(1, ROUNDS + 1):
            story.land(put(10 + number, "u", f"round {number}"))
            take(FIRST)
        take(FIRST, replay=True)
        # The watermark passes the end of the window: it is compacted, and made again after that.
        story.land(put(90, "u", "later", hour=2))
        take(FIRST, LATER_WINDOW)
        closed = story.workspace.deduped(SOURCE).open().state(FIRST)
        assert closed is not None and closed.closed
        take(FIRST, replay=True)
    assert reader.error is None
    assert reader.reads > ROUNDS
    assert reader.keys == {tuple(KEYS)}
    assert all(len(titles) == 1 for titles in reader.titles), reader.titles
    assert len(reader.titles) > 1
    assert {row[1] for rows in reader.last() for row in rows} == {"later"}
