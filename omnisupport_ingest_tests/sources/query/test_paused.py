"""While a source is paused, a comparison lands nothing: a restore that goes on would look like deletes."""

from __future__ import annotations

from pathlib import Path

import pytest

from omnisupport_ingest.contracts.sources import sources_in_force
from omnisupport_ingest.read.lake_keys import DimensionKeys
from omnisupport_ingest.sources.postgres.capture.requests import PauseRequest
from omnisupport_ingest.sources.query import compare as comparing
from omnisupport_ingest.sources.query.errors import QueryPaused
from omnisupport_ingest.sources.query.reader import KeyBounds
from omnisupport_ingest.sources.query.run import QuerySource
from omnisupport_ingest_tests.sources.query.platform_of_desk import Platform
from omnisupport_ingest_tests.sources.query.test_compare import alive, lake
from omnisupport_ingest_tests.sources.query.tickets import SOURCE, Desk

TABLE = "public.tickets"


@pytest.fixture
def platform(desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Platform:
    """A home that has read 400 tickets, of which the source has half now."""
    found = Platform(desk, tmp_path, monkeypatch)
    desk.run("INSERT INTO tickets SELECT n, 'x' FROM generate_series(1, 400) AS n")
    found.sync()
    desk.run("DELETE FROM tickets WHERE id % 2 = 0")
    desk.folder = found.home.landing
    return found


def source(platform: Platform) -> QuerySource:
    contracts = platform.workspace.contracts
    return QuerySource.of(
        sources_in_force(platform.settings, contracts).find(SOURCE), contracts, platform.home
    )


def test_a_paused_source_is_not_compared(desk: Desk, platform: Platform, tmp_path: Path) -> None:
    pause = PauseRequest(desk.store.folder)
    pause.write("pg_restore")
    with pytest.raises(QueryPaused, match=r"is paused since .* \(pg_restore\)"):
        source(platform).compare({TABLE: lake(desk, tmp_path)})
    assert len(alive(desk)) == 400
    pause.clear()
    found = source(platform).compare({TABLE: lake(desk, tmp_path)})
    assert found.finished and found.tables[0].deleted == 200
    assert len(alive(desk)) == 200


class PausesAfter(DimensionKeys):
    """Keys of the lake; the source is paused as so many checksums have been computed."""

    left: int
    pause: PauseRequest

    def checksum(self, bounds: KeyBounds, /) -> comparing.RowChecksum:
        self.left -= 1
        if self.left == 0:
            self.pause.write("pg_restore")
        return super().checksum(bounds)


def test_a_pause_ends_a_comparison_between_two_ranges_of_keys(
    desk: Desk, platform: Platform, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparing, "LEAF_ROWS", 50)
    whole = lake(desk, tmp_path)
    keys = PausesAfter(platform.contract, [str(tmp_path / "dimension.parquet")], tmp_path)
    keys.left, keys.pause = 4, PauseRequest(desk.store.folder)
    found = source(platform).compare({TABLE: keys})
    (table,) = found.tables
    assert table.checksums == 4 and not table.finished and not found.finished
    # What it had found is of the time before the pause, and has landed.
    assert 0 < table.deleted < 200
    assert len(alive(desk)) == 400 - table.deleted
    keys.pause.clear()
    assert source(platform).compare({TABLE: whole}).finished
    assert len(alive(desk)) == 200
