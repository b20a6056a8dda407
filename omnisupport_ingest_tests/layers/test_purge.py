"""Deleted rows leave the dimension after a time, and nothing that arrives below brings them back."""

from __future__ import annotations

import copy
import shutil
from datetime import timedelta
from pathlib import Path

import pytest

from omnisupport_ingest.contracts.load import contract_of
from omnisupport_ingest.contracts.model import ContractError
from omnisupport_ingest.layers.dimension import dimensions, net_changes
from omnisupport_ingest.layers.events import deduped, raw
from omnisupport_ingest.layers.scheduling.pending import pending_windows
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest_tests.layers.story import CONTRACT, FIRST, SOURCE, START, Change, Commit, Story
from omnisupport_ingest_tests.recovery.traces import contents

pytestmark = pytest.mark.usefixtures("spark")

DAY = 24 * 60 * 60
MONTH_END, AFTER = "2026-01-31T1200", "2026-02-02T1200"

INSERT = Commit(10, 1, [Change("c", key, {"title": f"n{key}", "body": "text"}) for key in (1, 2, 3)])
DELETE = Commit(20, 3, [Change("d", 1)])
HELD_BACK = Commit(15, 2, [Change("u", 1, {"title": "late"}, unchanged=("body",))])
A_MONTH_ON = Commit(1000, 30 * DAY, [Change("u", 2, {"title": "on"}, unchanged=("body",))])
PAST_IT = Commit(2000, 32 * DAY, [Change("u", 2, {"title": "past"}, unchanged=("body",))])


def policy(purge: str | None, *, soft_delete: str | None = None) -> dict:
    document = copy.deepcopy(CONTRACT)
    document["x-cdc"]["events"] = {"soft_delete_column": soft_delete, "purge_deleted_after": purge}
    return document


def told(folder: Path, document: dict) -> Story:
    story = Story(folder)
    story.write_contract(document)
    story.workspace = Workspace.open(story.workspace.settings)
    story.clock = START + timedelta(days=60)
    return story


def run(story: Story, spark, *windows: str, replay: bool = False) -> None:
    for layer in (raw, deduped):
        layer.materialize(story.workspace, spark, SOURCE, windows, "run", replay=replay)
    net_changes.materialize(story.workspace, spark, story.contract, windows, "run", replay=replay)
    dimensions.update(story.workspace, spark, story.contract, "run", whole=replay)


def shown(story: Story, spark) -> dict[int, bool]:
    """The keys that the dimension has, and whether each is deleted."""
    snapshot = story.workspace.dimension(story.contract).open()
    rows = snapshot.read(spark, snapshot.all_files()).collect()
    return {row["id"]: row["_cdc_is_deleted"] for row in rows}


@pytest.fixture(scope="module")
def without_first(tmp_path_factory: pytest.TempPathFactory, spark) -> Story:
    """A home whose first key was deleted and purged."""
    story = told(tmp_path_factory.mktemp("purged") / "told", policy("P30D"))
    story.land(INSERT, DELETE)
    run(story, spark, FIRST)
    assert shown(story, spark) == {1: True, 2: False, 3: False}
    story.land(A_MONTH_ON)
    run(story, spark, MONTH_END)
    # Thirty days and a second less than the watermark, cut to the hour.
    assert shown(story, spark) == {1: True, 2: False, 3: False}
    story.land(PAST_IT)
    run(story, spark, AFTER)
    assert shown(story, spark) == {2: False, 3: False}
    return story


@pytest.fixture
def purged(without_first: Story, tmp_path: Path) -> Story:
    return without_first.copied(tmp_path / "told")


@pytest.mark.slow
def test_a_purged_key_stays_gone_when_events_below_its_delete_come_late_or_again(purged, spark):
    purged.land_again(HELD_BACK)
    run(purged, spark, FIRST)
    assert shown(purged, spark) == {2: False, 3: False}
    purged.land_again(INSERT)
    run(purged, spark, FIRST, MONTH_END, AFTER, replay=True)
    assert shown(purged, spark) == {2: False, 3: False}
    assert pending_windows(purged.workspace, SOURCE).windows == ()


@pytest.mark.slow
def test_a_purged_key_that_is_inserted_again_comes_back(purged, spark):
    purged.land(Commit(3000, 32 * DAY + 1, [Change("c", 1, {"title": "back", "body": None})]))
    run(purged, spark, AFTER)
    assert shown(purged, spark) == {1: False, 2: False, 3: False}


@pytest.mark.slow
def test_a_rebuild_purges_the_same_rows(purged, tmp_path, spark):
    whole = told(tmp_path / "whole", policy("P30D"))
    shutil.copytree(purged.store.folder, whole.store.folder, dirs_exist_ok=True)
    run(whole, spark, FIRST, MONTH_END, AFTER)
    assert contents(whole.workspace) == contents(purged.workspace)


def test_no_row_goes_before_what_may_still_be_judged_in_time_has_arrived(tmp_path, spark):
    document = policy("PT1H")
    document["x-cdc"]["lateness"] = {"allowed": "PT1H", "max": "P31D"}
    story = told(tmp_path / "told", document)
    story.land(INSERT, DELETE, A_MONTH_ON)
    run(story, spark, FIRST, MONTH_END)
    assert shown(story, spark) == {1: True, 2: False, 3: False}
    story.land(PAST_IT)
    run(story, spark, AFTER)
    assert shown(story, spark) == {2: False, 3: False}


def test_a_row_that_its_source_only_marks_as_deleted_stays(tmp_path, spark):
    story = told(tmp_path / "told", policy("P30D", soft_delete="body"))
    story.land(INSERT, DELETE, A_MONTH_ON, PAST_IT)
    run(story, spark, FIRST, MONTH_END, AFTER)
    assert shown(story, spark) == {2: True, 3: True}


@pytest.mark.slow
def test_a_run_that_died_before_its_dimension_leaves_the_purge_pending(tmp_path, spark):
    story = told(tmp_path / "told", policy("P30D"))
    story.land(INSERT, DELETE, A_MONTH_ON)
    run(story, spark, FIRST, MONTH_END)
    # Another copy brings the watermark on and changes no content.
    story.land_again(A_MONTH_ON)
    story.land(Commit(2000, 32 * DAY, [Change("m")]))
    for layer in (raw, deduped):
        layer.materialize(story.workspace, spark, SOURCE, [MONTH_END, AFTER], "run")
    net_changes.materialize(story.workspace, spark, story.contract, [MONTH_END, AFTER], "run")
    assert shown(story, spark) == {1: True, 2: False, 3: False}
    windows = pending_windows(story.workspace, SOURCE).windows
    assert AFTER in windows
    run(story, spark, *windows)
    assert shown(story, spark) == {2: False, 3: False}
    while windows := pending_windows(story.workspace, SOURCE).windows:
        run(story, spark, *windows)


@pytest.mark.parametrize("text", ["30 days", "P1M", ""])
def test_a_time_that_is_no_duration_is_refused_by_name(tmp_path, text):
    with pytest.raises(ContractError, match=r"x-cdc\.events\.purge_deleted_after"):
        contract_of(policy(text), tmp_path / "notes.json")


@pytest.mark.parametrize(("text", "meant"), [(None, None), ("P30D", timedelta(days=30))])
def test_a_contract_says_how_long_deleted_rows_are_shown(tmp_path, text, meant):
    assert contract_of(policy(text), tmp_path / "notes.json").purge_deleted_after == meant
    assert contract_of(copy.deepcopy(CONTRACT), tmp_path / "notes.json").purge_deleted_after is None
