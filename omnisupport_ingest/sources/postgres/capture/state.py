"""The state of a capture, and the record of its last start, from which the state is derived.

The record keeps the last error of a capture that has ended. ``capture_state`` returns whether capture runs,
is paused, has failed, or was stopped. ``request_restart`` makes a running capture start again.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Self

from omnisupport_ingest import durable
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.foreign import Unreadable
from omnisupport_ingest.locks import Holder
from omnisupport_ingest.records import encode, read_note
from omnisupport_ingest.sources.postgres.capture.requests import Pause, PauseRequest, RestartRequest
from omnisupport_ingest.sources.postgres.session.errors import CapturePaused, NotRestartable
from omnisupport_ingest.sources.postgres.session.lease import lease_holder

_FILE = "capture.json"

LOGS = "omnisupport-ingest logs --component capture --errors"


@dataclass(frozen=True, slots=True)
class LastError:
    """Why a capture ended. ``error``: the class of the error, ours or Python's, or ``Killed``.

    ``at``: when it ended; for a capture that was killed, the last time it is known to have run.
    """

    error: str
    problem: str
    fix: str
    at: datetime

    @classmethod
    def of(cls, error: Exception) -> Self:
        """Return what may be kept of ``error``: not the text of a foreign error, which may quote a row."""
        name, now = type(error).__name__, datetime.now(UTC)
        if isinstance(error, IngestError):
            return cls(name, error.problem, error.fix, now)
        return cls(
            name,
            f"Capture ended by an unexpected {name}.",
            f"Read the log ({LOGS}), or run `omnisupport-ingest --debug capture` and report the traceback.",
            now,
        )


@dataclass(frozen=True, slots=True)
class CaptureRecord:
    """The last start of a capture. ``follows``: it runs until it is stopped. ``ready``: its checks passed.

    ``ended``: None while it runs, and also if it was killed. ``failing_since``: when the first of the
    consecutive failures up to this start happened; None if this start went well. ``last_error``: may be of an
    earlier start. ``definition`` and ``contracts``: see ``outdated``; empty in older records.
    """

    pid: int
    host: str
    started: datetime
    follows: bool
    ready: bool
    ended: datetime | None
    failing_since: datetime | None
    last_error: LastError | None
    definition: Mapping[str, str] = field(default_factory=dict)
    contracts: Mapping[str, str] = field(default_factory=dict)

    def killed(self, last_landed: datetime | None) -> LastError:
        """Return the error for a capture that is gone without a recorded end.

        ``last_landed``: when its newest batch landed; None if none has.
        """
        at = max(self.started, last_landed or self.started)
        return LastError(
            "Killed",
            f"Capture, process {self.pid} on {self.host}, has ended without recording why: it was killed, "
            f"its machine went down, or its disk was full. The last that is known of it is of "
            f"{at.isoformat(timespec='seconds')}.",
            "Start it again, it goes on where landing ends: omnisupport-ingest up. Killed again and again, "
            "it may lack memory: look at the log of the system.",
            at,
        )


class CaptureRecords:
    """The record of one source, in its landing folder. Only the holder of the lease writes it."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / _FILE

    def read(self) -> CaptureRecord | None:
        """Return the record of the last start; None if there was none, or the record cannot be read."""
        try:
            return read_note(CaptureRecord, self._path)
        except (OSError, Unreadable):
            return None

    def write(self, record: CaptureRecord) -> None:
        """Replace the record. Durable on return."""
        with failpoint("source.capture_record"):
            durable.replace(self._path, encode(record))


@contextmanager
def recorded(
    records: CaptureRecords,
    *,
    follows: bool,
    last_landed: Callable[[], datetime | None],
    definition: Mapping[str, str] | None = None,
    contracts: Mapping[str, str] | None = None,
) -> Iterator[Callable[[], None]]:
    """Return a context that records the start of a capture and how it ends.

    The context gives a function to call when the checks of the start have passed. ``last_landed``: returns
    when the newest batch landed; called if the capture before was killed. ``definition`` and ``contracts``:
    as in the record.
    """
    before = records.read()
    failing_since = before.failing_since if before is not None else None
    last_error = before.last_error if before is not None else None
    if before is not None and before.ended is None:
        last_error = before.killed(last_landed())
        failing_since = failing_since or last_error.at
    now = datetime.now(UTC)
    record = CaptureRecord(
        os.getpid(), socket.gethostname(), now, follows, False, None, failing_since, last_error,
        definition or {}, contracts or {},
    )  # fmt: skip
    records.write(record)

    def ready() -> None:
        nonlocal record
        record = replace(record, ready=True, failing_since=None)
        records.write(record)

    def end(error: LastError | None) -> None:
        at = datetime.now(UTC)
        if error is None:
            records.write(replace(record, ended=at, failing_since=None))
            return
        since = record.failing_since or error.at
        # Raise the error itself, not the failure to record it.
        with suppress(OSError):
            records.write(replace(record, ended=at, failing_since=since, last_error=error))

    try:
        yield ready
    except Exception as error:
        end(LastError.of(error))
        raise
    except BaseException:
        # A person has stopped it.
        end(None)
        raise
    end(None)


