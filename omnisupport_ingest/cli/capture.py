"""``capture``: land the WAL of the source, up to now or until told to stop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from omnisupport_ingest.cli.landed_line import landed_line
from omnisupport_ingest.cli.opening import open_home, open_settings
from omnisupport_ingest.cli.pausing import until_resumed
from omnisupport_ingest.cli.source_opening import log_of
from omnisupport_ingest.cli.stopping import stop_on_signal
from omnisupport_ingest.runtime.supervisor import Backoff

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
    help="End when everything that had committed at the start has landed; default: follow until Ctrl-C.",
)
@click.option(
    "--new-epoch",
    "reason",
    metavar="REASON",
    help="Repair a hole: drop our slot, begin a new epoch for this REASON, snapshot every table again.",
)
def capture(name: str | None, once: bool, reason: str | None) -> None:
    """Land the WAL of the source as batches, until Ctrl-C or, with --once, up to now.

    NAME is a log of the home (`sources list`); without it, that of the settings.

    Reads tables that were not read yet, beside the WAL. Following, it waits for a source that is away;
    with --once that is an error. Both stop at what needs a person (a missing right, a lost slot).
    What has landed goes into the lake by `up`, or by `materialize`.

    \b
    Example:
      omnisupport-ingest capture --once && omnisupport-ingest materialize

    Exit code: 0 done, 2 usage or settings, 4 the source does not answer, 5 the source is not set up
    for capture, 6 another capture or another reader of the slot, 7 a hole in the source.
    """
    from omnisupport_ingest.contracts.in_force import contracts_in_force
    from omnisupport_ingest.landing.manifest import Manifest
    from omnisupport_ingest.landing.store import LandingStore
    from omnisupport_ingest.sources.postgres.capture.capture import Capture
    from omnisupport_ingest.sources.postgres.capture.requests import PauseRequest
    from omnisupport_ingest.sources.postgres.session.errors import SourceUnavailable
    from omnisupport_ingest.sources.postgres.slot.slot import SlotNotMade

    # The home records what is its own, not what this source has.
    home = open_home(open_settings())
    settings = log_of(open_settings(), name)

    def the_contracts() -> Contracts:
        return contracts_in_force(settings)

    contracts = the_contracts()

    def landed(batch: Manifest) -> None:
        if line := landed_line(batch):
            click.echo(f"{line} ({batch.batch_id})", err=True)

    def begin_new_epoch(stop: threading.Event) -> None:
        if reason is not None:
            try:
                epoch = Capture(settings, home, contracts).begin_new_epoch(reason, stop=stop)
            except SlotNotMade:
                raise KeyboardInterrupt from None
            click.echo(f"Epoch {epoch.number} has begun: {reason}", err=True)

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
            # Contracts are read again for a restart and after a pause. That a source was away is no reason to
            # take in one that nobody has asked for.
            running = kept.pop() if kept else Capture(settings, home, the_contracts(), landed, the_contracts)
            try:
                running.run(None, stop)
            except SourceUnavailable:
                kept.append(running)
                raise

        follow(until_resumed(start, note, stop), stop, retry=SourceUnavailable)


def land_up_to_now(running: Capture, settings: Settings, home: Home, stop: threading.Event) -> None:
    """Land what has committed by now, and say so; ``KeyboardInterrupt`` if ``stop`` came first."""
    from omnisupport_ingest.sources.postgres.session.dsn import source_dsn
    from omnisupport_ingest.sources.postgres.session.server import current_wal_lsn

    until = current_wal_lsn(source_dsn(settings, home))
    running.run(until, stop)
    if stop.is_set():
        raise KeyboardInterrupt
    if running.left_out is None:
        click.echo(f"Everything that the source had committed at {until} has landed.", err=True)
    running.raise_left_out()


@contextmanager
def embedded_source(settings: Settings, home: Home) -> Iterator[None]:
    """The embedded server for as long as the command needs it, unless it runs or is not the source."""
    from omnisupport_ingest.cli.one_pass import one_pass
    from omnisupport_ingest.sources.postgres.embedded.server import EmbeddedPostgres

    if settings.source_dsn is not None or EmbeddedPostgres(home.postgres).running:
        yield
        return
    with one_pass(settings, home, "capture", lambda line: click.echo(line, err=True)) as started:
        started.start_source(settings)
        yield


def follow(
    run: Callable[[], None], stop: threading.Event, *, retry: type[Exception], backoff: Backoff | None = None
) -> None:
    """Call ``run`` until it returns or ``stop`` is set; after ``retry`` wait and call it again.

    The wait doubles with each failure in a row (``Backoff``); any other error ends it.
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
            click.echo(f"Error: {error}\nTrying again in {delay:.0f} s.", err=True)
            stop.wait(delay)
