"""Describe the columns of the lake's tables for people; Dagster's catalog and query tools show these texts.

Columns that a contract names are described in the contract.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from omnisupport_ingest.cdc.current import SYSTEM_COLUMNS
from omnisupport_ingest.cdc.stored import STATE

EVENT_COLUMNS = {
    "window": "Window of the commit time: the partition. Which one never depends on when the event landed.",
    "epoch": "Epoch of the event: with the next two its position, which orders all events of a source.",
    "commit_lsn": "LSN of the commit, as a number; of sources without an LSN, what orders their events.",
    "ordinal": "Place in the transaction.",
    "op": "c insert, u update, d delete, r snapshot row, t truncate, m logical message, b end of a snapshot.",
    "source_ts": "When the change was committed at the source.",
    "tx_id": "Transaction at the source; NULL where it is not known.",
    "lsn": "LSN of the change itself; it identifies nothing.",
    "source_schema": "Schema of the table at the source.",
    "source_table": "Name of the table at the source.",
    "key": "The key, its parts as one JSON array in the contract's order; NULL for t, m and b.",
    "before": "The row before the change, as far as it was sent: JSON from column to text.",
    "after": "The row after the change: JSON from column to text.",
    "unchanged": "Columns that were not sent, as they did not change; earlier events have their values.",
    "moved_from_key": "The former key, on the c of an update that changed the key.",
    "chunk_id": "Chunk of the snapshot that the row was read with.",
    "identity": "What tells the event from others at its position, where positions are not unique.",
    "misplaced": "Whether the event stands in its file behind a later one of its key.",
    "file_row": "Line of the input file, from 1.",
    "envelope": "The text as it was delivered, where it was not captured.",
    "batch_id": "Batch that the event landed with.",
    "landed_at": "When that batch landed.",
    "watermark_before": "How far the source was complete before that batch; what lies before was late.",
    "newest_epoch_before": "The newest epoch that had landed before that batch.",
    "file_name": "Input file that the batch was read from.",
    "event_hash": "Hash of what the event says; of copies of one event it is the same.",
}
"""Columns of ``raw_cdc_staging`` and ``deduped_events``."""

QUARANTINE_COLUMNS = EVENT_COLUMNS | {
    "reason": "Why the event is here: a scenario of the decision table.",
    "detector": "What found it.",
    "rules": "Names of the rules of the contract that the row breaks.",
    "review_state": "open, discarded, or not_needed where the decision table asks for no review.",
}
"""Columns of ``quarantine``."""

HISTORY_COLUMNS = {
    "_cdc_key": SYSTEM_COLUMNS["_cdc_key"],
    "_cdc_valid_from": "When the event that opens the version was committed.",
    "_cdc_valid_to": "When the event that closes it was committed; NULL while the version holds.",
    "_cdc_valid_from_position": "Position of the event that opens the version: epoch, commit LSN, ordinal.",
    "_cdc_valid_to_position": "Position of the event that closes it; NULL while the version holds.",
    "_cdc_opened_by": "What opened it: c, u, d, r (snapshot row), t (truncate), b (snapshot end), moved.",
    "_cdc_closed_by": "What closed it, by the same letters; NULL while the version holds.",
    "_cdc_moved_from_key": "The former key, where a change of the key opened the version.",
    "_cdc_is_deleted": "Whether the row is deleted in this version; the last known values stay.",
    "_cdc_unresolved": SYSTEM_COLUMNS["_cdc_unresolved"],
    "_cdc_exact": SYSTEM_COLUMNS["_cdc_exact"],
    "_cdc_batch_id": "Batch that the opening event landed with.",
    "_cdc_ingested_at": "When that batch landed.",
    "_cdc_row_hash": "Hash of what the version says, but batch and landing time.",
}
"""Columns of ``dim_<table>_history``."""

_DIMENSION_COLUMNS = SYSTEM_COLUMNS | {STATE: "What a later update of the row needs; nobody reads it."}


def column_descriptions(names: Collection[str]) -> Mapping[str, str]:
    """Return the descriptions of the platform's own columns of a table that has the columns ``names``."""
    if STATE in names:
        return _DIMENSION_COLUMNS
    if "review_state" in names:
        return QUARANTINE_COLUMNS
    return HISTORY_COLUMNS if "_cdc_valid_from" in names else EVENT_COLUMNS
