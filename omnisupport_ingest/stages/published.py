"""``dim_<table>`` → the published table: the fold of all windows, one row per key, for any engine.

Between writing the rows and committing them stands the contract's pandera gate: row rules have
judged the events one by one, the gate judges what became of them, and a table that does not pass
stays as it was.
"""

from __future__ import annotations

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from omnisupport_ingest.cdc.current import current_state, published_type
from omnisupport_ingest.cdc.fold import partitions_for
from omnisupport_ingest.contracts.load import TableContract
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.lake.checkpoint import Checkpoint
from omnisupport_ingest.lake.layout import WHOLE_TABLE
from omnisupport_ingest.lake.staging import StagedFiles, stage_frame
from omnisupport_ingest.lake.table import TableSnapshot, retrying
from omnisupport_ingest.position import Position
from omnisupport_ingest.stages.checkpoints import Counts, Identity, Outcome, change_for, report
from omnisupport_ingest.stages.idempotency import idempotency_key
from omnisupport_ingest.stages.plan import Upstream, WindowPlan, Work, plan_window
from omnisupport_ingest.stages.progress import BatchFacts
from omnisupport_ingest.stages.versions import of_contract
from omnisupport_ingest.stages.workspace import Workspace

LAYER = "published"


class GateClosed(IngestError):
    """Rows that would have been published break the contract."""


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
        files = dimension.all_files()
        parts = partitions_for(sum(file.rows for file in files), sum(file.bytes for file in files))
        state = current_state(rows, contract, partitions=parts).sortWithinPartitions("_cdc_key")
        staged = stage_frame(table, state, unit=key, generation={WHOLE_TABLE: plan.generation})
        _gate(spark, snapshot, contract, staged)
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


def known_live_rows(rows: DataFrame) -> DataFrame:
    """The rows that the contract's rules are about: alive, and every cell known."""
    unresolved = F.coalesce(F.size("_cdc_unresolved"), F.lit(0))
    return rows.where(~F.col("_cdc_is_deleted") & (unresolved <= 0))


def _gate(spark: SparkSession, snapshot: TableSnapshot, contract: TableContract, staged: StagedFiles) -> None:
    # pandera takes seconds to import, so only who publishes pays for it.
    from omnisupport_ingest.contracts.pandera_schema import failures

    paths = [f"file://{snapshot.table.folder / file.path}" for file in staged.files]
    if not paths:
        return
    broken = failures(known_live_rows(spark.read.schema(published_type(contract)).parquet(*paths)), contract)
    if broken:
        raise GateClosed(
            f"The current state of {contract.full_name} does not meet its contract: {', '.join(broken)}. "
            "It was not published.",
            fix=f"Look at the rows of dim_{contract.name} that break it; correct the contract or its source, "
            "and run the windows again.",
        )


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
    return Upstream(units, dimension.table_id, of_contract(contract))


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
