"""The Java virtual machines that tests start."""

from __future__ import annotations

import os
from pathlib import Path

import pyspark

CLASS_ARCHIVE = Path(__file__).parents[1] / ".pytest_cache" / f"spark-{pyspark.__version__}.jsa"
"""The classes that Spark loads, for a JVM to map: see ``class_archive``. A JVM passes over a missing one, and
over one that another Java or other jars have made."""

_FOR_SMALL_WORK = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=256m"

_ERRORS_ALONE = "-Xlog:disable -Xlog:all=error:stderr"
"""Java would write a warning between the lines of a command if it passes over an archive."""

_VARIABLE = "JDK_JAVA_OPTIONS"


def start_for_small_work() -> None:
    """Have every JVM from now on, of child processes too, start for small work, unless options are given.

    A JVM of a test lives for minutes and runs many small plans once: the optimising compiler and the
    parallel collector take more of the cores than they give back, and loading classes takes a fifth.
    """
    os.environ.setdefault(
        _VARIABLE, f'{_FOR_SMALL_WORK} {_ERRORS_ALONE} "-XX:SharedArchiveFile={CLASS_ARCHIVE}"'
    )


def archiving(archive: Path) -> dict[str, str]:
    """The environment of a process whose JVM leaves its classes in ``archive`` when it ends."""
    return {_VARIABLE: f'{_FOR_SMALL_WORK} {_ERRORS_ALONE} "-XX:ArchiveClassesAtExit={archive}"'}
