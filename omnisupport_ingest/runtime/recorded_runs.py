"""Runs, ticks and checks as the files of Dagster's instance have them, read without Dagster or its UI.

Dagster keeps them in SQLite (``dagster._core.storage``: tables ``runs``, ``job_ticks``,
``asset_check_executions``, ``daemon_heartbeats``). A home whose storage is a PostgreSQL has no such files:
then nothing is told.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from omnisupport_ingest.foreign import Unreadable, parse_json
from omnisupport_ingest.runtime.sensors_seen import SensorSeen

_SECONDS = 0.3
"""How long to wait for a file that somebody writes."""

_RUNS_LOOKED_AT = 300
"""So many runs back a failed one is told, for hours where an ingest run comes every few seconds."""

_GOING_ON = frozenset({"QUEUED", "NOT_STARTED", "STARTING", "STARTED", "CANCELING"})


@dataclass(frozen=True, slots=True)
class RunSeen:
    """A run. ``job``: its name for people; ``replay`` for the runs of a backfill.

    Times are timezone-aware; ``ended`` is None while it goes on.
    """

    run_id: str
    job: str
    status: str
    began: datetime | None
    ended: datetime | None

    @property
    def going_on(self) -> bool:
        return self.status in _GOING_ON

    @property
    def failed(self) -> bool:
        return self.status == "FAILURE"


@dataclass(frozen=True, slots=True)
class CheckSeen:
    """The last verdict of a check: ``asset`` with slashes, ``passed``, and what it said."""

    asset: str
    check: str
    passed: bool
    at: datetime
    said: str | None


@dataclass(frozen=True, slots=True)
class Recorded:
    """What the files say: the newest runs, the newest first; of every sensor its last tick; of every check
    its last verdict; and when the daemon was last alive, None before its first start.

    ``failed_jobs``: of each job whose last run that has ended failed, that run. A run that goes on does not
    make it well again.
    """

    runs: tuple[RunSeen, ...]
    failed_jobs: tuple[RunSeen, ...]
    sensors: tuple[SensorSeen, ...]
    checks: tuple[CheckSeen, ...]
    daemon_at: datetime | None

    @property
    def failed_checks(self) -> tuple[CheckSeen, ...]:
        return tuple(each for each in self.checks if not each.passed)


def recorded(folder: Path, *, most: int = 5) -> Recorded | None:
    """What the instance in ``folder`` (the home's ``dagster``) has recorded; None if it keeps no such files.

    ``most``: how many runs. A file that cannot be read, or is of another version, gives no runs.
    """
    runs, ticks = folder / "history" / "runs.db", folder / "schedules" / "schedules.db"
    if not runs.is_file():
        return None
    return Recorded(
        runs=tuple(_query(runs, lambda each: _runs(each, most))),
        failed_jobs=tuple(_query(runs, _failed_jobs)),
        sensors=tuple(_query(ticks, _sensors)),
        checks=tuple(_query(folder / "history" / "runs" / "index.db", _checks)),
        daemon_at=next(iter(_query(runs, _heartbeat)), None),
    )


def _query(file: Path, ask: Callable[[sqlite3.Connection], Iterator[Any]]) -> Sequence[Any]:
    if not file.is_file():
        return ()
    try:
        with closing(sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True, timeout=_SECONDS)) as connection:
            return list(ask(connection))
    except (sqlite3.Error, Unreadable, LookupError, TypeError, ValueError):
        return ()


def _runs(connection: sqlite3.Connection, most: int) -> Iterator[RunSeen]:
    rows = connection.execute(
        "SELECT run_id, pipeline_name, status, start_time, end_time, backfill_id FROM runs "
        "ORDER BY id DESC LIMIT ?",
        [most],
    )
    for run_id, job, status, began, ended, backfill in rows:
        name = "replay" if job.startswith("__") and backfill is not None else job
        yield RunSeen(run_id, name, status, _of_seconds(began), _of_seconds(ended))


def _failed_jobs(connection: sqlite3.Connection) -> Iterator[RunSeen]:
    newest: dict[str, RunSeen] = {}
    for run in _runs(connection, _RUNS_LOOKED_AT):
        if not run.going_on:
            newest.setdefault(run.job, run)
    yield from (run for run in newest.values() if run.failed)


def _sensors(connection: sqlite3.Connection) -> Iterator[SensorSeen]:
    newest = "SELECT max(id) FROM job_ticks WHERE type = 'SENSOR' GROUP BY selector_id"
    stopped = {
        row[0] for row in connection.execute("SELECT selector_id FROM instigators WHERE status = 'STOPPED'")
    }
    rows = connection.execute(
        f"SELECT selector_id, status, timestamp, tick_body FROM job_ticks WHERE id IN ({newest})"
    )
    sensors = []
    for selector, status, at, body in rows:
        tick = parse_json(body)
        runs, message = selector not in stopped, tick.get("skip_reason")
        sensors.append(SensorSeen(tick["job_name"], runs, status, _of_text(at), message))
    yield from sorted(sensors, key=lambda each: each.name)


def _checks(connection: sqlite3.Connection) -> Iterator[CheckSeen]:
    newest = (
        "SELECT max(id) FROM asset_check_executions "
        "WHERE execution_status IN ('SUCCEEDED', 'FAILED') GROUP BY asset_key, check_name"
    )
    rows = connection.execute(
        "SELECT asset_key, check_name, execution_status, evaluation_event_timestamp, "
        f"evaluation_event FROM asset_check_executions WHERE id IN ({newest}) ORDER BY asset_key, check_name"
    )
    for key, name, status, at, event in rows:
        message = None
        if status == "FAILED" and event is not None:
            message = parse_json(event)["dagster_event"]["event_specific_data"].get("description")
        moment = _of_text(at)
        if moment is not None:
            yield CheckSeen("/".join(parse_json(key)), name, status == "SUCCEEDED", moment, message)


def _heartbeat(connection: sqlite3.Connection) -> Iterator[datetime]:
    (text,) = connection.execute("SELECT max(timestamp) FROM daemon_heartbeats").fetchone()
    moment = _of_text(text)
    if moment is not None:
        yield moment


def _of_seconds(value: float | None) -> datetime | None:
    return None if value is None else datetime.fromtimestamp(value, UTC)


def _of_text(text: str | None) -> datetime | None:
    """A time as SQLAlchemy writes it to SQLite: UTC without a zone."""
    return None if text is None else datetime.fromisoformat(text).replace(tzinfo=UTC)
