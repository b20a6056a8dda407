"""Checks of what contracts promise: rules, volumes, references, and columns that match the source.

Findings hold counts, and a few keys where the key is no personal data. Rules and volumes are read from
checkpoints, without Spark; references are checked in the dimensions, on Spark.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from omnisupport_ingest.checks.findings import CheckFinding
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.contracts.quality import ERROR, QUARANTINE, WARN, WITHHOLDING, Expected, Reference
from omnisupport_ingest.contracts.row_rules import policies_of
from omnisupport_ingest.lake.layout import WHOLE_TABLE
from omnisupport_ingest.lake.snapshot import TableSnapshot
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.read.schema_changes import BREAKING, asking, judged_changes, seen_at, waiting_keys
from omnisupport_ingest.windows import KEY_FORMAT, OUT_OF_RANGE
from omnisupport_ingest.wording import agreeing, counted

LEAST_WINDOWS = 8
"""Number of earlier windows that are needed to learn a range."""

_MIN_SPREAD = 0.05
"""A learned range allows at least this share of the median as one spread."""


@dataclass(frozen=True, slots=True)
class Range:
    """From ``low`` to ``high``, both inclusive; None for no bound."""

    low: float | None
    high: float | None

    def holds(self, number: float) -> bool:
        return (self.low is None or number >= self.low) and (self.high is None or number <= self.high)

    def __str__(self) -> str:
        if self.low is None:
            return f"at most {self.high:g}"
        return f"at least {self.low:g}" if self.high is None else f"{self.low:g} to {self.high:g}"


def range_of(expected: Expected, earlier: Sequence[float]) -> Range | None:
    """Return the range that ``expected`` gives, or that the ``earlier`` numbers teach; None if they are too
    few."""
    if not expected.learned:
        return Range(expected.at_least, expected.at_most)
    numbers = earlier[-expected.windows :]
    if len(numbers) < LEAST_WINDOWS:
        return None
    middle = median(numbers)
    distance = median([abs(number - middle) for number in numbers])
    width = expected.spread * max(distance, _MIN_SPREAD * middle, 1.0)
    return Range(max(0.0, round(middle - width, 3)), round(middle + width, 3))


def quiet_stretches(counts: Sequence[int]) -> tuple[list[int], int]:
    """Return the lengths of quiet stretches, and the length of the quiet stretch that ``counts`` end with.

    ``counts``: events by window. A quiet stretch is the windows without events between two windows with
    events; it has length 0 where the two are neighbours.
    """
    runs = [(busy, len(list(of))) for busy, of in groupby(counts, key=bool)]
    now = runs.pop()[1] if runs and not runs[-1][0] else 0
    if runs and not runs[0][0]:
        # Before its first event the table was unknown.
        runs = runs[1:]
    lengths: list[int] = []
    for busy, length in runs:
        lengths += [0] * (length - 1) if busy else [length]
    return lengths, now


WINDOWS = 24
"""Number of newest windows with events in which broken rules are counted."""

_SAMPLES = 3

_CHANGES_NAMED = 3
"""Number of schema changes that a summary names."""


def rules_kept(
    workspace: Workspace, source: str, names: Collection[str] | None = None
) -> dict[str, CheckFinding]:
    """Check that the events of the newest windows, without discarded ones, keep every rule of their contract.

    Returns a finding by contract name, for the tables in ``names`` (None: all). An error if a broken rule
    withholds rows, a warning if all broken rules let rows pass.
    """
    deduped = workspace.deduped(source).look()
    broken: Counter[str] = Counter()
    keys: dict[str, tuple[str, ...]] = {}
    windows = _of_time(deduped)[-WINDOWS:]
    for window in windows:
        state = deduped.state(window) if deduped is not None else None
        if state is not None and state.checkpoint.rules is not None:
            broken.update(state.checkpoint.rules.broken)
            keys |= state.checkpoint.rules.keys
    return {
        contract.name: _rules_of(contract, broken, keys, len(windows))
        for contract in _chosen(workspace, source, names)
    }


def _chosen(workspace: Workspace, source: str, names: Collection[str] | None) -> list[TableContract]:
    return [each for each in workspace.contracts.of_source(source) if names is None or each.name in names]


def _rules_of(
    contract: TableContract, broken: Counter[str], keys: dict[str, tuple[str, ...]], windows: int
) -> CheckFinding:
    policies = policies_of(contract)
    of_table = {
        name.partition("/")[2]: count
        for name, count in sorted(broken.items())
        if name.partition("/")[0] == contract.name
    }
    numbers: dict[str, int | float] = {
        "windows": windows,
        "rows_broken": sum(of_table.values()),
        **{f"broken_{rule}": count for rule, count in of_table.items()},
    }
    if not of_table:
        return CheckFinding(True, f"Every rule is kept in the newest {counted(windows, 'window')}.", numbers)
    withheld = any(policies.get(rule, QUARANTINE) in WITHHOLDING for rule in of_table)
    named = ", ".join(
        f"{rule} {count} ({policies.get(rule, QUARANTINE)})" for rule, count in of_table.items()
    )
    # Checkpoints from before the key became personal may still have some.
    shown = {} if contract.personal_key else keys
    samples = {rule: shown[name] for rule in of_table if (name := f"{contract.name}/{rule}") in shown}
    return CheckFinding(
        False,
        f"Rows of the newest {counted(windows, 'window')} break rules of their contract: {named}. "
        f"See what was withheld: omnisupport-ingest quarantine list --source {contract.source}",
        numbers,
        severity=ERROR if withheld else WARN,
        samples=samples,
    )


def volume_expected(
    workspace: Workspace, source: str, names: Collection[str] | None = None
) -> dict[str, CheckFinding]:
    """Check that the newest closed windows have as many events of the table as its contract expects.

    Judged are all windows that closed with the newest one, in the same run; each is held against the windows
    before it. Returns a finding by contract name, for the tables in ``names`` (None: all) with such an
    expectation. A window in which nothing landed has 0 events.
    """
    found = {}
    for contract in _chosen(workspace, source, names):
        expected = contract.quality.volume
        if expected is not None:
            closed = _closed(workspace, contract, expected.windows + WINDOWS)
            found[contract.name] = _volume(contract, expected, closed)
    return found


def _volume(contract: TableContract, expected: Expected, closed: Sequence[_Closed]) -> CheckFinding:
    if not closed:
        return CheckFinding(True, "No window is closed yet.")
    counts = [each.events for each in closed]
    newest = len(closed) - 1
    judged = range(max(_first_closed_with_newest(closed), newest + 1 - WINDOWS), newest + 1)
    ranges = {place: range_of(expected, counts[:place]) for place in judged}
    unusual = [
        place for place, between in ranges.items() if between is not None and not between.holds(counts[place])
    ]
    # The newest window of those that are out of range: what it shows may still go on.
    shown = unusual[-1] if unusual else newest
    between, events = ranges[shown], counts[shown]
    numbers: dict[str, int | float] = {"events": events, "windows_before": min(shown, expected.windows)}
    numbers["windows"] = len(judged)
    if between is None:
        learnt = counted(min(shown, expected.windows), "closed window")
        return CheckFinding(True, f"The expectation is still learning, from {learnt}.", numbers)
    numbers |= {
        name: bound for name, bound in (("low", between.low), ("high", between.high)) if bound is not None
    }
    numbers["windows_out_of_range"] = len(unusual)
    summary = f"Window {closed[shown].window} has {counted(events, 'event')}; expected are {between}."
    if len(unusual) > 1:
        others = counted(len(unusual) - 1, "other window")
        summary = f"{summary} Out of range too: {others} of the same run."
    if not unusual:
        return CheckFinding(True, summary, numbers)
    return CheckFinding(
        False,
        f"{summary} Look at the source (omnisupport-ingest status --source {contract.source}), or at the "
        "expectation.",
        numbers,
        severity=expected.severity,
    )


def _first_closed_with_newest(closed: Sequence[_Closed]) -> int:
    """Return the index of the first window that the run which closed the newest one closed too.

    No run closes a window in which nothing landed; it counts with the window after it, or with those before
    it if it is the newest.
    """
    run, first = None, len(closed)
    for place in range(len(closed) - 1, -1, -1):
        its = closed[place].run_id
        if its is not None and run is not None and its != run:
            break
        run, first = its or run, place
    return first


def not_quiet(
    workspace: Workspace, source: str, names: Collection[str] | None = None
) -> dict[str, CheckFinding]:
    """Check that the table has events as often as it used to, by its closed windows without events.

    Returns a finding by contract name, for the tables in ``names`` (None: all) with such an expectation.
    """
    found = {}
    for contract in _chosen(workspace, source, names):
        freshness = contract.quality.freshness
        if freshness is None or freshness.quiet is None:
            continue
        counts = [each.events for each in _closed(workspace, contract, freshness.quiet.windows + 1)]
        stretches, now = quiet_stretches(counts)
        between = range_of(freshness.quiet, stretches)
        numbers: dict[str, int | float] = {"windows_quiet": now, "windows": len(counts)}
        if between is None or between.high is None:
            found[contract.name] = CheckFinding(True, "The expectation is still learning.", numbers)
            continue
        numbers["high"] = between.high
        quiet = counted(now, "closed window")
        summary = f"Without an event since: {quiet}; usual are at most {between.high:g}."
        passed = now <= between.high
        found[contract.name] = CheckFinding(
            passed,
            summary
            if passed
            else f"{summary} Is the source silent, or its capture? See: omnisupport-ingest status "
            f"--source {source}",
            numbers,
            severity=freshness.severity,
        )
    return found


@dataclass(frozen=True, slots=True)
class _Closed:
    """A closed window and the table's events in it. ``run_id``: the run that closed it; None if nothing
    landed in it."""

    window: str
    events: int
    run_id: str | None


def _closed(workspace: Workspace, contract: TableContract, most: int) -> list[_Closed]:
    """Return the newest closed windows, at most ``most`` and in order.

    Windows in which nothing landed are included. The list ends before the first window that no run has
    closed.
    """
    net_changes, deduped = workspace.net_changes(contract).look(), workspace.deduped(contract.source).look()
    landing, known = workspace.landing(contract.source), _of_time(deduped)
    watermark = landing.landed().watermark
    if deduped is None or net_changes is None or not known or watermark is None:
        return []
    grid = workspace.grid
    last = grid.truncate(watermark - contract.allowed_lateness) - grid.size.length
    first = max(grid.start_of(known[0]), last - (most - 1) * grid.size.length)
    landed, closed = frozenset(landing.windows()), []
    while first <= last:
        window, first = first.strftime(KEY_FORMAT), first + grid.size.length
        state, of_table = deduped.state(window), net_changes.state(window)
        if window in landed and (state is None or not state.closed):
            break
        events = of_table.checkpoint.deduped if of_table is not None else 0
        done = state.checkpoint if state is not None else None
        closed.append(_Closed(window, events, (done.closed_by or done.run_id) if done is not None else None))
    return closed


def _of_time(snapshot: TableSnapshot | None) -> list[str]:
    return [] if snapshot is None else sorted(set(snapshot.windows()) - {OUT_OF_RANGE})


def references_kept(workspace: Workspace, spark: SparkSession, contract: TableContract) -> CheckFinding:
    """Check that every live row refers to live rows of the tables that its contract references.

    A broken reference withholds no rows: tables are updated one after another, so a row may appear shortly
    before the row that it refers to.
    """
    numbers: dict[str, int | float] = {}
    samples: dict[str, tuple[str, ...]] = {}
    problems = []
    severity = WARN
    hidden = any(column.personal for column in contract.columns if column.name in contract.key)
    for reference in contract.quality.references:
        orphans = _orphans(workspace, spark, contract, reference)
        if isinstance(orphans, str):
            problems.append(orphans)
            severity = ERROR if reference.severity == ERROR else severity
            continue
        found = orphans.groupBy().agg(F.count("*"), F.count_if("deleted")).collect()[0]
        numbers |= {f"orphans_{reference.name}": found[0], f"deleted_{reference.name}": found[1]}
        if not found[0]:
            continue
        severity = ERROR if reference.severity == ERROR else severity
        problems.append(
            f"{counted(found[0], 'row')} {agreeing(found[0], 'refers', 'refer')} to no live row of "
            f"{reference.table} by {', '.join(reference.columns)}, "
            f"{found[1]} of them to a deleted row"
        )
        if not hidden:
            first = orphans.orderBy("_cdc_key").limit(_SAMPLES).collect()
            samples[reference.name] = tuple(row["_cdc_key"] for row in first)
    if problems:
        named = "; ".join(problems)
        summary = (
            f"{named}. A row's events: omnisupport-ingest explain {contract.name} --source {contract.source} "
            "--key KEY"
        )
        return CheckFinding(False, summary, numbers, severity=severity, samples=samples)
    return CheckFinding(True, "Every reference leads to a live row.", numbers)


def _orphans(
    workspace: Workspace, spark: SparkSession, contract: TableContract, reference: Reference
) -> DataFrame | str:
    """Return rows whose ``reference`` leads to no row or to a ``deleted`` row; or why this cannot be
    checked."""
    other = next(
        (each for each in workspace.contracts.of_source(contract.source) if each.name == reference.table),
        None,
    )
    if other is None:
        return f"{reference.name} refers to {reference.table}, which has no contract"
    if len(other.key) != len(reference.columns):
        return f"{reference.name} and the key of {other.name} differ in their number of columns"
    here, there = workspace.dimension(contract).look(), workspace.dimension(other).look()
    if here is None or there is None:
        return f"{reference.name} waits for dim_{(contract if here is None else other).name}"
    rows = here.read(spark, here.files(WHOLE_TABLE)).where(~F.col("_cdc_is_deleted"))
    named = rows.select(
        "_cdc_key", *[_text(name).alias(f"ref_{n}") for n, name in enumerate(reference.columns)]
    )
    for n in range(len(reference.columns)):
        named = named.where(F.col(f"ref_{n}").isNotNull())
    keys = there.read(spark, there.files(WHOLE_TABLE)).select(
        *[_text(name).alias(f"key_{n}") for n, name in enumerate(other.key)],
        F.col("_cdc_is_deleted").alias("deleted"),
    )
    same = [F.col(f"ref_{n}") == F.col(f"key_{n}") for n in range(len(other.key))]
    joined = named.join(keys, same, "left")
    gone = F.col("key_0").isNull()
    return joined.where(gone | F.col("deleted")).select("_cdc_key", (~gone).alias("deleted"))


def _text(name: str) -> Column:
    # As texts, so that a bigint may refer to an integer.
    return F.col(f"`{name}`").cast("string")


def schemas_as_contracted(
    workspace: Workspace, source: str, names: Collection[str]
) -> dict[str, CheckFinding]:
    """Check that no schema change of a table at its source waits for an edit of its contract.

    Returns a finding by contract name, for the tables in ``names``, with names of columns and types only;
    `contracts changes` shows the rest. ``rows_affected``: about how many rows the table had when such a
    change was seen (of events and files: how many rows of its batch show it), the most of any; left out if
    that is not known.
    """
    changes = judged_changes(workspace, source)
    keys = {each.table: each for each in waiting_keys(workspace, source)}
    found = {}
    for contract in workspace.contracts.of_source(source):
        if contract.name not in names:
            continue
        open_ones = asking(changes, contract.name)
        numbers: dict[str, int | float] = {
            "schema_changes": sum(each.change.table == contract.name for each in changes),
            "to_be_looked_after": len(open_ones),
            "breaking": sum(each.compatibility == BREAKING for each in open_ones),
        }
        rows = [each.change.rows for each in open_ones if each.change.rows is not None]
        if rows or not open_ones:
            numbers["rows_affected"] = max(rows, default=0)
        key = keys.get(contract.name)
        if key is not None and (key.parked or not open_ones):
            found[contract.name] = CheckFinding(False, f"{key.what}. To do: {key.edit}", numbers)
            continue
        if not open_ones:
            found[contract.name] = CheckFinding(True, "The contract matches the source.", numbers)
            continue
        named = "; ".join(
            f"{each.what} ({seen_at(each.change)}, {each.compatibility}): {each.edit}"
            for each in open_ones[:_CHANGES_NAMED]
        )
        more = f"; and {len(open_ones) - _CHANGES_NAMED} more" if len(open_ones) > _CHANGES_NAMED else ""
        propose = f"omnisupport-ingest contracts propose {contract.source}.{contract.name}"
        found[contract.name] = CheckFinding(False, f"{named}{more}. See: {propose}", numbers)
    return found
