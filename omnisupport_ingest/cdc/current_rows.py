"""Compute the current state of each key from all its folded rows, in plain Python on Arrow batches.

The fold of one window cannot know the key's rows in other windows, nor the table ends. Here they come
together. Almost every row is touched by neither and is passed on unchanged, column by column.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from omnisupport_ingest.cdc import columnar
from omnisupport_ingest.cdc.event_fold import ENDED, KEY, TableColumns
from omnisupport_ingest.cdc.life import (
    Cell,
    Ending,
    Life,
    PositionTuple,
    just_below,
    latest,
    life_begins,
    merge,
)
from omnisupport_ingest.cdc.row_fold import FoldedRows, LifeRows, groups_of, lives_of
from omnisupport_ingest.cdc.table_ends import TableEnds
from omnisupport_ingest.contracts.model import PositionRange

EXISTENCE = "*"
"""Named among the unresolved columns if a quarantined delete leaves open whether the row exists."""

_OF_ROWS = pa.array(["c", "u", "r", "d"])


def current_groups(
    batches: Iterable[pa.RecordBatch], table_columns: TableColumns, ends: TableEnds
) -> Iterator[pa.RecordBatch]:
    """Return one row per key for its current life, and one per life that a key change ended.

    In: folded rows with a key (no table ends). Out: the columns of ``current.lives_type``. An ended life of
    which nothing is known for certain is left out.
    """
    table = columnar.one_table(batches)
    if table is not None:
        for lives in current_tables(table, table_columns, ends):
            yield from columnar.in_batches(lives)


def current_tables(table: pa.Table, table_columns: TableColumns, ends: TableEnds) -> Iterator[pa.Table]:
    """Return what ``current_groups`` makes of ``table``, in one or more parts; the first may be empty.

    ``table``: at least one row, in one chunk, every column nullable. If no row needs merging, nothing is
    copied. Rows that were folded from events with a former key are left out: windows that retention sealed
    keep them.
    """
    if table_columns.other_keys:
        table = _of_this_key(table, table_columns.other_keys)
    plain, rest = _split(table, ends)
    as_they_are = table if len(plain) == len(table) else table.take(pa.array(plain, pa.int64()))
    standing = _plain_rows(as_they_are, table_columns)
    yield standing
    if rest:
        folded = FoldedRows(
            table.take(pa.array([row for rows in rest for row in rows], pa.int64())), table_columns
        )
        lives = _Lives(folded, table_columns, ends)
        start = 0
        for members in rest:
            lives.add_key(range(start, start + len(members)))
            start += len(members)
        # Batches of one worker must have one schema, including the names inside lists and maps.
        yield lives.table().cast(standing.schema)


def _of_this_key(table: pa.Table, other_keys: Sequence[PositionRange]) -> pa.Table:
    # A life that a key change ended may have no event of its own.
    at = columnar.one_chunk(pc.coalesce(table["_cdc_position"], table["_cdc_ended_at"]))
    return table.filter(pa.array(~columnar.within(at, other_keys))).combine_chunks()


def _split(table: pa.Table, ends: TableEnds) -> tuple[np.ndarray, list[list[int]]]:
    """Return the rows that are already the current state of their key, and the other rows grouped by key.

    A row is its key's current state if all of this holds: it is the only row of the key, its last event is a
    row event, no key change or quarantined delete is open, and no table end that reaches it lies above its
    first event.
    """
    stands = pc.and_(
        pc.equal(table["_cdc_kind"], KEY), pc.is_in(table["_cdc_op"], value_set=_OF_ROWS)
    ).to_numpy(zero_copy_only=False)
    for name in ("_cdc_doubt", "_cdc_moved_from_key"):
        stands &= table[name].is_null().to_numpy()
    first = columnar.one_chunk(table["_cdc_first"])
    if ends.last is not None:
        stands &= ~columnar.below(first, ends.last)
    if ends.last_ranged is not None:
        below = np.flatnonzero(stands & columnar.below(first, ends.last_ranged))
        keys = table["_cdc_key"].take(pa.array(below)).to_pylist()
        stands[[row for row, key in zip(below, keys, strict=True) if ends.any_range_holds(key)]] = False
    numbers = columnar.one_chunk(table["_cdc_key"]).dictionary_encode().indices.to_numpy()
    stands &= np.bincount(numbers)[numbers] == 1
    others = np.flatnonzero(~stands)
    groups = groups_of(table.select(["_cdc_key"]).take(pa.array(others)), ("_cdc_key",))
    return np.flatnonzero(stands), [[int(others[row]) for row in members] for members in groups.values()]


def _plain_rows(table: pa.Table, table_columns: TableColumns) -> pa.Table:
    none = pa.nulls(table.num_rows)
    ended, ended_time = _endings(table)
    return pa.table(
        {
            **{name: table[name] for name in table_columns.names},
            **{name: table[name] for name in _LIFE_COLUMNS},
            "_ended": ended,
            "_ended_time": ended_time,
            "_cdc_unresolved": table["_cdc_unresolved"],
            "_cdc_exact": table["_cdc_exact"],
            "_open": none.cast(pa.list_(pa.string())),
            "_from_key": none.cast(pa.string()),
            "_from_at": _no_positions(table.num_rows),
        }
    )


def _endings(table: pa.Table) -> tuple[pa.BooleanArray, pa.Array]:
    """Return whether each row has ended, and when: at the first delete above its latest living event."""
    lists = columnar.one_chunk(table["_cdc_deletes"])
    counts = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
    row = np.repeat(np.arange(table.num_rows), counts)
    deletes = lists.flatten()
    alive = columnar.one_chunk(table["_cdc_alive"]).take(pa.array(row))
    above = columnar.below(alive, pc.struct_field(deletes, 0)) | alive.is_null().to_numpy(
        zero_copy_only=False
    )
    numbers = np.flatnonzero(above)
    first = np.full(table.num_rows, -1)
    # The deletes are in order; written backwards, the first one of each row stays.
    first[row[numbers[::-1]]] = numbers[::-1]
    times = pc.struct_field(deletes, 1).take(pa.array(first, mask=first < 0))
    return pa.array(first >= 0), times.cast(columnar.TIME)


_LIFE_COLUMNS = (
    "_cdc_kind",
    "_cdc_key",
    "_cdc_ended_at",
    "_cdc_op",
    "_cdc_position",
    "_cdc_source_ts",
    "_cdc_updated_at",
    "_cdc_batch_id",
    "_cdc_ingested_at",
)
"""Columns that folded rows and lives share."""

_OF_LIVES = (
    *_LIFE_COLUMNS,
    *("_ended", "_ended_time", "_cdc_unresolved", "_cdc_exact", "_open", "_from_key", "_from_at"),
)
"""The columns of lives beside those of the table."""


def _no_positions(count: int) -> pa.Array:
    return pa.nulls(count, columnar.POSITION)


@dataclass
class _Lives(LifeRows):
    """Builds the rows of lives as ``ends`` leave them."""

    ends: TableEnds
    ending: list[Ending | None] = field(default_factory=list, init=False)
    open_columns: list[list[str]] = field(default_factory=list, init=False)
    from_key: list[str | None] = field(default_factory=list, init=False)
    from_at: list[PositionTuple | None] = field(default_factory=list, init=False)

    def add_key(self, members: Sequence[int]) -> None:
        keyed, ended = lives_of(self.folded, members)
        ends = self.ends.reaching(self.folded.key[members[0]])
        if keyed:
            self._add(KEY, keyed, None, ends)
        for end in sorted(ended):
            if not self._hidden(keyed, ended[end], end):
                self._add(ENDED, ended[end], end, ends)

    def table(self) -> pa.Table:
        columns = {
            **self.columns(),
            "_ended": pa.array([ending is not None for ending in self.ending], pa.bool_()),
            "_ended_time": columnar.time_array(
                [None if ending is None else ending.at for ending in self.ending]
            ),
            "_open": columnar.text_lists(self.open_columns),
            "_from_key": pa.array(self.from_key, pa.string()),
            "_from_at": columnar.position_array(self.from_at),
        }
        return pa.table({name: columns[name] for name in (*self.table_columns.names, *_OF_LIVES)})

    def _hidden(self, keyed: Sequence[int], rows: Sequence[int], end: PositionTuple) -> bool:
        """Whether a window may hold events below ``end`` that its folded row does not show.

        If a window folded events of the old key from both sides of the end, it kept only the later ones.
        Nothing is known of the earlier ones then, so the columns stay unresolved. This happens only where
        commit times run against log order across a window's edge.

        Several rows of one window may show these events. They are treated as the one row that they become
        when the window is closed or made again, so the result does not depend on how the rows are split.
        """
        folded = self.folded
        windows = {folded.window[row] for row in rows if folded.kind[row] == ENDED}
        below, above = set(), set()
        for row in keyed:
            part = folded.parts[row]
            if part.first is not None and part.first < end:
                below.add(folded.window[row])
            if part.position is not None and part.position >= end:
                above.add(folded.window[row])
        return bool((below & above) - windows)

    def _add(
        self, kind: str, members: Sequence[int], ended_at: PositionTuple | None, ends: TableEnds
    ) -> None:
        folded = self.folded
        life = merge([folded.parts[row] for row in members], folded.rank)
        reaching = (each for each in ends.endings if _reaches(each.position, life, ended_at))
        endings = sorted([*life.deletes, *reaching])
        ending = next((each for each in endings if life.alive is None or each.position > life.alive), None)
        if kind == ENDED and ending is not None:
            return
        begins = life_begins(life.alive, _start(life), endings)
        doubted = _doubted(life, [each for each in ends.doubts if _reaches(each, life, ended_at)], ending)
        cells = {
            name: cell
            for name, cell in folded.cells(members, begins).items()
            if doubted is None or cell.position >= doubted
        }
        self.kind.append(kind)
        self.base.append(members[0])
        self.ended_at.append(ended_at)
        self.lives.append(life)
        self.ending.append(ending)
        self._add_cells(cells, members[0])
        if ending is None and doubted is not None and _in_doubt(life, begins, doubted):
            self.unresolved[-1].append(EXISTENCE)
        self._add_origin(life, begins, doubted)

    def _add_cells(self, cells: dict[str, Cell], row: int) -> None:
        unresolved, open_columns = [], []
        for name in self.table_columns.non_key:
            cell = cells.get(name)
            self.sources[name].append(None if cell is None else cell.row)
            if cell is None:
                open_columns.append(name)
            if cell is None or not cell.known:
                unresolved.append(name)
        self.unresolved.append(unresolved)
        self.open_columns.append(open_columns)
        self.exact.append(self.folded.exact(cells, row))

    def _add_origin(self, life: Life, begins: PositionTuple | None, doubted: PositionTuple | None) -> None:
        """Name the old key, but only if the life that the key change began is the current one."""
        start = _start(life)
        current = start is not None and begins is not None and start >= begins
        if start is None or not current or (doubted is not None and start <= doubted):
            self.from_key.append(None)
            self.from_at.append(None)
        else:
            old_key = life.start.moved_from if life.start is not None else None
            self.from_key.append(old_key)
            self.from_at.append(None if old_key is None else just_below(start))


def _in_doubt(life: Life, begins: PositionTuple | None, doubted: PositionTuple) -> bool:
    """Whether the quarantined delete at ``doubted`` leaves open if the row exists."""
    if life.vouching is not None and life.vouching.vouched == doubted:
        # The accepted event at this position comes after the delete (``event_fold.ORDER``).
        return False
    # A life that ended for certain settles the doubts below its end.
    existed_at = latest(life.known_to_exist, begins)
    return existed_at is None or doubted >= existed_at


def _doubted(life: Life, doubts: list[PositionTuple], ending: Ending | None) -> PositionTuple | None:
    """Return the latest of ``doubts`` and the life's own doubt that matters.

    A doubt above the end of a life that has ended does not matter: the life is not ended again.
    """
    if life.doubting is not None and life.doubting.doubt is not None:
        doubts.append(life.doubting.doubt)
    found = None
    for doubt in doubts:
        in_time = ending is None or doubt < ending.position
        if in_time or (life.alive is not None and doubt < life.alive):
            found = latest(found, doubt)
    return found


def _reaches(end: PositionTuple, life: Life, ended_at: PositionTuple | None) -> bool:
    """Whether a table end lies above the life's first event and below its end."""
    first = life.first.first
    return first is not None and end > first and (ended_at is None or end < ended_at)


def _start(life: Life) -> PositionTuple | None:
    return None if life.start is None else life.start.life_start
