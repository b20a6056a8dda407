"""Events that were not accepted, kept whole beside the reason, in step with ``deduped_events``.

A window's quarantine is the files that the state of its deduped window names. This stage commits
them first; whatever a crashed run left there besides is removed by the next commit.
"""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from omnisupport_ingest.cdc.envelope import QUARANTINE_TYPE
from omnisupport_ingest.cdc.judging import QUARANTINED
from omnisupport_ingest.lake.commit import WindowChange
from omnisupport_ingest.lake.contenthash import hash_of_files
from omnisupport_ingest.lake.staging import StagedFiles, stage_frame
from omnisupport_ingest.lake.state import WindowState
from omnisupport_ingest.lake.table import LakeTable, TableSnapshot, retrying
from omnisupport_ingest.stages.checkpoints import Counts, Identity, Outcome, checkpoint_of
from omnisupport_ingest.stages.plan import WindowPlan, Work
from omnisupport_ingest.stages.progress import BatchFacts

LAYER = "quarantine"

_NO_FACTS = BatchFacts(None, None, None, None)


def commit(
    table: LakeTable,
    others: DataFrame | None,
    keep: Mapping[str, tuple[str, ...]],
    *,
    unit: str,
    identity: Identity,
) -> dict[str, tuple[str, ...]]:
    """Add the quarantined events among ``others`` to their windows, besides the files in ``keep``.

    ``keep`` names, for every window in hand, the files that stay; ``others`` are judged events
    (null: none was refused). Returns the files of each window afterwards.
    """
    wanted: dict[str, tuple[str, ...]] = {}

    def attempt(snapshot: TableSnapshot) -> None:
        staged = StagedFiles(())
        if others is not None:
            rows = others.where(F.col("verdict") == QUARANTINED)
            generation = dict.fromkeys(keep, 1)
            staged = stage_frame(table, rows.select(*QUARANTINE_TYPE.names), unit=unit, generation=generation)
        changes = []
        for window, kept in keep.items():
            wanted[window] = tuple(sorted({*kept, *(file.path for file in staged.of(window))}))
            held = {file.path for file in snapshot.files(window)}
            damaged = bool(held) and snapshot.state(window) is None
            if damaged or held != set(wanted[window]):
                changes.append(_change(snapshot, window, wanted[window], staged, unit, identity))
        if changes:
            snapshot.commit(changes)

    retrying(attempt, table)
    return wanted


def _change(
    snapshot: TableSnapshot,
    window: str,
    wanted: tuple[str, ...],
    staged: StagedFiles,
    unit: str,
    identity: Identity,
) -> WindowChange:
    leaving = tuple(file for file in snapshot.files(window) if file.path not in wanted)
    content = hash_of_files((snapshot.table.folder / path for path in wanted), "event_hash")
    outcome = Outcome(unit, (), _NO_FACTS, Counts(quarantined=content.count))
    plan = WindowPlan(window, Work.APPEND, frozenset(wanted), 1)
    checkpoint = checkpoint_of(snapshot, plan, outcome, identity, content)
    return WindowChange(window, staged.of(window), leaving, WindowState(1, wanted, None, checkpoint), False)
