"""Runs the ingest job without a daemon: each run in its own process, one after the other.

A run's memory is freed with its process, as with Dagster's own launcher. The process ends when its parent
ends.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.home import Home
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.windows import WindowRange

_END_SECONDS = 30.0
"""Seconds that a run may take to end after SIGTERM."""


class RunFailed(IngestError):
    """A run of the ingest job failed. What it committed stays; the rest is pending.

    Fix: Act on the error of its step, then run the same command again: it goes on from what is committed.
    """


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """A run that succeeded: its id in Dagster, its source, its first and last window."""

    run_id: str
    source: str
    first: str
    last: str
    batches: int
    """Number of batches that waited when the run started; 0 for a replay."""


@dataclass(frozen=True, slots=True)
class RunRequest:
    """The work of one run: ingest new batches into ``windows``, or replay them.

    ``cursor``: the newest landed batch, for an ingest run. ``replay``: tags that say why the windows are
    replayed; None for an ingest run. ``tables``: visit only the tables of the contracts with these names;
    None for all.
    """

    source: str
    windows: WindowRange
    cursor: str | None = None
    replay: Mapping[str, str] | None = None
    tables: tuple[str, ...] | None = None

    @property
    def arguments(self) -> list[str]:
        """Return the request as arguments of the command ``ingest-run``."""
        arguments = [self.source, self.windows.first, self.windows.last]
        arguments += ["--cursor", self.cursor] if self.cursor else []
        arguments += ["--replay", json.dumps(dict(self.replay))] if self.replay is not None else []
        arguments += ["--tables", json.dumps(self.tables)] if self.tables is not None else []
        return arguments

    @property
    def span(self) -> str:
        """The windows in words."""
        first, last = self.windows.first, self.windows.last
        return first if first == last else f"{first} to {last}"


@dataclass
class IngestRuns:
    """The runs of one command. Their output goes to ``log``, which the first of them truncates."""

    settings: Settings
    home: Home
    _log_begun: bool = field(default=False, init=False)

    @property
    def log(self) -> str:
        return str(self.home.logs / "ingest-run.log")

    def run(self, request: RunRequest, *, batches: int = 0) -> FinishedRun:
        """Run the request and wait for its end. ``batches``: number of batches that wait for it. Raises
        ``RunFailed``."""
        answer = self._answer(request)
        if not answer["succeeded"]:
            raise self._failed(answer, request.span)
        windows = request.windows
        return FinishedRun(answer["run_id"], request.source, windows.first, windows.last, batches)

    def _answer(self, request: RunRequest) -> dict[str, Any]:
        """Return the JSON object that the process of the run prints at its end."""
        from omnisupport_ingest.runtime.dagster_home import dagster_environment

        environment = dagster_environment(self.settings, self.home)
        # No failpoint: logs.
        with open(self.log, "ab" if self._log_begun else "wb", opener=_owner_only) as log:
            self._log_begun = True
            child = subprocess.Popen(
                [sys.executable, "-m", "omnisupport_ingest.cli.main", "ingest-run", *request.arguments],
                env={**os.environ, **environment, "PYTHONWARNINGS": "ignore"},
                # The pipe is open as long as this process lives, so the run does not outlive it.
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                # Ctrl-C reaches only this process, which then ends the run.
                start_new_session=True,
            )
            assert child.stdout is not None
            try:
                printed = child.stdout.read()
                child.wait()
            except BaseException:
                _end(child)
                raise
        try:
            answer: dict[str, Any] = json.loads(printed.splitlines()[-1])
        except (ValueError, IndexError):
            raise RunFailed(
                f"The run of ingest_{request.source} ended with exit code {child.returncode} and did not say "
                "why.",
                fix=f"Read {self.log}; then run the same command again, it goes on from what is committed.",
            ) from None
        return answer

    def _failed(self, answer: dict[str, Any], span: str) -> RunFailed:
        failures = answer["failures"]
        problems = "; ".join(f"{each['step']}: {each['problem']}" for each in failures)
        fixes = list(dict.fromkeys(each["fix"] for each in failures if each["fix"]))
        fixes.append(
            f"The run is {answer['run_id']} in the Dagster UI, its log {self.log}. The same command again "
            "goes on from what is committed."
        )
        return RunFailed(
            f"The run over {span} failed. {problems or 'no step says why.'}", fix="\n".join(fixes)
        )


def _end(child: subprocess.Popen[bytes]) -> None:
    child.terminate()
    try:
        child.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _owner_only(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
