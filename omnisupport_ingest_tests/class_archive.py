"""The classes that Spark loads for a run of the layers, archived once per checkout for the JVMs of tests.

A JVM that maps them (class data sharing: JEP 310 and 350) need not look for each in three hundred jars: a
cold session and its first write take half the time.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

from omnisupport_ingest_tests.jvm import CLASS_ARCHIVE, archiving
from omnisupport_ingest_tests.layers.story import Change, Commit, Story
from omnisupport_ingest_tests.recovery import pipeline

_TOLD = (
    Commit(10, 1, [Change("c", 1, {"title": "one", "body": "text"})]),
    Commit(20, 61, [Change("u", 1, {"title": "two"}, unchanged=("body",)), Change("d", 2)]),
)


def make_class_archive() -> None:
    """Make the archive unless it is there; takes half a minute. Who comes meanwhile goes on without it.

    Where this Java cannot, an empty one is left, which every JVM passes over.
    """
    CLASS_ARCHIVE.parent.mkdir(parents=True, exist_ok=True)
    with CLASS_ARCHIVE.with_suffix(".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        if CLASS_ARCHIVE.exists():
            return
        with tempfile.TemporaryDirectory(dir=CLASS_ARCHIVE.parent) as folder:
            made = Path(folder) / "classes.jsa"
            said = _leave_classes(made, Path(folder) / "told")
            if not made.exists():
                warnings.warn(f"no class archive, Spark starts slower: {said[-500:]}", stacklevel=1)
                made.touch()
            made.rename(CLASS_ARCHIVE)


def _leave_classes(archive: Path, folder: Path) -> str:
    """Run every layer in a JVM of its own that leaves its classes in ``archive``; what the process said."""
    Story(folder).land(*_TOLD)
    command = [sys.executable, "-m", pipeline.__name__, str(folder)]
    # Its pipe is also the JVM's, which archives after Python has ended: this returns when both have.
    ended = subprocess.run(
        command,
        env=os.environ | archiving(archive),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return ended.stdout
