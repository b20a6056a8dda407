"""Landing and lake in an object store, with copies on this machine.

A copy below the home is made after its object, never before. So every local file except drafts is also in the
store.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from omnisupport_ingest import durable
from omnisupport_ingest.bucket.copies import (
    has_object,
    note_copy,
    note_object,
    note_read,
    objects_of,
    version_of,
)
from omnisupport_ingest.bucket.objects import TRIES, Objects, wait
from omnisupport_ingest.bucket.records import Records
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.storage import AT_ONCE, COPIED, Change, Kept, StorageUnreachable, is_kept

_LOG = "_delta_log"
"""The folder of a table's log."""

_BLOCK = 8 * 1024 * 1024
"""Bytes that are read at once."""


class BucketStorage:
    """Objects under ``prefix`` in the bucket ``url``, with copies below ``home``. Thread-safe.

    ``copies``: another folder for the copies, for a process that only visits the home (``visiting``).
    """

    is_local = False

    def __init__(self, home: Path, url: str, prefix: str, copies: Path | None = None) -> None:
        self.objects = Objects(url, prefix)
        self._home, self._copies = home, copies or home
        self._records = Records(home, self)

    # --- what is written --------------------------------------------------------------------------

    def create(self, path: Path, content: bytes) -> bool:
        version = self.objects.put_new(self.key(path), content)
        if version is None:
            # Anew: a copy here may be of an object that another machine removed since.
            self.fetch(path, path)
            return False
        self._copy(path, content, version)
        return True

    def first(self, path: Path, content: bytes) -> bytes:
        self.objects.put_new(self.key(path), content)
        return self.read(path)

    def replace(self, path: Path, content: bytes) -> None:
        self._copy(path, content, self.objects.put(self.key(path), content))

    def update(self, path: Path, change: Change) -> None:
        for attempt in range(1, TRIES + 1):
            if self._updated(path, change):
                return
            wait(attempt)
        raise StorageUnreachable(
            f"Other machines replaced {path.name} in {self.objects.url} each time before this one could.",
            fix="Run the same again. If it stays so, see which machines capture this source: one may.",
        )

    def _updated(self, path: Path, change: Change) -> bool:
        """Try to update ``path`` once. Returns False if somebody else replaced it meanwhile."""
        before, version = self.objects.get(self.key(path))
        content = change(before)
        if content is None:
            if before is not None:
                # The copy may be older: another machine may have made the same change.
                self._copy(path, before, version or "")
            return True
        put = self.objects.put_changed(self.key(path), content, version)
        if put is None:
            return False
        self._copy(path, content, put)
        return True

    def upload(self, paths: Iterable[Path]) -> None:
        """Upload files. If a file is a hard link of one that the store has, the store copies that object
        itself."""
        paths = list(paths)
        self.objects.require_process()
        with ThreadPoolExecutor(min(AT_ONCE, len(paths) or 1)) as pool:
            for _ in pool.map(self._upload, paths):
                pass

    def _upload(self, path: Path) -> None:
        key = self.key(path)
        noted = has_object(path, key)
        if noted and self.objects.size(key) == path.stat().st_size:
            return
        self.objects.put_file(path, key, objects_of(path))
        if not noted:
            note_object(path, key)

    def send_file(self, file: Path, path: Path) -> None:
        """Put the finished ``file``, which may be anywhere on this machine, as the object of ``path``."""
        self.objects.put_file(file, self.key(path), objects_of(file))

    def unlink(self, path: Path) -> None:
        self.objects.delete(self.key(path))
        # No failpoint: its callers put one around the call.
        path.unlink(missing_ok=True)

    def remove_folder(self, folder: Path) -> bool:
        """Delete the objects below ``folder``. The log of a table goes first, so that an interrupted call
        leaves files that belong to no table. A call that is interrupted within the log leaves a table that
        cannot be opened; the next call ends it."""
        found = [each.path for each in self.listed(folder)]
        # No failpoint: its callers put one around the call.
        for path in found:
            if _LOG in path.parts:
                self.unlink(path)
        with ThreadPoolExecutor(min(AT_ONCE, len(found) or 1)) as pool:
            for _ in pool.map(self.unlink, (each for each in found if _LOG not in each.parts)):
                pass
        there = folder.exists()
        shutil.rmtree(folder, ignore_errors=True)
        return bool(found) or there

    # --- what is read -----------------------------------------------------------------------------

    def at_hand(self, path: Path) -> Path:
        copy = path if self._copies is self._home else self._copies / self.key(path)
        if not self._is_at_hand(path, copy):
            self.fetch(path, copy)
        elif copy.suffix in COPIED:
            note_read(copy)
        return copy

    def _is_at_hand(self, path: Path, copy: Path) -> bool:
        """Whether ``copy`` is a copy of what the store has now.

        Only in the log of a table may a name have another content: the table was dropped and made again.
        """
        if _LOG not in path.parts or not copy.exists():
            return copy.exists()
        version = self.objects.version(self.key(path))
        if version is None:
            # No failpoint: a copy of an object that is gone.
            copy.unlink(missing_ok=True)
            return False
        with contextlib.suppress(FileNotFoundError):
            return version == version_of(copy)
        return False

    def fetch(self, of: Path, path: Path) -> None:
        """Download the object of ``of`` to the file ``path``, which may be anywhere on this machine. Does
        nothing if there is no object."""
        with self.objects.opened(self.key(of)) as got:
            if got is None:
                return
            size, version = got.meta["size"], got.meta["e_tag"]
            # No failpoint: a copy of an object: it is brought again if it is lost.
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
            try:
                with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                    for block in got.stream(min_chunk_size=_BLOCK):
                        file.write(block)
                    file.flush()
                    os.fsync(file.fileno())
                if draft.stat().st_size != size:
                    raise OSError(errno.EIO, "the object store sent less than it has", str(path))
                note_copy(draft, self.key(of), version or "")
                os.replace(draft, path)
            finally:
                draft.unlink(missing_ok=True)

    def exists(self, path: Path) -> bool:
        return (_LOG not in path.parts and path.exists()) or self.version(path) is not None

    def version(self, path: Path) -> tuple[object, ...] | None:
        version = self.objects.version(self.key(path))
        return None if version is None else (version,)

    def size(self, path: Path) -> int | None:
        return self.objects.size(self.key(path))

    def digest(self, path: Path) -> tuple[int, str]:
        size, digest = 0, hashlib.sha256()
        with self.objects.opened(self.key(path)) as got:
            for block in got.stream(min_chunk_size=_BLOCK) if got is not None else ():
                digest.update(block)
                size += len(block)
        if got is None:
            raise _missing(path)
        return size, digest.hexdigest()

    def read(self, path: Path) -> bytes:
        content, _ = self.objects.get(self.key(path))
        if content is None:
            raise _missing(path)
        return content

    def listed(self, folder: Path, *, after: str | None = None) -> Iterator[Kept]:
        """Yield what is stored below ``folder``. ``after``: only names above this one."""
        for each in self.objects.listed(self.key(folder), after):
            yield from self._kept(each)

    def listed_in(self, folder: Path) -> tuple[list[Kept], list[str]]:
        """Return what is stored in ``folder`` itself, and the names of the folders in it."""
        objects, folders = self.objects.listed_in(self.key(folder))
        return [kept for each in objects for kept in self._kept(each)], folders

    def _kept(self, found: Mapping[str, Any]) -> Iterator[Kept]:
        path = self._home / found["path"]
        if is_kept(self._home, path):
            yield Kept(path, found["size"], found["last_modified"], found["e_tag"])

    def sources(self) -> list[str]:
        return sorted(self.objects.listed_in("landing")[1])

    def bring(self, folder: Path, *, afresh: bool = False) -> None:
        self._records.bring(folder, afresh=afresh)

    def copies(self, folder: Path) -> Iterator[Path]:
        for file in (each for each in folder.rglob("*") if each.suffix in COPIED):
            with contextlib.suppress(FileNotFoundError):
                # A draft of a running writer may have a hard link of a copy. The link has only the keys of
                # the copy.
                if has_object(file, self.key(file)):
                    yield file

    # --- the store --------------------------------------------------------------------------------

    def require_conditions(self) -> None:
        self.objects.require_conditions()

    def keeps_versions(self) -> bool:
        return self.objects.keeps_versions()

    def table_uri(self, folder: Path) -> str:
        return self.objects.uri(self.key(folder))

    @property
    def place(self) -> tuple[str, str]:
        """The path of the home, and the URL of its landing and lake."""
        return os.fspath(self._home), f"{self.objects.url}/{self.objects.prefix}"

    def key(self, path: Path) -> str:
        """Return the key of a path of the home, without the prefix of the home."""
        return path.relative_to(self._home).as_posix()

    def unreachable(self, problem: Exception) -> IngestError:
        return self.objects.unreachable(problem)

    def _copy(self, path: Path, content: bytes, version: str) -> None:
        # No failpoint: a copy of an object: it is brought again if it is lost.
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        durable.replace(path, content)
        note_copy(path, self.key(path), version)


def _missing(path: Path) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, "no such object", str(path))
