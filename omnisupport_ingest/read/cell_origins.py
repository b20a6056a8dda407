"""Finds which event decided each column of a row, and why the other events of its key did not.

The events are folded by the kernel that the layers use. But each column of an event holds the event's number
in place of its value. After the fold, a column holds the number of the event that decided it, through
windows, lives, truncates and key changes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from typing import Any

import pyarrow as pa

from omnisupport_ingest.cdc import columnar
from omnisupport_ingest.cdc.current_rows import EXISTENCE, current_groups
from omnisupport_ingest.cdc.event_fold import ENDED, KEY, Events, TableColumns, fold_groups
from omnisupport_ingest.cdc.images import read_image, with_unsent
from omnisupport_ingest.cdc.key_changes import OLD_KEY_ENDED
from omnisupport_ingest.cdc.life import Ending, PositionTuple, latest, life_begins
from omnisupport_ingest.cdc.table_ends import TableEnd, TableEnds

_NO_LIMIT = 1 << 62
"""More rows than are ever folded here, so all go through the exact kernel, one group after another."""

_LIVING, _STARTS, _TABLE = frozenset("cur"), frozenset("cr"), frozenset("tb")


class Role(StrEnum):
    """What an event is for a column of the row."""

    DECIDES = "decides"
    OLDER = "older position"
    EARLIER_LIFE = "earlier life"
    NOT_SENT = "column not sent"
    NO_VALUES = "carries no values"
    WITHHELD = "quarantined"
    HIDES = "quarantined, and hides older values"
    VOIDED = "quarantined, an accepted event has its position"
    IN_DOUBT = "below a quarantined delete"
    OLD_KEY = "of an old key"


@dataclass(frozen=True, slots=True)
class KeyEvent:
    """An accepted event of the table, or one that is in quarantine (``withheld``). Times are timezone-aware.

    ``facts``: what else is known of it (batch, file, transaction, reason), to be shown.
    """

    window: str
    position: PositionTuple
    op: str
    key: str | None
    source_ts: datetime
    batch_id: str
    landed_at: datetime | None
    before: str | None = None
    after: str | None = None
    unchanged: tuple[str, ...] | None = None
    moved_from_key: str | None = None
    identity: str | None = None
    withheld: bool = False
    facts: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def carried(self) -> Mapping[str, Any]:
        """Return the columns that it carried, by name."""
        return with_unsent(read_image(self.after) or {}, self.unchanged, self.before)

    def decides(self, table_columns: TableColumns) -> frozenset[str]:
        """Return the columns that it may decide: what it carried, and what has a default because the event
        began a row before the table had the column."""
        names = frozenset(self.carried())
        if self.op in _STARTS and read_image(self.after) is not None:
            names |= {name for name, _ in table_columns.defaults}.difference(self.unchanged or ())
        return names


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a column's value comes from. ``event`` decides it, None where no event carried the column.

    ``resolved``: the value is known; else ``event`` is in quarantine, and hides what older ones carried.
    ``old_key``: a key change did not send the column, and the life that it ended had the value.
    ``by_default``: ``event`` is older than the column, whose ``default`` counts then.
    """

    column: str
    event: KeyEvent | None
    resolved: bool
    old_key: bool = False
    by_default: bool = False
    default: str | None = None

    @property
    def value(self) -> str | None:
        """The value as text; None for NULL. It means nothing if it is not ``resolved``."""
        if self.event is None or not self.resolved:
            return None
        return self.default if self.by_default else self.event.carried().get(self.column)


@dataclass(frozen=True, slots=True)
class RowOrigins:
    """What the events say of a row, and the event that decided each column outside its key.

    ``last``: its last event. ``ended_by``: what deleted it, None while it lives. ``begins``: events below
    belong to an earlier life. ``existence``: False where a delete in quarantine leaves open whether it lives.
    """

    key: str
    last: KeyEvent
    ended_by: KeyEvent | None
    begins: PositionTuple | None
    existence: bool
    columns: Mapping[str, Origin]
    voided: frozenset[PositionTuple]

    def role(self, event: KeyEvent, column: str) -> Role:
        """Return what ``event`` is for ``column``."""
        origin = self.columns[column]
        if event.withheld and event.position in self.voided:
            return Role.VOIDED
        if origin.event == event:
            return Role.DECIDES if origin.resolved else Role.HIDES
        if event.withheld:
            return Role.WITHHELD
        if event.op not in _LIVING:
            return Role.NO_VALUES
        if event.key != self.key:
            return Role.OLD_KEY
        if column not in event.carried():
            return Role.NOT_SENT
        if self.begins is not None and event.position < self.begins:
            return Role.EARLIER_LIFE
        if origin.event is not None and event.position < origin.event.position:
            return Role.OLDER
        return Role.IN_DOUBT


