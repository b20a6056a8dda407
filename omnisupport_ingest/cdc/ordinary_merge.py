"""Merge ordinary groups of folded rows by whole columns. A group is the rows of one key in one window.

A group is ordinary if its rows were folded from different events, among them no withheld delete and no key
change that left a column unsent, and no value is kept as exact text. Nearly all groups are. The others are
merged one by one by ``row_fold``, which defines what a merge means. Both give the same row for a group.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from omnisupport_ingest.cdc import columnar

Numbers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

_NONE = -1
"""The packed form of a null position; all packed positions are higher."""


@dataclass(frozen=True)
class Packing:
    """Packs positions into single integers that sort as positions do.

    ``lowest``: lowest value of each part, which is subtracted. ``shifts``: bits below epoch and commit LSN.
    """

    lowest: tuple[int, int, int]
    shifts: tuple[int, int]

    @classmethod
    def of(cls, columns: list[pa.StructArray]) -> Packing | None:
        """Return a packing for every position in ``columns``; None if 62 bits are too few."""
        lowest, highest = [], []
        for index in range(3):
            parts = [pc.min_max(pc.struct_field(column, index)) for column in columns if len(column)]
            lows = [each["min"].as_py() for each in parts if each["min"].is_valid]
            highs = [each["max"].as_py() for each in parts if each["max"].is_valid]
            lowest.append(min(lows, default=0))
            highest.append(max(highs, default=0))
        bits = [(high - low).bit_length() for low, high in zip(lowest, highest, strict=True)]
        if sum(bits) > 62:
            return None
        return cls((lowest[0], lowest[1], lowest[2]), (bits[1] + bits[2], bits[2]))

    def pack(self, column: pa.StructArray) -> Numbers:
        """Return the packed positions; ``_NONE`` where they are null."""
        parts = [
            pc.fill_null(pc.struct_field(column, index), low).to_numpy(zero_copy_only=False).astype(np.int64)
            - low
            for index, low in enumerate(self.lowest)
        ]
        packed: Numbers = (parts[0] << self.shifts[0]) | (parts[1] << self.shifts[1]) | parts[2]
        packed[column.is_null().to_numpy(zero_copy_only=False)] = _NONE
        return packed

    def unpack(self, packed: Numbers) -> pa.StructArray:
        """Return packed positions as a column of positions."""
        none = packed == _NONE
        held = np.where(none, 0, packed)
        parts = [
            held >> self.shifts[0],
            (held >> self.shifts[1]) & ((1 << (self.shifts[0] - self.shifts[1])) - 1),
            held & ((1 << self.shifts[1]) - 1),
        ]
        arrays = [
            pa.array(part + low, field.type)
            for part, low, field in zip(parts, self.lowest, columnar.POSITION, strict=True)
        ]
        return pa.StructArray.from_arrays(arrays, fields=list(columnar.POSITION), mask=pa.array(none))


def merge_ordinary(rows: pa.Table, plain: tuple[str, ...]) -> tuple[pa.Table | None, pa.Table]:
    """Merge the ordinary groups of ``rows``.

    Args:
        rows: folded rows of kind ``key``, at least one, in one chunk.
        plain: the non-key columns.

    Returns:
        The merged rows, or None; and the rows of the other groups.
    """
    at = {name: columnar.one_chunk(rows[f"_cdc_{name}"]) for name in _POSITIONS}
    deletes = columnar.one_chunk(rows["_cdc_deletes"])
    apart = columnar.one_chunk(rows["_cdc_column_positions"])
    packing = Packing.of([*at.values(), pc.struct_field(deletes.flatten(), 0), _items(apart)])
    if packing is None:
        return None, rows
    merge = _Merge(rows, plain, packing)
    ordinary = merge.ordinary
    if ordinary.all():
        return merge.table(), rows.slice(0, 0)
    kept = merge.of_groups(ordinary)
    rest = merge.of_groups(~ordinary)
    return (_Merge(kept, plain, packing).table() if kept.num_rows else None), rest


_POSITIONS = ("position", "first", "alive", "life_start", "vouched")


def _items(maps: pa.MapArray) -> pa.StructArray:
    return pc.struct_field(_entries(maps).flatten(), 1)


def _entries(maps: pa.MapArray) -> pa.ListArray:
    """Return a column of maps as lists of (name, value) pairs; a null map is an empty list."""
    pairs = pa.StructArray.from_arrays([maps.keys, maps.items], names=["name", "position"])
    return pa.ListArray.from_arrays(maps.offsets, pairs)


class _Merge:
    """Folded rows sorted by group and position, and which row wins in each group."""

    def __init__(self, rows: pa.Table, plain: tuple[str, ...], packing: Packing) -> None:
        codes = [columnar.one_chunk(rows[name]).dictionary_encode() for name in ("window", "_cdc_key")]
        window, key = (pc.fill_null(each.indices, -1).to_numpy(zero_copy_only=False) for each in codes)
        position = packing.pack(columnar.one_chunk(rows["_cdc_position"]))
        order = np.lexsort((position, key, window))
        self._rows = rows.take(pa.array(order)).combine_chunks()
        self._plain, self._packing = plain, packing
        window, key = window[order], key[order]
        begins = np.concatenate([[True], (window[1:] != window[:-1]) | (key[1:] != key[:-1])])
        self._first_row = np.flatnonzero(begins)
        self._group = np.cumsum(begins) - 1
        self._at = {name: packing.pack(self._column(f"_cdc_{name}")) for name in _POSITIONS}

    def _column(self, name: str) -> pa.Array:
        return columnar.one_chunk(self._rows[name])

    def of_groups(self, chosen: Mask) -> pa.Table:
        return self._rows.filter(pa.array(chosen[self._group])).combine_chunks()

    @cached_property
    def ordinary(self) -> Mask:
        """Which groups are ordinary."""
        odd = np.zeros(len(self._group), np.bool_)
        for name in ("position", "alive"):
            at = self._at[name]
            order = np.lexsort((at, self._group))
            same = (at[order][1:] == at[order][:-1]) & (self._group[order][1:] == self._group[order][:-1])
            odd[order[1:][same & (at[order][1:] != _NONE)]] = True
        odd |= self._at["position"] == _NONE
        for name in ("_cdc_doubt", "_cdc_moved_from_key", "_cdc_ended_at"):
            odd |= self._column(name).is_valid().to_numpy(zero_copy_only=False)
        exact = pc.fill_null(pc.list_value_length(_entries(self._column("_cdc_exact"))), 0)
        odd |= exact.to_numpy(zero_copy_only=False) > 0
        found: Mask = np.bincount(self._group[odd], minlength=len(self._first_row)) == 0
        return found

    def _argmax(self, name: str) -> Numbers:
        """Return the row of each group with the highest position ``name``; -1 where all are null."""
        at = self._at[name]
        order = np.lexsort((at, self._group))
        ends = np.append(self._first_row[1:], len(order)) - 1
        row = order[ends]
        return np.where(at[row] == _NONE, -1, row)

    @cached_property
    def _alive(self) -> Numbers:
        return np.maximum.reduceat(self._at["alive"], self._first_row)

    @cached_property
    def _kept_deletes(self) -> tuple[Numbers, pa.StructArray]:
        """Return the number of deletes of each group that may matter, and these in order
        (``life.deletes_that_matter``)."""
        lists = self._column("_cdc_deletes")
        items = lists.flatten()
        counts = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
        group = np.repeat(self._group, counts)
        at = self._packing.pack(pc.struct_field(items, 0))
        times = pc.struct_field(items, 1).cast(pa.int64()).to_numpy(zero_copy_only=False)
        order = np.lexsort((times, at, group))
        group, at, times = group[order], at[order], times[order]
        again = np.zeros(len(at), np.bool_)
        again[1:] = (group[1:] == group[:-1]) & (at[1:] == at[:-1]) & (times[1:] == times[:-1])
        alive = self._alive[group]
        above = at > alive
        # The last delete that is not above.
        next_above = np.ones(len(at), np.bool_)
        next_above[:-1] = above[1:] | (group[1:] != group[:-1])
        chosen = ~again & (above | (next_above & ~above))
        if again.any():
            chosen = self._chosen_once(group, above, again)
        kept = np.bincount(group[chosen], minlength=len(self._first_row))
        return kept, items.take(pa.array(order[chosen]))

    @staticmethod
    def _chosen_once(group: Numbers, above: Mask, again: Mask) -> Mask:
        numbers = np.flatnonzero(~again)
        group, above = group[numbers], above[numbers]
        last = np.ones(len(numbers), np.bool_)
        last[:-1] = above[1:] | (group[1:] != group[:-1])
        chosen = np.zeros(len(again), np.bool_)
        chosen[numbers[above | (last & ~above)]] = True
        return chosen

    @cached_property
    def _begins(self) -> Numbers:
        """Return the lowest position that can belong to the life of each group (``life.life_begins``)."""
        start = np.maximum.reduceat(self._at["life_start"], self._first_row)
        counts, kept = self._kept_deletes
        at = self._packing.pack(pc.struct_field(kept, 0))
        group = np.repeat(np.arange(len(counts)), counts)
        below = at <= self._alive[group]
        begins = start.copy()
        np.maximum.at(begins, group[below], at[below])
        return begins

    @cached_property
    def _cells(self) -> tuple[dict[str, Numbers], dict[str, Numbers], dict[str, Mask]]:
        """Return by non-key column for each group: the row to take it from, its position, and whether it is
        known."""
        living = self._argmax("alive")
        missing, apart = self._by_name("_cdc_unresolved"), self._by_name("_cdc_column_positions")
        rows, positions, known = {}, {}, {}
        for name in self._plain:
            if name not in missing and name not in apart:
                rows[name], positions[name] = living, self._alive
                known[name] = living >= 0
                continue
            at = self._at["alive"].copy()
            is_known = np.ones(len(at), np.bool_)
            if name in missing:
                at[missing[name][0]] = _NONE
                is_known[missing[name][0]] = False
            if name in apart:
                at[apart[name][0]] = apart[name][1]
            order = np.lexsort((is_known, at, self._group))
            ends = np.append(self._first_row[1:], len(order)) - 1
            row = order[ends]
            found = (at[row] != _NONE) & (at[row] >= self._begins)
            rows[name] = np.where(found, row, -1)
            positions[name] = np.where(found, at[row], _NONE)
            known[name] = found & is_known[row]
        return rows, positions, known

    def _by_name(self, column: str) -> dict[str, tuple[Numbers, Numbers]]:
        """Return by name in a column of lists or maps: the rows that have it, and for a map its positions."""
        held = self._column(column)
        lists = _entries(held) if pa.types.is_map(held.type) else held
        counts = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
        row = np.repeat(np.arange(len(counts)), counts)
        items = lists.flatten()
        if not len(items):
            return {}
        names = pc.struct_field(items, 0) if pa.types.is_map(held.type) else items
        at = self._packing.pack(pc.struct_field(items, 1)) if pa.types.is_map(held.type) else row
        codes = names.dictionary_encode()
        numbers = codes.indices.to_numpy(zero_copy_only=False)
        return {
            name: (row[numbers == number], at[numbers == number])
            for number, name in enumerate(codes.dictionary.to_pylist())
        }

    def table(self) -> pa.Table:
        """Return one row per group, in the columns of the input; the hash of a merged row is null."""
        ends = np.append(self._first_row[1:], len(self._group)) - 1
        living, start, vouching = (self._argmax(name) for name in ("alive", "life_start", "vouched"))
        lowest = np.minimum.reduceat(
            np.where(self._at["first"] == _NONE, np.iinfo(np.int64).max, self._at["first"]), self._first_row
        )
        rows, positions, known = self._cells
        counts, kept = self._kept_deletes
        count = len(self._first_row)
        made = {
            **{name: self._take(name, rows[name]) for name in self._plain},
            **{f"_cdc_{name}": self._take(f"_cdc_{name}", ends) for name in _OF_LAST},
            "_cdc_first": self._packing.unpack(np.where(lowest == np.iinfo(np.int64).max, _NONE, lowest)),
            "_cdc_alive": self._take("_cdc_alive", living),
            "_cdc_updated_at": self._take("_cdc_updated_at", living),
            "_cdc_life_start": self._take("_cdc_life_start", start),
            "_cdc_vouched": self._take("_cdc_vouched", vouching),
            "_cdc_deletes": pa.ListArray.from_arrays(columnar.offsets(counts), kept),
            "_cdc_column_positions": self._positions(positions, known),
            "_cdc_unresolved": self._unresolved(known),
            "_cdc_exact": columnar.text_maps([()] * count),
            "_cdc_row_hash": pa.nulls(count, pa.int64()),
        }
        schema = self._rows.schema
        columns = {name: made.get(name) for name in schema.names}
        first = {name: self._take(name, self._first_row) for name, held in columns.items() if held is None}
        return pa.table({name: first.get(name, columns[name]) for name in schema.names}).cast(schema)

    def _take(self, name: str, rows: Numbers) -> pa.Array:
        return self._column(name).take(pa.array(rows, mask=rows < 0))

    def _positions(self, positions: dict[str, Numbers], known: dict[str, Mask]) -> pa.MapArray:
        size = (len(self._first_row), len(self._plain))
        apart = np.zeros(size, np.bool_)
        at = np.full(size, _NONE, np.int64)
        for index, name in enumerate(self._plain):
            at[:, index] = positions[name]
            apart[:, index] = (positions[name] != _NONE) & (~known[name] | (positions[name] != self._alive))
        names = pa.array(self._plain, pa.string()).take(pa.array(np.nonzero(apart)[1]))
        return pa.MapArray.from_arrays(
            columnar.offsets(apart.sum(axis=1)), names, self._packing.unpack(at[apart])
        )

    def _unresolved(self, known: dict[str, Mask]) -> pa.ListArray:
        missing = np.zeros((len(self._first_row), len(self._plain)), np.bool_)
        for index, name in enumerate(self._plain):
            missing[:, index] = ~known[name]
        names = pa.array(self._plain, pa.string()).take(pa.array(np.nonzero(missing)[1]))
        return pa.ListArray.from_arrays(columnar.offsets(missing.sum(axis=1)), names)


_OF_LAST = ("op", "position", "source_ts", "batch_id", "ingested_at")
"""Columns that the last event of a key decides."""
