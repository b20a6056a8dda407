"""Check that a data file is still the one that landed: its size and its SHA-256."""

from __future__ import annotations

import hashlib
from pathlib import Path

from omnisupport_ingest.landing.errors import DamagedBatch
from omnisupport_ingest.landing.manifest import DataFile
from omnisupport_ingest.landing.names import epoch_in, has_offsets
from omnisupport_ingest.storage import put_back, storage_of, take_away

RECORDS_AGAIN = (
    "If there is none, its records are not read again: have the connector read its tables again (an "
    "incremental snapshot), which sends every row as it is now."
)
"""What to do about lost records of Kafka. They may be gone from the cluster, and later ones have landed."""


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal; the file is read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify(folder: Path, data_file: DataFile) -> None:
    """Compare ``data_file``, below ``folder``, with what its manifest says. Raises ``DamagedBatch`` if it
    differs."""
    path = folder / data_file.path
    try:
        size, digest = storage_of(path).digest(path)
    except FileNotFoundError:
        raise _damaged(path, data_file, "is missing") from None
    if size != data_file.bytes:
        how = "truncated" if size < data_file.bytes else "altered"
        raise _damaged(path, data_file, f"is {how}: {size} bytes instead of {data_file.bytes}")
    if digest != data_file.sha256:
        raise _damaged(path, data_file, f"is altered: SHA-256 {digest} instead of {data_file.sha256}")


def _damaged(path: Path, data_file: DataFile, problem: str) -> DamagedBatch:
    batch_id = Path(data_file.path).parent.name
    restore = put_back(path, f"Restore {path} from a backup of the landing folder.")
    problem = f"Data file {path} of batch {batch_id} {problem}."
    if has_offsets(batch_id):
        return DamagedBatch(problem, fix=f"{restore} {RECORDS_AGAIN}")
    again = (
        "load its seed manifest again: `omnisupport-ingest manifest load`"
        if epoch_in(batch_id) is None
        else 'begin a new epoch: `omnisupport-ingest capture --new-epoch "what happened"`'
    )
    away = take_away(
        path.parent.parent.parent / "manifests" / f"{batch_id}.json",
        f"stop the platform, move manifests/{batch_id}.json out of the landing folder",
    )
    return DamagedBatch(
        problem,
        fix=f"{restore} If there is none, {away}, so that the batch counts as missing, and {again}.",
    )
