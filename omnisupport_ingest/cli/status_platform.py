"""The part of ``status`` about the platform: services, sensors, runs, checks, even while nothing runs.

While the UI answers, the sensors come from it; otherwise from Dagster's own records
(``runtime.recorded_runs``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Any

from omnisupport_ingest.cli import render
from omnisupport_ingest.cli.probes import daemon_hangs
from omnisupport_ingest.runtime.home_lock import holder, takes_in
from omnisupport_ingest.runtime.ports import LOOPBACK
from omnisupport_ingest.runtime.recorded_runs import RunSeen, recorded
from omnisupport_ingest.runtime.running import running_services, ui_port
from omnisupport_ingest.runtime.sensors_seen import sensors_seen

if TYPE_CHECKING:
    from omnisupport_ingest.contracts.model import Contracts
    from omnisupport_ingest.home import Home
    from omnisupport_ingest.settings import Settings

_GOING_ON_SHOWN = 10
_ENDED_SHOWN = 3
_CHECKS_SHOWN = 3


def platform_document(settings: Settings, home: Home, contracts: Contracts | None) -> dict[str, Any]:
    """Return what runs on the home, and what Dagster has recorded, as JSON values.

    Only checks of the tables of ``contracts`` are included; all if it is None (they cannot be read).
    """
    run_folder = home.path / "run"
    port = ui_port(run_folder)
    known = recorded(home.path / "dagster", settings.dagster_pg_url)
    unread = known.unread if known is not None else ()
    if known is None and settings.dagster_pg_url is not None:
        # Its PostgreSQL does not answer; without one, nothing was recorded yet.
        unread = ("run", "sensor", "check")
    if known is not None and contracts is not None:
        known = known.in_force({(each.source, each.name) for each in contracts.all})
    sensors = sensors_seen(port) if port else None
    if sensors is None and known is not None:
        sensors = known.sensors
    # Testing a lock that does not exist would create its file.
    held = holder(home) if (run_folder / "supervisor.lock").exists() else None
    running = takes_in(held)
    return {
        "running": running,
        "held_by": str(held) if held is not None and not running else None,
        "daemon_hangs": running and daemon_hangs(home, settings),
        "records_unread": [*unread],
        "services": running_services(run_folder),
        "ui": f"http://{LOOPBACK}:{port}" if port else None,
        "sensors": None if sensors is None else [plain(asdict(each)) for each in sensors],
        "runs": None if known is None else [_run(each) for each in known.runs],
        "failed_runs": None if known is None else [_run(each) for each in known.failed_jobs],
        "checks": None
        if known is None
        else {
            "passed": len(known.checks) - len(known.failed_checks),
            "failed": [plain(asdict(each)) for each in known.failed_checks],
        },
        "daemon_at": render.iso(known.daemon_at) if known is not None else None,
    }


def plain(record: dict[str, Any]) -> dict[str, Any]:
    """Return ``record`` with its times in ISO 8601."""
    return {
        name: value.isoformat() if isinstance(value, datetime) else value for name, value in record.items()
    }


def _run(seen: RunSeen) -> dict[str, Any]:
    return plain(asdict(seen)) | {"going_on": seen.going_on}


def platform_facts(platform: dict[str, Any], *, everything: bool) -> Iterator[tuple[str, str]]:
    """Yield labels and texts. Without ``everything``, healthy sensors are counted, not named."""
    yield "platform", _platform_line(platform)
    sensors = platform["sensors"] or []
    if everything:
        yield from (("sensor", _sensor_line(each)) for each in sensors)
    elif sensors:
        unwell = [each for each in sensors if not each["running"] or each["tick"] == "FAILURE"]
        last = max((each["tick_at"] for each in sensors if each["tick_at"]), default=None)
        tick = f", last tick {render.ago(last)}" if last else ""
        yield "sensors", f"{len(sensors) - len(unwell)} of {len(sensors)} well{tick}"
        yield from (("", _sensor_line(each)) for each in unwell)
    if platform["runs"]:
        yield "runs", "\n".join(_run_lines(platform["runs"], everything=everything))
    if platform["checks"] is not None:
        yield "checks", _checks_line(platform["checks"], everything=everything)


def _platform_line(platform: dict[str, Any]) -> str:
    if (held_by := platform.get("held_by")) is not None:
        return f"not running: {held_by} has the home"
    if not platform["running"]:
        return "not running (omnisupport-ingest up)"
    ui = f"UI: {platform['ui']}" if platform["ui"] else "no UI"
    return f"running, {ui}; {', '.join(platform['services']) or 'no service runs yet'}"


def _sensor_line(sensor: dict[str, Any]) -> str:
    state = "runs" if sensor["running"] else "is stopped"
    if sensor["tick"] is None:
        return f"{sensor['name']} {state}, no tick yet"
    answer = sensor["said"] or {"SUCCESS": "requested runs", "FAILURE": "failed; see the UI"}.get(
        sensor["tick"], sensor["tick"].lower()
    )
    return f"{sensor['name']} {state}, {render.ago(sensor['tick_at'])}: {answer}"


def _run_lines(runs: list[dict[str, Any]], *, everything: bool) -> Iterator[str]:
    """Yield a line for each run in progress, in the order given, and for the first runs that have ended."""
    going_on = [each for each in runs if each["going_on"]]
    ended = [each for each in runs if not each["going_on"]]
    shown = going_on if everything else going_on[:_GOING_ON_SHOWN]
    yield from map(_run_line, shown)
    if len(going_on) > len(shown):
        yield f"and {len(going_on) - len(shown):,} more that go on (--all)"
    yield from map(_run_line, ended if everything else ended[:_ENDED_SHOWN])


def _run_line(run: dict[str, Any]) -> str:
    name = f"{run['job']} {run['run_id'][:8]}"
    if run["going_on"]:
        since = f" for {render.since(run['began'])}" if run["began"] else ""
        return f"{name} {run['status'].lower()}{since}"
    outcome = {"SUCCESS": "succeeded", "FAILURE": "FAILED"}.get(run["status"], run["status"].lower())
    if run["ended"] is None or run["began"] is None:
        return f"{name} {outcome}"
    took = datetime.fromisoformat(run["ended"]) - datetime.fromisoformat(run["began"])
    return f"{name} {outcome} {render.ago(run['ended'])}, took {render.span(took.total_seconds())}"


def _checks_line(checks: dict[str, Any], *, everything: bool) -> str:
    failed = checks["failed"]
    if not failed:
        return f"{checks['passed']} passed" if checks["passed"] else "none has run yet"
    shown = failed if everything else failed[:_CHECKS_SHOWN]
    lines = [f"{len(failed)} FAILED, {checks['passed']} passed"]
    lines += [f"{each['asset']}:{each['check']}: {each['said'] or 'no message'}" for each in shown]
    if len(failed) > len(shown):
        lines.append(f"and {len(failed) - len(shown)} more (--all)")
    return "\n".join(lines)
