"""Windows that the watermark has closed are folded into few files, and nobody below or beside notices.

What is compared with: a twin home with the same landing whose contract never lets a window close.
"""

from __future__ import annotations

import copy
import json
import shutil
import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from random import Random

import pytest
from deltalake import DeltaTable

from omnisupport_ingest.contracts.load import load_contracts
from omnisupport_ingest.lake.state import WindowState
from omnisupport_ingest.lake.table import LakeTable
from omnisupport_ingest.layers.closing import CompactionDiffers
from omnisupport_ingest.layers.dimension import dimensions, net_changes
from omnisupport_ingest.layers.events import deduped, raw
from omnisupport_ingest.layers.scheduling.pending import pending_windows
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest_tests.layers.story import (
    CONTRACT,
    FIRST,
    SECOND,
    SOURCE,
    START,
    Change,
    Commit,
    Story,
)
from omnisupport_ingest_tests.recovery.traces import contents

pytestmark = pytest.mark.usefixtures("spark")

INSERT = Commit(
    10, 1, [Change("c", 1, {"title": "one", "body": "long"}), Change("c", 2, {"title": "two", "body": "B2"})]
)
UPDATE = Commit(20, 2, [Change("u", 1, {"title": "uno"}, unchanged=("body",))])
AGAIN = Commit(30, 3, [Change("u", 2, {"title": "dos"}, unchanged=("body",))])
LATER = Commit(1000, 2 * 60 * 60, [Change("c", 3, {"title": "later", "body": None})])
LATER_WINDOW = "2026-01-01T1400"
LATE = Commit(1010, 4, [Change("u", 1, {"title": "late"}, unchanged=("body",))])


@pytest.fixture
def story(tmp_path: Path) -> Story:
    told = Story(tmp_path / "told")
    told.clock = START + timedelta(hours=3)
    return told


def run(story: Story, spark, *windows: str, replay: bool = False) -> None:
    raw.materialize(story.workspace, spark, SOURCE, windows, "run", replay=replay)
    below_raw(story, spark, *windows, replay=replay)


def below_raw(story: Story, spark, *windows: str, replay: bool = False) -> None:
    deduped.materialize(story.workspace, spark, SOURCE, windows, "run", replay=replay)
    net_changes.materialize(story.workspace, spark, story.contract, windows, "run", replay=replay)


def publish(story: Story, spark) -> None:
    dimensions.update(story.workspace, spark, story.contract, "run")


def pending(story: Story, spark) -> tuple[str, ...]:
    """The windows to ask for, once the dimension shows what the dimension has."""
    publish(story, spark)
    return pending_windows(story.workspace, SOURCE).windows


def layers(story: Story) -> dict[str, LakeTable]:
    return {
        "raw": story.workspace.raw(SOURCE),
        "deduped": story.workspace.deduped(SOURCE),
        "net_changes": story.workspace.net_changes(story.contract),
    }


def states(story: Story, window: str = FIRST) -> dict[str, WindowState]:
    found = {name: table.open().state(window) for name, table in layers(story).items()}
    assert all(found.values())
    return found


def files(story: Story, layer: str, window: str = FIRST) -> list[str]:
    return [file.path for file in layers(story)[layer].open().files(window)]


def closed(story: Story, window: str = FIRST) -> dict[str, bool]:
    return {name: state.closed for name, state in states(story, window).items()}


OPEN = {"raw": False, "deduped": False, "net_changes": False}
CLOSED = {"raw": True, "deduped": True, "net_changes": True}


def three_appends(story: Story, spark) -> None:
    for commit in (INSERT, UPDATE, AGAIN):
        story.land(commit)
        run(story, spark, FIRST)
    assert len(files(story, "raw")) == len(files(story, "deduped")) == 3


def three_appends_closed(story: Story, spark) -> None:
    three_appends(story, spark)
    story.land(LATER)
    run(story, spark, FIRST, LATER_WINDOW)
    assert closed(story) == CLOSED


