"""The versions of each row, in plain Python on Arrow batches: what the history hands to Spark's workers.

A worker gets all events of a key. They are walked once, upwards by position, with the truncates and
boundaries of the table between them: what each leaves alive is a version, from its position up to that
of the next event that changes or ends it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from omnisupport_ingest.cdc import columnar
from omnisupport_ingest.cdc.current_rows import EXISTENCE
from omnisupport_ingest.cdc.event_fold import ENDED, KEY, ORDER, Events, TableColumns, key_columns
from omnisupport_ingest.cdc.key_changes import OLD_KEY_ENDED
from omnisupport_ingest.cdc.life import Micros, Position, just_below
from omnisupport_ingest.cdc.ordinary_fold import Defaults
from omnisupport_ingest.key_range import KeyRange

KEY_CHANGED = "moved"
"""What opens and what closes a version where the row's key changed: the halves of one update."""

CHANGE_NOTHING = ("u", "r")
"""Operations that may leave a row as it was."""

CLOSING = ("_cdc_valid_to", "_cdc_valid_to_position", "_cdc_closed_by")
"""The columns of a version that say where and by what it ends."""

_ORDER = {"c": 0, "r": 1, "u": 2, OLD_KEY_ENDED: 3, "d": 4}
"""Quarantined events of a key that share a position: what may end the row comes last. The life that a key
change takes its columns from is looked at just before that."""

_ENDED_BEFORE = -1
"""Where an accepted delete stands beside other accepted events of its position (``event_fold.ORDER``)."""


@dataclass(frozen=True, slots=True)
class TableEvent:
    """A truncate or boundary: it ends every row below it, or, in quarantine (``withheld``), leaves doubt.

    ``key_range``: the range of keys that it is about; null: all.
    """

    position: Position
    op: str
    withheld: bool
    at: Micros
    batch_id: str | None
    landed_at: Micros | None
    key_range: KeyRange | None = None


@dataclass(frozen=True, slots=True)
class Opening:
    """The event that a version begins with."""

    position: Position
    by: str
    at: Micros
    batch_id: str | None
    landed_at: Micros | None
    moved_from: str | None = None


@dataclass(frozen=True, slots=True)
class Version:
    """A row between two events. ``image``: the known values of the columns beside the key.

    ``undecided``: columns that no event of this life carried, which the life named by ``origin`` (key
    and end) may fill. ``doubtful``: a quarantined event may have ended the row.
    """

    opened: Opening
    image: Mapping[str, Any]
    undecided: frozenset[str] = frozenset()
    origin: tuple[str, Position] | None = None
    doubtful: bool = False


