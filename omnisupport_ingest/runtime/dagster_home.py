"""Writes Dagster's own folder: ``dagster.yaml``, and the workspace file that points at our code server.

Every start writes the files again from the settings, without importing Dagster. They contain no password:
PostgreSQL's URL is a reference to an environment variable of the processes.
"""

from __future__ import annotations

import json
import os
import re
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from omnisupport_ingest.durable import replace
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.home import Home
from omnisupport_ingest.runtime.environment import settings_environment
from omnisupport_ingest.runtime.private_folders import socket_folder
from omnisupport_ingest.settings import STORAGE_URL, Settings

TICKS_KEPT = timedelta(days=30)
"""Ticks of sensors and schedules are kept so long; those that requested nothing, for a day."""

_TICKS_PURGED = {"skipped": 1, **dict.fromkeys(("failure", "success", "started"), TICKS_KEPT.days)}

RUN_LOGS_KEPT = timedelta(days=30)
"""How long the output of a run is kept; Dagster itself never deletes it."""

LOCATION = "omnisupport_ingest"
"""Name of the code location in the Dagster UI."""

LAUNCHING = "omnisupport_ingest.defs.run_launcher"
"""The module whose classes launch runs."""

STORING = "omnisupport_ingest.defs.dagster_storage"
"""The module whose classes store Dagster's records, if no PostgreSQL does."""

BESIDE_TAG = "omnisupport/beside"
"""Run tag of runs that need no pool of an ingest run, so that ingest runs are launched beside them at
once. Its value says with which others they share places."""

BESIDE, TARGET, REVIEW = "true", "target", "review"
"""Values of the tag: of syncs of targets, which may wait for a warehouse for hours; of reviews, for which a
person waits; and of all others."""

_AT_ONCE = {BESIDE: 2, TARGET: 1, REVIEW: 1}
"""Most such runs at once: a long one, such as a large history, and a short one; a sync of a target; and a
review, which takes seconds. Of the places in the queue, one is left for reviews and replays."""

_POSTGRES_SCHEMES = frozenset({"postgres", "postgresql"})
_DRIVER = re.compile(r"^postgres(?:ql)?(?:\+\w+)?://")


def write_dagster_home(settings: Settings, home: Home) -> None:
    """Write ``dagster.yaml`` into ``home.dagster``."""
    # JSON is valid YAML, and needs no YAML library.
    text = json.dumps(_instance(settings, home), indent=2)
    with failpoint("runtime.file"):
        replace(home.dagster / "dagster.yaml", f"# Written at every start.\n{text}\n".encode())


def remove_old_run_logs(home: Home, *, older_than: timedelta = RUN_LOGS_KEPT) -> int:
    """Delete the logs of runs and ticks that were last written longer than ``older_than`` ago, and folders
    that nothing was written into for as long; return how many logs."""
    oldest, removed = time.time() - older_than.total_seconds(), 0
    for folder, folders, files in os.walk(home.logs / "runs", topdown=False):
        # Removing a file makes its folder young, so the folder goes the next time.
        old = [each for each in (Path(folder, name) for name in files) if _is_old(each, oldest)]
        for each in old:
            # No failpoint: logs older than a month; what stays goes the next time.
            each.unlink(missing_ok=True)
        removed += len(old)
        for each in (Path(folder, name) for name in folders):
            if _is_old(each, oldest):
                with suppress(OSError):
                    # It is not empty.
                    each.rmdir()
    return removed


def _is_old(path: Path, oldest: float) -> bool:
    try:
        return path.stat().st_mtime < oldest
    except FileNotFoundError:
        # Another process removes old ones, too.
        return False


def write_workspace(home: Home, socket: Path) -> None:
    """Write ``workspace.yaml`` into ``home.dagster``: the code server listens on the Unix socket
    ``socket``."""
    server = {"socket": str(socket), "location_name": LOCATION}
    text = json.dumps({"load_from": [{"grpc_server": server}]}, indent=2)
    with failpoint("runtime.file"):
        replace(home.dagster / "workspace.yaml", f"# Written at every start.\n{text}\n".encode())


