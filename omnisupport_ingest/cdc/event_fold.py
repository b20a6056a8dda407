"""Fold events to one row per window and key, in plain Python on Arrow batches.

Spark's workers run it (``fold.fold_events``). A worker gets whole groups (window and key), in any order.
Ordinary groups are folded by whole columns (``ordinary_fold``); this module folds the others one by one and
defines what a fold means.

Only images that decide a column are parsed: a key's events are read from the newest down until every column
is decided.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pyarrow as pa

from omnisupport_ingest.cdc import columnar
from omnisupport_ingest.cdc.images import read_image, with_unsent
from omnisupport_ingest.cdc.key_changes import OLD_KEY_ENDED
from omnisupport_ingest.cdc.life import Ending, Life, Part, PositionTuple, just_below, merge
from omnisupport_ingest.cdc.ordinary import FEW, Taken
from omnisupport_ingest.cdc.ordinary_fold import Defaults, fold_ordinary
from omnisupport_ingest.contracts.model import PositionRange

KEY, ENDED, TRUNCATE, SNAPSHOT_END = "key", "ended", "truncate", "boundary"
"""Kinds of folded rows (``fold`` describes them)."""

ORDER = {op: number for number, op in enumerate("tbdcru")}
"""Order of operations at one position, where events differ in their identity: a delete comes before the
creation. (A log without an order inside one LSN has both halves of a key change at one position.)"""

_LIVING = frozenset("cur")
_STARTS = frozenset("cr")


@dataclass(frozen=True)
class TableColumns:
    """The columns of a table that the fold needs.

    Attributes:
        names: all columns, in the contract's order.
        key: the key's columns, in the key's order.
        defaults: by column that was added later, the text that older rows have in it.
        other_keys: where events have another key. They are not of rows that this key names, so neither they
            nor what was folded from them counts.
    """

    names: tuple[str, ...]
    key: tuple[str, ...]
    defaults: Defaults = ()
    other_keys: tuple[PositionRange, ...] = ()

    @cached_property
    def non_key(self) -> tuple[str, ...]:
        """The columns that are not in the key."""
        return tuple(name for name in self.names if name not in self.key)

    @cached_property
    def non_key_set(self) -> frozenset[str]:
        return frozenset(self.non_key)


@dataclass(slots=True)
class Cells:
    """What a folded row knows of its non-key columns.

    Attributes:
        image: the known values.
        apart: columns that the latest living event did not decide, each with its deciding position.
        unresolved: columns without a known value.
    """

    image: Mapping[str, Any]
    apart: Sequence[tuple[str, PositionTuple]] = ()
    unresolved: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class FoldedRow:
    """One row of the fold of a window, before it becomes columns (``folded``).

    Attributes:
        kind: ``KEY``, ``ENDED``, ``TRUNCATE`` or ``SNAPSHOT_END``.
        key: the key's text; None for table ends.
        ended_at: where a key change ended the life, if ``kind`` is ``ENDED``.
        life: None if no event of the ended life is known.
        key_range: the keys that a snapshot end ends; None: the whole table.
    """

    window: str
    kind: str
    key: str | None
    ended_at: PositionTuple | None
    life: Life | None
    cells: Cells
    key_range: str | None = None


def fold_groups(
    batches: Iterable[pa.RecordBatch],
    table_columns: TableColumns,
    *,
    few: int = FEW,
    taken: Taken | None = None,
) -> Iterator[pa.RecordBatch]:
    """Fold the events in ``batches``.

    Args:
        batches: the columns of ``fold.to_fold``, without withheld events that an accepted one voids.
        few: at most so many events are folded group by group.
        taken: counter to which the events are added that were folded group by group.

    Returns:
        One row per window and key, and per life that a key change ended: the columns of
            ``folded.folded_type`` without the row hash, the contract's columns as text.
    """
    table = columnar.one_table(batches)
    if table is None:
        return
    if table.num_rows > few:
        ordinary, table = fold_ordinary(table, table_columns.names, table_columns.key, table_columns.defaults)
        if ordinary is not None:
            yield from columnar.in_batches(ordinary)
    if table.num_rows:
        if taken is not None:
            taken.exactly += table.num_rows
        yield from columnar.in_batches(_folded_by_group(table, table_columns))


def _folded_by_group(table: pa.Table, table_columns: TableColumns) -> pa.Table:
    events = Events(table, table_columns.defaults)
    rows: list[FoldedRow] = []
    for (window, key), members in events.groups().items():
        if key is None:
            _add_table_ends(events, window, members, rows)
        else:
            _add_key(events, window, key, members, rows, table_columns)
    return _folded_table(rows, table, table_columns)


class Events:
    """A table of events: the columns that the fold of every event reads, as lists; the others on demand."""

    def __init__(self, table: pa.Table, defaults: Defaults = ()) -> None:
        self._defaults = defaults
        self.op: list[str] = table["op"].to_pylist()
        self.position: list[PositionTuple] = list(
            zip(
                table["epoch"].to_pylist(),
                table["commit_lsn"].to_pylist(),
                table["ordinal"].to_pylist(),
                strict=True,
            )
        )
        self.withheld: list[bool] = table["withheld"].to_pylist()
        self.moved_from: list[str | None] = table["moved_from_key"].to_pylist()
        self.at: list[int] = columnar.micros(table["source_ts"])  # type: ignore[assignment]
        self._window: list[str] = table["window"].to_pylist()
        self._key: list[str | None] = table["key"].to_pylist()
        self._table = table
        self._after = columnar.one_chunk(table["after"])
        self._before = columnar.one_chunk(table["before"])
        self._unchanged = columnar.one_chunk(table["unchanged"])

    def groups(self) -> dict[tuple[str, str | None], list[int]]:
        """Return the numbers of the events by window and key."""
        found: dict[tuple[str, str | None], list[int]] = defaultdict(list)
        for row, group in enumerate(zip(self._window, self._key, strict=True)):
            found[group].append(row)
        return found

    def after(self, row: int) -> str | None:
        text: str | None = self._after[row].as_py()
        return text

    def carried(self, row: int) -> Mapping[str, Any]:
        """Return the columns that the event carried; none if its image cannot be read.

        An event that begins a life without a column, because the table had no such column, carries the
        column's default.
        """
        image = read_image(self.after(row))
        unsent = self._unchanged[row].as_py()
        carried = with_unsent(image or {}, unsent, self._before[row].as_py())
        if image is None or not self._defaults or self.op[row] not in _STARTS:
            return carried
        return {name: text for name, text in self._defaults if name not in (unsent or ())} | dict(carried)

    def rank(self, row: int) -> tuple[Any, ...]:
        """Return what orders events of one position: operation, then content, last the batch that brought
        it."""
        table = self._table
        return (
            ORDER.get(self.op[row], len(ORDER)),
            not self.withheld[row],
            self.at[row],
            self.after(row) or "",
            table["batch_id"][row].as_py(),
        )


def _add_table_ends(events: Events, window: str, members: Sequence[int], rows: list[FoldedRow]) -> None:
    """Add each truncate and snapshot end once. A quarantined one leaves doubt about the lives it would end.

    The ``after`` of a snapshot end is its key range, None if it ends the whole table.
    """
    kinds = {"t": TRUNCATE, "b": SNAPSHOT_END}
    chosen: dict[tuple[str, PositionTuple, str | None], int] = {}
    for row in members:
        if events.op[row] in kinds:
            kind = kinds[events.op[row]]
            identity = (kind, events.position[row], events.after(row) if kind == SNAPSHOT_END else None)
            if identity not in chosen or events.rank(row) > events.rank(chosen[identity]):
                chosen[identity] = row
    for (kind, position, key_range), row in chosen.items():
        part = Part(row, position, position, doubt=position if events.withheld[row] else None)
        rows.append(FoldedRow(window, kind, None, None, merge([part], events.rank), Cells({}), key_range))


def _add_key(
    events: Events,
    window: str,
    key: str,
    members: Sequence[int],
    rows: list[FoldedRow],
    table_columns: TableColumns,
) -> None:
    """Add the row of one key, and one row per life of it that a key change ended."""
    ends: set[PositionTuple] = set()
    if len(members) > 1 or events.op[members[0]] == OLD_KEY_ENDED:
        for row in members:
            # A complete image never takes a column from the old key.
            if events.op[row] == OLD_KEY_ENDED and not _complete(events, row, table_columns):
                ends.add(just_below(events.position[row]))
        members = [row for row in members if events.op[row] != OLD_KEY_ENDED]
    if members:
        rows.append(FoldedRow(window, KEY, key, None, *_fold(events, members, table_columns)))
    for end in sorted(ends):
        below = [row for row in members if events.position[row] < end]
        if below:
            rows.append(FoldedRow(window, ENDED, key, end, *_fold(events, below, table_columns)))
        else:
            # Written without events too, so that the result does not depend on what arrived first.
            rows.append(FoldedRow(window, ENDED, key, end, None, Cells({}, (), table_columns.non_key)))


def _complete(events: Events, row: int, table_columns: TableColumns) -> bool:
    """Whether the event carries every non-key column."""
    return events.carried(row).keys() >= table_columns.non_key_set


def _fold(events: Events, members: Sequence[int], table_columns: TableColumns) -> tuple[Life, Cells]:
    life = merge([_part(events, row, table_columns) for row in members], events.rank)
    return life, _cells(events, members, life, table_columns)


def _cells(events: Events, members: Sequence[int], life: Life, table_columns: TableColumns) -> Cells:
    if life.living is None:
        return Cells({}, (), table_columns.non_key)
    newest = life.living.row
    if not events.withheld[newest]:
        image = events.carried(newest)
        if image.keys() >= table_columns.non_key_set:
            return Cells(image)
    living = [row for row in members if events.op[row] in _LIVING]
    living.sort(key=lambda row: (events.position[row], not events.withheld[row]), reverse=True)
    open_columns = dict.fromkeys(table_columns.non_key)
    known: dict[str, Any] = {}
    apart, alive = [], life.alive
    for row in living:
        position, withheld = events.position[row], events.withheld[row]
        if not open_columns or (life.begins is not None and position < life.begins):
            break
        carried = events.carried(row)
        for name in [name for name in open_columns if name in carried]:
            del open_columns[name]
            if not withheld:
                known[name] = carried[name]
            if withheld or position != alive:
                apart.append((name, position))
    return Cells(known, apart, [name for name in table_columns.non_key if name not in known])


def _part(events: Events, row: int, table_columns: TableColumns) -> Part:
    op, position, withheld = events.op[row], events.position[row], events.withheld[row]
    if op == "d":
        if withheld:
            return Part(row, position, position, doubt=position)
        return Part(row, position, position, deletes=(Ending(position, events.at[row]),))
    moved_from = events.moved_from[row]
    if moved_from is not None and (withheld or op not in _STARTS or _complete(events, row, table_columns)):
        moved_from = None
    return Part(
        row,
        position,
        position,
        alive=position,
        life_start=position if op in _STARTS else None,
        moved_from=moved_from,
        vouched=None if withheld else position,
    )


def _folded_table(rows: Sequence[FoldedRow], events: pa.Table, table_columns: TableColumns) -> pa.Table:
    """Return ``rows`` as a table; their lives and cells name rows of ``events``."""
    at = columnar.position_column(events["epoch"], events["commit_lsn"], events["ordinal"])
    lives = [row.life for row in rows]
    last = [None if life is None else life.last.row for life in lives]
    living = [_row(life.living) if life is not None else None for life in lives]
    start = [_row(life.start) if life is not None else None for life in lives]
    images = [row.cells.image for row in rows]
    values = key_columns([row.key for row in rows], table_columns) | {
        name: pa.array([image.get(name) for image in images], pa.string()) for name in table_columns.non_key
    }
    columns = {
        "window": pa.array([row.window for row in rows], pa.string()),
        # Spark takes columns by their order; key columns may be anywhere among them.
        **{name: values[name] for name in table_columns.names},
        "_cdc_kind": pa.array([row.kind for row in rows], pa.string()),
        "_cdc_key": pa.array([row.key for row in rows], pa.string()),
        "_cdc_ended_at": columnar.position_array([row.ended_at for row in rows]),
        "_cdc_op": columnar.take(events["op"], last),
        "_cdc_position": columnar.take(at, last),
        "_cdc_first": columnar.take(at, [None if life is None else life.first.row for life in lives]),
        "_cdc_source_ts": columnar.take(events["source_ts"], last),
        "_cdc_alive": columnar.take(at, living),
        "_cdc_updated_at": columnar.take(events["source_ts"], living),
        "_cdc_life_start": columnar.take(at, start),
        "_cdc_moved_from_key": pa.array(
            [None if life is None or life.start is None else life.start.moved_from for life in lives],
            pa.string(),
        ),
        "_cdc_deletes": columnar.ending_lists([() if life is None else life.deletes for life in lives]),
        "_cdc_doubt": columnar.take(
            at, [_row(life.doubting) if life is not None else None for life in lives]
        ),
        "_cdc_vouched": columnar.take(
            at, [_row(life.vouching) if life is not None else None for life in lives]
        ),
        "_cdc_scope": pa.array([row.key_range for row in rows], pa.string()),
        "_cdc_column_positions": columnar.position_maps([row.cells.apart for row in rows]),
        "_cdc_unresolved": columnar.text_lists([row.cells.unresolved for row in rows]),
        "_cdc_batch_id": columnar.take(events["batch_id"], last),
        "_cdc_ingested_at": columnar.take(events["landed_at"], last),
    }
    return pa.table(columns)


def key_columns(keys: Sequence[str | None], table_columns: TableColumns) -> dict[str, pa.Array]:
    """Return the key's columns as text, from the texts of keys; null where there is no key."""
    values = {key: () if key is None else json.loads(key) for key in set(keys)}
    return {
        name: pa.array(
            [values[key][number] if number < len(values[key]) else None for key in keys], pa.string()
        )
        for number, name in enumerate(table_columns.key)
    }


def _row(part: Part | None) -> int | None:
    return None if part is None else part.row
