"""Delta tables by the folder that stands for them: in the folder itself, or in the object store behind it.

delta-rs reads and commits in either. In S3 it puts a log entry only if there is none of that version
(``If-None-Match: *``, which its library does by itself from deltalake 1.0 on), so of two writers one is
refused, without a lock or a table of locks beside. Credentials are those of the environment.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from deltalake.transaction import AddAction, RemoveAction

from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.storage import storage_of

_OF_STORE = "Error interacting with object store"
"""How delta-rs puts it where its own error wraps one of the store."""


def is_delta(folder: Path) -> bool:
    """Whether there is a table; ``StorageUnreachable`` if the object store behind it cannot be asked."""
    with reaching(folder):
        return bool(DeltaTable.is_deltatable(table_uri(folder)))


def open_delta(folder: Path, version: int | None = None) -> DeltaTable:
    """The table at ``version``, else at its newest; ``DeltaError`` if it is not there."""
    with reaching(folder):
        return DeltaTable(table_uri(folder), version=version)


@contextmanager
def reaching(folder: Path) -> Iterator[None]:
    """Have what delta-rs meets in the object store behind ``folder`` be ``StorageUnreachable``: its own
    message repeats the request. What Delta refuses, and what a disk says, stays as it is."""
    try:
        yield
    except (OSError, DeltaError) as problem:
        storage = storage_of(folder)
        if storage.is_local or (isinstance(problem, DeltaError) and _OF_STORE not in str(problem)):
            raise
        raise storage.unreachable(problem) from None


def table_uri(folder: Path) -> str:
    """Where delta-rs finds the table."""
    return storage_of(folder).table_uri(folder)


def keep_added(folder: Path, actions: Iterable[AddAction | RemoveAction], app_id: str) -> None:
    """Have the files that ``actions`` add kept, before a commit names them: with folders, they are."""
    storage = storage_of(folder)
    if storage.is_local:
        return
    with failpoint("lake.upload", app_id):
        storage.upload(folder / each.path for each in actions if isinstance(each, AddAction))
