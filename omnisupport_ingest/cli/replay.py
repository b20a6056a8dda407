"""``replay``: make windows again, by hand, or say what that would change."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click

from omnisupport_ingest.cli.counted import counted
from omnisupport_ingest.cli.one_pass import OnePass, one_pass
from omnisupport_ingest.cli.opening import existing_home, open_settings
from omnisupport_ingest.cli.stopping import interrupt_on_terminate
from omnisupport_ingest.errors import IngestError

if TYPE_CHECKING:
    from omnisupport_ingest.contracts.model import TableContract
    from omnisupport_ingest.home import Home
    from omnisupport_ingest.lake.checkpoint import Checkpoint
    from omnisupport_ingest.settings import Settings
    from omnisupport_ingest.stages.replay_preview import ReplayPreview, TablePreview
    from omnisupport_ingest.stages.workspace import Workspace
    from omnisupport_ingest.windows import WindowRange

_MOST_NAMED = 8
_NEAREST = 2
"""Windows with events that are named on each side of a range without any."""


class NothingToReplay(IngestError):
    """No window in the range has ever received an event."""


@click.command()
@click.option("--source", help="The source. Left out: the captured one.")
@click.option(
    "--from",
    "first",
    required=True,
    metavar="WINDOW",
    help="First window: 2026-01-31T0900, or 2026-01-31T09:30.",
)
@click.option("--to", "last", metavar="WINDOW", help="Last window, included. Left out: the first alone.")
@click.option("--table", help="Make this table alone again, after the layers above it.")
@click.option("--reason", help="Why; shown in the Dagster UI. Required unless --dry-run.")
@click.option("--dry-run", is_flag=True, help="Say what would change, and commit nothing.")
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
    """Make windows again through every layer, from everything that has landed for them.

    A replay changes nothing unless something beneath changed: late events, a contract, the decision
    table, a review. Where it does, the materializations say how many keys changed and why. The forward
    cursor does not move. Windows in a row are one run and one Spark job, and so are windows with up to 24
    between them that nothing landed in.

    While `up` runs, the replay is handed to Dagster as a partition backfill, which its backfills page
    shows. Else this command carries it out. --dry-run needs Spark and changes nothing: it judges and
    folds the windows and compares the outcome, key by key, with what the tables hold. It names the first keys
    of each table, with --json up to a thousand, but for keys that are personal data by the contract.

    \b
    Examples:
      omnisupport-ingest replay --from 2026-01-31T0900 --to 2026-01-31T1800 --dry-run
      omnisupport-ingest replay --from 2026-01-31T0900 --reason "ticket 4711"

    Exit code: 0 done, 1 a run failed or nothing to replay, 2 usage or settings, 3 no home, 6 another pass
    runs on this home.
    """
    from omnisupport_ingest.stages.workspace import Workspace

    if reason is None and not dry_run:
        raise click.UsageError("Say why with --reason, or add --dry-run.")
    settings = open_settings()
    existing_home(settings)
    workspace = Workspace.open(settings)
    source = source or settings.source
    _contracts(workspace, source, table)
    windows = windows_between(workspace, source, first, last or first)
    replay_windows(workspace, source, table, windows, None if dry_run else reason, as_json=as_json)


def replay_windows(
    workspace: Workspace,
    source: str,
    table: str | None,
    windows: list[str],
    reason: str | None,
    *,
    as_json: bool = False,
) -> None:
    """Fold ``windows`` of ``source`` again and say what changed; without a ``reason``, what would.

    ``table``: that one alone; null for all.
    """
    from omnisupport_ingest.stages.late_replay import refuse_backfill

    settings, home = workspace.settings, workspace.home
    contracts = _contracts(workspace, source, table)
    if reason is None:
        _show(_preview(settings, home, workspace, source, windows, contracts), as_json=as_json)
        return
    refuse_backfill(workspace.decisions)
    only = contracts[0] if table is not None else None
    _replay(_Asked(settings, home, workspace, source, windows, reason, contracts, only), as_json=as_json)


@dataclass(frozen=True)
class _Asked:
    """A replay as it was asked for; ``only`` is the table it is limited to, null for all."""

    settings: Settings
    home: Home
    workspace: Workspace
    source: str
    windows: list[str]
    reason: str
    contracts: tuple[TableContract, ...]
    only: TableContract | None


def _contracts(workspace: Workspace, source: str, table: str | None) -> tuple[TableContract, ...]:
    from omnisupport_ingest.contracts.model import table_named

    sources = workspace.contracts.sources()
    if source not in sources:
        raise click.UsageError(f"No contract names the source {source!r}. Sources: {', '.join(sources)}.")
    found = workspace.contracts.of_source(source)
    if table is None:
        return found
    return (table_named(table, found),)


def windows_between(workspace: Workspace, source: str, first: str, last: str) -> list[str]:
    """The windows of the range that anything landed in; the others have nothing to make again."""
    from omnisupport_ingest.stages.window_list import window_list
    from omnisupport_ingest.windows import OUT_OF_RANGE

    first, last = workspace.grid.named(first), workspace.grid.named(last)
    if OUT_OF_RANGE in (first, last):
        raise click.UsageError(f"{OUT_OF_RANGE} is made again with every window: name any other.")
    if last < first:
        raise click.UsageError(f"--to {last} lies before --from {first}.")
    known = [each.window for each in window_list(workspace, source).windows if each.window != OUT_OF_RANGE]
    found = [window for window in known if first <= window <= last]
    if not found:
        nearest = [*[each for each in known if each < first][-_NEAREST:]]
        nearest += [each for each in known if each > last][:_NEAREST]
        raise NothingToReplay(
            f"Nothing landed from {source} in "
            + (f"the windows {first} to {last}." if first != last else f"the window {first}."),
            fix=(f"The nearest that received events: {', '.join(nearest)}. " if nearest else "")
            + "`omnisupport-ingest windows` lists them all.",
        )
    return found


def _preview(
    settings: Settings,
    home: Home,
    workspace: Workspace,
    source: str,
    windows: list[str],
    contracts: tuple[TableContract, ...],
) -> ReplayPreview:
    from omnisupport_ingest.runtime.home_lock import in_use
    from omnisupport_ingest.runtime.spark import session
    from omnisupport_ingest.stages.replay_preview import preview_replay

    with interrupt_on_terminate():
        if in_use(home):
            # The Spark of whoever has the home.
            return preview_replay(workspace, session(settings), source, windows, contracts)
        with one_pass(settings, home, "replay", _say) as the_pass:
            return preview_replay(workspace, the_pass.spark(), source, windows, contracts)


def _show(preview: ReplayPreview, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(asdict(preview), indent=2))
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
            named = ", ".join(f"{window} ({keys:,})" for window, keys in list(changed.items())[:_MOST_NAMED])
            more = len(changed) - _MOST_NAMED
            click.echo(
                f"{table.table}: the state of {counted(sum(changed.values()), 'key')} would change, by "
                f"window: {named}{f' and {more} more windows' if more > 0 else ''}."
            )
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


def _replay(asked: _Asked, *, as_json: bool) -> None:
    from omnisupport_ingest.runtime.home_lock import in_use

    if in_use(asked.home):
        backfill_id = _launch(asked)
        if as_json:
            click.echo(json.dumps({"backfill": backfill_id, "windows": asked.windows}))
        else:
            click.echo(
                f"Asked for backfill {backfill_id}: {counted(len(asked.windows), 'window')} of "
                f"{asked.source}. The backfills page of the UI shows it."
            )
        return
    with interrupt_on_terminate(), one_pass(asked.settings, asked.home, "replay", _say) as the_pass:
        outcome = _carry_out(the_pass, asked)
    if as_json:
        click.echo(json.dumps(outcome, indent=2))
        return
    for line in outcome["windows"]:
        click.echo(f"{line['table']} {line['window']}: {line['outcome']}")
    changed = sum(1 for line in outcome["windows"] if line["outcome"] != _NO_CHANGE)
    click.echo(
        f"{counted(len(outcome['runs']), 'run')}. "
        + ("Nothing changed." if not changed else f"{counted(changed, 'window')} of tables changed.")
    )


_NO_CHANGE = "no change"


def _carry_out(the_pass: OnePass, asked: _Asked) -> dict[str, Any]:
    from omnisupport_ingest.defs.keys import REASON_TAG

    the_pass.prepare()
    table = asked.only.name if asked.only is not None else None
    runs = [
        the_pass.replay(asked.source, each, {REASON_TAG: asked.reason}, table).run_id for each in _runs(asked)
    ]
    lines = []
    for contract in asked.contracts:
        snapshot = asked.workspace.net_changes(contract).open()
        for window in asked.windows:
            state = snapshot.state(window)
            if state is not None and state.checkpoint.run_id in runs:
                lines.append(
                    {"table": contract.name, "window": window, "outcome": _outcome(state.checkpoint)}
                )
    return {"runs": runs, "windows": lines}


def _runs(asked: _Asked) -> list[WindowRange]:
    from omnisupport_ingest.stages.run_requests import replay_ranges
    from omnisupport_ingest.stages.window_list import window_list
    from omnisupport_ingest.windows import without_sentinel

    known = [each.window for each in window_list(asked.workspace, asked.source).windows]
    return replay_ranges(asked.workspace.grid, asked.windows, without_sentinel(known))


def _outcome(done: Checkpoint) -> str:
    if not done.changed_by:
        return _NO_CHANGE
    return f"{counted(done.keys_changed or 0, 'key')} changed, by {', '.join(done.changed_by)}"


def _launch(asked: _Asked) -> str:
    import os

    import dagster as dg

    from omnisupport_ingest.definitions import build_definitions
    from omnisupport_ingest.defs.backfills import launch_backfill
    from omnisupport_ingest.defs.keys import dimension_key
    from omnisupport_ingest.runtime.dagster_home import dagster_environment

    os.environ.update(dagster_environment(asked.settings, asked.home))
    graph = build_definitions(asked.workspace).resolve_asset_graph()
    grid = asked.workspace.grid
    with dg.DagsterInstance.get() as instance:
        return launch_backfill(
            instance,
            graph,
            asked.source,
            [window for each in _runs(asked) for window in grid.keys_between(each.first, each.last)],
            reason=asked.reason,
            dimension=dimension_key(asked.only) if asked.only is not None else None,
        )


def _say(line: str) -> None:
    click.echo(line, err=True)
