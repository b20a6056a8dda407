"""The part of ``status`` that judges: windows and quarantine of a source, and whether all is well."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from omnisupport_ingest.cli import render
from omnisupport_ingest.cli.status_promised import promises_broken
from omnisupport_ingest.cli.status_targets import target_problems
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.storage import has_landed
from omnisupport_ingest.windows import OUT_OF_RANGE

if TYPE_CHECKING:
    from omnisupport_ingest.layers.workspace import Workspace

HEALTHY, WARNING, BROKEN = "healthy", "warning", "broken"

SCARCE_BYTES = 2 * 1024**3
SOON_DAYS = 7
"""Less free space on the disk of the home, or space for fewer days, is too little."""

_IN_DANGER = frozenset({"unreserved", "lost"})
"""States of a slot whose WAL the server may remove or has removed."""


def facts_document(workspace: Workspace, source: str) -> dict[str, Any]:
    """Return windows by state (None if they cannot be read), and events in quarantine by reason.

    ``quarantine_problem``: why the events in quarantine cannot be counted; None if they can.
    ``former_policies``: how many columns have values in sealed windows by another policy than their own.
    ``left_out``: tables that capture does not follow, each with the reason and the fix.
    """
    from deltalake.exceptions import DeltaError

    from omnisupport_ingest.read.former_policies import former_policies
    from omnisupport_ingest.review.quarantine_stock import discarded_of, stock_of

    try:
        windows = _windows(workspace, source)
        marks = workspace.input_watermarks(source) if len(workspace.inputs(source)) > 1 else {}
    except (IngestError, DeltaError):
        # Landing reports this itself, and the overview of the source a damaged table.
        windows, marks = None, {}
    stock: Counter[str] = Counter()
    discarded, former, lost = 0, 0, None
    try:
        stock = stock_of(workspace, source)
    except DeltaError:
        # The overview names the damaged table.
        pass
    except IngestError as error:
        lost = {"problem": error.problem, "fix": error.fix}
    with suppress(IngestError, DeltaError):
        # A damaged ledger is a finding of `doctor`; here no event counts as discarded then.
        discarded = discarded_of(workspace, source)
        former = len({(each.table, each.column) for each in former_policies(workspace, source)})
    inputs = {name: render.iso(mark) for name, mark in marks.items()}
    return {
        "windows": windows,
        "inputs": inputs,
        "quarantine": dict(stock.most_common()),
        "discarded": discarded,
        "quarantine_problem": lost,
        "former_policies": former,
        "left_out": _left_out(workspace, source),
    }


def _left_out(workspace: Workspace, source: str) -> list[dict[str, str]]:
    from omnisupport_ingest.sources.postgres.capture.parked import ParkedTables, unpark_fix

    names = {each.name for each in workspace.contracts.of_source(source)}
    store = workspace.landing(source)
    try:
        epoch = store.current_epoch()
        parked = {} if epoch is None else ParkedTables(store.folder, epoch.number).all()
    except IngestError:
        # Landing reports this itself.
        return []
    return [
        {"table": name, "reason": each.reason, "fix": unpark_fix(name)}
        for name, each in sorted(parked.items())
        if name in names
    ]


def _windows(workspace: Workspace, source: str) -> dict[str, int]:
    from omnisupport_ingest.layers.lateness import Lateness

    counts = {"open": 0, "closed": 0, OUT_OF_RANGE: 0}
    if not has_landed(workspace.home.path, source):
        return counts
    store = workspace.landing(source)
    watermark, lateness = workspace.closing_watermark(source), Lateness.of(workspace, source)
    for window in store.windows():
        closed = lateness.closed(window, watermark)
        counts[window if window == OUT_OF_RANGE else "closed" if closed else "open"] += 1
    return counts


def unread_slots(workspace: Workspace, logs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the slots of the home that no capture will read, as no table of their source has a contract.

    ``logs``: what is shown of each log. Each slot comes with its ``source``, and whether it is ``there``:
    None if the server does not say.
    """
    from omnisupport_ingest.sources.postgres.slot.home_slot import may_have_slot

    return [
        {"source": log["name"], "slot": log["slot"]["name"], "there": log["slot"]["there"]}
        for log in logs
        if log["slot"]["there"] is not False
        and not log["slot"]["read"]
        and not workspace.contracts.of_source(log["name"])
        and may_have_slot(workspace.home.landing, log["name"])
    ]


