"""What sealing a batch, a sensor's tick and planning a run read does not follow how much there ever was.

Counted are files of the home that are opened, names that are listed in its folders, and manifests and
states that are parsed; never seconds.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.history import SOURCE, History
from omnisupport_ingest.lake import listing, state
from omnisupport_ingest.landing import store
from omnisupport_ingest.layers import deduped, raw
from omnisupport_ingest.layers.pending import pending_windows

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
            state._read.cache_clear()
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
