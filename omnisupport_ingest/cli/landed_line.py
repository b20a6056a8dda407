"""A landed batch as one line for a person."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omnisupport_ingest.landing.manifest import ChunkSpan, Manifest


def landed_line(batch: Manifest) -> str | None:
    """What ``batch`` brought; nothing for an idle stretch or the end of a snapshot that was one chunk."""
    rows = sum(file.rows for file in batch.files)
    if batch.chunk is not None:
        return _of_snapshot(batch.chunk, rows)
    if batch.stream is not None and rows:
        return f"Landed {rows:,} changes, up to {batch.stream.end_lsn}"
    return None


def _of_snapshot(chunk: ChunkSpan, rows: int) -> str | None:
    from omnisupport_ingest.landing.snapshot_plans import SCHEMA_ONLY

    if chunk.snapshot_id == SCHEMA_ONLY:
        return f"Landed the form of {chunk.table}"
    # Lines go to logs, and keys may be personal.
    of = chunk.table if chunk.scope is None else f"a range of {chunk.table}"
    if chunk.boundary:
        return f"Landed all of the snapshot of {of}" if chunk.chunk > 1 else None
    whole = chunk.chunk == 0 and chunk.end is None
    which = "" if whole else f", chunk {chunk.chunk + 1}"
    return f"Landed the snapshot of {of}{which}: {rows:,} rows"
