"""Update rows of a dimension in place: the rows of one file, by the net changes of some of their keys.

A row is merged with the net changes of its key by the algebra of ``life``; other rows stay as they are. Some
rows depend on more than their own state and net changes (``stored``: ``refold``). Their keys are returned in
``Updated.refold``; the caller folds them from the net changes of all windows and sends them again as rows to
set.

Positions decide whose value a column has. So a merge looks at few columns of the held rows
(``UpdateRules.looked_at``) and says which values of the other columns it copies from which rows
(``Merge.wanted``). If the held rows are in files, only these values of the other columns are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from omnisupport_ingest.cdc import columnar
from omnisupport_ingest.cdc.current_rows import current_tables
from omnisupport_ingest.cdc.event_fold import TableColumns
from omnisupport_ingest.cdc.life import Micros
from omnisupport_ingest.cdc.ordinary import FEW
from omnisupport_ingest.cdc.row_fold import merged_tables
from omnisupport_ingest.cdc.stored import (
    STATE,
    first_of,
    from_folded,
    hashes_in,
    life_start_of,
    must_refold,
    state_column,
    to_folded,
    with_hashes,
)
from omnisupport_ingest.cdc.table_ends import TableEnds

CHANGE = "_cdc_change"
"""Column that says what a sent row means. It is NULL on a row that only causes the held row to be looked at.
"""

MERGE, SET, GONE, AGAIN = "merge", "set", "gone", "again"
"""Values of ``CHANGE``, in this order. Merge the row with the key's row; replace the key's row by it; remove
the key's row; replace the key's row by the merge of all rows that are sent for it with this value."""

Mask = npt.NDArray[np.bool_]
Numbers = npt.NDArray[np.int64]

_NO_KEYS = pa.array([], pa.string())


@dataclass(frozen=True)
class UpdateRules:
    """What the rows of one table are updated by.

    Attributes:
        schema: of stored rows (``stored.stored_type``).
        ends: every table end of the table.
        new_ends: the table ends that were not applied to the rows yet.
        purge_deleted_before: rows that the source deleted before this moment (microseconds since 1970) are
            left out; None: no row is.
        rows_may_be_purged: a key without a row may have had one that was purged.
        few: at most so many rows are merged group by group (``row_fold.merge_groups``).
    """

    table_columns: TableColumns
    schema: pa.Schema
    soft_delete_column: str | None = None
    ends: TableEnds = field(default_factory=TableEnds)
    new_ends: TableEnds = field(default_factory=TableEnds)
    purge_deleted_before: Micros | None = None
    rows_may_be_purged: bool = False
    few: int = FEW

    @property
    def ordered_above(self) -> bool:
        """True: the files of the net changes have the key columns by which this table's files are ordered."""
        return True

    @property
    def sent(self) -> pa.Schema:
        """Schema of the rows that are sent to a file."""
        return self.schema.append(pa.field(CHANGE, pa.string()))

    @cached_property
    def copied(self) -> tuple[str, ...]:
        """The columns whose values are copied and never looked at."""
        return tuple(name for name in self.table_columns.non_key if name != self.soft_delete_column)

    @cached_property
    def looked_at(self) -> pa.Schema:
        """The columns of held rows that ``merge`` needs. (The state knows what is unresolved, too.)"""
        others = {*self.copied, "_cdc_unresolved"}
        return pa.schema([field for field in self.schema if field.name not in others])

    def rows_of(self, folded: pa.Table) -> pa.Table:
        """Convert folded rows to rows to send to the files of their keys."""
        rows = from_folded(folded, self.schema)
        return rows.append_column(CHANGE, pa.repeat(pa.scalar(MERGE), rows.num_rows))

    def reached(self, held: pa.Table, sent: pa.Table) -> Mask:
        """Return which of the rows ``held`` the rows ``sent``, or new table ends, may change."""
        return columnar.mask(keys_in(held, sent)) | _reached(held, self)

    def merge(self, held: pa.Table, sent: pa.Table) -> Merge:
        """Merge the rows as ``merge_rows`` does, by these rules."""
        return merge_rows(held, sent, self)

    def update(self, held: pa.Table, sent: pa.Table) -> Updated:
        """Update the rows as ``update_rows`` does, by these rules."""
        return update_rows(held, sent, self)

    def same(self, one: pa.Table, other: pa.Table) -> bool:
        """Whether both tables have the same rows, in any order."""
        return _same(one, other)

    def ordered(self, rows: pa.Table) -> pa.Table:
        """Return ``rows`` as they are: there is one per key, and keys are ordered by the caller."""
        return rows


