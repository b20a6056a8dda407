"""Previews a replay of windows without committing anything.

Judges and folds everything that has landed for the windows, and what raw holds of batches that landing no
longer has, as a replay would. The result is compared with the current net changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from omnisupport_ingest import progress
from omnisupport_ingest.cdc import dedupe
from omnisupport_ingest.cdc.broken_rules import BrokenRules, RulesLookout
from omnisupport_ingest.cdc.erasing import Erasures
from omnisupport_ingest.cdc.fold import fold_events, hashed, merge_rows
from omnisupport_ingest.cdc.folded import folded_type
from omnisupport_ingest.cdc.judging import ACCEPTED, DUPLICATE, QUARANTINED, JudgingRules
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.layers.events import raw
from omnisupport_ingest.layers.events.deduped import to_judge
from omnisupport_ingest.layers.events.judging_rules import contents_of, judging_rules_of
from omnisupport_ingest.layers.replay_reasons import changed
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.visiting import Visit
from omnisupport_ingest.windows import OUT_OF_RANGE

NAMED = 1000
"""At most so many keys of a table are named; all are counted."""


@dataclass(frozen=True, slots=True)
class TablePreview:
    """The keys of one table whose folded state a replay would change, by window; windows without such keys
    are left out.

    ``keys_changed`` counts all of them. ``keys`` has the first ``NAMED``, in order, as ``_cdc_key`` of the
    tables has them; ``""`` stands for a change of the whole table. It is None if the contract marks a key
    column as personal.
    """

    table: str
    keys_changed: dict[str, int]
    keys: dict[str, list[str]] | None


@dataclass(frozen=True, slots=True)
class ReplayPreview:
    """``events`` would be judged again: ``accepted``, ``duplicates`` and ``quarantined`` add up to them."""

    windows: tuple[str, ...]
    events: int
    accepted: int
    duplicates: int
    quarantined: int
    tables: tuple[TablePreview, ...]

    @property
    def changes_nothing(self) -> bool:
        return not any(each.keys_changed for each in self.tables)


def preview_replay(
    workspace: Workspace,
    spark: SparkSession,
    source: str,
    windows: Sequence[str],
    contracts: Sequence[TableContract],
) -> ReplayPreview:
    """Judge and fold ``windows`` of ``source`` as a replay would; ``contracts``: the tables to compare."""
    wanted_windows = [*windows, OUT_OF_RANGE]
    events = raw.all_events(workspace, spark, source, wanted_windows)
    rules = judging_rules_of(workspace, spark, source, wanted_windows)
    visit = Visit.of(spark, workspace.raw(source).folder)
    marked = dedupe.mark_copies(to_judge(events), contents_of(rules), visit)
    judged = dedupe.judge(marked, _with_rejected(marked, rules, visit), visit).cache()
    progress.reached("judging the events again")
    try:
        verdicts = {
            row["verdict"]: row["count"]
            for row in judged.where(F.col("window") != OUT_OF_RANGE).groupBy("verdict").count().collect()
        }
        tables = tuple(
            _table(workspace, spark, judged, contract, wanted_windows)
            for contract in progress.each(contracts, lambda each: f"folding {each.name}")
        )
    finally:
        judged.unpersist()
    return ReplayPreview(
        windows=tuple(windows),
        events=sum(verdicts.values()),
        accepted=verdicts.get(ACCEPTED, 0),
        duplicates=verdicts.get(DUPLICATE, 0),
        quarantined=verdicts.get(QUARANTINED, 0),
        tables=tables,
    )


def _with_rejected(marked: DataFrame, judging_rules: JudgingRules, visit: Visit | None) -> JudgingRules:
    """Return ``judging_rules`` with the batches that they reject among ``marked`` events
    (``dedupe.mark_copies``).

    If no rule rejects batches, nothing is judged. ``visit``: as in ``dedupe.judge``.
    """
    if not RulesLookout(judging_rules.contracts).rejects:
        return judging_rules
    # Judge without erasing values: that does not matter here.
    judged = dedupe.judge(marked, replace(judging_rules, erasures=Erasures()), visit)
    look = partial(_reports, contracts=tuple(judging_rules.contracts))
    reports = judged.mapInArrow(look, "report string").collect()
    found = sum((BrokenRules.parse(each["report"]) for each in reports), BrokenRules())
    return replace(judging_rules, rejected=found.rejected)


def _reports(
    batches: Iterable[pa.RecordBatch], contracts: tuple[TableContract, ...]
) -> Iterator[pa.RecordBatch]:
    lookout = RulesLookout(contracts)
    for batch in batches:
        report = pa.array([lookout.found(batch).to_text()], pa.string())
        yield pa.RecordBatch.from_arrays([report], names=["report"])


def _table(
    workspace: Workspace,
    spark: SparkSession,
    judged: DataFrame,
    contract: TableContract,
    windows: Sequence[str],
) -> TablePreview:
    of_table = (F.col("source_schema") == contract.schema) & (F.col("source_table") == contract.table)
    events = judged.where((F.col("verdict") != DUPLICATE) & of_table)
    folded = hashed(fold_events(events.withColumn("withheld", F.col("verdict") == QUARANTINED), contract))
    present = spark.createDataFrame([], folded_type(contract))
    if workspace.net_changes(contract).exists:
        net_changes = workspace.net_changes(contract).open()
        parts = net_changes.read(spark, [file for window in windows for file in net_changes.files(window)])
        # What a window holds is folded in parts.
        present = merge_rows(parts, contract)
    state = ("_cdc_kind", "_cdc_key", "_cdc_ended_at", "_cdc_row_hash")
    differing = changed(present, folded, windows, state).cache()
    try:
        counts = {row["window"]: row["count"] for row in differing.groupBy("window").count().collect()}
        first = differing.orderBy("window", "key").limit(NAMED).collect() if counts else []
    finally:
        differing.unpersist()
    named: dict[str, list[str]] = {}
    for row in first:
        named.setdefault(row["window"], []).append(row["key"])
    return TablePreview(contract.name, dict(sorted(counts.items())), None if contract.personal_key else named)
