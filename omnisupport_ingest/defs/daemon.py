"""Dagster's daemon, which looks for sensors that are due every second instead of every five.

A sensor of ours waits for news within its tick. Between two ticks nobody listens, so that time is kept short;
what a look costs is a question to Dagster's records.

Run as ``python -m omnisupport_ingest.defs.daemon``, with the options of ``dagster-daemon``.
"""

from __future__ import annotations

from dagster._daemon import sensor
from dagster._daemon.cli import main

LOOP_SECONDS = 1
"""How often the daemon looks for sensors that are due; an interval of a sensor that is longer still holds."""


def look_often() -> None:
    """Have the daemon of this process look every ``LOOP_SECONDS``."""
    # A private constant of Dagster's, for which there is no setting: to be missed loudly if it has moved.
    assert sensor.MIN_INTERVAL_LOOP_TIME >= LOOP_SECONDS
    sensor.MIN_INTERVAL_LOOP_TIME = LOOP_SECONDS


if __name__ == "__main__":
    look_often()
    main()
