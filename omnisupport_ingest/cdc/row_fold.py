"""Merge folded rows of one group (window and key) to one, in plain Python on Arrow batches.

Spark's workers run it (``fold.merge_rows``), and ``updating`` uses it to merge net changes into a dimension.
Values are not looked at: positions decide whose value wins, and the columns are then copied from the winners'
rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from omnisupport_ingest.cdc import columnar
from omnisupport_ingest.cdc.event_fold import ENDED, KEY, ORDER, TableColumns
from omnisupport_ingest.cdc.life import Cell, Life, Part, PositionTuple, merge, winner
from omnisupport_ingest.cdc.ordinary import FEW
from omnisupport_ingest.cdc.ordinary_merge import merge_ordinary

_RANK = ("_cdc_op", "_cdc_source_ts", "_cdc_batch_id", "_cdc_ingested_at")


def merge_groups(
    batches: Iterable[pa.RecordBatch], table_columns: TableColumns, *, few: int = FEW
) -> Iterator[pa.RecordBatch]:
    """Merge folded rows to one per window, kind, key and end.

    A life that a key change ended also takes in what other rows of that key hold below its end. In and out:
    the columns of ``folded.folded_type``; the hash of a merged row is null. ``few``: at most so many rows are
    merged group by group.
    """
    table = columnar.one_table(batches)
    if table is not None:
        for merged in merged_tables(table, table_columns, few=few):
            yield from columnar.in_batches(merged)


def merged_tables(table: pa.Table, table_columns: TableColumns, *, few: int = FEW) -> Iterator[pa.Table]:
    """Return what ``merge_groups`` makes of ``table``, in one or more parts, which may be empty.

    ``table``: at least one row, in one chunk, every column nullable. If all or nearly all rows are alone in
    their group, as in a first snapshot, they are not copied.
    """
    if table.num_rows > few:
        single, several, others = _divide(table)
        yield single
        if several.num_rows:
            done, several = merge_ordinary(several, table_columns.non_key)
            if done is not None:
                yield done
        table = columnar.concat([several, others])
    if table.num_rows:
        yield from _merged_by_group(table, table_columns)


def _divide(table: pa.Table) -> tuple[pa.Table, pa.Table, pa.Table]:
    """Divide the rows in three: rows alone in their group, other rows of such keys, rows of all other keys.

    The first two exclude keys whose life a key change ended.
    """
    keyed = pc.and_(pc.equal(table["_cdc_kind"], KEY), pc.is_valid(table["_cdc_key"]))
    tied = pc.unique(table["_cdc_key"].filter(pc.invert(keyed)).drop_null())
    mine = pc.and_(keyed, pc.invert(pc.is_in(table["_cdc_key"], value_set=tied)))
    rows, others = columnar.split_rows(table, mine.to_numpy())
    if not rows.num_rows:
        return rows, rows, others
    window, key = (
        columnar.one_chunk(rows[name]).dictionary_encode().indices.to_numpy().astype(np.int64)
        for name in ("window", "_cdc_key")
    )
    _, group, counts = np.unique(window * (int(key.max()) + 1) + key, return_inverse=True, return_counts=True)
    return *columnar.split_rows(rows, counts[group] == 1), others


def _merged_by_group(table: pa.Table, table_columns: TableColumns) -> Iterator[pa.Table]:
    groups = groups_of(table, ("window", "_cdc_key"))
    alone = [members[0] for members in groups.values() if len(members) == 1]
    together = [members for (_, key), members in groups.items() if len(members) > 1 and key is not None]
    keyless = _distinct_table_ends(table, groups)
    yield table.take(pa.array(sorted(alone + keyless), pa.int64()))
    if together:
        yield _merged(table, together, table_columns)


def groups_of(table: pa.Table, by: Sequence[str]) -> dict[tuple[str | None, ...], list[int]]:
    """Return the numbers of rows by their values in the columns ``by``."""
    found: dict[tuple[str | None, ...], list[int]] = defaultdict(list)
    for row, values in enumerate(zip(*(table[name].to_pylist() for name in by), strict=True)):
        found[values].append(row)
    return found


def _distinct_table_ends(table: pa.Table, groups: dict[tuple[str | None, ...], list[int]]) -> list[int]:
    """Return one row per truncate or snapshot end, from the groups with more than one row."""
    members = [row for (_, key), rows in groups.items() if key is None and len(rows) > 1 for row in rows]
    if not members:
        return []
    rows = table.take(pa.array(members, pa.int64()))
    windows, positions = rows["window"].to_pylist(), columnar.positions(rows["_cdc_position"])
    doubtful = [doubt is not None for doubt in columnar.positions(rows["_cdc_doubt"])]
    accepted = {
        (window, at) for window, at, doubt in zip(windows, positions, doubtful, strict=True) if not doubt
    }
    chosen: dict[object, int] = {}
    kinds, key_ranges = rows["_cdc_kind"].to_pylist(), rows["_cdc_scope"].to_pylist()
    for row, window, kind, position, key_range, doubt in zip(
        members, windows, kinds, positions, key_ranges, doubtful, strict=True
    ):
        # An accepted end voids a quarantined one at its position.
        if not doubt or (window, position) not in accepted:
            chosen[window, kind, position, key_range, doubt] = row
    return [*chosen.values()]


class FoldedRows:
    """Folded rows of several keys, their state as plain Python values."""

    def __init__(self, table: pa.Table, table_columns: TableColumns) -> None:
        self.table = table
        self._table_columns = table_columns
        self.kind: list[str] = table["_cdc_kind"].to_pylist()
        self.key: list[str] = table["_cdc_key"].to_pylist()
        self.window: list[str] = table["window"].to_pylist()
        self.ended_at = columnar.positions(table["_cdc_ended_at"])
        self._exact: list[list[tuple[str, str]] | None] = table["_cdc_exact"].to_pylist()
        self._unresolved = [frozenset(names or ()) for names in table["_cdc_unresolved"].to_pylist()]
        self._apart = [
            {name: tuple(at.values()) for name, at in (pairs or ())}
            for pairs in table["_cdc_column_positions"].to_pylist()
        ]
        self.parts = [
            Part(row, *facts)
            for row, facts in enumerate(
                zip(
                    columnar.positions(table["_cdc_position"]),
                    columnar.positions(table["_cdc_first"]),
                    columnar.positions(table["_cdc_alive"]),
                    columnar.positions(table["_cdc_life_start"]),
                    table["_cdc_moved_from_key"].to_pylist(),
                    columnar.endings(table["_cdc_deletes"]),
                    columnar.positions(table["_cdc_doubt"]),
                    columnar.positions(table["_cdc_vouched"]),
                    strict=True,
                )
            )
        ]

    def rank(self, row: int) -> tuple[object, ...]:
        """Return the rank of a row as ``event_fold.Events.rank``, from what it still has of its last
        event."""
        op, *others = (self.table[name][row].as_py() for name in _RANK)
        return (ORDER.get(op, len(ORDER)), *others)

    def cell(self, name: str, row: int) -> Cell | None:
        """Return the cell of a row for a column; None where no event carried it."""
        apart, known = self._apart[row].get(name), name not in self._unresolved[row]
        position = apart if apart is not None else (self.parts[row].alive if known else None)
        return None if position is None else Cell(position, known, row)

    def cells(self, members: Sequence[int], begins: PositionTuple | None) -> dict[str, Cell]:
        """Return the latest cell of each column among ``members``, of the life that begins at ``begins``."""
        found = {}
        for name in self._table_columns.non_key:
            best = winner((cell for row in members if (cell := self.cell(name, row)) is not None), begins)
            if best is not None:
                found[name] = best
        return found

    def exact(self, cells: dict[str, Cell], row: int) -> list[tuple[str, str]]:
        """Return the exact texts of ``cells`` and of the key of ``row`` that their types could not hold."""
        texts = [pair for pair in self._exact[row] or () if pair[0] in self._table_columns.key]
        for name, cell in cells.items():
            held = self._exact[cell.row]
            if held and cell.known:
                texts += [pair for pair in held if pair[0] == name]
        return texts


def _merged(table: pa.Table, together: Sequence[Sequence[int]], table_columns: TableColumns) -> pa.Table:
    folded = FoldedRows(
        table.take(pa.array([row for rows in together for row in rows], pa.int64())), table_columns
    )
    rows = _Merged(folded, table_columns)
    start = 0
    for members in together:
        _merge_key(folded, range(start, start + len(members)), rows)
        start += len(members)
    return rows.table(table.schema)


def _merge_key(folded: FoldedRows, members: Sequence[int], rows: _Merged) -> None:
    keyed, ends = lives_of(folded, members)
    if keyed:
        rows.add(KEY, keyed)
    for end in sorted(ends):
        rows.add(ENDED, ends[end])


def lives_of(folded: FoldedRows, members: Sequence[int]) -> tuple[list[int], dict[PositionTuple, list[int]]]:
    """Return the rows of one key's current life, and by end the rows of each life that a key change ended.

    What other rows of the key hold below an end belongs to the ended life too.
    """
    keyed = [row for row in members if folded.kind[row] == KEY]
    ends: dict[PositionTuple, list[int]] = defaultdict(list)
    for row in members:
        end = folded.ended_at[row]
        if folded.kind[row] == ENDED and end is not None:
            ends[end].append(row)
    for end, rows in ends.items():
        for row in keyed:
            position = folded.parts[row].position
            if position is not None and position < end:
                rows.append(row)
    return keyed, ends


@dataclass
class LifeRows:
    """Builds rows of lives: for each its life, and for each column the row to copy it from."""

    folded: FoldedRows
    table_columns: TableColumns
    kind: list[str] = field(default_factory=list, init=False)
    base: list[int] = field(default_factory=list, init=False)
    ended_at: list[PositionTuple | None] = field(default_factory=list, init=False)
    lives: list[Life] = field(default_factory=list, init=False)
    sources: dict[str, list[int | None]] = field(init=False)
    unresolved: list[list[str]] = field(default_factory=list, init=False)
    exact: list[list[tuple[str, str]]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.sources = {name: [] for name in self.table_columns.non_key}

    def columns(self) -> dict[str, pa.Array]:
        """The columns of the table, and those that say when a life was and what is not known of it."""
        source = self.folded.table
        last = [life.last.row for life in self.lives]
        return {
            **{name: columnar.take(source[name], self.base) for name in self.table_columns.key},
            **{name: columnar.take(source[name], rows) for name, rows in self.sources.items()},
            "_cdc_kind": pa.array(self.kind, pa.string()),
            "_cdc_key": columnar.take(source["_cdc_key"], self.base),
            "_cdc_ended_at": columnar.position_array(self.ended_at),
            **{
                name: columnar.take(source[name], last)
                for name in (
                    "_cdc_op",
                    "_cdc_position",
                    "_cdc_source_ts",
                    "_cdc_batch_id",
                    "_cdc_ingested_at",
                )
            },
            "_cdc_updated_at": columnar.take(
                source["_cdc_updated_at"], [_row(life.living) for life in self.lives]
            ),
            "_cdc_unresolved": columnar.text_lists(self.unresolved),
            "_cdc_exact": columnar.text_maps(self.exact),
        }


@dataclass
class _Merged(LifeRows):
    """Builds merged rows."""

    column_positions: list[list[tuple[str, PositionTuple]]] = field(default_factory=list, init=False)

    def add(self, kind: str, members: Sequence[int]) -> None:
        """Merge ``members`` to one row of ``kind``; the columns of the group itself are those of the first
        member."""
        folded = self.folded
        life = merge([folded.parts[row] for row in members], folded.rank)
        cells = folded.cells(members, life.begins)
        self.kind.append(kind)
        self.base.append(members[0])
        self.ended_at.append(folded.ended_at[members[0]])
        self.lives.append(life)
        apart, unknown = [], []
        for name in self.table_columns.non_key:
            cell = cells.get(name)
            self.sources[name].append(None if cell is None else cell.row)
            if cell is None or not cell.known:
                unknown.append(name)
            if cell is not None and (not cell.known or cell.position != life.alive):
                apart.append((name, cell.position))
        self.column_positions.append(apart)
        self.unresolved.append(unknown)
        self.exact.append(folded.exact(cells, members[0]))

    def table(self, schema: pa.Schema) -> pa.Table:
        source = self.folded.table
        start = [_row(life.start) for life in self.lives]
        columns = {
            "window": columnar.take(source["window"], self.base),
            **self.columns(),
            "_cdc_first": columnar.take(source["_cdc_first"], [life.first.row for life in self.lives]),
            "_cdc_alive": columnar.take(source["_cdc_alive"], [_row(life.living) for life in self.lives]),
            "_cdc_life_start": columnar.take(source["_cdc_life_start"], start),
            "_cdc_moved_from_key": columnar.take(source["_cdc_moved_from_key"], start),
            "_cdc_deletes": columnar.ending_lists([life.deletes for life in self.lives]),
            "_cdc_doubt": columnar.take(source["_cdc_doubt"], [_row(life.doubting) for life in self.lives]),
            "_cdc_vouched": columnar.take(
                source["_cdc_vouched"], [_row(life.vouching) for life in self.lives]
            ),
            "_cdc_scope": pa.nulls(len(self.kind), pa.string()),
            "_cdc_column_positions": columnar.position_maps(self.column_positions),
            "_cdc_row_hash": pa.nulls(len(self.kind), pa.int64()),
        }
        # Batches of one worker must have one schema, including the names inside lists and maps.
        return pa.table({name: columns[name] for name in schema.names}).cast(schema)


def _row(part: Part | None) -> int | None:
    return None if part is None else part.row
