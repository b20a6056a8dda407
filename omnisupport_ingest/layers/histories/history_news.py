"""Finds the events of a table that changed since its history was made, from the log of deduped events.

Added events go to the files of their keys. A window that was judged again is compared with its previous
events; the keys of added or removed events are made again from all their events.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from omnisupport_ingest.cdc import columnar
from omnisupport_ingest.cdc.history_rows import TableEvent
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.key_range import KeyRange
from omnisupport_ingest.lake.layout import LakeFile
from omnisupport_ingest.lake.log import by_window, files_since, is_same_again
from omnisupport_ingest.lake.state import StateUnreadable, read_state
from omnisupport_ingest.layers.events.event_files import EventFiles
from omnisupport_ingest.layers.events.quarantine_files import (
    EventsGone,
    QuarantineFiles,
    named_by,
    withheld_of,
)

_MOST_ROUNDS = 64
"""Rounds of following key changes; for a longer chain the whole table is made again."""

_SPOKEN = ("op", "epoch", "commit_lsn", "ordinal", "source_ts", "batch_id", "landed_at", "after")
_ENDS = pa.array(["t", "b"])


@dataclass(frozen=True)
class EventNews:
    """Files of events that were added to a table or removed from it.

    ``added``: files of accepted events in windows that were not judged again. For windows that were:
    ``accepted`` are the files now, and ``accepted_before`` those that they replaced. ``withheld``: quarantine
    files that were added, and ``withheld_before`` those removed, if they may have events of the table.
    Windows that were judged again with the same events are left out. ``noted``: windows of the source with
    another state. ``replaced``: whether files of the table were replaced.
    """

    added: tuple[LakeFile, ...]
    accepted: tuple[LakeFile, ...]
    accepted_before: tuple[LakeFile, ...]
    withheld: tuple[LakeFile, ...]
    withheld_before: tuple[LakeFile, ...]
    noted: frozenset[str]
    replaced: bool

    @property
    def nothing(self) -> bool:
        """Whether no event of the table can have been added or removed."""
        return not self.added and not self.judged_again

    @property
    def judged_again(self) -> bool:
        """Whether anything but added accepted events changed."""
        return bool(self.accepted_before or self.withheld or self.withheld_before)


def news_since(files: EventFiles, contract: TableContract, version: int) -> EventNews | None:
    """Return the news in ``files`` after ``version`` of the deduped events; None if it is no longer known."""
    changes = files_since(files.deduped, version)
    if changes is None:
        return None
    mine = ("source_table", contract.table)
    gone = tuple(file for file in changes.gone if mine in file.partition)
    quarantine = QuarantineFiles(files.deduped, files.quarantine)
    try:
        states = [(file.window, read_state(Path(file.uri))) for file in changes.states]
        lost = by_window(changes.gone)
        same = frozenset(
            window
            for window, state in states
            if window in lost and is_same_again(files.deduped, window, state, lost[window])
        )
        before = tuple(file for file in gone if file.window not in same)
        again = sorted({file.window for file in before})
        added = tuple(
            file
            for file in changes.added
            if mine in file.partition and file.window not in again and file.window not in same
        )
        if not all(Path(file.stored).exists() for file in (*added, *before)):
            return None
        named = {path for window, state in states if window not in same for path in named_by(state)}
        noted = changes.new_states - same
        now = {file.path: file for window in noted for file in files.withheld_in(window)}
        came = tuple(now[path] for path in sorted(now.keys() - named) if quarantine.may_have(path, contract))
        left = withheld_of(map(quarantine.on_disk, sorted(named - now.keys())), contract)
    except (StateUnreadable, EventsGone):
        return None
    return EventNews(
        added=added,
        accepted=tuple(file for window in again for file in files.accepted(contract, window)),
        accepted_before=before,
        withheld=came,
        withheld_before=left,
        noted=changes.new_states,
        replaced=bool(gone or left),
    )


@dataclass(frozen=True)
class Differing:
    """The events that differ in windows that were judged again: how many, whether one has no row (a truncate
    or snapshot end), and the ``keys`` they affect (``_cdc_key``, repeats allowed)."""

    events: int
    keyless: bool
    keys: DataFrame


def differing(spark: SparkSession, files: EventFiles, contract: TableContract, news: EventNews) -> Differing:
    """Return the events in which the files of ``news`` differ from those that they replaced."""
    now, before = (
        files.events_in(spark, contract, accepted, withheld).select(
            "window", "event_hash", "withheld", "op", "key", "moved_from_key"
        )
        for accepted, withheld in (
            (news.accepted, news.withheld),
            (news.accepted_before, news.withheld_before),
        )
    )
    same = ["window", "event_hash", "withheld"]
    found = now.join(before, same, "left_anti").unionByName(before.join(now, same, "left_anti"))
    found = found.localCheckpoint()
    keyless = F.col("op").isin("t", "b")
    events, ends = found.agg(F.count("*"), F.count_if(keyless)).collect()[0]
    # An accepted event voids a withheld one at its position, whatever the keys are.
    quarantined = now.unionByName(before).where("withheld")
    keys = found.select("key").unionByName(found.select(F.col("moved_from_key").alias("key")))
    keys = keys.unionByName(quarantined.select("key")).where(F.col("key").isNotNull())
    return Differing(events, bool(ends), keys.select(F.col("key").alias("_cdc_key")))


def tied(keys: DataFrame, events: DataFrame) -> DataFrame | None:
    """Return ``keys`` and all keys that key changes among ``events`` tie to them, each once.

    Returns None if a chain of key changes is too long to follow.
    """
    moved = events.where(F.col("moved_from_key").isNotNull() & F.col("key").isNotNull() & ~F.col("withheld"))
    pairs = moved.select("key", "moved_from_key").distinct().localCheckpoint()
    found = keys.distinct().localCheckpoint()
    if pairs.isEmpty():
        return found
    back = pairs.select(F.col("moved_from_key").alias("key"), F.col("key").alias("moved_from_key"))
    ways = pairs.unionByName(back)
    known = found.count()
    for _ in range(_MOST_ROUNDS):
        reached = ways.join(found, ways["key"] == found["_cdc_key"], "left_semi")
        more = reached.select(F.col("moved_from_key").alias("_cdc_key"))
        found = found.unionByName(more).distinct().localCheckpoint()
        count = found.count()
        if count == known:
            return found
        known = count
    return None


def ends_in(files: Iterable[LakeFile], contract: TableContract) -> Iterator[TableEvent]:
    """Yield the truncates and snapshot ends of the table among the accepted events of ``files``.

    Most files have none, as their footers show.
    """
    for file in files:
        with pq.ParquetFile(file.uri) as parquet:
            if not _may_lack_keys(parquet):
                continue
            rows = parquet.read(columns=[*_SPOKEN, "key", "source_schema"])
        chosen = pc.and_(pc.is_in(rows["op"], _ENDS), pc.equal(rows["source_schema"], contract.schema))
        rows = rows.filter(chosen)
        at, landed = columnar.micros(rows["source_ts"]), columnar.micros(rows["landed_at"])
        for number, row in enumerate(rows.drop_columns(["source_ts", "landed_at"]).to_pylist()):
            position = row["epoch"], row["commit_lsn"], row["ordinal"]
            if row["op"] == "b" and not contract.has_key_at(position):
                continue
            yield TableEvent(
                position,
                row["op"],
                False,
                at[number],  # type: ignore[arg-type]
                row["batch_id"],
                landed[number],
                None if row["after"] is None else KeyRange.parse(row["after"]),
            )


def _may_lack_keys(parquet: pq.ParquetFile) -> bool:
    footer = parquet.metadata
    column = next(n for n in range(len(parquet.schema)) if parquet.schema.column(n).path == "key")
    statistics = (
        footer.row_group(number).column(column).statistics for number in range(footer.num_row_groups)
    )
    return any(each is None or not each.has_null_count or each.null_count for each in statistics)
