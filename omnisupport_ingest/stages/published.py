"""``dim_<table>`` → the published table: the fold of all windows, one row per key, for any engine.

Between writing the rows and committing them stands the contract's pandera gate: row rules have
judged the events one by one, the gate judges what became of them, and a table that does not pass
stays as it was.

A contract may say that deleted rows are purged after a time. They are left out here alone: the
dimension keeps what ended them, so nothing that arrives below brings them back.
"""

from __future__ import annotations

from datetime import datetime

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from omnisupport_ingest.cdc.current import current_state, published_type
from omnisupport_ingest.cdc.fold import partitions_for
from omnisupport_ingest.contracts.load import TableContract
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.lake.checkpoint import Checkpoint
from omnisupport_ingest.lake.layout import WHOLE_TABLE
from omnisupport_ingest.lake.staging import StagedFiles, stage_frame
from omnisupport_ingest.lake.state import WindowState
from omnisupport_ingest.lake.table import TableSnapshot, retrying
from omnisupport_ingest.stages.checkpoints import Counts, Identity, Outcome, change_for, report
from omnisupport_ingest.stages.plan import Upstream
from omnisupport_ingest.stages.retyping import require_types
from omnisupport_ingest.stages.versions import of_contract
from omnisupport_ingest.stages.whole_table import WindowsAbove, plan_whole
from omnisupport_ingest.stages.workspace import Workspace

LAYER = "published"

_PURGE = "purge:"
"""Begins the version that says from when on deleted rows are shown."""


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
        require_types(workspace, contract, snapshot)
        dimension = workspace.dimension(contract).open()
        upstream = upstream_of(dimension, contract)
        plan = plan_whole(snapshot, upstream, layer=LAYER, table=contract.full_name, replay=replay)
        if plan is None:
            return
        files = dimension.all_files()
        rows = dimension.read(spark, files)
        count = sum(file.rows for file in files)
        parts = partitions_for(count, sum(file.bytes for file in files))
        current = current_state(
            rows, contract, partitions=parts, deleted_since=purged_before(dimension, contract)
        )
        state = current.sortWithinPartitions("_cdc_key")
        generation = {WHOLE_TABLE: plan.work.generation}
        staged = stage_frame(table, state, unit=plan.key, generation=generation, rows=count)
        _gate(spark, snapshot, contract, staged)
        above = WindowsAbove.of(dimension)
        outcome = Outcome(
            idempotency_key=plan.key,
            batches=above.batches,
            facts=above.facts,
            counts=Counts(),
            upstream_version=dimension.version,
        )
        identity = Identity(LAYER, contract.source, run_id)
        snapshot.commit(
            [change_for(snapshot, plan.work, upstream, outcome, identity, staged, "_cdc_row_hash")]
        )

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

    Content, not files: a window that was replayed to the same rows leaves nothing to publish. From
    when on deleted rows are shown is one of the versions.
    """
    states = {window: dimension.state(window) for window in dimension.windows()}
    units = frozenset(
        f"{window}@{state.checkpoint.content_hash}" if state else f"{window}@rewritten:{dimension.version}"
        for window, state in states.items()
        if dimension.files(window)
    )
    purged = purged_before(dimension, contract)
    versions = () if purged is None else (f"{_PURGE}{purged.isoformat()}",)
    return Upstream(units, dimension.table_id, (*of_contract(contract), *versions))


def purged_before(dimension: TableSnapshot, contract: TableContract) -> datetime | None:
    """Rows that were deleted before this moment are not published; null: all are.

    It follows from the watermark of the dimension's own states, so a rebuild purges the same rows. No
    row goes before its delete is older than anything that may still arrive to be judged in time.
    The moment moves by whole hours: each step of it is another version of the table.
    """
    watermark = WindowsAbove.of(dimension).facts.watermark
    if contract.purge_deleted_after is None or watermark is None:
        return None
    kept = max(contract.purge_deleted_after, contract.max_lateness + contract.allowed_lateness)
    try:
        return (watermark - kept).replace(minute=0, second=0, microsecond=0)
    except OverflowError:
        return None


def shows(state: WindowState, upstream: Upstream) -> bool:
    """Whether a table published with ``state`` shows what ``upstream`` has and leaves out what it purges.

    Another contract alone is no question of this: its windows are made again first, or wait.
    """
    if frozenset(state.inputs) != upstream.units:
        return False
    held, wanted = set(state.versions), set(upstream.versions)
    return held == wanted or not all(each.startswith(_PURGE) for each in held ^ wanted)
