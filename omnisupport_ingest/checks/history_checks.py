"""Checks on the rows of a history, on Spark; numbers and names only, never row values.

After a run they read only the files that it wrote, which hold all versions of the keys it changed. They read
the whole history on request (``whole``), or if a part of it seems wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import numpy as np
import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F

from omnisupport_ingest.cdc.current import current_state, is_marked
from omnisupport_ingest.cdc.current_rows import EXISTENCE
from omnisupport_ingest.cdc.fold import fold_events, partitions_for
from omnisupport_ingest.cdc.stored import STATE
from omnisupport_ingest.checks.findings import CheckFinding
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.lake.key_files import (
    FileRange,
    KeyOrder,
    files_by_kind,
    is_fresh,
    range_numbers,
    ranges_of,
)
from omnisupport_ingest.lake.layout import WHOLE_TABLE, LakeFile, generation_of
from omnisupport_ingest.lake.snapshot import TableSnapshot
from omnisupport_ingest.lake.state import WindowState
from omnisupport_ingest.layers.dimension.net_changes import units_above
from omnisupport_ingest.layers.dimension.shown_net_changes import newer_windows
from omnisupport_ingest.layers.dimension.table_news import concerns
from omnisupport_ingest.layers.events.event_files import EventFiles
from omnisupport_ingest.layers.events.quarantine_files import QuarantineFiles
from omnisupport_ingest.layers.histories.history import news_of, versions_of
from omnisupport_ingest.layers.versions import of_contract
from omnisupport_ingest.layers.workspace import Workspace, order_of
from omnisupport_ingest.position import Position
from omnisupport_ingest.wording import agreeing, counted

_NOT_YET = CheckFinding(
    True, "The history has not been made yet, or not since its contract or the program changed."
)


def open_rows_are_current_state(
    workspace: Workspace, spark: SparkSession, contract: TableContract, *, whole: bool = False
) -> CheckFinding:
    """Check that the open versions equal the rows of the dimension that have not ended, cell by cell.

    Compares the keys in files of the last run whose rows have not changed since; with ``whole``, or if some
    of them differ, all keys. If history and dimension were made from different events, the history is
    compared with a fold of its own events instead.
    """
    history = _current_history(workspace, contract)
    if history is None:
        return _NOT_YET
    found = None if whole else _of_last_run(workspace, spark, contract, history)
    if found is not None:
        return found
    rows = history.read(spark, history.files(WHOLE_TABLE)).where(F.col("_cdc_valid_to_position").isNull())
    current, against = _current(workspace, spark, contract, history)
    if current is None:
        return CheckFinding(
            True,
            "Not compared: the dimension was made from other events, and the files of the history's events "
            "were swept. The next history will be compared.",
            {"compared": 0},
        )
    state = history.state(WHOLE_TABLE)
    both = _side_by_side(rows, current, contract)
    open_rows, wrong = both.agg(F.count("here._cdc_key"), F.count_if(_differs(contract))).collect()[0]
    numbers: dict[str, int | float] = {"open_versions": open_rows, "keys_different": wrong, "compared": 1}
    if wrong:
        keys = f"{counted(wrong, 'key')} {agreeing(wrong, 'differs', 'differ')}"
        return CheckFinding(False, f"{keys} from {against}. {_again(contract)}", numbers)
    cursor = state.checkpoint.cursor if state is not None else ""
    return CheckFinding(True, f"The open versions are {against}, at {cursor or 'no event'}.", numbers)


def versions_do_not_overlap(
    workspace: Workspace, spark: SparkSession, contract: TableContract, *, whole: bool = False
) -> CheckFinding:
    """Check that each version ends after it begins, and not after the next version of its key begins.

    Reads the files of the last run; with ``whole``, all files.
    """
    history = _current_history(workspace, contract)
    if history is None:
        return _NOT_YET
    files = history.files(WHOLE_TABLE) if whole else _files_of_last_run(history)
    first, end = F.col("_cdc_valid_from_position"), F.col("_cdc_valid_to_position")
    by_key = Window.partitionBy("_cdc_key").orderBy(first)
    rows = history.read(spark, files).select(
        first.alias("first"), end.alias("end"), F.lead(first).over(by_key).alias("next")
    )
    empty = F.col("end") <= F.col("first")
    overlaps = F.col("next").isNotNull() & (F.col("end").isNull() | (F.col("end") > F.col("next")))
    versions, wrong = rows.agg(F.count(F.lit(1)), F.count_if(empty | overlaps)).collect()[0]
    numbers: dict[str, int | float] = {"versions": versions, "versions_wrong": wrong}
    if wrong:
        summary = f"Empty, or overlapping the next one: {counted(wrong, 'version')}. {_again(contract)}"
        return CheckFinding(False, summary, numbers)
    return CheckFinding(True, f"None of {counted(versions, 'version')} overlaps another of its key.", numbers)


def _again(contract: TableContract) -> str:
    """Return what a person does to have the history made again, in words."""
    return (
        f"Materialize history/dim_{contract.name}_history in the UI (omnisupport-ingest up): it is rebuilt."
    )


def _current_history(workspace: Workspace, contract: TableContract) -> TableSnapshot | None:
    """Return the history; None if it was not made since its contract or this program changed."""
    history = workspace.history(contract).look()
    state = history.state(WHOLE_TABLE) if history is not None else None
    return history if state is not None and state.versions == versions_of(contract) else None


def _files_of_last_run(history: TableSnapshot) -> tuple[LakeFile, ...]:
    """Return the files that the last run wrote: they hold all versions of their keys, sealed files apart."""
    state = history.state(WHOLE_TABLE)
    assert state is not None, "the history has been made"
    return tuple(file for file in history.files(WHOLE_TABLE) if generation_of(file.path) == state.generation)


def _of_last_run(
    workspace: Workspace, spark: SparkSession, contract: TableContract, history: TableSnapshot
) -> CheckFinding | None:
    """Check the keys in files of the last run; None if only a comparison of all keys can decide."""
    state, written = history.state(WHOLE_TABLE), _files_of_last_run(history)
    dimension, order = workspace.dimension(contract).look(), order_of(contract)
    if state is None or dimension is None:
        return None
    mine = files_by_kind(history, order).ordered
    theirs = files_by_kind(dimension, order).ordered
    if mine is None or theirs is None:
        return None
    paths = {file.path for file in written}
    ranges = ranges_of(mine)
    chosen = [n for n, each in enumerate(ranges) if any(file.path in paths for file in each.files)]
    if not chosen:
        return CheckFinding(True, "The last run changed no version.", {"open_versions": 0, "compared": 1})
    beside = {file.path for each in ranges_of(theirs) if _meets(each, ranges, chosen) for file in each.files}
    files = [file for file in dimension.files(WHOLE_TABLE) if file.path in beside or is_fresh(file.path)]
    current = dimension.read(spark, files).drop(STATE)
    current = current.mapInArrow(
        partial(_in_ranges, order=order, ranges=ranges, chosen=chosen), current.schema
    )
    current = current.withColumn("_moved_on", _is_above(state.checkpoint.cursor))
    rows = history.read(spark, written).where(F.col("_cdc_valid_to_position").isNull())
    rows = rows.join(current.where("_moved_on").select("_cdc_key"), "_cdc_key", "left_anti")
    both = _side_by_side(rows, current.where(~F.col("_moved_on")), contract)
    open_rows, wrong = both.agg(F.count("here._cdc_key"), F.count_if(_differs(contract))).collect()[0]
    if wrong:
        # Either one of the two lacks a late event, or there is a fault: only a comparison of all keys can
        # decide.
        return None
    return CheckFinding(
        True,
        "The open versions of the last run equal the rows of the dimension that have not changed since.",
        {"open_versions": open_rows, "keys_different": 0, "compared": 1},
    )


def _meets(of: FileRange, ranges: Sequence[FileRange], chosen: Sequence[int]) -> bool:
    """Return whether ``of`` overlaps one of the ``chosen`` of ``ranges``."""
    return any(
        (of.end is None or ranges[n].start is None or ranges[n].start < of.end)  # type: ignore[operator]
        and (of.start is None or ranges[n].end is None or of.start < ranges[n].end)  # type: ignore[operator]
        for n in chosen
    )


def _in_ranges(
    batches: Iterable[pa.RecordBatch], order: KeyOrder, ranges: Sequence[FileRange], chosen: Sequence[int]
) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        rows = pa.Table.from_batches([batch])
        inside = np.isin(range_numbers(order.values(rows), ranges), chosen)
        yield from rows.filter(pa.array(inside)).to_batches()


def _is_above(cursor: str) -> Column:
    """Whether the last event of a dimension's row is above ``cursor``."""
    if not cursor:
        return F.lit(True)
    last = Position.parse(cursor)
    position = F.struct(
        F.lit(last.epoch).cast("int").alias("_cdc_epoch"),
        F.lit(last.commit_lsn.value).cast("long").alias("_cdc_commit_lsn"),
        F.lit(last.ordinal).cast("long").alias("_cdc_ordinal"),
    )
    return F.struct("_cdc_epoch", "_cdc_commit_lsn", "_cdc_ordinal") > position


