"""What one task does with the few events of a small run: it reads their files, and takes in, judges or folds
them.

By the kernels that larger runs are given their rows by, so the rows are the same. None of these makes rows
where one task cannot see all that a verdict needs; then the run goes the general way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from omnisupport_ingest.cdc.envelope import LANDED_TYPE, RAW_TYPE, event_hashes
from omnisupport_ingest.cdc.fold import shape_of
from omnisupport_ingest.cdc.folded import STATE_NAMES, folded_type
from omnisupport_ingest.cdc.judging import ACCEPTED, Law, judge_batches
from omnisupport_ingest.cdc.typed_fold import EVENT_COLUMNS, events_to_fold, fold_typed
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.lake.layout import LakeFile
from omnisupport_ingest.lake.one_task import columns_of, fit_in_memory, rows_of
from omnisupport_ingest.lake.schema import arrow_schema
from omnisupport_ingest.landing.rows import EARLIER_IDENTITY

_ROWS_OF_A_BATCH = 10_000


@dataclass(frozen=True)
class LandedFile:
    """A landed file of one window, with the facts of its batch's arrival as raw has them, by column."""

    path: str
    arrival: Mapping[str, Any]


def take_in_few(files: Sequence[LandedFile]) -> pa.Table | None:
    """The events of ``files`` as raw has them: ``RAW_TYPE`` rows; None if a task may not hold so much."""
    if not fit_in_memory(file.path for file in files):
        return None
    kind = arrow_schema(RAW_TYPE, without=())
    place = kind.get_field_index("event_hash")
    tables = [kind.empty_table()]
    for file in files:
        # The batch is named by the file itself.
        known = {name: value for name, value in file.arrival.items() if name not in LANDED_TYPE.names}
        rows = columns_of(file.path, kind, known)
        hashes = pa.array(event_hashes(rows), pa.int64())
        tables.append(rows.set_column(place, kind.field(place), hashes))
    return pa.concat_tables(tables).combine_chunks()


def judge_few(files: Sequence[LakeFile], law: Law) -> pa.Table | None:
    """The events of the raw ``files``, if ``law`` accepts every one of them, in time.

    Their positions are known to be distinct. None if some event is refused or late, for what becomes of it
    is counted and kept; or if they are more than a task may hold.
    """
    if not fit_in_memory(file.uri for file in files):
        return None
    raw = rows_of(files, arrow_schema(RAW_TYPE, without=()))
    identity = pc.replace_substring_regex(raw["identity"], EARLIER_IDENTITY, r"\1]")
    raw = raw.set_column(raw.schema.get_field_index("identity"), raw.schema.field("identity"), identity)
    marked = raw.append_column("copy", pa.repeat(pa.scalar(1, pa.int32()), len(raw)))
    marked = marked.append_column("collision", pa.repeat(pa.scalar(False), len(raw)))
    for batch in judge_batches(marked.combine_chunks().to_batches(_ROWS_OF_A_BATCH), law):
        refused = pc.not_equal(batch.column("verdict"), ACCEPTED)
        if pc.any(pc.or_(refused, batch.column("late"))).as_py():
            return None
    return raw


def fold_few(files: Sequence[LakeFile], contract: TableContract) -> pa.Table | None:
    """The fold of the accepted events of the contract's table in ``files``: ``folded_type`` rows.

    None if they are more than a task may hold.
    """
    if not fit_in_memory(file.uri for file in files):
        return None
    schema = arrow_schema(RAW_TYPE, without=())
    wanted = {*EVENT_COLUMNS, "source_schema", "source_table"}
    events = rows_of(files, pa.schema([field for field in schema if field.name in wanted]))
    of_table = [
        pc.equal(events[column], value)
        for column, value in (("source_schema", contract.schema), ("source_table", contract.table))
    ]
    events = events.filter(reduce(pc.and_, of_table))
    events = events.append_column("hole", pa.repeat(pa.scalar(False), len(events)))
    known = events_to_fold(events)
    kind = arrow_schema(folded_type(contract), without=())
    made = list(fold_typed(known.to_batches(), shape_of(contract), contract.columns, STATE_NAMES))
    if not made:
        return kind.empty_table()
    return pa.Table.from_batches(made).combine_chunks()
