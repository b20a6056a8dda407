"""``deduped_events`` and ``quarantine`` → ``dim_<table>_history``: every version of every row of a table.

A history is made whole from all events, so late events and replays make it exact again; and only when
the events of its table have changed. That costs as much as the table has events, which is why no ingest
run does it.
"""

from __future__ import annotations

from pyspark.sql import SparkSession

from omnisupport_ingest.cdc.fold import partitions_for
from omnisupport_ingest.cdc.history import history
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.lake.checkpoint import Checkpoint
from omnisupport_ingest.lake.contenthash import content_hash
from omnisupport_ingest.lake.layout import WHOLE_TABLE
from omnisupport_ingest.lake.staging import stage_frame
from omnisupport_ingest.lake.table import TableSnapshot, retrying
from omnisupport_ingest.stages.checkpoints import Counts, Identity, Outcome, change_for, report
from omnisupport_ingest.stages.event_files import EventFiles
from omnisupport_ingest.stages.plan import Upstream
from omnisupport_ingest.stages.retyping import require_types
from omnisupport_ingest.stages.versions import of_contract
from omnisupport_ingest.stages.whole_table import WindowsAbove, plan_whole
from omnisupport_ingest.stages.workspace import Workspace

LAYER = "history"

HISTORY_VERSION = 2
"""Version of what a history says of its events; raised when the same events give other rows."""


def materialize(
    workspace: Workspace, spark: SparkSession, contract: TableContract, run_id: str, *, replay: bool = False
) -> Checkpoint:
    """Make the history of one table from all its events.

    Nothing is written while they are what it was made from last, unless ``replay`` asks for it.
    """
    table = workspace.history(contract)

    def attempt(snapshot: TableSnapshot) -> None:
        require_types(workspace, contract, snapshot)
        files = EventFiles.opened(workspace, contract.source)
        if not replay and not snapshot.retyped and _made_from(snapshot, files, contract):
            return
        upstream = upstream_of(files, contract)
        plan = plan_whole(snapshot, upstream, layer=LAYER, table=contract.full_name, replay=replay)
        if plan is None:
            return
        count, size = files.size(contract)
        parts = partitions_for(count, size)
        rows = history(files.events(spark, contract), contract, partitions=parts)
        ordered = rows.sortWithinPartitions("_cdc_key", "_cdc_valid_from_position")
        generation = {WHOLE_TABLE: plan.work.generation}
        staged = stage_frame(table, ordered, unit=plan.key, generation=generation, rows=count)
        above = WindowsAbove.of(files.deduped)
        outcome = Outcome(
            idempotency_key=plan.key,
            batches=above.batches,
            facts=above.facts,
            counts=Counts(),
            upstream_version=files.deduped.version,
        )
        identity = Identity(LAYER, contract.source, run_id)
        snapshot.commit(
            [change_for(snapshot, plan.work, upstream, outcome, identity, staged, "_cdc_row_hash")]
        )

    retrying(attempt, table)
    return report(table, [WHOLE_TABLE])[0]


def upstream_of(files: EventFiles, contract: TableContract) -> Upstream:
    """What the history is made from: the events of its table in each window, and the quarantine there.

    Content, not files: a window that was replayed to the same events leaves the history as it is.
    """
    units = set()
    for window in files.deduped.windows():
        accepted, holes = files.accepted(contract, window), files.holes_of(window)
        if accepted or holes:
            known = content_hash((file.uri for file in accepted), "event_hash")
            refused = content_hash((file.uri for file in holes), "event_hash")
            units.add(f"{window}@{known}+{refused}")
    return Upstream(frozenset(units), files.deduped.table_id, versions_of(contract))


def versions_of(contract: TableContract) -> tuple[str, ...]:
    """What makes a history stale when it changes: the logic, its own and the contract."""
    return (*of_contract(contract), f"history:{HISTORY_VERSION}")


def _made_from(snapshot: TableSnapshot, files: EventFiles, contract: TableContract) -> bool:
    """Whether the history was made from this very version of the events: then no hash is needed."""
    state = snapshot.state(WHOLE_TABLE)
    return (
        state is not None
        and state.upstream_table_id == files.deduped.table_id
        and state.checkpoint.upstream_version == files.deduped.version
        and state.versions == versions_of(contract)
    )
