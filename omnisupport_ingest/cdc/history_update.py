"""Update a history in place: the versions in one file, by new events of some of their keys.

A new event lies above every event that the history was made from, so it continues the open version of its
key: the version is closed, or the event changes nothing. Some events cannot be applied to the open version
alone: an event below the others, a quarantined one, a key change that left a column unsent. Then the key is
returned in ``Updated.refold``; the caller makes its versions from all events (``history``) and sends them as
rows to set.

The walk over the events is that of ``history_rows``. A value that the open version has already is taken from
its typed column, not from text.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from omnisupport_ingest.cdc import columnar
from omnisupport_ingest.cdc.current_rows import EXISTENCE
from omnisupport_ingest.cdc.event_fold import TableColumns, key_columns
from omnisupport_ingest.cdc.history_rows import (
    CHANGE_NOTHING,
    CLOSING,
    HistoryEvents,
    Opening,
    TableEvent,
    Version,
    Versions,
    Walk,
)
from omnisupport_ingest.cdc.key_changes import OLD_KEY_ENDED
from omnisupport_ingest.cdc.life import PositionTuple, just_below
from omnisupport_ingest.cdc.stored import hashes_in, with_hashes
from omnisupport_ingest.cdc.typed_fold import events_to_fold
from omnisupport_ingest.cdc.typed_rows import EXACT, typed_batches
from omnisupport_ingest.cdc.updating import CHANGE, MERGE, SET, Updated, keys_in
from omnisupport_ingest.contracts.model import Column
from omnisupport_ingest.contracts.typed_values import typed_array

EVENT = "_cdc_event"
"""Column with the event, on rows that are sent to a file; NULL on finished versions."""

_END = "_cdc_valid_to_position"
_FROM = "_cdc_valid_from_position"


@dataclass(frozen=True)
class _HeldValue:
    """A value that is taken from a held row: the number of that row."""

    row: int


@dataclass(frozen=True)
class HistoryRules:
    """What the versions of one table are updated by.

    Attributes:
        schema: of versions.
        event: type of the event column.
        through: the highest position that the history was made from.
        new_ends: truncates and snapshot ends above ``through``, by position.
        source_schema: events of tables in other schemas are ignored; None: all events are of the table.
        changed_only: events that change nothing open no version.
        ended_before: versions that ended before this moment (microseconds since 1970) are not made; None: all
            are.
    """

    table_columns: TableColumns
    columns: tuple[Column, ...]
    schema: pa.Schema
    event: pa.DataType
    through: PositionTuple
    new_ends: tuple[TableEvent, ...] = ()
    soft_delete_column: str | None = None
    source_schema: str | None = None
    changed_only: bool = False
    ended_before: int | None = None

    @property
    def ordered_above(self) -> bool:
        """False: the files of the events lack the key columns by which this table's files are ordered."""
        return False

    @cached_property
    def sent(self) -> pa.Schema:
        """Schema of what is sent to a file: finished versions, or events."""
        return self.schema.append(pa.field(EVENT, self.event)).append(pa.field(CHANGE, pa.string()))

    def rows_of(self, events: pa.Table) -> pa.Table:
        """Convert accepted ``events`` of the table to rows to send to the files of their keys."""
        if self.source_schema is not None:
            events = events.filter(pc.equal(events["source_schema"], self.source_schema))
        if "withheld" not in events.column_names:
            events = events.append_column("withheld", pa.array(np.zeros(events.num_rows, np.bool_)))
        known = events_to_fold(events, self.table_columns.other_keys)
        known = known.filter(pc.is_valid(known["key"])).combine_chunks()
        texts = key_columns(known["key"].to_pylist(), self.table_columns)
        types = {column.name: column.type for column in self.columns}
        values: dict[str, Any] = {name: typed_array(text, types[name]) for name, text in texts.items()}
        values["_cdc_key"] = known["key"]
        values[EVENT] = pa.StructArray.from_arrays(
            [columnar.one_chunk(known[field.name]).cast(field.type) for field in self.event],
            fields=list(self.event),
        )
        values[CHANGE] = pa.repeat(pa.scalar(MERGE), known.num_rows)
        arrays = [
            columnar.one_chunk(values[field.name]).cast(field.type)
            if field.name in values
            else pa.nulls(known.num_rows, field.type)
            for field in self.sent
        ]
        return pa.Table.from_arrays(arrays, schema=self.sent)

    def reached(self, held: pa.Table, sent: pa.Table) -> npt.NDArray[np.bool_]:
        """Return which of the versions ``held`` the rows ``sent``, or new truncates and snapshot ends, may
        change."""
        final_rows = sent.filter(pc.invert(pc.equal(sent[CHANGE], MERGE)))
        is_open = columnar.mask(pc.is_null(held[_END]))
        return is_open & (columnar.mask(keys_in(held, sent)) | self._ended(held)) | columnar.mask(
            keys_in(held, final_rows)
        )

    def same(self, one: pa.Table, other: pa.Table) -> bool:
        """Whether both tables have the same versions, in any order."""
        return _same(one, other)

    def update(self, held: pa.Table, sent: pa.Table) -> Updated:
        """Update the versions ``held`` by the rows ``sent``, in any order, any number per key.

        Events of a key that is also set or gone are ignored.
        """
        change = sent[CHANGE]
        merging = sent.filter(pc.equal(change, MERGE))
        final_rows = sent.filter(pc.invert(pc.equal(change, MERGE)))
        merging = merging.filter(pc.invert(keys_in(merging, final_rows)))
        replaced = columnar.mask(keys_in(held, final_rows))
        is_open = columnar.mask(pc.is_null(held[_END]))
        reached = is_open & ~replaced & (columnar.mask(keys_in(held, merging)) | self._ended(held))
        old = held.filter(pa.array(reached)).combine_chunks()
        extended, refold = self._extended(old, merging)
        nothing = np.zeros(0, np.int64)
        if refold:
            return Updated(held.slice(0, 0), False, nothing, nothing, pa.array(sorted(refold), pa.string()))
        put = final_rows.filter(pc.equal(final_rows[CHANGE], SET)).select(self.schema.names).cast(self.schema)
        made = pa.concat_tables([extended, with_hashes(put)]).combine_chunks()
        if self.ended_before is not None:
            made = made.filter(pc.invert(ended(made, self.ended_before)))
        leaving = held.filter(pa.array(reached | replaced))
        none = pa.array([], pa.string())
        if _same(leaving, made):
            return Updated(held, False, nothing, nothing, none)
        kept = held.filter(pa.array(~(reached | replaced)))
        rows = pa.concat_tables([kept, made])
        return Updated(rows, True, hashes_in(leaving), hashes_in(made), none)

    def ordered(self, rows: pa.Table) -> pa.Table:
        """Return ``rows`` with the versions of each key in the order of positions."""
        return _by_position(rows)

    def _ended(self, held: pa.Table) -> npt.NDArray[np.bool_]:
        """Return the rows whose keys a new truncate or snapshot end reaches."""
        if not self.new_ends or not held.num_rows:
            return np.zeros(held.num_rows, np.bool_)
        if any(end.key_range is None for end in self.new_ends):
            return np.ones(held.num_rows, np.bool_)
        return np.array([bool(self._reaching(key)) for key in held["_cdc_key"].to_pylist()], np.bool_)

    def _reaching(self, key: str) -> Sequence[TableEvent]:
        return [end for end in self.new_ends if end.key_range is None or end.key_range.holds(key)]

    def _extended(self, old: pa.Table, merging: pa.Table) -> tuple[pa.Table, set[str]]:
        """Apply the events ``merging`` to the open versions ``old``.

        Return the versions, and the keys that must be made from all their events.
        """
        event = columnar.one_chunk(merging[EVENT])
        events = HistoryEvents(
            pa.table({name: pc.struct_field(event, index) for index, name in enumerate(self.event.names)}),
            self.table_columns.defaults,
        )
        members: dict[str, list[int]] = defaultdict(list)
        for row, key in enumerate(merging["_cdc_key"].to_pylist()):
            members[key].append(row)
        open_versions = _open_versions(old, self.table_columns)
        rows, refold = Versions(self.table_columns), set()
        for key in dict.fromkeys([*open_versions, *members]):
            mine = members.get(key, [])
            if not all(self._is_new(events, row) for row in mine):
                refold.add(key)
                continue
            ends, first = self._reaching(key), len(rows.key)
            walk = Walk(events, key, self.table_columns, ends, [end.position for end in ends], rows)
            walk.open_version, walk.seen = open_versions.get(key), key in open_versions
            walk.apply_all(mine)
            if rows.depend_on_others(first):
                refold.add(key)
        if refold:
            return self.schema.empty_table(), refold
        return self._typed(rows, old), refold

    def _is_new(self, events: HistoryEvents, row: int) -> bool:
        position = events.position[row]
        lowest = just_below(position) if events.op[row] == OLD_KEY_ENDED else position
        return not events.withheld[row] and lowest > self.through

    def _typed(self, rows: Versions, old: pa.Table) -> pa.Table:
        """Return the versions of the walk with typed columns; values of held rows are copied from them."""
        images = {
            name: [version.image.get(name) for version in rows.versions]
            for name in self.table_columns.non_key
        }
        held = {
            name: [value.row if isinstance(value, _HeldValue) else None for value in values]
            for name, values in images.items()
        }
        if not rows.key:
            return self.schema.empty_table()
        texts = rows.table(held=_HeldValue).combine_chunks()
        names = [name for name in self.schema.names if name not in ("_cdc_is_deleted", EXACT)]
        made = pa.Table.from_batches(list(typed_batches(texts.to_batches(), self.columns, [*names, EXACT])))
        values: dict[str, Any] = {name: columnar.one_chunk(made[name]) for name in made.column_names}
        exact: list[dict[str, str]] = [dict(each or ()) for each in values[EXACT].to_pylist()]
        old_exact = [dict(each or ()) for each in old[EXACT].to_pylist()]
        for name, from_row in held.items():
            known = pa.array([row is not None for row in from_row], pa.bool_())
            if not known.true_count:
                continue
            of_type = self.schema.field(name).type
            taken = columnar.one_chunk(old[name]).take(pa.array(from_row, pa.int64()))
            values[name] = pc.if_else(known, taken, values[name].cast(of_type))
            for number, row in enumerate(from_row):
                if row is not None and name in old_exact[row]:
                    exact[number][name] = old_exact[row][name]
        values[EXACT] = columnar.text_maps(
            [[(name, each[name]) for name in self.table_columns.names if name in each] for each in exact]
        )
        values["_cdc_is_deleted"] = self._marked(values, exact)
        arrays = [columnar.one_chunk(values[field.name]).cast(field.type) for field in self.schema]
        versions = pa.Table.from_arrays(arrays, schema=self.schema)
        return with_hashes(
            only_changes(versions, self.table_columns.names) if self.changed_only else versions
        )

    def _marked(self, values: Mapping[str, Any], exact: Sequence[Mapping[str, str]]) -> pa.Array:
        name = self.soft_delete_column
        if name is None:
            return pa.array(np.zeros(len(exact), np.bool_))
        return pc.or_(pc.is_valid(values[name]), pa.array([name in each for each in exact], pa.bool_()))


