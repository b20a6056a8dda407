"""Commits without opening the table: puts one entry of the log at the next version, or refuses.

Before a commit, delta-rs reads the list of all files of the table. A table whose files the index knows does
not need that: the entry written here says the same (Delta protocol, actions). delta-rs makes the checkpoints.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from deltalake.transaction import AddAction

from omnisupport_ingest import __version__
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.lake.commit import NOTE, Action, VectorChange, conflict
from omnisupport_ingest.lake.deletion_vectors import FEATURE, PROPERTY
from omnisupport_ingest.lake.delta import entry_file, open_delta, translated_store_errors
from omnisupport_ingest.lake.file_index_tables import (
    IndexedVersion,
    TableLog,
    digest_of,
    unknown_features,
    version_of,
)
from omnisupport_ingest.lake.log_files import has_vectors
from omnisupport_ingest.storage import StorageUnreachable, create_exclusively, storage_of, take_away

_log = logging.getLogger(__name__)

_INTERVAL = "delta.checkpointInterval"
_CHECKPOINT_INTERVAL = 100
"""Commits between two checkpoints, if the table does not set it."""

_PLAIN = frozenset({_INTERVAL, "delta.logRetentionDuration", "delta.deletedFileRetentionDuration", PROPERTY})
"""Table properties that demand nothing of a commit (Delta protocol, table properties)."""


class WriterDemands(IngestError):
    """Another program gave a table a feature that its writers must support, and this program does not.

    Fix: Take the feature away again; or remove the folder of the table, and ``omnisupport-ingest
    materialize`` makes it anew.
    """


def may_put_entry(indexed: IndexedVersion, folder: Path) -> bool:
    """Return whether ``put_entry``, and not delta-rs, commits to the table in ``folder``.

    It may on a local disk, if no table property demands anything of writers. It must if the table may have
    deletion vectors, because delta-rs cannot name them and would leave removed files in the table. Raises
    ``WriterDemands`` if it must and may not.
    """
    demands = indexed.configuration.keys() - _PLAIN
    if not indexed.has_vectors:
        return storage_of(folder).is_local and not demands
    if demands:
        raise _demands(folder, f"property {min(demands)}")
    return True


def version_to_commit_on(handle: DeltaTable, table: TableLog) -> IndexedVersion | None:
    """Return the version that ``handle`` has open; None if its log entry is gone.

    For a table that may have deletion vectors and that the index cannot list. Raises ``WriterDemands``.
    """
    features = unknown_features(handle)
    if features:
        raise _demands(table.folder, f"feature {features[0]}")
    return version_of(handle, table)


def _demands(folder: Path, what: str) -> WriterDemands:
    away = take_away(folder, "remove the table's folder")
    return WriterDemands(
        f"{folder} may have deletion vectors, and its {what} puts demands on its writers that we do not know "
        "how to meet.",
        fix=f"Another program gave it to the table: take it back; or {away}, and "
        "`omnisupport-ingest materialize` makes it anew.",
    )


def put_entry(
    table: TableLog,
    indexed: IndexedVersion,
    actions: Sequence[Action],
    text: dict[str, Any],
) -> int:
    """Commit ``actions`` on top of ``indexed`` without opening the table; return the new version.

    ``text``: describes the work to people who read the log. Raises ``CommitConflict`` if ``indexed`` is no
    longer the newest version.
    """
    version = indexed.version + 1
    lines = [
        _commit_info(indexed, text),
        *(line for action in actions for line in _lines_of(action)),
        {"txn": {"appId": table.app_id, "version": indexed.app_version + 1, "lastUpdated": _now()}},
    ]
    content = _text_of(lines)
    with failpoint("lake.commit", table.app_id):
        held = digest_of(table.entry(indexed.version)) == indexed.entry
        if not held or not create_exclusively(table.entry(version), content):
            raise conflict(str(table.folder), indexed.version, _newest(table, indexed.version))
    if (version + 1) % _interval(indexed) == 0:
        _make_checkpoint(table, version)
    return version


def allow_vectors(folder: Path, handle: DeltaTable) -> DeltaTable:
    """Let the table in ``folder`` have deletion vectors; return it opened again.

    ``handle`` has the table open. delta-rs's own way would add the feature ``variantType`` too, which fewer
    engines read. Raises ``WriterDemands`` if no commit could follow.
    """
    while not has_vectors(handle):
        _require_no_demands(handle)
        content = _text_of([_protocol_with_vectors(handle), _metadata_with_vectors(handle)])
        with failpoint("lake.feature", folder), translated_store_errors(folder):
            # Another process may do the same, or commit. Then the loop looks again.
            create_exclusively(entry_file(folder, handle.version() + 1), content)
        handle = open_delta(folder)
    return handle


def _require_no_demands(handle: DeltaTable) -> None:
    of_writers = handle.metadata().configuration.keys() - _PLAIN
    found = [f"property {name}" for name in sorted(of_writers)]
    found += [each if " " in each else f"feature {each}" for each in unknown_features(handle)]
    if found:
        raise WriterDemands(
            f"{handle.table_uri} cannot have deletion vectors: it has {found[0]}, which another program gave "
            "it and which puts demands on its writers.",
            fix="Take deletion_vectors out of the contract; or remove the table's folder, and "
            "`omnisupport-ingest materialize` makes it anew.",
        )


def _protocol_with_vectors(handle: DeltaTable) -> dict[str, Any]:
    protocol = handle.protocol()
    # The features that versions below 3 and 7 imply (Delta protocol, "Supported Features").
    of_version = ("appendOnly", "invariants")
    before = protocol.writer_features if protocol.min_writer_version == 7 else of_version
    return {
        "protocol": {
            "minReaderVersion": 3,
            "minWriterVersion": 7,
            "readerFeatures": sorted({*(protocol.reader_features or ()), FEATURE}),
            "writerFeatures": sorted({*(before or ()), FEATURE}),
        }
    }


def _metadata_with_vectors(handle: DeltaTable) -> dict[str, Any]:
    metadata = handle.metadata()
    return {
        "metaData": {
            "id": str(metadata.id),
            "name": metadata.name,
            "description": metadata.description,
            "format": {"provider": "parquet", "options": {}},
            "schemaString": handle.schema().to_json(),
            "partitionColumns": list(metadata.partition_columns),
            "createdTime": metadata.created_time,
            "configuration": {**metadata.configuration, PROPERTY: "true"},
        }
    }


def _text_of(lines: Iterable[Mapping[str, Any]]) -> bytes:
    return "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines).encode()


def _newest(table: TableLog, version: int) -> int:
    storage = storage_of(table.folder)
    while storage.exists(table.entry(version + 1)):
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


def _lines_of(action: Action) -> list[dict[str, Any]]:
    """Return the action as lines of the log, with the path encoded as in a URI."""
    if isinstance(action, VectorChange):
        return _lines_of_vectors(action)
    fields = _fields(action.path, action.partition_values, action.size, changes=action.data_change)
    if isinstance(action, AddAction):
        return [{"add": {**fields, "modificationTime": action.modification_time, "stats": action.stats}}]
    moment = action.deletion_timestamp
    return [{"remove": {**fields, "deletionTimestamp": moment, "extendedFileMetadata": True}}]


def _lines_of_vectors(change: VectorChange) -> list[dict[str, Any]]:
    file, moment = change.file, _now()
    fields = _fields(file.path, dict(file.partition), file.bytes, changes=not change.same_rows)
    removed = {**fields, "deletionTimestamp": moment, "extendedFileMetadata": True}
    if file.vector is not None:
        removed["deletionVector"] = file.vector.in_log()
    lines: list[dict[str, Any]] = [{"remove": removed}]
    if change.vector is not None:
        # Bounds and counts are those of all rows of the file, dead ones too (Delta protocol, per-file
        # statistics).
        stats = {**json.loads(change.stats or "{}"), "numRecords": file.stored_rows, "tightBounds": False}
        text = json.dumps(stats, separators=(",", ":"))
        vector = change.vector.in_log()
        lines.append({"add": {**fields, "modificationTime": moment, "stats": text, "deletionVector": vector}})
    return lines


def _fields(
    path: str, partition: Mapping[str, str | None] | None, size: int | None, *, changes: bool
) -> dict[str, Any]:
    return {
        "path": quote(path, safe="/=-._~"),
        "partitionValues": dict(partition or {}),
        "size": size,
        "dataChange": changes,
    }


def _interval(indexed: IndexedVersion) -> int:
    value = indexed.configuration.get(_INTERVAL, "")
    return int(value) if value.isdecimal() and int(value) else _CHECKPOINT_INTERVAL


def _make_checkpoint(table: TableLog, version: int) -> None:
    """Write the checkpoint of ``version``, and delete log entries older than the table's retention of them.

    A failure is only logged: the commit is done, and the next checkpoint makes up for it.
    """
    try:
        with failpoint("lake.commit", "checkpoint"):
            handle = open_delta(table.folder, version)
            handle.create_checkpoint()
            handle.cleanup_metadata()
    except (DeltaError, OSError, StorageUnreachable) as problem:
        _log.warning("No checkpoint of %s was made: %s.", table.folder, type(problem).__name__)


def _now() -> int:
    return time.time_ns() // 1_000_000