@dataclass(frozen=True)
class Updated:
    """The rows that a file has after an update, in no order, and what became of those it had.

    Attributes:
        changed: False if every row is as it was.
        removed: hashes of the rows that left.
        added: hashes of the rows that came.
        refold: keys that must be folded from all their net changes; if there are any, the other attributes
            mean nothing.
    """

    rows: pa.Table
    changed: bool
    removed: npt.NDArray[np.int64]
    added: npt.NDArray[np.int64]
    refold: pa.Array


@dataclass(frozen=True)
class Replaced:
    """``leaves``: a mask of the held rows that leave; the others stay as they are. ``rows``: those that come,
    in no order."""

    leaves: Mask
    rows: pa.Table


@dataclass(frozen=True)
class Merge:
    """A merge of rows, before the values are there that it copies from held rows.

    Attributes:
        held: the held rows, with the columns that are looked at.
        leaves: a mask of those that leave if any row changes.
        merging: the sent rows that are merged.
        merged: stored rows without hash. In a column that is copied, the number of the row that has the
            value: ``held`` rows first, then ``merging`` ones; NULL for no value.
        put: stored rows that come as they are.
        refold: keys that must be folded from all their net changes; if there are any, the other attributes
            mean nothing.
    """

    rules: UpdateRules
    held: pa.Table
    leaves: Mask
    merging: pa.Table
    merged: pa.Table
    put: pa.Table
    refold: pa.Array

    @cached_property
    def wanted(self) -> dict[str, Numbers]:
        """By column, the numbers of the held rows whose values are copied, ascending; columns with none are
        left out."""
        found = {}
        for name in self.rules.copied if self.merged.num_rows else ():
            numbers = self._numbers(name)
            of_held = np.unique(numbers[(numbers >= 0) & (numbers < self.held.num_rows)])
            if len(of_held):
                found[name] = of_held
        return found

    def replaced(self, values: Mapping[str, pa.Array]) -> Replaced:
        """Return which rows leave and which come, with the ``values`` of what is ``wanted``.

        If the rows that come equal those that leave, nothing is replaced.
        """
        schema = self.rules.schema
        made = schema.empty_table()
        if self.merged.num_rows:
            copied = {name: self._copied(name, values.get(name)) for name in self.rules.copied}
            columns = {name: copied.get(name, self.merged[name]) for name in schema.names}
            made = with_hashes(pa.table(columns).cast(schema))
        made = columnar.concat([made, with_hashes(self.put)])
        leaving = self.held.filter(pa.array(self.leaves))
        # The hash covers the columns that are not looked at.
        if _same(leaving, made.select(leaving.column_names)):
            return Replaced(np.zeros_like(self.leaves), schema.empty_table())
        return Replaced(self.leaves, made)

    def _numbers(self, name: str) -> Numbers:
        numbers: Numbers = pc.fill_null(columnar.one_chunk(self.merged[name]), -1).to_numpy()
        return numbers

    def _copied(self, name: str, of_held: pa.Array | None) -> pa.Array:
        numbers, held = self._numbers(name), self.held.num_rows
        values = columnar.one_chunk(self.merging[name])
        places = numbers - held
        if of_held is not None:
            values = pa.concat_arrays([of_held, values])
            before = np.searchsorted(self.wanted[name], numbers)
            places = np.where(numbers < held, before, places + len(of_held))
        if len(places) == places[-1] - places[0] + 1 and (np.diff(places) == 1).all() and numbers[0] >= 0:
            # As in a snapshot: nothing is copied.
            return values.slice(places[0], len(places))
        return values.take(pa.array(places, mask=numbers < 0))


