"""Opens Delta tables by their folder: on this disk, or in the object store that keeps the folder.

delta-rs reads and commits in both. In S3 it puts a log entry only if that version has none
(``If-None-Match: *``; deltalake 1.0 and later do so by themselves). So one of two writers is refused, without
a lock or a lock table. Credentials come from the environment.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from deltalake.transaction import AddAction

from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.storage import storage_of

_OF_STORE = "Error interacting with object store"
"""The text with which delta-rs begins an error that wraps one of the store."""


def is_delta(folder: Path) -> bool:
    """Return whether ``folder`` holds a table; ``StorageUnreachable`` if its object store does not answer."""
    with translated_store_errors(folder):
        return bool(DeltaTable.is_deltatable(table_uri(folder)))


def open_delta(folder: Path, version: int | None = None) -> DeltaTable:
    """Open the table at ``version``, by default the newest; ``DeltaError`` if it does not exist."""
    with translated_store_errors(folder):
        return DeltaTable(table_uri(folder), version=version)


@contextmanager
def translated_store_errors(folder: Path) -> Iterator[None]:
    """Turn errors of the object store into ``StorageUnreachable``: delta-rs's message repeats the whole
    request. Errors of Delta itself and of a local disk are raised unchanged."""
    try:
        yield
    except (OSError, DeltaError) as problem:
        storage = storage_of(folder)
        if storage.is_local or (isinstance(problem, DeltaError) and _OF_STORE not in str(problem)):
            raise
        raise storage.unreachable(problem) from None


def entry_file(folder: Path, version: int) -> Path:
    """Return the file in the log of the commit that made ``version`` (Delta protocol, "Delta Log
    Entries")."""
    return folder / "_delta_log" / f"{version:020d}.json"


def table_uri(folder: Path) -> str:
    """Return the URI by which delta-rs finds the table."""
    return storage_of(folder).table_uri(folder)


def upload_added(folder: Path, actions: Iterable[object], app_id: str) -> None:
    """Upload the files that ``actions`` add, before a commit names them; nothing to do on a local disk."""
    storage = storage_of(folder)
    if storage.is_local:
        return
    with failpoint("lake.upload", app_id):
        storage.upload(folder / each.path for each in actions if isinstance(each, AddAction))
