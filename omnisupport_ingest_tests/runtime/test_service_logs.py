"""Logs of services: the last lines over rotations, errors with all that belongs to them, what comes next."""

from __future__ import annotations

import os
import tracemalloc
from collections import deque
from pathlib import Path

import pytest

from omnisupport_ingest.runtime.guard import RotatingLog
from omnisupport_ingest.runtime.service_logs import (
    LONGEST,
    Entries,
    LogFollower,
    ServiceLog,
    last_errors,
    last_lines,
    service_logs,
)


@pytest.fixture
def log(tmp_path: Path) -> ServiceLog:
    return ServiceLog("capture", tmp_path / "capture.log")


@pytest.mark.parametrize("count", [1, 2, 3, 39, 40, 41, 99, 100, 200])
def test_last_lines_come_from_older_parts_too_in_their_order(log: ServiceLog, count: int) -> None:
    writer = RotatingLog(log.path, limit=200, kept=20)
    for number in range(100):
        writer.write(b"line %02d\n" % number)
    assert len(log.parts) > 2
    assert list(last_lines(log, count)) == [f"line {number:02}" for number in range(100)][-count:]


@pytest.mark.parametrize("text", ["", "\n", "one", "one\n", "one\n\n", "\none\ntwo", "x" * 70_000 + "\nend"])
def test_last_lines_are_those_of_the_text_wherever_it_ends(log: ServiceLog, text: str) -> None:
    log.path.write_text(text)
    for count in (1, 2, 3):
        # A line beyond the longest is shown in pieces.
        assert "".join(last_lines(log, count)) == "".join(text.splitlines()[-count:])


@pytest.mark.slow
def test_large_log_is_never_in_memory(log: ServiceLog) -> None:
    with log.path.open("w") as file:
        for _ in range(200_000):
            file.write("2026-01-01 00:00:00 +0000 - dagster - ERROR - it failed again, at length\n")
    tracemalloc.start()
    try:
        # One after the other, as they are printed.
        assert len(deque(last_lines(log, 150_000), maxlen=1)) == 1
        assert len(last_errors(log, 2)) == 2
        assert tracemalloc.get_traced_memory()[1] < 1_000_000 < log.path.stat().st_size
    finally:
        tracemalloc.stop()


def errors_of(text: str) -> list[str]:
    entries = Entries()
    found = [entry for line in text.splitlines() for entry in entries.errors(line)]
    return ["\n".join(entry) for entry in [*found, *entries.rest()]]


DAGSTER = """\
2026-01-01 00:00:01 +0000 - dagster.daemon.SensorDaemon - ERROR - Sensor wal_batches failed
Traceback (most recent call last):
  File "a.py", line 1, in f
omnisupport_ingest.errors.IngestError: The chain is broken.
Fix: Restore the batch."""

SPARK = """\
2026-01-01 00:00:02 ERROR Executor: Exception in task 0.0
java.lang.RuntimeException: no
\tat a.b.c(D.java:1)
Caused by: java.io.IOException: disk
\t... 3 more"""

POSTGRES = """\
2026-01-01 00:00:03.123 UTC [7] ERROR:  could not write
2026-01-01 00:00:03.123 UTC [7] HINT:  Make room."""

CAPTURE = """\
Error: The source is not ready for capture:
- Key column tid is not in the replica identity.
Another line of the same problem.
Fix:
  ALTER TABLE a ADD PRIMARY KEY (tid);
Trying again in 4 s."""

TRACEBACK = """\
Traceback (most recent call last):
  File "a.py", line 1, in f

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "b.py", line 2, in g
ValueError"""


WELL, WELL_TIMED = "Landed 3 changes, up to 0/1", "2026-01-01 00:00:09 UTC [7] LOG:  Errors: 0"


