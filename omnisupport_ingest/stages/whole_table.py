"""Tables made whole from all windows above them: what their one unit of work has in common."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from omnisupport_ingest.lake.checkpoint import Checkpoint
from omnisupport_ingest.lake.layout import WHOLE_TABLE
from omnisupport_ingest.lake.state import WindowState
from omnisupport_ingest.lake.table import TableSnapshot
from omnisupport_ingest.position import Position
from omnisupport_ingest.stages.idempotency import idempotency_key
from omnisupport_ingest.stages.plan import Asked, Upstream, WindowPlan, Work, plan_window
from omnisupport_ingest.stages.progress import BatchFacts


@dataclass(frozen=True, slots=True)
class WholePlan:
    """The work of making a table whole, and its idempotency key."""

    work: WindowPlan
    key: str


def plan_whole(
    snapshot: TableSnapshot, upstream: Upstream, *, layer: str, table: str, replay: bool
) -> WholePlan | None:
    """The plan of making the table again from ``upstream``; none where it holds just that.

    Never an append: what is new above may change any of its rows.
    """
    if plan_window(snapshot, WHOLE_TABLE, upstream, Asked(replay)).work is Work.NOTHING:
        return None
    return WholePlan(
        WindowPlan(WHOLE_TABLE, Work.REPLACE, upstream.units, snapshot.version + 1),
        idempotency_key(
            layer=layer,
            table=table,
            window=WHOLE_TABLE,
            inputs=upstream.units,
            versions=upstream.versions,
        ),
    )


@dataclass(frozen=True)
class WindowsAbove:
    """What the states of all windows of the table above say together; windows without one are left out."""

    states: tuple[WindowState, ...]

    @classmethod
    def of(cls, snapshot: TableSnapshot) -> WindowsAbove:
        return cls(tuple(_states(snapshot)))

    @property
    def batches(self) -> tuple[str, ...]:
        """Every batch that any window holds, sorted."""
        return tuple(sorted({batch for state in self.states for batch in state.batches}))

    @property
    def facts(self) -> BatchFacts:
        """The highest position and its batch, and the highest watermark; null where there is none."""
        return facts_of([state.checkpoint for state in self.states])


def facts_of(checkpoints: Sequence[Checkpoint]) -> BatchFacts:
    """The highest position of ``checkpoints`` and its batch, and the highest watermark; null where there is
    none."""
    mark = max((each.watermark for each in checkpoints if each.watermark is not None), default=None)
    newest = max(
        (each for each in checkpoints if each.cursor),
        key=lambda each: Position.parse(each.cursor),
        default=None,
    )
    if newest is None:
        return BatchFacts(None, None, None, mark)
    last = Position.parse(newest.cursor)
    return BatchFacts(last, last, newest.last_batch_id, mark)


def _states(snapshot: TableSnapshot) -> Iterable[WindowState]:
    return (state for window in snapshot.windows() if (state := snapshot.state(window)) is not None)
