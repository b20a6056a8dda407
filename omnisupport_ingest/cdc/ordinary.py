"""Find the ordinary events of a batch, by whole columns: those that judging accepts without a look at each.

An ordinary event is in time and in order, no other content stands at its position, its row can be read, and
no rule keeps it out. Nearly all events are. All other events are judged one by one (``judging``), which
defines what a verdict means. Judging would accept every event that is called ordinary here, except that a
copy of an earlier one is a duplicate.

``Taken``, which counts how many events each way took, is here too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import reduce
from types import MappingProxyType

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from omnisupport_ingest.cdc.columnar import TIME
from omnisupport_ingest.cdc.lateness import closes_at
from omnisupport_ingest.contracts.column_rules import ColumnRules
from omnisupport_ingest.contracts.flat_images import FlatImages, read_flat
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.contracts.names import TableName
from omnisupport_ingest.contracts.row_columns import RowColumns
from omnisupport_ingest.windows import OUT_OF_RANGE

IMAGE_OPS = frozenset("cur")
"""Operations that carry a row."""

ROW_OPS = IMAGE_OPS | {"d"}
"""Operations of one row, which has a key."""

_IMAGES, _ROWS = pa.array(sorted(IMAGE_OPS)), pa.array(sorted(ROW_OPS))

FEW = 64
"""At most so many events of one table in a batch are judged one by one: that is faster than reading their
images by columns."""

_READ_COLUMNS = ["window", "watermark_before", "op", "after"]
"""The columns that are read of the events of one table."""

_NULL = "null"
"""Occurs in every key that has a NULL part, and in some others."""


@dataclass
class Taken:
    """Counts the events that a task judged or folded.

    Attributes:
        events: all of them.
        exactly: those that were taken one by one, not by whole columns.
        rules_seconds: seconds spent on reading rows and on row rules.
    """

    events: int = 0
    exactly: int = 0
    rules_seconds: float = 0.0

    def __add__(self, other: Taken) -> Taken:
        return Taken(
            self.events + other.events,
            self.exactly + other.exactly,
            self.rules_seconds + other.rules_seconds,
        )

    @property
    def share(self) -> float | None:
        """The share of events taken one by one; None without events."""
        return round(self.exactly / self.events, 6) if self.events else None


@dataclass(frozen=True)
class OrdinaryMask:
    """Which events of a batch are ordinary; ``warned``: by rule that lets rows pass, which of them break
    it."""

    ordinary: pa.BooleanArray
    warned: Mapping[str, pa.BooleanArray]


@dataclass(frozen=True, slots=True)
class NeverOrdinary:
    """Events that are always judged one by one.

    Attributes:
        hashes: of events that people decided about.
        batches: in which an event breaks a rule that rejects its batch.
        windows: that are sealed and accept no event.
    """

    hashes: Collection[int] = ()
    batches: Collection[str] = ()
    windows: Collection[str] = ()


class OrdinaryEvents:
    """Finds the ordinary events of some tables."""

    def __init__(
        self,
        contracts: Mapping[TableName, TableContract],
        window_end: Callable[[str], datetime],
        never: NeverOrdinary,
        *,
        few: int = FEW,
        row_columns: Mapping[TableName, RowColumns] = MappingProxyType({}),
    ) -> None:
        """Create a finder for the tables of ``contracts``.

        Args:
            window_end: returns the end of a window.
            never: events that are left to be judged one by one, whatever they are like.
            few: at most so many events of a table in a batch are left to be judged one by one.
            row_columns: of tables whose rows wait if they are not of their contract's columns.
        """
        self._contracts = contracts
        self._rules: dict[TableName, ColumnRules] = {}
        self._reviewed = pa.array(sorted(never.hashes), pa.int64())
        self._window_end = window_end
        self._few = few
        self._rejected = pa.array(sorted(never.batches), pa.string()) if never.batches else None
        self._sealed = pa.array(sorted(never.windows), pa.string()) if never.windows else None
        self._row_columns = row_columns

    def find(self, batch: pa.RecordBatch, taken: Taken) -> OrdinaryMask:
        """Find the ordinary events among the marked events of ``batch``; copies of ordinary events are
        ordinary too.

        The time that rules took is added to ``taken``.
        """
        none = ordinary = pa.array(np.zeros(batch.num_rows, np.bool_))
        warned: dict[str, pa.BooleanArray] = {}
        if batch.num_rows <= self._few:
            return OrdinaryMask(ordinary, warned)
        found = pc.and_(_ordinary_by_marks(batch), self._unreviewed(batch))
        if self._rejected is not None:
            found = pc.and_not(found, pc.is_in(batch.column("batch_id"), self._rejected))
        if self._sealed is not None:
            found = pc.and_not(found, pc.is_in(batch.column("window"), self._sealed))
        for table_name, of_table in self._tables_of(batch):
            mask = pc.and_(found, of_table)
            read = [*_READ_COLUMNS, *(["unchanged"] if table_name in self._row_columns else [])]
            events = batch if mask.true_count == batch.num_rows else batch.select(read).filter(mask)
            if not events.num_rows:
                continue
            in_time = self._in_time(events, self._contracts[table_name].allowed_lateness)
            started = time.perf_counter()
            kept, broken = self._rows_kept(events, table_name)
            taken.rules_seconds += time.perf_counter() - started
            plain = pc.and_(in_time, kept)
            ordinary = pc.replace_with_mask(ordinary, mask, plain)
            for name, of_events in broken.items():
                passing = pc.and_(plain, of_events)
                if passing.true_count:
                    warned[name] = pc.replace_with_mask(warned.get(name, none), mask, passing)
        return OrdinaryMask(ordinary, warned)

    def _tables_of(self, batch: pa.RecordBatch) -> Iterator[tuple[TableName, pa.BooleanArray]]:
        """Return the tables with a contract and more than a few events, each with a mask of its events.

        Without a contract no columns are known that could be read.
        """
        schemas = batch.column("source_schema").dictionary_encode()
        tables = batch.column("source_table").dictionary_encode()
        width = len(tables.dictionary)
        codes = schemas.indices.to_numpy().astype(np.int64) * width + tables.indices.to_numpy()
        for code, events in zip(*np.unique(codes, return_counts=True), strict=True):
            table_name = schemas.dictionary[code // width].as_py(), tables.dictionary[code % width].as_py()
            if events > self._few and table_name in self._contracts:
                yield table_name, pa.array(codes == code)

    def _unreviewed(self, batch: pa.RecordBatch) -> pa.BooleanArray:
        return pc.invert(pc.is_in(batch.column("event_hash"), self._reviewed))

    def _in_time(self, events: pa.RecordBatch, allowed: timedelta) -> pa.BooleanArray:
        """Whether the window of the event was open when the event landed."""
        windows = events.column("window").dictionary_encode()
        closing = pa.array(
            [closes_at(self._window_end(window), allowed) for window in windows.dictionary.to_pylist()], TIME
        )
        mark = events.column("watermark_before")
        return pc.fill_null(pc.less(mark, closing.take(windows.indices)), True)

    def _rows_kept(
        self, events: pa.RecordBatch, table_name: TableName
    ) -> tuple[pa.BooleanArray, dict[str, pa.BooleanArray]]:
        """Return two masks: whether no rule keeps the event out, and by rule that lets rows pass, whether the
        event breaks it.

        An event without a row is kept; one whose row cannot be read is not.
        """
        bringing = pc.is_in(events.column("op"), _IMAGES)
        rules, after = self._rules_of(table_name), events.column("after")
        every = bringing.true_count == len(bringing)
        read, columns = rules.columns or self._contracts[table_name].key, self._row_columns.get(table_name)
        seen = sorted(columns.named.difference(read)) if columns is not None else ()
        images = read_flat(after if every else after.filter(bringing), read, seen=seen)
        judged = rules.judged(images.texts, images.sent)
        good = pc.and_(images.proven, judged.kept)
        if columns is not None:
            unsent = events.column("unchanged")
            good = pc.and_(good, _of_columns(images, unsent if every else unsent.filter(bringing), columns))
        if every:
            return good, dict(judged.warned)
        brings_none = pc.invert(bringing)
        kept = pc.replace_with_mask(brings_none, bringing, good)
        none = pc.and_(bringing, brings_none)
        return kept, {
            name: pc.replace_with_mask(none, bringing, broken) for name, broken in judged.warned.items()
        }

    def _rules_of(self, table_name: TableName) -> ColumnRules:
        if table_name not in self._rules:
            self._rules[table_name] = ColumnRules(self._contracts[table_name])
        return self._rules[table_name]


def _of_columns(images: FlatImages, unsent: pa.ListArray, columns: RowColumns) -> pa.BooleanArray:
    """Return which rows have the ``columns`` that they must have, sent or ``unsent``, and no other one."""
    good = pc.invert(images.others).to_numpy(zero_copy_only=False).copy()
    sent = {name: images.sent[name].to_numpy(zero_copy_only=False) for name in columns.required}
    # There are few distinct lists of unsent columns.
    lists = pc.binary_join(unsent, "\0").dictionary_encode()
    codes = pc.fill_null(lists.indices, len(lists.dictionary)).to_numpy(zero_copy_only=False)
    for code, text in enumerate([*lists.dictionary.to_pylist(), ""]):
        names, rows = frozenset(text.split("\0") if text else ()), codes == code
        of_list = good[rows] & (names <= columns.named)
        for name in columns.required - names:
            of_list &= sent[name][rows]
        good[rows] = of_list
    return pa.array(good)


def _ordinary_by_marks(batch: pa.RecordBatch) -> pa.BooleanArray:
    """Whether the event is ordinary by its marks and its own narrow columns: its position has no other
    content, and it came in order."""
    column = batch.column
    unsent = pc.greater(pc.fill_null(pc.list_value_length(column("unchanged")), 0), 0)
    moved = column("moved_from_key").is_valid()
    keyless = pc.invert(pc.is_in(column("op"), _ROWS))
    return reduce(
        pc.and_,
        (
            pc.invert(column("collision")),
            pc.not_equal(column("window"), OUT_OF_RANGE),
            pc.less_equal(pc.fill_null(column("newest_epoch_before"), 0), column("epoch")),
            pc.invert(pc.fill_null(column("misplaced"), False)),
            # Unsent columns are judged by the old image.
            pc.invert(pc.and_(unsent, column("before").is_valid())),
            pc.or_(keyless, _is_whole(column("key"))),
            pc.or_(keyless, pc.or_(pc.invert(moved), _is_whole(column("moved_from_key")))),
        ),
    )


def _is_whole(keys: pa.StringArray) -> pa.BooleanArray:
    return pc.fill_null(pc.invert(pc.match_substring(keys, _NULL)), False)