def origins_of(events: Iterable[KeyEvent], key: str, table_columns: TableColumns) -> RowOrigins | None:
    """Return the origins of the row with ``key``; None if the fold has no such row.

    ``events``: all of ``key``, all of the keys that its row had before (``former_keys``), and the table's
    truncates and snapshot ends, each once, in any order.
    """
    ordered = _by_rank(events)
    accepted = {(each.position, each.identity) for each in ordered if not each.withheld}
    voided = frozenset(
        each.position for each in ordered if each.withheld and (each.position, each.identity) in accepted
    )
    counted = [each for each in ordered if not (each.withheld and each.position in voided)]
    ends = _ends(counted)
    life = _life(ordered, counted, key, table_columns, ends, None)
    if life is None:
        return None
    of_key = [each for each in counted if each.key == key and each.op not in _TABLE]
    last = max(of_key, key=lambda each: each.position)
    alive = max((each.position for each in of_key if each.op in _LIVING), default=None)
    ending, begins = _bounds(of_key, ends.reaching(key), alive)
    origins = {
        name: _origin(ordered, counted, life, name, table_columns, ends) for name in table_columns.non_key
    }
    unresolved = life["_cdc_unresolved"] or ()
    return RowOrigins(
        key=key,
        last=last,
        ended_by=_at(counted, ending, key) if life["_ended"] and ending is not None else None,
        begins=begins,
        existence=EXISTENCE not in unresolved,
        columns=origins,
        voided=voided,
    )


def former_keys(events: Iterable[KeyEvent]) -> set[str]:
    """Return the keys that rows of ``events`` had before a key change."""
    return {each.moved_from_key for each in events if each.moved_from_key is not None}


def _by_rank(events: Iterable[KeyEvent]) -> list[KeyEvent]:
    """Sort the events by position, and within one position in the kernel's order of their content."""
    listed = list(events)
    table = Events(_table(list(enumerate(listed)), None)) if listed else None
    numbers = sorted(
        range(len(listed)), key=lambda row: (listed[row].position, table.rank(row) if table else ())
    )
    return [listed[row] for row in numbers]


def _ends(events: Sequence[KeyEvent]) -> TableEnds:
    return TableEnds.collect(
        TableEnd(
            each.position,
            _micros(each.source_ts),
            each.position if each.withheld else None,
            each.after if each.op == "b" else None,
        )
        for each in events
        if each.op in _TABLE
    )


def _life(
    ordered: Sequence[KeyEvent],
    counted: Sequence[KeyEvent],
    key: str,
    table_columns: TableColumns,
    ends: TableEnds,
    ended_at: PositionTuple | None,
) -> dict[str, Any] | None:
    """Return the current life of ``key``, or the one that a key change ended at ``ended_at``: a row of
    ``current.lives_type`` with the numbers of deciding events (of ``ordered``) in its columns."""
    number = {id(each): index for index, each in enumerate(ordered)}
    numbered = [(number[id(each)], each) for each in counted if each.key == key and each.op not in _TABLE]
    numbered += [
        (number[id(each)], replace(each, key=key, op=OLD_KEY_ENDED))
        for each in counted
        if each.moved_from_key == key and not each.withheld
    ]
    if not numbered:
        return None
    # A default, too, is replaced by the number of its event.
    numbers = replace(table_columns, defaults=())
    folded = fold_groups(_table(numbered, table_columns).to_batches(), numbers, few=_NO_LIMIT)
    batches = [batch for each in folded for batch in _with_typed_columns(each)]
    for batch in current_groups(batches, numbers, ends):
        for row in batch.to_pylist():
            at = row["_cdc_ended_at"]
            ended = None if at is None else tuple(at.values())
            if row["_cdc_kind"] == (KEY if ended_at is None else ENDED) and ended == ended_at:
                return dict(row)
    return None


