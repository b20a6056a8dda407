"""Reads runs, ticks and checks from the storage of Dagster's instance, without Dagster or its UI.

Dagster stores them in SQLite files of the home or in a PostgreSQL, with the same tables
(``dagster._core.storage``: ``runs``, ``job_ticks``, ``instigators``, ``asset_check_executions``,
``daemon_heartbeats``).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from omnisupport_ingest.foreign import Unreadable, parse_json
from omnisupport_ingest.runtime.dagster_home import without_driver
from omnisupport_ingest.runtime.sensors_seen import SensorSeen

if TYPE_CHECKING:
    from pydantic import SecretStr

T = TypeVar("T")

_SECONDS = 0.3
"""Seconds to wait for a file that another process writes."""

_POSTGRES_SECONDS = 2
"""Seconds to wait for a connection to PostgreSQL, and for each answer."""

_REPORTED_FOR = timedelta(days=35)
"""How long the failed last run of a job is reported: longer than the time between two runs of any job. A job
that does not exist any more has no other run."""

_GOING_ON = ("STARTED", "CANCELING", "STARTING", "NOT_STARTED", "QUEUED")
"""States of a run that has not ended, the most advanced first."""

_COLUMNS = "run_id, pipeline_name, status, start_time, end_time, backfill_id"


@dataclass(frozen=True, slots=True)
class RunSeen:
    """A run. ``job``: its name for people; ``replay`` for the runs of a backfill.

    Times are timezone-aware; ``ended`` is None while the run is in progress.
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
    """The last verdict of a check. ``asset``: its key with slashes. ``said``: the text of the verdict."""

    asset: str
    check: str
    passed: bool
    at: datetime
    said: str | None


@dataclass(frozen=True, slots=True)
class Recorded:
    """The records of an instance.

    ``runs``: all runs in progress, the started ones first, then the newest that have ended. ``failed_jobs``:
    for each job whose last ended run failed, that run; a run in progress does not change that. ``sensors``:
    the last tick of each. ``checks``: the last verdict of each. ``daemon_at``: when the daemon was last
    alive; None before its first start. ``unread``: what could not be read, and is left
    out (run, sensor, check).
    """

    runs: tuple[RunSeen, ...]
    failed_jobs: tuple[RunSeen, ...]
    sensors: tuple[SensorSeen, ...]
    checks: tuple[CheckSeen, ...]
    daemon_at: datetime | None
    unread: tuple[str, ...] = ()

    @property
    def failed_checks(self) -> tuple[CheckSeen, ...]:
        return tuple(each for each in self.checks if not each.passed)

    def in_force(self, tables: Collection[tuple[str, str]]) -> Recorded:
        """Return the records without the checks of withdrawn contracts, which nothing judges any more.

        ``tables``: the tables (source, name) that have contracts. Checks of other tables, and of sources
        without a table, are left out.
        """
        sources = {source for source, _ in tables}
        checks = (each for each in self.checks if _is_in_force(each.asset, tables, sources))
        return replace(self, checks=tuple(checks))


def _is_in_force(asset: str, tables: Collection[tuple[str, str]], sources: Collection[str]) -> bool:
    source, *rest = asset.split("/")
    name = rest[-1] if rest else ""
    if rest[:1] == ["target"]:
        return (source, name) in tables
    if rest[:1] == ["history"]:
        name = name.removesuffix("_history")
    if name.startswith("dim_"):
        return (source, name.removeprefix("dim_")) in tables
    return source in sources


def recorded(folder: Path, storage: SecretStr | None = None, *, most: int = 5) -> Recorded | None:
    """Return what the instance in ``folder`` (the home's ``dagster``) has recorded; None if there is nothing
    yet.

    ``storage``: the PostgreSQL with the records, if they are not in the folder; the result is None if it does
    not answer. ``most``: number of ended runs to return. Records that cannot be read, or are of another
    version, are left out.
    """
    if storage is not None:
        return _of_postgres(storage, most)
    runs, ticks = folder / "history" / "runs.db", folder / "schedules" / "schedules.db"
    if not runs.is_file():
        return None
    checks = folder / "history" / "runs" / "index.db"
    files = (runs, runs, ticks, checks, runs)
    return _of_parts([_query(file, part) for file, part in zip(files, _parts(most), strict=True)])


def _parts(most: int) -> tuple[Callable[[_Ask], Iterator[Any]], ...]:
    """Return what finds each part of the records, in the order of the fields of ``Recorded``."""
    return (lambda ask: _runs(ask, most)), _failed_jobs, _sensors, _checks, _heartbeat


def _of_parts(found: Sequence[Sequence[Any] | None]) -> Recorded:
    """Return the records; a part is None if it could not be read."""
    runs, failed_jobs, sensors, checks, beats = (tuple(each or ()) for each in found)
    kinds = zip(("run", "run", "sensor", "check", "heartbeat"), found, strict=True)
    unread = tuple(dict.fromkeys(kind for kind, part in kinds if part is None and kind != "heartbeat"))
    return Recorded(runs, failed_jobs, sensors, checks, next(iter(beats), None), unread)


_Ask = Callable[..., Iterable[Any]]
"""Takes a query and its parameters, each a ``?`` in the query; returns the rows."""

_UNREADABLE = (Unreadable, LookupError, TypeError, ValueError)


def _query(file: Path, read: Callable[[_Ask], Iterator[Any]]) -> Sequence[Any] | None:
    """Return what ``read`` finds; nothing before Dagster has made the table, None if it cannot be read."""
    if not file.is_file():
        return ()
    try:
        with closing(sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True, timeout=_SECONDS)) as connection:
            return list(read(connection.execute))
    except (sqlite3.Error, *_UNREADABLE) as error:
        return () if "no such table" in str(error) else None


