"""A commit without opening the table: one entry of its log, put at the next version or refused.

delta-rs reads every file that a table holds before it commits to it. A table whose files the index has is
committed to without that: the entry says the same (Delta protocol, actions). delta-rs makes the checkpoints.
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
from omnisupport_ingest.lake.file_index_tables import NotedTable, TablePlace, digest_of
from omnisupport_ingest.storage import create_exclusively, storage_of

_log = logging.getLogger(__name__)

_INTERVAL = "delta.checkpointInterval"
_CHECKPOINT_INTERVAL = 100
"""Entries between two checkpoints, where the table does not say."""

_PLAIN = frozenset({_INTERVAL, "delta.logRetentionDuration", "delta.deletedFileRetentionDuration"})
"""Properties of a table that change nothing of what a commit must say (Delta protocol, table properties)."""


def may_put_entry(note: NotedTable, folder: Path) -> bool:
    """Whether ``put_entry`` may commit to the table in ``folder``: it is here, and its writers are asked for
    nothing special."""
    return storage_of(folder).is_local and note.configuration.keys() <= _PLAIN


def put_entry(
    table: TablePlace, note: NotedTable, actions: Sequence[AddAction | RemoveAction], text: dict[str, Any]
) -> int:
    """Commit ``actions`` on top of the version that ``note`` is of, without opening the table; returns the
    new one. ``text``: what the entry says of the work.

    ``CommitConflict`` if that is not the newest version any more.
    """
    version = note.version + 1
    lines = [
        _commit_info(note, text),
        *map(_told, actions),
        {"txn": {"appId": table.app_id, "version": note.app_version + 1, "lastUpdated": _now()}},
    ]
    content = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines).encode()
    with failpoint("lake.commit", table.app_id):
        held = digest_of(table.entry(note.version)) == note.entry
        if not held or not create_exclusively(table.entry(version), content):
            raise conflict(str(table.folder), note.version, _newest(table, note.version))
    if (version + 1) % _interval(note) == 0:
        _make_checkpoint(table, version)
    return version


def _newest(table: TablePlace, version: int) -> int:
    while table.entry(version + 1).exists():
        version += 1
    return version


def _commit_info(note: NotedTable, text: dict[str, Any]) -> dict[str, Any]:
    by = json.dumps(note.partition_by, separators=(",", ":"))
    return {
        "commitInfo": {
            "timestamp": _now(),
            "operation": "WRITE",
            "operationParameters": {"mode": "Append", "partitionBy": by},
            "engineInfo": f"omnisupport_ingest/{__version__}",
            NOTE: text,
        }
    }


def _told(action: AddAction | RemoveAction) -> dict[str, Any]:
    """The action as a line of the log; the path is a URI's."""
    told = {
        "path": quote(action.path, safe="/=-._~"),
        "partitionValues": dict(action.partition_values or {}),
        "size": action.size,
        "dataChange": action.data_change,
    }
    if isinstance(action, AddAction):
        return {"add": {**told, "modificationTime": action.modification_time, "stats": action.stats}}
    moment = action.deletion_timestamp
    return {"remove": {**told, "deletionTimestamp": moment, "extendedFileMetadata": True}}


def _interval(note: NotedTable) -> int:
    told = note.configuration.get(_INTERVAL, "")
    return int(told) if told.isdecimal() and int(told) else _CHECKPOINT_INTERVAL


def _make_checkpoint(table: TablePlace, version: int) -> None:
    """Have a checkpoint stand for the entries up to ``version``; those that are older than the table keeps
    them leave the log. The commit is done by then, and the next one makes up for what fails here."""
    try:
        with failpoint("lake.commit", "checkpoint"):
            handle = open_delta(table.folder, version)
            handle.create_checkpoint()
            handle.cleanup_metadata()
    except (DeltaError, OSError) as problem:
        _log.warning("No checkpoint of %s was made: %s.", table.folder, type(problem).__name__)


def _now() -> int:
    return time.time_ns() // 1_000_000
