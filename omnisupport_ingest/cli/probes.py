"""Health over HTTP: whether the platform is alive, and whether it is ready; served beside the metrics.

``/livez`` answers 200 while looks at the home end in time and, if `up` holds the home, its loop runs. A
program that restarts hanging processes queries it. ``/readyz`` answers 200 while the home can be reached and
has free space, Dagster's daemon is alive, and each capture reads its slot. A service that never ran on this
home is not required, because capture may run on another machine. Otherwise both answer 503; the body says
what was found.

A thread looks, and an answer reports the result of its last look, so it comes at once whatever hangs.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from http.client import HTTPException
from typing import TYPE_CHECKING, Any

from omnisupport_ingest.cli import render
from omnisupport_ingest.cli.opening import existing_home
from omnisupport_ingest.cli.status_health import SCARCE_BYTES
from omnisupport_ingest.contracts.in_force import contracts_in_force
from omnisupport_ingest.contracts.kept import usable
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.runtime.home_lock import DAEMON_HOLDS, holder
from omnisupport_ingest.runtime.ports import LOOPBACK
from omnisupport_ingest.runtime.recorded_runs import daemon_seen
from omnisupport_ingest.runtime.running import seconds_since_beat
from omnisupport_ingest.sources.postgres.capture.state import CaptureRecords
from omnisupport_ingest.storage import storage_of

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

    from omnisupport_ingest.home import Home
    from omnisupport_ingest.settings import Settings

LIVE, READY = "/livez", "/readyz"

UP = "up"
"""Name of the command that supervises all services, as the holder of a home and in findings."""

_LOOK_SECONDS = 10.0
_LATE_SECONDS = 60.0
"""A look that ended longer ago says nothing about the present."""

_STUCK_SECONDS = 300.0
"""A loop that has not run for so long hangs. This is longer than the library of an object store retries."""

_HEARTBEAT_SECONDS = 180.0
"""Limit for the last heartbeat; Dagster's daemon records one every 30 seconds."""

_SOURCE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Finding:
    """What a look found about ``name``: whether it is well, and a text about it."""

    name: str
    ok: bool
    says: str


class Health:
    """The result of the last look. ``watch`` calls ``look`` again and again, on one thread."""

    def __init__(self, look: Callable[[], Iterable[Finding]]) -> None:
        self._look = look
        self._found: tuple[Finding, ...] = (Finding("home", ok=False, says="not looked at yet"),)
        self._ended = time.monotonic()

    def watch(self, stop: threading.Event) -> None:
        """Look until ``stop`` is set."""
        while not stop.is_set():
            self.look_once()
            stop.wait(_LOOK_SECONDS)

    def look_once(self) -> None:
        try:
            found = tuple(self._look())
        except Exception as problem:
            # Any error must be reported, and the next look may succeed. The error's text may quote a row.
            found = (Finding("home", ok=False, says=f"the look failed: {type(problem).__name__}"),)
        self._found, self._ended = found, time.monotonic()

    def live(self) -> tuple[Finding, ...]:
        """Return whether looks end in time and the loop of `up` runs."""
        return (self._ended_within(_STUCK_SECONDS), *(each for each in self._found if each.name == UP))

    def ready(self) -> tuple[Finding, ...]:
        """Return what the last look found, and whether it was recent."""
        return (self._ended_within(_LATE_SECONDS), *self._found)

    def _ended_within(self, seconds: float) -> Finding:
        ago = time.monotonic() - self._ended
        return Finding("look", ago < seconds, f"the last one ended {ago:.0f} s ago")


def look(settings: Settings) -> Iterator[Finding]:
    """Look at the home of ``settings`` and at what runs on it."""
    try:
        home = existing_home(settings)
        # This sends a request if landing and lake are in an object store.
        storage_of(home.landing / "any").sources()
        writable = os.access(home.run, os.W_OK)
        yield Finding("home", writable, str(home.path) if writable else f"{home.run} cannot be written")
    except (IngestError, OSError) as problem:
        says = problem.problem if isinstance(problem, IngestError) else f"{problem.strerror}"
        yield Finding("home", ok=False, says=says)
        return
    free = shutil.disk_usage(home.path).free
    yield Finding("disk", free >= SCARCE_BYTES, f"{render.size(free)} free")
    yield from _loop(home)
    ran = [each for each in (_daemon(home, settings), *_captures(home, settings)) if each is not None]
    yield from ran or [Finding("services", ok=False, says="neither capture nor the daemon ran on this home")]