def ended(versions: pa.Table, before: int) -> pa.ChunkedArray:
    """Return which of ``versions`` ended before the moment ``before`` (microseconds since 1970); never
    NULL."""
    end = versions["_cdc_valid_to"]
    return pc.fill_null(pc.less(end, pa.scalar(before, pa.int64()).cast(end.type)), False)


def only_changes(versions: pa.Table, columns: Sequence[str]) -> pa.Table:
    """Remove versions that begin where the one before ends and change nothing; the one before goes on.

    ``columns``: the columns of the table.
    """
    rows = _by_position(versions)
    keys, by = rows["_cdc_key"].to_pylist(), rows["_cdc_opened_by"].to_pylist()
    begins, ends = rows[_FROM].to_pylist(), rows[_END].to_pylist()
    compared = [rows[name].to_pylist() for name in columns]
    compared.append([sorted(each or ()) for each in rows["_cdc_unresolved"].to_pylist()])
    compared.append([sorted(each or ()) for each in rows[EXACT].to_pylist()])
    first, last = list[int](), list[int]()
    for row in range(rows.num_rows):
        before = row - 1
        if (
            first
            and by[row] in CHANGE_NOTHING
            and keys[before] == keys[row]
            and ends[before] == begins[row]
            and all(columnar.is_same(values[before], values[row]) for values in compared)
        ):
            last[-1] = row
        else:
            first.append(row)
            last.append(row)
    if len(first) == rows.num_rows:
        return versions
    kept, ending = rows.take(pa.array(first)), rows.take(pa.array(last))
    for name in CLOSING:
        kept = kept.set_column(kept.column_names.index(name), kept.schema.field(name), ending[name])
    return kept.combine_chunks()


