"""A capture that is paused or restarted stays in its process, so that `up` has nothing to start again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from omnisupport_ingest.sources.postgres.capture.requests import PauseRequest

_LOOK_SECONDS = 0.5


def until_resumed(
    run: Callable[[], None], note: PauseRequest, stop: threading.Event, *, look: float = _LOOK_SECONDS
) -> Callable[[], None]:
    """``run``, which after ``CapturePaused`` waits until ``note`` is gone and is called again.

    After ``CaptureRestarts`` it is called again at once. It looks for the note every ``look`` seconds and
    ends when ``stop`` is set.
    """

    def run_or_wait() -> None:
        from omnisupport_ingest.sources.postgres.session.errors import CapturePaused, CaptureRestarts

        while not stop.is_set():
            try:
                run()
                return
            except CaptureRestarts as restarts:
                click.echo(f"{restarts.problem} The capture starts again.", err=True)
                continue
            except CapturePaused as paused:
                click.echo(f"{paused.problem} It waits for: {paused.fix}", err=True)
            while note.present and not stop.wait(look):
                pass
            if not stop.is_set():
                click.echo("The pause is over; the capture goes on.", err=True)

    return run_or_wait