def history_groups(
    batches: Iterable[pa.RecordBatch], table_columns: TableColumns, ends: Sequence[TableEvent]
) -> Iterator[pa.RecordBatch]:
    """All versions of each key, and the lives that key changes ended.

    In: the columns of ``fold.to_fold``, of rows with a key. ``ends``: by position, one per position
    and operation. Out: the columns of ``history.versions_type``.
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
    """Events with what a version repeats of the batch of its opening event."""

    def __init__(self, table: pa.Table, defaults: Defaults = ()) -> None:
        super().__init__(table, defaults)
        self.batch_id: list[str | None] = table["batch_id"].to_pylist()
        self.landed_at = columnar.micros(table["landed_at"])


@dataclass
class Walk:
    """One key's events, and the row as it stands after those that were walked over.

    ``doubted_after_end``: the last delete, of a row that had ended already, is in quarantine.
    """

    events: HistoryEvents
    key: str
    table_columns: TableColumns
    ends: Sequence[TableEvent]
    end_positions: Sequence[Position]
    rows: Versions
    open_version: Version | None = None
    seen: bool = False
    doubted_after_end: bool = False
    next_end: int = 0
    left_at: frozenset[Position] = frozenset()

    def apply_all(self, members: Sequence[int]) -> None:
        events = self.events
        left = [row for row in members if events.op[row] == OLD_KEY_ENDED]
        self.left_at = frozenset(just_below(events.position[row]) for row in left)
        steps = [(events.position[row], self._order(row), row) for row in self._once(members)]
        # Where the image is complete, nothing is taken from the old key.
        needed_ends = {just_below(events.position[row]) for row in left if not self._is_complete(row)}
        steps += [(end, _ORDER[OLD_KEY_ENDED], -1) for end in needed_ends]
        for position, order, row in sorted(steps):
            self._apply_table_events(position)
            if order == _ORDER[OLD_KEY_ENDED]:
                self._keep_ended_life(position)
            else:
                self._apply(row)
                self.seen = True
            self.next_end = bisect_left(self.end_positions, position)
        self._apply_table_events(None)
        if self.open_version is not None:
            self.rows.add(self.key, self.open_version, None)

    def _once(self, members: Sequence[int]) -> list[int]:
        """The events of this key: an accepted one once, no withheld one that an accepted one voids."""
        events = self.events
        accepted: dict[tuple[Position, str], int] = {}
        withheld = []
        for row in members:
            place = (events.position[row], events.op[row])
            if events.op[row] == OLD_KEY_ENDED:
                continue
            if events.withheld[row]:
                withheld.append(row)
            elif place not in accepted or events.rank(row) > events.rank(accepted[place]):
                accepted[place] = row
        highest: dict[Position, int] = {}
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

    def _apply_table_events(self, until: Position | None) -> None:
        """Truncates and boundaries between the last event and ``until`` (null: all above)."""
        stop = len(self.ends) if until is None else bisect_left(self.end_positions, until)
        # A row that has ended is not ended again, so most often one look is all.
        while self.open_version is not None and self.next_end < stop:
            end = self.ends[self.next_end]
            opening = Opening(end.position, end.op, end.at, end.batch_id, end.landed_at)
            self._close(opening)
            self.open_version = Version(opening, {}, doubtful=True) if end.withheld else None
            self.doubted_after_end = False
            self.next_end += 1
        if self.open_version is None and self.seen and self.next_end < stop:
            self.doubted_after_end = self.ends[stop - 1].withheld

    def _keep_ended_life(self, end: Position) -> None:
        """Keep the life as it stands just below the key change whose ``d`` is at ``end``."""
        if self.open_version is not None:
            self.rows.add_life(self.key, end, self.open_version)

    def _apply(self, row: int) -> None:
        events, open_version = self.events, self.open_version
        op, withheld = events.op[row], events.withheld[row]
        if op == "d":
            self._delete(row, withheld)
            return
        opening = self._opening(row, op)
        # A key change onto a row that stands, as where its delete is in quarantine, closes it as one.
        came = op != "u" and not withheld and events.moved_from[row] is not None
        self._close(replace(opening, by=KEY_CHANGED) if came else opening)
        carried = {
            name: value
            for name, value in events.carried(row).items()
            if name in self.table_columns.non_key_set
        }
        if op != "u":
            self.open_version = Version(opening, {}) if withheld else self._new_life(opening, row, carried)
        elif open_version is None:
            # Two events in quarantine above an end: the update may be of a row that the delete ended.
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
        # Of several events in quarantine at one position the last one's version counts.
        if self.open_version is not None and self.open_version.opened.position < by.position:
            self.rows.add(self.key, self.open_version, by)


@dataclass
class Versions:
    """Versions and ended lives under construction."""

    table_columns: TableColumns
    key: list[str] = field(default_factory=list)
    ended_at: list[Position | None] = field(default_factory=list)
    versions: list[Version] = field(default_factory=list)
    closed: list[Opening | None] = field(default_factory=list)

    def add(self, key: str, version: Version, closed: Opening | None) -> None:
        self.key.append(key)
        self.ended_at.append(None)
        self.versions.append(version)
        self.closed.append(closed)

    def add_life(self, key: str, end: Position, version: Version) -> None:
        self.add(key, version, None)
        self.ended_at[-1] = end

    def depend_on_others(self, first: int) -> bool:
        """Whether a version from number ``first`` on takes values from another key's life, or gives some."""
        return any(end is not None for end in self.ended_at[first:]) or any(
            version.origin is not None for version in self.versions[first:]
        )

    def table(self, *, held: type | None = None) -> pa.Table:
        """As ``history_groups`` gives them. A value of the type ``held`` is no text, and NULL here."""
        opened = [version.opened for version in self.versions]
        images = [version.image for version in self.versions]
        origins = [version.origin for version in self.versions]
        values = key_columns(self.key, self.table_columns) | {
            name: pa.array(_texts(images, name, held), pa.string()) for name in self.table_columns.non_key
        }
        return pa.table(
            {
                # Spark takes the columns by their place, and the key's may stand anywhere among them.
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
