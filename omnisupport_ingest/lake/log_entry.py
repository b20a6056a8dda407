"""Commits without opening the table: puts one entry of the log at the next version, or refuses.

Before a commit, delta-rs reads the list of all files of the table. A table whose files the index knows does
not need that: the entry written here says the same (Delta protocol, actions). delta-rs makes the checkpoints.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from deltalake.exceptions import DeltaError
from deltalake.transaction import AddAction, RemoveAction

from omnisupport_ingest import __version__
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.lake.commit import NOTE, conflict
from omnisupport_ingest.lake.delta import open_delta
from omnisupport_ingest.lake.file_index_tables import IndexedVersion, TableLog, digest_of
from omnisupport_ingest.storage import create_exclusively, storage_of

_log = logging.getLogger(__name__)

_INTERVAL = "delta.checkpointInterval"
_CHECKPOINT_INTERVAL = 100
"""Entries between two checkpoints, where the table does not say."""

_PLAIN = frozenset({_INTERVAL, "delta.logRetentionDuration", "delta.deletedFileRetentionDuration"})
"""Table properties that put no demand on a commit (Delta protocol, table properties)."""


def may_put_entry(indexed: IndexedVersion, folder: Path) -> bool:
    """Return whether ``put_entry`` may commit to the table in ``folder``: it is on a local disk, and no table
    property puts demands on its writers."""
    return storage_of(folder).is_local and indexed.configuration.keys() <= _PLAIN


def put_entry(
    table: TableLog,
    indexed: IndexedVersion,
    actions: Sequence[AddAction | RemoveAction],
    text: dict[str, Any],
) -> int:
    """Commit ``actions`` on top of ``indexed`` without opening the table; return the new version.

    ``text``: describes the work to people who read the log. Raises ``CommitConflict`` if ``indexed`` is no
    longer the newest version.
    """
    version = indexed.version + 1
    lines = [
        _commit_info(indexed, text),
        *map(_line_of, actions),
        {"txn": {"appId": table.app_id, "version": indexed.app_version + 1, "lastUpdated": _now()}},
    ]
    content = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines).encode()
    with failpoint("lake.commit", table.app_id):
        held = digest_of(table.entry(indexed.version)) == indexed.entry
        if not held or not create_exclusively(table.entry(version), content):
            raise conflict(str(table.folder), indexed.version, _newest(table, indexed.version))
    if (version + 1) % _interval(indexed) == 0:
        _make_checkpoint(table, version)
    return version


def _newest(table: TableLog, version: int) -> int:
    while table.entry(version + 1).exists():
        version += 1
    return version


def _commit_info(indexed: IndexedVersion, text: dict[str, Any]) -> dict[str, Any]:
    by = json.dumps(indexed.partition_by, separators=(",", ":"))
    return {
        "commitInfo": {
            "timestamp": _now(),
            "operation": "WRITE",
            "operationParameters": {"mode": "Append", "partitionBy": by},
            "engineInfo": f"omnisupport_ingest/{__version__}",
            NOTE: text,
        }
    }


def _line_of(action: AddAction | RemoveAction) -> dict[str, Any]:
    """Return the action as a line of the log, with the path encoded as in a URI."""
    fields = {
        "path": quote(action.path, safe="/=-._~"),
        "partitionValues": dict(action.partition_values or {}),
        "size": action.size,
        "dataChange": action.data_change,
    }
    if isinstance(action, AddAction):
        return {"add": {**fields, "modificationTime": action.modification_time, "stats": action.stats}}
    moment = action.deletion_timestamp
    return {"remove": {**fields, "deletionTimestamp": moment, "extendedFileMetadata": True}}


def _interval(indexed: IndexedVersion) -> int:
    value = indexed.configuration.get(_INTERVAL, "")
    return int(value) if value.isdecimal() and int(value) else _CHECKPOINT_INTERVAL


def _make_checkpoint(table: TableLog, version: int) -> None:
    """Write the checkpoint of ``version`` and delete log entries that are older than the table keeps them.

    A failure is only logged: the commit is done, and the next checkpoint makes up for it.
    """
    try:
        with failpoint("lake.commit", "checkpoint"):
            handle = open_delta(table.folder, version)
            handle.create_checkpoint()
            handle.cleanup_metadata()
    except (DeltaError, OSError) as problem:
        _log.warning("No checkpoint of %s was made: %s.", table.folder, type(problem).__name__)


def _now() -> int:
    return time.time_ns() // 1_000_000
