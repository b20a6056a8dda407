"""``deduped_events`` and ``quarantine`` → ``dim_<table>_history``: every version of every row, in place.

Events later than everything in the history continue the open versions of their keys. Only the files with
these versions are rewritten, so the cost follows the keys touched. Keys that anything else changes (a late
event, a window that was judged again, quarantine, a key change with an unsent column) are made again from all
their events. The whole table is made again if there is no history yet, after a change of contract or program
version, and if any row may be affected: by a truncate or a snapshot end that is earlier than the history, or
in quarantine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from datetime import datetime
from functools import cached_property, partial
from pathlib import Path

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from omnisupport_ingest.cdc import columnar
from omnisupport_ingest.cdc.envelope import RAW_TYPE
from omnisupport_ingest.cdc.fold import partitions_for, table_columns_of
from omnisupport_ingest.cdc.history import distinct_table_events, history, history_type
from omnisupport_ingest.cdc.history_rows import TableEvent
from omnisupport_ingest.cdc.history_update import EVENT, HistoryRules
from omnisupport_ingest.cdc.life import PositionTuple
from omnisupport_ingest.cdc.typed_fold import EVENT_COLUMNS
from omnisupport_ingest.cdc.updating import CHANGE, SET
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.lake.checkpoint import Checkpoint
from omnisupport_ingest.lake.file_tasks import are_few
from omnisupport_ingest.lake.key_files import ROWS_PER_FILE
from omnisupport_ingest.lake.layout import WHOLE_TABLE
from omnisupport_ingest.lake.read import read_files
from omnisupport_ingest.lake.schema import arrow_schema
from omnisupport_ingest.lake.snapshot import TableSnapshot
from omnisupport_ingest.lake.state import WindowState
from omnisupport_ingest.lake.table import retrying
from omnisupport_ingest.lake.wanted_rows import few_keys, keys_frame
from omnisupport_ingest.layers.batch_facts import BatchFacts, facts_of
from omnisupport_ingest.layers.checkpoints import Identity, report
from omnisupport_ingest.layers.dimension.keyed_update import KeyedUpdate
from omnisupport_ingest.layers.dimension.range_update import FilesToUpdate
from omnisupport_ingest.layers.dimension.tied_keys import absent
from omnisupport_ingest.layers.dimension.update_tasks import FilesUpdated, Sent, update_files
from omnisupport_ingest.layers.events.event_files import EventFiles
from omnisupport_ingest.layers.histories.history_news import EventNews, differing, ends_in, news_since, tied
from omnisupport_ingest.layers.removed import Removed
from omnisupport_ingest.layers.type_changes import require_types, waiting
from omnisupport_ingest.layers.versions import of_contract
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.position import Position

LAYER = "history"

HISTORY_VERSION = 4
"""Version of the logic and file format of histories; raised when the same events give other rows or files."""

_NOWHERE: PositionTuple = (0, 0, 0)
"""Sorts before every position."""


def materialize(
    workspace: Workspace, spark: SparkSession, contract: TableContract, run_id: str, *, replay: bool = False
) -> Checkpoint:
    """Bring the history of one table up to date with its events.

    Writes nothing if the history was made from exactly these events. With ``replay`` all of it is made again.
    """
    table = workspace.history(contract)

    def attempt(snapshot: TableSnapshot) -> None:
        require_types(workspace, contract, snapshot)
        files = EventFiles.opened(workspace, contract.source)
        # Versions that retention has removed stay out, even when they would be made again.
        gone = Removed.open(workspace, contract.source).ended_before(contract.name)
        update = _Update(spark, contract, snapshot, files, whole=replay, ended_before=gone)
        if update.is_due:
            update.commit(Identity(LAYER, contract.source, run_id))

    retrying(attempt, table)
    return report(table, [WHOLE_TABLE])[0]


def rows_to_make(workspace: Workspace, contract: TableContract, *, replay: bool) -> int:
    """About how many rows the next update of the history reads or writes; opens no Spark session."""
    files, history = EventFiles.opened(workspace, contract.source), workspace.history(contract).look()
    if history is not None and waiting(workspace, contract, history):
        return 0
    state = history.state(WHOLE_TABLE) if history is not None else None
    news = news_of(state, files, contract)
    if replay or history is None or state is None or news is None or news.judged_again:
        return files.size(contract)[0]
    if state.versions != versions_of(contract):
        return files.size(contract)[0]
    added = sum(file.rows for file in news.added)
    # The file of any changed key is rewritten.
    held = sum(file.rows for file in history.files(WHOLE_TABLE))
    return added + min(held, added * (contract.rows_per_file or ROWS_PER_FILE))


def versions_of(contract: TableContract) -> tuple[str, ...]:
    """The versions of a history: the fold's logic, its own logic, and the contract."""
    only = ",changed_only" if contract.changed_only else ""
    return (*of_contract(contract), f"history:{HISTORY_VERSION}{only}")


