"""``quarantine``: events that were not accepted: list them, show one, and decide on them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

from omnisupport_ingest.cli import views
from omnisupport_ingest.cli.opening import (
    contracted_source,
    deciding_person,
    open_workspace,
)
from omnisupport_ingest.cli.render import Commands, counted, echo_json, facts, some
from omnisupport_ingest.contracts.decision_table import JUDGED, REVIEW_DECISION, WAIT
from omnisupport_ingest.contracts.model import UnknownTable, table_named, tables_named
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.layers.events.event_ref import EventRef
from omnisupport_ingest.layers.reviews import ReviewLedger
from omnisupport_ingest.review.deciding import Decided, decide, decide_undecided, done_by, elsewhere
from omnisupport_ingest.review.quarantined import Filter, Quarantined, quarantined, whole_events

if TYPE_CHECKING:
    from omnisupport_ingest.layers.workspace import Workspace

F = TypeVar("F", bound=Callable[..., Any])

STATES = ("open", "released", "discarded", "not_needed")
_UNDECIDED = ("open", "not_needed")

_of_source = click.option(
    "--source", metavar="NAME", help="The source of the events.  [default: OMNISUPPORT_SOURCE]"
)
_in_table = click.option(
    "--table", metavar="TABLE", help="Only events of this table: `orders` or `sales.orders`."
)
_in_window = click.option(
    "--window", metavar="WINDOW", help="Only events of this window: 2026-01-31T0900, or a time in it."
)
_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


@click.group(cls=Commands)
def quarantine() -> None:
    """Review events that were not accepted: list, show, release, discard."""


@quarantine.command(name="list")
@click.option("--source", metavar="NAME", help="Only this source.  [default: every source]")
@click.option(
    "--reason",
    type=click.Choice(JUDGED),
    metavar="REASON",
    help="Only events in quarantine for this reason, like `collision`.",
)
@click.option("--state", type=click.Choice(STATES), help="Only events in this state of review.")
@_in_table
@_in_window
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    default=20,
    show_default=True,
    help="List only the first N; 0 lists all.",
    metavar="N",
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

    \b
    open        a person must decide
    released    accepted when its window is judged again; then it leaves the list, and `show` still finds it
    discarded   stays in quarantine, a withheld event
    not_needed  the decision table requires no review

    \b
    Examples:
      omnisupport-ingest quarantine list --reason collision --state open
      omnisupport-ingest quarantine list --table tickets --json

    Exit code: 0 done, 2 usage or settings, 3 no home or its review ledger is damaged.
    """
    workspace = open_workspace()
    window = workspace.grid.named(window) if window else None
    where = Filter(reason=reason, state=state, table=_at_source(workspace, table), window=window)
    sources = [contracted_source(workspace, source)] if source else workspace.contracts.sources()
    of_source = {
        each: quarantined(workspace, each, ReviewLedger.open(workspace, each), where) for each in sources
    }
    if table is not None and not any(of_source.values()):
        # For an unknown table, an empty list would look like good news.
        known = [each for name in sources for each in workspace.contracts.of_source(name)]
        if not tables_named(table, known):
            table_named(table, known)
    if as_json:
        listed = [
            {
                "source": each,
                **views.event_counts(rows),
                "listed": [views.event_document(row) for row in _first(rows, limit)],
            }
            for each, rows in of_source.items()
        ]
        echo_json({"sources": listed})
        return
    for each, rows in of_source.items():
        _show_list(each, rows, limit, all_of_it=where == Filter())


@quarantine.command()
@_of_source
@click.argument("event_id", metavar="ID")
@click.option("--values", is_flag=True, help="Also print the values of the row, personal data included.")
@_json
def show(source: str | None, event_id: str, values: bool, as_json: bool) -> None:
    """Show the event ID: why it is in quarantine, where it came from, and every decision on it.

    If copies of it are there too, each is shown.
    The columns of its row and the length of each value are shown. --values prints the values, which may be
    personal data.

    \b
    Example:
      omnisupport-ingest quarantine show 1:0/16B3748:4#00ab34cd56ef7890 --values

    Exit code: 0 done, 1 no such event, 2 usage or settings, 3 no home or its review ledger is damaged.
    """
    workspace = open_workspace()
    of_source = contracted_source(workspace, source or workspace.settings.source)
    event = EventRef.parse(event_id)
    ledger = ReviewLedger.open(workspace, of_source)
    copies = [pair for pair in whole_events(workspace, of_source, ledger, [event]) if pair[0].event == event]
    history = ledger.history(event)
    if not copies:
        problem, fix = elsewhere(workspace, of_source, event, ledger.latest(event))
        if not history:
            raise IngestError(f"{event} is not in quarantine. {problem}", fix=fix)
        if as_json:
            reviews = [views.review_document(each) for each in history]
            echo_json(
                {
                    "source": of_source,
                    "in_quarantine": False,
                    "id": str(event),
                    "now": problem,
                    "reviews": reviews,
                }
            )
        else:
            click.echo(f"{event}: {problem}")
            facts(views.review_facts(history), indent=2, label=17)
        return
    if as_json:
        first, *others = (_shown(row, columns, values=values) for row, columns in copies)
        echo_json(
            {
                "source": of_source,
                "in_quarantine": True,
                **first,
                "reviews": [views.review_document(each) for each in history],
                "copies": others,
            }
        )
        return
    for row, columns in copies:
        click.echo(views.event_title(row))
        facts(views.event_facts(row, history, columns), indent=2, label=17)
        row_facts = views.values_facts(columns) if values else views.lengths_facts(columns)
        facts(row_facts, indent=2, label=17, wrap=False)
    if not values:
        click.echo("Values are not shown; --values prints them, personal data included.")


