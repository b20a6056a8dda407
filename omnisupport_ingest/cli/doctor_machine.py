"""What ``doctor`` finds on the machine: versions, Java, memory, disk, permissions, ports, settings."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.requirements import Requirement

from omnisupport_ingest import __version__
from omnisupport_ingest.cli import render
from omnisupport_ingest.cli.status_health import SCARCE_BYTES, SOON_DAYS
from omnisupport_ingest.compiled import NOT_COMPILED
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.runtime.java import find_java
from omnisupport_ingest.runtime.ports import answers
from omnisupport_ingest.runtime.running import running_services, ui_port
from omnisupport_ingest.settings import NightlyRetention, Settings

if TYPE_CHECKING:
    from omnisupport_ingest.layers.workspace import Workspace
    from omnisupport_ingest.retention.forecast import DiskForecast

_UNITS = {"k": 1024, "m": 1024**2, "g": 1024**3, "t": 1024**4}


class Level(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One finding: what was looked at, how bad it is, what was seen, and the exact fix (empty where none)."""

    area: str
    level: Level
    seen: str
    fix: str = ""


def machine(settings: Settings) -> Iterator[Diagnosis]:
    """Yield the findings that need no home."""
    yield from _versions()
    yield _compiled()
    yield from _java(settings)
    yield from _memory(settings)
    yield from _ports(settings)
    yield from contradictions(settings)


