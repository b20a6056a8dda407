"""How often each thing happened that a run of the proof is about; what never did, it says nothing of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from omnisupport_ingest_tests.oracle.judging import ACCEPTED, DUPLICATE, QUARANTINED
from omnisupport_ingest_tests.oracle.model import Event, Key, Position
from omnisupport_ingest_tests.proof.altered import CHANGES
from omnisupport_ingest_tests.proof.expected import Expected
from omnisupport_ingest_tests.proof.tables import SHAPES, TWO_DIMENSIONS

IN_HISTORIES = (
    "duplicates",
    "late events",
    "too late events",
    "landed after a later one",
    "misplaced in a file",
    "collisions",
    "broken row rules",
    "events of rejected batches",
    "rows that break a rule and pass",
    "unreadable images",
    "times out of range",
    "key changes",
    "columns that came along",
    "truncates",
    "boundaries",
    "boundaries of ranges",
    "revived rows",
    "keys that are NULL in part",
    "columns that are not there",
    "changes of hot rows",
    "exact texts",
    "events of a second epoch",
    "events of a third epoch",
    "events of an older epoch",
)

LEFT_OPEN = "columns left open"
"""Of those that came along a key change, how many stay unresolved because commit times ran against log
order across a window's edge: the one thing that the pipeline does not know and the oracle does."""

_MOST_LEFT_OPEN = 0.2
"""Their share at the most, over a run of many histories."""

IN_SCHEDULES = (
    "idle batches",
    "deliveries held back by a gap",
    "gaps filled again",
    "frames in several partitions",
    "rows of several Arrow batches",
    "replays",
    "overlapping replays",
    "two writers",
    "runs stopped between layers",
    "releases",
    "discards",
    "contract changes",
    "rules loosened",
    "events back by a looser rule",
    "columns new to a contract",
    "columns gone from a contract",
    "columns of another type",
    "tables that wait for a person",
    "rows erased",
    "former keys erased",
    "erasures refused",
    "events of rows that were erased before",
    "subjects erased",
    "images of erased subjects",
    "erasures of subjects completed",
    "values of erased subjects",
    "events of subjects that were erased before",
    "groups folded by whole columns",
    "policy changes",
    "other keys of hashes",
    "columns that contracts learned",
    "values of a default",
    "values under a policy",
    "copies that landed encrypted",
    "decision table changes",
    "windows closed",
    "windows folded",
    "events into closed windows",
    "events into folded windows",
    "replays of closed windows",
    "replays of folded windows",
    "rows purged",
    "events below a purged delete",
    "history rebuilds",
    "versions compared",
    "rebuilds from landing",
    "told otherwise",
    "delivered otherwise with equal hashes",
)

IN_WAYS = (
    "events by log",
    "events by files",
    "events by manifests",
    "events by topics",
    "events by cursor",
    "events by deliveries",
    "events by capture",
)

IN_ALTERS = (
    *CHANGES,
    "rows that wait for their contract",
    "rows back by a contract that followed",
    "contracts proposed",
    "contracts written anew",
    "tables read again",
)

GROUPS: Mapping[str, tuple[str, ...]] = {
    "In the histories": IN_HISTORIES,
    "In the schedules": IN_SCHEDULES,
    "By the ways": IN_WAYS,
    "In tables that ALTERs change": IN_ALTERS,
}