def test_a_window_closes_at_the_lowest_watermark_of_the_slots_of_its_database(story: Story, spark):
    """Two slots share a database: what one has passed is open until the other has passed it too."""
    beside = copy.deepcopy(CONTRACT)
    beside["x-cdc"] |= {"source": "desk_lines", "table": "lines"}
    (story.contracts / "lines.json").write_text(json.dumps(beside))
    definitions = story.contracts.parent / "sources"
    definitions.mkdir()
    for name in (SOURCE, "desk_lines"):
        document = {
            "$schema": CONTRACT["$schema"],
            "name": name,
            "kind": "postgres_log",
            "description": "A slot of the desk.",
            "connection": {"env": "DESK_URL"},
            "database": "desk_database",
            "log": {"slot": name, "publication": name},
        }
        (definitions / f"{name}.json").write_text(json.dumps(document))
    story.workspace = replace(story.workspace, contracts=load_contracts(story.contracts))
    lines = copy.copy(story)
    lines.store, lines._ends = story.workspace.landing("desk_lines"), {}

    story.land(INSERT)
    story.land(LATER)
    run(story, spark, FIRST, LATER_WINDOW)
    assert closed(story) == OPEN
    assert story.workspace.closing_watermark(SOURCE) is None

    lines.land(INSERT)
    early = story.workspace.closing_watermark(SOURCE)
    assert early == lines.store.landed().watermark < story.store.landed().watermark
    run(story, spark, FIRST, LATER_WINDOW)
    assert closed(story) == OPEN and FIRST not in pending(story, spark)

    lines.land(LATER)
    # Nothing has landed from the slot itself, and the next look asks for the window.
    assert FIRST in pending(story, spark)
    run(story, spark, FIRST, LATER_WINDOW)
    assert closed(story) == CLOSED
    assert story.workspace.closing_watermark("desk_lines") == story.workspace.closing_watermark(SOURCE)


def twin_of(story: Story, folder: Path, spark, windows: list[str]) -> Story:
    """A home with the same landing, taken in at once, in which no window ever closes."""
    twin = Story(folder)
    document = json.loads((story.contracts / "notes.json").read_text())
    document["x-cdc"]["lateness"] = {"allowed": "P9999D", "max": "P9999D"}
    twin.write_contract(document)
    shutil.copytree(story.store.folder, twin.store.folder, dirs_exist_ok=True)
    twin.workspace = Workspace.open(twin.workspace.settings)
    run(twin, spark, *windows)
    publish(twin, spark)
    for table in layers(twin).values():
        snapshot = table.open()
        assert not any(state.closed for each in snapshot.windows() if (state := snapshot.state(each)))
    return twin


def last_entry(table: LakeTable) -> list[dict]:
    version = DeltaTable(str(table.folder)).version()
    return [
        json.loads(line)
        for line in (table.folder / "_delta_log" / f"{version:020}.json").read_text().splitlines()
    ]


@pytest.mark.slow
def test_a_closed_window_is_one_file_per_partition_with_the_rows_it_had(story, spark, tmp_path):
    three_appends(story, spark)
    before = states(story)
    version = {name: table.open().version for name, table in layers(story).items()}
    story.land(LATER)
    run(story, spark, LATER_WINDOW)
    assert closed(story) == OPEN
    assert pending(story, spark) == (FIRST,)

    run(story, spark, FIRST)
    assert pending(story, spark) == ()
    after = states(story)
    assert closed(story) == CLOSED
    assert [len(files(story, layer)) for layer in ("raw", "deduped")] == [1, 1]
    for name, state in after.items():
        assert state.checkpoint.content_hash == before[name].checkpoint.content_hash
        assert state.checkpoint.idempotency_key == before[name].checkpoint.idempotency_key
        assert (state.generation, state.inputs) == (before[name].generation, before[name].inputs)
        # The later window, and the closing.
        assert layers(story)[name].open().version == version[name] + 2
        actions = [
            each[kind]
            for each in last_entry(layers(story)[name])
            for kind in ("add", "remove")
            if kind in each
        ]
        assert [each["dataChange"] for each in actions] == [False] * len(actions)
        (note,) = [each["commitInfo"] for each in last_entry(layers(story)[name]) if "commitInfo" in each]
        noted = note["omnisupport_ingest"]
        assert [(each["window"], each["closed"]) for each in noted["windows"]] == [(FIRST, True)]
    publish(story, spark)
    twin = twin_of(story, tmp_path / "twin", spark, [FIRST, LATER_WINDOW])
    assert contents(story.workspace) == contents(twin.workspace)


