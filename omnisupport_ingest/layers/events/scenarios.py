"""Counting events by scenario of the decision table, and stopping where the table says stop."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from omnisupport_ingest.cdc.judging import ACCEPTED, DUPLICATE, LATE_FOUND, QUARANTINED
from omnisupport_ingest.contracts.decision_table import STOP, DecisionTable, DetectedScenario
from omnisupport_ingest.errors import IngestError


class Stopped(IngestError):
    """The decision table says stop for what events of a window show. The window was not judged; nothing is
    lost.

    Fix: Look at the source of these events, write ``quarantine`` in that row, and run the window again.
    """


class Group(NamedTuple):
    """The facts that events counted together have in common."""

    window: str
    verdict: str
    reason: str | None
    detector: str | None
    late: bool


@dataclass(frozen=True)
class Tallies:
    """Counts of refused or late events: by window and verdict; and by window what was ``found``."""

    verdicts: Mapping[tuple[str, str], int] = field(default_factory=dict)
    found: Mapping[str, Mapping[DetectedScenario, int]] = field(default_factory=dict)

    @property
    def withheld(self) -> bool:
        """Whether any event goes to quarantine."""
        return any(verdict == QUARANTINED for _, verdict in self.verdicts)


def groups_in(judged: pa.RecordBatch) -> Counter[Group]:
    """Count the judged events that were refused or late by group."""
    plain = pc.and_not(pc.equal(judged.column("verdict"), ACCEPTED), judged.column("late"))
    odd = pa.Table.from_batches([judged.select(list(Group._fields))]).filter(pc.invert(plain))
    groups = odd.group_by(list(Group._fields), use_threads=False).aggregate([([], "count_all")])
    columns = [groups[name].to_pylist() for name in (*Group._fields, "count_all")]
    return Counter({Group(*row): events for *row, events in zip(*columns, strict=True)})


def tally(groups: Mapping[Group, int]) -> Tallies:
    """Count events by scenario. ``groups``: at least the refused and late events; others have no scenario.

    A late event counts as late besides its other scenario; a copy counts only as a copy.
    """
    verdicts: Counter[tuple[str, str]] = Counter()
    found: dict[str, Counter[DetectedScenario]] = defaultdict(Counter)
    for group, events in groups.items():
        verdicts[group.window, group.verdict] += events
        if group.late and group.verdict != DUPLICATE:
            found[group.window][LATE_FOUND] += events
        if group.reason is not None and group.detector is not None:
            reason = DetectedScenario(group.reason, group.detector)
            if reason != LATE_FOUND:
                found[group.window][reason] += events
    return Tallies(verdicts, found)


def refuse_stopped(tallies: Tallies, decisions: DecisionTable, source: str) -> None:
    """Raise ``Stopped`` if there are events of a scenario whose action is stop."""
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