def _origin(
    ordered: Sequence[KeyEvent],
    counted: Sequence[KeyEvent],
    life: Mapping[str, Any],
    column: str,
    table_columns: TableColumns,
    ends: TableEnds,
) -> Origin:
    key, old_key = str(life["_cdc_key"]), False
    seen: set[tuple[str, PositionTuple]] = set()
    current: Mapping[str, Any] | None = life
    while current is not None:
        if column not in (current["_cdc_unresolved"] or ()):
            number = current[column]
            event = None if number is None else ordered[int(number)]
            by_default = event is not None and column not in event.carried()
            default = dict(table_columns.defaults).get(column)
            return Origin(column, event, True, old_key, by_default, default)
        if column not in (current["_open"] or ()) or current["_from_key"] is None:
            break
        key, moved_at = current["_from_key"], tuple(current["_from_at"].values())
        if (key, moved_at) in seen:
            break
        seen.add((key, moved_at))
        old_key = True
        current = _life(ordered, counted, key, table_columns, ends, moved_at)
    hiding = [each for each in counted if each.withheld and _hides(each, key, column, table_columns)]
    newest = max(hiding, key=lambda each: each.position, default=None)
    return Origin(column, newest, False, old_key and newest is not None)


def _hides(event: KeyEvent, key: str, column: str, table_columns: TableColumns) -> bool:
    if event.op in _TABLE:
        return True
    return event.key == key and (event.op == "d" or column in event.decides(table_columns))


def _bounds(
    of_key: Sequence[KeyEvent], ends: TableEnds, alive: PositionTuple | None
) -> tuple[PositionTuple | None, PositionTuple | None]:
    """Return the position that ended the row (None while it lives), and the one where its life begins."""
    first = min(each.position for each in of_key)
    deletes = [Ending(each.position, _micros(each.source_ts)) for each in of_key if _deletes(each)]
    endings = sorted([*deletes, *(each for each in ends.endings if each.position > first)])
    start = max((each.position for each in of_key if each.op in _STARTS), default=None)
    ended = next((each.position for each in endings if alive is None or each.position > alive), None)
    return ended, latest(None, life_begins(alive, start, endings))


def _deletes(event: KeyEvent) -> bool:
    return event.op == "d" and not event.withheld


def _at(events: Sequence[KeyEvent], position: PositionTuple, key: str) -> KeyEvent | None:
    at_position = [each for each in events if each.position == position and not each.withheld]
    return next((each for each in at_position if each.key == key), at_position[0] if at_position else None)


def _table(numbered: Sequence[tuple[int, KeyEvent]], table_columns: TableColumns | None) -> pa.Table:
    """Return the events as the fold takes them. With ``table_columns`` each column holds the number of its
    event; these numbers order events of one position as their content does."""
    events = [event for _, event in numbered]
    after: list[str | None] = [event.after for event in events]
    if table_columns is not None:
        after = [_numbered_image(event, number, table_columns) for number, event in numbered]
    return pa.table(
        {
            "window": pa.array([each.window for each in events], pa.string()),
            "key": pa.array([each.key for each in events], pa.string()),
            "op": pa.array([each.op for each in events], pa.string()),
            "epoch": pa.array([each.position[0] for each in events], pa.int32()),
            "commit_lsn": pa.array([each.position[1] for each in events], pa.int64()),
            "ordinal": pa.array([each.position[2] for each in events], pa.int64()),
            "source_ts": pa.array([_micros(each.source_ts) for each in events]).cast(columnar.TIME),
            "before": pa.array([None] * len(events), pa.string()),
            "after": pa.array(after, pa.string()),
            "unchanged": pa.array([None] * len(events), pa.list_(pa.string())),
            "moved_from_key": pa.array([each.moved_from_key for each in events], pa.string()),
            "batch_id": pa.array([each.batch_id for each in events], pa.string()),
            "landed_at": pa.array([each.landed_at for each in events], columnar.TIME),
            "withheld": pa.array([each.withheld for each in events], pa.bool_()),
        }
    )


def _numbered_image(event: KeyEvent, number: int, table_columns: TableColumns) -> str | None:
    if event.op not in _LIVING and event.op != OLD_KEY_ENDED:
        return event.after
    decided = event.decides(table_columns)
    # The first entry is of no column: it orders the texts of events at one position by their numbers.
    return json.dumps(
        {"": f"{number:012d}"} | {n: str(number) for n in table_columns.non_key if n in decided}
    )


def _with_typed_columns(batch: pa.RecordBatch) -> list[pa.RecordBatch]:
    """Add the columns that typing adds to folded rows."""
    table = pa.Table.from_batches([batch])
    exact = columnar.text_maps([()] * table.num_rows)
    table = table.append_column("_cdc_exact", exact)
    table = table.append_column("_cdc_row_hash", pa.nulls(table.num_rows, pa.int64()))
    batches: list[pa.RecordBatch] = table.to_batches()
    return batches


def _micros(moment: datetime) -> int:
    return int(pa.scalar(moment, columnar.TIME).value)
