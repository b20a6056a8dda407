"""Dagster's daemon, which looks for sensors that are due every second instead of every five.

A sensor of ours waits for news within its tick. Between two ticks nobody listens, so that time is kept short;
what a look costs is a question to Dagster's records. In return it reads all definitions anew from the code
server every four minutes, not every one: that costs most, and a code server that has reloaded them or started
again is noticed by a thread of Dagster's within seconds.

Run as ``python -m omnisupport_ingest.defs.daemon``, with the options of ``dagster-daemon``.
"""

from __future__ import annotations

from dagster._daemon import controller, sensor
from dagster._daemon.cli import main

LOOP_SECONDS = 1
"""How often the daemon looks for sensors that are due; an interval of a sensor that is longer still holds."""

REFRESH_SECONDS = 240
"""How often the daemon reads the definitions anew though nothing tells that they have changed."""


def set_pace() -> None:
    """Have the daemon of this process look every ``LOOP_SECONDS`` and refresh every ``REFRESH_SECONDS``."""
    # Private constants of Dagster's, for which there is no setting: to be missed loudly if they have moved.
    assert sensor.MIN_INTERVAL_LOOP_TIME >= LOOP_SECONDS
    sensor.MIN_INTERVAL_LOOP_TIME = LOOP_SECONDS
    # A daemon whose refresh fails for as long as the tolerance ends itself; it tries again every few seconds.
    tolerance = controller.DEFAULT_WORKSPACE_FRESHNESS_TOLERANCE
    assert controller.RELOAD_WORKSPACE_INTERVAL <= REFRESH_SECONDS < tolerance
    controller.RELOAD_WORKSPACE_INTERVAL = REFRESH_SECONDS


if __name__ == "__main__":
    set_pace()
    main()
