"""``workload``: traffic for the embedded database, so that there is something to see."""

from __future__ import annotations

import click

from omnisupport_ingest.cli.opening import open_home, open_settings
from omnisupport_ingest.cli.stopping import stop_on_signal


@click.command()
@click.option(
    "--rate",
    type=click.FloatRange(0, min_open=True),
    default=20.0,
    show_default=True,
    help="Changes per second.",
)
@click.option("--seed", type=int, default=1, show_default=True, help="Same seed, same changes.")
def workload(rate: float, seed: int) -> None:
    """Make RATE changes per second in the database of the demo, until Ctrl-C.

    \b
    Example:
      omnisupport-ingest workload --rate 50

    Exit code: 0 stopped, 2 usage or settings, 4 the embedded PostgreSQL is not running.
    """
    from omnisupport_ingest.demo.domains import embedded_domain
    from omnisupport_ingest.demo.workload import Workload
    from omnisupport_ingest.sources.postgres.session.dsn import source_dsn

    settings = open_settings()
    if settings.source_dsn is not None:
        raise click.UsageError(
            "workload changes rows: it runs on the embedded PostgreSQL only. Unset OMNISUPPORT_SOURCE_DSN."
        )
    dsn = source_dsn(settings, open_home(settings))
    domain = embedded_domain(settings)
    domain.prepare(dsn, seed)
    with stop_on_signal() as stop:
        Workload(domain, dsn, seed).run_forever(rate, stop)