def _shown(row: Quarantined, columns: Mapping[str, Any], *, values: bool) -> dict[str, Any]:
    """Return an event for ``--json``; ``values``: with the values of its row, else with their lengths."""
    row_of = (
        {"values": views.values_document(columns)} if values else {"lengths": views.lengths_document(columns)}
    )
    return {
        **views.event_document(row),
        "tx_id": columns["tx_id"],
        "unchanged": columns["unchanged"],
        **row_of,
    }


def _decision(command: F) -> F:
    """Add the arguments and options of `release` and `discard`."""
    for decorate in reversed(
        (
            _of_source,
            click.argument("event_ids", metavar="[ID]...", nargs=-1),
            click.option("--reason", required=True, metavar="TEXT", help="Why; the ledger records it."),
            click.option("--by", metavar="NAME", help="Who decides.  [default: this user's name]"),
            click.option("--all", "everything", is_flag=True, help="Every undecided event, instead of IDs."),
            click.option(
                "--quarantined-for",
                type=click.Choice(JUDGED),
                metavar="REASON",
                help="With --all: only events in quarantine for it.",
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
def release(**options: Any) -> None:
    """Accept the events ID…: they leave quarantine when their windows are judged again.

    If one of the events cannot be accepted, the command is refused and nothing is recorded: an event that
    cannot be read, has no window, breaks a row rule of its contract, or is the second of a collision.
    `discard` reverses a release. The last decision counts; the ledger keeps all of them.

    \b
    Examples:
      omnisupport-ingest quarantine release 1:0/16B3748:4#00ab34cd56ef7890 --reason "checked with sales"
      omnisupport-ingest quarantine release --all --quarantined-for too_late_arrival --reason "backlog of May"

    Exit code: 0 recorded, or decided so before; 1 refused, 2 usage or settings, 3 no home or its
    review ledger is damaged.
    """
    _decide(_Decision("release", **options))


@quarantine.command()
@_decision
def discard(**options: Any) -> None:
    """Leave the events ID… out for good: they are reviewed, stay in quarantine, and are never accepted.

    A discarded event stays a withheld event: the columns that it would have set stay unresolved. `release`
    reverses a discard. The last decision counts; the ledger keeps all of them.

    \b
    Examples:
      omnisupport-ingest quarantine discard 1:0/16B3748:4#00ab34cd56ef7890 --reason "test data" --by ana
      omnisupport-ingest quarantine discard --all --quarantined-for row_rule --reason "bad import"

    Exit code: 0 recorded, or decided so before; 1 refused, 2 usage or settings, 3 no home or its
    review ledger is damaged.
    """
    _decide(_Decision("discard", **options))


@dataclass(frozen=True, slots=True)
class _Decision:
    """A decision, ``release`` or ``discard``, with the arguments and options that ``_decision`` describes."""

    decision: str
    source: str | None
    event_ids: tuple[str, ...]
    reason: str
    by: str | None
    everything: bool
    quarantined_for: str | None
    table: str | None
    window: str | None
    yes: bool
    as_json: bool

    def __post_init__(self) -> None:
        if self.everything == bool(self.event_ids):
            raise click.UsageError("Name the events by their IDs, or choose them with --all.")
        if not self.everything and (self.quarantined_for or self.table or self.window):
            raise click.UsageError("--quarantined-for, --table and --window choose events of --all.")


def _decide(options: _Decision) -> None:
    reviewer = deciding_person(options.by)
    workspace = open_workspace()
    source = contracted_source(workspace, options.source or workspace.settings.source)
    if options.everything:
        events = _chosen(workspace, source, options)
        if not options.yes:
            _confirm(options.decision, len(events), source)
    else:
        events = [EventRef.parse(each) for each in options.event_ids]
    # With --all, somebody may decide on one of the events while this command asks: that decision counts.
    record = decide_undecided if options.everything else decide
    decided = record(workspace, source, options.decision, events, reviewer=reviewer, why=options.reason)
    runs, replay = _replay(workspace)
    if not options.as_json:
        _show_decided(options.decision, source, decided, replay)
        return
    echo_json(
        {
            "source": source,
            "decision": options.decision,
            "recorded": [views.review_document(each) for each in decided.recorded],
            "unchanged": [views.review_document(each) for each in decided.unchanged],
            "overturned": [views.review_document(each) for each in decided.overturned],
            "decided_meanwhile": [views.review_document(each) for each in decided.left],
            "open_beside": [views.event_document(each) for each in decided.beside],
            "stale_windows": decided.windows,
            "platform_runs": runs,
        }
    )


def _at_source(workspace: Workspace, table: str | None) -> str | None:
    """Return ``table`` as its events name it; unchanged if it has no contract any more."""
    try:
        return table if table is None else table_named(table, workspace.contracts.all).full_name
    except UnknownTable:
        return table


def _chosen(workspace: Workspace, source: str, options: _Decision) -> list[EventRef]:
    """Return the undecided events that ``--all`` means. Raises ``IngestError`` if there are none."""
    window = workspace.grid.named(options.window) if options.window else None
    table = _at_source(workspace, options.table)
    where = Filter(reason=options.quarantined_for, table=table, window=window)
    rows = quarantined(workspace, source, ReviewLedger.open(workspace, source), where)
    events = [row.event for row in rows if row.state in _UNDECIDED]
    if not events:
        raise IngestError(
            f"Quarantine of {source} has no undecided event that these options mean.",
            fix=f"See what there is: omnisupport-ingest quarantine list --source {source}",
        )
    return events


def _confirm(decision: str, events: int, source: str) -> None:
    question = f"{decision.capitalize()} {counted(events, 'event')} of {source}?"
    if not sys.stdin.isatty():
        raise click.UsageError(f"{question} Nobody can answer here: add --yes.")
    click.confirm(question, abort=True, err=True)


def _replay(workspace: Workspace) -> tuple[bool, str]:
    """Return whether the platform runs, and how the stale windows are judged again."""
    runs = views.platform_runs(workspace.home)
    if workspace.decisions.action(REVIEW_DECISION) == WAIT:
        return runs, (
            "They stay as they are until somebody replays them (omnisupport-ingest replay): the decision "
            f"table says wait ({workspace.decisions.path}, review_decision)."
        )
    return runs, views.who_judges_again(runs=runs)


def _first(rows: Sequence[Quarantined], limit: int) -> Sequence[Quarantined]:
    return rows[:limit] if limit else rows


def _show_list(source: str, rows: Sequence[Quarantined], limit: int, *, all_of_it: bool) -> None:
    if not rows:
        such = "Nothing" if all_of_it else "No such event"
        click.echo(f"{source}: {such} is in quarantine.")
        return
    for row in _first(rows, limit):
        for line in views.event_in_list(row):
            click.echo(line)
    counts = views.event_counts(rows)
    by_reason = ", ".join(f"{number} {reason}" for reason, number in counts["by_reason"].items())
    by_state = ", ".join(f"{number} {state}" for state, number in counts["by_state"].items())
    click.echo(f"{source}: {counted(len(rows), 'event')}: {by_reason}; {by_state}.")
    hidden = len(rows) - len(_first(rows, limit))
    if hidden:
        click.echo(f"{counted(hidden, 'event')} not listed (--limit 0 lists all).")


def _show_decided(decision: str, source: str, decided: Decided, replay: str) -> None:
    done = {"release": "released", "discard": "discarded"}[decision]
    if decided.recorded:
        events = counted(len(decided.recorded), "event")
        click.echo(f"{events} of {source} {done} by {decided.recorded[0].reviewer}.")
    for each in decided.overturned:
        click.echo(f"    {each.event} before: {done_by(each)}")
    if decided.unchanged:
        click.echo(f"{counted(len(decided.unchanged), 'event')} {done} before; nothing was written for that.")
    if decided.left:
        events = counted(len(decided.left), "event")
        click.echo(f"{events} decided meanwhile by {some(sorted({each.reviewer for each in decided.left}))}.")
    if decided.windows:
        click.echo(f"{views.stale(decided.windows)} {replay}")
    if decided.beside:
        events = some([str(each.event) for each in decided.beside])
        click.echo(
            f"{counted(len(decided.beside), 'event')} of the same positions still open: {events}. "
            "Discard what is wrong."
        )
