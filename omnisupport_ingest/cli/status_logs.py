"""``status``: the captured logs of a home, whether their servers answer, and the state of each capture.

A probe asks its server from the moment it is made, so a server that is away holds up nothing else.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from omnisupport_ingest.contracts.sources import (
    SourceDefinition,
    SourceKind,
    log_settings,
    log_sources,
    sources_in_force,
)
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.sources.postgres.capture.requests import PauseRequest
from omnisupport_ingest.sources.postgres.capture.state import capture_state
from omnisupport_ingest.sources.postgres.embedded.dsn import source_dsn
from omnisupport_ingest.sources.postgres.session.server import SourceAnswer, SourceProbe
from omnisupport_ingest.sources.postgres.slot.home_slot import may_have_slot

if TYPE_CHECKING:
    from omnisupport_ingest.contracts.model import Contracts
    from omnisupport_ingest.home import Home
    from omnisupport_ingest.settings import Settings

    _Log = tuple[Settings, SourceProbe | SourceAnswer]


def log_probes(settings: Settings, home: Home, contracts: Contracts) -> list[_Log]:
    """Return each log of the home, its own first: its settings, and a probe or why there is none."""
    own = sources_in_force(settings, contracts).find(settings.source)
    logs = [each for each in log_sources(settings, contracts) if each.name != own.name]
    if _is_log(settings, home, contracts, own):
        logs.insert(0, own)
    return [_probed(settings, home, each) for each in logs]


def _is_log(settings: Settings, home: Home, contracts: Contracts, own: SourceDefinition) -> bool:
    """Whether the settings' ``own`` source is a log. In a home with contracts, one that nothing but its usual
    name speaks of is none."""
    if own.kind is not SourceKind.LOG:
        return False
    named = own.path or settings.source_dsn is not None or contracts.of_source(own.name)
    made = (home.path / "postgres").exists() or may_have_slot(home.landing, own.name)
    return bool(named) or made or not len(contracts)


def logs_without_contracts(settings: Settings, home: Home, contracts: Contracts) -> list[_Log]:
    """Return the other logs for which the home has made a slot, and of which no table has a contract now."""
    return [
        _probed(settings, home, each)
        for each in sources_in_force(settings, contracts).of_kind(SourceKind.LOG)
        if each.name != settings.source
        and not contracts.of_source(each.name)
        and may_have_slot(home.landing, each.name)
    ]


def _probed(settings: Settings, home: Home, definition: SourceDefinition) -> _Log:
    """Return the settings of the source, and a probe of its log or why there is none."""
    try:
        of_source = log_settings(settings, definition)
        return of_source, _probe(of_source, home)
    except IngestError as error:
        named = settings.model_copy(update={"source": definition.name})
        return named, SourceAnswer(False, error.problem)


def _probe(settings: Settings, home: Home) -> SourceProbe | SourceAnswer:
    away = SourceAnswer(False, "The embedded PostgreSQL is not running.")
    if settings.source_dsn is None and not (home.path / "postgres").exists():
        return away
    try:
        return SourceProbe(source_dsn(settings, home), settings.slot)
    except IngestError:
        return away


def log_document(
    settings: Settings, home: Home, probe: SourceProbe | SourceAnswer, answered_by: float
) -> dict[str, Any]:
    """Return what is shown of a log, as JSON values.

    ``answered_by``: until then (monotonic seconds) its server must answer.
    """
    if isinstance(probe, SourceAnswer):
        reach = probe
    else:
        reach = probe.result(max(0.0, answered_by - time.monotonic()))
    landing = home.path / "landing" / settings.source
    pause = PauseRequest(landing).read()
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
            "safe_bytes": slot.safe_bytes if slot else None,
            "confirmed_flush_lsn": str(slot.confirmed_flush_lsn) if slot else None,
        },
        "capture": capture.state.value,
        "paused": str(pause) if pause else None,
        "last_error": capture.last_error.problem if capture.last_error else None,
    }
