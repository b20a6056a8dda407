"""The Java virtual machines that tests start."""

from __future__ import annotations

import os

_OPTIONS = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=256m"


def start_for_small_work() -> None:
    """Have every JVM from now on, of child processes too, start for small work, unless options are given.

    A JVM of a test lives for minutes and runs many small plans once: the optimising compiler and the
    parallel collector take more of the cores than they give back.
    """
    os.environ.setdefault("JDK_JAVA_OPTIONS", _OPTIONS)
