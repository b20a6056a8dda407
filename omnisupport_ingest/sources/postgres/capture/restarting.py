"""Asking a running capture to start again, and seeing that it did."""

from __future__ import annotations

import time
from pathlib import Path

from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.sources.postgres.capture.capture_record import LOGS, CaptureRecord, CaptureRecords
from omnisupport_ingest.sources.postgres.capture.pause import PauseNote
from omnisupport_ingest.sources.postgres.capture.restart import RestartNote
from omnisupport_ingest.sources.postgres.session.errors import CapturePaused, NotRestartable
from omnisupport_ingest.sources.postgres.session.lease import Lease

_LOOK_SECONDS = 0.1
_SETTLE_SECONDS = 1.0
"""How long a capture may seem not to run that is between an end and a start."""

_START = "Start it: `omnisupport-ingest up`, or `omnisupport-ingest capture`."


def ask_for_restart(run_folder: Path, landing: Path, source: str, reason: str) -> CaptureRecord:
    """Leave the note, and return the start that is to end. ``landing``: the landing folder of ``source``.

    ``CapturePaused`` or ``NotRestartable`` if no capture runs that would obey.
    """
    pause = PauseNote(landing).read()
    if pause is not None:
        raise CapturePaused(
            f"The capture of {source} is paused {pause}, so it does not run.",
            fix="omnisupport-ingest source resume",
        )
    settled = time.monotonic() + _SETTLE_SECONDS
    while True:
        try:
            record = _following(run_folder, landing, source)
            break
        except NotRestartable:
            if time.monotonic() > settled:
                raise
        time.sleep(_LOOK_SECONDS)
    RestartNote(landing).write(reason)
    return record


def _following(run_folder: Path, landing: Path, source: str) -> CaptureRecord:
    holder, record = Lease.holder(run_folder, source), CaptureRecords(landing).read()
    if holder is None:
        failed = record is not None and record.failing_since is not None
        raise NotRestartable(
            f"No capture of {source} runs now" + ("; the last one has failed." if failed else "."),
            fix="See why: omnisupport-ingest source status. Under `up` it starts again by itself once that "
            "is repaired."
            if failed
            else _START,
        )
    if record is None or record.ended is not None or record.pid != holder.pid:
        raise NotRestartable(
            f"Process {holder.pid} on {holder.host} works on {source}, but it has not begun to capture.",
            fix="Wait until it is done, and look: omnisupport-ingest source status",
        )
    if not record.follows:
        raise NotRestartable(
            f"The capture of {source} that runs (process {record.pid} on {record.host}) ends by itself: it "
            "is that of `sync` or `capture --once`.",
            fix="Let it end and start it again, or follow the source with `omnisupport-ingest up`.",
        )
    return record


def wait_for_restart(landing: Path, source: str, before: CaptureRecord, *, seconds: float) -> CaptureRecord:
    """The start after ``before``, once it has come through its checks.

    ``IngestError`` with its own problem and fix if it failed, or if it did not start within ``seconds``.
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
        time.sleep(_LOOK_SECONDS)
    raise NotRestartable(
        f"The restart is asked for, but the capture of {source} has not started again after "
        f"{seconds:.0f} seconds.",
        fix=f"It does when the step it is in is over; watch it: omnisupport-ingest source status, {LOGS}",
    )
