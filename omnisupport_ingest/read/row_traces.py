"""Finds what the lake holds of one row by its key, without Spark: its current state, its events, its keys.

A row may have had several keys, and a key several rows, one after the other. So a row is described by spans:
for each of its keys, the events between two positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from omnisupport_ingest.cdc.current_rows import EXISTENCE, current_groups
from omnisupport_ingest.cdc.envelope import RAW_TYPE
from omnisupport_ingest.cdc.erasing import Span
from omnisupport_ingest.cdc.event_fold import KEY, SNAPSHOT_END, TRUNCATE
from omnisupport_ingest.cdc.fold import table_columns_of
from omnisupport_ingest.cdc.folded import folded_type
from omnisupport_ingest.cdc.life import PositionTuple, just_below
from omnisupport_ingest.cdc.table_ends import TableEnds, table_ends_in
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.lake.layout import WINDOW, LakeFile
from omnisupport_ingest.lake.schema import arrow_schema
from omnisupport_ingest.layers.events.event_files import EventFiles
from omnisupport_ingest.layers.workspace import Workspace

_IN_PATH = (WINDOW, "source_table")
_COLUMNS = ("op", "epoch", "commit_lsn", "ordinal", "source_schema", "key", "moved_from_key", "identity")
_LIVING = frozenset("cur")


@dataclass(frozen=True, slots=True)
class RowState:
    """The state of a key. ``last``: its last event, with operation ``op``.

    ``through``: the position that ended its row, None while it lives. ``doubtful``: a delete in
    quarantine leaves open whether it lives. ``marked``: its soft-delete column is set.
    """

    last: PositionTuple
    op: str
    through: PositionTuple | None
    doubtful: bool
    marked: bool


@dataclass(frozen=True, slots=True)
class Trace:
    """An event of one of the wanted keys. ``withheld``: it is in quarantine."""

    window: str
    position: PositionTuple
    op: str
    key: str | None
    withheld: bool


@dataclass(frozen=True, slots=True)
class KeyChange:
    """The key of a row changed: the life of ``old`` ends at ``left``, just below that of ``new``."""

    old: str
    new: str | None
    began: PositionTuple

    @property
    def left(self) -> PositionTuple:
        return just_below(self.began)


def state_of(workspace: Workspace, contract: TableContract, key: str) -> RowState | None:
    """Return the state of ``key`` after folding all windows; None if no window has the key."""
    rows = _folded(workspace, contract, key)
    ends = TableEnds.collect(table_ends_in(rows))
    keyed = rows.filter(pc.equal(rows["_cdc_key"], key))
    for batch in current_groups(keyed.combine_chunks().to_batches(), table_columns_of(contract), ends):
        for row in batch.to_pylist():
            if row["_cdc_kind"] == KEY:
                return _row_state(row, contract, ends.reaching(key))
    return None


def traces(files: EventFiles, contract: TableContract, keys: Iterable[str]) -> list[Trace]:
    """Return every event of ``keys``, accepted or in quarantine, by window and position."""
    wanted = pa.array(sorted(set(keys)), pa.string())
    events = (
        Trace(window, _position(row), row["op"], row["key"], withheld)
        for window, withheld, row in _rows(files, contract, pc.field("key").isin(wanted))
    )
    return sorted(events, key=lambda trace: (trace.window, trace.position))


def key_changes(files: EventFiles, contract: TableContract) -> list[KeyChange]:
    """Return every change of a row's key, including those in quarantine, each once.

    If a person has decided a collision, its events that stay in quarantine changed no key.
    """
    found = list(_rows(files, contract, pc.field("moved_from_key").is_valid()))
    filled = _filled(files, contract, [row for _, withheld, row in found if withheld])
    rows = (row for _, withheld, row in found if not withheld or _place(row) not in filled)
    return list(dict.fromkeys(KeyChange(row["moved_from_key"], row["key"], _position(row)) for row in rows))


def _filled(
    files: EventFiles, contract: TableContract, withheld: Sequence[dict[str, Any]]
) -> set[tuple[PositionTuple, str | None]]:
    """Return the positions (with identities) of ``withheld`` events at which another event was accepted."""
    places = {_place(row) for row in withheld}
    if not places:
        return set()
    where = pc.field("commit_lsn").isin(sorted({row["commit_lsn"] for row in withheld}))
    accepted = (row for file in files.accepted(contract) for row in _read(file, contract, where, _IN_PATH))
    return places & {_place(row) for row in accepted}


def spans_of(key: str, through: PositionTuple, changes: Sequence[KeyChange]) -> list[tuple[str, Span]]:
    """Return the spans of the row that ended under ``key`` at ``through``: under this key and under its
    former keys.

    A row that changed its key took its earlier events along: they belong to the row under its next key.
    """
    spans: list[tuple[str, Span]] = []
    waiting = [(key, through)]
    while waiting:
        name, end = waiting.pop()
        span = Span(
            max((each.left for each in changes if each.old == name and each.left < end), default=None), end
        )
        if (name, span) in spans:
            continue
        spans.append((name, span))
        waiting += [(each.old, each.left) for each in changes if each.new == name and span.holds(each.began)]
    return spans


def has_left(key: str, through: PositionTuple, events: Iterable[Trace], changes: Iterable[KeyChange]) -> bool:
    """Return whether the row that ended under ``key`` at ``through`` lives on under another key."""
    left = max((each.left for each in changes if each.old == key and each.left <= through), default=None)
    if left is None:
        return False
    span = Span(left, through)
    return not any(each.key == key and each.op in _LIVING and span.holds(each.position) for each in events)


def _row_state(row: dict[str, Any], contract: TableContract, ends: TableEnds) -> RowState:
    last = tuple(row["_cdc_position"].values())
    unresolved = row["_cdc_unresolved"] or ()
    through = None
    if row["_ended"]:
        above = (each.position for each in ends.endings if each.position > last)
        through = last if row["_cdc_op"] == "d" else min(above)
    mark, exact = contract.soft_delete_column, dict(row["_cdc_exact"] or ())
    marked = mark is not None and (row[mark] is not None or mark in exact)
    return RowState(last, row["_cdc_op"], through, EXISTENCE in unresolved, marked)


def _folded(workspace: Workspace, contract: TableContract, key: str) -> pa.Table:
    """Return the folded rows of ``key`` in every window, and those without a key."""
    schema = arrow_schema(folded_type(contract), without=(WINDOW,))
    net_changes = workspace.net_changes(contract).look()
    where = (pc.field("_cdc_key") == key) | pc.field("_cdc_kind").isin([TRUNCATE, SNAPSHOT_END])
    parts = []
    for file in net_changes.all_files() if net_changes is not None else ():
        rows = pq.read_table(file.uri, schema=schema, filters=where, partitioning=None)
        parts.append(rows.append_column(WINDOW, pa.array([file.window] * rows.num_rows, pa.string())))
    empty = schema.append(pa.field(WINDOW, pa.string())).empty_table()
    return pa.concat_tables([empty, *parts])


def _rows(
    files: EventFiles, contract: TableContract, where: Any
) -> Iterator[tuple[str, bool, dict[str, Any]]]:
    """Yield window, whether in quarantine, and ``_COLUMNS`` of the table's events that meet ``where``."""
    for file in files.accepted(contract):
        yield from ((file.window, False, row) for row in _read(file, contract, where, _IN_PATH))
    table = pc.field("source_table") == contract.table
    for file in files.withheld:
        yield from ((file.window, True, row) for row in _read(file, contract, where & table, (WINDOW,)))


def _read(
    file: LakeFile, contract: TableContract, where: Any, in_path: tuple[str, ...]
) -> Iterator[dict[str, Any]]:
    of_schema = pc.field("source_schema") == contract.schema
    rows = pq.read_table(
        file.uri,
        schema=arrow_schema(RAW_TYPE, without=in_path),
        columns=list(_COLUMNS),
        filters=where & of_schema,
        partitioning=None,
    )
    yield from rows.to_pylist()


def _place(row: dict[str, Any]) -> tuple[PositionTuple, str | None]:
    """Return what only one event can occupy: a position, with the identity if positions are not unique."""
    return _position(row), row["identity"]


def _position(row: dict[str, Any]) -> PositionTuple:
    return row["epoch"], row["commit_lsn"], row["ordinal"]
