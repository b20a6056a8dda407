"""An update of a table that is stored by window: plan, produce, commit, close, report.

Raw, deduped events and net changes are such tables. Each defines how its windows are made (``WindowUpdate``);
``update_windows`` runs them all in the same way. Tables with one row per key have ``keyed_update``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import ClassVar, Generic, TypeVar

from pyspark.sql import SparkSession

from omnisupport_ingest.lake.checkpoint import Checkpoint
from omnisupport_ingest.lake.snapshot import TableSnapshot
from omnisupport_ingest.lake.staging import StagedFiles
from omnisupport_ingest.lake.table import LakeTable, retrying
from omnisupport_ingest.layers import closing
from omnisupport_ingest.layers.checkpoints import Identity, Outcome, change_for, report
from omnisupport_ingest.layers.closing import Compaction
from omnisupport_ingest.layers.lateness import Lateness
from omnisupport_ingest.layers.plan import RequestedWork, Upstream, WindowPlan, Work, repeats_writes, unit_key
from omnisupport_ingest.layers.workspace import Workspace


@dataclass(frozen=True)
class LayerRun:
    """The arguments of a layer's run: the home, Spark, the source, the run's id, and what to make again."""

    workspace: Workspace
    spark: SparkSession
    source: str
    run_id: str
    asked: RequestedWork

    @classmethod
    def of(
        cls, workspace: Workspace, spark: SparkSession, source: str, run_id: str, *, replay: bool
    ) -> LayerRun:
        """Return a run that makes its windows again with ``replay``, or where the decision table wants it."""
        asked = RequestedWork(replay, repeats_writes(workspace.decisions))
        return cls(workspace, spark, source, run_id, asked)


@dataclass(frozen=True)
class WindowJob:
    """The work of one window. ``key``: idempotency key of what the window holds afterwards."""

    plan: WindowPlan
    upstream: Upstream
    key: str

    @property
    def window(self) -> str:
        return self.plan.window

    @property
    def replays(self) -> bool:
        """Whether the window is made again from all its inputs."""
        return self.plan.work is Work.REPLACE


JobT = TypeVar("JobT", bound=WindowJob)


@dataclass(frozen=True)
class Produced(Generic[JobT]):
    """The files that jobs wrote, at their final paths, and the result of each job."""

    files: StagedFiles
    outcome: Callable[[JobT], Outcome]


class WindowUpdate(ABC, Generic[JobT]):
    """The update of some windows of a table, planned on one version of it: ``snapshot``."""

    layer: ClassVar[str]

    def __init__(self, snapshot: TableSnapshot, run: LayerRun) -> None:
        self.snapshot, self.run = snapshot, run

    @abstractmethod
    def targets(self, windows: Sequence[str]) -> list[str]:
        """Return the windows to plan, each once: ``windows``, and those that every run adds."""

    @abstractmethod
    def job(self, window: str) -> JobT:
        """Plan ``window``. The plan may be that there is nothing to do."""

    @abstractmethod
    def is_past(self, window: str) -> bool:
        """Whether ``window`` is to be closed once it holds all its inputs."""

    @abstractmethod
    def produce(self, jobs: Sequence[JobT], unit: str) -> Produced[JobT]:
        """Write the files of ``jobs`` (at least one) under the name of their ``unit`` (``unit_key``)."""

    def closes_now(self, job: JobT, files: StagedFiles) -> bool:  # noqa: ARG002
        """Whether the window of ``job`` is closed after this commit; by default a later run does it."""
        return False


class EventsUpdate(WindowUpdate[JobT]):
    """The update of a table of events, whose windows the ``watermark`` closes.

    ``_sealed``: windows whose events retention has removed. A subclass reads them once it has opened its
    inputs.
    """

    _sealed: frozenset[str]

    def __init__(self, snapshot: TableSnapshot, run: LayerRun, *, watermark: datetime | None) -> None:
        super().__init__(snapshot, run)
        self._watermark, self._lateness = watermark, Lateness.of(run.workspace, run.source)

    def is_past(self, window: str) -> bool:
        # A sealed window is closed already. What landed in it since must not be compacted with files that the
        # layer below has taken.
        return window not in self._sealed and self._lateness.closed(window, self._watermark)


def update_windows(
    table: LakeTable,
    windows: Sequence[str],
    run: LayerRun,
    planned_on: Callable[[TableSnapshot, LayerRun], WindowUpdate[JobT]],
    compaction: Compaction,
    *,
    before_closing: Callable[[], None] = lambda: None,
) -> list[Checkpoint]:
    """Bring ``windows`` of ``table`` up to date in one commit, then close those that are due.

    ``planned_on`` begins an update on a version of the table; it is called again if another writer committed
    first. ``compaction`` merges the files of a window that is closed. ``before_closing`` is called after the
    commit, or if there is nothing to commit. Returns one checkpoint per requested window, in order.
    """
    repeated: list[str] = []

    def attempt(snapshot: TableSnapshot) -> list[str]:
        update = planned_on(snapshot, run)
        targets = update.targets(windows)
        every = [update.job(window) for window in targets]
        jobs = [job for job in every if job.plan.work is not Work.NOTHING]
        due = closing.due(snapshot, set(targets) - {job.window for job in jobs}, update.is_past)
        closes = frozenset(due)
        repeated[:] = [job.window for job in every if job.plan.repeated and job.window not in closes]
        if not jobs:
            return due
        produced = update.produce(jobs, unit_key((job.key, job.plan) for job in jobs))
        identity, files = Identity(update.layer, run.source, run.run_id), produced.files
        snapshot.commit(
            [
                change_for(snapshot, job.plan, job.upstream, produced.outcome(job), identity, files)
                for job in jobs
            ]
        )
        return [*due, *(job.window for job in jobs if update.closes_now(job, files))]

    due = retrying(attempt, table)
    before_closing()
    closing.close(table, due, run.run_id, compaction)
    return report(table, windows, repeated)
