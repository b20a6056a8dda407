"""``alarms``: tell people when what is wrong with the platform changes, and others that it is alive.

A look is that of ``status``. ``up`` looks every minute; a timer of the machine can look as well, and is the
one that tells when ``up`` does not run. What was told last stands in the home, and a lock lets one look after
the other, so each change is told once whoever looks.

The sensor ``source_health_<source>`` tells of a captured source while Dagster's daemon runs. So slots and
source are told here only when it does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from omnisupport_ingest.cli.opening import leave_out_pandas, open_home, open_settings
from omnisupport_ingest.cli.render import echo_json, say_err
from omnisupport_ingest.cli.status_health import CHECK, SLOT, Problem, problems
from omnisupport_ingest.cli.stopping import stop_on_signal
from omnisupport_ingest.durable import replace
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.foreign import Unreadable
from omnisupport_ingest.locks import LockTaken, NamedLock
from omnisupport_ingest.records import encode, read_note
from omnisupport_ingest.runtime.alarm import AlarmNotSent, send_alarm, send_heartbeat

if TYPE_CHECKING:
    from omnisupport_ingest.home import Home
    from omnisupport_ingest.settings import Settings

Document = dict[str, Any]

_TOLD_BY_SENSOR = ":source_healthy"
"""End of the kind of a red check that the sensor of the source has told of itself."""

_ALARMS_OF_ITS_OWN = ":schema_as_contracted"
"""End of the kind of a red check of which each finding is an alarm of its own."""

_WELL, _WARNING, _ALARM = "well", "warning", "alarm"


@dataclass(frozen=True, slots=True)
class Told:
    """What people were told last: the kinds of the problems, and the level."""

    kinds: tuple[str, ...] = ()
    level: str = _WELL


@click.command()
@click.option("--watch", is_flag=True, help="Look again and again, until Ctrl-C, as a service of `up` does.")
@click.option(
    "--every",
    type=click.FloatRange(min=1),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="How often --watch looks.",
)
@click.option(
    "--expect-running",
    is_flag=True,
    help="It is a problem, too, if the platform does not run; always with --watch.",
)
@click.option("--test", is_flag=True, help="Send one alarm that says that it is a test, and look at nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print what was found and told as one JSON document.")
def alarms(watch: bool, every: float, expect_running: bool, test: bool, as_json: bool) -> None:
    """Tell people when something is wrong, by OMNISUPPORT_ALARM_COMMAND and OMNISUPPORT_ALARM_WEBHOOK.

    Told is every change: red checks, failed runs and sensors, broken service levels, a capture that failed, a
    gap, each schema change that asks for something, contracts whose file is gone, events in quarantine, the
    disk. A problem of which just a number has changed is not told again; when all is well again, that is
    told. Where nothing can be told, it is tried again by the next look.

    `up` watches by itself if one of both settings is there, and asks OMNISUPPORT_HEARTBEAT_URL after a look
    of which nothing is left to tell: somebody else who watches for that hears when the machine is gone. A
    timer of the machine with --expect-running tells when `up` does not run, and of slots meanwhile.

    \b
    Examples:
      omnisupport-ingest alarms --test
      */5 * * * * omnisupport-ingest alarms --expect-running

    Exit code: 0 nothing is left to tell, 1 it could not be told, 2 usage or settings, 3 no home.
    """
    leave_out_pandas()
    settings = open_settings()
    if test:
        _require_way(send_alarm(settings, _test_document(str(settings.home))))
        click.echo("Sent. Did it reach you?")
        return
    home = open_home(settings)
    watched = Watch(settings, home, lambda: _seen(home, settings, expect_running=expect_running or watch))
    if watch:
        _look_until_stopped(watched, every, somebody=is_told(settings))
        return
    document = watched.look()
    if as_json:
        echo_json(document)
    else:
        _show(document)


class Watch:
    """Looks at a home, each of which tells what has changed since the one before, of whatever process."""

    def __init__(self, settings: Settings, home: Home, see: Callable[[], tuple[list[Problem], bool]]) -> None:
        """``see`` returns what is wrong, and whether the platform runs."""
        self._settings, self._home, self._see = settings, home, see
        self._file = home.run / "alarms.json"

    def look(self) -> Document:
        """Look once, tell what has changed, then give the sign of life. ``AlarmNotSent`` if that fails."""
        try:
            lock = NamedLock.take(self._home.run / "alarms.lock", "alarms")
        except LockTaken:
            return {"told": False, "level": None, "problems": [], "skipped": "another look is going on"}
        try:
            found, running = self._see()
            document = self._tell(found)
        finally:
            lock.release()
        if running:
            # After the alarms: who watches for it hears of a platform that cannot tell anybody, too.
            send_heartbeat(self._settings)
        return document

    def _tell(self, found: list[Problem]) -> Document:
        now, before = _told_of(found), self._before()
        document = {
            "home": str(self._home.path),
            "level": now.level,
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "problems": [_of(each) | {"new": each.kind not in before.kinds} for each in found],
            "gone": [kind for kind in before.kinds if kind not in now.kinds],
        }
        told = now != before and send_alarm(self._settings, document)
        if told:
            # No failpoint: noted after it was sent; who dies in between tells it twice.
            replace(self._file, encode(now))
        return document | {"told": told}

    def _before(self) -> Told:
        try:
            return read_note(Told, self._file)
        except (OSError, Unreadable):
            # Nobody was told anything, or who was is not known: then all is told again.
            return Told()


def is_told(settings: Settings) -> bool:
    """Whether anybody is told of alarms, or waits for a heartbeat."""
    ways = (settings.alarm_command, settings.alarm_webhook, settings.heartbeat_url)
    return any(way is not None for way in ways)


def _look_until_stopped(watched: Watch, every: float, *, somebody: bool) -> None:
    with stop_on_signal() as stop:
        if not somebody:
            # A service manager would start it again and again if it ended.
            say_err("Nobody is told: OMNISUPPORT_ALARM_COMMAND and OMNISUPPORT_ALARM_WEBHOOK are not set.")
            stop.wait()
        while not stop.is_set():
            try:
                watched.look()
            except AlarmNotSent as failed:
                say_err(f"{failed.problem} Fix: {failed.fix}")
            stop.wait(every)


def _told_of(found: list[Problem]) -> Told:
    level = _ALARM if any(each.broken for each in found) else _WARNING if found else _WELL
    return Told(tuple(sorted({each.kind for each in found})), level)


def _of(problem: Problem) -> Document:
    level = _ALARM if problem.broken else _WARNING
    return {"kind": problem.kind, "problem": problem.says, "fix": problem.help, "level": level}


def _seen(home: Home, settings: Settings, *, expect_running: bool) -> tuple[list[Problem], bool]:
    """What people are to be told of, and whether the platform runs."""
    from omnisupport_ingest.cli.status import status_document

    try:
        document = status_document()
    except IngestError as error:
        return [Problem("home", error.problem, error.fix, broken=True)], False
    running = bool(document["platform"]["running"])
    found = [each for each in problems(document) if not _has_other_alarms(each)]
    if not running:
        found += _of_slots(home, settings)
        if expect_running:
            found.append(
                Problem("platform", "the platform does not run", "omnisupport-ingest up", broken=True)
            )
    return found, running


def _has_other_alarms(problem: Problem) -> bool:
    return problem.kind.startswith(SLOT) or (
        problem.kind.startswith(CHECK) and problem.kind.endswith((_TOLD_BY_SENSOR, _ALARMS_OF_ITS_OWN))
    )


def _of_slots(home: Home, settings: Settings) -> Iterator[Problem]:
    """What the sensors of the captured sources would tell if they ran."""
    from omnisupport_ingest.contracts.in_force import contracts_in_force
    from omnisupport_ingest.contracts.sources import log_settings, log_sources
    from omnisupport_ingest.sources.postgres.capture.health import source_health
    from omnisupport_ingest.sources.postgres.preflight.source_check import contracted_tables
    from omnisupport_ingest.sources.postgres.slot.retention import Level

    contracts = contracts_in_force(settings)
    for each in log_sources(settings, contracts):
        try:
            health = source_health(
                log_settings(settings, each), home, contracted_tables(contracts, each.name)
            )
        except IngestError as error:
            yield Problem(f"{SLOT} {each.name}: unknown", error.problem, error.fix)
            continue
        for kind, warning in zip(health.kinds, sorted(health.problems, key=lambda w: w.problem), strict=True):
            broken = warning.level is Level.ALARM
            yield Problem(f"{SLOT} {each.name}: {kind}", warning.problem, warning.fix, broken=broken)


def _test_document(home: str) -> Document:
    return {
        "home": home,
        "level": _WELL,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "problems": [],
        "gone": [],
        "test": True,
    }


def _require_way(sent: bool) -> None:
    if not sent:
        raise click.UsageError("Set OMNISUPPORT_ALARM_COMMAND or OMNISUPPORT_ALARM_WEBHOOK.")


def _show(document: Document) -> None:
    for each in document["problems"]:
        click.echo(f"{each['level']}: {each['problem']}\n  Fix: {each['fix']}")
    if document.get("skipped"):
        click.echo(f"Not looked: {document['skipped']}.")
    elif not document["problems"]:
        click.echo("Nothing is wrong.")
    if document["told"]:
        click.echo("Told, as it has changed.")
