"""Finds where the values of one erased row are: images in landing and raw, cells in the tables downstream.

A row is known by its keys and, for each of them, by the positions between which events are its own
(``row_traces``): a later row of the same key keeps its values.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from omnisupport_ingest.cdc.erasing import Span
from omnisupport_ingest.cdc.images import read_image
from omnisupport_ingest.cdc.life import PositionTuple
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.read.holdings import (
    Holding,
    count_cells,
    files_of_table,
    former_raw_events,
    held_files,
    holdings_of,
    landed_events,
    left_over_files,
)

_IMAGES, _DELIVERED = ("before", "after"), "envelope"
_NO_TABLE = "?"
"""Name of the table of a line that could not be assigned to a table."""

_POSITION = ("epoch", "commit_lsn", "ordinal")
_EVENT = ("source_schema", "source_table", "key", *_POSITION, *_IMAGES, _DELIVERED)

_OURS, _KEY, _EXACT = "_cdc_", "_cdc_key", "_cdc_exact"
_ROW_POSITION = ("_cdc_epoch", "_cdc_commit_lsn", "_cdc_ordinal")
_ROW_POSITIONS = ("_cdc_position", "_cdc_valid_from_position")
"""The column with the position in rows of net changes and of a history; rows of a dimension have three
columns."""


@dataclass(frozen=True)
class ErasedRow:
    """A row of the table of ``contract``: by each of its keys, which events belong to it."""

    contract: TableContract
    spans: Mapping[str, Sequence[Span]]

    @classmethod
    def of(cls, contract: TableContract, spans: Iterable[tuple[str, Span]]) -> ErasedRow:
        found: dict[str, list[Span]] = {}
        for key, span in spans:
            found.setdefault(key, []).append(span)
        return cls(contract, found)

    def holds(self, key: str, position: PositionTuple) -> bool:
        """Return whether what the lake has of ``key`` at ``position`` belongs to the row."""
        return any(span.holds(position) for span in self.spans[key])

    @property
    def keys(self) -> pa.Array:
        return pa.array(sorted(self.spans), pa.string())


def images_of_row(workspace: Workspace, row: ErasedRow, windows: Collection[str]) -> list[Holding]:
    """Return the files of landing and raw that have images of the row, with values beside its key, in
    ``windows``; and former files of raw."""
    counts: dict[tuple[str, Path], int] = {}
    source = row.contract.source
    former = former_raw_events(workspace, source, _EVENT)
    for layer, path, _, batch in chain(landed_events(workspace, source, _EVENT, windows), former):
        if found := sum(cells > 0 for cells in _in_events(pa.Table.from_batches([batch]), row)):
            counts[layer, path] = counts.get((layer, path), 0) + found
    return holdings_of(workspace, counts)


def cells_of_row(workspace: Workspace, row: ErasedRow) -> list[Holding]:
    """Return the files of the newest versions of the tables above raw that hold cells of the row, rows that a
    deletion vector hides included."""
    return _cells_in(workspace, row, left_over=False)


def cells_of_row_left_over(workspace: Workspace, row: ErasedRow) -> list[Holding]:
    """Return the files with cells of the row that no version of these tables holds
    (``holdings.left_over_files``)."""
    return _cells_in(workspace, row, left_over=True)


def withheld_of_no_row(workspace: Workspace, contract: TableContract) -> list[Holding]:
    """Return the files of quarantine with values of events whose key could not be read: each may be of any
    row.

    Only events of the table count, and events whose table could not be read.
    """
    quarantine, count_in = (
        workspace.quarantine(contract.source),
        partial(_events_of_no_row, contract=contract),
    )
    return count_cells(workspace, quarantine, held_files(quarantine), count_in, may_vanish=False)


def _events_of_no_row(path: Path, contract: TableContract) -> int:
    events = pq.read_table(
        path, columns=["op", "source_table", "key", *_IMAGES, _DELIVERED], partitioning=None
    )
    before, after, delivered = (events[name].is_valid() for name in (*_IMAGES, _DELIVERED))
    of_table = pc.is_in(events["source_table"], pa.array([contract.table, _NO_TABLE], pa.string()))
    values = pc.or_(pc.or_(before, after), delivered)
    # A snapshot end has its key range there.
    values = pc.and_(values, pc.invert(pc.equal(events["op"], "b")))
    return pc.sum(pc.and_(pc.and_(events["key"].is_null(), of_table), values)).as_py() or 0


def _cells_in(workspace: Workspace, row: ErasedRow, *, left_over: bool) -> list[Holding]:
    files_of, source = left_over_files if left_over else held_files, row.contract.source
    found: list[Holding] = []
    for table in (workspace.deduped(source), workspace.quarantine(source)):
        files = files_of_table(files_of(table), row.contract)
        found += count_cells(workspace, table, files, partial(_event_cells, row=row), may_vanish=left_over)
    for table in workspace.tables_of(row.contract):
        count_in = partial(_row_cells, row=row)
        found += count_cells(workspace, table, files_of(table), count_in, may_vanish=left_over)
    return found


def _event_cells(path: Path, row: ErasedRow) -> int:
    names = pq.read_schema(path).names
    events = pq.read_table(path, columns=[each for each in _EVENT if each in names], partitioning=None)
    return sum(_in_events(events, row))


def _in_events(events: pa.Table, row: ErasedRow) -> Iterator[int]:
    """Yield, for each of ``events`` that belongs to the row, how many values it has besides the key."""
    contract = row.contract
    mask = pc.and_(pc.is_in(events["key"], row.keys), pc.equal(events["source_schema"], contract.schema))
    if "source_table" in events.column_names:
        mask = pc.and_(mask, pc.equal(events["source_table"], contract.table))
    for event in events.filter(mask).to_pylist():
        if row.holds(event["key"], (event["epoch"], event["commit_lsn"], event["ordinal"])):
            images = (read_image(event[name]) or {} for name in _IMAGES)
            values = (value for image in images for name, value in image.items() if name not in contract.key)
            yield sum(value is not None for value in values) + (event[_DELIVERED] is not None)


def _row_cells(path: Path, row: ErasedRow) -> int:
    there = pq.read_schema(path).names
    values = [name for name in there if not name.startswith(_OURS) and name not in row.contract.key]
    positions = [name for name in (*_ROW_POSITION, *_ROW_POSITIONS) if name in there]
    ours = [_KEY, *positions, *([_EXACT] if _EXACT in there else [])]
    rows = pq.read_table(path, columns=[*ours, *values], partitioning=None)
    rows = rows.filter(pc.is_in(rows[_KEY], row.keys))
    count = 0
    for each in rows.to_pylist():
        position = _position(each, positions)
        if position is not None and row.holds(each[_KEY], position):
            exact = [name for name, _ in each.get(_EXACT) or () if name not in row.contract.key]
            count += len(exact) + sum(each[name] is not None for name in values)
    return count


def _position(row: Mapping[str, Any], names: Sequence[str]) -> PositionTuple | None:
    """Return the position of ``row``, from those of the columns ``names`` that it has; None: the row is of
    no event, so it has no values."""
    whole = [row[name] for name in names if name in _ROW_POSITIONS]
    if whole == [None]:
        return None
    epoch, lsn, ordinal = whole[0].values() if whole else (row[name] for name in _ROW_POSITION)
    return epoch, lsn, ordinal
