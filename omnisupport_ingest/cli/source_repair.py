"""``source repair``: go on after a hole in the source, as a person decides."""

from __future__ import annotations

import click

from omnisupport_ingest.cli.deciding_person import deciding_person
from omnisupport_ingest.cli.opening import existing_home, open_settings

RESNAPSHOT, ACCEPT_LOSS = "resnapshot", "accept-loss"


@click.command()
@click.option(
    "--mode",
    type=click.Choice([RESNAPSHOT, ACCEPT_LOSS]),
    required=True,
    help="resnapshot: read every table again. accept-loss: read none again, and name what may be missing.",
)
@click.option("--reason", required=True, help="What happened; stands in the record of the new epoch.")
@click.option("--by", default=None, help="Who decides.  [default: this user]")
def repair(mode: str, reason: str, by: str | None) -> None:
    """Begin a new epoch after a hole: the slot was lost, or the server is another one, or was restored.

    Drops our slot if it is still there, and makes it anew. Everything that has landed stays, and so does
    the history in the lake. Refused while capture runs; one under `up` that has failed tries again by itself.

    With resnapshot the next capture reads every table again: rows that are gone count as deleted, and only
    the changes in between are not known one by one. With accept-loss it goes on with the stream alone. What
    committed in between is missing for good, and a note in landing says so; the tables stay incomplete, so
    the check `complete` stays red and `verify` and `as-of` refuse them, until `source snapshot` reads them.

    \b
    Examples:
      omnisupport-ingest source repair --mode resnapshot --reason "slot dropped by mistake"
      omnisupport-ingest source repair --mode accept-loss --reason "test system, restored on Monday"

    Exit code: 0 done, 2 usage or settings, 4 the source does not answer, 5 the source is not set up for
    capture, 6 capture runs or the slot is in use.
    """
    from omnisupport_ingest.contracts.load import default_contracts_dir, load_contracts
    from omnisupport_ingest.landing.accepted_losses import AcceptedLosses
    from omnisupport_ingest.landing.store import LandingStore
    from omnisupport_ingest.sources.postgres.capture import Capture

    settings = open_settings()
    home = existing_home(settings)
    contracts = load_contracts(settings.contracts_dir or default_contracts_dir())
    person = deciding_person(by)
    accepted_by = person if mode == ACCEPT_LOSS else None
    epoch = Capture(settings, home, contracts).begin_new_epoch(reason, loss_accepted_by=accepted_by)
    click.echo(f"Epoch {epoch.number} of {settings.source} has begun: {reason}")
    loss = AcceptedLosses(LandingStore(home.landing, settings.source).folder).of(epoch.number)
    if loss is None:
        click.echo("The next capture reads every table again: omnisupport-ingest up")
    else:
        if loss.of_another_history:
            click.echo(
                f"The source has another history than what has landed up to {loss.lost_from}: some of that "
                "may not be in it any more, and what committed there since they parted is not captured; "
                f"accepted by {loss.by}."
            )
        else:
            stretch = f"from {loss.lost_from} " if loss.lost_from is not None else ""
            click.echo(f"What committed {stretch}to {loss.lost_to} is not captured; accepted by {loss.by}.")
        click.echo("The tables stay incomplete until they are read: omnisupport-ingest source snapshot TABLE")
