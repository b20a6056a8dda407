"""A run visits the tables with news; others cost no step, no commit and no check until a window closes."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import dagster as dg
import pytest

from omnisupport_ingest.definitions import build_definitions
from omnisupport_ingest.defs import keys
from omnisupport_ingest.defs.direct_run import WindowRun, run_windows
from omnisupport_ingest.layers.scheduling.pending import Pending, pending_windows
from omnisupport_ingest.windows import WindowRange
from omnisupport_ingest_tests.layers import story as stories
from omnisupport_ingest_tests.layers.story import SOURCE
from omnisupport_ingest_tests.layers.three_tables import TABLES, ThreeTables

pytestmark = pytest.mark.usefixtures("spark")

EVENTS = {keys.raw_key(SOURCE), keys.deduped_key(SOURCE)}


def dimensions(*tables: str) -> set[dg.AssetKey]:
    return {dg.AssetKey([SOURCE, f"dim_{table}"]) for table in tables}


class Desk:
    """The desk's home and its Dagster instance, with what the sensor's answer would launch."""

    def __init__(self, folder: Path, instance: dg.DagsterInstance) -> None:
        self.story = ThreeTables(folder, lateness={"allowed": "PT30S", "max": "P7D"})
        self.instance = instance
        self.definitions = build_definitions(self.story.workspace)

    def pending(self) -> Pending:
        return pending_windows(self.story.workspace, SOURCE)

    def requests(self) -> list[dg.RunRequest]:
        sensor = self.definitions.get_repository_def().get_sensor_def(f"wal_batches_{SOURCE}")
        context = dg.build_sensor_context(self.instance, definitions=self.definitions)
        return list(sensor(context, workspace=self.story.workspace).run_requests or [])

    def run(self) -> set[dg.AssetKey]:
        """One run over all that is pending; the assets that it made."""
        found = self.pending()
        windows = WindowRange(found.windows[0], found.windows[-1])
        return self.made_by(windows, tables=found.tables)

    def made_by(self, windows: WindowRange, **how: object) -> set[dg.AssetKey]:
        done = run_windows(self.instance, self.definitions, WindowRun(SOURCE, windows, None, **how))  # type: ignore[arg-type]
        assert done.succeeded
        logs = self.instance.all_logs(done.run_id, of_type=dg.DagsterEventType.ASSET_MATERIALIZATION)
        self.checked = {
            each.dagster_event.asset_check_evaluation_data.asset_check_key
            for each in self.instance.all_logs(
                done.run_id, of_type=dg.DagsterEventType.ASSET_CHECK_EVALUATION
            )
            if each.dagster_event is not None
        }
        return {each.dagster_event.asset_key for each in logs if each.dagster_event is not None}  # type: ignore[misc]

    def commits(self) -> dict[str, tuple[int, int]]:
        """The versions of net changes and dimension of each table."""
        workspace = self.story.workspace
        return {
            name: (
                workspace.net_changes(self.story.of(name)).open().version,
                workspace.dimension(self.story.of(name)).open().version,
            )
            for name in TABLES
        }

    def contents(self) -> dict[tuple[str, str], str]:
        """The content hash of each window of each table's net changes, and of its dimension."""
        found = {}
        for name in TABLES:
            for table in (self.story.workspace.net_changes, self.story.workspace.dimension):
                snapshot = table(self.story.of(name)).open()
                for window in snapshot.windows():
                    state = snapshot.state(window)
                    assert state is not None
                    found[snapshot.table.spec.path, window] = state.checkpoint.content_hash
        return found


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    start = datetime.now(UTC).replace(second=0, microsecond=0) - timedelta(minutes=10)
    monkeypatch.setattr(stories, "START", start)
    with dg.DagsterInstance.ephemeral() as instance:
        yield Desk(tmp_path / "desk", instance)


def test_tables_without_news_are_visited_when_their_window_closes(desk: Desk) -> None:
    story = desk.story
    (first,) = story.land_of(1, *TABLES).windows
    assert desk.run() == EVENTS | dimensions(*TABLES)
    assert {key.asset_key for key in desk.checked} > dimensions(*TABLES)
    before = desk.commits()

    story.land_of(5, "notes")
    (request,) = desk.requests()
    assert set(request.asset_selection or ()) == EVENTS | dimensions("notes")
    assert desk.run() == EVENTS | dimensions("notes")
    assert {key.asset_key for key in desk.checked} == {
        keys.landing_key(SOURCE),
        keys.deduped_key(SOURCE),
        *dimensions("notes"),
    }
    assert {key.name for key in desk.checked} >= {"chain_unbroken", "windows_settled", "complete", "fresh"}
    assert desk.checked == set(request.asset_check_keys or ())
    after = desk.commits()
    assert {name for name in TABLES if after[name] != before[name]} == {"notes"}
    assert desk.pending().nothing

    (second,) = story.land_of(65, "tags").windows
    assert desk.run() == EVENTS | dimensions("tags")
    materialized = desk.instance.get_materialized_partitions
    (labels,) = dimensions("labels")
    assert materialized(labels) == {first}

    # Two windows close. One run makes them in every layer, and then nothing is left to do.
    (third,) = story.land_of(185, "notes").windows
    assert desk.pending().windows == (first, second, third)
    (request,) = [
        each for each in desk.requests() if each.tags["dagster/asset_partition_range_start"] == first
    ]
    assert request.asset_selection is None
    for windows in (WindowRange(first, second), WindowRange(third, third)):
        assert desk.made_by(windows, tables=desk.pending().tables) >= EVENTS | dimensions("notes")
    assert desk.pending().nothing
    assert materialized(labels) >= {first, second}
    for name in TABLES:
        net_changes = story.workspace.net_changes(story.of(name)).open()
        assert {window: net_changes.state(window).closed for window in (first, second)} == {
            first: True,
            second: True,
        }, name

    found = desk.contents()
    again = {keys.REASON_TAG: "to see"}
    for windows in (WindowRange(first, second), WindowRange(third, third)):
        assert desk.made_by(windows, replay=again) == EVENTS | dimensions(*TABLES)
    replayed = desk.contents()
    assert {each: replayed[each] for each in found} == found
    assert desk.pending().nothing


def test_a_refused_event_of_one_table_visits_no_other(desk: Desk) -> None:
    desk.story.land_of(1, *TABLES)
    desk.run()
    before = desk.commits()
    desk.story.land_of(5, "notes", title="longer than twenty characters")
    assert desk.run() == EVENTS | dimensions("notes")
    assert desk.pending().nothing
    after = desk.commits()
    assert {name for name in TABLES if after[name] != before[name]} == {"notes"}