def source_facts(source: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield labels and texts for ``facts_document``."""
    windows = source["windows"]
    if windows and any(windows.values()):
        yield "windows", ", ".join(f"{count:,} {name}" for name, count in windows.items() if count)
    if source["inputs"]:
        # Without a watermark, all windows of a source stay open.
        lowest = min(source["inputs"], key=lambda name: source["inputs"][name] or "")
        yield "", f"closed at the lowest watermark of {', '.join(source['inputs'])}: {lowest}"
    quarantined = source["quarantine"]
    if quarantined:
        counts = ", ".join(f"{count:,} {reason}" for reason, count in quarantined.items())
        yield "quarantine", f"{counts} (omnisupport-ingest quarantine list)"
    if former := source.get("former_policies", 0):
        of = f"{render.counted(former, 'column')} of sealed windows"
        yield "policies", f"{of} by former ones (omnisupport-ingest pii show)"


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem. ``kind`` stays the same while it is the same problem, even if its numbers change.

    ``says``: what is wrong. ``help``: the command that helps, or what to do. ``broken``: data is held back.
    ``hides``: kinds of other problems of which nothing is known because of this one; one that ends with a
    blank, a dot or a colon, or is empty, is the beginning of such kinds.
    """

    kind: str
    says: str
    help: str
    broken: bool = False
    hides: tuple[str, ...] = ()


SLOT, CHECK, SCHEMA, LEFT_OUT, DAEMON = "slot", "check", "schema", "left out", "daemon"
"""First words of kinds: a threat to a slot, a failed check, a schema change, and a table that capture does
not follow."""

_CHECKS_NAMED = "omnisupport-ingest status"


def health(document: dict[str, Any]) -> dict[str, Any]:
    """Return the worst level in the document of ``status``, and the reasons for it."""
    found = list(problems(document))
    level = BROKEN if any(each.broken for each in found) else WARNING if found else HEALTHY
    return {"level": level, "reasons": list(_reasons(found))}


def _reasons(found: list[Problem]) -> Iterator[str]:
    """Yield the text of each problem, the broken ones first; problems that ``status`` lists itself are only
    counted."""
    checks = [each for each in found if each.kind.startswith(CHECK)]
    changes = [each for each in found if each.kind.startswith(SCHEMA)]
    for each in sorted(found, key=lambda each: not each.broken):
        if each not in (*checks, *changes):
            yield each.says
        elif each in checks[:1]:
            yield f"{render.counted(len(checks), 'check')} failed"
        elif each in changes[:1]:
            yield f"{render.counted(len(changes), 'schema change')} to be looked after"


def health_line(health: dict[str, Any]) -> str:
    """Return the verdict as a text: a word, and its reasons."""
    level = str(health["level"])
    word = level if level == HEALTHY else level.upper()
    return word if not health["reasons"] else f"{word}: {'; '.join(health['reasons'])}"


def logs_in(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what the document of ``status`` shows of each log; the home's own one, ``source``, may be
    None."""
    return [each for each in (document["source"], *document["other_logs"]) if each is not None]


def problems(document: dict[str, Any]) -> Iterator[Problem]:
    """Yield everything that the document of ``status`` shows to be wrong."""
    yield from _of_landing(document)
    yield from _of_sources(document)
    yield from _of_platform(document["platform"])
    yield from _of_disk(document["disk"])
    if (wrong := document["documents_refused"]) is not None:
        says = f"{wrong['problem'].rstrip('.')}; until it is corrected, no edit is in use"
        yield Problem("documents refused", says, wrong["fix"])
    for each in document["contracts_gone"]:
        yield Problem(f"contract {each['source']}.{each['table']}", each["what"], each["fix"])
    for each in document["unread_slots"]:
        name, slot = each["source"], each["slot"]
        hides: tuple[str, ...] = ()
        kind, says = f"unread slot {name}", f"the server keeps its WAL for slot {slot}"
        if each["there"] is None:
            kind, says = f"away {name}", f"its server does not say whether it keeps WAL for slot {slot}"
            hides = (f"unread slot {name}",)
        says = f"no table of {name} has a contract, and {says}"
        yield Problem(kind, says, f"omnisupport-ingest sources retire {name}", hides=hides)
    for change in document["schema_changes"]:
        # Each change has a kind of its own, so that the second change of a table is an alarm too.
        table, number = f"{change['source']}.{change['table']}", change.get("number", "")
        yield Problem(f"{SCHEMA} {table} {number}", f"{table}: {change['what']}", change["edit"])
    for kind, says, helps in promises_broken(document):
        yield Problem(kind, says, f"omnisupport-ingest {helps}")
    for each in document["sources"]:
        for kind, says, fix in target_problems(each.get("targets", [])):
            yield Problem(kind, says, fix)
        if (lost := each.get("quarantine_problem")) is not None:
            kind, hidden = f"quarantine files {each['source']}", f"quarantine {each['source']}"
            yield Problem(kind, lost["problem"], lost["fix"], broken=True, hides=(hidden,))
        # Nobody has to look at discarded events, and they stay without end.
        if (events := sum(each["quarantine"].values()) - each["discarded"]) > 0:
            says = f"{render.counted(events, 'event')} of {each['source']} in quarantine"
            yield Problem(f"quarantine {each['source']}", says, "omnisupport-ingest quarantine list")


def _of_landing(document: dict[str, Any]) -> Iterator[Problem]:
    for log in logs_in(document):
        name = log["name"]
        if log["capture"] == "FAILED":
            says = f"capture of {name} has failed"
            yield Problem(f"capture {name}", says, f"omnisupport-ingest source status {name}", broken=True)
    hides: tuple[str, ...]
    for each in document["sources"]:
        for table in each.get("tables", ()):
            if (problem := table.get("problem")) is not None:
                of = each["source"], table["table"]
                hides = (f"quarantine {of[0]}", f"level {of[0]}.", f"target {of[1]}", f"target late {of[1]}")
                says, fix = problem["problem"], problem["fix"]
                yield Problem(f"table {table['table']}", says, fix, broken=True, hides=hides)
        landing, name = each["landing"], each["source"]
        if landing["problem"]:
            says, hides = f"landing of {name} cannot be read", (f"gap {name}", f"level {name}.")
            yield Problem(f"landing {name}", says, landing["problem"]["fix"], broken=True, hides=hides)
        elif landing["gap"] and not landing["gap"]["repaired"]:
            says = f"a gap holds batches of {name} back"
            yield Problem(f"gap {name}", says, landing["gap"]["fix"], broken=True)


def _of_sources(document: dict[str, Any]) -> Iterator[Problem]:
    followed = {each["source"] for each in document["sources"] if each["landing"].get("stream_end")}
    for log in logs_in(document):
        name, helps = log["name"], f"omnisupport-ingest source status {log['name']}"
        if log["slot"].get("there") is False and name in followed:
            yield Problem(f"{SLOT} {name} gone", f"the slot of {name} is not on the server any more", helps)
        if log["slot"]["wal_status"] in _IN_DANGER:
            yield Problem(f"{SLOT} {name}", f"the slot of {name} is {log['slot']['wal_status']}", helps)
    for each in document["sources"]:
        for left in each["left_out"]:
            name = f"{each['source']}.{left['table']}"
            says = f"{name} is left out, the other tables go on: {left['reason']}"
            yield Problem(f"{LEFT_OUT} {name}", says, left["fix"])
    for each in document["readings"]:
        name, helps = each["source"], f"omnisupport-ingest source status {each['source']}"
        if each["problem"] is not None:
            yield Problem(f"away {name}", f"{name} cannot be looked at", helps, hides=(f"gone {name}",))
        if any(part["gone"] for part in each.get("partitions", ())):
            yield Problem(f"gone {name}", f"records of {name} were deleted before they were read", helps)
    for change in document["definition_changes"]:
        name = change["source"]
        says = f"files of {name} have changed, and its capture does not go by them yet"
        yield Problem(f"files {name}", says, change["fix"])


def _of_platform(platform: dict[str, Any]) -> Iterator[Problem]:
    if platform.get("daemon_hangs"):
        says = "Dagster's daemon gives no heartbeat, so nothing is taken into the lake"
        yield Problem(DAEMON, says, "stop `up` (or the service `daemon`) and start it again", broken=True)
    if unread := platform.get("records_unread"):
        says = f"Dagster's records of {' and '.join(f'{each}s' for each in unread)} cannot be read"
        hides = tuple(f"{each} " for each in unread)
        yield Problem("records", says, "omnisupport-ingest doctor", hides=hides)
    for check in platform["checks"]["failed"] if platform["checks"] else ():
        name = f"{check['asset']}:{check['check']}"
        yield Problem(f"{CHECK} {name}", f"{name}: {check['said'] or 'no message'}", _CHECKS_NAMED)
    for run in platform["failed_runs"] or ():
        says = f"the last run of {run['job']} failed"
        yield Problem(f"run {run['job']}", says, "omnisupport-ingest logs --errors")
    for sensor in platform["sensors"] or ():
        if not sensor["running"] or sensor["tick"] == "FAILURE":
            says = f"sensor {sensor['name']} {'failed' if sensor['running'] else 'is stopped'}"
            yield Problem(f"sensor {sensor['name']}", says, "omnisupport-ingest status --all")


def _of_disk(disk: dict[str, Any]) -> Iterator[Problem]:
    # In the first week, the first reading of the tables would count as daily growth.
    days = disk["days"] if disk["settled"] else None
    if disk["free"] >= SCARCE_BYTES and (days is None or days >= SOON_DAYS):
        return
    ahead = "" if days is None else f", full in {days:,.0f} days"
    says = f"the disk of the home has {render.size(disk['free'])} left{ahead}"
    yield Problem("disk", says, "omnisupport-ingest sweep, or a larger disk")
