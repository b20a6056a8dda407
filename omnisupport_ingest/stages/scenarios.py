"""Counting events by scenario of the decision table, and stopping where the table says stop."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from omnisupport_ingest.cdc.judging import DUPLICATE
from omnisupport_ingest.contracts.decision_table import DUPLICATE_POSITION, LATE, STOP, DecisionTable
from omnisupport_ingest.errors import IngestError


class Stopped(IngestError):
    """Events of a scenario for which the decision table says stop; nothing was committed."""


@dataclass(frozen=True)
class Tallies:
    """``verdicts``: events by window and verdict. ``scenarios``: by window, then scenario."""

    verdicts: Mapping[tuple[str, str], int] = field(default_factory=dict)
    scenarios: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


NONE = Tallies()
"""Of events that were all accepted and in time."""


def tally(judged: DataFrame) -> Tallies:
    """Count judged events; a late one counts as late besides what else it is, a copy as a copy alone."""
    verdicts: Counter[tuple[str, str]] = Counter()
    scenarios: dict[str, Counter[str]] = defaultdict(Counter)
    for row in (
        judged.groupBy("window", "verdict", "reason", "late").agg(F.count("*").alias("events")).collect()
    ):
        window, verdict, events = row["window"], row["verdict"], row["events"]
        verdicts[window, verdict] += events
        if verdict == DUPLICATE:
            scenarios[window][DUPLICATE_POSITION] += events
            continue
        if row["late"]:
            scenarios[window][LATE] += events
        if row["reason"] is not None and row["reason"] != LATE:
            scenarios[window][row["reason"]] += events
    return Tallies(verdicts, scenarios)


def refuse_stopped(tallies: Tallies, decisions: DecisionTable, source: str) -> None:
    """``Stopped`` if there are events of a scenario whose action is stop."""
    for window, found in sorted(tallies.scenarios.items()):
        for scenario, events in found.items():
            if decisions.action(scenario) == STOP:
                raise Stopped(
                    f"{events} events of {source} in window {window} are {scenario}, for which the decision "
                    f"table says stop ({decisions.path}). The window was not judged; nothing is lost.",
                    fix=f"Look at the source of these events; then write quarantine in the row of {scenario} "
                    "and run the window again.",
                )
