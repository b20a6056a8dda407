"""``retention``: how long each layer is kept, what would be removed now, and the removal."""

from __future__ import annotations

from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import click

from omnisupport_ingest.cli.opening import (
    contracted_source,
    deciding_person,
    open_workspace,
)
from omnisupport_ingest.cli.render import Commands, counted, echo_json, heading, iso, size, some
from omnisupport_ingest.cli.render import table as show_table
from omnisupport_ingest.contracts.durations import duration_text
from omnisupport_ingest.contracts.model import TableContract, table_named
from omnisupport_ingest.retention.keeping import kept_by
from omnisupport_ingest.retention.old_files import OldFiles, old_files, sweep_old_files
from omnisupport_ingest.retention.plan import RetentionPlan, plan_retention
from omnisupport_ingest.retention.removing import carry_out
from omnisupport_ingest.runtime.dagster_home import RUN_LOGS_KEPT, TICKS_KEPT
from omnisupport_ingest.sources.manifests.landed_snapshots import LandedSnapshots

if TYPE_CHECKING:
    from omnisupport_ingest.layers.workspace import Workspace
    from omnisupport_ingest.settings import Settings

_of_source = click.option("--source", metavar="NAME", help="Only this source.  [default: all of the home]")
_of_table = click.option(
    "--table",
    metavar="TABLE",
    help="Only the source of this table; of old files, only those of its own tables.",
)
_as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


@click.group(cls=Commands)
def retention() -> None:
    """Show how long data is kept, what would go now and what is refused; remove it."""


@retention.command()
@_of_source
@_as_json
def show(source: str | None, as_json: bool) -> None:
    """List how long every layer and Dagster's own records are kept, and who decides it.

    Contracts say it in x-cdc.retention, as ISO 8601 durations after the end of a window (of a version in the
    history: after its own end): landing, raw, quarantine (values of withheld events), net_changes (rows that
    later rows supersede), history and old_files. Without them, old files are kept for a day and all else
    without a limit.

    \b
    Example:
      omnisupport-ingest retention show

    Exit code: 0 done, 2 usage or settings, 3 no home.
    """
    workspace = open_workspace()
    documents = [
        {"source": name, **asdict(each), "keep": duration_text(each.keep)}
        for name, _ in _chosen(workspace, source, None)
        for each in kept_by(workspace.contracts.of_source(name))
    ]
    if source is None:
        documents += _of_dagster(workspace.settings)
    if as_json:
        echo_json(documents)
        return
    columns = ["source", "layer", "table", "keep", "why"]
    show_table(columns, [[each[name] or "all" for name in columns] for each in documents])


def _of_dagster(settings: Settings) -> list[dict[str, Any]]:
    """Return how long Dagster's own records are kept, as the rows of ``show``."""
    days = settings.runs_kept_days
    runs = None if days is None else timedelta(days=days)
    kept = (
        ("Dagster's runs", runs, "OMNISUPPORT_RUNS_KEPT_DAYS; no checkpoint goes with them"),
        ("Dagster's ticks", TICKS_KEPT, "skipped ones for a day; in dagster.yaml"),
        ("what runs printed", RUN_LOGS_KEPT, "job sweep, every hour"),
    )
    return [
        {"layer": layer, "table": None, "keep": duration_text(keep), "why": why, "source": None}
        for layer, keep, why in kept
    ]


@retention.command()
@_of_source
@_of_table
@_as_json
def plan(source: str | None, table: str | None, as_json: bool) -> None:
    """Show what would be removed now, and what is refused and why. Changes nothing.

    Age is counted by the watermark of the source, not by the clock. Landing loses the data files of batches;
    their manifests stay. A window whose events leave raw is sealed: it is not replayed any more, and events
    that still arrive for it go to quarantine. There withheld events lose their values and stay. Versions that
    leave a history are not made again. The net changes of sealed windows lose rows that later ones supersede.

    \b
    Example:
      omnisupport-ingest retention plan --table tickets

    Exit code: 0 done, 2 usage or settings, 3 no home.
    """
    _show_or_apply(source, table, None, as_json=as_json)


@retention.command()
@_of_source
@_of_table
@click.option("--by", metavar="NAME", help="Who removes it; the ledger keeps it.  [default: the login name]")
@click.option("--yes", "-y", is_flag=True, help="Remove it. Without this it is only shown.")
@_as_json
def apply(source: str | None, table: str | None, by: str | None, yes: bool, as_json: bool) -> None:
    """Remove what `retention plan` shows. Without --yes it is shown only.

    The record of what goes is written first; a removal that was interrupted is finished by the next call. The
    platform may run meanwhile. Files of raw, net changes and histories are on disk until they are old files.

    \b
    Example:
      omnisupport-ingest retention apply --yes

    Exit code: 0 done, 2 usage or settings, 3 no home or its retention ledger is damaged.
    """
    _show_or_apply(source, table, deciding_person(by) if yes else None, as_json=as_json)
    if not yes and not as_json:
        click.echo("Nothing was removed. Add --yes to remove it.")


def _show_or_apply(source: str | None, table: str | None, by: str | None, *, as_json: bool) -> None:
    workspace = open_workspace()
    documents = []
    for name, only in _chosen(workspace, source, table):
        planned, old = plan_retention(workspace, name), old_files(workspace, name, only)
        document = _document(planned, old) | {"watermark_held_by": _holding(workspace, name)}
        if by is not None:
            removed = carry_out(workspace, planned, removed_by=by)
            swept = sweep_old_files(workspace, name, only)
            document["removed"] = [asdict(each) for each in removed]
            document["old_files_removed"] = swept
        documents.append(document)
    if as_json:
        echo_json(documents)
        return
    for document in documents:
        _print(document)


