"""``dim_<table>`` → the published table: the fold of all windows, one row per key, for any engine."""

from __future__ import annotations

from pyspark.sql import SparkSession

from omnisupport_ingest.cdc.current import current_state
from omnisupport_ingest.contracts.load import TableContract
from omnisupport_ingest.lake.checkpoint import Checkpoint
from omnisupport_ingest.lake.layout import WHOLE_TABLE
from omnisupport_ingest.lake.staging import stage_frame
from omnisupport_ingest.lake.table import TableSnapshot, retrying
from omnisupport_ingest.position import Position
from omnisupport_ingest.stages.checkpoints import Counts, Identity, Outcome, change_for, report
from omnisupport_ingest.stages.idempotency import LOGIC_VERSION, idempotency_key
from omnisupport_ingest.stages.plan import Upstream, WindowPlan, Work, plan_window
from omnisupport_ingest.stages.progress import BatchFacts
from omnisupport_ingest.stages.workspace import Workspace

LAYER = "published"


def materialize(
    workspace: Workspace, spark: SparkSession, contract: TableContract, run_id: str, *, replay: bool = False
) -> Checkpoint:
    """Publish the current state, complete to the position and watermark that the checkpoint names.

    Nothing is written while the dimension's content is what was published last, unless ``replay``
    asks for it.
    """
    table = workspace.published(contract)

    def attempt(snapshot: TableSnapshot) -> None:
        dimension = workspace.dimension(contract).open()
        upstream = upstream_of(dimension, contract)
        plan = plan_window(snapshot, WHOLE_TABLE, upstream, replay=replay)
        if plan.work is Work.NOTHING:
            return
        # Appending to a state is making it again: a key's rows may stand in any window.
        plan = WindowPlan(WHOLE_TABLE, Work.REPLACE, upstream.units, snapshot.version + 1)
        key = idempotency_key(
            layer=LAYER,
            table=contract.full_name,
            window=WHOLE_TABLE,
            inputs=upstream.units,
            versions=upstream.versions,
        )
        rows = dimension.read(spark, dimension.all_files())
        state = current_state(rows, contract).sortWithinPartitions("_cdc_key")
        staged = stage_frame(table, state, unit=key, generation={WHOLE_TABLE: plan.generation})
        outcome = Outcome(
            idempotency_key=key,
            batches=_batches(dimension),
            facts=_facts(dimension),
            counts=Counts(),
            upstream_version=dimension.version,
        )
        identity = Identity(LAYER, contract.source, run_id)
        snapshot.commit([change_for(snapshot, plan, upstream, outcome, identity, staged, "_cdc_row_hash")])

    retrying(attempt, table)
    return report(table, [WHOLE_TABLE])[0]


def upstream_of(dimension: TableSnapshot, contract: TableContract) -> Upstream:
    """What the published table is made from: the content of each window of the dimension.

    Content, not files: a window that was replayed to the same rows leaves nothing to publish.
    """
    states = {window: dimension.state(window) for window in dimension.windows()}
    units = frozenset(
        f"{window}@{state.checkpoint.content_hash}" if state else f"{window}@rewritten:{dimension.version}"
        for window, state in states.items()
        if dimension.files(window)
    )
    return Upstream(units, dimension.table_id, (f"logic:{LOGIC_VERSION}", f"contract:{contract.fingerprint}"))


def _batches(dimension: TableSnapshot) -> tuple[str, ...]:
    found: set[str] = set()
    for window in dimension.windows():
        state = dimension.state(window)
        found |= set(state.batches) if state else set()
    return tuple(sorted(found))


def _facts(dimension: TableSnapshot) -> BatchFacts:
    states = [state for window in dimension.windows() if (state := dimension.state(window)) is not None]
    marks = [state.checkpoint.watermark for state in states if state.checkpoint.watermark is not None]
    held = [state for state in states if state.checkpoint.cursor]
    if not held:
        return BatchFacts(None, None, None, max(marks, default=None))
    newest = max(held, key=lambda state: Position.parse(state.checkpoint.cursor))
    last = Position.parse(newest.checkpoint.cursor)
    return BatchFacts(last, last, newest.checkpoint.last_batch_id, max(marks, default=None))
