"""Runs Dagster's daemon so that it looks for due sensors and for backfills sooner than by default.

Our sensors wait for new batches within a tick. Between two ticks nothing watches, so that time is kept short:
a second instead of five. The daemon looks for backfills every three seconds instead of every thirty, because
a replay of one window takes less than that. Each look costs a few queries of Dagster's storage. To balance
this, the daemon reads all definitions from the code server every four minutes instead of every minute, which
is its largest cost. A thread of Dagster's notices within seconds when a code server has reloaded or
restarted.

When it is stopped, it waits for the ticks in progress. Ticks that wait for news end at once, because the
daemon leaves a note in the home (``runtime/running.py``).

If a PostgreSQL keeps Dagster's records, the daemon of another machine may work with them: then this one waits
until that one is gone (``runtime/records_lease.py``).

Run as ``python -m omnisupport_ingest.defs.daemon``, with the options of ``dagster-daemon``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import dagster as dg
import psycopg2
from dagster._daemon import controller, sensor
from dagster._daemon.cli import main

from omnisupport_ingest.defs.lost_runs import end_lost_runs
from omnisupport_ingest.defs.run_launcher import PromptRunCoordinator
from omnisupport_ingest.home import Home
from omnisupport_ingest.runtime.dagster_services import DAEMON
from omnisupport_ingest.runtime.records_lease import RecordsLease
from omnisupport_ingest.runtime.running import note_stopping
from omnisupport_ingest.settings import STORAGE_URL, Settings

LOOP_SECONDS = 1
"""Seconds between two looks for due sensors; a sensor with a longer interval keeps it."""

BACKFILL_SECONDS = 3
"""Seconds between two looks for new backfills, and for ended runs of a backfill."""

BACKFILL_RETRIES = 50
"""Dagster's default is five, at one look every thirty seconds."""

REFRESH_SECONDS = 240
"""Seconds after which the daemon reads the definitions again, even without a sign that they changed."""


def set_pace() -> None:
    """Set the intervals above for the daemon of this process."""
    # Private constants of Dagster, because there is no setting. The assertions fail if they have moved.
    assert sensor.MIN_INTERVAL_LOOP_TIME >= LOOP_SECONDS
    sensor.MIN_INTERVAL_LOOP_TIME = LOOP_SECONDS
    assert controller.DEFAULT_DAEMON_INTERVAL_SECONDS >= BACKFILL_SECONDS
    controller.DEFAULT_DAEMON_INTERVAL_SECONDS = BACKFILL_SECONDS
    # A backfill is given up after so many failed looks in a row: in the same time as by default.
    os.environ.setdefault("DAGSTER_MAX_BACKFILL_RETRIES", str(BACKFILL_RETRIES))
    # A daemon ends itself if its refresh has failed for longer than the tolerance.
    tolerance = controller.DEFAULT_WORKSPACE_FRESHNESS_TOLERANCE
    assert controller.RELOAD_WORKSPACE_INTERVAL <= REFRESH_SECONDS < tolerance
    controller.RELOAD_WORKSPACE_INTERVAL = REFRESH_SECONDS


def end_ticks_soon(run_folder: Path) -> None:
    """Make ticks that wait for news end as soon as this daemon is stopped, because it waits for each of
    them."""
    # Private, as above: Dagster has no hook for the end.
    leave = controller.DagsterDaemonController.__exit__

    def end(self: controller.DagsterDaemonController, *raised: Any) -> None:
        note_stopping(run_folder, DAEMON)
        leave(self, *raised)

    controller.DagsterDaemonController.__exit__ = end  # type: ignore[method-assign]


def wait_until_alone() -> None:
    """Return once no other daemon works with the records. Ends this process as soon as another one may.

    The runs of other machines belong to a daemon that is gone, so those whose process nobody sees are ended.
    """
    if url := os.environ.get(STORAGE_URL):
        try:
            RecordsLease.wait_for(url, _say).keep(_end)
        except psycopg2.Error as problem:
            # The supervisor starts it again. libpq's text contains no password.
            sys.exit(f"The PostgreSQL of Dagster's records does not answer: {problem}")
        with dg.DagsterInstance.get() as instance:
            end_lost_runs(instance, elsewhere=True)


def _end() -> None:
    _say("The session with Dagster's records has ended, so another daemon may go on: this one ends.")
    # At once: the threads of Dagster's daemon may be in the middle of a tick.
    os._exit(1)


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    set_pace()
    PromptRunCoordinator.in_daemon = True
    wait_until_alone()
    settings = Settings()
    end_ticks_soon(Home.open(settings.home, settings.window_size).run)
    main()
