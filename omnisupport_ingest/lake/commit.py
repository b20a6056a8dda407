"""One entry in the table's log for the changes of many windows, or a refusal.

A commit holds only if nothing was committed since the snapshot it was planned on was opened: the
log entry is put at exactly the next version, without delta-rs's own retries. So whoever comes
second learns of it, reloads and plans again. All writers of a table also share one application id,
so a writer that let delta-rs retry would be refused as well.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from deltalake import CommitProperties, DeltaTable, Schema
from deltalake.exceptions import CommitFailedError
from deltalake.transaction import AddAction, RemoveAction, Transaction

from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.lake.layout import LakeFile, StagedFile
from omnisupport_ingest.lake.state import WindowState
from omnisupport_ingest.storage import at_hand

T = TypeVar("T")

NOTE = "omnisupport_ingest"
"""The key of our note in the ``commitInfo`` of a log entry."""

_NOTED_WINDOWS = 100
"""A log entry names at most this many windows; the states of all are in the table."""


class CommitConflict(IngestError):
    """Somebody else committed to the table since the snapshot was opened: reload, plan again."""


class StagedFileMissing(IngestError):
    """A staged file is gone or changed before its commit."""


@dataclass(frozen=True, slots=True)
class WindowChange:
    """What a commit does to one window.

    ``add`` joins the window and ``state`` becomes its state. ``remove`` leaves it; with
    ``replaces`` everything the window held before leaves it, named or not. ``same_rows``: the window
    holds the same rows afterwards, so the log marks its files as no change of data.
    """

    window: str
    add: tuple[StagedFile, ...]
    remove: tuple[LakeFile, ...]
    state: WindowState
    replaces: bool
    same_rows: bool = False


def add_data(folder: Path, file: StagedFile, *, same_rows: bool = False) -> AddAction:
    """The action that adds ``file``; ``StagedFileMissing`` if it is not there as it was staged.

    delta-rs accepts a file that does not exist, and every reader would fail on it.
    """
    size = _size(at_hand(folder / file.path))
    if size != file.bytes:
        raise StagedFileMissing(
            f"{folder / file.path} was staged with {file.bytes} bytes; "
            + ("it is gone." if size is None else f"it has {size} now."),
            fix="Run the same work again: it stages its files anew.",
        )
    return _add(file.path, file.bytes, file.partition, file.stats, same_rows=same_rows)


def add_state(
    path: str, size: int, partition: Sequence[tuple[str, str | None]], *, same_rows: bool = False
) -> AddAction:
    """The action that adds the state file at ``path``, ``size`` bytes without rows."""
    stats = '{"numRecords":0,"minValues":{},"maxValues":{},"nullCount":{}}'
    return _add(path, size, partition, stats, same_rows=same_rows)


def remove(file: LakeFile, *, same_rows: bool = False) -> RemoveAction:
    """The action that removes exactly ``file``."""
    return RemoveAction(
        file.path,
        data_change=not same_rows,
        deletion_timestamp=_now(),
        size=file.bytes,
        partition_values=dict(file.partition),
    )


def commit_actions(
    handle: DeltaTable,
    actions: Sequence[AddAction | RemoveAction],
    *,
    app_id: str,
    note: dict[str, Any],
    replacing_all_with: Schema | None = None,
) -> int:
    """Commit ``actions`` on top of the version that ``handle`` is pinned to; returns the new one.

    ``replacing_all_with``: every file of the table leaves it, and this is its schema from then on.
    ``CommitConflict`` if that is not the newest version any more.
    """
    version = handle.version()
    app_version = (handle.transaction_version(app_id) or 0) + 1
    try:
        with failpoint("lake.commit", app_id):
            handle.create_write_transaction(
                list(actions),
                mode="append" if replacing_all_with is None else "overwrite",
                schema=replacing_all_with or handle.schema(),
                partition_by=handle.metadata().partition_columns,
                commit_properties=CommitProperties(
                    custom_metadata={NOTE: note},
                    max_commit_retries=0,
                    app_transactions=[Transaction(app_id, app_version)],
                ),
            )
    except CommitFailedError as error:
        newest = DeltaTable(handle.table_uri).version()
        if newest == version:
            raise
        raise conflict(handle.table_uri, version, newest) from error
    return version + 1


def conflict(table: str, version: int, newest: int) -> CommitConflict:
    """The refusal of work that was planned on ``version``."""
    return CommitConflict(
        f"{table} was at version {version} when this work was planned, and is at {newest} now.",
        fix="Nothing was written. Open the table again and plan on what it holds now.",
    )


def until_first(plan_and_commit: Callable[[], T], attempts: int) -> T:
    """Call ``plan_and_commit`` until its commit meets no other; it plans anew at each call.

    The last ``CommitConflict`` is raised after ``attempts`` calls. Between them passes a random
    time of up to 0.1 s, longer each time, so that two writers do not meet again and again.
    """
    for attempt in range(1, attempts):
        try:
            return plan_and_commit()
        except CommitConflict:
            time.sleep(random.uniform(0, 0.1 * attempt))  # noqa: S311 - no secret depends on it
    return plan_and_commit()


def commit_note(states: Iterable[WindowState], run_id: str | None = None) -> dict[str, Any]:
    """What the log entry says about the work, bounded in size, for people who read the log.

    ``run_id``: the run that commits, where it is not the one that made the content.
    """
    checkpoints = [state.checkpoint for state in states]
    return {
        "run_id": run_id or (checkpoints[0].run_id if checkpoints else None),
        "window_count": len(checkpoints),
        "windows": [
            {
                "window": checkpoint.window,
                "generation": checkpoint.generation,
                "idempotency_key": checkpoint.idempotency_key,
                "position": checkpoint.cursor,
                "last_batch_id": checkpoint.last_batch_id,
                "closed": checkpoint.closed,
            }
            for checkpoint in checkpoints[:_NOTED_WINDOWS]
        ],
    }


def _add(
    path: str, size: int, partition: Sequence[tuple[str, str | None]], stats: str, *, same_rows: bool
) -> AddAction:
    return AddAction(
        path=path,
        size=size,
        partition_values=dict(partition),
        modification_time=_now(),
        data_change=not same_rows,
        stats=stats,
    )


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def _now() -> int:
    return time.time_ns() // 1_000_000