def _versions() -> Iterator[Diagnosis]:
    yield Diagnosis(
        "environment",
        Level.OK,
        f"omnisupport-ingest {__version__}, Python {platform.python_version()}, {platform.platform()}",
    )
    try:
        wanted = importlib.metadata.requires("omnisupport-ingest") or []
    except importlib.metadata.PackageNotFoundError:
        yield Diagnosis(
            "versions",
            Level.NOTE,
            "The package is not installed; its dependencies are not compared.",
            f"{sys.executable} -m pip install --editable FOLDER, the folder of the project",
        )
        return
    tested, wrong = 0, []
    for each in map(Requirement, wanted):
        if each.marker is not None and not each.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(each.name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append((each, "is not installed"))
            continue
        tested += 1
        if not each.specifier.contains(version, prereleases=True):
            wrong.append((each, f"is {version}, outside the tested range {each.specifier}"))
    if not wrong:
        yield Diagnosis("versions", Level.OK, f"{tested} packages are in their tested ranges")
    for requirement, how in wrong:
        yield Diagnosis(
            "versions",
            Level.WARNING if "range" in how else Level.PROBLEM,
            f"{requirement.name} {how}.",
            f'{sys.executable} -m pip install "{requirement.name}{requirement.specifier}"',
        )


def _compiled() -> Diagnosis:
    if not NOT_COMPILED:
        return Diagnosis(
            "compiled", Level.OK, "the functions that read and hash changes and rows are compiled"
        )
    return Diagnosis(
        "compiled",
        Level.NOTE,
        f"Not compiled when the package was installed: {', '.join(NOT_COMPILED)}. Capture, snapshots, other "
        "ways in and the layers take up to several times the processor time, with the same result.",
        "Install a C compiler and Python's headers (Debian: apt install gcc python3-dev), then "
        "this package again (pip install --force-reinstall --no-deps)",
    )


def _java(settings: Settings) -> Iterator[Diagnosis]:
    if settings.spark_remote is not None:
        return
    # No failpoint: scratch files, which the next command removes if this process is killed.
    with tempfile.TemporaryDirectory() as scratch:
        try:
            java = find_java(Path(scratch))
        except IngestError as error:
            yield Diagnosis("java", Level.PROBLEM, error.problem, error.fix)
        else:
            yield Diagnosis("java", Level.OK, f"{java.version} of {java.found_in}, {java.real}")


def _memory(settings: Settings) -> Iterator[Diagnosis]:
    import psutil

    total = psutil.virtual_memory().total
    driver = spark_bytes(settings.spark_driver_memory)
    if driver is not None and driver > 0.7 * total:
        yield Diagnosis(
            "memory",
            Level.WARNING,
            f"OMNISUPPORT_SPARK_DRIVER_MEMORY is {settings.spark_driver_memory}, and the machine has "
            f"{render.size(total)}.",
            "Set OMNISUPPORT_SPARK_DRIVER_MEMORY to at most half of the machine's memory.",
        )
    else:
        yield Diagnosis(
            "memory",
            Level.OK,
            f"{render.size(total)}, {os.cpu_count()} cores; {settings.spark_driver_memory} of it for Spark",
        )


def spark_bytes(text: str) -> int | None:
    """Return the bytes of a Spark size (``2g``); None if the text is none."""
    number, unit = text[:-1], text[-1:].lower()
    return int(number) * _UNITS[unit] if unit in _UNITS and number.isdigit() else None


def _ports(settings: Settings) -> Iterator[Diagnosis]:
    run_folder = settings.home.absolute() / "run"
    ours = ui_port(run_folder)
    if ours is not None:
        yield Diagnosis("ports", Level.OK, f"the UI of this home listens on {ours}")
    elif not settings.webserver_port:
        yield Diagnosis("ports", Level.OK, "the port of the UI is any free one")
    else:
        yield _port(
            settings.webserver_port, "the UI", "OMNISUPPORT_WEBSERVER_PORT", "a free port (0 takes one)"
        )
    if settings.metrics_port is None:
        return
    if "metrics" in running_services(run_folder):
        yield Diagnosis("ports", Level.OK, f"the metrics of this home are served on {settings.metrics_port}")
    else:
        yield _port(settings.metrics_port, "metrics", "OMNISUPPORT_METRICS_PORT", "a free port")


def _port(port: int, of: str, variable: str, free: str) -> Diagnosis:
    if answers(port):
        return Diagnosis(
            "ports",
            Level.WARNING,
            f"Another program listens on {port}, the port of {of}.",
            f"Stop it, or set {variable} to {free}.",
        )
    return Diagnosis("ports", Level.OK, f"the port of {of} is free: {port}")


def contradictions(settings: Settings) -> Iterator[Diagnosis]:
    """Yield findings about settings that contradict each other, or have no effect beside another one."""
    set_fields = settings.model_fields_set
    if settings.slot_warning_bytes > settings.slot_alarm_bytes:
        yield Diagnosis(
            "settings",
            Level.WARNING,
            f"OMNISUPPORT_SLOT_WARNING_BYTES ({settings.slot_warning_bytes:,}) is above "
            f"OMNISUPPORT_SLOT_ALARM_BYTES ({settings.slot_alarm_bytes:,}): the alarm comes first.",
            "Set the warning below the alarm.",
        )
    if settings.spark_remote is not None:
        idle = sorted(
            {"spark_master", "spark_properties", "spark_driver_memory", "spark_local_dir"} & set_fields
        )
        for name in idle:
            yield Diagnosis(
                "settings",
                Level.WARNING,
                f"OMNISUPPORT_{name.upper()} has no effect: OMNISUPPORT_SPARK_REMOTE names a server.",
                f"Take OMNISUPPORT_{name.upper()} out, and set it where that server is started.",
            )
    if "stream_above_bytes" in set_fields and not settings.stream_transactions:
        yield Diagnosis(
            "settings",
            Level.WARNING,
            "OMNISUPPORT_STREAM_ABOVE_BYTES has no effect: OMNISUPPORT_STREAM_TRANSACTIONS is false.",
            "Take OMNISUPPORT_STREAM_ABOVE_BYTES out, or set OMNISUPPORT_STREAM_TRANSACTIONS to true.",
        )
    if settings.metrics_port is not None and settings.metrics_port == settings.webserver_port:
        yield Diagnosis(
            "settings",
            Level.WARNING,
            f"OMNISUPPORT_METRICS_PORT and OMNISUPPORT_WEBSERVER_PORT are both {settings.metrics_port}.",
            "Set one of them to another port.",
        )
    if settings.runs_kept_days is not None and settings.retention is NightlyRetention.PLAN:
        yield Diagnosis(
            "settings",
            Level.NOTE,
            "OMNISUPPORT_RUNS_KEPT_DAYS removes no run: OMNISUPPORT_RETENTION is plan, which only counts.",
            "Set OMNISUPPORT_RETENTION=apply to have them removed.",
        )
    if settings.batch_max_seconds > settings.window_size.length.total_seconds():
        yield Diagnosis(
            "settings",
            Level.WARNING,
            f"OMNISUPPORT_BATCH_MAX_SECONDS ({settings.batch_max_seconds:g}) is longer than a window "
            f"({settings.window_size}).",
            "Set OMNISUPPORT_BATCH_MAX_SECONDS to a few seconds.",
        )
    if settings.source_dsn is not None and settings.alarm_command is None and settings.alarm_webhook is None:
        yield Diagnosis(
            "settings",
            Level.NOTE,
            "Nobody hears of it when the slot is in danger.",
            "Set OMNISUPPORT_ALARM_COMMAND or OMNISUPPORT_ALARM_WEBHOOK.",
        )


# --- disk and permissions of a home -----------------------------------------------------------------------


def disk(workspace: Workspace) -> Diagnosis:
    """Check the free space on the disk of the home, and how long it lasts by the forecast of ``status``."""
    from omnisupport_ingest.retention.forecast import disk_forecast

    total = shutil.disk_usage(workspace.home.path).total
    return judged_disk(disk_forecast(workspace, datetime.now(UTC)), total)


def judged_disk(forecast: DiskForecast, total: int) -> Diagnosis:
    """Return how bad ``forecast`` is on a disk of ``total`` bytes."""
    fix = "omnisupport-ingest sweep deletes replaced versions of tables. Or use a larger disk."
    seen = f"{render.size(forecast.free)} free of {render.size(total)}"
    soon = forecast.days is not None and forecast.days < SOON_DAYS
    if forecast.days is not None:
        once = "" if forecast.settled else ", the first reading of the tables included, which comes once"
        seen += f", full in {forecast.days:,.0f} days at the pace of the last days (estimated{once})"
    if forecast.free < SCARCE_BYTES:
        level = Level.PROBLEM if forecast.free < SCARCE_BYTES // 4 else Level.WARNING
        return Diagnosis("disk", level, f"{seen}.", fix)
    if soon:
        return Diagnosis("disk", Level.WARNING if forecast.settled else Level.NOTE, f"{seen}.", fix)
    return Diagnosis("disk", Level.OK, seen)


def permissions(home: Path) -> Iterator[Diagnosis]:
    """Check that this user may write the home, and that no other user may read it."""
    if not os.access(home, os.W_OK | os.X_OK):
        yield Diagnosis(
            "permissions", Level.PROBLEM, f"This user may not write {home}.", f"chown -R $(id -un) {home}"
        )
        return
    wide = [
        name
        for name in ("landing", "lake", "dagster", "logs", "postgres", "run")
        if (home / name).is_dir() and stat.S_IMODE((home / name).stat().st_mode) & 0o077
    ]
    strangers = sorted(
        {str(each.stat().st_uid) for each in home.iterdir() if each.stat().st_uid != os.getuid()}
    )
    if wide:
        folders = " ".join(str(home / name) for name in wide)
        yield Diagnosis(
            "permissions",
            Level.WARNING,
            f"Others may look into {', '.join(wide)}.",
            f"chmod -R go-rwx {folders}",
        )
    if strangers:
        yield Diagnosis(
            "permissions",
            Level.WARNING,
            f"Parts of the home belong to other users ({', '.join(strangers)}).",
            f"chown -R $(id -un) {home}",
        )
    if not wide and not strangers:
        yield Diagnosis("permissions", Level.OK, "the home belongs to this user alone")
