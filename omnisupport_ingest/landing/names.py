"""Names of batches, derived from what each batch continues.

Two writers that continue the same batch choose the same name, and only one of them can create its manifest.
Names sort by epoch, then Kafka records (``k``), snapshot chunks (``r``) and the stream (``s``), then by
offset or position. So the last name of a stream is its newest batch.
"""

from __future__ import annotations

import hashlib
import re

from omnisupport_ingest.landing.manifest import Manifest
from omnisupport_ingest.position import Lsn

_SAFE = re.compile(r"[A-Za-z0-9_.]{1,80}")
_UNSAFE_CHARACTER = re.compile(r"[^A-Za-z0-9_.]")
_OF_KAFKA = re.compile(r"e[0-9]{6,9}-k-")
_OF_SNAPSHOT_END = re.compile(r"-[0-9]{6,}-a[0-9]+-boundary$")
_IN_EPOCH = re.compile(r"e([0-9]{6,9})-[rs]-")


def stream_batch_id(epoch: int, previous_end_lsn: Lsn) -> str:
    """Return the name of the batch that continues the stream of ``epoch`` at ``previous_end_lsn``."""
    return f"{stream_prefix(epoch)}{previous_end_lsn.value:016x}"


def chunk_batch_id(
    epoch: int, snapshot_id: str, table: str, chunk: int, attempt: int, *, boundary: bool = False
) -> str:
    """Return the name of one attempt at one chunk of a table's snapshot, or of the snapshot end
    (``boundary``)."""
    name = f"{chunk_prefix(epoch)}{_safe(snapshot_id)}-{_safe(table)}-{chunk:06d}-a{attempt}"
    return f"{name}-boundary" if boundary else name


def first_chunk_of(snapshot_end: str) -> str:
    """Return the name of the first attempt at the first chunk of the snapshot whose end is the batch
    ``snapshot_end``."""
    return _OF_SNAPSHOT_END.sub("-000000-a1", snapshot_end)


def is_snapshot_end(batch_id: str) -> bool:
    """Return whether a batch is the end of a snapshot, by its name."""
    return _OF_SNAPSHOT_END.search(batch_id) is not None


def file_batch_id(sha256: str) -> str:
    """Return the name of the batch of an input file with this content hash (64 hexadecimal digits)."""
    return f"f-{sha256[:32]}"


def offsets_batch_id(epoch: int, starts: int) -> str:
    """Return the name of a batch of Kafka records. ``starts``: the sum of the start offsets of all
    partitions, which rises with every batch."""
    return f"{offsets_prefix(epoch)}{starts:019d}"


def batch_id_of(manifest: Manifest) -> str:
    """Return the name that follows from the content of ``manifest``."""
    if manifest.stream is not None:
        return stream_batch_id(manifest.epoch, manifest.stream.previous_end_lsn)
    if manifest.chunk is not None:
        chunk = manifest.chunk
        return chunk_batch_id(
            manifest.epoch,
            chunk.snapshot_id,
            chunk.table,
            chunk.chunk,
            chunk.attempt,
            boundary=chunk.boundary,
        )
    if manifest.file is not None and manifest.file.offsets is not None:
        return offsets_batch_id(manifest.epoch, sum(each.start for each in manifest.file.offsets))
    if manifest.file is not None:
        return file_batch_id(manifest.file.sha256)
    raise ValueError("a manifest has a stream, a chunk or a file")


def chunk_prefix(epoch: int) -> str:
    """Return the prefix of the names of all chunks and snapshot ends of ``epoch``."""
    return f"e{epoch:06d}-r-"


def stream_prefix(epoch: int) -> str:
    """Return the prefix of the names of all stream batches of ``epoch``."""
    return f"e{epoch:06d}-s-"


def offsets_prefix(epoch: int) -> str:
    """Return the prefix of the names of all batches of Kafka records of ``epoch``."""
    return f"e{epoch:06d}-k-"


def epoch_in(batch_id: str) -> int | None:
    """Return the epoch in the name of a stream batch or chunk; None for other batches."""
    match = _IN_EPOCH.match(batch_id)
    return int(match.group(1)) if match else None


def has_offsets(batch_id: str) -> bool:
    """Return whether a batch has records of Kafka, by its name."""
    return _OF_KAFKA.match(batch_id) is not None


def _safe(text: str) -> str:
    """Return ``text`` as part of a file name; a digest distinguishes texts that would become the same."""
    if _SAFE.fullmatch(text):
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return f"{_UNSAFE_CHARACTER.sub('_', text)[:60]}_{digest}"
