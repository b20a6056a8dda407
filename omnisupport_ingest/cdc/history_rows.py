"""Compute the versions of each key in plain Python on Arrow batches; Spark's workers run it for ``history``.

A worker gets all events of a key and walks over them once, in the order of positions, with the table's
truncates and snapshot ends between them. What an event leaves alive is a version: it holds up to the next
event that changes or ends the row.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from omnisupport_ingest.cdc import columnar
from omnisupport_ingest.cdc.current_rows import EXISTENCE
from omnisupport_ingest.cdc.event_fold import ENDED, KEY, ORDER, Events, TableColumns, key_columns
from omnisupport_ingest.cdc.key_changes import OLD_KEY_ENDED
from omnisupport_ingest.cdc.life import Micros, PositionTuple, just_below
from omnisupport_ingest.cdc.ordinary_fold import Defaults
from omnisupport_ingest.key_range import KeyRange

KEY_CHANGED = "moved"
"""Opens and closes versions where the row's key changed: the two halves of one update."""

CHANGE_NOTHING = ("u", "r")
"""Operations that may leave a row as it was."""

CLOSING = ("_cdc_valid_to", "_cdc_valid_to_position", "_cdc_closed_by")
"""The columns of a version that say where and by what it ends."""

_ORDER = {"c": 0, "r": 1, "u": 2, OLD_KEY_ENDED: 3, "d": 4}
"""Order of events of a key at one position, of which at most one is accepted. An event that may end the row
comes last; the life that a key change takes columns from is kept just before that."""

_ENDED_BEFORE = -1
"""Order of an accepted delete beside other accepted events of its position (``event_fold.ORDER``)."""


@dataclass(frozen=True, slots=True)
class TableEvent:
    """A truncate or snapshot end. It ends every row below it; in quarantine (``withheld``) it leaves doubt
    whether they exist.

    ``at`` and ``landed_at``: microseconds since 1970. ``key_range``: the keys that it reaches; None: all.
    """

    position: PositionTuple
    op: str
    withheld: bool
    at: Micros
    batch_id: str | None
    landed_at: Micros | None
    key_range: KeyRange | None = None


@dataclass(frozen=True, slots=True)
class Opening:
    """The event that a version begins with. Times are microseconds since 1970; ``by`` is the operation or
    ``KEY_CHANGED``."""

    position: PositionTuple
    by: str
    at: Micros
    batch_id: str | None
    landed_at: Micros | None
    moved_from: str | None = None


@dataclass(frozen=True, slots=True)
class Version:
    """The state of a row between two events.

    Attributes:
        image: the known values of the non-key columns.
        undecided: columns that no event of this life carried; the life ``origin`` may fill them.
        origin: old key and end of the life that the key change took over; None: no key change began this
            life.
        doubtful: a quarantined event may have ended the row.
    """

    opened: Opening
    image: Mapping[str, Any]
    undecided: frozenset[str] = frozenset()
    origin: tuple[str, PositionTuple] | None = None
    doubtful: bool = False


def history_groups(
    batches: Iterable[pa.RecordBatch], table_columns: TableColumns, ends: Sequence[TableEvent]
) -> Iterator[pa.RecordBatch]:
    """Return all versions of each key, and the lives that key changes ended.

    In: the columns of ``fold.to_fold``, of rows with a key. ``ends``: by position, one per position and
    operation. Out: the columns of ``history.versions_type``.
    """
    table = columnar.one_table(batches)
    if table is None:
        return
    events, rows = HistoryEvents(table, table_columns.defaults), Versions(table_columns)
    keys = defaultdict(list)
    for row, key in enumerate(table["key"].to_pylist()):
        keys[key].append(row)
    end_positions = [end.position for end in ends]
    all_of_table = all(end.key_range is None for end in ends)
    for key, members in keys.items():
        if all_of_table:
            walk = Walk(events, key, table_columns, ends, end_positions, rows)
        else:
            reaching = [end for end in ends if end.key_range is None or end.key_range.holds(key)]
            walk = Walk(events, key, table_columns, reaching, [end.position for end in reaching], rows)
        walk.apply_all(members)
    yield from columnar.in_batches(rows.table())


class HistoryEvents(Events):
    """Events with the batch and landing time that a version takes from its opening event."""

    def __init__(self, table: pa.Table, defaults: Defaults = ()) -> None:
        super().__init__(table, defaults)
        self.batch_id: list[str | None] = table["batch_id"].to_pylist()
        self.landed_at = columnar.micros(table["landed_at"])


