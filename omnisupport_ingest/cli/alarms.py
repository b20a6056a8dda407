"""``alarms``: send an alarm when what is wrong with the platform changes, and a heartbeat while it runs.

A look finds what ``status`` shows. ``up`` looks every minute. A timer of the machine can look as well, and so
report that ``up`` does not run. The home records what was sent last, and a lock permits one look at a time,
so each change is sent once, whichever process looks.

While Dagster's daemon runs, the sensor ``source_health_<source>`` reports on a captured source. So slots and
source are reported here only while it does not run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from omnisupport_ingest.cli.opening import existing_home, open_home, open_settings
from omnisupport_ingest.cli.render import echo_json, say_err
from omnisupport_ingest.cli.status_health import CHECK, LEFT_OUT, SLOT, Problem, problems
from omnisupport_ingest.cli.stopping import stop_on_signal
from omnisupport_ingest.contracts.in_force import contracts_in_force
from omnisupport_ingest.contracts.kept import usable
from omnisupport_ingest.contracts.sources import log_settings, log_sources
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

_SENT_BY_SENSOR = ":source_healthy"
"""End of the kind of a failed check for which the sensor of the source sends its own alarm."""

_ALARMS_OF_ITS_OWN = ":schema_as_contracted"
"""End of the kind of a failed check whose findings are alarms of their own."""

_WELL, _WARNING, _ALARM = "well", "warning", "alarm"


@dataclass(frozen=True, slots=True)
class Sent:
    """What the last alarm said: the kinds of the problems, the level, and the kinds that are alarms."""

    kinds: tuple[str, ...] = ()
    level: str = _WELL
    broken: tuple[str, ...] = ()


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
@click.option("--json", "as_json", is_flag=True, help="Print what was found and sent as one JSON document.")
def alarms(watch: bool, every: float, expect_running: bool, test: bool, as_json: bool) -> None:
    """Send an alarm when something is wrong, by OMNISUPPORT_ALARM_COMMAND and OMNISUPPORT_ALARM_WEBHOOK.

    Each change is sent: red checks, failed runs and sensors, broken service levels, a capture that failed, a
    gap, each schema change that asks for something, contracts whose file is gone, slots of logs of which no
    table has a contract, targets that are late or cannot be synced, events in quarantine that were not
    discarded, the disk. A problem in which only a
    number has changed is not sent again, but a warning that has become an alarm is. When all is well again,
    that is sent; never of what could not be looked at. What could not be sent is tried again by the next
    look.

    `up` looks by itself if one of the two settings is there. It requests OMNISUPPORT_HEARTBEAT_URL after each
    look that left nothing unsent, so a service that expects this notices when the machine is gone. A timer of
    the machine with --expect-running reports that `up` does not run, and reports on slots meanwhile.

    \b
    Examples:
      omnisupport-ingest alarms --test
      */5 * * * * omnisupport-ingest alarms --expect-running

    Exit code: 0 nothing is left to send, 1 it could not be sent, 2 usage or settings, 3 no home.
    """
    settings = open_settings()
    if test:
        _require_way(send_alarm(settings, _test_document(str(settings.home))))
        click.echo("Sent. Did it reach you?")
        return
    # The service may be the first process on a new machine, so it makes the home. A single look must not: at
    # a wrong path it would find that all is well.
    home = open_home(settings) if watch else existing_home(settings)
    watched = Watch(settings, home, lambda: _seen(home, settings, expect_running=expect_running or watch))
    if watch:
        _look_until_stopped(watched, every, somebody=has_receiver(settings))
        return
    document = watched.look()
    if as_json:
        echo_json(document)
    else:
        _show(document)


class Watch:
    """Looks at a home. Each look sends what has changed since the look before, even if another process made
    that."""

    def __init__(self, settings: Settings, home: Home, see: Callable[[], tuple[list[Problem], bool]]) -> None:
        """``see`` returns what is wrong, and whether the platform runs."""
        self._settings, self._home, self._see = settings, home, see
        self._file = home.run / "alarms.json"

    def look(self) -> Document:
        """Look once, send what has changed, then the heartbeat. Raises ``AlarmNotSent`` if one cannot be
        sent."""
        try:
            lock = NamedLock.take(self._home.run / "alarms.lock", "alarms")
        except LockTaken:
            return {"sent": False, "level": None, "problems": [], "skipped": "another look is going on"}
        try:
            found, running = self._see()
            document = self._send(found)
        finally:
            lock.release()
        if running:
            # The heartbeat comes after the alarms: a platform that cannot send alarms must not look alive.
            send_heartbeat(self._settings)
        return document

    def _send(self, found: list[Problem]) -> Document:
        before = self._before()
        now = _sent_of(found, before)
        document = {
            "home": str(self._home.path),
            "level": now.level,
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "problems": [_of(each) | {"new": _is_new(each, before)} for each in found],
            "gone": [kind for kind in before.kinds if kind not in now.kinds],
        }
        sent = now != before and send_alarm(self._settings, document)
        if sent:
            # No failpoint: recorded after it was sent; a process that dies in between sends it twice.
            replace(self._file, encode(now))
        return document | {"sent": sent}

    def _before(self) -> Sent:
        try:
            return read_note(Sent, self._file)
        except (OSError, Unreadable):
            # Nothing was sent yet, or the record cannot be read: everything is sent again.
            return Sent()


def has_receiver(settings: Settings) -> bool:
    """Whether the settings say where alarms or heartbeats are sent."""
    ways = (settings.alarm_command, settings.alarm_webhook, settings.heartbeat_url)
    return any(way is not None for way in ways)


def _look_until_stopped(watched: Watch, every: float, *, somebody: bool) -> None:
    with stop_on_signal() as stop:
        if not somebody:
            # If the command ended, a service manager would start it again and again.
            say_err("No alarm is sent: OMNISUPPORT_ALARM_COMMAND and OMNISUPPORT_ALARM_WEBHOOK are not set.")
            stop.wait()
        while not stop.is_set():
            try:
                watched.look()
            except AlarmNotSent as failed:
                say_err(f"{failed.problem} Fix: {failed.fix}")
            stop.wait(every)


def _sent_of(found: list[Problem], before: Sent) -> Sent:
    """Return what an alarm says now. What was sent before and cannot be looked at stays as it was."""
    hidden = [each for problem in found for each in problem.hides]
    kept = {kind for kind in before.kinds if any(_is_hidden(kind, each) for each in hidden)}
    kinds = {each.kind for each in found}
    broken = {each.kind for each in found if each.broken} | ((kept - kinds) & set(before.broken))
    level = _ALARM if broken else _WARNING if kinds else _WELL
    return Sent(tuple(sorted(kinds | kept)), level, tuple(sorted(broken)))


def _is_hidden(kind: str, by: str) -> bool:
    """Whether ``kind`` is one of those that ``by`` names (``Problem.hides``)."""
    return kind.startswith(by) if not by or by[-1] in " .:" else kind == by


def _is_new(problem: Problem, before: Sent) -> bool:
    return problem.kind not in before.kinds or (problem.broken and problem.kind not in before.broken)


def _of(problem: Problem) -> Document:
    level = _ALARM if problem.broken else _WARNING
    return {"kind": problem.kind, "problem": problem.says, "fix": problem.help, "level": level}


def _seen(home: Home, settings: Settings, *, expect_running: bool) -> tuple[list[Problem], bool]:
    """Return the problems that alarms report, and whether the platform runs."""
    from omnisupport_ingest.cli.status import status_document

    try:
        document = status_document()
    except IngestError as error:
        return [Problem("home", error.problem, error.fix, broken=True, hides=("",))], False
    except Exception as error:
        # An alarm that ends with an error is silence. The message may have values of rows.
        says = f"the state of the platform cannot be read ({type(error).__name__})"
        return [Problem("home", says, "omnisupport-ingest doctor", broken=True, hides=("",))], False
    platform = document["platform"]
    running = bool(platform["running"]) and not platform["daemon_hangs"]
    found = [each for each in problems(document) if not _has_other_alarms(each)]
    if not running:
        found += _of_slots(home, settings)
        if expect_running and not platform["running"]:
            fix = "omnisupport-ingest up, or the services that you run instead"
            found.append(Problem("platform", "the platform does not run", fix, broken=True))
    return found, running


def _has_other_alarms(problem: Problem) -> bool:
    return problem.kind.startswith((SLOT, LEFT_OUT)) or (
        problem.kind.startswith(CHECK) and problem.kind.endswith((_SENT_BY_SENSOR, _ALARMS_OF_ITS_OWN))
    )


def _of_slots(home: Home, settings: Settings) -> Iterator[Problem]:
    """Yield what the sensors of the captured sources would report if they ran."""
    from omnisupport_ingest.sources.postgres.capture.health import source_health
    from omnisupport_ingest.sources.postgres.preflight.source_check import contracted_tables
    from omnisupport_ingest.sources.postgres.slot.retention import Level

    settings = usable(settings).settings
    contracts = contracts_in_force(settings)
    for each in log_sources(settings, contracts):
        try:
            health = source_health(
                log_settings(settings, each), home, contracted_tables(contracts, each.name)
            )
        except IngestError as error:
            kind = f"{SLOT} {each.name}"
            yield Problem(f"{kind}: unknown", error.problem, error.fix, hides=(f"{kind}:",))
            continue
        for warning in health.problems:
            kind, broken = f"{SLOT} {each.name}: {warning.kind}", warning.level is Level.ALARM
            yield Problem(kind, warning.problem, warning.fix, broken=broken)


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
    if document["sent"]:
        click.echo("Sent, as it has changed.")
