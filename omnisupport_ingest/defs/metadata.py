"""Turns a checkpoint into Dagster metadata, whose numbers the UI plots over partitions and time.

The UI plots only entries of type int and float; a number as text would only be listed.

The imports from ``dagster._core`` are private names. Every run of a table uses them, so tests fail if one has
moved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import dagster as dg
from dagster import MetadataValue
from dagster._core.execution.context.metadata_logging import (
    AssetMetadataHandle,
    OutputMetadataAccumulator,
)

from omnisupport_ingest.contracts.decision_table import (
    CONTRACT_CHANGE,
    DUPLICATE_WRITE,
    JUDGED,
    MANUAL_BACKFILL,
    REVIEW_DECISION,
)
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.defs.keys import docs_address
from omnisupport_ingest.lake.checkpoint import Checkpoint, MergeCost, RuleResults
from omnisupport_ingest.lake.layout import WHOLE_TABLE
from omnisupport_ingest.layers.dimension import net_changes
from omnisupport_ingest.layers.dimension.delayed_merge import waiting_merge
from omnisupport_ingest.layers.events import deduped, raw
from omnisupport_ingest.layers.workspace import Workspace

RAW, DEDUPED, NET_CHANGES = raw.LAYER, deduped.LAYER, net_changes.LAYER

_OF_EVERY_LAYER = (DUPLICATE_WRITE, MANUAL_BACKFILL)
_COUNTED: Mapping[str, tuple[str, ...]] = {
    RAW: _OF_EVERY_LAYER,
    DEDUPED: (*JUDGED, CONTRACT_CHANGE, REVIEW_DECISION, *_OF_EVERY_LAYER),
    NET_CHANGES: _OF_EVERY_LAYER,
}
"""The scenarios that a layer counts: of its events, and of the rebuilds of its windows."""

_EVENTS: Mapping[str, Mapping[str, Callable[[Checkpoint], int]]] = {
    RAW: {"events_raw": lambda each: each.raw},
    DEDUPED: {
        "events_raw": lambda each: each.raw,
        "events_deduped": lambda each: each.deduped,
        "events_duplicate": lambda each: each.duplicates,
        "events_quarantined": lambda each: each.quarantined,
    },
    NET_CHANGES: {"events_deduped": lambda each: each.deduped},
}
"""The event counts of each layer. Any other count would be plotted as a meaningless zero: raw judges no
event, and a dimension is made only from accepted ones."""

CONCEPTS = ("cursor", "watermark", "dedupe_key", "idempotency_key", "checkpoint")
"""The five entries that every materialization carries."""

MEANINGS: Mapping[str, str] = {
    "cursor": "Position of the last event that was taken in the window.",
    "watermark": "Up to which time the source was complete when the window was made.",
    "dedupe_key": "What identifies an event: epoch, LSN of the commit, ordinal.",
    "idempotency_key": "What identifies the write: the same one is done once.",
    "checkpoint": "The commit that has this state: version of the table, generation of the window, time.",
    "lsn_range": "LSNs of the first and the last event of the window.",
    "last_batch_id": "The last batch that was taken in.",
    "committed_by_run": "The run whose commit the state is; an older one where nothing was to be done.",
    "content_hash": "Hash of the rows of the window (of a dimension: of its net changes).",
    "batches": "Batches of the window that were taken in.",
    "generation": "How often the window was rebuilt.",
    "dagster/row_count": "Rows of the window; of a dimension or history, of the table, deleted ones too.",
    "window_rows": "Net changes of the window, of a dimension.",
    "watermark_lag_seconds": "How far the watermark was behind the commit.",
    "events_raw": "Events of the window, duplicates included.",
    "events_deduped": "Distinct accepted events; of a dimension those of its table.",
    "events_duplicate": "Copies that were left out.",
    "events_quarantined": "Events that wait in quarantine, or were discarded.",
    "closed": "Whether the window is closed.",
    "scenario_NAME": "Events of a scenario of the decision table, or rebuilds of the window for it.",
    "detected_by": "What found each of these scenarios.",
    "rules_broken": "Events that break a rule of the contract, whatever its policy.",
    "rules_broken_by_name": "The same, by rule.",
    "rules_share": "Share of the time of judging that rules cost; of the whole run it is less.",
    "exact_kernel_share": "Share of the run's events that went one by one through the exact kernel.",
    "content_hash_before": "The hash that a replay found.",
    "replay": "What the replay changed, and why: nothing, if the hashes are equal.",
    "made_again": "Tables whose events changed contracts had made again; the files of the others stayed.",
    "keys_changed": "Keys whose net change the replay changed.",
    "delta_version": "Version of the Delta table.",
    "upstream_version": "Version of the table that it was made from.",
    "duration_seconds": "Seconds of the step, for all its windows.",
    "complete_to": "Position up to which the whole dimension is complete.",
    "complete_to_time": "The time of that.",
    "dimension_version": "Version of the dimension.",
    "dimension_rows": "Rows of the dimension, deleted ones included.",
    "dimension_content_hash": "Hash of all rows of the dimension.",
    "merge_keys": "Keys that the last update changed.",
    "merge_keys_share": "The same, as a share of the rows before it or of those now, whichever are more.",
    "merge_files": "Files that the last update wrote again.",
    "merge_files_share": "The same, as a share of all files.",
    "unmerged_rows": "Rows that wait for a delayed merge.",
    "merge_due": "When they are merged at the latest.",
    "dead_rows_share": "Share of the rows in the files of a dimension that deletion vectors mark as deleted.",
    "fresh_files": "Files that hold new rows of any keys, beside those that hold a range of keys each.",
    "fresh_rows": "Rows in them.",
}
"""The meaning of every entry, shown on the page docs/reference.md."""


def checkpoint_metadata(
    checkpoint: Checkpoint, *, duration_seconds: float | None = None
) -> Mapping[str, dg.MetadataValue]:
    """Return the entries for the materialization of the checkpoint's window.

    ``duration_seconds``: how long the step took for all of its windows; None if unknown. The entry
    ``watermark_lag_seconds`` is how far the watermark was behind the commit. ``exact_kernel_share`` and
    ``rules_share``: as in ``Checkpoint`` and ``RuleResults``.
    """
    entries: dict[str, dg.MetadataValue] = {
        "cursor": MetadataValue.text(checkpoint.cursor or "none: no event yet"),
        "watermark": (
            MetadataValue.timestamp(checkpoint.watermark)
            if checkpoint.watermark is not None
            else MetadataValue.text("none: no event yet")
        ),
        "dedupe_key": MetadataValue.text(checkpoint.dedupe_key),
        "idempotency_key": MetadataValue.text(checkpoint.idempotency_key),
        "checkpoint": MetadataValue.text(
            f"Delta version {checkpoint.delta_version}, generation {checkpoint.generation}, "
            f"committed {checkpoint.committed_at.isoformat(timespec='milliseconds')}"
        ),
        "lsn_range": MetadataValue.text(f"{checkpoint.lsn_start or '–'} → {checkpoint.lsn_end or '–'}"),
        "last_batch_id": MetadataValue.text(checkpoint.last_batch_id or "–"),
        "committed_by_run": MetadataValue.text(checkpoint.run_id),
        "content_hash": MetadataValue.text(checkpoint.content_hash),
        "batches": MetadataValue.int(checkpoint.batches),
        "generation": MetadataValue.int(checkpoint.generation),
    }
    rows = MetadataValue.int(checkpoint.rows)
    # Dagster shows its own entry as the size of the table; for a dimension, ``dimension_metadata`` gives it.
    entries |= {"window_rows": rows} if checkpoint.layer == NET_CHANGES else {"dagster/row_count": rows}
    if checkpoint.watermark is not None:
        lag = (checkpoint.committed_at - checkpoint.watermark).total_seconds()
        entries["watermark_lag_seconds"] = MetadataValue.float(round(lag, 3))
    if checkpoint.window:
        # A history holds rows of all windows, and counts no events.
        entries |= {
            name: MetadataValue.int(count(checkpoint))
            for name, count in _EVENTS.get(checkpoint.layer, {}).items()
        }
        if checkpoint.layer != RAW:
            entries["closed"] = MetadataValue.bool(checkpoint.closed)
        entries |= {
            f"scenario_{name}": MetadataValue.int(checkpoint.scenarios.get(name, 0))
            for name in _COUNTED.get(checkpoint.layer, ())
        }
        if checkpoint.exact_share is not None:
            entries["exact_kernel_share"] = MetadataValue.float(checkpoint.exact_share)
        if checkpoint.rules is not None:
            entries |= _rules(checkpoint.rules)
        if checkpoint.detectors:
            entries["detected_by"] = MetadataValue.text(
                ", ".join(f"{name}: {by}" for name, by in sorted(checkpoint.detectors.items()))
            )
        entries |= _replay(checkpoint)
    for name, value in (
        ("delta_version", checkpoint.delta_version),
        ("upstream_version", checkpoint.upstream_version),
    ):
        if value is not None:
            entries[name] = MetadataValue.int(value)
    if duration_seconds is not None:
        entries["duration_seconds"] = MetadataValue.float(round(duration_seconds, 3))
    return entries


def add_to_materializations(
    context: dg.AssetExecutionContext, entries: Mapping[str | None, Mapping[str, dg.MetadataValue]]
) -> None:
    """Add ``entries``, by partition (None: the asset has none), to the materializations of the step's asset.

    ``context.add_asset_metadata`` takes one partition at a time; each call lists all partitions of the run
    and copies all earlier entries.
    """
    step = context.get_step_execution_context()
    given = dict(step._metadata_accumulator.per_output_metadata)
    for partition, of_partition in entries.items():
        given[AssetMetadataHandle(asset_key=context.asset_key, partition_key=partition)] = of_partition
    step._metadata_accumulator = OutputMetadataAccumulator(per_output_metadata=given)


def docs_metadata(page: str) -> Mapping[str, dg.MetadataValue]:
    """Return the link of an asset to ``page`` of the documentation, which the UI itself shows."""
    return {"documentation": MetadataValue.url(docs_address(page))}


def _rules(results: RuleResults) -> Mapping[str, dg.MetadataValue]:
    """Return the results and the cost of the contracts' rules."""
    broken = MetadataValue.int(sum(results.broken.values()))
    entries: dict[str, dg.MetadataValue] = {"rules_broken": broken}
    if results.broken:
        entries["rules_broken_by_name"] = MetadataValue.json(dict(results.broken))
    if results.share is not None:
        entries["rules_share"] = MetadataValue.float(results.share)
    return entries