def _current(
    workspace: Workspace, spark: SparkSession, contract: TableContract, history: TableSnapshot
) -> tuple[DataFrame | None, str]:
    """Return the current state of the events that the history was made from, and a name for its origin."""
    state = history.state(WHOLE_TABLE)
    assert state is not None, "the history has been made"
    dimension = workspace.dimension(contract).look()
    newest = EventFiles.newest(workspace, contract.source)
    news = news_of(state, newest, contract) if newest is not None else None
    of_newest = news is not None and news.nothing
    if newest is not None and of_newest and dimension is not None:
        made_from: EventFiles | None = newest
        if _shows(workspace, contract, dimension, newest):
            return dimension.read(spark, dimension.files(WHOLE_TABLE)), "the rows of the dimension"
    else:
        made_from = _made_from(workspace, contract, state)
    if made_from is None:
        return None, ""
    parts = partitions_for(*made_from.size(contract))
    folded = fold_events(made_from.events(spark, contract), contract, partitions=parts)
    return (
        current_state(folded, contract, partitions=parts),
        "the fold of its events (the dimension was made from others)",
    )


def _made_from(workspace: Workspace, contract: TableContract, state: WindowState) -> EventFiles | None:
    version = state.checkpoint.upstream_version
    found = None if version is None else EventFiles.at_version(workspace, contract.source, version)
    return found if found is not None and found.deduped.table_id == state.upstream_table_id else None


