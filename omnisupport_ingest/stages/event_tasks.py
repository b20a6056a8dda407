"""What Spark's tasks do with files of events: they take them in, judge them, or fold them.

By the kernels that Spark's shuffles hand their rows to as well, so the rows are the same. A task sees its own
files alone: what it needs to know of the others is known beforehand, or said afterwards.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from omnisupport_ingest.cdc.envelope import LANDED_TYPE, RAW_TYPE
from omnisupport_ingest.cdc.event_hashes import event_hashes
from omnisupport_ingest.cdc.fold import shape_of
from omnisupport_ingest.cdc.folded import STATE_NAMES, folded_type
from omnisupport_ingest.cdc.judging import ACCEPTED, Law, judge_batches
from omnisupport_ingest.cdc.typed_fold import EVENT_COLUMNS, events_to_fold, fold_typed
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.contracts.pg_types import Kind
from omnisupport_ingest.lake.file_tasks import Output, batches_of, rows_that_fit
from omnisupport_ingest.lake.key_files import KeyOrder
from omnisupport_ingest.lake.layout import LakeFile
from omnisupport_ingest.lake.schema import arrow_schema
from omnisupport_ingest.landing.rows import EARLIER_IDENTITY

_RAW = arrow_schema(RAW_TYPE, without=())
_NOT_JUDGED_BY = frozenset({"tx_id", "lsn", "chunk_id", "envelope", "batch_id", "landed_at", "file_name"})
_JUDGED_BY = pa.schema([field for field in _RAW if field.name not in _NOT_JUDGED_BY])

_WHOLE_NUMBERS = frozenset({Kind.SHORT, Kind.INTEGER, Kind.LONG})


@dataclass(frozen=True)
class LandedFile:
    """A landed file of one window, with the facts of its batch's arrival as raw has them, by column."""

    path: str
    rows: int
    bytes: int
    arrival: Mapping[str, Any]


def take_in(output: Output, files: Sequence[LandedFile]) -> str:
    """Write the events of ``files`` as raw has them: ``RAW_TYPE`` rows."""
    place = _RAW.get_field_index("event_hash")
    for file in files:
        known = {name: value for name, value in file.arrival.items() if name not in LANDED_TYPE.names}
        for batch in batches_of(file.path, _RAW, known):
            rows = pa.Table.from_batches([batch])
            # Rows of another batch are not what the manifest counts.
            counted = pc.equal(rows["batch_id"], file.arrival["batch_id"])
            rows = rows if pc.all(counted).as_py() else rows.filter(counted)
            output.add(rows.set_column(place, _RAW.field(place), event_hashes(rows)))
    return ""


def judge(output: Output, files: Sequence[LakeFile], law: Law) -> str:
    """Judge the events of the raw ``files``, whose positions are known to be distinct, by ``law``.

    Accepted ones are written; all that are refused or late are put aside, with what ``dedupe.judge`` adds.
    A file of one table whose every event is accepted is taken over as it is.
    """
    for file in files:
        table = _only_table(file)
        if table is None or not _taken_over(output, file, table, law):
            _judge_rows(output, file, law)
    return ""


def _judge_rows(output: Output, file: LakeFile, law: Law) -> None:
    for batch in batches_of(file.uri, _RAW, dict(file.partition)):
        for judged in judge_batches([_marked(batch)], law):
            rows = pa.Table.from_batches([judged])
            accepted = pc.equal(rows["verdict"], ACCEPTED)
            output.add(rows if pc.all(accepted).as_py() else rows.filter(accepted))
            output.put_aside(rows.filter(pc.or_(pc.invert(accepted), rows["late"])))


def _taken_over(output: Output, file: LakeFile, table: str, law: Law) -> bool:
    """Whether all events of ``file``, which is of one ``table``, are accepted in time: then it is taken over.

    It is what nearly every file comes to, and no column but those that are judged by is read for it.
    """
    for batch in batches_of(file.uri, _JUDGED_BY, dict(file.partition)):
        marked = _marked(batch)
        if not marked.column("identity").equals(batch.column("identity")):
            return False
        for judged in judge_batches([marked], law):
            in_time = pc.and_(pc.equal(judged.column("verdict"), ACCEPTED), pc.invert(judged.column("late")))
            if not pc.all(in_time).as_py():
                return False
    output.link(file, (("window", file.window), ("source_table", table)))
    return True


