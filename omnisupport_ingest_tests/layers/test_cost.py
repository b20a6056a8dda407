"""What sealing a batch, a sensor's tick and planning a run read does not follow how much there ever was.

Counted are files of the home that are opened, names that are listed in its folders, and manifests and
states that are parsed; never seconds.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable, ItemsView, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bench.history import SOURCE, START, History
from omnisupport_ingest.cdc.broken_rules import BrokenRules, RuleOfWindow
from omnisupport_ingest.lake import listing, state
from omnisupport_ingest.landing import store
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.layers.events import deduped, raw
from omnisupport_ingest.layers.events.event_tasks import Judged
from omnisupport_ingest.layers.events.judging_rules import rule_results
from omnisupport_ingest.layers.plan import WindowPlan, Work
from omnisupport_ingest.layers.removed import Removal, Removed
from omnisupport_ingest.layers.scheduling.pending import pending_windows
from omnisupport_ingest.layers.survey_cache import SurveyCache
from omnisupport_ingest_tests.layers import story as stories
from omnisupport_ingest_tests.layers.story import FIRST, SECOND, THIRD, Change, Commit, Story

PER_WINDOW = 5
FEW, MANY = 4 * PER_WINDOW, 80 * PER_WINDOW


class Reads:
    """Counts what this process reads below a folder. A hook stays for good, so there is one."""

    def __init__(self) -> None:
        self.root: str | None = None
        self.found: Counter[str] = Counter()
        sys.addaudithook(self._heard)

    def _heard(self, event: str, arguments: tuple[object, ...]) -> None:
        if self.root is None or event not in ("open", "os.scandir", "os.listdir"):
            return
        path = arguments[0]
        if not isinstance(path, str | Path) or not str(path).startswith(self.root):
            return
        root, self.root = self.root, None
        # The log of a table is Delta's to read; a table's own folder is no history.
        if event == "open":
            self.found["opened"] += 1
        elif "_delta_log" not in str(path):
            self.found["listed"] += sum(1 for _ in Path(path).iterdir())
        self.root = root

    @contextmanager
    def below(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
        self.found = found = Counter[str]()
        with monkeypatch.context() as patch:
            count(patch, store, "decode_manifest", found, "manifests parsed")
            state._kept.clear()
            count(patch, state.WindowState, "from_text", found, "states parsed")
            count(patch, listing, "LakeFile", found, "files of a table looked at")
            self.root = str(root)
            try:
                yield found
            finally:
                self.root = None


def count(patch: pytest.MonkeyPatch, where: object, name: str, found: Counter[str], what: str) -> None:
    original: Callable[..., object] = getattr(where, name)

    def counted(*arguments: object, **named: object) -> object:
        found[what] += 1
        return original(*arguments, **named)

    patch.setattr(where, name, counted)


READS = Reads()


def reads(folder: Path, batches: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, Counter[str]]:
    """What each step reads in a home in which ``batches`` have landed."""
    history = History(folder, PER_WINDOW)
    history.grow(batches)
    found = {}

    def counted(what: str, step: Callable[[], object]) -> None:
        with READS.below(folder, monkeypatch) as seen:
            step()
        found[what] = seen

    def plan(layer: object) -> Callable[[], object]:
        workspace, window = history.opened(), history.window(0)
        # Nothing is left to take in there, so nothing needs Spark.
        return lambda: layer.materialize(workspace, None, SOURCE, [window], "run")  # type: ignore[attr-defined]

    # A process that has started looks at every window once.
    pending_windows(history.workspace, SOURCE)
    counted("a tick with all taken in", lambda: pending_windows(history.workspace, SOURCE))
    counted("the first seal of a process", history.seal)
    counted("a seal", history.seal)
    pending_windows(history.workspace, SOURCE)
    counted("a tick without news", lambda: pending_windows(history.workspace, SOURCE))
    history.seal()
    counted("a tick with news", lambda: pending_windows(history.workspace, SOURCE))
    counted("planning raw", plan(raw))
    counted("planning deduped", plan(deduped))
    return found


def test_what_is_read_for_a_batch_a_tick_and_a_plan_does_not_follow_the_past(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = reads(tmp_path / "few", FEW, monkeypatch)
    many = reads(tmp_path / "many", MANY, monkeypatch)
    for what, seen in many.items():
        assert seen == few[what], what
    assert all(seen["manifests parsed"] <= 1 for seen in many.values()), many
    for tick in ("a tick with all taken in", "a tick without news"):
        assert not many[tick]["states parsed"]


MORE_THAN_A_THOUSAND = 1_100
"""Windows; a process once kept the states of 1,024."""


@pytest.mark.full
def test_a_run_reads_the_states_of_its_windows_once_however_many_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = History(tmp_path, 1)
    history.grow(MORE_THAN_A_THOUSAND)
    windows = [history.window(number) for number in range(MORE_THAN_A_THOUSAND)]
    for layer, states in ((raw, 1), (deduped, 2)):
        workspace = history.opened()
        with READS.below(tmp_path, monkeypatch) as seen:
            done = layer.materialize(workspace, None, SOURCE, windows, "run")  # type: ignore[arg-type]
        assert [each.window for each in done] == windows
        # Deduped reads those of raw, too.
        assert seen["states parsed"] == states * MORE_THAN_A_THOUSAND, layer.LAYER


def test_a_run_parses_each_manifest_once_though_more_batches_reach_its_windows_than_a_store_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    story, batches = Story(tmp_path), 4
    for number in range(batches):
        commits = [Commit(100 * number + 1 + each, 60 * each, [Change("c", each)]) for each in range(3)]
        story.land(*commits)
    opened = LandingStore(story.workspace.home.landing, stories.SOURCE, remembered=1)
    landed = raw._Landing(opened, Removed())
    found = Counter[str]()
    with monkeypatch.context() as patch:
        count(patch, store, "decode_manifest", found, "manifests parsed")
        for window in (FIRST, SECOND, THIRD):
            assert len(landed.files(window, landed.of(window))) == batches
    assert found["manifests parsed"] == batches


class WalkedRules(Counter[RuleOfWindow]):
    """Counts how often somebody goes through it."""

    walks = 0

    def __iter__(self) -> Iterator[RuleOfWindow]:
        self.walks += 1
        return super().__iter__()

    def items(self) -> ItemsView[RuleOfWindow, int]:
        self.walks += 1
        return super().items()


class WalkedRemovals(tuple[Removal, ...]):
    walks = 0

    def __iter__(self) -> Iterator[Removal]:
        WalkedRemovals.walks += 1
        return super().__iter__()


def test_what_is_known_of_all_windows_is_gone_through_once_not_for_each_window(tmp_path: Path) -> None:
    history = History(tmp_path, 1)
    windows = [history.window(number) for number in range(10)]
    rules = WalkedRules({(window, "public", "notes", "rule"): 2 for window in windows})
    judged = Judged(broken=BrokenRules(rules))
    rules.walks = 0
    for window in windows:
        plan = WindowPlan(window, Work.REPLACE, frozenset(), 1)
        assert rule_results(history.workspace, SOURCE, judged, plan, None).broken == {"notes/rule": 2}
    assert rules.walks == 1
    gone = WalkedRemovals(Removal("raw", each, START, 1, 1, 1, "age", "somebody", START) for each in windows)
    removed = Removed(gone)
    assert all(window in removed.sealed for window in windows)
    assert WalkedRemovals.walks == 1


def states_in_memory() -> int:
    return sum(isinstance(each, state.WindowState) for each in gc.get_objects())


@pytest.mark.full
def test_a_look_at_every_window_holds_the_states_of_one_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = History(tmp_path, 1)
    history.grow(200)
    state._kept.clear()
    monkeypatch.setattr(state, "_KEPT_BYTES", 0)
    before, settled, held = states_in_memory(), SurveyCache.settled, list[int]()

    def looked(*arguments: Any, **more: Any) -> None:
        held.append(states_in_memory() - before)
        settled(*arguments, **more)

    monkeypatch.setattr(SurveyCache, "settled", looked)
    assert pending_windows(history.opened(), SOURCE).nothing
    assert len(held) == 1 and held[0] < 20
