"""What was measured at each setting, and which setting to recommend. Pure.

The rule: take the points that keep every bound; of these, those whose p95 is at most a tenth above the
lowest; of these, the one with the fewest batches. So a difference that is only noise causes no extra work. A
point that cuts its batches by size is shown in the curve and never recommended: with less traffic its batches
would wait for their age again, and with more traffic their number would have no bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

ALIKE = 1.1
"""Latencies that differ by no more than this factor count as one."""

LEAST_TRAFFIC = 0.9
"""Share of the requested rate that a point must reach; otherwise it shows nothing about that rate."""

LITERATURE_SECONDS = (60.0, 300.0)
LITERATURE_ROWS = (50_000.0, 100_000.0)
"""What others recommend for loading a warehouse: a batch every 1 to 5 minutes, and so many rows in a
batch."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What cuts a batch: its age in seconds, or its size in bytes. ``by_size``: the size is what is
    measured."""

    seconds: float
    bytes: int
    by_size: bool = False


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Seconds that 50, 95 and 99 of 100 events do not exceed."""

    p50: float
    p95: float
    p99: float


@dataclass(frozen=True, slots=True)
class Point:
    """What was measured at ``setting``.

    Attributes:
        rate_asked: changes a second that should have been committed.
        rate: changes a second that were committed.
        events: landed in ``batches`` with ``files`` (data files and manifests) within ``seconds``.
        cpu: processor seconds of the platform's own processes per second; 1 is a whole core.
        dimension: latency up to the dimension; None if it was not measured.
    """

    setting: Setting
    rate_asked: float
    rate: float
    events: int
    batches: int
    files: int
    seconds: float
    cpu: float
    landing: Percentiles
    dimension: Percentiles | None = None

    @property
    def latency(self) -> Percentiles:
        """Latency from commit to dimension if that was measured, else from commit to durable batch."""
        return self.dimension or self.landing

    @property
    def end(self) -> str:
        """Where ``latency`` ends, in words."""
        return "durable batch" if self.dimension is None else "dimension"

    @property
    def events_per_batch(self) -> float:
        return self.events / self.batches

    @property
    def batches_per_hour(self) -> float:
        return self.batches * 3600 / self.seconds

    @property
    def files_per_hour(self) -> float:
        return self.files * 3600 / self.seconds


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a setting may cost: batches and files an hour, and a share of one core."""

    batches_per_hour: float
    files_per_hour: float
    cpu: float

    def broken_by(self, point: Point) -> Iterator[str]:
        """Yield each reason why ``point`` cannot be recommended, in words; nothing if it can."""
        if point.rate < LEAST_TRAFFIC * point.rate_asked:
            yield f"{point.rate:,.0f} of {point.rate_asked:,.0f} changes/s reached"
        for measured, most, unit in (
            (point.batches_per_hour, self.batches_per_hour, "batches/h"),
            (point.files_per_hour, self.files_per_hour, "files/h"),
            (100 * point.cpu, 100 * self.cpu, "% of a core"),
        ):
            if measured > most:
                yield f"{measured:,.0f} {unit}, at most {most:,.0f}"


def recommend(points: Iterable[Point], bounds: Bounds) -> Point | None:
    """Return the point that the rule above chooses; None if no point that may be recommended keeps every
    bound."""
    kept = [each for each in points if not each.setting.by_size and not any(bounds.broken_by(each))]
    if not kept:
        return None
    lowest = min(each.latency.p95 for each in kept)
    alike = [each for each in kept if each.latency.p95 <= ALIKE * lowest]
    return min(alike, key=lambda each: (each.batches_per_hour, each.latency.p95, each.setting.seconds))


def settings_to_try(intervals: Sequence[float], sizes: Sequence[int], usual_bytes: int) -> list[Setting]:
    """Return the settings to try: each of ``intervals`` (seconds) with the usual size, and each of
    ``sizes`` (bytes) with the longest interval, so that the size cuts the batches. Ascending; each once."""
    by_age = [Setting(each, usual_bytes) for each in sorted(set(intervals))]
    return by_age + [Setting(by_age[-1].seconds, each, by_size=True) for each in sorted(set(sizes))]