def _loop(home: Home) -> Iterator[Finding]:
    held_by, ago = holder(home), seconds_since_beat(home.run)
    if held_by is not None and held_by.command == UP and held_by.since is not None and ago is not None:
        # `up` may be starting, and the beat may be that of an earlier `up`.
        ago = min(ago, (datetime.now(UTC) - held_by.since).total_seconds())
        yield Finding(UP, ago < _STUCK_SECONDS, f"its loop went round {ago:.0f} s ago")


def _daemon(home: Home, settings: Settings) -> Finding | None:
    held_by, seen = holder(home), daemon_seen(home.path / "dagster", settings.dagster_pg_url)
    if seen is None:
        if held_by is None:
            return None
        return Finding("daemon", ok=False, says="no heartbeat of it is known")
    ago = (datetime.now(UTC) - seen).total_seconds()
    return Finding("daemon", ago < _HEARTBEAT_SECONDS, f"its last heartbeat was {ago:.0f} s ago")


def daemon_hangs(home: Home, settings: Settings) -> bool:
    """Whether the daemon that holds ``home`` sends no heartbeat, although it started long enough ago.

    If the records cannot be read, the result is False: restarting the daemon would not help.
    """
    held_by = holder(home)
    if held_by is None or held_by.command not in (UP, DAEMON_HOLDS) or held_by.since is None:
        return False
    seen = daemon_seen(home.path / "dagster", settings.dagster_pg_url)
    if seen is None:
        return False
    return (datetime.now(UTC) - max(seen, held_by.since)).total_seconds() > _HEARTBEAT_SECONDS


def _captures(home: Home, settings: Settings) -> Iterator[Finding]:
    """Yield a finding of each log whose capture ever ran on this home."""
    from omnisupport_ingest.cli.status_logs import log_document, log_probes

    settings = usable(settings).settings
    probes = log_probes(settings, home, contracts_in_force(settings))
    answered_by = time.monotonic() + _SOURCE_SECONDS
    for of_log, probe in probes:
        if CaptureRecords(home.path / "landing" / of_log.source).read() is not None:
            yield attached(log_document(of_log, home, probe, answered_by))


def attached(log: dict[str, Any]) -> Finding:
    """Return whether a log is captured, from its part of the document of ``status``: the capture runs and
    reads the slot. A pause counts as well, because a person wants it."""
    name, state = f"capture {log['name']}", log["capture"]
    if state == "PAUSED":
        return Finding(name, ok=True, says=f"paused {log['paused']}")
    if state != "RUNNING":
        return Finding(name, ok=False, says=log["last_error"] or f"is {str(state).lower()}")
    if not log["reachable"]:
        return Finding(name, ok=False, says=f"runs; its source does not answer: {log['problem']}")
    if not log["slot"]["read"]:
        return Finding(name, ok=False, says=f"runs, and nothing reads the slot {log['slot']['name']}")
    return Finding(name, ok=True, says="runs, and reads its slot")


def application(health: Health, others: WSGIApplication) -> WSGIApplication:
    """Return the application that answers for ``health``; ``others`` answers every other path."""

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        looks = {LIVE: health.live, READY: health.ready}
        if (path := environ.get("PATH_INFO")) not in looks:
            return others(environ, start_response)
        found = looks[path]()
        ok = all(each.ok for each in found)
        headers = [("Content-Type", "application/json"), ("Cache-Control", "no-store")]
        start_response("200 OK" if ok else "503 Service Unavailable", headers)
        return [f"{json.dumps({'ok': ok, 'found': [asdict(each) for each in found]})}\n".encode()]

    return answer


def is_live(port: int) -> bool:
    """Whether ``/livez`` at the loopback ``port`` answers 200."""
    # A proxy from the environment must not be used for loopback.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://{LOOPBACK}:{port}{LIVE}", timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, HTTPException):
        return False
