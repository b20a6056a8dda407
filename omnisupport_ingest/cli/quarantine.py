"""``quarantine``: the events that were not accepted, and what people decide of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from omnisupport_ingest.cli import quarantine_words as words
from omnisupport_ingest.cli.counted import counted
from omnisupport_ingest.cli.deciding_person import deciding_person
from omnisupport_ingest.cli.opening import existing_home, open_settings
from omnisupport_ingest.cli.stale_windows import listed, platform_runs, stale, who_judges_again
from omnisupport_ingest.errors import IngestError

if TYPE_CHECKING:
    from omnisupport_ingest.stages.deciding import Decided
    from omnisupport_ingest.stages.event_ref import EventRef
    from omnisupport_ingest.stages.quarantined import Filter, Quarantined
    from omnisupport_ingest.stages.workspace import Workspace

F = TypeVar("F", bound=Callable[..., Any])

STATES = ("open", "released", "discarded", "not_needed")
_UNDECIDED = ("open", "not_needed")

_of_source = click.option(
    "--source", metavar="NAME", help="Quarantine of this source.  [default: OMNISUPPORT_SOURCE]"
)
_in_table = click.option("--table", metavar="TABLE", help="Only events of it: `orders` or `sales.orders`.")
_in_window = click.option(
    "--window", metavar="WINDOW", help="Only events of it: 2026-01-31T0900, or a time in it."
)
_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


@click.group()
def quarantine() -> None:
    """Review events that were not accepted: list, show, release, discard."""


@quarantine.command(name="list")
@click.option("--source", metavar="NAME", help="Only this source.  [default: every source]")
@click.option("--reason", metavar="REASON", help="Only events in quarantine for it, like `collision`.")
@click.option("--state", type=click.Choice(STATES), help="Only events in this state of their review.")
@_in_table
@_in_window
@click.option(
    "--limit", type=click.IntRange(min=0), default=20, show_default=True, help="Show so many; 0: all."
)
@_json
def list_events(
    source: str | None,
    reason: str | None,
    state: str | None,
    table: str | None,
    window: str | None,
    limit: int,
    as_json: bool,
) -> None:
    """List the events in quarantine, by window and position. No value of a row is shown.

    States: open (somebody must look), released (accepted when its window is judged again), discarded
    (stays here, and stays a hole), not_needed (the decision table asks for no review). A released event
    leaves the list with the run that judges its window again; `show` still knows it.

    \b
    Examples:
      omnisupport-ingest quarantine list --reason collision --state open
      omnisupport-ingest quarantine list --table tickets --json

    Exit code: 0 done, 2 usage or settings, 3 no home or its ledger is damaged.
    """
    from omnisupport_ingest.stages.quarantined import Filter, quarantined
    from omnisupport_ingest.stages.reviews import ReviewLedger

    workspace, _ = _open()
    window = workspace.grid.named(window) if window else None
    where = Filter(reason=reason, state=state, table=_at_source(workspace, table), window=window)
    sources = [_named(workspace, source)] if source else workspace.contracts.sources()
    found = {
        each: quarantined(workspace, each, ReviewLedger.open(workspace, each), where) for each in sources
    }
    if as_json:
        listed = [
            {
                "source": each,
                **words.counts(rows),
                "listed": [words.as_json(row) for row in _first(rows, limit)],
            }
            for each, rows in found.items()
        ]
        click.echo(words.printed({"sources": listed}))
        return
    for each, rows in found.items():
        _tell_list(each, rows, limit, all_of_it=where == Filter())


@quarantine.command()
@_of_source
@click.argument("event_id", metavar="ID")
@click.option("--values", is_flag=True, help="Print the values of the row too, personal data included.")
@_json
def show(source: str | None, event_id: str, values: bool, as_json: bool) -> None:
    """Show the event ID: why it is in quarantine, where it came from, and every decision on it.

    Of its row, the columns and the length of each text are shown; the values, which may be personal
    data, only with --values.

    \b
    Example:
      omnisupport-ingest quarantine show 1:0/16B3748:4#00ab34cd56ef7890 --values

    Exit code: 0 done, 1 no such event, 2 usage or settings, 3 no home or its ledger is damaged.
    """
    from omnisupport_ingest.stages.deciding import elsewhere
    from omnisupport_ingest.stages.event_ref import EventRef
    from omnisupport_ingest.stages.quarantined import whole_events
    from omnisupport_ingest.stages.reviews import ReviewLedger

    workspace, default = _open()
    of_source = _named(workspace, source or default)
    event = EventRef.parse(event_id)
    ledger = ReviewLedger.open(workspace, of_source)
    found = [pair for pair in whole_events(workspace, of_source, ledger, [event]) if pair[0].event == event]
    history = ledger.history(event)
    if not found:
        problem, fix = elsewhere(workspace, of_source, event, ledger.latest(event))
        if not history:
            raise IngestError(f"{event} is not in quarantine. {problem}", fix=fix)
        _show_reviewed(of_source, event, problem, [words.review_json(each) for each in history], as_json)
        if not as_json:
            for line in words.reviews(history):
                click.echo(line)
        return
    row, columns = found[0]
    if as_json:
        row_of = {"values": words.texts(columns)} if values else {"lengths": words.sizes(columns)}
        document = {
            "source": of_source,
            "in_quarantine": True,
            **words.as_json(row),
            "tx_id": columns["tx_id"],
            "unchanged": columns["unchanged"],
            **row_of,
            "reviews": [words.review_json(each) for each in history],
        }
        click.echo(words.printed(document))
        return
    for line in words.whole(row, history, columns):
        click.echo(line)
    for line in words.texts_in_words(columns) if values else words.sizes_in_words(columns):
        click.echo(line)
    if not values:
        click.echo("Values are not shown; --values prints them, personal data included.")


def _decision(command: F) -> F:
    """The arguments and options that `release` and `discard` have in common."""
    for decorate in reversed(
        (
            _of_source,
            click.argument("event_ids", metavar="[ID]...", nargs=-1),
            click.option("--reason", required=True, metavar="TEXT", help="Why; the ledger keeps it."),
            click.option("--by", metavar="NAME", help="Who decides.  [default: this user's name]"),
            click.option("--all", "everything", is_flag=True, help="Every undecided event, instead of IDs."),
            click.option(
                "--quarantined-for", metavar="REASON", help="With --all: only events in quarantine for it."
            ),
            click.option("--table", metavar="TABLE", help="With --all: only events of this table."),
            click.option("--window", metavar="WINDOW", help="With --all: only events of this window."),
            click.option("--yes", "-y", is_flag=True, help="With --all: do not ask."),
            _json,
        )
    ):
        command = decorate(command)
    return command


@quarantine.command()
@_decision
def release(**told: Any) -> None:
    """Accept the events ID…: they leave quarantine when their windows are judged again.

    Refused, and then nothing is recorded, for events that cannot be accepted: unreadable ones, those
    without a window, those that break a row rule of their contract, and the second of a collision. A
    release can be taken back by `discard`; the last decision counts, and the ledger keeps all.

    \b
    Examples:
      omnisupport-ingest quarantine release 1:0/16B3748:4#00ab34cd56ef7890 --reason "checked with sales"
      omnisupport-ingest quarantine release --all --quarantined-for too_late_arrival --reason "backlog of May"

    Exit code: 0 recorded, or decided so before; 1 refused, 2 usage or settings, 3 no home or its ledger
    is damaged.
    """
    _decide("release", **told)


@quarantine.command()
@_decision
def discard(**told: Any) -> None:
    """Leave the events ID… out for good: reviewed, kept in quarantine, and never accepted.

    A discarded event stays a hole: what it would have said of its row is not known. It can be taken
    back by `release`; the last decision counts, and the ledger keeps all.

    \b
    Examples:
      omnisupport-ingest quarantine discard 1:0/16B3748:4#00ab34cd56ef7890 --reason "test data" --by ana
      omnisupport-ingest quarantine discard --all --quarantined-for row_rule --reason "bad import"

    Exit code: 0 recorded, or decided so before; 1 refused, 2 usage or settings, 3 no home or its ledger
    is damaged.
    """
    _decide("discard", **told)


def _decide(
    decision: str,
    source: str | None,
    event_ids: tuple[str, ...],
    reason: str,
    by: str | None,
    everything: bool,
    quarantined_for: str | None,
    table: str | None,
    window: str | None,
    yes: bool,
    as_json: bool,
) -> None:
    from omnisupport_ingest.stages.deciding import decide
    from omnisupport_ingest.stages.event_ref import EventRef
    from omnisupport_ingest.stages.quarantined import Filter

    if everything == bool(event_ids):
        raise click.UsageError("Name the events by their IDs, or choose them by --all.")
    if not everything and (quarantined_for or table or window):
        raise click.UsageError("--quarantined-for, --table and --window choose events of --all.")
    reviewer = deciding_person(by)
    workspace, default = _open()
    of_source = _named(workspace, source or default)
    if everything:
        window = workspace.grid.named(window) if window else None
        where = Filter(reason=quarantined_for, table=_at_source(workspace, table), window=window)
        events = _chosen(workspace, of_source, where)
        if not events:
            raise IngestError(
                f"No undecided event in quarantine of {of_source} is meant by that.",
                fix=f"See what there is: omnisupport-ingest quarantine list --source {of_source}",
            )
        if not yes:
            _confirm(decision, len(events), of_source)
    else:
        events = [EventRef.parse(each) for each in event_ids]
    decided = decide(workspace, of_source, decision, events, reviewer=reviewer, why=reason)
    runs, replay = _replay(workspace)
    if as_json:
        document = {
            "source": of_source,
            "decision": decision,
            "recorded": [words.review_json(each) for each in decided.recorded],
            "unchanged": [words.review_json(each) for each in decided.unchanged],
            "open_beside": [words.as_json(each) for each in decided.beside],
            "stale_windows": decided.windows,
            "platform_runs": runs,
        }
        click.echo(words.printed(document))
        return
    _tell_decided(decision, of_source, decided, replay)


def _open() -> tuple[Workspace, str]:
    """The workspace of a home that is there, and the source that is meant where none is named."""
    from omnisupport_ingest.stages.workspace import Workspace

    settings = open_settings()
    existing_home(settings)
    return Workspace.open(settings), settings.source


def _named(workspace: Workspace, source: str) -> str:
    known = workspace.contracts.sources()
    if source not in known:
        raise click.UsageError(f"No contract is of the source {source}. There are: {', '.join(known)}")
    return source


def _at_source(workspace: Workspace, table: str | None) -> str | None:
    """``table`` as its events name it; left as it is where no contract has it any more."""
    from omnisupport_ingest.contracts.model import UnknownTable, table_named

    try:
        return table if table is None else table_named(table, workspace.contracts.all).full_name
    except UnknownTable:
        return table


def _chosen(workspace: Workspace, source: str, where: Filter) -> list[EventRef]:
    from omnisupport_ingest.stages.quarantined import quarantined
    from omnisupport_ingest.stages.reviews import ReviewLedger

    rows = quarantined(workspace, source, ReviewLedger.open(workspace, source), where)
    return [row.event for row in rows if row.state in _UNDECIDED]


def _confirm(decision: str, events: int, source: str) -> None:
    asked = f"{decision.capitalize()} {counted(events, 'event')} of {source}?"
    if not sys.stdin.isatty():
        raise click.UsageError(f"{asked} Nobody can answer here: add --yes.")
    click.confirm(asked, abort=True, err=True)


def _replay(workspace: Workspace) -> tuple[bool, str]:
    """Whether the platform runs, and how the stale windows are judged again."""
    from omnisupport_ingest.contracts.decision_table import REVIEW_DECISION, WAIT

    runs = platform_runs(workspace.home)
    if workspace.decisions.action(REVIEW_DECISION) == WAIT:
        return runs, (
            "They stay as they are until somebody replays them (omnisupport-ingest replay): the decision "
            f"table says wait ({workspace.decisions.path}, review_decision)."
        )
    return runs, who_judges_again(runs=runs)


def _first(rows: Sequence[Quarantined], limit: int) -> Sequence[Quarantined]:
    return rows[:limit] if limit else rows


def _tell_list(source: str, rows: Sequence[Quarantined], limit: int, *, all_of_it: bool) -> None:
    if not rows:
        such = "Nothing" if all_of_it else "No such event"
        click.echo(f"{source}: {such} is in quarantine.")
        return
    for row in _first(rows, limit):
        for line in words.in_list(row):
            click.echo(line)
    counts = words.counts(rows)
    by_reason = ", ".join(f"{number} {reason}" for reason, number in counts["by_reason"].items())
    by_state = ", ".join(f"{number} {state}" for state, number in counts["by_state"].items())
    click.echo(f"{source}: {counted(len(rows), 'event')}: {by_reason}; {by_state}.")
    hidden = len(rows) - len(_first(rows, limit))
    if hidden:
        click.echo(f"{counted(hidden, 'event')} not listed (--limit 0 lists all).")


def _show_reviewed(
    source: str, event: EventRef, problem: str, history: Sequence[dict[str, Any]], as_json: bool
) -> None:
    if as_json:
        document = {
            "source": source,
            "in_quarantine": False,
            "id": str(event),
            "now": problem,
            "reviews": history,
        }
        click.echo(words.printed(document))
        return
    click.echo(f"{event}: {problem}")


def _tell_decided(decision: str, source: str, decided: Decided, replay: str) -> None:
    done = {"release": "released", "discard": "discarded"}[decision]
    if decided.recorded:
        events = counted(len(decided.recorded), "event")
        click.echo(f"{events} of {source} {done} by {decided.recorded[0].reviewer}.")
    if decided.unchanged:
        click.echo(f"{counted(len(decided.unchanged), 'event')} {done} before; nothing was written for that.")
    if decided.windows:
        click.echo(f"{stale(decided.windows)} {replay}")
    if decided.beside:
        events = listed([str(each.event) for each in decided.beside])
        click.echo(
            f"{counted(len(decided.beside), 'event')} of the same positions still open: {events}. "
            "Discard what is wrong."
        )