def dimension_metadata(workspace: Workspace, contract: TableContract) -> Mapping[str, dg.MetadataValue]:
    """Return what every materialization of a dimension shows about the whole table.

    These are its number of rows, up to where it is complete, the keys and files that its last update changed,
    and what waits for a delayed merge. Empty if the table does not exist. The entries of a window, such as
    its content hash, describe its net changes.
    """
    snapshot = workspace.dimension(contract).look()
    state = snapshot.state(WHOLE_TABLE) if snapshot is not None else None
    if snapshot is None or state is None:
        return {}
    shown = state.checkpoint
    entries: dict[str, dg.MetadataValue] = {
        "complete_to": MetadataValue.text(shown.cursor or "none: no event yet"),
        "dimension_version": MetadataValue.int(snapshot.version),
        "dimension_rows": MetadataValue.int(shown.rows),
        "dagster/row_count": MetadataValue.int(shown.rows),
        "dimension_content_hash": MetadataValue.text(shown.content_hash),
    }
    if shown.watermark is not None:
        entries["complete_to_time"] = MetadataValue.timestamp(shown.watermark)
    if shown.merges and shown.merges[-1].held and shown.merges[-1].rows:
        entries |= merge_metadata(shown.merges[-1], shown.rows)
    if shown.marked is not None:
        stored = shown.rows + shown.marked.dead
        entries |= {
            "dead_rows_share": MetadataValue.float(shown.marked.dead / stored if stored else 0.0),
            "fresh_files": MetadataValue.int(shown.marked.fresh_files),
            "fresh_rows": MetadataValue.int(shown.marked.fresh_rows),
        }
    if contract.delayed_merge is not None:
        folded = workspace.net_changes(contract).look()
        waits = waiting_merge(contract, state, folded) if folded is not None else None
        entries["unmerged_rows"] = MetadataValue.int(waits.rows if waits is not None else 0)
        if waits is not None:
            entries["merge_due"] = MetadataValue.timestamp(waits.due)
    return entries