def update_rows(held: pa.Table, sent: pa.Table, rules: UpdateRules) -> Updated:
    """Update the rows ``held`` by the rows ``sent``.

    Args:
        held: stored rows, one per key.
        sent: stored rows with ``CHANGE``, in any order, any number per key. Rows to merge are ignored if
            their key is also set, gone, or made again.
    """
    merge = merge_rows(held.select(rules.looked_at.names), sent, rules)
    nothing = np.zeros(0, np.int64)
    if len(merge.refold):
        return Updated(held.slice(0, 0), False, nothing, nothing, merge.refold)
    wanted = merge.wanted.items()
    found = merge.replaced({name: columnar.one_chunk(held[name]).take(pa.array(at)) for name, at in wanted})
    if not found.leaves.any() and not found.rows.num_rows:
        return Updated(held, False, nothing, nothing, _NO_KEYS)
    kept = columnar.filter_slices(held, ~found.leaves)
    removed = hashes_in(held.select(["_cdc_row_hash"]).filter(pa.array(found.leaves)))
    return Updated(pa.concat_tables([kept, found.rows]), True, removed, hashes_in(found.rows), _NO_KEYS)


def merge_rows(held: pa.Table, sent: pa.Table, rules: UpdateRules) -> Merge:
    """Merge the rows ``held``, with the columns ``rules.looked_at``, and the rows ``sent`` of
    ``update_rows``."""
    change = sent[CHANGE]
    settled = sent.filter(pc.is_in(change, pa.array([SET, GONE, AGAIN])))
    merging = columnar.filter_slices(sent, columnar.mask(pc.equal(change, MERGE)))
    merging = columnar.filter_slices(merging, ~columnar.mask(keys_in(merging, settled))).combine_chunks()
    replaced, touched = columnar.mask(keys_in(held, settled)), columnar.mask(keys_in(held, merging))
    reached = _reached(held, rules) & ~replaced & ~touched
    put = settled.filter(pc.equal(settled[CHANGE], SET)).select(rules.schema.names).cast(rules.schema)
    old = np.flatnonzero(touched | reached)
    old_rows = held.take(pa.array(old)).combine_chunks()
    refold = _to_refold(old_rows, merging, rules)
    again = columnar.filter_slices(settled, columnar.mask(pc.equal(settled[CHANGE], AGAIN)))
    again = columnar.filter_slices(again, ~columnar.mask(keys_in(again, put)))
    if again.num_rows:
        merging = pa.concat_tables([merging, again]).combine_chunks()
    none = rules.schema.empty_table()
    if len(refold):
        return Merge(rules, held, np.zeros_like(replaced), merging, none, put, refold)
    numbers = np.arange(held.num_rows, held.num_rows + merging.num_rows)
    parts = [
        _folded(rows, of_rows, rules)
        for rows, of_rows in ((old_rows, old), (merging, numbers))
        if rows.num_rows
    ]
    merged = _merged(parts, rules) if parts else none
    return Merge(rules, held, touched | reached | replaced, merging, merged, put, _NO_KEYS)


def _folded(rows: pa.Table, numbers: Numbers, rules: UpdateRules) -> pa.Table:
    """Return stored rows as folded rows, with their ``numbers`` in the columns that are copied."""
    known = {name: rows[name] for name in rules.looked_at.names}
    known |= dict.fromkeys(rules.copied, pa.array(numbers))
    return to_folded(pa.table(known), rules.table_columns.names)


def _merged(parts: list[pa.Table], rules: UpdateRules) -> pa.Table:
    """Merge folded rows to one stored row without hash per key that is not purged."""
    folded = columnar.concat(each.select(parts[0].column_names) for each in parts)
    merged = columnar.concat(merged_tables(folded, rules.table_columns, few=rules.few))
    lives = columnar.concat(current_tables(merged, rules.table_columns, rules.ends))
    if not lives["_cdc_key"].equals(merged["_cdc_key"]):
        indices = pc.index_in(lives["_cdc_key"], value_set=columnar.one_chunk(merged["_cdc_key"]))
        merged = merged.take(columnar.one_chunk(indices)).combine_chunks()
    rows = _dimension_rows(lives, merged, rules)
    if rules.purge_deleted_before is not None:
        ended_at = _number(lives["_ended_time"])
        stays = ~(columnar.mask(lives["_ended"]) & (ended_at < rules.purge_deleted_before))
        rows = rows.filter(pa.array(stays))
    return rows


