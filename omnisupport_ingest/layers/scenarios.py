"""Counting events by scenario of the decision table, and stopping where the table says stop."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from omnisupport_ingest.cdc.judging import DUPLICATE, LATE_FOUND
from omnisupport_ingest.contracts.decision_table import STOP, DecisionTable, Finding
from omnisupport_ingest.errors import IngestError


class Stopped(IngestError):
    """Events of a scenario for which the decision table says stop; nothing was committed."""


@dataclass(frozen=True)
class Tallies:
    """What was refused or late: by window and verdict, and by window what was ``found`` of the events."""

    verdicts: Mapping[tuple[str, str], int] = field(default_factory=dict)
    found: Mapping[str, Mapping[Finding, int]] = field(default_factory=dict)


NONE = Tallies()
"""Of events that were all accepted and in time."""


def tally(judged: DataFrame) -> Tallies:
    """Count judged events, those that were refused or late at least; of others there is nothing to find.

    A late one counts as late besides what else it is, a copy as a copy alone.
    """
    verdicts: Counter[tuple[str, str]] = Counter()
    found: dict[str, Counter[Finding]] = defaultdict(Counter)
    groups = judged.groupBy("window", "verdict", "reason", "detector", "late")
    for row in groups.agg(F.count("*").alias("events")).collect():
        window, verdict, events = row["window"], row["verdict"], row["events"]
        verdicts[window, verdict] += events
        reason = None if row["reason"] is None else Finding(row["reason"], row["detector"])
        if row["late"] and verdict != DUPLICATE:
            found[window][LATE_FOUND] += events
        if reason is not None and reason != LATE_FOUND:
            found[window][reason] += events
    return Tallies(verdicts, found)


def refuse_stopped(tallies: Tallies, decisions: DecisionTable, source: str) -> None:
    """``Stopped`` if there are events of a scenario whose action is stop."""
    for window, found in sorted(tallies.found.items()):
        for each, events in found.items():
            scenario = each.scenario
            if decisions.action(scenario) == STOP:
                raise Stopped(
                    f"{events} events of {source} in window {window} are {scenario} (found by "
                    f"{each.detector}), for which the decision table says stop ({decisions.path}). The "
                    "window was not judged; nothing is lost.",
                    fix=f"Look at the source of these events; then write quarantine in the row of {scenario} "
                    "and run the window again.",
                )