def _holding(workspace: Workspace, source: str) -> list[str]:
    """Return the tables whose whole deliveries hold the watermark of ``source``; empty for another source."""
    store = workspace.landing(source)
    if not any(each.deliveries for each in store.epoch_standings()):
        return []
    tables = {each.full_name for each in workspace.contracts.of_source(source)}
    return LandedSnapshots.of(store).holding(tables)


def _chosen(
    workspace: Workspace, source: str | None, table: str | None
) -> list[tuple[str, TableContract | None]]:
    """Return the selected sources, each with the one table whose old files are meant (None: all)."""
    if table is not None:
        among = [each for each in workspace.contracts if source in (None, each.source)]
        only = table_named(table, among)
        return [(only.source, only)]
    names = workspace.contracts.sources() if source is None else [contracted_source(workspace, source)]
    return [(name, None) for name in names]


def _document(planned: RetentionPlan, old: list[OldFiles]) -> dict[str, Any]:
    return {
        "source": planned.source,
        "keep": {layer: duration_text(keep) for layer, keep in planned.keep.items()},
        "watermark": iso(planned.watermark),
        "to_remove": [
            asdict(each) | {"landed_until": each.landed_until.isoformat()} for each in planned.doomed
        ],
        "old_versions": [
            asdict(each) | {"keep": duration_text(each.keep), "ended_before": iso(each.ended_before)}
            for each in planned.versions
        ],
        "withheld_values": [
            asdict(each) | {"keep": duration_text(each.keep), "landed_until": iso(each.landed_until)}
            for each in planned.values
        ],
        "superseded_rows": [asdict(each) | {"keep": duration_text(each.keep)} for each in planned.rows],
        "refused": [{"layer": e.layer, "window": e.window, "why": e.why} for e in planned.refused],
        "unfinished": [{"layer": e.layer, "window": e.window, "table": e.table} for e in planned.unfinished],
        "old_files": [asdict(each) | {"keep": duration_text(each.keep)} for each in old],
    }


def _print(document: dict[str, Any]) -> None:
    heading(document["source"])
    if document["watermark"] is None and set(document["keep"].values()) != {duration_text(None)}:
        click.echo("  it has no watermark, by which age is counted: so nothing of it is old")
    if document["watermark_held_by"]:
        click.echo(f"  its watermark waits for a whole delivery of {some(document['watermark_held_by'])}")
    for layer, keep in document["keep"].items():
        going = [each for each in document["to_remove"] if each["layer"] == layer]
        files, freed = (sum(each[name] for each in going) for name in ("files", "bytes"))
        windows = f": {some([each['window'] for each in going])}" if going else ""
        click.echo(
            f"  {layer}, kept {keep}: {counted(len(going), 'window')} to go with {counted(files, 'file')}, "
            f"{size(freed)}{windows}"
        )
        unfinished = [each["window"] for each in document["unfinished"] if each["layer"] == layer]
        if unfinished:
            click.echo(f"    begun before and to be finished: {some(unfinished)}")
        _print_refused(document, layer)
    _print_of_tables(document)
    old = document["old_files"]
    freed = sum(each["bytes"] for each in old)
    click.echo(f"  old files: {counted(sum(each['count'] for each in old), 'file')} to go, {size(freed)}")
    for each in document.get("removed", ()):
        files = counted(each["files"], "file")
        of = counted(each["windows"], "table" if each["layer"] == "history" else "window")
        click.echo(f"  removed from {each['layer']}: {of}, {files}")
    if "old_files_removed" in document:
        click.echo(f"  removed old folders and single files: {document['old_files_removed']:,}")


def _print_of_tables(document: dict[str, Any]) -> None:
    """Print what is removed by the contracts of single tables."""
    values: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for each in document["withheld_values"]:
        values.setdefault((each["table"], each["keep"]), []).append(each)
    for (table, keep), each_window in values.items():
        events, undecided = (sum(each[name] for each in each_window) for name in ("events", "undecided"))
        of_them = f" ({undecided:,} undecided, and sealed)" if undecided else ""
        click.echo(
            f"  quarantine of {table}, kept {keep}: values of {counted(events, 'event')}{of_them} to go: "
            f"{some([each['window'] for each in each_window])}"
        )
    _print_refused(document, "quarantine")
    for each in document["superseded_rows"]:
        going = counted(each["rows"], "superseded row")
        click.echo(
            f"  net changes of {each['table']}, kept {each['keep']}: {going} to go, "
            f"about {size(each['bytes'])}: {some(each['windows'])}"
        )
    _print_refused(document, "net_changes")
    for each in document["old_versions"]:
        versions = counted(each["versions"], "version")
        click.echo(
            f"  history of {each['table']}, kept {each['keep']}: {versions} to go that ended before "
            f"{each['ended_before']}, about {size(each['bytes'])}"
        )
    for of, what in (("quarantine", "window"), ("history", "table")):
        begun = [each[what] for each in document["unfinished"] if each["layer"] == of]
        if begun:
            click.echo(f"  {of}, begun before and to be finished: {some(begun)}")


def _print_refused(document: dict[str, Any], layer: str) -> None:
    reasons: dict[str, list[str]] = {}
    for each in document["refused"]:
        if each["layer"] == layer:
            reasons.setdefault(each["why"], []).append(each["window"])
    for why, refused in reasons.items():
        click.echo(f"    refused, as {why}: {some(refused)}")
