"""Dagster is asked as often for many windows as for few, and each window has entries of its own."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path

import dagster as dg
import pytest

from omnisupport_ingest.definitions import build_definitions
from omnisupport_ingest.defs import keys
from omnisupport_ingest.defs.backfills import Backfill, launch_backfill
from omnisupport_ingest.defs.direct_run import WindowRun, run_windows
from omnisupport_ingest.lake.table import LakeTable
from omnisupport_ingest.windows import WindowRange
from omnisupport_ingest_tests.layers import story as stories
from omnisupport_ingest_tests.layers.story import SOURCE, Change, Commit, Story

FEW, MANY = 3, 30


class Asked:
    """How often partitions are listed or asked for, and how many are."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found = Counter[str]()
        partitions = dg.TimeWindowPartitionsDefinition
        listed, has = partitions.get_partition_keys_in_time_window, partitions.has_partition_key

        def counted(definition: dg.TimeWindowPartitionsDefinition, window: dg.TimeWindow) -> object:
            self.found["lists"] += 1
            return listed(definition, window)

        def counted_has(definition: dg.TimeWindowPartitionsDefinition, key: str) -> bool:
            self.found["questions"] += 1
            return has(definition, key)

        monkeypatch.setattr(partitions, "get_partition_keys_in_time_window", counted)
        monkeypatch.setattr(partitions, "has_partition_key", counted_has)


def keys_of_windows(start: datetime, count: int) -> list[str]:
    return [f"{start + timedelta(minutes=number):%Y-%m-%dT%H%M}" for number in range(count)]


def told_story(folder: Path, start: datetime, count: int) -> Story:
    story = Story(folder)
    story.clock = start + timedelta(minutes=count)
    values = {"title": "a", "body": None}
    story.land(
        *(Commit(100 + number, 60 * number + 1, [Change("c", number, values)]) for number in range(count))
    )
    return story


def shown(instance: dg.DagsterInstance, key: dg.AssetKey) -> dict[str | None, object]:
    """The idempotency key of each partition of an asset."""
    made = instance.fetch_materializations(dg.AssetRecordsFilter(asset_key=key), limit=1_000).records
    return {each.partition_key: each.asset_materialization.metadata["idempotency_key"].value for each in made}


def held(table: LakeTable, windows: list[str]) -> dict[str | None, object]:
    """The same as the table has them."""
    snapshot = table.open()
    states = {window: snapshot.state(window) for window in windows}
    return {window: state.checkpoint.idempotency_key for window, state in states.items() if state is not None}


@pytest.mark.slow
@pytest.mark.usefixtures("spark")
def test_a_run_lists_its_windows_as_often_whether_they_are_few_or_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = datetime.now(UTC).replace(second=0, microsecond=0) - timedelta(minutes=MANY + 5)
    monkeypatch.setattr(stories, "START", start)
    asked, lists = Asked(monkeypatch), {}
    for count in (FEW, MANY):
        story, windows = told_story(tmp_path / str(count), start, count), keys_of_windows(start, count)
        definitions, workspace = build_definitions(story.workspace), story.workspace
        with dg.DagsterInstance.ephemeral() as instance:
            asked.found.clear()
            done = run_windows(instance, definitions, WindowRun(SOURCE, WindowRange(windows[0], windows[-1])))
            assert done.succeeded, done.failures
            lists[count] = asked.found["lists"]
            for key, table in (
                (keys.raw_key(SOURCE), workspace.raw(SOURCE)),
                (keys.deduped_key(SOURCE), workspace.deduped(SOURCE)),
                (keys.dimension_key(story.contract), workspace.net_changes(story.contract)),
            ):
                found = shown(instance, key)
                assert found == held(table, windows)
                assert len(set(found.values())) == count
    assert lists[MANY] == lists[FEW] > 0


def test_a_backfill_asks_for_each_window_once_however_many_tables_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = datetime.now(UTC).replace(second=0, microsecond=0) - timedelta(minutes=MANY + 5)
    monkeypatch.setattr(stories, "START", start)
    story, windows = told_story(tmp_path, start, MANY), keys_of_windows(start, MANY)
    graph, asked = build_definitions(story.workspace).resolve_asset_graph(), Asked(monkeypatch)
    with dg.DagsterInstance.ephemeral() as instance:
        backfill_id = launch_backfill(instance, graph, Backfill(SOURCE, windows, "to see"))
        backfill = instance.get_backfill(backfill_id)
    assert asked.found["questions"] == MANY
    assert backfill is not None and backfill.asset_backfill_data is not None
    target = backfill.asset_backfill_data.target_subset
    assert len(target.asset_keys) == 3
    for key in target.asset_keys:
        assert sorted(target.get_partitions_subset(key).get_partition_keys()) == windows
