"""A landed batch as one line for a person."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omnisupport_ingest.landing.manifest import Manifest


def landed_line(batch: Manifest) -> str | None:
    """What ``batch`` brought; nothing for an idle stretch or the boundary of a snapshot."""
    rows = sum(file.rows for file in batch.files)
    if batch.chunk is not None:
        return None if batch.chunk.boundary else f"Landed the snapshot of {batch.chunk.table}: {rows:,} rows"
    if batch.stream is not None and rows:
        return f"Landed {rows:,} changes, up to {batch.stream.end_lsn}"
    return None