@dataclass
class Tally:
    """What a run of homes has seen. ``things``: how often, by the names above. A home counts what it has
    seen as it goes on, so that of one that fails it is known too."""

    histories: int = 0
    homes: int = 0
    copies: int = 0
    comparisons: int = 0
    things: Counter[str] = field(default_factory=Counter)

    def did(self, thing: str, times: int = 1) -> None:
        assert thing == LEFT_OPEN or any(thing in names for names in GROUPS.values()), thing
        self.things[thing] += times

    def add(self, other: Tally) -> None:
        self.histories += other.histories
        self.homes += other.homes
        self.copies += other.copies
        self.comparisons += other.comparisons
        self.things += other.things

    @property
    def too_many_left_open(self) -> bool:
        """Whether more columns stay unresolved than a rare coincidence of times explains."""
        came, left = self.things["columns that came along"], self.things[LEFT_OPEN]
        return left > max(came * _MOST_LEFT_OPEN, 8)

    @property
    def groups(self) -> dict[str, tuple[str, ...]]:
        """The groups of which anything was seen: the others the run was not about."""
        return {title: names for title, names in GROUPS.items() if any(self.things[name] for name in names)}

    @property
    def never(self) -> list[str]:
        """What did not happen, of these groups."""
        return [name for names in self.groups.values() for name in names if not self.things[name]]


def in_histories(expected: Expected) -> Counter[str]:
    """What the histories of a home hold, from the oracle's verdicts on all that has landed."""
    found: Counter[str] = Counter()
    reasons = {
        "too_late_arrival": "too late events",
        "out_of_order_event": "misplaced in a file",
        "collision": "collisions",
        "row_rule": "broken row rules",
        "batch_rejected": "events of rejected batches",
        "malformed_image": "unreadable images",
        "out_of_range": "times out of range",
        "older_epoch": "events of an older epoch",
    }
    reached: dict[int, Position] = {}
    for _, each in sorted(expected.verdicts.items()):
        event = each.delivery.event
        found["duplicates"] += each.verdict == DUPLICATE or each.reason == "duplicate_position"
        found["late events"] += each.late
        found["landed after a later one"] += event.at < reached.get(event.at.epoch, event.at)
        found["events of a second epoch"] += event.at.epoch > 1
        found["events of a third epoch"] += event.at.epoch > 2
        found["keys that are NULL in part"] += event.key is not None and None in event.key
        found["columns that are not there"] += event.op in "cur" and _lacks_columns(event)
        found["changes of hot rows"] += event.key is not None and event.key[1:] == ("61",)
        found["exact texts"] += bool({"NaN", "infinity", TWO_DIMENSIONS} & {*(event.after or {}).values()})
        reached[event.at.epoch] = max(event.at, reached.get(event.at.epoch, event.at))
        if each.verdict == QUARANTINED and each.reason in reasons:
            found[reasons[str(each.reason)]] += 1
        found["rows that break a rule and pass"] += each.verdict == ACCEPTED and bool(each.rules)
    accepted = [each.told for each in expected.of(ACCEPTED).values()]
    found["columns that came along"] = sum(expected.came_along(shape) for shape in expected.shapes)
    left_open = (names for shape in expected.shapes for names in expected.left_open(shape).values())
    found[LEFT_OPEN] = sum(map(len, left_open))
    found["key changes"] = sum(event.moved_from is not None for event in accepted)
    found["truncates"] = sum(event.op == "t" for event in accepted)
    found["boundaries"] = sum(event.op == "b" and event.scope is None for event in accepted)
    found["boundaries of ranges"] = sum(event.scope is not None for event in accepted)
    found["revived rows"] = sum(1 for _ in _revived(accepted))
    return found


def _lacks_columns(event: Event) -> bool:
    """Whether a column of the contract was neither sent nor named as unsent."""
    columns = next((set(shape.columns) for shape in SHAPES if shape.name == event.table), set())
    return event.after is not None and not columns <= event.after.keys() | event.unchanged


def _revived(accepted: list[Event]) -> Iterator[Event]:
    """Updates of rows that were deleted just before."""
    rows: dict[tuple[str, Key], list[Event]] = {}
    for event in accepted:
        if event.key is not None:
            rows.setdefault((event.table, event.key), []).append(event)
    for own in rows.values():
        own.sort(key=lambda event: event.at)
        yield from (after for before, after in pairwise(own) if (before.op, after.op) == ("d", "u"))
