"""Landing and lake in an object store, by ``obstore``: S3 first; GCS and Azure by the same calls, untested.

A put does here what a link and an fsync do on a disk. ``create`` is a put that the store refuses if the
object exists (S3: ``If-None-Match: *``); nothing is renamed. The answer may be lost after the store has
carried out a put, and the library then tries again. So each put-if-absent carries a token, and the object
shows whose put it was. A put of a file makes one whole object or none: the parts of an interrupted upload are
no object. Each request carries a checksum (SHA-256), which the store compares with what it received.

A copy below the home is made after its object, never before. So every local file except drafts is also in the
store.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omnisupport_ingest import durable
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.storage import DRAFTS, Kept, StorageUnreachable, is_kept

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_AT_ONCE = 8
"""Most requests at the same time in one upload or look."""

_TOKEN = "omnisupport-writer"  # noqa: S105 - the name of a piece of metadata
_OBJECTS = "user.omnisupport.objects"
"""Extended attribute of a local file: the keys of the objects with the same bytes. All hard links of a file
share it."""
_VERSION = "user.omnisupport.version"

_PROBE = "probe"

_LOG = "_delta_log"
"""The folder of a table's log."""

_LOOK_SECONDS = 5.0
"""Seconds between two looks for what other machines have landed."""

_LOOK_AT_ALL_SECONDS = 600.0
"""Seconds between two complete listings; looks in between list only names after the highest known one."""

_STATUS = re.compile(r"status code: ([0-9]{3} [A-Za-z ]+)")

_STREAM = re.compile(r"e[0-9]{6,9}-s-")

_DRAFT = re.compile(rf"/{DRAFTS}/[0-9a-f]{{32}}/")
"""Matches the key of a draft (``lake.drafts``). The whole path counts, because a source or a table may have
the name of that folder."""

_process: int | None = None
"""The id of the process that has used the library; it must not be forked from then on."""


@dataclass(frozen=True, slots=True)
class _Look:
    """The last look for records, and the last complete one (monotonic seconds); the highest stream batch
    known."""

    at: float
    all_at: float
    highest: str


