"""Manifests of chunks of snapshots, as far as they tell when the chunks were read."""

from __future__ import annotations

from datetime import datetime, timedelta

from omnisupport_ingest.landing.manifest import ArrivalFacts, ChunkSpan, DataFile, Manifest
from omnisupport_ingest.position import Lsn, Position
from omnisupport_ingest_tests.landing.batches import NOON


def at(seconds: float) -> datetime:
    """A moment, in seconds from the beginning."""
    return NOON + timedelta(seconds=seconds)


def landed_chunk(
    number: int,
    clock: float,
    landed_at: float,
    ordinals: tuple[int, int] | None,
    *,
    rows: int = 100,
    table: str = "orders",
    boundary: bool = False,
) -> Manifest:
    """A chunk with ``rows`` rows, read at a mark of ``clock``; both times in seconds from the beginning.

    ``ordinals``: of its first and its last row; none where it has no rows.
    """
    span = ChunkSpan(f"of {table}", table, number, 1, Lsn(7), Lsn(8), at(clock), boundary=boundary)
    files = () if ordinals is None else (_file(rows, *ordinals),)
    return Manifest(
        batch_id=f"{table}-{number}",
        source="support_desk",
        epoch=1,
        arrival=ArrivalFacts(at(landed_at), None, None, None),
        chunk=span,
        files=files,
    )


def _file(rows: int, first: int, last: int) -> DataFile:
    ends = Position(1, Lsn(7), first), Position(1, Lsn(7), last)
    return DataFile(
        "data/x.parquet", "2026-03-02T12:00", rows, 1000, "", *ends, True, {"public.orders": rows}
    )
