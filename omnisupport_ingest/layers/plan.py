"""Plans the work of a window: nothing, its new inputs, or all inputs again; and gives the work a key.

A window remembers by name which files of the layer above it has taken. Compaction changes no event, so a
compacted file stands for the names of the files it replaced: if they were taken, it counts as taken.

The idempotency key of a unit of work makes doing it twice the same as doing it once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from omnisupport_ingest.contracts.decision_table import (
    DUPLICATE_WRITE,
    IDEMPOTENCY_KEY,
    REPLAY_WINDOW,
    DecisionTable,
)
from omnisupport_ingest.lake.snapshot import TableSnapshot
from omnisupport_ingest.lake.state import WindowState

REPEATED = IDEMPOTENCY_KEY.found(DUPLICATE_WRITE)
"""Finding: a window is requested that already has all its inputs, made as it would be made now."""


class Work(Enum):
    """``NOTHING`` to do, ``APPEND`` the new inputs, or ``REPLACE`` the content from all inputs.

    ``CLOSE``: compact the files of a window that has taken all its inputs; its rows stay.
    """

    NOTHING = "nothing"
    APPEND = "append"
    REPLACE = "replace"
    CLOSE = "close"


@dataclass(frozen=True, slots=True)
class Upstream:
    """The inputs a window has now: unit names, the table they belong to, and versions of the logic."""

    units: frozenset[str]
    table_id: str | None
    versions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """The work of one window: the units to read, and the generation to write.

    ``repeated``: the window holds all its inputs already, and no replay was requested. ``kept``: paths of the
    window's files that stay when the others are replaced.
    """

    window: str
    work: Work
    read: frozenset[str]
    generation: int
    repeated: bool = False
    kept: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class RequestedWork:
    """How windows are requested. ``replay``: rebuild them. ``remake``: also rebuild a window without changes
    and without a request to replay, if the decision table wants that."""

    replay: bool
    remake: bool = False


def plan_window(snapshot: TableSnapshot, window: str, upstream: Upstream, asked: RequestedWork) -> WindowPlan:
    """Compare the inputs that the window was made from with its inputs now.

    The content is replaced on a replay; if the upstream table or a consumed file was replaced; if logic or
    contract changed; and if another program rewrote the window, because then its inputs are unknown.
    """
    state = snapshot.state(window)
    rewritten = state is None and bool(snapshot.files(window))
    work = decide(state, upstream, rewritten=rewritten, replay=asked.replay)
    repeated = work is Work.NOTHING
    if work is Work.REPLACE or (repeated and asked.remake):
        return replace(replace_all(snapshot, window, upstream), repeated=repeated)
    taken = frozenset(state.inputs) if state else frozenset()
    return WindowPlan(window, work, upstream.units - taken, state.generation if state else 1, repeated)


def replace_all(snapshot: TableSnapshot, window: str, upstream: Upstream) -> WindowPlan:
    """Return the plan that makes ``window`` again from all its inputs."""
    # No generation is higher than the number of commits, so this one is new.
    return WindowPlan(window, Work.REPLACE, upstream.units, snapshot.version + 1)


def plan_of_files(
    snapshot: TableSnapshot, window: str, upstream: Upstream, asked: RequestedWork, files: InputFiles
) -> WindowPlan:
    """Plan as ``plan_window`` does, and make the window again if ``files`` hold its new inputs only together
    with others."""
    plan = plan_window(snapshot, window, upstream, asked)
    return plan if files.holding(plan.read) is not None else replace_all(snapshot, window, upstream)


def decide(state: WindowState | None, upstream: Upstream, *, rewritten: bool, replay: bool) -> Work:
    """Decide the work by the rule of ``plan_window``, as a truth table without a table at hand."""
    if rewritten:
        return Work.REPLACE
    if state is None:
        return Work.APPEND
    if (
        replay
        or state.upstream_table_id != upstream.table_id
        or state.versions != upstream.versions
        or not frozenset(state.inputs) <= upstream.units
    ):
        return Work.REPLACE
    return Work.APPEND if upstream.units - frozenset(state.inputs) else Work.NOTHING


def repeats_writes(decisions: DecisionTable) -> bool:
    """Whether a window that holds all its inputs is rebuilt when it is requested."""
    return decisions.action(DUPLICATE_WRITE) == REPLAY_WINDOW


@dataclass(frozen=True, slots=True)
class InputFiles:
    """The paths of the files that the layer above has of one window.

    ``stands_for``: path of a compacted file → the names of the files that it replaced. Any other file stands
    for itself.
    """

    paths: tuple[str, ...]
    stands_for: Mapping[str, Sequence[str]]

    @classmethod
    def of(cls, paths: Iterable[str], above: WindowState | None) -> InputFiles:
        """Return the files at ``paths``; ``above``: the window's state in the layer above."""
        return cls(tuple(paths), above.compacted_units if above is not None else {})

    @property
    def units(self) -> frozenset[str]:
        """The names that the files stand for."""
        return self.names(self.paths)

    def names(self, paths: Iterable[str]) -> frozenset[str]:
        """Return the names that the files at ``paths`` stand for."""
        return frozenset(name for path in paths for name in self.stands_for.get(path, (path,)))

    def holding(self, wanted: Collection[str]) -> frozenset[str] | None:
        """Return the paths of the files that hold exactly the ``wanted`` names.

        Returns None if a file holds both wanted names and others: they cannot be separated any more, so the
        caller has to take all of them again.
        """
        found = set()
        for path in self.paths:
            names = self.names([path])
            held = sum(name in wanted for name in names)
            if held == len(names):
                found.add(path)
            elif held:
                return None
        return frozenset(found)


LOGIC_VERSION = 6
"""Version of the logic of the layers; raised when the same input gives a different output."""


def idempotency_key(
    *, layer: str, table: str, window: str, inputs: Iterable[str], versions: Iterable[str]
) -> str:
    """SHA-256 of layer, table, window, the set of input units and the versions of logic and contracts.

    A run or a time is never part of it: two runs that do the same work have the same key.
    """
    return _digest([layer, table, window, sorted(set(inputs)), sorted(set(versions))])


def unit_key(work: Iterable[tuple[str, WindowPlan]]) -> str:
    """Return the key of files written together for several windows, each with its idempotency key and plan.

    The plan is part of the key because the rows written depend on what is read, and not only on what the
    window holds afterwards: two appends that end with the same inputs may have begun with different ones.
    """
    return _digest(sorted([key, *_identity_of(plan)] for key, plan in work))


def _identity_of(plan: WindowPlan) -> list[object]:
    return [plan.window, plan.work.value, sorted(plan.read), sorted(plan.kept)]


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, separators=(",", ":")).encode()).hexdigest()