def merge_metadata(merge: MergeCost, rows: int) -> Mapping[str, dg.MetadataValue]:
    """Return the cost of the last update of a dimension. ``rows``: the number of its rows now."""
    # An update adds keys and purges others, and the table may since have been made again with fewer rows.
    most = max(merge.rows, rows, merge.keys)
    return {
        "merge_keys": MetadataValue.int(merge.keys),
        "merge_keys_share": MetadataValue.float(merge.keys / most),
        "merge_files": MetadataValue.int(merge.files),
        "merge_files_share": MetadataValue.float(merge.files / merge.held),
    }


def _replay(checkpoint: Checkpoint) -> Mapping[str, dg.MetadataValue]:
    """Return what a replay did to the window: nothing, or how many keys changed and why."""
    if checkpoint.replaced_hash is None:
        return {}
    entries: dict[str, dg.MetadataValue] = {
        "content_hash_before": MetadataValue.text(checkpoint.replaced_hash),
        "replay": MetadataValue.text(
            f"changed by {', '.join(checkpoint.changed_by)}" if checkpoint.changed_by else "no change"
        ),
    }
    if checkpoint.made_again:
        entries["made_again"] = MetadataValue.text(", ".join(checkpoint.made_again))
    if checkpoint.layer == NET_CHANGES:
        entries["keys_changed"] = MetadataValue.int(checkpoint.keys_changed or 0)
    return entries
