"""Commits the changes of many windows as one entry of the table's log, or refuses.

A commit succeeds only if nothing was committed since its snapshot was opened: the log entry is put at
exactly the next version, without delta-rs's own retries. The second of two writers gets a
``CommitConflict``, reloads and plans again. All writers of a table also share one application id, so a
writer that let delta-rs retry would be refused as well.
"""

from __future__ import annotations

import json
import random
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from deltalake import CommitProperties, DeltaTable, Schema
from deltalake.exceptions import CommitFailedError
from deltalake.transaction import AddAction, RemoveAction, Transaction

from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.lake.deletion_vectors import DeletionVector
from omnisupport_ingest.lake.delta import entry_file
from omnisupport_ingest.lake.layout import WHOLE_TABLE, WINDOW, LakeFile, StagedFile
from omnisupport_ingest.lake.state import WindowState
from omnisupport_ingest.storage import at_hand, storage_of

T = TypeVar("T")

NOTE = "omnisupport_ingest"
"""Key in the ``commitInfo`` of a log entry: describes the work that was committed."""

WRITER = "omnisupport_ingest_writer"
"""Key in the ``commitInfo`` of a log entry in an object store: identifies one attempt to commit."""

_NOTED_WINDOWS = 100
"""Most windows that a log entry names; the table holds the states of all."""


class CommitConflict(IngestError):
    """Another process committed to a table while this one was about to, also when it had planned again.
    Nothing was written.

    Fix: Run the same again. If it comes back, see which other program writes the table.
    """


class StagedFileMissing(IngestError):
    """A file that a commit was to add is gone, or was changed before the commit. Nothing was committed.

    Fix: Run the same again: it writes its files anew. If it comes back, see who removes files of the lake.
    """


@dataclass(frozen=True, slots=True)
class WindowChange:
    """What a commit does to one window.

    ``add``: files that enter the window. ``remove``: files that leave it. ``replaces``: every file that the
    window held leaves it, whether ``remove`` names it or not. ``state``: the window's new state.
    ``same_rows``: the window holds the same rows afterwards, so the log marks its files as no change of data.
    ``marked``: path of a file that stays → its new deletion vector, which lists all of its dead rows
    (``deletion_vectors.write_vectors``).
    """

    window: str
    add: tuple[StagedFile, ...]
    remove: tuple[LakeFile, ...]
    state: WindowState
    replaces: bool
    same_rows: bool = False
    marked: Mapping[str, DeletionVector] = field(default_factory=dict)


def add_data(folder: Path, file: StagedFile, *, same_rows: bool = False) -> AddAction:
    """Return the action that adds ``file``; ``StagedFileMissing`` if it is gone or has another size.

    delta-rs does not check this: it would commit a file that does not exist, and every reader would fail.
    """
    size = _size(at_hand(folder / file.path))
    if size != file.bytes:
        raise StagedFileMissing(
            f"{folder / file.path} was staged with {file.bytes} bytes; "
            + ("it is gone." if size is None else f"it has {size} now."),
            fix="Run the same work again: it stages its files again.",
        )
    return _add(file.path, file.bytes, file.partition, file.stats, same_rows=same_rows)


def add_state(
    path: str, size: int, partition: Sequence[tuple[str, str | None]], *, same_rows: bool = False
) -> AddAction:
    """Return the action that adds the state file at ``path``: ``size`` bytes, no rows."""
    stats = '{"numRecords":0,"minValues":{},"maxValues":{},"nullCount":{}}'
    return _add(path, size, partition, stats, same_rows=same_rows)


@dataclass(frozen=True, slots=True)
class VectorChange:
    """An action on a file with a deletion vector. deltalake's own actions cannot name vectors.

    ``file``: the file as the table holds it now. ``vector``: its new vector; None: the file leaves the table.
    ``stats``: its statistics (JSON text).
    """

    file: LakeFile
    vector: DeletionVector | None
    stats: str | None = None
    same_rows: bool = False


Action = AddAction | RemoveAction | VectorChange


def mark(folder: Path, file: LakeFile, vector: DeletionVector, stats: str | None) -> VectorChange:
    """Return the action that gives ``file`` of the table in ``folder`` another deletion vector.

    Raises ``StagedFileMissing`` if the vector's own file is gone.
    """
    if vector.path is not None and _size(at_hand(folder / vector.path)) is None:
        raise StagedFileMissing(
            f"{folder / vector.path} was written with the deletion vector of {file.path}; it is gone.",
            fix="Run the same work again: it stages its files again.",
        )
    return VectorChange(file, vector, stats)


