"""A look that remembers earlier ones finds what a look that remembers nothing finds."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from bench.history import SOURCE, History
from omnisupport_ingest.contracts.decision_table import CONTRACT_CHANGE, REPLAY_WINDOW, WAIT
from omnisupport_ingest.lake import looks
from omnisupport_ingest.layers import survey_cache
from omnisupport_ingest.layers.scheduling import pending
from omnisupport_ingest.layers.scheduling.pending import pending_windows, standing_of_windows

PER_WINDOW = 3


def newest(history: History) -> int:
    return (history.batches - 1) // PER_WINDOW


def step(history: History, rng: random.Random) -> str:
    """Let something happen that a look has to notice."""
    what = rng.choice(["land", "land", "land", "run", "run", "half a run", "lose", "restore"])
    manifests = history.workspace.landing(SOURCE).folder / "manifests"
    away = manifests.parent / "away"
    away.mkdir(exist_ok=True)
    number = rng.randint(0, newest(history))
    if what == "land" and not any(away.iterdir()):
        history.seal()
    elif what == "run":
        history.take_in([number, newest(history)] if number != newest(history) else [number])
    elif what == "half a run":
        history.take_in([number], layers=rng.randint(1, 3))
    elif what == "lose":
        file = rng.choice(sorted(manifests.glob("e*.json")))
        file.rename(away / file.name)
    elif what == "restore":
        for file in away.iterdir():
            file.rename(manifests / file.name)
    return what


@pytest.mark.parametrize("seed", range(3))
def test_what_is_remembered_changes_no_answer(tmp_path: Path, seed: int) -> None:
    history, rng = History(tmp_path, PER_WINDOW), random.Random(seed)
    history.grow(4 * PER_WINDOW)
    done = []
    for _ in range(12):
        done.append(step(history, rng))
        fresh = pending_windows(history.opened(), SOURCE)
        assert pending_windows(history.workspace, SOURCE) == fresh, done
    assert len(set(done)) >= 3


def test_a_window_that_loses_all_that_landed_in_it_waits_for_nothing(tmp_path: Path) -> None:
    history = History(tmp_path, PER_WINDOW)
    history.grow(2 * PER_WINDOW)
    landed = history.seal()
    assert pending_windows(history.workspace, SOURCE).batches == 1
    manifests = history.workspace.landing(SOURCE).folder / "manifests"
    (manifests / f"{landed.batch_id}.json").unlink()
    assert pending_windows(history.workspace, SOURCE).batches == 0


def test_a_table_without_a_newer_version_is_not_opened_again(tmp_path: Path) -> None:
    history = History(tmp_path, PER_WINDOW)
    history.grow(2 * PER_WINDOW)
    raw = history.workspace.raw(SOURCE)
    with history.workspace.seen(SOURCE) as seen:
        before = seen.newest(raw)
        assert before is not None and seen.newest(raw) is before
        history.seal()
        history.take_in([1, 2], layers=1)
        after = seen.newest(raw)
    # Of the other window everything was taken in before, so nothing was committed to it.
    assert after is not None and before.mark is not None
    assert after.windows_since(before.mark) == {history.window(2)}
    assert not before.is_newest() and after.is_newest()
    state = after.state(history.window(2))
    assert state is not None and len(state.batches) == 1


def test_a_table_that_was_made_anew_is_another_one(tmp_path: Path) -> None:
    history = History(tmp_path / "one", PER_WINDOW)
    history.grow(2 * PER_WINDOW)
    other = History(tmp_path / "other", PER_WINDOW)
    other.grow(2 * PER_WINDOW)
    before = history.workspace.raw(SOURCE).open()
    mark = before.mark
    log = history.workspace.raw(SOURCE).folder
    log.rename(tmp_path / "gone")
    other.workspace.raw(SOURCE).folder.rename(log)
    assert not before.is_newest()
    assert mark is not None and history.workspace.raw(SOURCE).open().windows_since(mark) is None


def test_windows_that_may_no_longer_wait_are_pending_though_nothing_else_has_changed(tmp_path: Path) -> None:
    history = History(tmp_path, 1)
    # More than a new process looks at without a sign of a change.
    history.grow(2 * survey_cache._LOOKED_AGAIN + 1)
    shipped = history.workspace.decisions

    def stale(action: str) -> int:
        row = replace(shipped.decisions[CONTRACT_CHANGE], action=action)
        decisions = replace(shipped, decisions={**shipped.decisions, CONTRACT_CHANGE: row})
        return len(pending_windows(replace(history.opened(), decisions=decisions), SOURCE).windows)

    path = tmp_path / "contracts" / "notes.json"
    document = json.loads(path.read_text())
    document["properties"]["title"]["maxLength"] = 5
    path.write_text(json.dumps(document))
    assert stale(WAIT) == 0
    assert stale(REPLAY_WINDOW) == history.batches
    assert stale(WAIT) == 0


@contextmanager
def by_another_process() -> Iterator[None]:
    """What is committed here, work that looks once in this process does not hear of."""
    before = Counter(looks._changes)
    yield
    looks._changes.clear()
    looks._changes.update(before)


def test_work_that_looks_once_does_not_fall_behind_what_others_have_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = History(tmp_path, PER_WINDOW)
    history.grow(6 * PER_WINDOW)
    ours = history.workspace.looking_once("a run")
    standing_of_windows(ours, SOURCE)
    with by_another_process():
        history.seal()
        history.take_in([6])
        pending_windows(history.opened(), SOURCE)
    looked_at, original = [], pending._Survey._unsettled

    def counted(survey: pending._Survey, window: str) -> object:
        looked_at.append(window)
        return original(survey, window)

    monkeypatch.setattr(pending._Survey, "_unsettled", counted)
    found = standing_of_windows(ours, SOURCE)
    # Tables as they were before the note would have all seven windows looked at again.
    assert len(looked_at) <= 3
    assert found == standing_of_windows(history.opened(), SOURCE)


def test_work_that_looks_once_never_sees_raw_as_it_was_before_the_events_made_from_it(tmp_path: Path) -> None:
    history = History(tmp_path, PER_WINDOW)
    history.grow(6 * PER_WINDOW)
    ours = history.workspace.looking_once("a run")
    standing_of_windows(ours, SOURCE)
    with by_another_process():
        # A run is between raw and the events, and somebody notes it.
        history.seal()
        history.take_in([6], layers=1)
        pending_windows(history.opened(), SOURCE)
    standing_of_windows(ours, SOURCE)
    with by_another_process():
        history.seal()
        history.take_in([6])
    found = standing_of_windows(ours, SOURCE)
    assert found.wrong == ()
