"""Whether a data file is still the file that was landed: its size and its SHA-256."""

from __future__ import annotations

import hashlib
from pathlib import Path

from omnisupport_ingest.landing.errors import DamagedBatch
from omnisupport_ingest.landing.manifest import DataFile


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file in hexadecimal; reads it in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify(folder: Path, data_file: DataFile) -> None:
    """Compare ``data_file``, below ``folder``, with what its manifest says; else ``DamagedBatch``."""
    path = folder / data_file.path
    try:
        size = path.stat().st_size
        if size != data_file.bytes:
            how = "truncated" if size < data_file.bytes else "altered"
            raise _damaged(path, data_file, f"is {how}: {size} bytes instead of {data_file.bytes}")
        digest = sha256_of(path)
    except FileNotFoundError:
        raise missing(path, data_file) from None
    if digest != data_file.sha256:
        raise _damaged(path, data_file, f"is altered: SHA-256 {digest} instead of {data_file.sha256}")


def missing(path: Path, data_file: DataFile) -> DamagedBatch:
    """The error for a data file that is not there."""
    return _damaged(path, data_file, "is missing")


def _damaged(path: Path, data_file: DataFile, what: str) -> DamagedBatch:
    batch_id = Path(data_file.path).parent.name
    return DamagedBatch(
        f"Data file {path} of batch {batch_id} {what}.",
        fix=f"Restore {path} from a backup. Without one, read batch {batch_id} (window "
        f"{data_file.window}) from the source again: take a new snapshot of its tables, "
        f"{', '.join(sorted(data_file.rows_per_table))}.",
    )
