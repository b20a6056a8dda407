"""What a command costs step by step: processor seconds of all its processes, by program, while it runs."""

from __future__ import annotations

import os
import subprocess
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from threading import Thread

import click
import dagster as dg

from bench.processes import processor_seconds, program

_EVERY_SECONDS = 0.2
_WORTH_TELLING = 0.5


@dataclass
class Watched:
    """A command that has ended: what it said, with the time of each line, and what was spent by when.

    ``samples``: processor seconds by program, of the processes that have ended too, at moments that rise.
    """

    code: int = 0
    began: float = 0.0
    ended: float = 0.0
    lines: list[tuple[float, str]] = field(default_factory=list)
    samples: list[tuple[float, dict[str, float]]] = field(default_factory=list)

    def spent(self, start: float, end: float) -> dict[str, float]:
        """Processor seconds by program from ``start`` to ``end``."""
        before, after = self._until(start), self._until(end)
        return {name: seconds - before.get(name, 0.0) for name, seconds in after.items()}

    def _until(self, moment: float) -> dict[str, float]:
        return next((spent for at, spent in reversed(self.samples) if at <= moment), {})


def watch(command: Sequence[str], given: Mapping[str, str]) -> Watched:
    """Run ``command`` with the variables ``given`` beside those of this process."""
    found = Watched(began=time.time())
    environment = {**os.environ, **given, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as child:
        reader = Thread(target=_read, args=(child, found))
        reader.start()
        seconds: dict[int, float] = {}
        programs: dict[int, str] = {}
        while child.poll() is None:
            for pid, spent in processor_seconds(child.pid).items():
                seconds[pid] = spent
                # A process may be another program by now.
                programs[pid] = program(pid) or programs.get(pid, "")
            by_program: dict[str, float] = defaultdict(float)
            for pid, spent in seconds.items():
                by_program[programs[pid]] += spent
            found.samples.append((time.time(), dict(by_program)))
            time.sleep(_EVERY_SECONDS)
        reader.join()
    found.code, found.ended = child.returncode, time.time()
    return found


def tell_phases(watched: Watched, home: Path) -> None:
    """Print the cost of each phase that the command named by a line ending in …, and of the runs' steps."""
    named = [(at, line) for at, line in watched.lines if line.endswith("…")]
    marks = [(watched.began, "start"), *named, (watched.ended, "")]
    for (start, name), (end, _) in pairwise(marks):
        _tell(name, watched, start, end)
    with dg.DagsterInstance.from_config(str(home / "dagster")) as instance:
        for run in instance.get_runs():
            for step in instance.get_run_step_stats(run.run_id):
                if step.start_time is not None and step.end_time is not None:
                    _tell(f"  {step.step_key}", watched, step.start_time, step.end_time)
    _tell("all", watched, watched.began, watched.ended)


def _tell(name: str, watched: Watched, start: float, end: float) -> None:
    if end - start < _WORTH_TELLING:
        return
    spent = watched.spent(start, end)
    programs = ", ".join(f"{each} {seconds:.1f}" for each, seconds in spent.items() if seconds >= 0.1)
    click.echo(
        f"  {name[:50]:<50} {end - start:6.1f} s, {sum(spent.values()):6.1f} CPU s ({programs})", err=True
    )


def _read(child: subprocess.Popen[str], found: Watched) -> None:
    assert child.stdout is not None
    found.lines.extend((time.time(), line.rstrip()) for line in child.stdout)
