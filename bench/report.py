"""What a measurement found: two programs side by side, repeat by repeat, as a text and as JSON."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import click

RESULTS = Path(__file__).parent / "results"
"""Where the JSON goes; not committed."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of one program: wall time, and what else was seen of it (peak memory, CPU time)."""

    seconds: float
    seen: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Runs of ``ours`` and of the ``yardstick`` over the same ``rows``, in alternation."""

    rows: int
    yardstick_name: str
    ours: list[Run]
    yardstick: list[Run]

    @property
    def ratio(self) -> float:
        """Our median rate as a share of the yardstick's median rate."""
        return median(run.seconds for run in self.yardstick) / median(run.seconds for run in self.ours)

    @property
    def ratios(self) -> list[float]:
        """The same, of each neighbouring pair of runs."""
        return [theirs.seconds / ours.seconds for ours, theirs in zip(self.ours, self.yardstick, strict=True)]

    def rate(self, runs: list[Run]) -> float:
        """Rows per second of the median run."""
        return self.rows / median(run.seconds for run in runs)

    def highest(self, name: str) -> float:
        """The highest ``name`` seen in a run of ours."""
        return max(run.seen[name] for run in self.ours)


def alternate(
    rows: int, repeats: int, yardstick_name: str, yardstick: Callable[[], Run], ours: Callable[[], Run]
) -> SideBySide:
    """Run both ``repeats`` times in turn, so that a slow minute of the machine meets both."""
    result = SideBySide(rows, yardstick_name, [], [])
    for number in range(1, repeats + 1):
        result.yardstick.append(yardstick())
        result.ours.append(ours())
        click.echo(
            f"  {number}/{repeats}: {yardstick_name} {result.yardstick[-1].seconds:6.2f} s, "
            f"ours {result.ours[-1].seconds:6.2f} s, ratio {result.ratios[-1]:.2f}",
            err=True,
        )
    return result


def conclude(name: str, what: str, result: SideBySide, *, floor: float, memory_limit: float | None) -> None:
    """Print the figures of ``result`` and write them to ``results/<name>.json``.

    ``floor``: the least ratio that is promised. ``memory_limit``: the most peak memory in MB, if one is
    promised. Memory is reported if every run of ours measured ``peak_mb``.
    """
    peak = result.highest("peak_mb") if all("peak_mb" in run.seen for run in result.ours) else None
    lines = [
        f"{what}: {result.rows:,} rows, {len(result.ours)} runs each in alternation, medians",
        f"  {result.yardstick_name:<24} {result.rate(result.yardstick):>10,.0f} rows/s",
        f"  {'ours, durable':<24} {result.rate(result.ours):>10,.0f} rows/s",
        f"  ratio {result.ratio:.2f} (of pairs {min(result.ratios):.2f} to {max(result.ratios):.2f}); "
        f"floor {floor}: {'met' if result.ratio >= floor else 'NOT MET'}",
    ]
    if peak is not None:
        lines.append(
            f"  peak memory of our process {peak:.0f} MB"
            + ("" if memory_limit is None else f"; limit {memory_limit:.0f}: ")
            + ("" if memory_limit is None else "met" if peak <= memory_limit else "NOT MET")
        )
    click.echo("\n".join(lines))
    figures = {
        "what": what,
        "ratio": round(result.ratio, 3),
        "rows_per_second": {
            "ours": round(result.rate(result.ours)),
            result.yardstick_name: round(result.rate(result.yardstick)),
        },
        "peak_mb": None if peak is None else round(peak),
        **asdict(result),
    }
    write_result(name, figures)


def cost(result: SideBySide) -> str:
    """Microseconds of processor time for each row, of the programs and of the server meanwhile, medians."""
    lines = ["  processor time, µs a row       program   server"]
    for name, runs in ((result.yardstick_name, result.yardstick), ("ours, durable", result.ours)):
        of = [
            median(run.seen[what] for run in runs) / result.rows * 1e6
            for what in ("cpu_seconds", "server_cpu_seconds")
        ]
        lines.append(f"  {name:<28} {of[0]:>9.2f} {of[1]:>8.2f}")
    return "\n".join(lines)


def write_result(name: str, figures: dict[str, Any]) -> None:
    """Write ``figures`` (as JSON allows them), with time and machine, to ``results/<name>.json``."""
    when = datetime.now(UTC).isoformat(timespec="seconds")
    document = {"measured": when, "machine": machine(), **figures}
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    click.echo(f"written to {path}")


def machine() -> dict[str, Any]:
    """What the figures depend on most."""
    return {
        "cores": os.cpu_count(),
        "processor": _processor(),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def _processor() -> str:
    listed = Path("/proc/cpuinfo")
    if listed.is_file():
        for line in listed.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
