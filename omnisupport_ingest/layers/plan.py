"""What a window needs: nothing, the inputs it has not taken yet, or to be made again from all of them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from omnisupport_ingest.contracts.decision_table import (
    DUPLICATE_WRITE,
    IDEMPOTENCY_KEY,
    REPLAY_WINDOW,
    DecisionTable,
)
from omnisupport_ingest.lake.state import WindowState
from omnisupport_ingest.lake.table import TableSnapshot

REPEATED = IDEMPOTENCY_KEY.found(DUPLICATE_WRITE)
"""A window is asked for whose content has all its inputs already, made as it would be now."""


class Work(Enum):
    """``NOTHING`` to do, ``APPEND`` the new inputs, or ``REPLACE`` the content from all inputs.

    ``CLOSE`` folds the files of a window that has taken all its inputs; its rows stay.
    """

    NOTHING = "nothing"
    APPEND = "append"
    REPLACE = "replace"
    CLOSE = "close"


@dataclass(frozen=True, slots=True)
class Upstream:
    """What a window can be made from now: unit names, the table they belong to, logic versions."""

    units: frozenset[str]
    table_id: str | None
    versions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """The work of one window: the units to read, and the generation to write.

    ``repeated``: the window holds all that already, and nobody asked for it to be made again.
    """

    window: str
    work: Work
    read: frozenset[str]
    generation: int
    repeated: bool = False


@dataclass(frozen=True, slots=True)
class Asked:
    """How windows are asked for. ``replay``: to be made again. ``remake``: also where nothing has changed
    and nobody says replay, as the decision table may want it."""

    replay: bool
    remake: bool = False


def plan_window(snapshot: TableSnapshot, window: str, upstream: Upstream, asked: Asked) -> WindowPlan:
    """Compare what the window holds with what is there now (semantics: reading upstream).

    The content is made again on a replay; where the upstream table or a consumed file was
    replaced; where logic or contract changed; and where another program rewrote the window, so
    that what it was made from is not known here.
    """
    state = snapshot.state(window)
    rewritten = state is None and bool(snapshot.files(window))
    work = decide(state, upstream, rewritten=rewritten, replay=asked.replay)
    repeated = work is Work.NOTHING
    if work is Work.REPLACE or (repeated and asked.remake):
        # No generation is higher than the number of commits, so this one is new.
        return WindowPlan(window, Work.REPLACE, upstream.units, snapshot.version + 1, repeated)
    taken = frozenset(state.inputs) if state else frozenset()
    return WindowPlan(window, work, upstream.units - taken, state.generation if state else 1, repeated)


def decide(state: WindowState | None, upstream: Upstream, *, rewritten: bool, replay: bool) -> Work:
    """The rule of ``plan_window`` as a truth table, without a table at hand."""
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
    """Whether a window that holds all its inputs is made again when it is asked for."""
    return decisions.action(DUPLICATE_WRITE) == REPLAY_WINDOW