def _dimension_rows(lives: pa.Table, merged: pa.Table, rules: UpdateRules) -> pa.Table:
    """Return lives as stored rows without hash. ``merged``: the folded rows of the same keys, in the same
    order."""
    gone, gone_at = columnar.one_chunk(lives["_ended"]), columnar.one_chunk(lives["_ended_time"])
    if rules.soft_delete_column is not None:
        mark = columnar.one_chunk(lives[rules.soft_delete_column])
        exact = pc.map_lookup(columnar.one_chunk(lives["_cdc_exact"]), rules.soft_delete_column, "first")
        marked = pc.or_(pc.is_valid(mark), pc.is_valid(exact))
        updated = columnar.one_chunk(lives["_cdc_updated_at"])
        marked_at = pc.coalesce(mark, updated) if pa.types.is_timestamp(mark.type) else updated
        gone_at = pc.if_else(gone, gone_at, pc.if_else(marked, marked_at, pa.scalar(None, gone_at.type)))
        gone = pc.or_(gone, marked)
    last = columnar.one_chunk(lives["_cdc_position"])
    values = {name: lives[name] for name in rules.schema.names if name in lives.column_names}
    values |= {
        "_cdc_epoch": pc.struct_field(last, 0),
        "_cdc_commit_lsn": pc.struct_field(last, 1),
        "_cdc_ordinal": pc.struct_field(last, 2),
        "_cdc_is_deleted": gone,
        "_cdc_deleted_at": gone_at,
        "_cdc_row_hash": pa.nulls(lives.num_rows, pa.int64()),
        STATE: state_column(merged, rules.schema),
    }
    return pa.table({name: values[name] for name in rules.schema.names})


def _to_refold(old: pa.Table, merging: pa.Table, rules: UpdateRules) -> pa.Array:
    keys = [pc.filter(columnar.one_chunk(old["_cdc_key"]), must_refold(old))]
    if rules.rows_may_be_purged and merging.num_rows:
        # A new life inherits nothing, so it does not need the purged row. What lies below it may be of a life
        # that a key change ended, and then another key depends on it.
        start = life_start_of(merging)
        needing = pc.or_(pc.is_null(start), pa.array(columnar.below(first_of(merging), start)))
        strange = pc.and_(pc.invert(keys_in(merging, old)), needing)
        keys.append(pc.filter(columnar.one_chunk(merging["_cdc_key"]), strange))
    return pc.unique(pa.chunked_array(keys))


def _reached(held: pa.Table, rules: UpdateRules) -> Mask:
    """Return the rows that new table ends may end, and deleted rows that are due to be purged."""
    reached = np.zeros(held.num_rows, np.bool_)
    if not held.num_rows:
        return reached
    ends = rules.new_ends
    if ends.last is not None:
        reached |= columnar.below(first_of(held), ends.last)
    if ends.last_ranged is not None:
        below = np.flatnonzero(~reached & columnar.below(first_of(held), ends.last_ranged))
        keys = held["_cdc_key"].take(pa.array(below)).to_pylist()
        reached[[row for row, key in zip(below, keys, strict=True) if ends.any_range_holds(key)]] = True
    if rules.purge_deleted_before is not None:
        reached |= columnar.mask(held["_cdc_is_deleted"]) & (
            _number(held["_cdc_deleted_at"]) < rules.purge_deleted_before
        )
    return reached


def keys_in(rows: pa.Table, others: pa.Table) -> pa.Array:
    """Return whether the key of each row is one of those of ``others``."""
    return pc.is_in(columnar.one_chunk(rows["_cdc_key"]), value_set=columnar.one_chunk(others["_cdc_key"]))


def _same(one: pa.Table, other: pa.Table) -> bool:
    # If rows differ, mostly their hashes do, so hashes are compared first.
    if not np.array_equal(np.sort(hashes_in(one)), np.sort(hashes_in(other))):
        return False
    first, second = (each.take(pc.sort_indices(each["_cdc_key"])).combine_chunks() for each in (one, other))
    return bool(first.equals(second))


def _number(column: pa.Array | pa.ChunkedArray) -> npt.NDArray[np.int64]:
    """Return times as microseconds since 1970; null is later than any time."""
    numbers = pc.fill_null(columnar.one_chunk(column).cast(pa.int64()), np.iinfo(np.int64).max)
    found: npt.NDArray[np.int64] = numbers.to_numpy()
    return found
