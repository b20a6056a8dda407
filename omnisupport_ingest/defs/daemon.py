"""Runs Dagster's daemon so that it looks for due sensors and for backfills sooner than by default.

Our sensors wait for new batches within a tick. Between two ticks nothing watches, so that time is kept short:
a second instead of five. Backfills are looked for every three seconds instead of every thirty, as a replay of
one window takes less than that. Each look costs a few queries of Dagster's storage. To make up for it, the
daemon reads all definitions from the code server every four minutes instead of every minute, which is its
largest cost. A thread of Dagster's notices within seconds when a code server has reloaded or restarted.

When it is stopped, it waits for the ticks in progress. Those that wait for news end at once then, by a note
that it leaves in the home (``runtime/running.py``).

Where a PostgreSQL keeps Dagster's records, another machine's daemon may work with them: then this one stands
by until that one is gone (``runtime/records_lease.py``).

Run as ``python -m omnisupport_ingest.defs.daemon``, with the options of ``dagster-daemon``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import psycopg2
from dagster._daemon import controller, sensor
from dagster._daemon.cli import main

from omnisupport_ingest.home import Home
from omnisupport_ingest.runtime.dagster_services import DAEMON
from omnisupport_ingest.runtime.records_lease import RecordsLease
from omnisupport_ingest.runtime.running import note_stopping
from omnisupport_ingest.settings import STORAGE_URL, Settings

LOOP_SECONDS = 1
"""How often the daemon looks for due sensors; a sensor with a longer interval keeps it."""

BACKFILL_SECONDS = 3
"""How often the daemon looks for a new backfill, and whether the runs of one have ended."""

BACKFILL_RETRIES = 50
"""Dagster's default is five, at one look every thirty seconds."""

REFRESH_SECONDS = 240
"""How often the daemon reads the definitions again without a sign that they changed."""


def set_pace() -> None:
    """Make the daemon of this process keep the times above."""
    # Private constants of Dagster, because there is no setting; the assertions fail if they have moved.
    assert sensor.MIN_INTERVAL_LOOP_TIME >= LOOP_SECONDS
    sensor.MIN_INTERVAL_LOOP_TIME = LOOP_SECONDS
    assert controller.DEFAULT_DAEMON_INTERVAL_SECONDS >= BACKFILL_SECONDS
    controller.DEFAULT_DAEMON_INTERVAL_SECONDS = BACKFILL_SECONDS
    # A backfill is given up after so many looks in a row that failed: as long a time as by default.
    os.environ.setdefault("DAGSTER_MAX_BACKFILL_RETRIES", str(BACKFILL_RETRIES))
    # A daemon ends itself when its refresh has failed for longer than the tolerance.
    tolerance = controller.DEFAULT_WORKSPACE_FRESHNESS_TOLERANCE
    assert controller.RELOAD_WORKSPACE_INTERVAL <= REFRESH_SECONDS < tolerance
    controller.RELOAD_WORKSPACE_INTERVAL = REFRESH_SECONDS


def end_ticks_soon(run_folder: Path) -> None:
    """Let the ticks that wait for news end as soon as this daemon is told to: it waits for each of them."""
    # Private, as above: there is no call for the end.
    leave = controller.DagsterDaemonController.__exit__

    def end(self: controller.DagsterDaemonController, *raised: Any) -> None:
        note_stopping(run_folder, DAEMON)
        leave(self, *raised)

    controller.DagsterDaemonController.__exit__ = end  # type: ignore[method-assign]


def wait_until_alone() -> None:
    """Return once no other daemon works with the records; this process ends as soon as one may."""
    if url := os.environ.get(STORAGE_URL):
        try:
            RecordsLease.wait_for(url, _say).keep(_end)
        except psycopg2.Error as problem:
            # Started again by who supervises it; the text of libpq has no password.
            sys.exit(f"The PostgreSQL of Dagster's records does not answer: {problem}")


def _end() -> None:
    _say("The session with Dagster's records has ended, so another daemon may go on: this one ends.")
    # At once: the threads of Dagster's daemon may be in the middle of a tick.
    os._exit(1)


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    set_pace()
    wait_until_alone()
    settings = Settings()
    end_ticks_soon(Home.open(settings.home, settings.window_size).run)
    main()
