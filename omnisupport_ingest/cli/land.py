"""``land``: files of Debezium events, named or from the inbox, land as batches of their source."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from omnisupport_ingest.cdc.lateness import is_late
from omnisupport_ingest.cli.errors import FINDINGS
from omnisupport_ingest.cli.opening import open_home, open_settings, options_as
from omnisupport_ingest.cli.render import counted, echo_json, say_err, some
from omnisupport_ingest.cli.stopping import stop_on_signal
from omnisupport_ingest.contracts.kept import Documents, keep, usable
from omnisupport_ingest.contracts.landed_keys import LandedKeyChanged
from omnisupport_ingest.contracts.learned import LearnedColumns
from omnisupport_ingest.contracts.model import DEFAULT_ALLOWED_LATENESS, TableContract
from omnisupport_ingest.contracts.sources import SourceDefinition, SourceKind, sources_in_force
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.foreign import printable
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.sources.debezium.faults import FileRefused, FilesPaused, SourceTakesNoFiles
from omnisupport_ingest.sources.debezium.handling import BY_ARRIVAL, handling_in_force
from omnisupport_ingest.sources.debezium.inbox import Inbox, Taken
from omnisupport_ingest.sources.debezium.land import FileLanding, Inlet, check_source, refuse_paused
from omnisupport_ingest.sources.debezium.land import land as land_file
from omnisupport_ingest.sources.debezium.orders import WORDS
from omnisupport_ingest.sources.encrypting import encrypting_store
from omnisupport_ingest.windows import OUT_OF_RANGE, without_sentinel

if TYPE_CHECKING:
    from omnisupport_ingest.settings import Settings

_LOOK_SECONDS = 1.0
_RETRY_SECONDS = 30.0
"""Seconds that the watcher waits after an error that is not the fault of a file."""


@dataclass(frozen=True, slots=True)
class _Inputs:
    """The inputs of the command: files of a source, or an inbox to watch."""

    files: tuple[Path, ...]
    source: str | None
    new_epoch: str | None
    once: bool
    inbox: Path | None


@dataclass(frozen=True, slots=True)
class _EventOptions:
    """How the connector writes events, if that differs from the definition of the source."""

    decimals: str | None
    binary: str | None
    odd_lines: str | None


@click.command()
@click.argument("files", nargs=-1, type=click.Path(path_type=Path), metavar="[FILE]...")
@click.option(
    "--source", metavar="NAME", help="The source of the events, as contracts name it in x-cdc.source."
)
@click.option(
    "--new-epoch",
    metavar="WHY",
    help="Begin the next epoch of the source with the first file: its connector was set up again.",
)
@click.option(
    "--decimals",
    type=click.Choice(["precise", "string"]),
    help="How the connector writes decimals (decimal.handling.mode), for files without schemas.  "
    "[default: that of the source's definition, else precise]",
)
@click.option(
    "--binary",
    type=click.Choice(["base64", "base64-url-safe", "hex"]),
    help="How the connector writes bytes (binary.handling.mode).  "
    "[default: that of the definition, else Debezium's mode bytes, which is base64 in JSON]",
)
@click.option(
    "--odd-lines",
    type=click.Choice(["quarantine", "refuse"]),
    help="A line that cannot be read goes to quarantine, or its file is refused.  "
    "[default: that of the definition, else quarantine]",
)
@click.option("--watch", is_flag=True, help="Land the files that come into the inbox, until Ctrl-C.")
@click.option("--once", is_flag=True, help="With --watch: land the files that are there now, and exit.")
@click.option(
    "--inbox",
    type=click.Path(path_type=Path, file_okay=False),
    help="With --watch: the inbox, a folder with a folder per source.  [default: inbox in the home]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document; not with --watch.")
@options_as("inputs", _Inputs)
@options_as("events", _EventOptions)
def land(inputs: _Inputs, events: _EventOptions, watch: bool, as_json: bool) -> int | None:
    """Land files of Debezium events (JSON lines, plain, .gz or .zst), each as one batch of its source.

    Files may be late, repeated, overlapping and in any order. Landing a file twice changes nothing. A line
    that cannot be read goes to quarantine; a file without any line that is recognisably an event is refused.
    The definition of the source (contracts/sources/NAME.json) says how its connector writes events; the
    options override it.

    With --watch, the command takes files from INBOX/SOURCE named *.jsonl or *.json, also with .gz or .zst
    behind it, when they no longer grow, and moves them to landed/ or refused/ there. Write a file under a
    name that begins with a dot, and rename it when it is complete.

    The files of a paused source (`source pause`) do not land: named, they are an error; in the inbox, they
    wait.

    An event from before the first window of the home stays in quarantine (out_of_range), and a check stays
    red. A home for older files gets an earlier first window when it is made, as for the sample here.

    \b
    Example:
      export OMNISUPPORT_HOME=/tmp/partner OMNISUPPORT_FIRST_WINDOW=2026-11-20T00:00
      omnisupport-ingest land data/debezium_events/partner_tickets.jsonl --source partner_desk
      omnisupport-ingest land --watch --inbox /srv/debezium

    Exit code: 0 landed, 1 a file is refused or the source is paused, 2 usage, settings, a source that takes
    no files, or a contract that lost the key of what has landed.
    """
    _check_usage(inputs, watch=watch, as_json=as_json)
    handling = {name: value for name, value in asdict(events).items() if value is not None}
    settings = open_settings()
    if watch:
        return _watch(settings, handling, inputs.inbox, once=inputs.once)
    return _land_files(settings, handling, inputs, as_json=as_json)


def _check_usage(inputs: _Inputs, *, watch: bool, as_json: bool) -> None:
    if watch and (inputs.files or inputs.source or inputs.new_epoch or as_json):
        raise click.UsageError("--watch takes neither files nor --source, --new-epoch and --json.")
    if not watch and (inputs.once or inputs.inbox):
        raise click.UsageError("--once and --inbox go with --watch.")
    if not watch and (not inputs.files or not inputs.source):
        raise click.UsageError("Name files and their --source, or use --watch.")
    if inputs.new_epoch is not None and not inputs.new_epoch.strip():
        raise click.UsageError("--new-epoch needs the reason, which is recorded.")


def _land_files(
    settings: Settings, handling: dict[str, str], inputs: _Inputs, *, as_json: bool
) -> int | None:
    open_home(settings)
    workspace, source, new_epoch = Workspace.open(settings), inputs.source or "", inputs.new_epoch
    documents: list[dict[str, Any]] = []
    refused, waiting = False, list[LandedKeyChanged]()
    for path in inputs.files:
        try:
            landing = _land(workspace, handling, path, source, new_epoch)
        except SourceTakesNoFiles:
            raise
        except LandedKeyChanged as error:
            if handling_in_force(settings, source).order == BY_ARRIVAL:
                # The next file would land below it.
                raise
            waiting.append(error)
            documents.append(
                {"file": printable(path), "refused": {"problem": error.problem, "fix": error.fix}}
            )
            continue
        except FileRefused as error:
            refused = True
            documents.append(
                {"file": printable(path), "refused": {"problem": error.problem, "fix": error.fix}}
            )
            say_err(f"Refused: {error}")
            continue
        if landing.began_epoch is not None:
            new_epoch = None
        documents.append(_facts(workspace, landing))
        if not as_json:
            click.echo("\n".join(_lines(workspace, documents[-1])))
    if as_json:
        echo_json({"source": source, "files": documents})
    for each in waiting[1:]:
        say_err(str(each))
    if waiting:
        # Now that the others have landed.
        raise waiting[0]
    return FINDINGS if refused else None


def _watch(settings: Settings, handling: dict[str, str], folder: Path | None, *, once: bool) -> int | None:
    home = open_home(settings)
    root = folder or home.inbox
    watched = _Watched(settings, once=once)

    def paused(source: str) -> bool:
        # Asked before any document is read: a pause may last for days, and a look comes every second.
        try:
            refuse_paused(home.landing / source)
        except FilesPaused as pause:
            watched.show_pause(source, pause)
            return True
        return False

    def land_one(path: Path, source: str) -> FileLanding:
        workspace = watched.workspace()
        try:
            return _land(workspace, handling, path, source, None)
        except FilesPaused as pause:
            watched.show_pause(source, pause)
            raise
        except FileRefused:
            if watched.refused is not None:
                # It may be a file for a document that is not in use yet, so it stays where it is.
                raise watched.refused from None
            raise

    def by_arrival(source: str) -> bool:
        return handling_in_force(watched.workspace().settings, source).order == BY_ARRIVAL

    inbox = Inbox(root, land_one, by_arrival=by_arrival, paused=paused)
    if once:
        refused, failed = 0, False
        try:
            refused = _look(watched, inbox)
        except (IngestError, OSError):
            # Its file is still there, so the second look, which takes files that were not complete, meets it.
            failed = True
        if failed or inbox.waits():
            time.sleep(inbox.settled_seconds)
            refused += _look(watched, inbox)
        return FINDINGS if refused else None
    click.echo(f"Watching {root}. Stop with Ctrl-C.")
    with stop_on_signal() as stop:
        while not stop.is_set():
            pause = _LOOK_SECONDS
            try:
                _look(watched, inbox, stop.is_set)
            except (IngestError, OSError) as error:
                text = str(error) if isinstance(error, IngestError) else f"{type(error).__name__}: {error}"
                say_err(f"{text}\nTrying again in {_RETRY_SECONDS:.0f} s.")
                pause = _RETRY_SECONDS
            stop.wait(pause)
    return None


class _Watched:
    """The home of a watcher, opened anew for each file, so that a new contract needs no restart.

    While a document is wrong, a watcher goes on with the copy that services use; with ``once`` it refuses.
    """

    def __init__(self, settings: Settings, *, once: bool) -> None:
        self._settings, self._once = settings, once
        self._notice: str | None = None
        self._pauses = dict[str, str]()
        self.refused: IngestError | None = None
        """The error about the wrong document while the workspace is that of the copy."""

    def workspace(self) -> Workspace:
        documents = Documents(self._settings) if self._once else usable(self._settings)
        if not self._once:
            keep(documents)
        if documents.notice is not None and documents.notice != self._notice:
            say_err(documents.notice)
        self._notice, self.refused = documents.notice, documents.refused
        return Workspace.open(documents.settings)

    def show_pause(self, source: str, pause: FilesPaused) -> None:
        """Report once that the files of ``source`` wait."""
        if self._pauses.get(source) != pause.problem:
            self._pauses[source] = pause.problem
            say_err(f"{pause.problem} Its files wait in the inbox for: {pause.fix}")


def _look(watched: _Watched, inbox: Inbox, stopped: Callable[[], bool] = lambda: False) -> int:
    """Land the complete files; return how many were refused."""
    refused = 0
    for taken in inbox.look():
        refused += taken.refused is not None
        click.echo("\n".join(_taken(watched, taken)))
        if stopped():
            break
    return refused


def _taken(watched: _Watched, taken: Taken) -> list[str]:
    if taken.landing is None:
        return [f"Refused: {taken.refused}", f"  It is now {printable(taken.path)}."]
    workspace = watched.workspace()
    return [f"{taken.source}:", *_lines(workspace, _facts(workspace, taken.landing))]


def _land(
    workspace: Workspace, handling: dict[str, str], path: Path, source: str, new_epoch: str | None
) -> FileLanding:
    return land_file(path, inlet_of(workspace, source, handling), new_epoch=new_epoch)


def inlet_of(workspace: Workspace, source: str, handling: dict[str, str]) -> Inlet:
    """Return where the events of ``source`` land. Raises ``SourceTakesNoFiles`` if it accepts none.

    ``handling``: options that override the definition of the source.
    """
    sources = sources_in_force(workspace.settings, workspace.contracts)
    logs = {each.name for each in sources.of_kind(SourceKind.LOG)}
    captured = source if source in logs else workspace.settings.source
    check_source(source, captured, workspace.contracts)
    _refuse_other_positions(sources.find(source))
    tables = workspace.contracts.of_source(source)
    found = replace(handling_in_force(workspace.settings, source), **handling)  # type: ignore[arg-type]
    return Inlet(
        store=encrypting_store(workspace.home, source, tables),
        grid=workspace.grid,
        contracts=workspace.contracts,
        captured=captured,
        handling=replace(found, keys=_keys_of(tables)),
        max_clock_skew=timedelta(seconds=workspace.settings.max_clock_skew_seconds),
        learned=LearnedColumns(workspace.home.path, source),
    )


def _keys_of(tables: Sequence[TableContract]) -> frozenset[frozenset[str]]:
    """Return the key columns of each table; empty if a table has a column ``value``, like a tombstone."""
    if any(column.name == "value" for each in tables for column in each.source_columns):
        return frozenset()
    return frozenset(frozenset(each.key) for each in tables)


def _refuse_other_positions(definition: SourceDefinition) -> None:
    """Refuse sources whose positions cannot be compared: those read by cursors, or ordered by arrival."""
    by_arrival = definition.kind is SourceKind.KAFKA and definition.events.get("order") == "arrival"
    if definition.kind is SourceKind.QUERY or by_arrival:
        how = "ordered by the offsets of its topics" if by_arrival else "read by its cursors"
        raise SourceTakesNoFiles(
            f"{definition.name} is {how}; files of events are not mixed into it: their positions are others.",
            fix="Land them as a source of their own, with contracts that name it as x-cdc.source.",
        )


def _facts(workspace: Workspace, landing: FileLanding) -> dict[str, Any]:
    """Return a landed file for ``--json``. ``duplicates`` are unknown until its events are judged."""
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
    """Return the windows of the file that were closed for one of its tables when it landed."""
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
    """Return ``facts`` as lines for a person."""
    if facts["already_landed"]:
        return [f"{facts['file']} had landed before as {facts['batch']}; nothing changes."]
    lines = [f"{facts['file']} landed as {facts['batch']}: {counted(facts['events'], 'event')}."]
    if facts["began_epoch"] is not None:
        lines.append(f"  Epoch {facts['began_epoch']} begins with it.")
    lines.append(f"  Ordered by {WORDS[facts['order']]}.")
    if facts["windows"]:
        late = f"{some(facts['late_windows'])}, to be replayed" if facts["late_windows"] else "none"
        lines.append(f"  Windows: {some(facts['windows'])}. Late: {late}.")
    if facts["out_of_range"]:
        lines.append(
            f"  {counted(facts['out_of_range'], 'event')} in no window of this home, which begins at "
            f"{workspace.grid.first:%Y-%m-%d %H:%M} UTC: judging puts them into quarantine (out_of_range), "
            "where they stay. Fix: for older files make a home with an earlier first window "
            "(OMNISUPPORT_HOME, OMNISUPPORT_FIRST_WINDOW)."
        )
    if facts["misplaced"]:
        lines.append(
            f"  {counted(facts['misplaced'], 'event')} behind a later one of the same key; without log "
            "positions a person must decide which counts (out_of_order_event)."
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
