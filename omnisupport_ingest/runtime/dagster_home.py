"""Dagster's own folder: ``dagster.yaml``, and the workspace that points at our code server.

Written anew at every start from the settings, and without importing Dagster. No password is in it:
PostgreSQL's URL is a reference to a variable that only the processes have.
"""

from __future__ import annotations

import json
import re
import shutil
import time
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

RUN_LOGS_KEPT = timedelta(days=30)
"""How long what a run printed is kept; Dagster itself never deletes it."""

LOCATION = "omnisupport_ingest"
"""Name of the code location in the Dagster UI."""

LAUNCHING = "omnisupport_ingest.defs.run_launcher"
"""The module whose classes launch the runs."""

STORING = "omnisupport_ingest.defs.dagster_storage"
"""The module whose classes keep Dagster's records, where no PostgreSQL does."""

BESIDE_TAG = "omnisupport/beside"
"""Run tag: the run holds no pool that an ingest run needs, so ingest runs are launched beside it at once."""

_BESIDE_AT_ONCE = 2
"""How many such runs there may be at once: a long one, say a large history, and a short one."""

_POSTGRES_SCHEMES = frozenset({"postgres", "postgresql"})
_DRIVER = re.compile(r"^postgres(?:ql)?(?:\+\w+)?://")


def write_dagster_home(settings: Settings, home: Home) -> None:
    """Write ``dagster.yaml`` into ``home.dagster``."""
    # JSON is YAML, and needs no YAML library here.
    text = json.dumps(_instance(settings, home), indent=2)
    with failpoint("runtime.file"):
        replace(home.dagster / "dagster.yaml", f"# Written at every start.\n{text}\n".encode())


def remove_old_run_logs(home: Home, *, older_than: timedelta = RUN_LOGS_KEPT) -> int:
    """Delete the logs of runs that last wrote to them longer ago; returns how many were deleted."""
    oldest = time.time() - older_than.total_seconds()
    folders = [folder for folder in (home.logs / "runs").glob("*") if folder.stat().st_mtime < oldest]
    for folder in folders:
        # No failpoint: logs older than a month; what stays goes at the next start.
        shutil.rmtree(folder, ignore_errors=True)
    return len(folders)


def write_workspace(home: Home, socket: Path) -> None:
    """Write ``workspace.yaml`` into ``home.dagster``: the code server behind the Unix socket ``socket``."""
    server = {"socket": str(socket), "location_name": LOCATION}
    text = json.dumps({"load_from": [{"grpc_server": server}]}, indent=2)
    with failpoint("runtime.file"):
        replace(home.dagster / "workspace.yaml", f"# Written at every start.\n{text}\n".encode())


def run_starter_socket(home: Home) -> Path:
    """Return the socket of the process that stands ready for runs; only the owner can connect."""
    return socket_folder(home.run) / "run-starter.sock"


def dagster_environment(settings: Settings, home: Home) -> dict[str, str]:
    """What a process needs to work on this instance: Dagster's variables and all settings."""
    environment = settings_environment(settings) | {
        "DAGSTER_HOME": str(home.dagster),
        # One event per run for its planned partitions instead of one per partition.
        "DAGSTER_EMIT_PARTITION_SUBSET_IN_PLANNED_EVENTS": "1",
    }
    if settings.dagster_pg_url is not None:
        environment[STORAGE_URL] = with_driver(settings.dagster_pg_url.get_secret_value())
    return environment


def with_driver(url: str) -> str:
    """``url`` naming the driver that is installed.

    SQLAlchemy 2.1 takes a bare ``postgresql://`` for psycopg 3; dagster-postgres brings psycopg2.
    """
    parts = urlsplit(url)
    if parts.scheme not in _POSTGRES_SCHEMES:
        return url
    return urlunsplit(parts._replace(scheme="postgresql+psycopg2"))


def without_driver(url: str) -> str:
    """``url`` as libpq reads it: SQLAlchemy's name of a driver is no part of a connection string."""
    return _DRIVER.sub("postgresql://", url)


def _instance(settings: Settings, home: Home) -> dict[str, Any]:
    """The content of ``dagster.yaml`` (Dagster documentation, "Dagster instance configuration")."""
    instance: dict[str, Any] = {
        "telemetry": {"enabled": False},
        "nux": {"enabled": False},
        # One step at a time per pool, and a pool per table: `run` granularity would let two
        # backfill runs write one table when its pool is used for the first time.
        "concurrency": {
            "pools": {"granularity": "op", "default_limit": 1},
            "runs": {
                "max_concurrent_runs": 4,
                # All sources begin theirs at the same minute; ingest runs need the cores meanwhile.
                "tag_concurrency_limits": [{"key": BESIDE_TAG, "limit": _BESIDE_AT_ONCE}],
            },
        },
        # A sensor's tick waits for news, so sensors must not wait for one another.
        "sensors": {"use_threads": True, "num_workers": 32},
        # A killed run is found, marked failed, and gives its pool slots back.
        "run_monitoring": {
            "enabled": True,
            "poll_interval_seconds": 10,
            "start_timeout_seconds": 180,
            "max_resume_run_attempts": 0,
            "free_slots_after_run_end_seconds": 10,
        },
        # Ours (`defs/run_launcher.py`): a fork of the process that stands ready, and past the queue.
        "run_launcher": {
            "module": LAUNCHING,
            "class": "ReadyRunLauncher",
            "config": {"socket": str(run_starter_socket(home))},
        },
        "run_coordinator": {"module": LAUNCHING, "class": "PromptRunCoordinator"},
        # The sensors ask again for what is still missing; a retry by Dagster would do it twice.
        "run_retries": {"enabled": False},
        "retention": {
            "sensor": {"purge_after_days": {"skipped": 1, "failure": 30, "success": 30, "started": 30}},
            "schedule": {"purge_after_days": {"skipped": 1, "failure": 30, "success": 30, "started": 30}},
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
