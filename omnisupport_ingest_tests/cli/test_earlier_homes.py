"""Homes that earlier commits of this program made: refused or taken as they are, upgraded, gone on with."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import duckdb
import pytest
from deltalake import DeltaTable

from omnisupport_ingest.cli.opening import open_settings
from omnisupport_ingest.home import FORMAT_VERSION
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest_tests.cli.command import command
from omnisupport_ingest_tests.earlier_homes import FIXTURES, unpack
from omnisupport_ingest_tests.layers.story import SOURCE, START, Change, Commit, Story

FIRST = "home-1-0f12d4fd.tar.gz"
"""Made by commit 0f12d4fd: net changes in ``dim_notes``, the current state in ``published/notes``."""

LATER = sorted(each.name for each in FIXTURES.glob(f"home-{FORMAT_VERSION}-*.tar.gz"))

_DAY = 86_400

LIVE = [
    (1, "eins", "text", False),
    (2, "note 2", "text", True),
    (3, "note 3", "text", True),
    (4, "vier", None, False),
    (5, "note 5", "text", False),
    (33, "moved", "text", False),
]
"""What the story of the fixtures comes to: id, title, body, whether it is deleted. An event of the row 6 is
in quarantine, so that row stays as it was, whatever that is."""


@pytest.fixture
def earlier(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """The home of the fixture that the test names, as the home of the settings."""
    environment = dict(os.environ)
    home = unpack(request.param, tmp_path)
    monkeypatch.chdir(tmp_path)
    for name, value in (
        ("HOME", str(home)),
        ("CONTRACTS_DIR", str(tmp_path / "contracts")),
        ("SPARK_DRIVER_MEMORY", "1g"),
    ):
        monkeypatch.setenv(f"OMNISUPPORT_{name}", value)
    yield home
    # A command that starts Dagster sets variables for the rest of its process.
    os.environ.clear()
    os.environ.update(environment)


def rows(table: Path) -> list[tuple[object, ...]]:
    files = DeltaTable(str(table)).file_uris()
    files = [each for each in files if "/state-" not in each]
    shown = "id, title, body, _cdc_is_deleted"
    return duckdb.sql(f"SELECT {shown} FROM read_parquet({files}, union_by_name=true) ORDER BY id").fetchall()


def known(rows: list[tuple[object, ...]]) -> list[tuple[object, ...]]:
    return [row for row in rows if row[0] != 6]


def landing_is_whole() -> None:
    store = Workspace.open(open_settings()).landing(SOURCE)
    batches = store.manifests()
    for each in batches:
        store.verify(each)
    assert len(batches) >= 5


def go_on() -> None:
    """Land a batch that continues the stream of the story, and take it through the layers."""
    story = Story.__new__(Story)
    story.workspace = Workspace.open(open_settings())
    story.store = story.workspace.landing(SOURCE)
    last = story.store.last_stream(1)
    assert last is not None and last.stream is not None
    story.clock, story._ends = START + timedelta(days=3), {1: last.stream.end_lsn}
    story.land(
        Commit(60, 2 * _DAY, [Change("u", 1, {"title": "one again"}, unchanged=("body",)), Change("d", 5)])
    )
    done = command("materialize")
    assert done.code == 0, done.output


def expected_after() -> list[tuple[object, ...]]:
    changed: dict[object, tuple[object, ...]] = {
        1: (1, "one again", "text", False),
        5: (5, "note 5", "text", True),
    }
    return [changed.get(row[0], row) for row in LIVE]


@pytest.mark.slow
@pytest.mark.parametrize("earlier", [FIRST], indirect=True)
def test_a_home_that_the_first_format_made_is_rebuilt_and_goes_on(earlier: Path) -> None:
    published = earlier / "lake" / SOURCE / "published" / "notes"
    before = rows(published)
    assert known(before) == LIVE
    refused = command("status")
    assert (refused.code, "omnisupport-ingest rebuild" in refused.output) == (3, True)
    done = command("rebuild")
    assert done.code == 0, done.output
    assert not published.exists()
    dimension = earlier / "lake" / SOURCE / "dim_notes"
    assert rows(dimension) == before
    landing_is_whole()
    go_on()
    assert known(rows(dimension)) == expected_after()


@pytest.mark.slow
@pytest.mark.parametrize("earlier", LATER, indirect=True)
def test_a_home_that_an_earlier_version_of_this_format_made_is_taken_as_it_is(earlier: Path) -> None:
    dimension = earlier / "lake" / SOURCE / "dim_notes"
    before = rows(dimension)
    assert known(before) == LIVE
    assert command("status").code == 0
    done = command("materialize")
    assert done.code == 0, done.output
    assert rows(dimension) == before
    landing_is_whole()
    go_on()
    assert known(rows(dimension)) == expected_after()