def _shows(
    workspace: Workspace, contract: TableContract, dimension: TableSnapshot, files: EventFiles
) -> bool:
    """Return whether the dimension was made from exactly the events in ``files``."""
    net_changes, state = workspace.net_changes(contract).look(), dimension.state(WHOLE_TABLE)
    if net_changes is None or state is None:
        return False
    if newer_windows(state, net_changes):
        return False
    if not set(of_contract(contract)) <= set(state.versions):
        return False
    quarantine = QuarantineFiles(files.deduped, files.quarantine)
    for window in {*files.deduped.windows(), *net_changes.windows()}:
        above, taken = files.deduped.state(window), net_changes.state(window)
        accepted = [file.path for file in files.accepted(contract, window)]
        inputs = units_above(accepted, above)
        other = inputs.symmetric_difference(taken.inputs if taken is not None else ())
        if concerns(contract, other, quarantine):
            return False
        if inputs and taken is not None and taken.versions != of_contract(contract):
            return False
    return True


def _side_by_side(rows: DataFrame, current: DataFrame, contract: TableContract) -> DataFrame:
    """Join open versions (``here``) with rows of the dimension that have not ended (``there``), by key.

    A row that is marked by a soft delete has not ended; a deleted row without the mark has.
    """
    # A deleted row with the mark may have ended too: it is compared if the history has it open.
    not_ended = ~F.col("_cdc_is_deleted") | is_marked(contract)
    there = current.where(not_ended).alias("there")
    return rows.alias("here").join(there, F.col("here._cdc_key") == F.col("there._cdc_key"), "full_outer")


def _differs(contract: TableContract) -> Column:
    """Whether the two rows of a key differ.

    After a key change across windows whose commit times run against the order of the log, the dimension may
    leave a column unresolved that the history, which has every event, resolves.
    """
    unknown = F.coalesce(F.col("there._cdc_unresolved"), F.array().cast("array<string>"))
    unknown_here = F.coalesce(F.col("here._cdc_unresolved"), F.array().cast("array<string>"))
    missing = F.col("here._cdc_key").isNull() & ~F.col("there._cdc_is_deleted")
    too_many = F.col("there._cdc_key").isNull()
    cells = F.lit(False)
    for column in contract.columns:
        same = F.col(f"here.`{column.name}`").eqNullSafe(F.col(f"there.`{column.name}`"))
        exact = F.col("here._cdc_exact")[column.name].eqNullSafe(F.col("there._cdc_exact")[column.name])
        cells = cells | (~(same & exact) & ~F.array_contains(unknown, column.name))
    more_unknown = F.size(F.array_except(unknown_here, unknown)) > 0
    doubt = F.array_contains(unknown, EXISTENCE) != F.array_contains(unknown_here, EXISTENCE)
    mark = F.lit(False)
    if contract.soft_delete_column is not None:
        mark = F.array_contains(unknown, contract.soft_delete_column)
    deleted = (F.col("here._cdc_is_deleted") != F.col("there._cdc_is_deleted")) & ~mark
    both = F.col("here._cdc_key").isNotNull() & F.col("there._cdc_key").isNotNull()
    last = F.struct("there._cdc_epoch", "there._cdc_commit_lsn", "there._cdc_ordinal")
    begins = F.col("here._cdc_valid_from_position")
    # With ``changed_only`` in the contract, an update that changed nothing opens no version.
    moved_on = (begins > last) if contract.changed_only else (begins != last)
    moved_on = moved_on & ~F.array_contains(unknown, EXISTENCE)
    return missing | too_many | (both & (cells | more_unknown | doubt | deleted | moved_on))
