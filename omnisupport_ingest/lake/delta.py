"""Delta tables by the folder that stands for them: in the folder itself, or in the object store behind it.

delta-rs reads and commits in either. In S3 it puts a log entry only if there is none of that version
(``If-None-Match: *``, which its library does by itself from deltalake 1.0 on), so of two writers one is
refused, without a lock or a table of locks beside. Credentials are those of the environment.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from deltalake import DeltaTable
from deltalake.transaction import AddAction, RemoveAction

from omnisupport_ingest.failpoints import gate
from omnisupport_ingest.storage import storage_of


def is_delta(folder: Path) -> bool:
    """Whether there is a table."""
    return bool(DeltaTable.is_deltatable(table_uri(folder)))


def open_delta(folder: Path, version: int | None = None) -> DeltaTable:
    """The table at ``version``, else at its newest; ``DeltaError`` if it is not there."""
    return DeltaTable(table_uri(folder), version=version)


def table_uri(folder: Path) -> str:
    """Where delta-rs finds the table."""
    return storage_of(folder).table_uri(folder)


def keep_added(folder: Path, actions: Iterable[AddAction | RemoveAction], app_id: str) -> None:
    """Have the files that ``actions`` add kept, before a commit names them: with folders, they are."""
    storage = storage_of(folder)
    if storage.is_local:
        return
    with gate("lake.upload", app_id):
        storage.upload(folder / each.path for each in actions if isinstance(each, AddAction))
