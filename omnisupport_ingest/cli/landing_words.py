"""A manifest in words, for a person."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

from omnisupport_ingest.landing.manifest import Manifest

_WIDTH = 100


def kind_of(batch: Manifest) -> str:
    """What sort of batch it is, in a word or two."""
    if batch.chunk is not None:
        return "boundary" if batch.chunk.boundary else "snapshot"
    if batch.file is not None:
        return "file" if batch.file.offsets is None else "kafka"
    return "stream" if batch.rows else "idle"


def summary(batch: Manifest) -> dict[str, Any]:
    """The line of ``batch`` in a list, as JSON values."""
    return {
        "batch_id": batch.batch_id,
        "kind": kind_of(batch),
        "epoch": batch.epoch,
        "events": batch.rows,
        "bytes": sum(file.bytes for file in batch.files),
        "windows": list(batch.windows),
        "landed_at": batch.arrival.landed_at.isoformat(),
        "end_lsn": str(batch.stream.end_lsn) if batch.stream else None,
    }


def batch_table(batches: Sequence[Manifest]) -> None:
    """Print ``batches``, a line each."""
    from rich.console import Console
    from rich.table import Table

    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    shown.add_column("batch", no_wrap=True)
    shown.add_column("kind", no_wrap=True)
    shown.add_column("events", justify="right", no_wrap=True)
    shown.add_column("landed", no_wrap=True)
    for batch in batches:
        landed = f"{batch.arrival.landed_at:%m-%d %H:%M:%S}"
        shown.add_row(batch.batch_id, kind_of(batch), f"{batch.rows:,}", landed)
    # A name that is cut off cannot be copied.
    longest = max((len(batch.batch_id) for batch in batches), default=0)
    Console(highlight=False, width=max(_WIDTH, longest + 50)).print(shown, crop=False)


def in_words(batch: Manifest) -> Iterator[str]:
    """The manifest, a line for each thing it says."""
    yield f"{batch.batch_id}: {_what(batch)}"
    yield f"  of source        {batch.source}, epoch {batch.epoch}"
    yield f"  landed           {_time(batch.arrival.landed_at)}, written by {batch.written_by or 'unknown'}"
    yield from _span(batch)
    before, after = batch.arrival.watermark_before, batch.arrival.watermark
    yield f"  watermark        {_time(before)} before, {_time(after)} after"
    per_table: Counter[str] = Counter()
    for file in batch.files:
        per_table.update(file.rows_per_table)
    for table, rows in sorted(per_table.items()):
        yield f"  events           {rows:,} of {table}"
    for file in batch.files:
        order = "positions rise" if file.ordered else "positions not in order"
        yield f"  file             {file.path}"
        count = f"{file.rows:,} event{'s' * (file.rows != 1)}"
        yield f"                   window {file.window}: {count}, {file.bytes:,} bytes, {order}"
        yield f"                   {file.first} to {file.last}"
        yield f"                   SHA-256 {file.sha256}"
    if not batch.files:
        yield "  files            none"
    for relation in batch.relations:
        key = ", ".join(relation.key_columns) or "none"
        name = f"{relation.schema}.{relation.table}"
        yield f"  table            {name}: {len(relation.columns)} columns, key {key}"


def _what(batch: Manifest) -> str:
    if batch.chunk is not None:
        scope = "" if batch.chunk.scope is None else f", keys {batch.chunk.scope}"
        of = f"the snapshot of {batch.chunk.table}{scope}"
        return f"the boundary that ends {of}" if batch.chunk.boundary else f"{batch.rows:,} rows of {of}"
    if batch.file is not None:
        what = "a delivery of files" if batch.file.offsets is None else "records of Kafka topics"
        return f"{what}, {batch.rows:,} events"
    return f"a span of the stream, {batch.rows:,} events" if batch.rows else "an idle stretch of the stream"


def _span(batch: Manifest) -> Iterator[str]:
    if batch.stream is not None:
        span = batch.stream
        yield f"  continues        {span.previous_end_lsn}, ends at {span.end_lsn}"
        if span.last_commit_lsn is not None:
            yield f"  commits          {_time(span.first_commit_ts)} to {_time(span.last_commit_ts)}"
            yield f"  last commit      at {span.last_commit_lsn}, transaction {span.last_xid}"
    elif batch.chunk is not None:
        chunk = batch.chunk
        yield f"  snapshot         {chunk.snapshot_id}, chunk {chunk.chunk}, attempt {chunk.attempt}"
        yield f"  stands at        {chunk.low} to {chunk.high}, server's clock {_time(chunk.clock)}"
    elif batch.file is not None and batch.file.offsets is not None:
        for each in batch.file.offsets:
            if each.next > each.start:
                where = f"{each.topic}[{each.partition}] {each.start} to {each.next - 1}"
                yield f"  offsets          {where}, {each.records:,} records"
            if each.gone:
                yield f"  gap              {each.gone:,} of them were deleted before: {each.accepted}"
    elif batch.file is not None:
        yield f"  delivery         {batch.file.name}, described by {batch.file.manifest}"
        yield f"  content          SHA-256 {batch.file.sha256}"


def _time(moment: datetime | None) -> str:
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC" if moment else "none"