class State(StrEnum):
    """The state of a capture. ``FAILED``: the last start failed or was killed, and no later one went well."""

    RUNNING = "RUNNING"
    PAUSED = "PAUSED"
    FAILED = "FAILED"
    STOPPED = "STOPPED"


@dataclass(frozen=True, slots=True)
class CaptureState:
    """The state of a capture, with details. ``since``: None if nothing is recorded. ``holder``: the process
    that captures now.

    ``killed``: the process is gone without a recorded end; ``since`` is then the last time it is known to
    have run. ``last_error``: stays after a later start has gone well.
    """

    state: State
    since: datetime | None
    holder: Holder | None
    killed: bool
    last_error: LastError | None


def capture_state(
    run_folder: Path, landing: Path, source: str, paused: Pause | None, last_landed: datetime | None
) -> CaptureState:
    """Return the state of the capture of ``source``.

    ``landing``: the landing folder of the source. ``last_landed``: when its newest batch landed.
    """
    holder, record = _lease_and_record(run_folder, source, CaptureRecords(landing))
    error = record.last_error if record is not None else None
    failing_since = record.failing_since if record is not None else None
    killed = False
    if record is not None and record.ended is None and (holder is None or holder.pid != record.pid):
        killed, error = True, record.killed(last_landed)
        failing_since = failing_since or error.at
    # A start has gone well only when its checks have passed and that is recorded.
    if holder is not None and failing_since is None:
        return CaptureState(State.RUNNING, holder.since, holder, False, error)
    if paused is not None:
        return CaptureState(State.PAUSED, paused.since, holder, killed, error)
    if failing_since is not None:
        return CaptureState(State.FAILED, failing_since, holder, killed, error)
    return CaptureState(State.STOPPED, record.ended if record else None, None, False, error)


def _lease_and_record(
    run_folder: Path, source: str, records: CaptureRecords
) -> tuple[Holder | None, CaptureRecord | None]:
    """Return lease and record of the same moment: a capture that starts or ends must not look killed."""
    record = records.read()
    while True:
        holder = lease_holder(run_folder, source)
        again = records.read()
        if again == record:
            return holder, record
        record = again


_POLL_SECONDS = 0.1
_RESTART_GAP_SECONDS = 1.0
"""Seconds during which a capture may seem not to run because it ends and starts again."""

_START = "Start it: `omnisupport-ingest up`, or `omnisupport-ingest capture`."


def request_restart(run_folder: Path, landing: Path, source: str, reason: str) -> CaptureRecord:
    """Request a restart; return the record of the capture that will end.

    ``landing``: the landing folder of ``source``. Raises ``CapturePaused`` or ``NotRestartable`` if no
    running capture would obey.
    """
    pause = PauseRequest(landing).read()
    if pause is not None:
        raise CapturePaused(
            f"The capture of {source} is paused {pause}, so it does not run.",
            fix="omnisupport-ingest source resume",
        )
    give_up = time.monotonic() + _RESTART_GAP_SECONDS
    while True:
        try:
            record = _running_record(run_folder, landing, source)
            break
        except NotRestartable:
            if time.monotonic() > give_up:
                raise
        time.sleep(_POLL_SECONDS)
    RestartRequest(landing).write(reason)
    return record


def _running_record(run_folder: Path, landing: Path, source: str) -> CaptureRecord:
    holder, record = lease_holder(run_folder, source), CaptureRecords(landing).read()
    if holder is None:
        failed = record is not None and record.failing_since is not None
        raise NotRestartable(
            f"No capture of {source} runs now" + ("; the last one has failed." if failed else "."),
            fix=f"See why: omnisupport-ingest source status {source}. Under `up` it starts again by itself "
            "once that is repaired."
            if failed
            else _START,
        )
    if record is None or record.ended is not None or record.pid != holder.pid:
        raise NotRestartable(
            f"Process {holder.pid} on {holder.host} works on {source}, but it has not begun to capture.",
            fix=f"Wait until it is done, and look: omnisupport-ingest source status {source}",
        )
    if not record.follows:
        raise NotRestartable(
            f"The capture of {source} that runs (process {record.pid} on {record.host}) ends by itself: it "
            "is that of `sync` or `capture --once`.",
            fix="Let it end and start it again, or follow the source with `omnisupport-ingest up`.",
        )
    return record


def wait_for_restart(landing: Path, source: str, before: CaptureRecord, *, seconds: float) -> CaptureRecord:
    """Wait for the start after ``before``; return its record when its checks have passed.

    Raises ``IngestError`` with the problem and the fix if that start failed, and ``NotRestartable`` if no
    start succeeds within ``seconds``.
    """
    give_up = time.monotonic() + seconds
    while time.monotonic() < give_up:
        now = CaptureRecords(landing).read()
        if now is not None and now.started != before.started:
            if now.ready:
                return now
            if now.ended is not None and now.last_error is not None and now.failing_since is not None:
                error = now.last_error
                raise IngestError(
                    f"The capture of {source} has ended, and failed when it started again: {error.problem}",
                    fix=error.fix,
                )
        time.sleep(_POLL_SECONDS)
    raise NotRestartable(
        f"The restart is requested, but the capture of {source} has not started again after "
        f"{seconds:.0f} seconds.",
        fix=f"It restarts when its current step ends; watch it: omnisupport-ingest source status {source}, "
        f"{LOGS}",
    )
