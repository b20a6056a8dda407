"""Positions of events that stay when the data files of old windows leave landing.

A file, a topic or a reading by cursor may bring a position again with another time, at any later moment. It
then lands in the window where the position landed first (``first_windows``), so that judging compares the
two. The data files say which window that is. Once they leave, a narrow file for each of them does: position,
a hash of the identity, and the commit time. Its row groups are those of the data file.

The identity itself is not kept: a hash of 64 bits of it tells events of one position apart. It covers the
whole identity, also a hash of content in it, because a row that a snapshot read again at the same position is
another event and has a window of its own.

A captured log needs none of this: its positions come in one order, and a transaction has one commit time.
"""

from __future__ import annotations

import hashlib
from pathlib import Path, PurePosixPath

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from omnisupport_ingest.durable import sync_folder
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.landing.errors import DamagedBatch
from omnisupport_ingest.landing.rows import EARLIER_IDENTITY, LANDED_SCHEMA
from omnisupport_ingest.landing.standing import LandedPart
from omnisupport_ingest.storage import create_exclusively, storage_of
from omnisupport_ingest.windows import OUT_OF_RANGE

FOLDER = "positions"
"""The folder of landing with the narrow files."""

_READ = ["commit_lsn", "ordinal", "identity", "source_ts"]

KEPT_SCHEMA = pa.schema(
    [
        pa.field(name, pa.int64(), nullable=False) if name == "identity" else LANDED_SCHEMA.field(name)
        for name in _READ
    ]
)

_FILE_BYTES, _EVENT_BYTES = 1_400, 20
"""Approximate bytes of a narrow file without its events, most of them for what Parquet says of its columns;
and of one event."""


def bytes_kept(files: int, events: int) -> int:
    """Return about how many bytes stay of data ``files`` with ``events`` that have left landing."""
    return files * _FILE_BYTES + events * _EVENT_BYTES


def kept_file(landing: Path, path: str) -> Path:
    """Return the narrow file that stands for the data file ``path``, relative to the folder ``landing``."""
    batch, name = PurePosixPath(path).parts[-2:]
    return landing / FOLDER / f"{batch}.{name}"


def keep_positions(landing: Path, part: LandedPart) -> None:
    """Keep the positions of the data file of ``part``, durably, unless they are kept already.

    Call it before the data file is deleted. Does nothing if that is gone. ``landing``: the landing folder of
    its source. Raises ``DamagedBatch`` if the data file cannot be read.
    """
    kept = kept_file(landing, part.path)
    storage = storage_of(kept)
    landed = storage.at_hand(landing / part.path)
    if storage.exists(kept) or not landed.exists():
        return
    try:
        content = _narrow(landed)
    except (OSError, pa.ArrowException) as error:
        raise DamagedBatch(
            f"Data file {landed} cannot be read: {type(error).__name__}. So it does not leave landing.",
            fix="Restore the file from a backup of the landing folder; `omnisupport-ingest landing verify` "
            "finds every damaged one.",
        ) from error
    with failpoint("landing.positions", kept):
        if not kept.parent.is_dir():
            kept.parent.mkdir(mode=0o700, exist_ok=True)
            sync_folder(landing)
        create_exclusively(kept, content)


def last_kept_window(landing: Path) -> str | None:
    """Return the latest window of which data files have left the folder ``landing`` of a source whose
    positions are kept; None if none have."""
    folder = landing / FOLDER
    # A data file is named after its window, a number and a token.
    names = (each.path.stem.rpartition(".")[2] for each in storage_of(folder).listed(folder))
    windows = (name.rsplit("-", 2)[0] for name in names)
    return max((each for each in windows if each != OUT_OF_RANGE), default=None)


def identity_hashes(identities: pa.ChunkedArray) -> pa.Array:
    """Return a hash of each of ``identities`` (null counts as empty), signed and of 64 bits."""
    texts = pc.replace_substring_regex(pc.fill_null(identities, ""), EARLIER_IDENTITY, r"\1]")
    return pa.array(map(_hash, texts.to_pylist()), pa.int64())


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), signed=True)


def _narrow(landed: Path) -> bytes:
    """Return the content of the narrow file of the data file ``landed``."""
    sink = pa.BufferOutputStream()
    # No failpoint: it is written to memory.
    with pq.ParquetFile(landed) as file, pq.ParquetWriter(sink, KEPT_SCHEMA, compression="zstd") as writer:
        for number in range(file.num_row_groups):
            group = file.read_row_group(number, columns=_READ)
            hashes = identity_hashes(group.column("identity"))
            columns = [hashes if name == "identity" else group.column(name) for name in _READ]
            rows = pa.table(columns, schema=KEPT_SCHEMA)
            writer.write_table(rows, row_group_size=max(1, rows.num_rows))
    return bytes(sink.getvalue())
