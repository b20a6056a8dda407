"""``source status NAME`` of a source without a log of ours: of one that is read by cursors, where each table
stands."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from omnisupport_ingest.cli.opening import existing_home

if TYPE_CHECKING:
    from omnisupport_ingest.settings import Settings


def named_source(settings: Settings, name: str | None) -> Settings:
    """``settings`` with ``name`` as their source; ``SourceUnknown`` if the home has no such source."""
    from omnisupport_ingest.contracts.sources import sources_in_force

    if name is None or name == settings.source:
        return settings
    return settings.model_copy(update={"source": sources_in_force(settings).find(name).name})


def has_log(settings: Settings, name: str) -> bool:
    """Whether the source ``name`` is captured from its log; ``SourceUnknown``."""
    from omnisupport_ingest.contracts.sources import SourceKind, sources_in_force

    return name == settings.source or sources_in_force(settings).find(name).kind is SourceKind.LOG


def query_status(settings: Settings, name: str, *, as_json: bool) -> int:
    """Print where each table, or partition, of the source ``name`` stands; returns the exit code."""
    from omnisupport_ingest.cli.kafka import kafka_status
    from omnisupport_ingest.contracts.in_force import contracts_in_force
    from omnisupport_ingest.contracts.sources import SourceKind, SourceUnknown, sources_in_force
    from omnisupport_ingest.landing.store import LandingStore
    from omnisupport_ingest.sources.postgres.capture.requests import PauseRequest
    from omnisupport_ingest.sources.postgres.session.lease import Lease
    from omnisupport_ingest.sources.query.state import QueryState

    definition = sources_in_force(settings).find(name)
    if definition.kind is SourceKind.KAFKA:
        return kafka_status(settings, definition, existing_home(settings), as_json=as_json)
    if definition.kind is not SourceKind.QUERY:
        raise SourceUnknown(
            f"{name} is a source of the kind {definition.kind}: nothing reads it, its files are landed.",
            fix="omnisupport-ingest status, or landing show --source " + name,
        )
    home = existing_home(settings)
    store = LandingStore(home.landing, name)
    pause = PauseRequest(store.folder).read()
    running = Lease.is_held(home.run, name)
    told: dict[str, Any] = {
        "source": name,
        "state": "PAUSED" if pause is not None else "RUNNING" if running else "STOPPED",
        "connection": definition.connection,
        "tables": [],
    }
    with QueryState(store.folder) as state:
        for table in definition.tables(contracts_in_force(settings)):
            progress = state.progress(table.full_name)
            reading = progress.reading if progress is not None else None
            told["tables"].append(
                {
                    "table": table.full_name,
                    "cursor": progress.cursor if progress is not None else None,
                    "read_at": progress.finished.isoformat() if progress and progress.finished else None,
                    "reading": None if reading is None else ("whole" if reading.full else "from its cursor"),
                }
            )
    if as_json:
        click.echo(json.dumps(told, indent=2))
        return 0
    click.echo(f"{name}: {told['state']}, by {told['connection']}")
    for each in told["tables"]:
        stands = "never read to its end" if each["cursor"] is None else f"read up to {each['cursor']}"
        going = f"; being read {each['reading']}" if each["reading"] else ""
        at = f", at {each['read_at']}" if each["read_at"] else ""
        click.echo(f"  {each['table']}: {stands}{at}{going}")
    return 0
