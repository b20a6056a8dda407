"""``replay``: replay windows by hand, or show what that would change."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click

from omnisupport_ingest.cli.long_look import speaking
from omnisupport_ingest.cli.opening import contracted_source, open_workspace
from omnisupport_ingest.cli.render import counted, echo_json, some
from omnisupport_ingest.cli.stopping import interrupt_on_terminate
from omnisupport_ingest.cli.views import pass_progress
from omnisupport_ingest.contracts.model import TableContract, table_named
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.layers.removed import refuse_sealed
from omnisupport_ingest.layers.scheduling.late_replay import refuse_backfill
from omnisupport_ingest.layers.scheduling.run_requests import replay_ranges
from omnisupport_ingest.read.replay_preview import ReplayPreview, TablePreview, preview_replay
from omnisupport_ingest.read.window_list import window_list
from omnisupport_ingest.runtime.dagster_home import dagster_environment
from omnisupport_ingest.runtime.home_lock import in_use
from omnisupport_ingest.runtime.spark import session
from omnisupport_ingest.verify.one_pass import OnePass, one_pass
from omnisupport_ingest.windows import OUT_OF_RANGE, WindowRange, without_sentinel

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from omnisupport_ingest.home import Home
    from omnisupport_ingest.lake.checkpoint import Checkpoint
    from omnisupport_ingest.layers.workspace import Workspace

_MOST_NAMED = 8
_NEAREST = 2
"""Number of windows with events that are named on each side of a range without events."""


class NothingToReplay(IngestError):
    """Nothing has ever landed in the windows that ``replay`` is to make again.

    Fix: Name a window that ``omnisupport-ingest windows`` lists.
    """


@click.command()
@click.option("--source", metavar="NAME", help="The source of the windows.  [default: OMNISUPPORT_SOURCE]")
@click.option(
    "--from",
    "first",
    required=True,
    metavar="WINDOW",
    help="First window: 2026-01-31T0900, or a time in it: 2026-01-31T09:30.",
)
@click.option("--to", "last", metavar="WINDOW", help="Last window, included.  [default: the first]")
@click.option("--table", help="Replay only this table, and the layers above it.")
@click.option("--reason", help="Why; the Dagster UI shows it. Required unless --dry-run.")
@click.option("--dry-run", is_flag=True, help="Show what would change, and commit nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def replay(
    source: str | None,
    first: str,
    last: str | None,
    table: str | None,
    reason: str | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Replay windows through every layer, from everything that has landed for them.

    A replay changes nothing unless its inputs changed: late events, a contract, the decision table, a review.
    If it changes keys, the materializations say how many and why. The cursor for new batches does not move.
    Consecutive windows are one run and one Spark job; up to 24 windows without events may lie between them.

    While `up` runs, Dagster carries out the replay as a partition backfill, which the Backfills page of the
    UI shows. Otherwise this command does.

    --dry-run needs Spark and changes nothing. It judges and folds the windows, and compares the result with
    the tables, key by key. It names the first changed keys of each table (with --json up to a thousand),
    unless the contract marks the key as personal data.

    \b
    Examples:
      omnisupport-ingest replay --from 2026-01-31T0900 --to 2026-01-31T1800 --dry-run
      omnisupport-ingest replay --from 2026-01-31T0900 --reason "ticket 4711"

    A window that retention has sealed is refused.

    Exit code: 0 done, 1 a run failed, nothing to replay or sealed, 2 usage or settings, 3 no home, 6 another
    pass runs on this home.
    """
    if reason is None and not dry_run:
        raise click.UsageError("Give the reason with --reason, or add --dry-run.")
    workspace = open_workspace()
    source = contracted_source(workspace, source or workspace.settings.source)
    windows = windows_between(workspace, source, first, last or first)
    refuse_sealed(workspace, source, windows)
    request = ReplayRequest.of(workspace, source, table, windows)
    replay_windows(request, None if dry_run else reason, as_json=as_json)


@dataclass(frozen=True)
class ReplayRequest:
    """The windows and tables to replay. ``only``: the one table of the request; None: all."""

    workspace: Workspace
    source: str
    windows: list[str]
    contracts: tuple[TableContract, ...]
    only: TableContract | None = None

    @classmethod
    def of(cls, workspace: Workspace, source: str, table: str | None, windows: list[str]) -> ReplayRequest:
        """Return a request for all tables of ``source``, or for the one called ``table``. Raises
        ``UnknownTable``."""
        contracts = workspace.contracts.of_source(source)
        if table is None:
            return cls(workspace, source, windows, contracts)
        only = table_named(table, contracts)
        return cls(workspace, source, windows, (only,), only)

    @property
    def home(self) -> Home:
        return self.workspace.home


def replay_windows(request: ReplayRequest, reason: str | None, *, as_json: bool = False) -> None:
    """Replay the windows and print what changed; without a reason, print only what would change."""
    if reason is None:
        _show_preview(_preview(request), as_json=as_json)
        return
    refuse_backfill(request.workspace.decisions)
    _replay(request, reason, as_json=as_json)


