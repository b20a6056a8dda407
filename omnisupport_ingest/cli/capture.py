"""``capture``: follow the source and land its WAL, until told to stop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import click

from omnisupport_ingest.cli.opening import open_home, open_settings
from omnisupport_ingest.cli.stopping import stop_on_signal
from omnisupport_ingest.runtime.supervisor import Backoff


@click.command()
@click.option(
    "--new-epoch",
    "reason",
    metavar="REASON",
    help="Repair a hole: drop our slot, begin a new epoch for this REASON, snapshot every table again.",
)
def capture(reason: str | None) -> None:
    """Land the WAL of the source as batches, until Ctrl-C.

    Takes the snapshot first if there is none yet. Waits for a source that is away; stops at what
    needs a person (a missing right, a lost slot).
    """
    from omnisupport_ingest.contracts.load import default_contracts_dir, load_contracts
    from omnisupport_ingest.landing.manifest import Manifest
    from omnisupport_ingest.sources.postgres.capture import Capture
    from omnisupport_ingest.sources.postgres.errors import SourceUnavailable

    settings = open_settings()
    home = open_home(settings)
    contracts = load_contracts(settings.contracts_dir or default_contracts_dir())

    def landed(batch: Manifest) -> None:
        click.echo(f"landed {batch.batch_id}")

    if reason is not None:
        epoch = Capture(settings, home, contracts).begin_new_epoch(reason)
        click.echo(f"Epoch {epoch.number} has begun: {reason}")
    with stop_on_signal() as stop:
        follow(
            lambda: Capture(settings, home, contracts, landed).run(None, stop), stop, retry=SourceUnavailable
        )


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
            click.echo(f"{error}\nTrying again in {delay:.0f} s.", err=True)
            stop.wait(delay)
