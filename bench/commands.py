"""Measure wall time and processor time of every command that only reads, on a home that is there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import click

from bench.report import write_result
from omnisupport_ingest.sources.postgres.embedded.server import EmbeddedPostgres

LIMIT = 2.0
"""Most seconds of processor time."""

LOOKS: dict[str, tuple[str, ...]] = {
    "settings": (),
    "status": ("--all",),
    "alarms": (),
    "ledger": (),
    "doctor": (),
    "report": ("--out", "{folder}/report.html"),
    "logs": (),
    "windows": (),
    "landing list": (),
    "landing show": ("{batch}",),
    "landing verify": (),
    "landing tail": ("-n", "10"),
    "checkpoint show": (),
    "checkpoint export": ("--out", "{folder}/checkpoints.json"),
    "explain": ("{table}", "--key", "{key}"),
    "tail": ("{table}",),
    "export": ("{table}", "--out", "{folder}/rows.csv"),
    "target status": (),
    "sources list": (),
    "sources validate": (),
    "sources diff": (),
    "source status": (),
    "source grants": (),
    "source connect": ("--print",),
    "preflight": (),
    "contracts validate": (),
    "contracts diff": (),
    "contracts changes": (),
    "contracts propose": ("{table}",),
    "pii show": (),
    "pii scan": (),
    "quarantine list": (),
    "retention show": (),
    "retention plan": (),
}
"""The measured commands with their arguments; names in braces are found in the home."""

LONG_LOOKS: dict[str, tuple[str, ...]] = {
    "as-of": ("{lsn}",),
    "replay": ("--from", "{window}", "--dry-run"),
}
"""Commands that start Spark and change nothing: they say what they wait for, and are measured apart."""

NO_LOOKS = {
    "runs a part of the platform, or needs one that runs": (
        *(
            "up",
            "demo",
            "tune",
            "sync",
            "capture",
            "materialize",
            "serve",
            "workload",
            "verify",
            "rebuild",
        ),
    ),
    "changes something, at once or when somebody says yes": (
        *("init", "land", "manifest load", "checkpoint import", "checkpoint rebuild", "target sync", "sweep"),
        "home copy",
        *("sources new", "sources retire", "source snapshot", "source repair", "source pause", "clean"),
        *("source resume", "source restart", "source drop", "source adopt", "contracts new", "contracts use"),
        *("contracts retype", "contracts withdraw", "pii forget", "quarantine release", "quarantine discard"),
        *("erase", "retention apply"),
    ),
    "needs a value, a file or an event that not every home has": (
        *("pii hash", "pii token", "pii lookup", "manifest validate", "quarantine show"),
    ),
}
"""Commands that are not measured, by the reason."""


@dataclass(frozen=True, slots=True)
class Timing:
    """What one command took, in seconds, the median of some calls; and the exit code of the last."""

    wall: float
    processor: float
    code: int


@click.command()
@click.option(
    "--home", type=click.Path(path_type=Path, exists=True), default=".omnisupport", show_default=True
)
@click.option("--table", default="tickets", show_default=True, help="Table that has a row with --key.")
@click.option("--key", default="1", show_default=True)
@click.option("--repeats", default=3, show_default=True)
def main(home: Path, table: str, key: str, repeats: int) -> None:
    """Time every command that only looks, on the demo's HOME, with its database running."""
    given = os.environ | {"OMNISUPPORT_HOME": str(home.absolute())}
    with _database(home.absolute()), tempfile.TemporaryDirectory() as folder:
        listed = json.loads(_output(given, "landing", "list", "--json"))["listed"]
        newest, stream = listed[-1], next(each for each in reversed(listed) if each["windows"])
        found = {"folder": folder, "table": table, "key": key, "batch": newest["batch_id"]}
        found |= {"lsn": stream["end_lsn"], "window": stream["windows"][0]}
        timings = {}
        for name, arguments in [*LOOKS.items(), *LONG_LOOKS.items()]:
            line = (*name.split(), *(each.format(**found) for each in arguments))
            timings[name] = _timed(given, line, repeats)
            one = timings[name]
            mark = "" if one.processor <= LIMIT else f"  above {LIMIT:.0f} s"
            click.echo(
                f"{name:18} {one.processor:5.2f} s of a core, {one.wall:5.2f} s, exit {one.code}{mark}"
            )
    write_result("commands", {name: [one.wall, one.processor, one.code] for name, one in timings.items()})


@contextmanager
def _database(home: Path) -> Iterator[None]:
    """Run the embedded database of the home, if it has one that is not running."""
    server = EmbeddedPostgres(home / "postgres")
    if server.running or not (home / "postgres").is_dir():
        yield
        return
    server.start()
    try:
        yield
    finally:
        server.stop()


def _command(line: tuple[str, ...]) -> list[str]:
    return [sys.executable, "-m", "omnisupport_ingest.cli.main", *line]


def _output(given: dict[str, str], *line: str) -> str:
    return subprocess.run(_command(line), env=given, capture_output=True, text=True, check=True).stdout


def _timed(given: dict[str, str], line: tuple[str, ...], repeats: int) -> Timing:
    walls, processors, code = [], [], 0
    for _ in range(repeats):
        began = time.perf_counter()
        process = subprocess.Popen(
            _command(line),
            env=given,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        # Also what the command waited for, such as its own processes.
        _, status, used = os.wait4(process.pid, 0)
        walls.append(time.perf_counter() - began)
        processors.append(used.ru_utime + used.ru_stime)
        code = process.returncode = os.waitstatus_to_exitcode(status)
    return Timing(median(walls), median(processors), code)


if __name__ == "__main__":
    main()
