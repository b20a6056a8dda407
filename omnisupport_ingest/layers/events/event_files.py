"""The events of a source in one version of its lake: accepted ones, and those in quarantine.

A window of deduped events names its quarantine files, so one version of that table says which events belong
together. Files never change. A quarantine file that a newer version of the quarantine no longer holds is
still read while it exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from deltalake.exceptions import DeltaError
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.lake.delta import open_delta
from omnisupport_ingest.lake.layout import LakeFile
from omnisupport_ingest.lake.snapshot import TableSnapshot
from omnisupport_ingest.lake.wanted_rows import MOST_KEYS, Wanted, reading_wanted
from omnisupport_ingest.layers.events.quarantine_files import EventsGone, QuarantineFiles
from omnisupport_ingest.layers.workspace import Workspace


@dataclass(frozen=True)
class EventFiles:
    """The files of one version of a source's deduped events, with the quarantine that it names."""

    deduped: TableSnapshot
    quarantine: TableSnapshot

    @classmethod
    def newest(cls, workspace: Workspace, source: str) -> EventFiles | None:
        """The newest version; None before the first event was judged. Creates no table."""
        deduped = workspace.deduped(source).look()
        quarantine = workspace.quarantine(source).look()
        return None if deduped is None or quarantine is None else cls(deduped, quarantine)

    @classmethod
    def opened(cls, workspace: Workspace, source: str) -> EventFiles:
        """The newest version, for a layer: missing tables are created."""
        return cls(workspace.deduped(source).open(), workspace.quarantine(source).open())

    @classmethod
    def at_version(cls, workspace: Workspace, source: str, version: int) -> EventFiles | None:
        """The version ``version`` of the deduped events; None if its log or a file of it is gone."""
        table, quarantine = workspace.deduped(source), workspace.quarantine(source).look()
        if quarantine is None:
            return None
        try:
            found = cls(TableSnapshot(table, open_delta(table.folder, version=version)), quarantine)
            there = all(Path(file.stored).exists() for file in (*found.deduped.all_files(), *found.withheld))
        except (DeltaError, EventsGone):
            return None
        return found if there else None

    def accepted(self, contract: TableContract, window: str | None = None) -> tuple[LakeFile, ...]:
        """The files of the table's accepted events, of one window or all.

        Tables of one name in two schemas share their files.
        """
        files = self.deduped.all_files() if window is None else self.deduped.files(window)
        return tuple(file for file in files if ("source_table", contract.table) in file.partition)

    @cached_property
    def withheld(self) -> tuple[LakeFile, ...]:
        """Return the files of the quarantine, of all tables. Raises ``EventsGone`` if one is missing."""
        return tuple(file for window in self.deduped.windows() for file in self.withheld_in(window))

    def withheld_in(self, window: str) -> tuple[LakeFile, ...]:
        """Return one window's quarantine files, of all tables. Raises ``EventsGone`` if one is missing."""
        return QuarantineFiles(self.deduped, self.quarantine).of(window)

    def events(self, spark: SparkSession, contract: TableContract) -> DataFrame:
        """Return every event of the table as the fold takes them. The column ``withheld`` marks those in
        quarantine.
        """
        return self.events_in(spark, contract, self.accepted(contract), self.withheld)

    def events_in(
        self,
        spark: SparkSession,
        contract: TableContract,
        accepted: Sequence[LakeFile],
        withheld: Sequence[LakeFile],
    ) -> DataFrame:
        """Return the events of the table in the ``accepted`` files and the quarantine files ``withheld``."""
        frame = self.deduped.read(spark, accepted).withColumn("withheld", F.lit(False))
        if withheld:
            quarantined = self.quarantine.read(spark, withheld).select(
                *(name for name in frame.columns if name != "withheld")
            )
            frame = frame.unionByName(quarantined.withColumn("withheld", F.lit(True)))
        return frame.where(_of_table(contract))

    def events_of(
        self, spark: SparkSession, contract: TableContract, keys: frozenset[str], kept: ExitStack
    ) -> DataFrame | None:
        """Return, of what ``events`` returns, only what the versions of a few ``keys`` depend on; None if
        that is much.

        These are the events of the keys, events without a key, key changes, and accepted events at the
        position of such a withheld one, which they void. The cost is a look into each file. The frame can be
        used until ``kept`` is closed.
        """
        only = {"source_schema": contract.schema, "source_table": contract.table}
        # Of withheld events without a key, the fold needs only those that end rows.
        ends = {"op": ("t", "b")}
        sought = Wanted("key", tuple(sorted(keys)), "moved_from_key", ends, only, keyless=False)
        schema = self.quarantine.table.spec.schema
        withheld = kept.enter_context(reading_wanted(spark, schema, self.withheld, sought))
        places = withheld.select("commit_lsn", "ordinal").distinct().limit(MOST_KEYS + 1).collect()
        if len(places) > MOST_KEYS:
            return None
        lsns, ordinals = (tuple({row[n] for row in places}) for n in range(2))
        sought = replace(sought, others={"commit_lsn": lsns, "ordinal": ordinals}, keyless=True)
        schema = self.deduped.table.spec.schema
        accepted = kept.enter_context(reading_wanted(spark, schema, self.accepted(contract), sought))
        frame = accepted.withColumn("withheld", F.lit(False))
        names = (name for name in frame.columns if name != "withheld")
        return frame.unionByName(withheld.select(*names).withColumn("withheld", F.lit(True)))

    def size(self, contract: TableContract) -> tuple[int, int]:
        """The number of events, and the bytes of their files."""
        files: Sequence[LakeFile] = (*self.accepted(contract), *self.withheld)
        return sum(file.rows for file in files), sum(file.bytes for file in files)


def _of_table(contract: TableContract) -> Column:
    return (F.col("source_schema") == contract.schema) & (F.col("source_table") == contract.table)