def run_starter_socket(home: Home) -> Path:
    """Return the socket of the run starter; only the owner can connect."""
    return socket_folder(home.run) / "run-starter.sock"


def dagster_environment(settings: Settings, home: Home) -> dict[str, str]:
    """Return the environment of a process that works on this instance: Dagster's variables and all
    settings."""
    environment = settings_environment(settings) | {
        "DAGSTER_HOME": str(home.dagster),
        # Dagster then writes one event per run for its planned partitions, instead of one per partition.
        "DAGSTER_EMIT_PARTITION_SUBSET_IN_PLANNED_EVENTS": "1",
    }
    if settings.dagster_pg_url is not None:
        environment[STORAGE_URL] = with_driver(settings.dagster_pg_url.get_secret_value())
    return environment


def with_driver(url: str) -> str:
    """Return ``url`` with the name of the installed driver.

    SQLAlchemy 2.1 uses psycopg 3 for a bare ``postgresql://``; dagster-postgres installs psycopg2.
    """
    parts = urlsplit(url)
    if parts.scheme not in _POSTGRES_SCHEMES:
        return url
    return urlunsplit(parts._replace(scheme="postgresql+psycopg2"))


def without_driver(url: str) -> str:
    """Return ``url`` as libpq reads it, without SQLAlchemy's name of a driver."""
    return _DRIVER.sub("postgresql://", url)


def _instance(settings: Settings, home: Home) -> dict[str, Any]:
    """Return the content of ``dagster.yaml`` (Dagster documentation, "Dagster instance configuration")."""
    instance: dict[str, Any] = {
        "telemetry": {"enabled": False},
        "nux": {"enabled": False},
        # One step at a time per pool, and a pool per table. With the granularity `run`, two backfill runs
        # could write one table when its pool is used for the first time.
        "concurrency": {
            "pools": {"granularity": "op", "default_limit": 1},
            "runs": {
                "max_concurrent_runs": 4,
                # All sources begin theirs at the same minute; ingest runs need the cores meanwhile.
                "tag_concurrency_limits": [
                    {"key": BESIDE_TAG, "value": value, "limit": limit} for value, limit in _AT_ONCE.items()
                ],
            },
        },
        # A tick of a sensor waits for news, so one sensor must not wait for another.
        "sensors": {"use_threads": True, "num_workers": 32},
        # A run whose process was killed is found, marked as failed, and its pool slots are freed.
        "run_monitoring": {
            "enabled": True,
            "poll_interval_seconds": 10,
            "start_timeout_seconds": 180,
            "max_resume_run_attempts": 0,
            "free_slots_after_run_end_seconds": 10,
        },
        # Ours (`defs/run_launcher.py`): it forks the run starter, and ingest runs skip the queue.
        "run_launcher": {
            "module": LAUNCHING,
            "class": "ReadyRunLauncher",
            "config": {"socket": str(run_starter_socket(home))},
        },
        "run_coordinator": {"module": LAUNCHING, "class": "PromptRunCoordinator"},
        # The sensors request again what is still missing; retries by Dagster would do the work twice.
        "run_retries": {"enabled": False},
        "retention": {
            "sensor": {"purge_after_days": dict(_TICKS_PURGED)},
            "schedule": {"purge_after_days": dict(_TICKS_PURGED)},
        },
        "compute_logs": {
            "module": "dagster._core.storage.local_compute_log_manager",
            "class": "LocalComputeLogManager",
            "config": {"base_dir": str(home.logs / "runs")},
        },
    }
    if settings.dagster_pg_url is not None:
        instance["storage"] = {"postgres": {"postgres_url": {"env": STORAGE_URL}}}
    else:
        config = {"base_dir": str(home.dagster)}
        instance["storage"] = {"custom": {"module": STORING, "class": "KeptSqliteStorage", "config": config}}
    return instance