@dataclass
class Walk:
    """The walk over the events of one key.

    Attributes:
        open_version: the row as the events so far left it; None if it does not exist.
        seen: any event of the key was applied, or the row existed before.
        doubted_after_end: the last delete is in quarantine, and the row had ended before it.
        next_end: number of the next truncate or snapshot end in ``ends``.
        left_at: positions at which a key change ended the life of this key.
    """

    events: HistoryEvents
    key: str
    table_columns: TableColumns
    ends: Sequence[TableEvent]
    end_positions: Sequence[PositionTuple]
    rows: Versions
    open_version: Version | None = None
    seen: bool = False
    doubted_after_end: bool = False
    next_end: int = 0
    left_at: frozenset[PositionTuple] = frozenset()

    def apply_all(self, members: Sequence[int]) -> None:
        """Apply the events ``members`` and the table's truncates and snapshot ends, and write the versions to
        ``rows``."""
        events = self.events
        left = [row for row in members if events.op[row] == OLD_KEY_ENDED]
        self.left_at = frozenset(just_below(events.position[row]) for row in left)
        steps = [(events.position[row], self._order(row), row) for row in self._once(members)]
        # A complete image never takes a column from the old key.
        needed_ends = {just_below(events.position[row]) for row in left if not self._is_complete(row)}
        steps += [(end, _ORDER[OLD_KEY_ENDED], -1) for end in needed_ends]
        for position, order, row in sorted(steps):
            self._apply_table_events(position)
            if order == _ORDER[OLD_KEY_ENDED]:
                self._keep_ended_life(position)
            else:
                self._apply(row)
                self.seen = True
            self.next_end = bisect_right(self.end_positions, position)
        self._apply_table_events(None)
        if self.open_version is not None:
            self.rows.add(self.key, self.open_version, None)

    def _once(self, members: Sequence[int]) -> list[int]:
        """Return each accepted event once, and the withheld events that no accepted one voids."""
        events = self.events
        accepted: dict[tuple[PositionTuple, str], int] = {}
        withheld = []
        for row in members:
            event = (events.position[row], events.op[row])
            if events.op[row] == OLD_KEY_ENDED:
                continue
            if events.withheld[row]:
                withheld.append(row)
            elif event not in accepted or events.rank(row) > events.rank(accepted[event]):
                accepted[event] = row
        highest: dict[PositionTuple, int] = {}
        for position, op in accepted:
            highest[position] = max(ORDER[op], highest.get(position, 0))
        still_withheld = (
            row for row in withheld if ORDER[events.op[row]] > highest.get(events.position[row], -1)
        )
        return [*accepted.values(), *still_withheld]

    def _order(self, row: int) -> int:
        op = self.events.op[row]
        key_changed = self.events.position[row] in self.left_at
        return (
            _ENDED_BEFORE if op == "d" and not self.events.withheld[row] and not key_changed else _ORDER[op]
        )

    def _is_complete(self, row: int) -> bool:
        return self.events.carried(row).keys() >= self.table_columns.non_key_set

    def _apply_table_events(self, until: PositionTuple | None) -> None:
        """Apply truncates and snapshot ends at or below ``until`` that were not applied yet; None: all that
        are left. At one position they come before events of rows (``event_fold.ORDER``)."""
        stop = len(self.ends) if until is None else bisect_right(self.end_positions, until)
        # A row that has ended is not ended again, so usually one step is enough.
        while self.open_version is not None and self.next_end < stop:
            end = self.ends[self.next_end]
            opening = Opening(end.position, end.op, end.at, end.batch_id, end.landed_at)
            self._close(opening)
            self.open_version = Version(opening, {}, doubtful=True) if end.withheld else None
            self.doubted_after_end = False
            self.next_end += 1
        if self.open_version is None and self.seen and self.next_end < stop:
            self.doubted_after_end = self.ends[stop - 1].withheld

    def _keep_ended_life(self, end: PositionTuple) -> None:
        """Keep the life as it is just below the key change whose ``d`` is at ``end``."""
        if self.open_version is not None:
            self.rows.add_life(self.key, end, self.open_version)

    def _apply(self, row: int) -> None:
        events, open_version = self.events, self.open_version
        op, withheld = events.op[row], events.withheld[row]
        if op == "d":
            self._delete(row, withheld)
            return
        opening = self._opening(row, op)
        # A key change to a key whose row still exists (its delete may be in quarantine) closes that row.
        came = op != "u" and not withheld and events.moved_from[row] is not None
        self._close(replace(opening, by=KEY_CHANGED) if came else opening)
        carried = {
            name: value
            for name, value in events.carried(row).items()
            if name in self.table_columns.non_key_set
        }
        if op != "u" and withheld:
            # Two quarantined events at one position: the other one may have ended the row.
            doubtful = (
                open_version is not None
                and open_version.doubtful
                and open_version.opened.position == opening.position
            )
            self.open_version = Version(opening, {}, doubtful=doubtful)
        elif op != "u":
            self.open_version = self._new_life(opening, row, carried)
        elif open_version is None:
            # Two quarantined events after an end: the update may be of the row that the delete ended.
            doubtful = withheld and self.doubted_after_end
            self.open_version = Version(opening, {} if withheld else carried, doubtful=doubtful)
        elif withheld:
            image = {name: value for name, value in open_version.image.items() if name not in carried}
            undecided = open_version.undecided.difference(carried)
            self.open_version = replace(open_version, opened=opening, image=image, undecided=undecided)
        else:
            self.open_version = replace(
                open_version,
                opened=opening,
                image={**open_version.image, **carried},
                undecided=open_version.undecided.difference(carried),
                doubtful=False,
            )

    def _new_life(self, opening: Opening, row: int, carried: Mapping[str, Any]) -> Version:
        old_key = self.events.moved_from[row]
        if old_key is None:
            return Version(opening, carried)
        undecided = self.table_columns.non_key_set.difference(carried)
        origin = (old_key, just_below(opening.position)) if undecided else None
        return Version(replace(opening, by=KEY_CHANGED, moved_from=old_key), carried, undecided, origin)

    def _delete(self, row: int, withheld: bool) -> None:
        if self.open_version is None and (self.seen or not withheld):
            self.doubted_after_end = self.seen and withheld
            return
        opening = self._opening(row, KEY_CHANGED if self.events.position[row] in self.left_at else "d")
        self._close(opening)
        self.open_version = Version(opening, {}, doubtful=True) if withheld else None
        self.doubted_after_end = False

    def _opening(self, row: int, by: str) -> Opening:
        events = self.events
        return Opening(events.position[row], by, events.at[row], events.batch_id[row], events.landed_at[row])

    def _close(self, by: Opening) -> None:
        # Of several quarantined events at one position, the version of the last one counts.
        if self.open_version is not None and self.open_version.opened.position < by.position:
            self.rows.add(self.key, self.open_version, by)


