"""``status``: the whole platform at a glance."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from omnisupport_ingest.cli import status_words
from omnisupport_ingest.cli.opening import existing_home, open_settings

if TYPE_CHECKING:
    from omnisupport_ingest.contracts.model import Contracts
    from omnisupport_ingest.home import Home
    from omnisupport_ingest.settings import Settings
    from omnisupport_ingest.sources.postgres.reach import Reach, SourceLook
    from omnisupport_ingest.stages.overview import SourceOverview

    _Log = tuple[Settings, SourceLook | Reach]

_SOURCE_SECONDS = 1.0
"""How long the answer of the source is waited for, beyond the time that the rest takes."""

NOT_WELL = 1
"""Exit code when capture has failed, landing cannot be read, or a hole holds batches back."""


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def status(as_json: bool) -> int:
    """Show what runs, where the source and its landing stand, and how far every table is.

    Reads landing and the tables' own logs; changes nothing, and needs neither Spark nor a running
    platform. The source is asked for at most a second; the sensors are shown while the UI runs.
    Pending are windows and batches that have landed and that the table does not hold yet; "merged by" a
    time says that they wait for it, as the table's contract allows. Behind is how long ago what a
    dimension lacks was committed, or, where it shows all, the watermark. Times are UTC. Where writes are
    scattered over a large table, a line of advice names the setting for it.

    \b
    Examples:
      omnisupport-ingest status
      omnisupport-ingest status --json | jq '.sources[].tables[] | {table, lag_seconds}'

    Exit code: 0 all is well, 1 capture has failed, landing cannot be read, or a hole holds batches back,
    2 usage or settings, 3 no home or another home's contracts.
    """
    from omnisupport_ingest.contracts.in_force import in_force
    from omnisupport_ingest.sources.postgres.capture_state import State
    from omnisupport_ingest.stages.overview import overview
    from omnisupport_ingest.stages.workspace import Workspace

    settings = open_settings()
    home = existing_home(settings)
    workspace = Workspace.open(settings)
    looks = _looks(settings, home, workspace.contracts)
    chosen = in_force(settings)
    sources = [overview(workspace, source) for source in workspace.contracts.sources()]
    answered_by = time.monotonic() + _SOURCE_SECONDS
    logs = [_source(each, home, look, answered_by) for each, look in looks]
    document: dict[str, Any] = {
        "home": str(home.path),
        "window": str(home.grid.size),
        "first_window": home.grid.first.isoformat(),
        "in_force": {
            "contracts": str(chosen.contracts),
            "decision_table": str(chosen.decision_table),
            "tables": len(workspace.contracts),
        },
        "platform": _platform(home),
        "source": logs[0],
        "other_logs": logs[1:],
        "sources": [status_words.source_document(each) for each in sources],
    }
    if as_json:
        click.echo(json.dumps(document, indent=2))
    else:
        status_words.print_status(document)
    failed = any(each["capture"] == State.FAILED for each in logs)
    return NOT_WELL if failed or any(_held_back(each) for each in sources) else 0


def _held_back(seen: SourceOverview) -> bool:
    landing = seen.landing
    return landing.problem is not None or (landing.hole is not None and landing.hole.later_epoch is None)


def _looks(settings: Settings, home: Home, contracts: Contracts) -> list[_Log]:
    """Every log of the home, its own source first, each with a look that has begun, or why there is none."""
    from omnisupport_ingest.contracts.sources import SourceKind, log_settings, log_sources, sources_in_force
    from omnisupport_ingest.errors import IngestError
    from omnisupport_ingest.sources.postgres.reach import Reach

    own = sources_in_force(settings, contracts).find(settings.source)
    others = (each for each in log_sources(settings, contracts) if each.name != own.name)
    found: list[_Log] = []
    for each in (own, *others):
        try:
            given = log_settings(settings, each) if each.kind is SourceKind.LOG else settings
            found.append((given, _look(given, home)))
        except IngestError as error:
            named = settings.model_copy(update={"source": each.name})
            found.append((named, Reach(False, error.problem)))
    return found


def _look(settings: Settings, home: Home) -> SourceLook | Reach:
    from omnisupport_ingest.errors import IngestError
    from omnisupport_ingest.sources.postgres.reach import Reach, SourceLook
    from omnisupport_ingest.sources.postgres.source_dsn import source_dsn

    away = Reach(False, "The embedded PostgreSQL is not running.")
    if settings.source_dsn is None and not (home.path / "postgres").exists():
        return away
    try:
        return SourceLook(source_dsn(settings, home), settings.slot)
    except IngestError:
        return away


def _source(settings: Settings, home: Home, look: SourceLook | Reach, answered_by: float) -> dict[str, Any]:
    from omnisupport_ingest.sources.postgres.capture_state import capture_state
    from omnisupport_ingest.sources.postgres.pause import PauseNote
    from omnisupport_ingest.sources.postgres.reach import Reach

    reach = look if isinstance(look, Reach) else look.result(max(0.0, answered_by - time.monotonic()))
    landing = home.path / "landing" / settings.source
    pause = PauseNote(landing).read()
    capture = capture_state(home.path / "run", landing, settings.source, pause, None)
    slot = reach.slot
    return {
        "name": settings.source,
        "kind": "embedded" if settings.source_dsn is None else "configured",
        "reachable": reach.reachable,
        "problem": reach.problem,
        "server_version": reach.server,
        "slot": {
            "name": settings.slot,
            "there": slot is not None if reach.reachable else None,
            "read": slot.active_pid is not None if slot else None,
            "wal_status": slot.wal_status if slot else None,
            "retained_bytes": slot.retained_bytes if slot else None,
            "confirmed_flush_lsn": str(slot.confirmed_flush_lsn) if slot else None,
        },
        "capture": capture.state.value,
        "paused": str(pause) if pause else None,
        "last_error": capture.last_error.problem if capture.last_error else None,
    }


def _platform(home: Home) -> dict[str, Any]:
    from omnisupport_ingest.runtime.home_lock import in_use
    from omnisupport_ingest.runtime.ports import LOOPBACK
    from omnisupport_ingest.runtime.running import running_services, ui_port
    from omnisupport_ingest.runtime.sensors_seen import sensors_seen

    run_folder = home.path / "run"
    port = ui_port(run_folder)
    sensors = sensors_seen(port) if port else None
    return {
        # The look at a lock that is not there would make it.
        "running": (run_folder / "supervisor.lock").exists() and in_use(home),
        "services": running_services(run_folder),
        "ui": f"http://{LOOPBACK}:{port}" if port else None,
        "sensors": None if sensors is None else [status_words.plain(asdict(each)) for each in sensors],
    }
