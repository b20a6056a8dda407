"""Keeps the processes of one command running, and leaves none of them behind.

Each service runs under a guard of its own (``guard.py``) in a session of its own: Ctrl-C in the terminal
reaches only the supervisor, which stops the services in reverse order of start.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.home import Home

_GUARD = Path(__file__).with_name("guard.py")
_POLL_SECONDS = 0.2
_GUARD_SECONDS = 15.0
"""Seconds that a guard may need, beyond its service's grace, to end what the service left behind."""


class ServiceFailed(IngestError):
    """A service that the command cannot do without ended, or did not become ready in time.

    Fix: Read the log that the message names, then run the same command again.
    """

    exit_code = 7


@dataclass(frozen=True)
class Backoff:
    """When to restart a service: after ``first`` seconds, then twice as long each time, up to ``longest``.

    Once the service has run for ``healthy`` seconds, the delay is ``first`` again.
    """

    first: float = 1.0
    longest: float = 60.0
    healthy: float = 60.0

    def delay(self, failures: int) -> float:
        """Return the seconds to wait after the ``failures``-th failure in a row, counted from 1."""
        return float(min(self.longest, self.first * 2 ** min(failures - 1, 30)))


@dataclass(frozen=True)
class Service:
    """A process to supervise. ``environment`` is added to this process's own."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    restart: Backoff | None = None
    """None: if the service ends, the command fails."""
    stop_signal: signal.Signals = signal.SIGTERM
    grace: float = 20.0
    """Seconds between ``stop_signal`` and SIGKILL."""


@dataclass
class _Running:
    service: Service
    guard: subprocess.Popen[bytes] | None
    """None while the service waits to be started again."""
    started: float
    failures: int = 0
    start_at: float = 0.0


class Supervisor:
    """Starts, watches and stops services. A context manager; at its end it stops them all."""

    def __init__(self, home: Home, *, report: Callable[[str], None] = print) -> None:
        """``report`` is called with one line when a service ends unexpectedly or starts again."""
        self._home, self._tell = home, report
        self._services: list[_Running] = []

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def names(self) -> tuple[str, ...]:
        """The services that were started and not stopped, in order of start."""
        return tuple(running.service.name for running in self._services)

    def log_of(self, name: str) -> Path:
        """Return the file with the output of the service."""
        return self._home.logs / f"{name}.log"

    def start(self, service: Service) -> None:
        """Start ``service``; its name must not be in use here."""
        if service.name in self.names:
            raise ValueError(f"a service named {service.name} is running")
        self._services.append(_Running(service, self._launch(service), time.monotonic()))

    def check(self) -> None:
        """Start again the services that have ended, once they are due. Raises ``ServiceFailed`` for one that
        must not be started again."""
        now = time.monotonic()
        for running in self._services:
            if running.guard is None:
                if now >= running.start_at:
                    self._report(f"{running.service.name} starts again")
                    running.guard, running.started = self._launch(running.service), now
            elif (code := running.guard.poll()) is not None:
                self._ended(running, code, now)

    def wait(self, ready: Callable[[], bool], *, service: str, seconds: float) -> None:
        """Return when ``ready()`` is true. Raises ``ServiceFailed`` if a service ends or ``seconds`` pass
        first."""
        deadline = time.monotonic() + seconds
        while not ready():
            self.check()
            if time.monotonic() > deadline:
                raise ServiceFailed(
                    f"{service} did not become ready within {seconds:.0f} seconds.",
                    fix=f"Look at the logs in {self._home.logs}, then run the same command again.",
                )
            time.sleep(_POLL_SECONDS)

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Watch the services until ``until()`` is true; by default, without end."""
        while not until():
            self.check()
            time.sleep(_POLL_SECONDS)

    def stop(self, name: str | None = None) -> None:
        """Stop the service ``name``, or all, the last started first. None of their processes is left."""
        for running in reversed(list(self._services)):
            if name in (None, running.service.name):
                _stop(running)
                self._services.remove(running)

    def _report(self, line: str) -> None:
        # The report may go to a file on a full disk, or to a closed terminal.
        with contextlib.suppress(OSError):
            self._tell(line)

    def _launch(self, service: Service) -> subprocess.Popen[bytes]:
        # Standard input stays open as long as this process lives; when it closes, the guard stops the
        # service.
        return subprocess.Popen(
            [
                sys.executable,
                "-P",
                str(_GUARD),
                f"--log={self.log_of(service.name)}",
                f"--pid-file={self._home.run / service.name}.pid",
                f"--stop-signal={int(service.stop_signal)}",
                f"--grace={service.grace}",
                "--",
                *service.command,
            ],
            env={**os.environ, **service.environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _ended(self, running: _Running, code: int, now: float) -> None:
        name, restart = running.service.name, running.service.restart
        if restart is None:
            raise ServiceFailed(
                f"{name} ended with exit code {code}.",
                fix=f"Its log {self.log_of(name)} says why; then run the same command again.",
            )
        running.failures = 1 if now - running.started > restart.healthy else running.failures + 1
        delay = restart.delay(running.failures)
        running.guard, running.start_at = None, now + delay
        self._report(f"{name} ended with exit code {code} ({self.log_of(name)}); again in {delay:.0f} s")


def _stop(running: _Running) -> None:
    guard = running.guard
    if guard is None:
        return
    assert guard.stdin is not None
    guard.stdin.close()
    try:
        guard.wait(running.service.grace + _GUARD_SECONDS)
    except subprocess.TimeoutExpired:
        guard.kill()
        guard.wait()