@dataclass
class Versions:
    """Builds the rows of versions and of ended lives."""

    table_columns: TableColumns
    key: list[str] = field(default_factory=list)
    ended_at: list[PositionTuple | None] = field(default_factory=list)
    versions: list[Version] = field(default_factory=list)
    closed: list[Opening | None] = field(default_factory=list)

    def add(self, key: str, version: Version, closed: Opening | None) -> None:
        self.key.append(key)
        self.ended_at.append(None)
        self.versions.append(version)
        self.closed.append(closed)

    def add_life(self, key: str, end: PositionTuple, version: Version) -> None:
        self.add(key, version, None)
        self.ended_at[-1] = end

    def depend_on_others(self, first: int) -> bool:
        """Whether a version from number ``first`` on takes values from the life of another key, or gives
        values to one."""
        return any(end is not None for end in self.ended_at[first:]) or any(
            version.origin is not None for version in self.versions[first:]
        )

    def table(self, *, held: type | None = None) -> pa.Table:
        """Return the rows as ``history_groups`` returns them. Values of the type ``held`` are not texts and
        become NULL."""
        opened = [version.opened for version in self.versions]
        images = [version.image for version in self.versions]
        origins = [version.origin for version in self.versions]
        values = key_columns(self.key, self.table_columns) | {
            name: pa.array(_texts(images, name, held), pa.string()) for name in self.table_columns.non_key
        }
        return pa.table(
            {
                # Spark takes columns by their order; key columns may be anywhere among them.
                **{name: values[name] for name in self.table_columns.names},
                "_cdc_kind": pa.array([KEY if end is None else ENDED for end in self.ended_at], pa.string()),
                "_cdc_key": pa.array(self.key, pa.string()),
                "_cdc_ended_at": columnar.position_array(self.ended_at),
                "_cdc_valid_from": columnar.time_array([each.at for each in opened]),
                "_cdc_valid_to": columnar.time_array(
                    [None if each is None else each.at for each in self.closed]
                ),
                "_cdc_valid_from_position": columnar.position_array([each.position for each in opened]),
                "_cdc_valid_to_position": columnar.position_array(
                    [None if each is None else each.position for each in self.closed]
                ),
                "_cdc_opened_by": pa.array([each.by for each in opened], pa.string()),
                "_cdc_closed_by": pa.array(
                    [None if each is None else each.by for each in self.closed], pa.string()
                ),
                "_cdc_moved_from_key": pa.array([each.moved_from for each in opened], pa.string()),
                "_cdc_unresolved": columnar.text_lists([self._unresolved(each) for each in self.versions]),
                "_cdc_batch_id": pa.array([each.batch_id for each in opened], pa.string()),
                "_cdc_ingested_at": columnar.time_array([each.landed_at for each in opened]),
                "_open": columnar.text_lists([sorted(each.undecided) for each in self.versions]),
                "_from_key": pa.array([None if each is None else each[0] for each in origins], pa.string()),
                "_from_at": columnar.position_array([None if each is None else each[1] for each in origins]),
            }
        )

    def _unresolved(self, version: Version) -> list[str]:
        unknown = [name for name in self.table_columns.non_key if name not in version.image]
        return [*unknown, EXISTENCE] if version.doubtful else unknown


def _texts(images: Sequence[Mapping[str, Any]], name: str, held: type | None) -> list[str | None]:
    values = [image.get(name) for image in images]
    return values if held is None else [None if isinstance(value, held) else value for value in values]
