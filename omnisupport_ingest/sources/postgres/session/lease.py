"""The lease that allows one capture per home and source: a lock that ends with its process."""

from __future__ import annotations

from pathlib import Path

from omnisupport_ingest.locks import Holder, LockTaken, NamedLock
from omnisupport_ingest.sources.postgres.session.errors import CaptureRunning


def take_lease(run_folder: Path, source: str) -> NamedLock:
    """Return the taken lease on ``source``, a context manager. Raises ``CaptureRunning`` with its holder."""
    try:
        return NamedLock.take(_file(run_folder, source))
    except LockTaken as taken:
        raise CaptureRunning(
            f"Source {source} is being captured into this home already by {taken.holder}.",
            fix="Leave that process running; or stop it, and run this command again.",
        ) from None


def lease_holder(run_folder: Path, source: str) -> Holder | None:
    """Return the process that captures ``source`` now, or None. Does not take the lease."""
    return NamedLock.holder(_file(run_folder, source))


def is_captured(run_folder: Path, source: str) -> bool:
    """Whether some process captures ``source`` now."""
    return lease_holder(run_folder, source) is not None


def _file(run_folder: Path, source: str) -> Path:
    return run_folder / f"capture-{source}.lock"
