"""``capture``: land the WAL of the source, up to now or until it is stopped."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from omnisupport_ingest.cli.opening import log_of, open_home, open_settings, require_source_in_use
from omnisupport_ingest.cli.render import say_err
from omnisupport_ingest.cli.stopping import stop_on_signal
from omnisupport_ingest.cli.views import landed_line, pass_progress
from omnisupport_ingest.contracts.in_force import contracts_in_force
from omnisupport_ingest.contracts.kept import Documents, keep, usable
from omnisupport_ingest.landing.manifest import Manifest
from omnisupport_ingest.runtime.supervisor import Backoff
from omnisupport_ingest.sources.postgres.capture.requests import PauseRequest
from omnisupport_ingest.sources.postgres.session.errors import (
    CapturePaused,
    CaptureRestarts,
    SourceUnavailable,
)
from omnisupport_ingest.verify.one_pass import one_pass

if TYPE_CHECKING:
    from omnisupport_ingest.contracts.model import Contracts
    from omnisupport_ingest.home import Home
    from omnisupport_ingest.settings import Settings
    from omnisupport_ingest.sources.postgres.capture.capture import Capture


@click.command()
@click.argument("name", required=False)
@click.option(
    "--once/--follow",
    default=False,
    help="--once: end when everything that had committed at the start has landed. --follow, the default: go "
    "on until Ctrl-C.",
)
@click.option(
    "--new-epoch",
    "reason",
    metavar="REASON",
    help="Go on after a gap: drop the slot, begin a new epoch for this REASON, and read every table again.",
)
def capture(name: str | None, once: bool, reason: str | None) -> None:
    """Land the WAL of the source as batches, until Ctrl-C or, with --once, up to now.

    NAME is a captured source (`sources list`); by default the one that the settings name.

    Tables that have no snapshot yet are read beside the WAL. If the source does not answer, --follow waits
    for it, and --once fails. Both stop at a problem that needs a person (a missing right, a lost slot).

    `up` and `materialize` take what has landed into the lake.

    \b
    Example:
      omnisupport-ingest capture --once && omnisupport-ingest materialize

    Exit code: 0 done, 2 usage or settings, 4 the source does not answer, 5 the source is not set up
    for capture, 6 another capture or another reader of the slot, 7 a gap in the source.
    """
    from omnisupport_ingest.landing.store import LandingStore
    from omnisupport_ingest.sources.postgres.capture.capture import Capture
    from omnisupport_ingest.sources.postgres.slot.slot import SlotNotMade

    # A new home must record the settings of its own source, not those of the log NAME.
    home = open_home(open_settings())

    def as_it_is_now() -> tuple[Settings, Contracts]:
        # For a person a wrong document is an error. A service goes on with the copy.
        if once or reason is not None:
            documents = Documents(open_settings())
        else:
            documents = usable(open_settings())
            keep(documents)
            if documents.notice is not None:
                say_err(documents.notice)
        return log_of(documents.settings, name), contracts_in_force(documents.settings)

    settings, contracts = as_it_is_now()
    require_source_in_use(settings, contracts)

    def landed(batch: Manifest) -> None:
        if line := landed_line(batch):
            say_err(f"{line} ({batch.batch_id})")

    def begin_new_epoch(stop: threading.Event) -> None:
        if reason is not None:
            try:
                epoch = Capture(settings, home, contracts).begin_new_epoch(reason, stop=stop)
            except SlotNotMade:
                raise KeyboardInterrupt from None
            say_err(f"Epoch {epoch.number} has begun: {reason}")

    if once:
        with embedded_source(settings, home), stop_on_signal() as stop:
            begin_new_epoch(stop)
            land_up_to_now(Capture(settings, home, contracts, landed), settings, home, stop)
        return
    with stop_on_signal() as stop:
        begin_new_epoch(stop)
        note = PauseRequest(LandingStore(home.landing, settings.source).folder)
        kept: list[Capture] = []

        def start() -> None:
            # After a restart or a pause, settings and contracts are read again. After a source that did not
            # answer, the same capture goes on: nobody has requested a new contract.
            if kept:
                running = kept.pop()
            else:
                now, contracts = as_it_is_now()
                running = Capture(now, home, contracts, landed, lambda: as_it_is_now()[1])
            try:
                running.run(None, stop)
            except SourceUnavailable:
                kept.append(running)
                raise

        follow(until_resumed(start, note, stop), stop, retry=SourceUnavailable)


def land_up_to_now(running: Capture, settings: Settings, home: Home, stop: threading.Event) -> None:
    """Land what has committed by now. Raises ``KeyboardInterrupt`` if ``stop`` was set before the end."""
    from omnisupport_ingest.sources.postgres.embedded.dsn import source_dsn
    from omnisupport_ingest.sources.postgres.session.server import current_wal_lsn

    until = current_wal_lsn(source_dsn(settings, home))
    running.run(until, stop)
    if stop.is_set():
        raise KeyboardInterrupt
    if running.left_out is None:
        say_err(f"Everything that the source had committed at {until} has landed.")
    running.raise_left_out()


@contextmanager
def embedded_source(settings: Settings, home: Home) -> Iterator[None]:
    """Run the embedded server during the block, if it is the source and does not run."""
    from omnisupport_ingest.sources.postgres.embedded.server import EmbeddedPostgres

    if settings.source_dsn is not None or EmbeddedPostgres(home.postgres).running:
        yield
        return
    with one_pass(settings, home, "capture", pass_progress()) as started:
        started.start_source(settings)
        yield


def follow(
    run: Callable[[], None], stop: threading.Event, *, retry: type[Exception], backoff: Backoff | None = None
) -> None:
    """Call ``run`` until it returns or ``stop`` is set; after a ``retry`` error, wait and call it again.

    The wait doubles with each failure in a row, as ``backoff`` says. Any other error is raised.
    """
    backoff = backoff or Backoff()
    failures = 0
    while not stop.is_set():
        began = time.monotonic()
        try:
            run()
            return
        except retry as error:
            failures = 1 if time.monotonic() - began > backoff.healthy else failures + 1
            delay = backoff.delay(failures)
            say_err(f"Error: {error}\nTrying again in {delay:.0f} s.")
            stop.wait(delay)


_LOOK_SECONDS = 0.5


def until_resumed(
    run: Callable[[], None], note: PauseRequest, stop: threading.Event, *, look: float = _LOOK_SECONDS
) -> Callable[[], None]:
    """Return a function that calls ``run``, and calls it again whenever a person has paused or restarted the
    capture.

    So the process stays alive, and ``up`` need not start it again. After ``CapturePaused``, the function
    looks for ``note`` every ``look`` seconds, and calls ``run`` when it is gone; after ``CaptureRestarts``,
    it calls ``run`` at once. It ends when ``run`` returns or ``stop`` is set.
    """

    def run_or_wait() -> None:
        while not stop.is_set():
            try:
                run()
                return
            except CaptureRestarts as restarts:
                say_err(f"{restarts} The capture starts again.")
                continue
            except CapturePaused as paused:
                say_err(f"{paused.problem} It waits for: {paused.fix}")
            while note.present and not stop.wait(look):
                pass
            if not stop.is_set():
                say_err("The pause is over; the capture goes on.")

    return run_or_wait