@pytest.mark.parametrize(
    ("error", "beside"),
    [
        (CAPTURE, WELL),
        (CAPTURE, WELL_TIMED),
        (TRACEBACK, WELL),
        # A line without a time belongs to the one with a time that it follows.
        (DAGSTER, WELL_TIMED),
        (SPARK, WELL_TIMED),
        (POSTGRES, WELL_TIMED),
    ],
)
def test_error_is_found_whole_and_nothing_beside_it(error: str, beside: str) -> None:
    assert errors_of(f"{beside}\n{beside}\n{error}\n{beside}\n{beside}") == [error]


def test_errors_in_a_row_are_told_apart() -> None:
    assert errors_of("\n".join([CAPTURE, CAPTURE, DAGSTER, POSTGRES])) == [
        CAPTURE,
        CAPTURE,
        DAGSTER,
        POSTGRES,
    ]


def test_lines_of_an_endless_error_are_counted_not_kept() -> None:
    (told,) = errors_of("Traceback (most recent call last):\n" + "  again\n" * (LONGEST + 10))
    assert told.splitlines()[-1] == "… and 11 more lines" and len(told.splitlines()) == LONGEST + 1


def test_last_errors_are_the_newest_over_rotations_without_colours(log: ServiceLog) -> None:
    writer = RotatingLog(log.path, limit=200, kept=20)
    for number in range(30):
        writer.write(
            b"\x1b[32m2026-01-01 00:00:%02d +0000\x1b[0m - d - ERROR - \x07no %d\n" % (number, number)
        )
        writer.write(b"2026-01-01 00:01:00 +0000 - d - INFO - well\n")
    assert last_errors(log, 2) == [
        ["2026-01-01 00:00:28 +0000 - d - ERROR - no 28"],
        ["2026-01-01 00:00:29 +0000 - d - ERROR - no 29"],
    ]


def test_follower_goes_on_through_rotation_and_a_line_that_is_not_ended(log: ServiceLog) -> None:
    writer = RotatingLog(log.path, limit=40)
    writer.write(b"before\n")
    with LogFollower(log) as follower:
        assert list(follower.new_lines()) == []
        writer.write(b"one\ntw")
        assert list(follower.new_lines()) == ["one"]
        writer.write(b"o\n")
        writer.write(b"last of the part\n")
        writer.write(b"first of the next\n")
        assert log.path.with_name("capture.log.1").exists()
        assert list(follower.new_lines()) == ["two", "last of the part", "first of the next"]


def test_follower_of_a_log_that_is_emptied_in_place_begins_it_again(log: ServiceLog) -> None:
    log.path.write_text("a long line before\n")
    with LogFollower(log) as follower:
        log.path.write_text("new\n")
        assert list(follower.new_lines()) == ["new"]


def test_logs_of_a_home_are_those_with_something_in_them_the_last_written_last(tmp_path: Path) -> None:
    (tmp_path / "logs" / "runs").mkdir(parents=True)
    (tmp_path / "postgres").mkdir()
    for number, name in enumerate(("postgres/postgres.log", "logs/land.log", "logs/capture.log")):
        (tmp_path / name).write_text("x\n")
        os.utime(tmp_path / name, (number, number))
    (tmp_path / "logs" / "postgres.log").touch()
    found = [log.component for log in service_logs(tmp_path)]
    assert found == ["postgres-server", "land", "capture"]


def test_a_server_that_starts_or_stops_is_no_error(log: ServiceLog) -> None:
    log.path.write_text(
        "2026-01-02 09:00:00.000 UTC [7] FATAL:  the database system is starting up\n"
        "2026-01-02 09:00:01.000 UTC [8] LOG:  database system is ready to accept connections\n"
        '2026-01-02 09:00:02.000 UTC [9] FATAL:  role "x" does not exist\n'
        "2026-01-02 09:00:03.000 UTC [7] FATAL:  the database system is shutting down\n"
    )
    assert ["does not exist" in lines[0] for lines in last_errors(log, 5)] == [True]