def _marked(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Raw events with the marks of ``dedupe.mark_distinct``, and with the identity that they would land with
    today (``deduped.to_judge``)."""
    place = batch.schema.get_field_index("identity")
    identity = batch.column(place)
    if identity.null_count < len(batch):
        identity = pc.replace_substring_regex(identity, EARLIER_IDENTITY, r"\1]")
    marked = batch.set_column(place, batch.schema.field(place), identity)
    marked = marked.append_column("copy", pa.repeat(pa.scalar(1, pa.int32()), len(batch)))
    return marked.append_column("collision", pa.repeat(pa.scalar(False), len(batch)))


def _only_table(file: LakeFile) -> str | None:
    """The table that all events of a raw file are of, as its footer tells; None if they are of several."""
    footer = pq.read_metadata(file.uri)
    found: set[str] = set()
    for number in range(footer.num_row_groups):
        group = footer.row_group(number)
        columns = (group.column(place) for place in range(group.num_columns))
        told = next(each.statistics for each in columns if each.path_in_schema == "source_table")
        if told is None or not told.has_min_max or not told.has_null_count or told.null_count:
            return None
        found |= {told.min, told.max}
    return found.pop() if len(found) == 1 else None


def fold(output: Output, files: Sequence[LakeFile], contract: TableContract, order: KeyOrder) -> str | None:
    """Fold the accepted events of the contract's table in ``files``: ``folded_type`` rows, in ``order``.

    Says, by window, the lowest and the highest position and whether a key changes (``parts_agree``). None if
    the events are more than a task may hold.
    """
    wanted = {*EVENT_COLUMNS, "source_schema", "source_table"}
    of_file = pa.schema([field for field in _RAW if field.name in wanted])
    # A file lies in the partition of its table, if not in that of a namesake in another schema.
    of_table = [file for file in files if dict(file.partition)["source_table"] == contract.table]
    events = rows_that_fit(of_table, of_file)
    if events is None:
        return None
    events = events.filter(pc.equal(events["source_schema"], contract.schema))
    events = events.append_column("hole", pa.repeat(pa.scalar(False), len(events)))
    known = events_to_fold(events)
    folded = fold_typed(known.to_batches(), shape_of(contract), contract.columns, STATE_NAMES)
    kind = arrow_schema(folded_type(contract), without=())
    rows = [pa.Table.from_batches([batch]).cast(kind) for batch in folded]
    if rows:
        output.add(order.sort(pa.concat_tables(rows)))
    return json.dumps(stretches_of(known))


def order_of(contract: TableContract) -> KeyOrder:
    """By what the files are ordered: the key if that is one whole number, else its text."""
    columns = {column.name: column for column in contract.columns}
    if len(contract.key) == 1 and columns[contract.key[0]].type.kind in _WHOLE_NUMBERS:
        return KeyOrder(contract.key[0], whole_numbers=True)
    return KeyOrder("_cdc_key", whole_numbers=False)


def parts_agree(told: Iterable[str]) -> bool:
    """Whether what was folded in parts is what all events together fold to, by what ``fold`` says of each.

    It is where no key changes, and where each part has a stretch of positions of its own: then none folds
    what the old key of a change holds on both sides of it (``cdc.fold``).
    """
    by_window: dict[str, list[tuple[list[int], list[int], bool]]] = {}
    for part in told:
        for window, (first, last, moves) in json.loads(part).items():
            by_window.setdefault(window, []).append((first, last, moves))
    for parts in by_window.values():
        if any(moves for *_, moves in parts):
            parts.sort()
            if any(above[0] <= below[1] for below, above in pairwise(parts)):
                return False
    return True


def stretches_of(events: pa.Table) -> dict[str, tuple[list[int], list[int], bool]]:
    """What ``fold`` says of ``events`` (the columns of ``EVENT_COLUMNS``)."""
    found = {}
    for window in pc.unique(events["window"]).to_pylist():
        here = events.filter(pc.equal(events["window"], window))
        here = here.select(("epoch", "commit_lsn", "moved_from_key"))
        rank = pc.sort_indices(here, sort_keys=[("epoch", "ascending"), ("commit_lsn", "ascending")])
        first, last = (
            [here["epoch"][row].as_py(), here["commit_lsn"][row].as_py()]
            for row in (rank[0].as_py(), rank[-1].as_py())
        )
        found[window] = (first, last, here["moved_from_key"].null_count < here.num_rows)
    return found
