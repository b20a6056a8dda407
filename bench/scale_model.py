"""A deployment simulated from unit costs: what waits where, how long, and what it costs.

A slot is two queues, one behind the other. Capture serves changes one by one, as many a second as it lands at
most. The lake serves in bulk: a run takes all that has landed when it starts, and its cost is a fixed part, a
part for each change, and a part for each file of the dimensions that it touches. So a lake that falls behind
makes larger runs, which cost less a change; it is lost only where changes alone cost more than its cores have
or a run would have to take more batches than it may.

Changes that commit in one second are one cohort; cohorts go through both queues in order, and may be cut. Lag
is from the commit to the end of the run whose merge shows the change.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from random import Random

_MILLION = 1e6


@dataclass(frozen=True)
class UnitCosts:
    """What one unit costs: CPU seconds, bytes or a count, as ``scale.toml`` says."""

    capture_changes_per_second: float
    capture_cpu_per_million: float
    server_cpu_per_million: float
    server_cpu_per_million_of_others: float
    layers_cpu_per_million: float
    run_cpu: float
    run_seconds: float
    file_cpu: float
    file_row_cpu: float
    compaction_cpu_per_million: float
    planning_cpu_per_file: float
    batches_per_run: float
    landing_mb_per_million: float
    raw_mb_per_million: float
    net_changes_mb_per_million: float
    history_bytes_per_version: float
    requests_per_batch: float


@dataclass(frozen=True)
class Deployment:
    """What is to be taken in, and by what: see ``scale.toml``.

    ``changes_per_second`` and ``dimension_tb`` are of all slots, ``cores`` of each.
    """

    name: str
    changes_per_second: float
    servers: int
    slots: int
    cores: float
    dimension_tb: float
    row_bytes: float
    rows_per_file: float
    random_share: float
    merge_seconds: float
    peak: float
    window_minutes: float
    landing_days: float
    raw_days: float

    @property
    def slot_rate(self) -> float:
        """Changes a second of one slot, at the mean."""
        return self.changes_per_second / self.slots

    @property
    def slot_files(self) -> float:
        """Files of the dimensions of one slot."""
        rows = self.dimension_tb * 1e12 / self.slots / self.row_bytes
        return max(1.0, rows / self.rows_per_file)


@dataclass(frozen=True)
class Simulated:
    """What one slot came to, after the first quarter of the time, in which queues fill.

    ``changes``: that entered; ``waiting``: in both queues, the mean of the time; ``capture_waiting``:
    before capture, the most; ``mean_lag``, ``lag_p50``, ``lag_p95``: seconds of the changes that were shown;
    ``growth``: changes a second by which the queues grow, 0 where they do not; ``cpu``: seconds a second, by
    part.
    """

    changes: float
    seconds: float
    waiting: float
    capture_waiting: float
    mean_lag: float
    lag_p50: float
    lag_p95: float
    growth: float
    runs: int
    cpu: dict[str, float]


@dataclass
class _Run:
    ends: float
    cohorts: list[tuple[float, float]]
    merges: bool


def simulate(deployment: Deployment, costs: UnitCosts, *, seconds: int = 14_400, seed: int = 1) -> Simulated:
    """Simulate one slot of ``deployment`` for ``seconds``; the same ``seed`` gives the same."""
    # Noise that is the same every time, no secret.
    return _Slot(deployment, costs, Random(seed)).run(seconds)  # noqa: S311


class _Slot:
    def __init__(self, deployment: Deployment, costs: UnitCosts, random: Random) -> None:
        self._of, self._costs, self._random = deployment, costs, random
        self._before_capture: deque[tuple[float, float]] = deque()
        self._landed: deque[tuple[float, float]] = deque()
        self._unmerged: list[tuple[float, float]] = []
        self._last_merge = 0.0
        self._window_changes = self._compaction = 0.0
        self._inside = self._outside_capture = 0.0
        self._run: _Run | None = None
        self._shown: list[tuple[float, float]] = []
        self._cpu = dict.fromkeys(("capture", "layers", "runs", "dimensions", "compaction", "planning"), 0.0)

    def run(self, seconds: int) -> Simulated:
        warm = seconds // 4
        window = max(1, round(self._of.window_minutes * 60))
        inside: list[float] = []
        entered = most = 0.0
        runs = 0
        for second in range(seconds):
            if second == warm:
                self._shown.clear()
                self._cpu = dict.fromkeys(self._cpu, 0.0)
                entered = most = 0.0
                runs, inside = 0, []
            arrived = self._arrivals(second)
            entered += arrived
            self._inside += arrived
            self._outside_capture += arrived
            self._before_capture.append((second, arrived))
            begins = self._inside
            self._capture()
            if second and second % window == 0:
                self._close()
            runs += self._lake(second)
            most = max(most, self._outside_capture)
            # The mean of its beginning and its end.
            inside.append((begins + self._inside) / 2)
        return self._simulated(entered, seconds - warm, inside, most, runs)

    def _simulated(
        self, entered: float, measured: int, inside: list[float], most: float, runs: int
    ) -> Simulated:
        lags = sorted(self._shown)
        shown = sum(changes for _, changes in lags)
        return Simulated(
            changes=entered,
            seconds=measured,
            waiting=sum(inside) / len(inside),
            capture_waiting=most,
            mean_lag=sum(lag * changes for lag, changes in lags) / shown if shown else math.inf,
            lag_p50=_quantile(lags, 0.50),
            lag_p95=_quantile(lags, 0.95),
            growth=_growth(inside, self._of.slot_rate),
            runs=runs,
            cpu={part: spent / measured for part, spent in self._cpu.items()},
        )

    def _arrivals(self, second: int) -> float:
        """Of a wave of twenty minutes between (2 - peak) and peak times the mean, with noise of a tenth."""
        depth = min(1.0, self._of.peak - 1.0)
        wave = 1.0 + depth * math.sin(2 * math.pi * second / 1200)
        return self._of.slot_rate * wave * self._random.uniform(0.9, 1.1)

    def _capture(self) -> None:
        landed = _taken(self._before_capture, self._costs.capture_changes_per_second)
        self._landed.extend(landed)
        changes = sum(each for _, each in landed)
        self._outside_capture -= changes
        self._window_changes += changes
        self._cpu["capture"] += changes * self._costs.capture_cpu_per_million / _MILLION

    def _close(self) -> None:
        """A window closes: the next run compacts it, too."""
        cpu = self._window_changes * self._costs.compaction_cpu_per_million / _MILLION
        self._window_changes = 0.0
        self._cpu["compaction"] += cpu
        self._compaction += cpu

    def _lake(self, second: int) -> int:
        """What begins and ends from ``second`` to the next; how many runs were started."""
        now, started = float(second), 0
        while True:
            if self._run is None:
                if not self._landed:
                    return started
                self._run, started = self._started(now), started + 1
            if self._run.ends >= second + 1:
                return started
            now = self._run.ends
            self._show(self._run)
            self._run = None

    def _started(self, now: float) -> _Run:
        of, costs = self._of, self._costs
        cohorts: list[tuple[float, float]] = []
        # A cohort is about the batch of a second.
        while self._landed and len(cohorts) < costs.batches_per_run:
            cohorts.append(self._landed.popleft())
        changes = sum(each for _, each in cohorts)
        merges = now - self._last_merge >= of.merge_seconds
        layers = changes * costs.layers_cpu_per_million / _MILLION
        planning = of.slot_files * costs.planning_cpu_per_file
        dimensions = 0.0
        if merges:
            self._last_merge = now
            merged = changes + sum(each for _, each in self._unmerged)
            dimensions = files_touched(of, merged) * (costs.file_cpu + costs.file_row_cpu * of.rows_per_file)
        for part, cpu in (
            ("layers", layers),
            ("runs", costs.run_cpu),
            ("dimensions", dimensions),
            ("planning", planning),
        ):
            self._cpu[part] += cpu
        # Planning is the driver's alone; tasks share the cores.
        lasts = costs.run_seconds + planning + (layers + dimensions + self._compaction) / of.cores
        self._compaction = 0.0
        return _Run(now + lasts, cohorts, merges)

    def _show(self, run: _Run) -> None:
        self._unmerged += run.cohorts
        if run.merges:
            self._shown += [(run.ends - began, changes) for began, changes in self._unmerged]
            self._inside -= sum(changes for _, changes in self._unmerged)
            self._unmerged = []


def files_touched(deployment: Deployment, changes: float) -> float:
    """How many files of the dimensions of a slot ``changes`` touch, at the mean.

    Keys anywhere fall on files as balls on urns; new and recent keys fill files one after the other.
    """
    files, anywhere = deployment.slot_files, changes * deployment.random_share
    # log1p: with one file the chance that it is missed is 0, and with many it is near 1.
    missed = 0.0 if files <= 1 and anywhere >= 1 else math.exp(anywhere * math.log1p(-1 / max(files, 1.001)))
    recent = (changes - anywhere) / deployment.rows_per_file
    return min(files, files * (1 - missed)) + math.ceil(recent)


def _taken(queue: deque[tuple[float, float]], most: float) -> list[tuple[float, float]]:
    """Take up to ``most`` changes from the head of ``queue``."""
    taken = []
    while queue and most > 0:
        began, changes = queue.popleft()
        if changes > most:
            queue.appendleft((began, changes - most))
            changes = most
        taken.append((began, changes))
        most -= changes
    return taken


def _quantile(lags: list[tuple[float, float]], share: float) -> float:
    """The lag that ``share`` of the changes do not exceed; ``lags`` rise."""
    left = share * sum(changes for _, changes in lags)
    for lag, changes in lags:
        left -= changes
        if left <= 0:
            return lag
    return math.inf


def _growth(inside: list[float], rate: float) -> float:
    """By how many changes a second the queues grow, from their means in the first and last third.

    0 where that is less than a hundredth of the rate.
    """
    third = max(1, len(inside) // 3)
    first, last = sum(inside[:third]) / third, sum(inside[-third:]) / third
    slope = (last - first) / max(1, len(inside) - third)
    return slope if slope > rate / 100 else 0.0
