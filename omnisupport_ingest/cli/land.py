"""``land``: files of Debezium events, named or from a watched folder, land as batches of their source."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from omnisupport_ingest.cli.counted import counted
from omnisupport_ingest.cli.opening import open_home, open_settings
from omnisupport_ingest.cli.stopping import stop_on_signal
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.foreign import printable

if TYPE_CHECKING:
    from omnisupport_ingest.contracts.sources import SourceDefinition
    from omnisupport_ingest.settings import Settings
    from omnisupport_ingest.sources.debezium.inbox import Inbox, Taken
    from omnisupport_ingest.sources.debezium.land import FileLanding, Inlet
    from omnisupport_ingest.stages.workspace import Workspace

REFUSED = 1
"""Exit code when a file did not land."""

_LOOK_SECONDS = 1.0
_RETRY_SECONDS = 30.0
"""How long the watcher waits after something that is not the fault of a file."""


@click.command()
@click.argument("files", nargs=-1, type=click.Path(path_type=Path), metavar="[FILE]...")
@click.option("--source", metavar="NAME", help="The source whose events they are, as x-cdc.source has it.")
@click.option(
    "--new-epoch",
    metavar="WHY",
    help="Begin the source's next epoch with the first file: its connector was set up anew.",
)
@click.option(
    "--decimals",
    type=click.Choice(["precise", "string"]),
    help="How the connector writes decimals (decimal.handling.mode); needed for files without schemas.  "
    "[default: as the source's definition says, else precise]",
)
@click.option(
    "--binary",
    type=click.Choice(["base64", "base64-url-safe", "hex"]),
    help="How the connector writes bytes (binary.handling.mode).  [default: its own, bytes]",
)
@click.option(
    "--odd-lines",
    type=click.Choice(["quarantine", "refuse"]),
    help="What becomes of a line that cannot be read: it waits in quarantine, or its file is refused.  "
    "[default: as the definition says, else quarantine]",
)
@click.option("--watch", is_flag=True, help="Land what is put into the inbox, until Ctrl-C.")
@click.option("--once", is_flag=True, help="With --watch: take what is there now, and exit.")
@click.option(
    "--inbox",
    type=click.Path(path_type=Path, file_okay=False),
    help="With --watch: the folder, one folder per source in it.  [default: inbox in the home]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document; not with --watch.")
def land(
    files: tuple[Path, ...],
    source: str | None,
    new_epoch: str | None,
    decimals: str | None,
    binary: str | None,
    odd_lines: str | None,
    watch: bool,
    once: bool,
    inbox: Path | None,
    as_json: bool,
) -> int | None:
    """Land files of Debezium events (JSON lines, plain, .gz or .zst), each as one batch of its source.

    Files may be late, repeated, overlapping and in any order. One that has landed changes nothing. A line
    that cannot be read waits in quarantine; a file without one that can is refused. How the events of a
    source are written says its definition (contracts/sources/NAME.json), and over it these options.

    With --watch, files named *.jsonl or *.json, also with .gz or .zst behind it, in INBOX/SOURCE are taken
    once they are left alone, and moved to landed/ or refused/ there. Write them under a name that begins with
    a dot, and rename them when they are complete.

    \b
    Example:
      omnisupport-ingest land data/debezium_events/partner_tickets.jsonl --source partner_desk
      omnisupport-ingest land --watch --inbox /srv/debezium

    Exit code: 0 landed, 1 a file is refused, 2 usage, settings, or a source that takes no files.
    """
    _check_usage(files, source, new_epoch, watch=watch, once=once, inbox=inbox, as_json=as_json)
    told = {"decimals": decimals, "binary": binary, "odd_lines": odd_lines}
    settings, handling = open_settings(), {name: value for name, value in told.items() if value is not None}
    if watch:
        return _watch(settings, handling, inbox, once=once)
    assert source is not None
    return _land_files(settings, handling, files, source, new_epoch, as_json=as_json)


def _check_usage(
    files: tuple[Path, ...],
    source: str | None,
    new_epoch: str | None,
    *,
    watch: bool,
    once: bool,
    inbox: Path | None,
    as_json: bool,
) -> None:
    if watch and (files or source or new_epoch or as_json):
        raise click.UsageError("--watch takes neither files nor --source, --new-epoch and --json.")
    if not watch and (once or inbox):
        raise click.UsageError("--once and --inbox go with --watch.")
    if not watch and (not files or not source):
        raise click.UsageError("Name files and their --source, or use --watch.")
    if new_epoch is not None and not new_epoch.strip():
        raise click.UsageError("--new-epoch needs the reason, which is recorded.")


def _land_files(
    settings: Settings,
    handling: dict[str, str],
    files: tuple[Path, ...],
    source: str,
    new_epoch: str | None,
    *,
    as_json: bool,
) -> int | None:
    from omnisupport_ingest.sources.debezium.faults import FileRefused, SourceRefused
    from omnisupport_ingest.stages.workspace import Workspace

    open_home(settings)
    workspace = Workspace.open(settings)
    told: list[dict[str, Any]] = []
    refused = False
    for path in files:
        try:
            landing = _land(workspace, handling, path, source, new_epoch)
        except SourceRefused:
            raise
        except FileRefused as error:
            refused = True
            told.append({"file": printable(path), "refused": {"problem": error.problem, "fix": error.fix}})
            click.echo(f"Refused: {error}", err=True)
            continue
        if landing.began_epoch is not None:
            new_epoch = None
        told.append(_facts(workspace, landing))
        if not as_json:
            click.echo("\n".join(_lines(workspace, told[-1])))
    if as_json:
        click.echo(json.dumps({"source": source, "files": told}, indent=2, ensure_ascii=False))
    return REFUSED if refused else None


def _watch(settings: Settings, handling: dict[str, str], folder: Path | None, *, once: bool) -> int | None:
    from omnisupport_ingest.sources.debezium.inbox import Inbox
    from omnisupport_ingest.stages.workspace import Workspace

    root = folder or open_home(settings).inbox

    def land_one(path: Path, source: str) -> FileLanding:
        # Opened for each file, so that a new contract counts without a restart.
        return _land(Workspace.open(settings), handling, path, source, None)

    inbox = Inbox(root, land_one)
    if once:
        refused = _look(settings, inbox)
        if inbox.waits():
            time.sleep(inbox.settled_seconds)
            refused += _look(settings, inbox)
        return REFUSED if refused else None
    click.echo(f"Watching {root}. Stop with Ctrl-C.")
    with stop_on_signal() as stop:
        while not stop.is_set():
            pause = _LOOK_SECONDS
            try:
                _look(settings, inbox, stop.is_set)
            except (IngestError, OSError) as error:
                told = str(error) if isinstance(error, IngestError) else f"{type(error).__name__}: {error}"
                click.echo(f"{told}\nTrying again in {_RETRY_SECONDS:.0f} s.", err=True)
                pause = _RETRY_SECONDS
            stop.wait(pause)
    return None


def _look(settings: Settings, inbox: Inbox, stopped: Callable[[], bool] = lambda: False) -> int:
    """Take what is complete; returns how many files were refused."""
    refused = 0
    for taken in inbox.look():
        refused += taken.refused is not None
        click.echo("\n".join(_taken(settings, taken)))
        if stopped():
            break
    return refused


def _taken(settings: Settings, taken: Taken) -> list[str]:
    from omnisupport_ingest.stages.workspace import Workspace

    if taken.landing is None:
        return [f"Refused: {taken.refused}", f"  It is now {printable(taken.path)}."]
    workspace = Workspace.open(settings)
    return [f"{taken.source}:", *_lines(workspace, _facts(workspace, taken.landing))]


def _land(
    workspace: Workspace, handling: dict[str, str], path: Path, source: str, new_epoch: str | None
) -> FileLanding:
    from omnisupport_ingest.sources.debezium.land import land as land_file

    return land_file(path, inlet_of(workspace, source, handling), new_epoch=new_epoch)


def inlet_of(workspace: Workspace, source: str, handling: dict[str, str]) -> Inlet:
    """Where the events of ``source`` land; ``SourceRefused`` for one that takes none. ``handling``: what is
    told beside its definition."""
    from dataclasses import replace
    from datetime import timedelta

    from omnisupport_ingest.contracts.sources import SourceKind, sources_in_force
    from omnisupport_ingest.sources.debezium.handling import handling_in_force
    from omnisupport_ingest.sources.debezium.land import Inlet, check_source

    sources = sources_in_force(workspace.settings, workspace.contracts)
    logs = {each.name for each in sources.of_kind(SourceKind.LOG)}
    captured = source if source in logs else workspace.settings.source
    check_source(source, captured, workspace.contracts)
    _refuse_other_positions(sources.find(source))
    return Inlet(
        store=workspace.landing(source),
        grid=workspace.grid,
        contracts=workspace.contracts,
        captured=captured,
        handling=replace(handling_in_force(workspace.settings, source), **handling),  # type: ignore[arg-type]
        max_clock_skew=timedelta(seconds=workspace.settings.max_clock_skew_seconds),
    )


def _refuse_other_positions(definition: SourceDefinition) -> None:
    """Files are not mixed into a source whose positions are others: one that is read by cursors, or topics
    that are ordered by arrival."""
    from omnisupport_ingest.contracts.sources import SourceKind
    from omnisupport_ingest.sources.debezium.faults import SourceRefused

    by_arrival = definition.kind is SourceKind.KAFKA and definition.events.get("order") == "arrival"
    if definition.kind is SourceKind.QUERY or by_arrival:
        how = "ordered by the offsets of its topics" if by_arrival else "read by its cursors"
        raise SourceRefused(
            f"{definition.name} is {how}; files of events are not mixed into it: their positions are others.",
            fix="Land them as a source of their own, with contracts that name it as x-cdc.source.",
        )


def _facts(workspace: Workspace, landing: FileLanding) -> dict[str, Any]:
    """What a machine is told of a file that has landed. ``duplicates`` are not known before judging."""
    from omnisupport_ingest.windows import OUT_OF_RANGE, without_sentinel

    manifest, tally = landing.manifest, landing.tally
    assert manifest.file is not None
    return {
        "file": str(landing.path),
        "already_landed": landing.already_landed,
        "batch": manifest.batch_id,
        "epoch": manifest.epoch,
        "began_epoch": landing.began_epoch,
        "order": manifest.file.order,
        "events": manifest.rows,
        "windows": without_sentinel(manifest.windows),
        "late_windows": _late_windows(workspace, landing),
        "out_of_range": sum(file.rows for file in manifest.files if file.window == OUT_OF_RANGE),
        "duplicates": None,
        "odd_lines": tally.odd if tally else None,
        "first_odd_line": _first_odd(landing),
        "tombstones": tally.tombstones if tally else None,
        "skipped": dict(sorted(tally.passed.items())) if tally else None,
        "tables_without_contract": dict(sorted(tally.uncontracted.items())) if tally else None,
        "misplaced": tally.misplaced if tally else None,
        "in_first_window": tally.in_first_window if tally else None,
    }


def _first_odd(landing: FileLanding) -> dict[str, Any] | None:
    if landing.tally is None or not landing.tally.odd:
        return None
    number, fault = landing.tally.first_odd
    return {"line": number, "problem": fault.problem, "fix": fault.fix}


def _late_windows(workspace: Workspace, landing: FileLanding) -> list[str]:
    """The windows of the file that were closed, for a table it has events of, when it landed."""
    from omnisupport_ingest.cdc.lateness import is_late
    from omnisupport_ingest.contracts.model import DEFAULT_ALLOWED_LATENESS
    from omnisupport_ingest.windows import OUT_OF_RANGE

    contracts = workspace.contracts.of_source(landing.manifest.source)
    allowed = {each.full_name: each.allowed_lateness for each in contracts}
    watermark = landing.manifest.arrival.watermark_before
    late = {
        file.window
        for file in landing.manifest.files
        if file.window != OUT_OF_RANGE
        for table in file.rows_per_table
        if is_late(
            watermark, workspace.grid.end_of(file.window), allowed.get(table, DEFAULT_ALLOWED_LATENESS)
        )
    }
    return sorted(late)


def _lines(workspace: Workspace, facts: dict[str, Any]) -> list[str]:
    """``facts`` for a person."""
    from omnisupport_ingest.sources.debezium.orders import WORDS

    if facts["already_landed"]:
        return [f"{facts['file']} had landed before as {facts['batch']}; nothing changes."]
    lines = [f"{facts['file']} landed as {facts['batch']}: {counted(facts['events'], 'event')}."]
    if facts["began_epoch"] is not None:
        lines.append(f"  Epoch {facts['began_epoch']} begins with it.")
    lines.append(f"  Ordered by {WORDS[facts['order']]}.")
    if facts["windows"]:
        late = f"{_some(facts['late_windows'])}, to be replayed" if facts["late_windows"] else "none"
        lines.append(f"  Windows: {_some(facts['windows'])}. Late: {late}.")
    if facts["out_of_range"]:
        lines.append(
            f"  {counted(facts['out_of_range'], 'event')} in no window of this home, which begins at "
            f"{workspace.grid.first:%Y-%m-%d %H:%M} UTC: judging puts them into quarantine (out_of_range)."
        )
    if facts["misplaced"]:
        lines.append(
            f"  {counted(facts['misplaced'], 'event')} behind a later one of the same key; without log "
            "positions a person must say which counts (out_of_order_event)."
        )
    if facts["in_first_window"]:
        lines.append(
            f"  {counted(facts['in_first_window'], 'event')} at a position that landed before with another "
            "commit time: judging puts both into quarantine (collision)."
        )
    if facts["odd_lines"]:
        first = facts["first_odd_line"]
        lines.append(
            f"  {counted(facts['odd_lines'], 'line')} that cannot be read: judging puts them into quarantine "
            f"(malformed_image). The first is line {first['line']}: {first['problem']}. {first['fix']}"
        )
    if facts["tombstones"] or facts["skipped"]:
        skipped = [counted(number, kind) for kind, number in (facts["skipped"] or {}).items()]
        dropped = [counted(facts["tombstones"], "tombstone")] if facts["tombstones"] else []
        lines.append(f"  Not events of rows, dropped: {', '.join(dropped + skipped)}.")
    for table, number in (facts["tables_without_contract"] or {}).items():
        lines.append(f"  {table} has no contract: {counted(number, 'event')} kept in the raw layers only.")
    return lines


def _some(windows: list[str]) -> str:
    shown = ", ".join(windows[:4])
    return shown if len(windows) <= 4 else f"{shown} and {len(windows) - 4} more"