def news_of(state: WindowState | None, files: EventFiles, contract: TableContract) -> EventNews | None:
    """Return the events that a history with ``state`` was not made from; None if that is not known."""
    if state is None or state.upstream_table_id != files.deduped.table_id:
        return None
    version = state.checkpoint.upstream_version
    return None if version is None else news_since(files, contract, version)


class _Update(KeyedUpdate):
    """One update of a history."""

    layer = LAYER

    def __init__(
        self,
        spark: SparkSession,
        contract: TableContract,
        snapshot: TableSnapshot,
        files: EventFiles,
        *,
        whole: bool,
        ended_before: datetime | None,
    ) -> None:
        super().__init__(spark, contract, snapshot, files.deduped)
        self._events = files
        self._news = news_of(self._before, files, contract)
        self._ends: tuple[TableEvent, ...] = ()
        self._refold: DataFrame | None = None
        self._ended_before = ended_before
        stale = (
            whole
            or bool(snapshot.retyped)
            or self._before is None
            or self._held is None
            or (self._news is not None and self._news.replaced and self._written_by_others)
            or self._before.versions != versions_of(contract)
        )
        self._whole = stale or self._news is None or self._reaches_all(self._news)

    @property
    def is_due(self) -> bool:
        if self._whole or self._news is None or self._before is None:
            return True
        if self._news.added or self._refold is not None or self._news.replaced:
            # Record windows that were judged again with the same events, so that nobody compares them again.
            return True
        return self._far_behind

    @cached_property
    def _through(self) -> PositionTuple:
        """The position of the last event that the history contains."""
        cursor = self._before.checkpoint.cursor if self._before is not None else ""
        if not cursor:
            return _NOWHERE
        last = Position.parse(cursor)
        return last.epoch, last.commit_lsn.value, last.ordinal

    def _reaches_all(self, news: EventNews) -> bool:
        """Whether the news may change any row, or most rows. If not, records which keys they change."""
        self._ends = distinct_table_events(ends_in(news.added, self._contract))
        if any(end.position <= self._through for end in self._ends):
            return True
        if not news.judged_again:
            return False
        found = differing(self._spark, self._events, self._contract, news)
        # An erasure empties events in quarantine, and their hashes stay.
        withheld = bool(news.withheld or news.withheld_before)
        if found.events or (withheld and not found.keys.isEmpty()):
            self._refold = found.keys
        return found.keyless or found.events > max(10_000, self._events.size(self._contract)[0] // 4)

    def _batch_facts(self) -> BatchFacts:
        deduped = self._events.deduped
        if self._whole or self._news is None or self._before is None:
            known, windows = [], deduped.windows()
        else:
            known, windows = [self._before.checkpoint], sorted(self._news.noted)
        states = (deduped.state(window) for window in windows)
        return facts_of([*known, *(state.checkpoint for state in states if state is not None)])

    def _versions(self) -> tuple[str, ...]:
        return versions_of(self._contract)

    def _updated(self, draft: Path) -> FilesUpdated:
        contract = self._contract
        rules = HistoryRules(
            table_columns=table_columns_of(contract),
            columns=tuple(contract.columns),
            schema=arrow_schema(history_type(contract), without=()),
            event=arrow_schema(T.StructType([_EVENT]), without=()).field(0).type,
            through=self._through,
            new_ends=() if self._whole else self._ends,
            soft_delete_column=contract.soft_delete_column,
            source_schema=contract.schema,
            changed_only=contract.changed_only,
            ended_before=None if self._ended_before is None else columnar.micros_of(self._ended_before),
        )
        sealed = {} if self._whole else self._listed.sealed
        rows_per_file = contract.rows_per_file or ROWS_PER_FILE
        target = FilesToUpdate(
            self._files, self._order, draft, rules, rows_per_file, seals=True, sealed=sealed
        )
        if self._whole:
            sent = self._all()
            return FilesUpdated() if sent is None else update_files(sent, target)
        added = self._news.added if self._news is not None else ()
        if not added and self._refold is None:
            return FilesUpdated()
        many: DataFrame | None = None
        if added and not are_few(added):
            # Sort first: a task cannot tell by the footer which events of a file are of its keys.
            parts = partitions_for(sum(file.rows for file in added), sum(file.bytes for file in added))
            events = read_files(
                self._spark, _event_columns(), self._events.deduped.table.spec.partition_by, added
            )
            rows = events.mapInArrow(partial(_rows_of, rules=rules), _sent_type(contract))
            added, many = (), self._in_key_order(rows, parts)

        def attempt(refold: DataFrame | None) -> FilesUpdated:
            with ExitStack() as kept:
                settled = None if refold is None else self._made_again(refold, kept)
                if many is not None:
                    settled = many if settled is None else many.unionByName(settled)
                sent = Sent(self._spark, added, _event_columns(), _sent_type(contract), settled)
                return update_files(sent, target, look_at_all=bool(self._ends and self._files))

        return self._until_settled(self._refold, attempt)

    def _all(self) -> Sent | None:
        """Return every version of every row, ready to be written; None if there are no events."""
        contract = self._contract
        count, size = self._events.size(contract)
        if not count:
            return None
        events = self._events.events(self._spark, contract)
        parts = partitions_for(count, size)
        rows = _to_send(history(events, contract, partitions=parts), contract)
        settled = self._in_key_order(rows, parts)
        return Sent(self._spark, (), _event_columns(), _sent_type(contract), settled)

    def _in_key_order(self, rows: DataFrame, parts: int) -> DataFrame:
        """Sort ``rows`` by key, so that each task reads the rows of its range of keys together."""
        column = f"`{self._order.column}`"
        return rows if parts == 1 else rows.repartitionByRange(parts, column).sortWithinPartitions(column)

    def _made_again(self, keys: DataFrame, kept: ExitStack) -> DataFrame:
        """Return all versions of ``keys`` and of the keys tied to them, which replace the stored versions.
        The frame can be used until ``kept`` is closed."""
        contract = self._contract
        events, wanted, parts = self._events_of_few(keys, kept) or self._events_of_many(keys)
        rows = _to_send(history(events, contract, partitions=parts, keys=wanted), contract)
        gone = wanted.select(*(absent(contract, field) for field in rows.schema.fields))
        return rows.unionByName(gone)

    def _events_of_few(self, keys: DataFrame, kept: ExitStack) -> tuple[DataFrame, DataFrame, int] | None:
        """Return what ``_events_of_many`` returns, by a look into each file; None if the keys are not few."""
        wanted = few_keys(keys)
        while wanted is not None:
            events = self._events.events_of(self._spark, self._contract, wanted, kept)
            if events is None:
                break
            together = tied(keys_frame(self._spark, wanted), events)
            found = None if together is None else few_keys(together)
            if found == wanted:
                images = F.sum(F.octet_length(F.concat_ws("", "before", "after")))
                count, size = events.agg(F.count("*"), images).collect()[0]
                return events, keys_frame(self._spark, wanted), partitions_for(count, size or 0)
            # All key changes were read with the first keys, so a second round finds everything.
            wanted = found
        return None

    def _events_of_many(self, keys: DataFrame) -> tuple[DataFrame, DataFrame, int]:
        """Return the events that the versions of ``keys`` and of keys tied to them depend on;
        these keys, each once; and the number of parts in which to fold them."""
        events = self._events.events(self._spark, self._contract)
        wanted = tied(keys, events)
        if wanted is None:
            wanted = events.where(F.col("key").isNotNull()).select(F.col("key").alias("_cdc_key")).distinct()
        return events, wanted, partitions_for(*self._events.size(self._contract))


_EVENT = T.StructField(
    EVENT,
    T.StructType(
        [
            T.StructField("withheld", T.BooleanType()) if name == "withheld" else RAW_TYPE[name]
            for name in EVENT_COLUMNS
        ]
    ),
)


def _event_columns() -> T.StructType:
    """Return the columns of events that a task reads."""
    wanted = {*EVENT_COLUMNS, "source_schema", "source_table"}
    return T.StructType([field for field in RAW_TYPE if field.name in wanted])


def _rows_of(batches: Iterable[pa.RecordBatch], rules: HistoryRules) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        yield from rules.rows_of(pa.Table.from_batches([batch])).to_batches()


def _sent_type(contract: TableContract) -> T.StructType:
    return T.StructType([*history_type(contract).fields, _EVENT, T.StructField(CHANGE, T.StringType())])


def _to_send(rows: DataFrame, contract: TableContract) -> DataFrame:
    """Return finished ``rows`` in the form that tasks receive; the task computes their hashes."""
    values = {
        EVENT: F.lit(None).cast(_EVENT.dataType),
        CHANGE: F.lit(SET),
        "_cdc_row_hash": F.lit(None).cast("long"),
    }
    columns = (values.get(name, F.col(f"`{name}`")).alias(name) for name in _sent_type(contract).names)
    return rows.select(*columns)