def windows_between(workspace: Workspace, source: str, first: str, last: str) -> list[str]:
    """Return the windows of the range that have events. Without any, raises a usage error or
    ``NothingToReplay``."""
    first, last = workspace.grid.named(first), workspace.grid.named(last)
    if OUT_OF_RANGE in (first, last):
        raise click.UsageError(f"{OUT_OF_RANGE} is replayed with every window: name any other.")
    if last < first:
        raise click.UsageError(f"--to {last} lies before --from {first}.")
    known = [each.window for each in window_list(workspace, source).windows if each.window != OUT_OF_RANGE]
    between = [window for window in known if first <= window <= last]
    if not between:
        nearest = [*[each for each in known if each < first][-_NEAREST:]]
        nearest += [each for each in known if each > last][:_NEAREST]
        raise NothingToReplay(
            f"Nothing landed from {source} in "
            + (f"the windows {first} to {last}." if first != last else f"the window {first}."),
            fix=(f"The nearest that received events: {', '.join(nearest)}. " if nearest else "")
            + "`omnisupport-ingest windows` lists them all.",
        )
    return between


def _preview(request: ReplayRequest) -> ReplayPreview:
    workspace, settings = request.workspace, request.workspace.settings

    def preview(spark: SparkSession) -> ReplayPreview:
        with speaking():
            return preview_replay(workspace, spark, request.source, request.windows, request.contracts)

    with interrupt_on_terminate():
        if in_use(request.home):
            # The Spark of the pass that has the home.
            return preview(session(settings))
        with one_pass(settings, request.home, "replay", pass_progress()) as the_pass:
            return preview(the_pass.spark())


def _show_preview(preview: ReplayPreview, *, as_json: bool) -> None:
    if as_json:
        echo_json(asdict(preview))
        return
    click.echo(
        f"{counted(len(preview.windows), 'window')}, {preview.windows[0]} to {preview.windows[-1]}: "
        f"{counted(preview.events, 'event')} would be judged again: {preview.accepted:,} accepted, "
        f"{counted(preview.duplicates, 'duplicate')}, {preview.quarantined:,} quarantined."
    )
    if preview.changes_nothing:
        click.echo("The replay would change nothing.")
        return
    for table in preview.tables:
        changed = table.keys_changed
        if changed:
            named = some([f"{window} ({keys:,})" for window, keys in changed.items()], _MOST_NAMED)
            keys = counted(sum(changed.values()), "key")
            click.echo(f"{table.table}: the state of {keys} would change, by window: {named}.")
            for line in _keys(table):
                click.echo(f"  {line}")


def _keys(table: TablePreview) -> Iterator[str]:
    if table.keys is None:
        yield "Not named: the key is personal data by the contract."
        return
    for window, keys in list(table.keys.items())[:_MOST_NAMED]:
        shown = [key or "the whole table" for key in keys[:_MOST_NAMED]]
        more = table.keys_changed[window] - len(shown)
        yield f"{window}: {', '.join(shown)}{f' and {more:,} more' if more else ''}"


def _replay(request: ReplayRequest, reason: str, *, as_json: bool) -> None:
    if in_use(request.home):
        backfill_id = _launch(request, reason)
        if as_json:
            click.echo(json.dumps({"backfill": backfill_id, "windows": request.windows}))
        else:
            click.echo(
                f"Requested backfill {backfill_id}: {counted(len(request.windows), 'window')} of "
                f"{request.source}. The Backfills page of the UI shows it."
            )
        return
    with (
        interrupt_on_terminate(),
        one_pass(request.workspace.settings, request.home, "replay", pass_progress()) as the_pass,
    ):
        outcome = _carry_out(the_pass, request, reason)
    if as_json:
        echo_json(outcome)
        return
    for line in outcome["windows"]:
        click.echo(f"{line['table']} {line['window']}: {line['outcome']}")
    changed = sum(1 for line in outcome["windows"] if line["outcome"] != _NO_CHANGE)
    click.echo(
        f"{counted(len(outcome['runs']), 'run')}. "
        + ("Nothing changed." if not changed else f"{counted(changed, 'window')} of tables changed.")
    )


_NO_CHANGE = "no change"


def _carry_out(the_pass: OnePass, request: ReplayRequest, reason: str) -> dict[str, Any]:
    from omnisupport_ingest.defs.keys import REASON_TAG

    the_pass.prepare()
    table = request.only.name if request.only is not None else None
    runs = [
        the_pass.replay(request.source, each, {REASON_TAG: reason}, table).run_id for each in _runs(request)
    ]
    lines = []
    for contract in request.contracts:
        snapshot = request.workspace.net_changes(contract).open()
        for window in request.windows:
            state = snapshot.state(window)
            if state is not None and state.checkpoint.run_id in runs:
                lines.append(
                    {"table": contract.name, "window": window, "outcome": _outcome(state.checkpoint)}
                )
    return {"runs": runs, "windows": lines}


def _runs(request: ReplayRequest) -> list[WindowRange]:
    known = [each.window for each in window_list(request.workspace, request.source).windows]
    return replay_ranges(request.workspace.grid, request.windows, without_sentinel(known))


def _outcome(done: Checkpoint) -> str:
    if not done.changed_by:
        return _NO_CHANGE
    return f"{counted(done.keys_changed or 0, 'key')} changed, by {', '.join(done.changed_by)}"


def _launch(request: ReplayRequest, reason: str) -> str:
    import dagster as dg

    from omnisupport_ingest.definitions import build_definitions
    from omnisupport_ingest.defs.backfills import Backfill, launch_backfill
    from omnisupport_ingest.defs.keys import dimension_key

    os.environ.update(dagster_environment(request.workspace.settings, request.home))
    graph = build_definitions(request.workspace).resolve_asset_graph()
    grid = request.workspace.grid
    with dg.DagsterInstance.get() as instance:
        return launch_backfill(
            instance,
            graph,
            Backfill(
                request.source,
                [window for each in _runs(request) for window in grid.keys_between(each.first, each.last)],
                reason,
                dimension=dimension_key(request.only) if request.only is not None else None,
            ),
        )
