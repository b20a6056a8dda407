"""``source repair``: go on after a hole in the source, as a person decides."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from omnisupport_ingest.cli.counted import counted
from omnisupport_ingest.cli.deciding_person import deciding_person
from omnisupport_ingest.cli.errors import INTERRUPTED_EXIT_CODE
from omnisupport_ingest.cli.opening import existing_home, open_settings
from omnisupport_ingest.cli.source_opening import log_of
from omnisupport_ingest.cli.stopping import stop_on_signal

if TYPE_CHECKING:
    from omnisupport_ingest.settings import Settings
    from omnisupport_ingest.sources.postgres.capture.capture import Capture
    from omnisupport_ingest.sources.postgres.snapshot.compared_reading import Recovered

RECOVERY, RESNAPSHOT, ACCEPT_LOSS = "recovery", "resnapshot", "accept-loss"


@click.command()
@click.argument("name", required=False)
@click.option(
    "--mode",
    type=click.Choice([RECOVERY, RESNAPSHOT, ACCEPT_LOSS]),
    required=True,
    help="recovery: compare every table with the lake, and read again what differs. resnapshot: read every "
    "table again. accept-loss: read none again, and name what may be missing.",
)
@click.option("--reason", required=True, help="What happened; stands in the record of the new epoch.")
@click.option("--by", default=None, help="Who decides.  [default: this user]")
def repair(name: str | None, mode: str, reason: str, by: str | None) -> None:
    """Begin a new epoch after a hole: the slot was lost, or the server is another one, or was restored.

    NAME is a log of the home (`sources list`); without it, that of the settings.

    Drops our slot if it is still there, and makes it anew. Everything that has landed stays, and so does
    the history in the lake. Refused while capture runs; one under `up` that has failed tries again by itself.

    In no mode are the changes between the hole and the new epoch known one by one. With the first two the
    lake is right again afterwards, rows that are gone included.

    \b
    recovery     This command compares every table, chunk by chunk, with the lake, which must have taken in
                 all that landed: by checksums, and where those differ row by row. Chunks that are the
                 same land nothing, so their rows keep their history; the others land whole. Interrupted,
                 what is left is read whole.
    resnapshot   The next capture reads every table, beside the stream. The lake need not be there.
    accept-loss  The next capture goes on with the stream alone. A note in landing says what is missing; the
                 tables stay incomplete, so the check `complete` stays red and `verify` and `as-of` refuse
                 them, until `source snapshot` reads them.

    \b
    Examples:
      omnisupport-ingest source repair --mode recovery --reason "slot dropped by mistake"
      omnisupport-ingest source repair --mode accept-loss --reason "test system, restored on Monday"

    Exit code: 0 done, 1 the lake is behind what has landed, 2 usage or settings, 4 the source does not
    answer, 5 the source is not set up for capture, 6 capture runs or the slot is in use, 130 interrupted.
    """
    from omnisupport_ingest.contracts.in_force import contracts_in_force
    from omnisupport_ingest.landing.accepted_losses import AcceptedLosses
    from omnisupport_ingest.landing.store import LandingStore
    from omnisupport_ingest.sources.postgres.capture.capture import Capture

    settings = log_of(open_settings(), name)
    home = existing_home(settings)
    contracts = contracts_in_force(settings)
    capture = Capture(settings, home, contracts)
    if mode == RECOVERY:
        _recover(settings, capture, reason)
        return
    person = deciding_person(by)
    accepted_by = person if mode == ACCEPT_LOSS else None
    epoch = capture.begin_new_epoch(reason, loss_accepted_by=accepted_by)
    click.echo(_begun(epoch.number, settings, reason))
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


def _recover(settings: Settings, capture: Capture, reason: str) -> None:
    from omnisupport_ingest.sources.postgres.slot.slot import SlotNotMade
    from omnisupport_ingest.stages.dimension_rows import PinnedDimensions
    from omnisupport_ingest.stages.workspace import Workspace

    with stop_on_signal() as stop:
        try:
            epoch, done = capture.recover(reason, PinnedDimensions(Workspace.open(settings)), stop, _tell)
        except SlotNotMade:
            raise KeyboardInterrupt from None
    click.echo(_begun(epoch.number, settings, reason))
    if not done:
        click.echo("Interrupted. The next capture reads what is left, whole: omnisupport-ingest up")
        click.get_current_context().exit(INTERRUPTED_EXIT_CODE)
    click.echo("The tables are complete once capture has gone on from here: omnisupport-ingest up")


def _begun(epoch: int, settings: Settings, reason: str) -> str:
    return f"Epoch {epoch} of {settings.source} has begun: {reason}"


def _tell(done: Recovered) -> None:
    same = done.chunks - done.read_again
    told = f"{done.table}: {same} of {counted(done.chunks, 'chunk')} are as in the lake"
    if done.by_rows > done.read_again:
        told += f" ({done.by_rows - done.read_again} by a comparison row by row)"
    if done.read_again:
        told += f", the others were read again ({counted(done.rows, 'row')})"
    if done.ended:
        told += f"; {counted(done.ended, 'row')} of the lake are gone from the source"
    click.echo(f"{told}.")