def daemon_seen(folder: Path, storage: SecretStr | None = None) -> datetime | None:
    """Return when the daemon was last alive; None before its first start, or if the records cannot be read.

    ``folder`` and ``storage``: as of ``recorded``.
    """
    if storage is None:
        return next(iter(_query(folder / "history" / "runs.db", _heartbeat) or ()), None)
    return _asked_of_postgres(storage, lambda read: next(iter(read(_heartbeat) or ()), None))


def _of_postgres(storage: SecretStr, most: int) -> Recorded | None:
    return _asked_of_postgres(storage, lambda read: _of_parts([read(part) for part in _parts(most)]))


_Read = Callable[[Callable[[_Ask], Iterator[Any]]], Sequence[Any] | None]
"""Returns what a function finds with its queries, as ``_query`` does."""


def _asked_of_postgres(storage: SecretStr, questions: Callable[[_Read], T]) -> T | None:
    import psycopg2

    options = f"-c statement_timeout={_POSTGRES_SECONDS * 1000}"
    dsn = without_driver(storage.get_secret_value())
    try:
        with closing(psycopg2.connect(dsn, connect_timeout=_POSTGRES_SECONDS, options=options)) as connection:
            connection.set_session(readonly=True, autocommit=True)

            def ask(sql: str, parameters: Sequence[Any] = ()) -> Iterable[Any]:
                cursor = connection.cursor()
                cursor.execute(sql.replace("?", "%s"), parameters)
                return list(cursor.fetchall())

            def read(of: Callable[[_Ask], Iterator[Any]]) -> Sequence[Any] | None:
                try:
                    return tuple(of(ask))
                except psycopg2.errors.UndefinedTable:
                    return ()
                except (psycopg2.Error, *_UNREADABLE):
                    return None

            return questions(read)
    except psycopg2.Error:
        return None


def _runs(ask: _Ask, most: int) -> Iterator[RunSeen]:
    """Yield every run in progress, and the ``most`` newest that have ended."""
    states = ", ".join("?" for _ in _GOING_ON)
    going_on = ask(
        f"SELECT {_COLUMNS} FROM runs WHERE status IN ({states}) ORDER BY id DESC", list(_GOING_ON)
    )
    yield from sorted(_seen(going_on), key=lambda each: _GOING_ON.index(each.status))
    yield from _ended(ask, most)


def _ended(ask: _Ask, most: int, where: str = "true", *values: str) -> Iterator[RunSeen]:
    states = ", ".join("?" for _ in _GOING_ON)
    rows = ask(
        f"SELECT {_COLUMNS} FROM runs WHERE status NOT IN ({states}) AND {where} ORDER BY id DESC LIMIT ?",
        [*_GOING_ON, *values, most],
    )
    yield from _seen(rows)


def _seen(rows: Iterable[Any]) -> Iterator[RunSeen]:
    for run_id, job, status, began, ended, backfill in rows:
        name = "replay" if job.startswith("__") and backfill is not None else job
        yield RunSeen(run_id, name, status, _of_seconds(began), _of_seconds(ended))


def _failed_jobs(ask: _Ask) -> Iterator[RunSeen]:
    # A query for each job, which walks its index from the newest run on: the rows are large.
    since = datetime.now(UTC) - _REPORTED_FOR
    for (job,) in list(ask("SELECT DISTINCT pipeline_name FROM runs ORDER BY pipeline_name")):
        # The runs of backfills are those of a job of their own (``RunSeen.job``).
        kinds = ("true",) if not job.startswith("__") else ("backfill_id IS NULL", "backfill_id IS NOT NULL")
        for kind in kinds:
            for run in _ended(ask, 1, f"pipeline_name = ? AND {kind}", job):
                if run.failed and (run.ended is None or run.ended > since):
                    yield run


def _sensors(ask: _Ask) -> Iterator[SensorSeen]:
    newest = "SELECT max(id) FROM job_ticks WHERE type = 'SENSOR' GROUP BY selector_id"
    stopped = {row[0] for row in ask("SELECT selector_id FROM instigators WHERE status = 'STOPPED'")}
    rows = ask(f"SELECT selector_id, status, timestamp, tick_body FROM job_ticks WHERE id IN ({newest})")
    sensors = []
    for selector, status, at, body in rows:
        tick = parse_json(body)
        runs, message = selector not in stopped, tick.get("skip_reason")
        sensors.append(SensorSeen(tick["job_name"], runs, status, _of_text(at), message))
    yield from sorted(sensors, key=lambda each: each.name)


def _checks(ask: _Ask) -> Iterator[CheckSeen]:
    newest = (
        "SELECT max(id) FROM asset_check_executions "
        "WHERE execution_status IN ('SUCCEEDED', 'FAILED') GROUP BY asset_key, check_name"
    )
    rows = ask(
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


def _heartbeat(ask: _Ask) -> Iterator[datetime]:
    ((text,),) = ask("SELECT max(timestamp) FROM daemon_heartbeats")
    moment = _of_text(text)
    if moment is not None:
        yield moment


def _of_seconds(value: float | None) -> datetime | None:
    return None if value is None else datetime.fromtimestamp(value, UTC)


def _of_text(moment: str | datetime | None) -> datetime | None:
    """Return a time from SQLAlchemy's text: UTC without a zone; SQLite stores it as text."""
    if isinstance(moment, str):
        moment = datetime.fromisoformat(moment)
    return None if moment is None else moment.replace(tzinfo=UTC)
