"""Turn facts into figures: percentiles over time, and the numbers at the top of a report. Pure.

The latency of a change runs from its commit at the source to the moment at which its batch had landed, or at
which the dimension showed it. The first commit of the batch is taken as the commit, so latency is never
understated. Every event of a batch counts with the same latency.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from omnisupport_ingest.position import Position
from omnisupport_ingest.report.facts import Batch, SourceFacts, TableFacts
from omnisupport_ingest.report.svg import Series

PERCENTILES = (50, 95, 99)
BUCKETS = 48
"""Number of equal intervals into which a time axis is divided."""

_TABLES_SHOWN = 6
_TOGETHER = 4
"""Number of intervals: no line is drawn over a longer pause."""


@dataclass(frozen=True, slots=True)
class Latency:
    """The latency of a batch: each of its ``events`` took ``seconds``; measured at ``at``."""

    at: datetime
    seconds: float
    events: int


@dataclass(frozen=True, slots=True)
class RunCost:
    """What a run left in the tables' logs: its first and last commit, and what it wrote.

    The run took at least the time between the two commits.
    """

    run_id: str
    began: datetime
    ended: datetime
    commits: int
    written: int

    @property
    def seconds(self) -> float:
        return (self.ended - self.began).total_seconds()


def to_landing(facts: SourceFacts) -> list[Latency]:
    """Return the latency from commit to durable batch, of every part of the stream with events."""
    return [
        Latency(each.landed_at, (each.landed_at - each.first_commit).total_seconds(), each.events)
        for each in facts.batches
        if each.first_commit is not None and each.events
    ]


def to_dimension(facts: SourceFacts) -> list[Latency]:
    """Return the latency from commit to the first version of the dimension that shows the batch, by table
    and batch."""
    latencies = [
        Latency(at, (at - first_commit).total_seconds(), batch.tables[table])
        for batch, table, first_commit, at in _shown_batches(facts)
        if at is not None
    ]
    return sorted(latencies, key=lambda each: each.at)


def _shown_batches(facts: SourceFacts) -> Iterator[tuple[Batch, str, datetime, datetime | None]]:
    """Yield each batch of the stream with each of its tables that has a dimension: batch, table, first
    commit, and when the dimension first showed the batch (None: not yet).

    Left out are batches that an earlier commit may have shown than those that were read.
    """
    for table in facts.tables:
        if table.source_table is None:
            continue
        shown = _first_shown(table)
        for batch in facts.batches:
            if batch.first_commit is None or not batch.tables.get(table.source_table, 0):
                continue
            at, known = shown(batch)
            if known:
                yield batch, table.source_table, batch.first_commit, at


def _first_shown(table: TableFacts) -> Callable[[Batch], tuple[datetime | None, bool]]:
    """Return a function that returns when the dimension first showed a batch, and whether that is known.

    That is its first commit at or above the batch's highest position, made after the batch landed. It is
    known if a commit below that position was read too, or the table was made after the batch had landed and
    its first commit was read.
    """
    commits = [each for each in table.commits if each.position is not None]
    highest: list[Position] = []
    for each in commits:
        assert each.position is not None
        highest.append(max(highest[-1], each.position) if highest else each.position)

    def shown(batch: Batch) -> tuple[datetime | None, bool]:
        below = [each for name, each in batch.last.items() if name == table.source_table]
        start = bisect.bisect_left(highest, below[0]) if below else len(commits)
        at = next((each.at for each in commits[start:] if each.at >= batch.landed_at), None)
        # Version 0 of a table only makes it, so its commit is none of these.
        return at, start > 0 or not commits or commits[0].version <= 1

    return shown


def percentile(latencies: Iterable[Latency], rank: float) -> float | None:
    """Return the ``rank`` (0 to 100) percentile of the seconds, each event counted once; None without events.

    It is the least number that at least this share of the events do not exceed ("nearest rank").
    """
    ordered = sorted((each.seconds, each.events) for each in latencies)
    total = sum(events for _, events in ordered)
    if not total:
        return None
    below = 0
    for seconds, events in ordered:
        below += events
        if below * 100 >= rank * total:
            return seconds
    return ordered[-1][0]


def percentiles_over_time(latencies: Sequence[Latency]) -> list[Series]:
    """Return a series for each of ``PERCENTILES``, with a point for each interval that has latencies."""
    if not latencies:
        return []
    bucket, apart = bucketing([each.at for each in latencies])
    buckets: dict[float, list[Latency]] = defaultdict(list)
    for each in latencies:
        buckets[bucket(each.at)].append(each)
    return [
        Series(
            f"p{rank}",
            tuple((at, percentile(buckets[at], rank) or 0.0) for at in sorted(buckets)),
            apart,
        )
        for rank in PERCENTILES
    ]


def bucketing(moments: Sequence[datetime]) -> tuple[Callable[[datetime], float], float]:
    """Divide the time of ``moments`` into ``BUCKETS`` intervals.

    Return a function from a moment to the middle of its interval (seconds since 1970), and how far apart in
    seconds two points may be that a line joins.
    """
    low = min(moments).timestamp()
    length = (max(moments).timestamp() - low) / BUCKETS or 1.0

    def middle(moment: datetime) -> float:
        number = min(int((moment.timestamp() - low) / length), BUCKETS - 1)
        return low + (number + 0.5) * length

    return middle, _TOGETHER * length


def lag(facts: SourceFacts) -> list[Series]:
    """Return how far the watermark was behind the clock when each batch landed."""
    points = [
        (each.landed_at.timestamp(), max(0.0, (each.landed_at - each.watermark).total_seconds()))
        for each in facts.batches
        if each.watermark is not None
    ]
    return [Series("watermark behind the clock", tuple(points))]


def size_and_latency(facts: SourceFacts) -> list[Series]:
    """Return the events of each batch against the seconds from its first commit to landing, and until
    every dimension that it changes has shown it."""
    landed = [
        (float(each.events), (each.landed_at - each.first_commit).total_seconds())
        for each in facts.batches
        if each.first_commit is not None and each.events
    ]
    shown: dict[str, list[float | None]] = defaultdict(list)
    for batch, _, first_commit, at in _shown_batches(facts):
        shown[batch.batch_id].append(None if at is None else (at - first_commit).total_seconds())
    sizes = {each.batch_id: float(each.events) for each in facts.batches}
    in_dimensions = [
        (sizes[batch_id], max(each for each in seconds if each is not None))
        for batch_id, seconds in shown.items()
        if None not in seconds
    ]
    return [
        Series("commit to durable batch", tuple(sorted(landed))),
        Series("commit to dimension", tuple(sorted(in_dimensions))),
    ]


def events_by_table(facts: SourceFacts) -> list[Series]:
    """Return the landed events of each table over time; the smallest tables are added up.

    Rows of snapshots count only if nothing else has landed: they would dwarf every change.
    """
    batches = [each for each in facts.batches if each.events and each.kind != "snapshot"] or [
        each for each in facts.batches if each.events
    ]
    if not batches:
        return []
    bucket, apart = bucketing([each.landed_at for each in batches])
    counted: dict[str, dict[float, int]] = defaultdict(lambda: defaultdict(int))
    for each in batches:
        for table, events in each.tables.items():
            counted[table][bucket(each.landed_at)] += events
    ordered = sorted(counted, key=lambda table: -sum(counted[table].values()))
    shown = ordered if len(ordered) <= _TABLES_SHOWN else ordered[: _TABLES_SHOWN - 1]
    series = [Series(table, tuple(sorted(counted[table].items())), apart) for table in shown]
    if rest := ordered[len(shown) :]:
        together: dict[float, int] = defaultdict(int)
        for table in rest:
            for at, events in counted[table].items():
                together[at] += events
        series.append(Series(f"{len(rest)} more", tuple(sorted(together.items())), apart))
    return series


def faults_by_window(facts: SourceFacts) -> list[Series]:
    """Return the duplicates, late events and withheld events of each window; nothing if there are none at
    all."""
    named = {
        "duplicates": [each.duplicates for each in facts.windows],
        "late": [each.late for each in facts.windows],
        "withheld": [each.withheld for each in facts.windows],
    }
    starts = [each.starts.timestamp() for each in facts.windows]
    return [
        Series(name, tuple(zip(starts, map(float, counts), strict=True)))
        for name, counts in named.items()
        if any(counts)
    ]


def growth(facts: SourceFacts) -> list[Series]:
    """Return the bytes of the largest tables after each of their commits."""
    grown = [each for each in facts.tables if each.commits]
    grown.sort(key=lambda table: -table.commits[-1].size)
    return [
        Series(table.name, tuple((each.at.timestamp(), float(each.size)) for each in table.commits))
        for table in grown[:_TABLES_SHOWN]
    ]


def runs(facts: SourceFacts) -> list[RunCost]:
    """Return every run that the logs name, by its first commit."""
    by_id: dict[str, RunCost] = {}
    for table in facts.tables:
        for each in table.commits:
            if each.run_id is None:
                continue
            run = by_id.get(each.run_id, RunCost(each.run_id, each.at, each.at, 0, 0))
            by_id[each.run_id] = RunCost(
                each.run_id,
                min(run.began, each.at),
                max(run.ended, each.at),
                run.commits + 1,
                run.written + each.written,
            )
    return sorted(by_id.values(), key=lambda each: each.began)


def cost_of_runs(facts: SourceFacts) -> tuple[list[Series], list[Series]]:
    """Return for each run the seconds from its first commit to its last, and the bytes that it wrote."""
    all_runs = runs(facts)
    times = tuple((each.began.timestamp(), each.seconds) for each in all_runs)
    written = tuple((each.began.timestamp(), float(each.written)) for each in all_runs)
    return [Series("first to last commit", times)], [Series("bytes written", written)]
