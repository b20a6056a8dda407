"""What the history of a table must hold, from its definition: at each position, the fold up to there.

Slow on purpose: for every position the events at or below it are folded again by the oracle, and
nothing is carried over from one position to the next but which version stands open.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime

from omnisupport_ingest_tests.oracle.model import Event, Key, Position, Row, TableShape
from omnisupport_ingest_tests.oracle.oracle import current_state
from omnisupport_ingest_tests.proof.tables import ContractShape, Held, held

MOVED = "moved"

_OF_ONE_PLACE = "crud"
"""The order of quarantined events that share a position: what may end the row comes last."""


@dataclass(frozen=True)
class Version:
    """A row from the position where it begins to the one where it ends, null while it stands.

    ``doubtful``: the row may be gone. ``values``: the known ones, without the key's.
    """

    key: Key
    opened_at: Position
    closed_at: Position | None
    opened: datetime
    closed: datetime | None
    opened_by: str
    closed_by: str | None
    deleted: bool
    doubtful: bool
    values: tuple[tuple[str, Held], ...]


def versions(events: Iterable[Event], shape: TableShape) -> Iterator[Version]:
    """Every version of every row; ``events``: of one table, accepted or withheld, and voided by none.

    Rows move within their lane only, so each lane is walked alone, with what has no key and reaches it.
    """
    lanes: dict[str, list[Event]] = defaultdict(list)
    keyless: list[Event] = []
    for event in events:
        (keyless if event.key is None else lanes[event.key[0]]).append(event)
    for lane, told in lanes.items():
        reaching = [event for event in keyless if event.scope is None or event.scope[0][0] == lane]
        found = _of_lane(told + reaching, shape)
        changed_only = isinstance(shape, ContractShape) and shape.changed_only
        yield from _changes(found) if changed_only else found


def _changes(every: Iterable[Version]) -> Iterator[Version]:
    """Without versions that begin where the one before ends and are like it, by an update or a row read."""
    by_key: dict[Key, list[Version]] = defaultdict(list)
    for each in sorted(every, key=lambda each: each.opened_at):
        last = next(iter(by_key[each.key][-1:]), None)
        like = last is not None and (last.doubtful, last.values) == (each.doubtful, each.values)
        if last is not None and like and each.opened_by in "ur" and last.closed_at == each.opened_at:
            by_key[each.key][-1] = replace(
                last, closed_at=each.closed_at, closed=each.closed, closed_by=each.closed_by
            )
        else:
            by_key[each.key].append(each)
    for found in by_key.values():
        yield from found


def _of_lane(events: list[Event], shape: TableShape) -> Iterator[Version]:
    left = {(each.moved_from, each.at.below()) for each in events if each.moved_from and not each.quarantined}
    standing: dict[Key, Version] = {}
    for place in sorted({event.at for event in events}):
        rows = current_state([event for event in events if event.at <= place], shape)
        touched: dict[Key, list[Event]] = defaultdict(list)
        for event in (event for event in events if event.at == place):
            reached = [key for key in standing if event.reaches(key)] if event.key is None else [event.key]
            for key in reached:
                touched[key].append(event)
        for key, here in touched.items():
            here.sort(key=lambda event: "tb".find(event.op) + _OF_ONE_PLACE.find(event.op))
            before = standing.pop(key, None)
            if before is not None:
                by = MOVED if here[0].op == "d" and (key, place) in left else _opened_by(here[0])
                yield replace(before, closed_at=place, closed=here[0].source_ts, closed_by=by)
            row = rows.get(key)
            if row is not None and not row.ended:
                by = MOVED if here[-1].op == "d" and (key, place) in left else _opened_by(here[-1])
                standing[key] = _opened(key, here[-1], by, row)
    yield from standing.values()


def _opened_by(event: Event) -> str:
    came = event.moved_from is not None and not event.quarantined
    return MOVED if came else event.op


def _opened(key: Key, event: Event, by: str, row: Row) -> Version:
    return Version(
        key=key,
        opened_at=event.at,
        closed_at=None,
        opened=event.source_ts,
        closed=None,
        opened_by=by,
        closed_by=None,
        deleted=row.is_deleted,
        doubtful=row.existence_unresolved,
        values=tuple(sorted((name, held(row.shape, name, text)) for name, text in row.values.items())),
    )