def _open_versions(old: pa.Table, table_columns: TableColumns) -> dict[str, Version]:
    """Return the open version of each key for the walk; its values are the numbers of their rows."""
    unknown = [frozenset(each or ()) for each in old["_cdc_unresolved"].to_pylist()]
    positions = columnar.positions(old[_FROM])
    at, landed = columnar.micros(old["_cdc_valid_from"]), columnar.micros(old["_cdc_ingested_at"])
    by, batch = old["_cdc_opened_by"].to_pylist(), old["_cdc_batch_id"].to_pylist()
    moved = old["_cdc_moved_from_key"].to_pylist()
    found = {}
    for row, key in enumerate(old["_cdc_key"].to_pylist()):
        opened = Opening(positions[row], by[row], at[row], batch[row], landed[row], moved[row])  # type: ignore[arg-type]
        image = {name: _HeldValue(row) for name in table_columns.non_key if name not in unknown[row]}
        found[key] = Version(opened, image, doubtful=EXISTENCE in unknown[row])
    return found


def _by_position(rows: pa.Table) -> pa.Table:
    position = columnar.one_chunk(rows[_FROM])
    order = pa.table(
        {
            "key": columnar.one_chunk(rows["_cdc_key"]),
            **{name: pc.struct_field(position, number) for number, name in enumerate("elo")},
        }
    )
    by = [(name, "ascending") for name in order.column_names]
    return rows.take(pc.sort_indices(order, sort_keys=by)).combine_chunks()


def _same(one: pa.Table, other: pa.Table) -> bool:
    if one.num_rows != other.num_rows:
        return False
    return bool(_by_position(one.combine_chunks()).equals(_by_position(other.combine_chunks())))