def remove(file: LakeFile, *, same_rows: bool = False) -> RemoveAction | VectorChange:
    """Return the action that removes ``file``."""
    if file.vector is not None:
        return VectorChange(file, None, same_rows=same_rows)
    return RemoveAction(
        file.path,
        data_change=not same_rows,
        deletion_timestamp=_now(),
        size=file.bytes,
        partition_values=dict(file.partition),
    )


def commit_actions(
    handle: DeltaTable,
    actions: Sequence[Action],
    *,
    folder: Path,
    app_id: str,
    note: dict[str, Any],
    replacing_all_with: Schema | None = None,
) -> int:
    """Commit ``actions`` on top of the version that ``handle`` is pinned to; return the new version.

    ``folder``: of the table. ``note``: describes the work to people who read the log.
    ``replacing_all_with``: remove every file that the table holds, and give it this schema. Raises
    ``CommitConflict`` if another commit came after the version of ``handle``. If that commit is this one,
    and the object store only lost its answer, the call succeeds.
    """
    plain = [each for each in actions if not isinstance(each, VectorChange)]
    if len(plain) < len(actions):
        raise ValueError("delta-rs cannot commit deletion vectors: log_entry.put_entry does")
    version = handle.version()
    # A local disk answers in the same call, so no attempt has to be identified.
    writer = {} if urlsplit(handle.table_uri).scheme in ("", "file") else {WRITER: uuid.uuid4().hex}
    app_version = (handle.transaction_version(app_id) or 0) + 1
    try:
        with failpoint("lake.commit", app_id):
            handle.create_write_transaction(
                plain,
                mode="append" if replacing_all_with is None else "overwrite",
                schema=replacing_all_with or handle.schema(),
                partition_by=handle.metadata().partition_columns,
                commit_properties=CommitProperties(
                    custom_metadata={NOTE: note} | writer,
                    max_commit_retries=0,
                    app_transactions=[Transaction(app_id, app_version)],
                ),
            )
    except CommitFailedError as error:
        newest = DeltaTable(handle.table_uri).version()
        # The object store's listing may not show yet the entry that refused ours.
        if newest == version and not storage_of(folder).exists(entry_file(folder, version + 1)):
            # S3 refuses both of two puts at once with 409 (ConditionalRequestConflict): no entry is there.
            if not writer or "Failed to commit transaction" not in str(error):
                raise
            raise conflict(handle.table_uri, version, version + 1) from error
        newest = max(newest, version + 1)
        # The library may have put our entry, lost the answer, and been refused by that entry when it retried.
        if writer and _is_by(writer, entry_file(folder, version + 1)):
            return version + 1
        raise conflict(handle.table_uri, version, newest) from error
    return version + 1


def _is_by(writer: Mapping[str, str], entry: Path) -> bool:
    """Whether the attempt that ``writer`` identifies put the log entry ``entry``."""
    lines = map(json.loads, at_hand(entry).read_bytes().splitlines())
    return any(writer.items() <= line.get("commitInfo", {}).items() for line in lines)


def conflict(table: str, version: int, newest: int) -> CommitConflict:
    """Return the error for work that was planned on ``version`` while the table is at ``newest``."""
    return CommitConflict(
        f"{table} was at version {version} when this work was planned, and is at {newest} now.",
        fix="Nothing was written. Open the table again and plan on what it holds now.",
    )


def until_first(plan_and_commit: Callable[[], T], attempts: int) -> T:
    """Call ``plan_and_commit`` until it commits without a ``CommitConflict``; each call plans again.

    Raises the last conflict after ``attempts`` calls. Waits a random time between calls, up to 0.1 s more
    after each, so that two writers do not collide over and over.
    """
    for attempt in range(1, attempts):
        try:
            return plan_and_commit()
        except CommitConflict:
            time.sleep(random.uniform(0, 0.1 * attempt))  # noqa: S311 - no secret depends on it
    return plan_and_commit()


def commit_note(states: Iterable[WindowState], run_id: str | None = None) -> dict[str, Any]:
    """Return the description of the work for the log entry, of bounded size, for people who read the log.

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


def windows_in(entry: Path) -> frozenset[str] | None:
    """Return the windows of the files that a commit adds and removes; None if they cannot be read."""
    found = set()
    try:
        for line in at_hand(entry).read_bytes().splitlines():
            action = json.loads(line)
            for file in (action.get("add"), action.get("remove")):
                if file is not None:
                    found.add((file["partitionValues"] or {}).get(WINDOW) or WHOLE_TABLE)
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return None
    return frozenset(found)


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
