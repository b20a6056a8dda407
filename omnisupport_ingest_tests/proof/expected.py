"""What every layer must hold, from the oracle: the batches as they landed, and the judging_rules in force."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from typing import Any

from omnisupport_ingest_tests.cdc.lanes import scope_text
from omnisupport_ingest_tests.oracle.judging import (
    DUPLICATE,
    JudgingRules,
    Verdict,
    judge,
)
from omnisupport_ingest_tests.oracle.model import Event, Image, Key, Position, Row, TableShape
from omnisupport_ingest_tests.oracle.oracle import AT_ONE_POSITION, current_state
from omnisupport_ingest_tests.proof.landed import Copy
from omnisupport_ingest_tests.proof.privacy import Hidden, Sought
from omnisupport_ingest_tests.proof.subjects import Left
from omnisupport_ingest_tests.proof.tables import ContractShape, Held, held, marked_at
from omnisupport_ingest_tests.proof.versions import Version, versions

Values = tuple[tuple[str, Held], ...]


@dataclass(frozen=True)
class Latest:
    """What a row repeats of the key's events. ``op``, ``source_ts``: of the last one, which stands at ``at``.
    ``updated_at``: commit time of the latest one that leaves the key alive."""

    at: Position
    op: str
    source_ts: datetime
    updated_at: datetime | None

    @classmethod
    def of(cls, events: Iterable[Event]) -> Latest:
        # Quarantined events may share a position; then operation and content decide, as they do in the fold.
        ordered = sorted(
            events, key=lambda event: (event.at, AT_ONE_POSITION.index(event.op), event.source_ts)
        )
        living = [event.source_ts for event in ordered if event.op in "cru"]
        last = ordered[-1]
        return cls(last.at, last.op, last.source_ts, living[-1] if living else None)


@dataclass(frozen=True)
class KeyInWindow:
    """What a window says of one key: the state that its own events leave.

    ``life_start``: the last ``c`` or ``r``. ``alive``: the last event that leaves the key alive;
    ``vouched``: the last accepted one. ``deletes``: the last below ``alive`` and all above it. ``doubt``: the
    last quarantined delete. ``values`` are null where nobody may rely on them.
    """

    latest: Latest
    first: Position
    alive: Position | None
    vouched: Position | None
    life_start: Position | None
    deletes: tuple[Position, ...]
    doubt: Position | None
    values: Values | None


@dataclass(frozen=True)
class Current:
    """A row of the dimension. ``values`` are null where nobody may rely on them."""

    latest: Latest
    deleted: bool
    deleted_at: datetime | None
    doubtful: bool
    values: Values | None


class Expected:
    """What the layers must hold once everything of ``landed`` that may be taken is judged.

    ``shapes``: the tables as the lake has them. ``shown_since``: by table, when a row must have been deleted
    at the earliest to be shown; null: any row is. ``hidden``: what policies hide.
    """

    def __init__(
        self,
        landed: Left,
        judging_rules: JudgingRules,
        shapes: Sequence[TableShape],
        shown_since: Mapping[str, datetime | None],
        hidden: Hidden,
    ) -> None:
        self.shapes, self.hidden = shapes, hidden
        self.copies: Mapping[int, Copy] = landed.copies
        self.verdicts: Mapping[int, Verdict] = {
            each.delivery.number: each for each in judge(landed.deliveries, judging_rules)
        }
        self._landed, self._shown_since = landed, shown_since
        self._states: dict[str, dict[Key, Row]] = {}
        self._versions: dict[str, list[Version]] = {}

    @property
    def broken_rules(self) -> dict[str, Counter[str]]:
        """By window, how many rows break each rule, of events that are no copies, that nobody discarded, and
        that wait for no other row of their batch."""
        found: dict[str, Counter[str]] = defaultdict(Counter)
        for each in self.verdicts.values():
            counted = not each.of_copy and each.reason != "batch_rejected" and each.state != "discarded"
            table = each.delivery.event.table
            found[each.delivery.window].update(f"{table}/{name}" for name in each.rules if counted)
        return found

    def of(self, verdict: str) -> dict[int, Verdict]:
        return {number: each for number, each in self.verdicts.items() if each.verdict == verdict}

    def readable(self, row: Mapping[str, Any]) -> frozenset[str] | None:
        """The columns of a landed row that land as they are; null: all of them."""
        copy = self.copies.get(row["lsn"])
        return None if copy is None else copy.readable

    @cached_property
    def under_policies(self) -> dict[str, Sought]:
        """By table, the values that policies hide above raw."""
        deliveries = (each.delivery for each in self.verdicts.values())
        return self.hidden.values((each.event, each.unreadable) for each in deliveries)

    @property
    def of_erased_subjects(self) -> dict[str, Sought]:
        """By table, the values of which nobody has the key any more."""
        return self._landed.lost_values

    def of_defaults(self, shape: TableShape) -> int:
        """How many values of current rows no event has sent: the rows are older than their columns."""
        return sum(
            column in dict(shape.defaults) and not cell.decided_by.sends(column)
            for row in self.state(shape).values()
            for column, cell in row.cells.items()
        )

    def stored(self, verdict: Verdict) -> Event:
        """The event of a copy as deduped events and quarantine have it."""
        event, hidden = verdict.delivery.event, self.hidden
        if event.op in "tb" or not hidden.images_of(event.table):
            return verdict.left_of(event)
        shape = hidden.shapes.get(event.table)
        before, after = (left_of(image, shape) for image in (event.before, event.after))
        return verdict.left_of(replace(event, before=before, after=after))

    @cached_property
    def _told(self) -> list[tuple[str, Event]]:
        """What the fold is told, by window. Nothing can be said of the row of an event without a key."""
        return [
            (each.delivery.window, each.told)
            for each in self.verdicts.values()
            if each.verdict != DUPLICATE and (is_whole(each.told.key) or each.told.op in "tb")
        ]

    @cached_property
    def _accepted_places(self) -> set[tuple[Position, str | None]]:
        return {(event.at, event.identity) for _, event in self._told if not event.quarantined}

    def events(self, table: str) -> list[tuple[str, Event]]:
        """The events of a table that count, by window: a withheld one whose position is filled is none."""
        return [
            (window, event)
            for window, event in self._told
            if event.table == table
            and not (event.quarantined and (event.at, event.identity) in self._accepted_places)
        ]

    def of_lane(self, seed: int) -> Iterator[str]:
        """What the oracle makes of each event of one history, in log order, for people to read."""
        verdicts = (each for each in self.verdicts.values() if _is_of(each.delivery.event, seed))
        for each in sorted(verdicts, key=lambda each: (each.delivery.event.at, each.delivery.number)):
            event = each.delivery.event
            moved = f" from {event.moved_from}" if event.moved_from else ""
            unsent = f" unsent {sorted(event.unchanged)}" if event.unchanged else ""
            before = f" before {event.before}" if event.before else ""
            yield (
                f"{event.table} {tuple(event.at)} in {each.delivery.window}, copy {each.delivery.number}: "
                f"{event.op} {event.key}{moved} {event.after or ''}{unsent}{before}, "
                f"{each.verdict} {each.reason or ''}"
            )

    def net_changes(self, shape: TableShape) -> dict[tuple[str, Key], KeyInWindow]:
        """By window and key."""
        groups: dict[tuple[str, Key], list[Event]] = defaultdict(list)
        for window, event in self.events(shape.name):
            if event.key is not None:
                groups[window, event.key].append(replace(event, moved_from=None))
        return {place: _in_window(events, shape) for place, events in groups.items()}

    def keyless(self, shape: TableShape) -> set[tuple[str, str, Position, bool, str]]:
        """Truncates and boundaries: window, operation, position, whether it is in quarantine, its keys."""
        return {
            (window, event.op, event.at, event.quarantined, scope_text(event.scope) if event.scope else "")
            for window, event in self.events(shape.name)
            if event.key is None
        }

    def ended_lives(self, shape: TableShape) -> set[tuple[str, Key, Position]]:
        """Lives that key changes ended and that a column not sent may be taken from: window, key, end."""
        return {
            (window, event.moved_from, event.at.below())
            for window, event in self.events(shape.name)
            if event.moved_from is not None
            and event.op in "cr"
            and not event.quarantined
            and not all(map(event.sends, shape.columns))
        }

    def dimension(self, shape: TableShape) -> dict[Key, Current]:
        purged = self.purged(shape)
        return {key: row for key, row in self._rows(shape).items() if key not in purged}

    def purged(self, shape: TableShape) -> dict[Key, Position]:
        """The rows that are not shown any more, each with the position of its delete."""
        since = self._shown_since[shape.name]
        times = {event.at: event.source_ts for _, event in self.events(shape.name)}
        return {
            key: row.deleted_at
            for key, row in self.state(shape).items()
            if since is not None and row.deleted_at is not None and times[row.deleted_at] < since
        }

    def standing(self, shape: TableShape) -> dict[Key, tuple[bool, Values]]:
        """The rows that nothing ended: whether they may be gone all the same, and their known values."""
        rows = self.state(shape).items()
        return {
            key: (row.existence_unresolved, _sorted(row.values, shape)) for key, row in rows if not row.ended
        }

    def versions(self, shape: TableShape) -> list[Version]:
        """Every version of every row."""
        if shape.name not in self._versions:
            self._versions[shape.name] = list(versions((e for _, e in self.events(shape.name)), shape))
        return self._versions[shape.name]

    def left_open(self, shape: TableShape) -> dict[Key, frozenset[str]]:
        """The columns of current rows that stay unresolved though they are known.

        They were not sent by the key change that they came along, and a window of the old key, other
        than that of the change, holds events from both sides of it: it kept the later state only.
        """
        hidden = self._hidden_lives(shape)
        found = {}
        for key, row in self.state(shape).items():
            columns = {
                column
                for column, lives in row.along.items()
                if column in row.cells and not hidden.isdisjoint(lives)
            }
            if columns:
                found[key] = frozenset(columns)
        return found

    def came_along(self, shape: TableShape) -> int:
        """How many known columns came along a key change and were not sent since."""
        return sum(column in row.cells for row in self.state(shape).values() for column in row.along)

    def _hidden_lives(self, shape: TableShape) -> set[tuple[Key, Position]]:
        """The lives that key changes ended and that cannot be told from what came after, in some window."""
        windows: dict[tuple[Key, Position], set[str]] = defaultdict(set)
        for window, key, end in self.ended_lives(shape):
            windows[key, end].add(window)
        spans = defaultdict(list)
        for (window, key), told in self.net_changes(shape).items():
            spans[key].append((window, told.first, told.latest.at))
        return {
            (key, end)
            for (key, end), of_change in windows.items()
            for window, first, last in spans[key]
            if first < end <= last and of_change - {window}
        }

    def _rows(self, shape: TableShape) -> dict[Key, Current]:
        events = [event for _, event in self.events(shape.name)]
        doubted = _lanes_with_withheld(events)
        times = {event.at: event.source_ts for event in events}
        of_key: dict[Key, list[Event]] = defaultdict(list)
        for event in events:
            if event.key is not None:
                of_key[event.key].append(event)
        left_open = self.left_open(shape)
        found = {}
        for key, row in self.state(shape).items():
            values = {n: text for n, text in row.values.items() if n not in left_open.get(key, ())}
            found[key] = _current(
                row, values, Latest.of(of_key[key]), times, in_doubt=bool({key[0], "*"} & doubted)
            )
        return found

    def state(self, shape: TableShape) -> dict[Key, Row]:
        """The current state of every key, ended ones included."""
        if shape.name not in self._states:
            self._states[shape.name] = current_state((event for _, event in self.events(shape.name)), shape)
        return self._states[shape.name]


def left_of(image: Image | None, shape: ContractShape | None) -> Image | None:
    """What policies leave of a row image: the columns of the lake, with what is left of their values.

    Nothing of what no contract describes.
    """
    if image is None or shape is None:
        return None
    policies = dict(shape.policies)
    return {
        name: text if text is None or name not in policies else policies[name].left_of(text, shape.secrets)
        for name, text in image.items()
        if name in shape.columns
    }


def is_whole(key: Key | None) -> bool:
    """Whether a key is that of a row: there, and without a NULL."""
    return key is not None and None not in key


def _is_of(event: Event, seed: int) -> bool:
    lane = _lane_of(event)
    return event.op in "tb" if lane is None else lane == str(seed)


def _lane_of(event: Event) -> str | None:
    """The history that an event is of; ``None`` if it is about all of them, or about no row."""
    if event.scope is not None:
        return event.scope[0][0]
    return None if event.key is None else event.key[0]


def _in_window(events: list[Event], shape: TableShape) -> KeyInWindow:
    living = [event for event in events if event.op in "cru"]
    alive = max((event.at for event in living), default=None)
    deletes = sorted(event.at for event in events if event.op == "d" and not event.quarantined)
    below = [at for at in deletes if alive is not None and at < alive]
    above = [at for at in deletes if alive is None or at > alive]
    doubts = [event.at for event in events if event.op == "d" and event.quarantined]
    (row,) = current_state(events, shape).values()
    withheld = any(event.quarantined for event in events)
    return KeyInWindow(
        latest=Latest.of(events),
        first=min(event.at for event in events),
        alive=alive,
        vouched=max((event.at for event in living if not event.quarantined), default=None),
        life_start=max((event.at for event in living if event.op in "cr"), default=None),
        deletes=(*below[-1:], *above),
        doubt=max(doubts, default=None),
        values=None if doubts or (row.ended and withheld) else _sorted(row.values, shape),
    )


def _current(
    row: Row, values: Image, latest: Latest, times: Mapping[Position, datetime], *, in_doubt: bool
) -> Current:
    mark = values.get(row.shape.soft_delete_column or "")
    deleted_at = None
    if row.deleted_at is not None:
        deleted_at = times[row.deleted_at]
    elif mark is not None:
        deleted_at = marked_at(row.shape, mark) or latest.updated_at
    deleted = row.ended or mark is not None
    known = not row.existence_unresolved and not (deleted and in_doubt)
    return Current(
        latest=latest,
        deleted=deleted,
        deleted_at=deleted_at,
        doubtful=row.existence_unresolved,
        values=_sorted(values, row.shape) if known else None,
    )


def _lanes_with_withheld(events: Iterable[Event]) -> set[str]:
    return {_lane_of(event) or "*" for event in events if event.quarantined}


def _sorted(values: Image, shape: TableShape) -> Values:
    return tuple(sorted((name, held(shape, name, text)) for name, text in values.items()))