@pytest.mark.slow
def test_a_late_event_opens_the_window_and_only_that_event_is_judged_and_folded(story, spark, tmp_path):
    three_appends_closed(story, spark)
    generation = states(story)["deduped"].generation
    story.land(LATE)
    run(story, spark, FIRST)
    assert closed(story) == OPEN
    assert states(story)["deduped"].generation == generation
    assert [len(files(story, layer)) for layer in ("raw", "deduped")] == [2, 2]
    assert pending(story, spark) == (FIRST,)

    run(story, spark, FIRST)
    assert closed(story) == CLOSED
    assert [len(files(story, layer)) for layer in ("raw", "deduped")] == [1, 1]
    names = [path for layer in ("raw", "deduped") for path in files(story, layer)]
    folded = {layer: states(story)[layer].compacted_units for layer in ("raw", "deduped")}
    assert [path for units in folded.values() for path in units] == names
    assert [len(set(folded[layer][path])) for layer, path in zip(folded, names, strict=True)] == [4, 4]
    publish(story, spark)
    twin = twin_of(story, tmp_path / "twin", spark, [FIRST, LATER_WINDOW])
    assert contents(story.workspace) == contents(twin.workspace)


@pytest.mark.slow
def test_a_replayed_window_is_written_whole_and_closed_by_the_same_commit(story, spark):
    three_appends_closed(story, spark)
    before = states(story)
    run(story, spark, FIRST, replay=True)
    after = states(story)
    assert closed(story) == CLOSED
    for name, state in after.items():
        assert state.checkpoint.content_hash == before[name].checkpoint.content_hash
        assert state.generation > before[name].generation
        assert not state.compacted_units
    assert pending(story, spark) == ()


@pytest.mark.slow
def test_layers_below_that_took_part_of_what_was_folded_begin_again(story, spark, tmp_path):
    three_appends(story, spark)
    story.land(Commit(40, 6, [Change("u", 1, {"title": "tres"}, unchanged=("body",))]), LATER)
    behind = states(story)["deduped"]
    windows = (FIRST, LATER_WINDOW)
    # The first call takes the batch, the second one closes; deduped has seen neither.
    for _ in range(2):
        raw.materialize(story.workspace, spark, SOURCE, windows, "run")
    assert len(files(story, "raw")) == 1
    below_raw(story, spark, *windows)
    now = states(story)["deduped"]
    assert now.generation > behind.generation
    assert now.checkpoint.changed_by == ("new events",)
    publish(story, spark)
    twin = twin_of(story, tmp_path / "twin", spark, list(windows))
    assert contents(story.workspace) == contents(twin.workspace)


@pytest.mark.slow
def test_layers_below_that_took_nothing_read_what_was_folded(story, spark, tmp_path):
    for commit in (INSERT, UPDATE):
        story.land(commit)
        raw.materialize(story.workspace, spark, SOURCE, [FIRST], "run")
    story.land(LATER)
    for window in (LATER_WINDOW, FIRST):
        raw.materialize(story.workspace, spark, SOURCE, [window], "run")
    assert len(files(story, "raw")) == 1
    below_raw(story, spark, FIRST, LATER_WINDOW)
    assert states(story)["deduped"].generation == 1
    assert len(states(story)["deduped"].inputs) == 2
    publish(story, spark)
    twin = twin_of(story, tmp_path / "twin", spark, [FIRST, LATER_WINDOW])
    assert contents(story.workspace) == contents(twin.workspace)


@pytest.mark.slow
def test_who_opened_the_table_before_reads_on_while_its_window_is_folded(story, spark):
    three_appends(story, spark)
    snapshot = layers(story)["raw"].open()
    story.land(LATER)
    run(story, spark, FIRST, LATER_WINDOW)
    run(story, spark, FIRST)
    assert len(files(story, "raw")) == 1
    assert len(snapshot.files(FIRST)) == 3
    assert snapshot.read(spark, snapshot.files(FIRST)).count() == 4


@pytest.mark.slow
def test_files_that_are_not_what_the_checkpoint_says_are_not_folded(story, spark):
    three_appends(story, spark)
    snapshot = layers(story)["raw"].open()
    one, other = (Path(file.uri) for file in snapshot.files(FIRST)[:2])
    shutil.copy(one, other)
    # What Hadoop writes beside a file would tell, where it is still there.
    other.with_name(f".{other.name}.crc").unlink(missing_ok=True)
    story.land(LATER)
    run(story, spark, LATER_WINDOW)
    version = layers(story)["raw"].open().version
    with pytest.raises(CompactionDiffers, match=FIRST) as refused:
        raw.materialize(story.workspace, spark, SOURCE, [FIRST], "run")
    assert "Materialize this window" in refused.value.fix
    assert layers(story)["raw"].open().version == version
    run(story, spark, FIRST, replay=True)
    assert closed(story) == CLOSED