class BucketStorage:
    """Objects under ``prefix`` in the bucket ``url``, with copies below ``home``. Thread-safe.

    ``copies``: another folder for the copies, for a process that only visits the home (``visiting``).
    """

    is_local = False

    def __init__(self, home: Path, url: str, prefix: str, copies: Path | None = None) -> None:
        self._home, self._url, self._prefix = home, url, prefix
        self._copies = copies or home
        self._opened: ObjectStore | None = None
        self._lock = threading.RLock()
        self._looked: dict[Path, _Look] = {}

    # --- what is written --------------------------------------------------------------------------

    def create(self, path: Path, content: bytes) -> bool:
        import obstore
        from obstore.exceptions import AlreadyExistsError

        key, token = self.key(path), uuid.uuid4().hex
        with self._answers():
            try:
                # No failpoint: its callers put one around the call.
                put = obstore.put(
                    self._store, key, content, mode="create", attributes={_TOKEN: token}, use_multipart=False
                )
                version = put["e_tag"]
            except AlreadyExistsError:
                # If the answer to an earlier try of this put was lost, the object is ours.
                got = obstore.get(self._store, key)
                if got.attributes.get(_TOKEN) != token:
                    self.at_hand(path)
                    return False
                version = got.meta["e_tag"]
        self._copy(path, content, version)
        return True

    def first(self, path: Path, content: bytes) -> bytes:
        import obstore
        from obstore.exceptions import AlreadyExistsError

        with self._answers():
            with contextlib.suppress(AlreadyExistsError):
                # No failpoint: its callers put one around the call.
                obstore.put(self._store, self.key(path), content, mode="create", use_multipart=False)
            return bytes(obstore.get(self._store, self.key(path)).bytes())

    def replace(self, path: Path, content: bytes) -> None:
        import obstore

        with self._answers():
            # No failpoint: its callers put one around the call.
            put = obstore.put(self._store, self.key(path), content, use_multipart=False)
        self._copy(path, content, put["e_tag"])

    def upload(self, paths: Iterable[Path]) -> None:
        """Upload files. If a file is a hard link of one that the store has, the store copies that object
        itself."""
        paths = list(paths)
        self._require_process()
        with ThreadPoolExecutor(min(_AT_ONCE, len(paths) or 1)) as pool:
            for _ in pool.map(self._upload, paths):
                pass

    def _upload(self, path: Path) -> None:
        key = self.key(path)
        holding = (_attribute(path, _OBJECTS) or "").split()
        if key in holding and self._size_of(key) == path.stat().st_size:
            return
        self._put_file(path, key)
        if key not in holding:
            # The key of a draft is left out: a draft is deleted soon.
            stay = [each for each in holding if _DRAFT.search(each) is None]
            _set_attribute(path, _OBJECTS, " ".join([*stay, key]))

    def send_file(self, file: Path, path: Path) -> None:
        """Put the finished ``file``, which may be anywhere on this machine, as the object of ``path``."""
        self._put_file(file, self.key(path))

    def _put_file(self, file: Path, key: str) -> None:
        import obstore

        size = file.stat().st_size
        holding = (_attribute(file, _OBJECTS) or "").split()
        with self._answers():
            if not any(self._copied(each, key) for each in holding[:1] if each != key):
                # No failpoint: its callers put one around the call.
                obstore.put(self._store, key, file)
        kept = self._size_of(key)
        if kept != size:
            raise OSError(errno.EIO, f"the object store has {kept} bytes of {size}", str(file))

    def _size_of(self, key: str) -> int | None:
        import obstore

        with self._answers():
            try:
                return int(obstore.head(self._store, key)["size"])
            except FileNotFoundError:
                return None

    def _copied(self, of: str, key: str) -> bool:
        import obstore

        try:
            # No failpoint: its callers put one around the call.
            obstore.copy(self._store, of, key)
        except FileNotFoundError:
            return False
        return True

    def unlink(self, path: Path) -> None:
        import obstore

        with self._answers(), contextlib.suppress(FileNotFoundError):
            # No failpoint: its callers put one around the call.
            obstore.delete(self._store, self.key(path))
        path.unlink(missing_ok=True)

    def remove_folder(self, folder: Path) -> bool:
        """Delete the objects below ``folder``. The log of a table goes first, so that an interrupted call
        leaves files that belong to no table, and never a damaged table."""
        found = [each.path for each in self._listed(folder, None)]
        # No failpoint: its callers put one around the call.
        for path in found:
            if _LOG in path.parts:
                self.unlink(path)
        with ThreadPoolExecutor(min(_AT_ONCE, len(found) or 1)) as pool:
            for _ in pool.map(self.unlink, (each for each in found if _LOG not in each.parts)):
                pass
        there = folder.exists()
        shutil.rmtree(folder, ignore_errors=True)
        return bool(found) or there

    # --- what is read -----------------------------------------------------------------------------

    def at_hand(self, path: Path) -> Path:
        copy = self._copy_of(path)
        if not self._is_at_hand(path, copy):
            self.fetch(path, copy)
        return copy

    def _copy_of(self, path: Path) -> Path:
        return path if self._copies is self._home else self._copies / self.key(path)

    def _is_at_hand(self, path: Path, copy: Path) -> bool:
        """Whether ``copy`` is a copy of what the store has now.

        Only in the log of a table may a name have another content: the table was dropped and made again.
        """
        if _LOG not in path.parts or not copy.exists():
            return copy.exists()
        version = self.version(path)
        if version is None:
            # No failpoint: a copy of an object that is gone.
            copy.unlink(missing_ok=True)
            return False
        with contextlib.suppress(FileNotFoundError):
            return version == (_attribute(copy, _VERSION),)
        return False

    def fetch(self, of: Path, path: Path) -> None:
        """Download the object of ``of`` to the file ``path``, which may be anywhere on this machine. Does
        nothing if there is no object."""
        import obstore

        with self._answers():
            try:
                got = obstore.get(self._store, self.key(of))
            except FileNotFoundError:
                return
            size, version = got.meta["size"], got.meta["e_tag"]
            # No failpoint: a copy of an object: it is brought again if it is lost.
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
            try:
                with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                    for block in got.stream(min_chunk_size=8 * 1024 * 1024):
                        file.write(block)
                    file.flush()
                    os.fsync(file.fileno())
                if draft.stat().st_size != size:
                    raise OSError(errno.EIO, "the object store sent less than it has", str(path))
                _set_attribute(draft, _OBJECTS, self.key(of))
                _set_attribute(draft, _VERSION, version or "")
                os.replace(draft, path)
            finally:
                draft.unlink(missing_ok=True)

    def exists(self, path: Path) -> bool:
        return (_LOG not in path.parts and path.exists()) or self.version(path) is not None

    def version(self, path: Path) -> tuple[object, ...] | None:
        import obstore

        with self._answers():
            try:
                return (obstore.head(self._store, self.key(path))["e_tag"],)
            except FileNotFoundError:
                return None

    def size(self, path: Path) -> int | None:
        return self._size_of(self.key(path))

    def digest(self, path: Path) -> tuple[int, str]:
        import obstore

        size, digest = 0, hashlib.sha256()
        with self._answers():
            try:
                blocks = obstore.get(self._store, self.key(path)).stream(min_chunk_size=8 * 1024 * 1024)
            except FileNotFoundError:
                blocks = None
            for block in blocks or ():
                digest.update(block)
                size += len(block)
        if blocks is None:
            raise FileNotFoundError(errno.ENOENT, "no such object", str(path))
        return size, digest.hexdigest()

    def read(self, path: Path) -> bytes:
        import obstore

        content = None
        with self._answers(), contextlib.suppress(FileNotFoundError):
            content = bytes(obstore.get(self._store, self.key(path)).bytes())
        if content is None:
            raise FileNotFoundError(errno.ENOENT, "no such object", str(path))
        return content

    def listed(self, folder: Path) -> Iterator[Kept]:
        return self._listed(folder, None)

    def _listed(self, folder: Path, after: str | None) -> Iterator[Kept]:
        """Yield the objects below ``folder``, listed a thousand per request. ``after``: only names above this
        one."""
        import obstore

        key = self.key(folder)
        offset = f"{key}/{after}" if after else None
        with self._answers():
            for objects in obstore.list(self._store, key, offset=offset, chunk_size=1000):
                for each in objects:
                    path = self._home / each["path"]
                    if is_kept(self._home, path):
                        yield Kept(path, each["size"], each["last_modified"], each["e_tag"])

    def sources(self) -> list[str]:
        import obstore

        with self._answers():
            below = obstore.list_with_delimiter(self._store, "landing")["common_prefixes"]
        return sorted(each.rstrip("/").rpartition("/")[2] for each in below)

    def bring(self, folder: Path, *, afresh: bool = False) -> None:
        """Download the records of ``folder`` that are new.

        The first call in a process, and a call every ten minutes, looks for all records. In between, at most
        every five seconds, a call looks for manifests after the highest known stream batch, which needs one
        request for up to a thousand of them.
        """
        now = time.monotonic()
        with self._lock:
            look = None if afresh else self._looked.get(folder)
            if look is not None and now - look.at < _LOOK_SECONDS:
                return
            manifests = folder / "manifests"
            if look is None or now - look.all_at >= _LOOK_AT_ALL_SECONDS:
                records = list(self._records(folder))
                look = _Look(now, now, "")
            else:
                records = list(self._listed(manifests, look.highest))
            self._bring_all([each for each in records if self._is_news(each)])
            names = [each.path.name for each in records if each.path.parent == manifests]
            streams = [name for name in names if _STREAM.match(name)]
            self._looked[folder] = replace(look, at=now, highest=max([look.highest, *streams]))

    def _records(self, folder: Path) -> Iterator[Kept]:
        import obstore

        with self._answers():
            below = obstore.list_with_delimiter(self._store, self.key(folder))
        for each in below["objects"]:
            path = self._home / each["path"]
            if is_kept(self._home, path):
                yield Kept(path, each["size"], each["last_modified"], each["e_tag"])
        for prefix in below["common_prefixes"]:
            name = prefix.rstrip("/").rpartition("/")[2]
            if name != "data":
                yield from self._listed(folder / name, None)

    def _is_news(self, kept: Kept) -> bool:
        if not kept.path.exists():
            return True
        # Manifests and epochs never change. Other records do, so their versions are compared.
        if kept.path.parent.name in ("manifests", "epochs"):
            return False
        return _attribute(kept.path, _VERSION) != kept.version

    def _bring_all(self, kept: list[Kept]) -> None:
        if not kept:
            return
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            for _ in pool.map(lambda each: self.fetch(each.path, each.path), kept):
                pass

    def copies(self, folder: Path) -> Iterator[Path]:
        for file in (each for each in folder.rglob("*") if each.suffix in (".parquet", ".bin")):
            with contextlib.suppress(FileNotFoundError):
                # A draft of a running writer may have a hard link of a copy. The link has only the keys of
                # the copy.
                if f" {self.key(file)} " in f" {_attribute(file, _OBJECTS)} ":
                    yield file

    def keeps_versions(self) -> bool:
        import obstore

        # A new object is put: an object from before the bucket kept versions has no version.
        with self._answers():
            # No failpoint: an object that nobody reads.
            put = obstore.put(self._store, _PROBE, b"", use_multipart=False)
            obstore.delete(self._store, _PROBE)
        return put["version"] is not None

    # --- where it is ------------------------------------------------------------------------------

    def table_uri(self, folder: Path) -> str:
        return f"{self._url}/{self._full(self.key(folder))}"

    @property
    def place(self) -> tuple[str, str]:
        """The path of the home, and the URL of its landing and lake."""
        return os.fspath(self._home), f"{self._url}/{self._prefix}"

    def key(self, path: Path) -> str:
        """Return the key of a path of the home, without the prefix of the home."""
        return path.relative_to(self._home).as_posix()

    def _full(self, key: str) -> str:
        return f"{self._prefix}/{key}" if self._prefix else key

    @property
    def _store(self) -> ObjectStore:
        self._require_process()
        with self._lock if self._opened is None else contextlib.nullcontext():
            if self._opened is None:
                from obstore.store import from_url

                config: Any = {"checksum_algorithm": "SHA256"} if self._url.startswith("s3:") else {}
                self._opened = from_url(f"{self._url}/{self._prefix}", config=config)
        return self._opened

    def _require_process(self) -> None:
        """Refuse to work in a forked process: it lacks the library's threads, for which the library would
        wait without end."""
        global _process
        if _process is None:
            _process = os.getpid()
        elif _process != os.getpid():
            raise RuntimeError("a process that has used the object store was forked; start a new one instead")

    @contextlib.contextmanager
    def _answers(self) -> Iterator[None]:
        from obstore.exceptions import BaseError

        try:
            yield
        except (BaseError, FileNotFoundError) as problem:
            # Callers that expect a missing object have handled it before: here the bucket is missing.
            raise self.unreachable(problem) from None

    def unreachable(self, problem: Exception) -> IngestError:
        # Only the kind of the problem is named: the library's message repeats the request, which may be
        # signed.
        status = _STATUS.search(str(problem))
        kind = status[1] if status is not None else type(problem).__name__
        return StorageUnreachable(
            f"The object store {self._url} did not do what was asked: {kind}.",
            fix="Look whether the bucket is there, whether the credentials in the environment may read, "
            "write, list and delete in it, and whether its server answers; then run the same again: "
            "nothing that was confirmed is lost.",
        )

    def _copy(self, path: Path, content: bytes, version: str | None = None) -> None:
        # No failpoint: a copy of an object: it is brought again if it is lost.
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        durable.replace(path, content)
        _set_attribute(path, _OBJECTS, self.key(path))
        _set_attribute(path, _VERSION, version or "")


def _attribute(path: Path, name: str) -> str | None:
    try:
        return os.getxattr(path, name).decode()
    except FileNotFoundError:
        raise
    except OSError:
        return None


def _set_attribute(path: Path, name: str, value: str) -> None:
    """Set an attribute of a file.

    On a file system without attributes, files are uploaded or downloaded once more than necessary.
    """
    with contextlib.suppress(OSError):
        os.setxattr(path, name, value.encode())