@pytest.mark.slow
def test_two_runs_that_close_one_window_at_once_close_it_once(story, spark):
    three_appends(story, spark)
    story.land(LATER)
    run(story, spark, LATER_WINDOW)
    version = layers(story)["raw"].open().version
    failures: list[BaseException] = []

    def close() -> None:
        try:
            raw.materialize(Workspace.open(story.workspace.settings), spark, SOURCE, [FIRST], "run")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=close) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert layers(story)["raw"].open().version == version + 1
    assert states(story)["raw"].closed
    assert len(files(story, "raw")) == 1


@pytest.mark.slow
def test_a_stale_window_that_may_wait_is_not_made_again_for_being_closed(story, spark, tmp_path):
    three_appends(story, spark)
    story.land(LATER)
    run(story, spark, LATER_WINDOW)
    publish(story, spark)
    table = tmp_path / "decisions.csv"
    text = Path(story.workspace.decisions.path).read_text()
    lines = [
        line.replace("replay_window", "wait") if line.startswith("contract_change") else line
        for line in text.splitlines()
    ]
    assert "\n".join(lines) != text.rstrip("\n")
    table.write_text("\n".join(lines) + "\n")
    document = copy.deepcopy(CONTRACT)
    document["description"] = "Another description."
    story.write_contract(document)
    settings = story.workspace.settings.model_copy(update={"decision_table": table})
    story.workspace = Workspace.open(settings)
    assert pending_windows(story.workspace, SOURCE).windows == ()


TITLES = ["a", "bb", "ccc", "dddddddddddd"]


class TestRandomSchedules:
    """Appends, closings, late appends, copies, replays, another contract, layers that fall behind."""

    @pytest.mark.drawn(2)
    @pytest.mark.slow
    @pytest.mark.parametrize("seed", range(1, 8))
    def test_end_as_the_twin_that_never_closes(self, story, spark, tmp_path, seed):
        rng = Random(seed)
        windows = [FIRST, SECOND, LATER_WINDOW]
        lsn, was_closed = 10, 0
        landed: list[Commit] = []
        for step in range(10):
            for _ in range(rng.randrange(1, 3)):
                commit = _commit(rng, lsn, later=step > 3)
                lsn += 10
                story.land(commit)
                landed.append(commit)
            if rng.random() < 0.2:
                story.land_again(rng.choice(landed))
                lsn += 10
            if rng.random() < 0.15:
                document = copy.deepcopy(CONTRACT)
                document["properties"]["title"]["maxLength"] = rng.choice([2, 5, 20])
                story.write_contract(document)
                story.workspace = Workspace.open(story.workspace.settings)
            some = rng.sample(windows, rng.randrange(1, 4))
            raw.materialize(story.workspace, spark, SOURCE, some, "run", replay=rng.random() < 0.1)
            if rng.random() < 0.7:
                below_raw(story, spark, *some, replay=rng.random() < 0.1)
            was_closed += sum(
                bool(state.compacted_units)
                for table in layers(story).values()
                if table.exists
                for window in windows
                if (state := table.open().state(window)) is not None
            )
        assert was_closed
        for _ in range(2):
            run(story, spark, *windows)
        publish(story, spark)
        assert pending(story, spark) == ()
        twin = twin_of(story, tmp_path / "twin", spark, windows)
        assert contents(story.workspace) == contents(twin.workspace)


def _commit(rng: Random, lsn: int, *, later: bool) -> Commit:
    second = rng.choice([1, 2, 61, 62, *([2 * 60 * 60] * 2 if later else [])])
    op, key = rng.choice("cuud"), rng.randrange(1, 5)
    if op == "d":
        return Commit(lsn, second, [Change("d", key)])
    values = {"title": rng.choice(TITLES), "body": rng.choice(["text", None])}
    if op == "u" and rng.random() < 0.5:
        return Commit(lsn, second, [Change("u", key, {"title": values["title"]}, unchanged=("body",))])
    return Commit(lsn, second, [Change(op, key, values)])
