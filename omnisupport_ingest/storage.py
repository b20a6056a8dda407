"""Where landing and lake are kept: in the folders of the home, or in an object store behind them.

One interface, two implementations. ``LocalStorage`` is the folders themselves: links, renames, fsync. With
``BucketStorage`` (``bucket.py``) the objects are the record, and the home's folders ``landing`` and ``lake``
hold copies of them: what is made here counts once the store has it; what is read is brought here once, as no
data file ever changes. So Spark, DuckDB and Arrow read plain files either way, and the copies may be lost at
any time.

Which of the two stands behind a path, the home's ``home.json`` says (``storage_of``); it is read once in a
process, and tasks on Spark's workers find it in the same way.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from omnisupport_ingest import durable
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.foreign import Unreadable, read_file
from omnisupport_ingest.records import read_note

MARKER = "home.json"

_URL = re.compile(
    r"(?P<scheme>s3|gs|az)://(?P<bucket>[A-Za-z0-9][A-Za-z0-9._-]{1,254})(?:/(?P<prefix>[^?#]*))?"
)

_ROOMS = ("/lake/", "/landing/")

DRAFTS = "drafts"
"""The folder in a table of what tasks wrote that share no folder with their driver: objects that no log
names, which ``sweep`` deletes as it deletes what a killed writer left."""

_LOCAL_ONLY = frozenset({"index", "noted", "snapshot_requests", ".staging"})
"""Folders of landing and lake that are this home's own: what is made again from the rest, what is asked of a
running capture, and drafts."""

_IN_LANDING = re.compile(
    r"manifests|epochs|snapshots|data|(accepted-loss|lost-changes|parked|published)-e[0-9]+\.json"
    r"|partitions-.*\.json|schema-changes\.json"
)
"""What is kept in the landing folder of a source; the rest is this home's own: how capture runs, a cursor."""


class StorageRefused(IngestError):
    """``OMNISUPPORT_STORAGE`` is no usable URL, is not the one of this home, or leads to what another home
    keeps.

    Fix: Leave it out, as a home knows its own; for a new home give ``s3://BUCKET/PREFIX``.
    """

    exit_code = 2


class StorageUnreachable(IngestError):
    """The object store does not answer, or refuses this process.

    Fix: See that the bucket is there, and that the credentials may read, write, list and delete in it; then
    run the same again. Nothing that was confirmed is lost.
    """

    exit_code = 4


@dataclass(frozen=True, slots=True)
class Kept:
    """A file that is kept: its path in the home, bytes, when it was written, its version if it has one."""

    path: Path
    bytes: int
    written: datetime
    version: str | None = None


class Storage(Protocol):
    """The operations that landing and lake need from their storage. Paths are those of the home."""

    is_local: bool

    def create(self, path: Path, content: bytes) -> bool:
        """Make ``path`` with all of ``content``, durable; False, and nothing is done, if it is there."""

    def replace(self, path: Path, content: bytes) -> None:
        """Make ``path`` hold ``content``, durable, in one step."""

    def upload(self, paths: Iterable[Path]) -> None:
        """Have the finished files ``paths`` kept. On return they are durable; ``FileNotFoundError``."""

    def at_hand(self, path: Path) -> Path:
        """``path`` as a file of this machine, for whoever opens it; missing there if it is kept nowhere."""

    def exists(self, path: Path) -> bool:
        """Whether ``path`` is kept."""

    def version(self, path: Path) -> tuple[object, ...] | None:
        """Return a value that differs for every version of the file; None if it does not exist."""

    def size(self, path: Path) -> int | None:
        """Bytes of what is kept, not of a copy; None if it is not."""

    def digest(self, path: Path) -> tuple[int, str]:
        """Bytes and SHA-256 of what is kept, not of a copy; ``FileNotFoundError``."""

    def read(self, path: Path) -> bytes:
        """What is kept as ``path`` now, not what a copy has: of a file that others replace;
        ``FileNotFoundError``."""

    def first(self, path: Path, content: bytes) -> bytes:
        """What ``path`` holds in the store, which is ``content`` if it was not there. No copy is made."""

    def listed(self, folder: Path) -> Iterator[Kept]:
        """Every file that is kept below ``folder``."""

    def sources(self) -> list[str]:
        """The names of the sources that have landed and whose records may not be at hand."""

    def bring(self, folder: Path, *, afresh: bool = False) -> None:
        """Have the records (all but data files) of a source's landing ``folder`` at hand, those that others
        made seconds ago perhaps not; ``afresh``: those too."""

    def unlink(self, path: Path) -> None:
        """Delete a file, and the copy here; one that is missing is as good."""

    def remove_folder(self, folder: Path) -> bool:
        """Delete all below ``folder``, copies too; False if there was nothing. A second call ends a first."""

    def copies(self, folder: Path) -> Iterator[Path]:
        """The files below ``folder`` that are copies of data files of an object store."""

    def keeps_versions(self) -> bool:
        """Whether the store itself still has what is deleted: a bucket may keep versions."""

    def table_uri(self, folder: Path) -> str:
        """Where delta-rs finds the table of ``folder``."""

    def unreachable(self, problem: Exception) -> Exception:
        """What to say of ``problem``, which another library met in the store: its kind, and no request."""


class LocalStorage:
    """The folders of the home themselves."""

    is_local = True

    def create(self, path: Path, content: bytes) -> bool:
        # No failpoint: its callers put one around the call.
        return durable.create_exclusively(path, content)

    def replace(self, path: Path, content: bytes) -> None:
        # No failpoint: its callers put one around the call.
        durable.replace(path, content)

    def upload(self, paths: Iterable[Path]) -> None:
        """Do nothing: whoever wrote a local file has synced it."""

    def at_hand(self, path: Path) -> Path:
        return path

    def exists(self, path: Path) -> bool:
        return path.exists()

    def version(self, path: Path) -> tuple[object, ...] | None:
        try:
            status = path.stat()
        except FileNotFoundError:
            return None
        return status.st_ino, status.st_mtime_ns

    def size(self, path: Path) -> int | None:
        try:
            return path.stat().st_size
        except FileNotFoundError:
            return None

    def digest(self, path: Path) -> tuple[int, str]:
        with path.open("rb") as file:
            return path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()

    def read(self, path: Path) -> bytes:
        return read_file(path)

    def first(self, path: Path, content: bytes) -> bytes:
        return content if self.create(path, content) else read_file(path)

    def listed(self, folder: Path) -> Iterator[Kept]:
        for path, _folders, names in os.walk(folder):
            for name in names:
                # Another process's draft may be gone by now.
                with suppress(FileNotFoundError):
                    file = Path(path, name)
                    status = file.stat()
                    if stat.S_ISREG(status.st_mode):
                        yield Kept(file, status.st_size, datetime.fromtimestamp(status.st_mtime, UTC))

    def sources(self) -> list[str]:
        return []

    def bring(self, folder: Path, *, afresh: bool = False) -> None:
        """Do nothing: all records are local."""

    def unlink(self, path: Path) -> None:
        # No failpoint: its callers put one around the call.
        path.unlink(missing_ok=True)

    def remove_folder(self, folder: Path) -> bool:
        if not folder.exists():
            return False
        # No failpoint: its callers put one around the call.
        shutil.rmtree(folder)
        durable.sync_folder(folder.parent)
        return True

    def copies(self, folder: Path) -> Iterator[Path]:  # noqa: ARG002 - of every storage
        return iter(())

    def keeps_versions(self) -> bool:
        return False

    def table_uri(self, folder: Path) -> str:
        return str(folder)

    def unreachable(self, problem: Exception) -> Exception:
        return problem


LOCAL: Storage = LocalStorage()

_behind: dict[str, Storage] = {}
"""What is behind each home that this process has met."""


def storage_of(path: Path | str) -> Storage:
    """Return the storage of ``path``: the object store of a home's ``landing`` or ``lake``, else the local
    one."""
    text = os.fspath(path)
    for room in _ROOMS:
        at = text.find(room)
        while at >= 0:
            storage = _behind.get(text[:at]) or _met(text[:at])
            if storage is not None:
                return storage if storage.is_local or _belongs(text[at + 1 :].split("/")) else LOCAL
            at = text.find(room, at + 1)
    return LOCAL


def put_behind(home: str, storage: Storage) -> None:
    """Have this process reach landing and lake of ``home`` by ``storage``, whatever is at that path here."""
    _behind[home] = storage


def forget_home(home: Path) -> None:
    """Forget the storage of ``home``, which has just been moved; the next use looks it up again."""
    _behind.pop(os.fspath(home), None)


def parse_storage(url: str) -> tuple[str, str]:
    """The bucket's URL and the prefix in it, without slashes at its ends; ``StorageRefused``.

    Credentials are the provider's own chain's (environment, instance): one in the URL is refused, unshown.
    """
    match = _URL.fullmatch(url.strip())
    if match is None:
        raise StorageRefused(
            "OMNISUPPORT_STORAGE is no place for landing and lake.",
            fix="Give s3://BUCKET/PREFIX (or gs://, az://: built in the same way, not tested), without "
            "credentials, options or spaces: keys come from the environment, as the provider documents it. "
            "For a folder leave it out: landing and lake are in OMNISUPPORT_HOME then.",
        )
    prefix = (match["prefix"] or "").strip("/")
    if any(part in ("", ".", "..") for part in prefix.split("/")) and prefix:
        raise StorageRefused(
            "The prefix of OMNISUPPORT_STORAGE has an empty step, or one of dots.",
            fix="Give s3://BUCKET/PREFIX with plain names.",
        )
    return f"{match['scheme']}://{match['bucket']}", prefix


def open_storage(home: Path, url: str) -> Storage:
    """The object store at ``url``, with copies below ``home``."""
    from omnisupport_ingest.bucket import BucketStorage

    return BucketStorage(home, *parse_storage(url))


def recorded_storage(home: Path) -> str | None:
    """Return the URL at which the home keeps landing and lake; None if these are its own folders."""
    try:
        return read_note(_Storage, home / MARKER).storage
    except (OSError, Unreadable):
        # Whoever opens the home says what is wrong with it.
        return None


def is_kept(home: Path, path: Path) -> bool:
    """Whether ``path`` below ``home`` belongs to what is kept, not to this home alone."""
    parts = path.relative_to(home).parts
    return _belongs(parts) and not parts[-1].startswith(".")


def _belongs(parts: Sequence[str]) -> bool:
    """Whether a path, in its steps from ``landing`` or ``lake`` on, is kept where they are."""
    if len(parts) > 2 and parts[0] == "landing" and _IN_LANDING.fullmatch(parts[2]) is None:
        return False
    return _LOCAL_ONLY.isdisjoint(parts)


def forget_unread(folder: Path, before: datetime) -> None:
    """Delete data files that are only here, below a ``folder`` that an object store keeps: copies, and drafts
    of the dead, that nobody has written or read since ``before``.

    A running writer may have linked an old file into a new folder, so young folders keep their files.
    """
    limit = before.timestamp()
    for path, _folders, names in os.walk(folder):
        files = [Path(path, name) for name in names if name.endswith((".parquet", ".bin"))]
        for file in files if changed_before(Path(path), limit) else ():
            with suppress(FileNotFoundError):
                found = file.stat()
                if max(found.st_mtime, found.st_atime) < limit:
                    # No failpoint: a copy, which is brought again, or a draft that no table names.
                    file.unlink()


def changed_before(path: Path, limit: float) -> bool:
    """Whether ``path`` is there and was last changed before ``limit`` (seconds since 1970)."""
    try:
        return path.stat().st_mtime < limit
    except FileNotFoundError:
        return False


_forked: int | None = None
"""The process that has said ``leave_to_forks``."""


def leave_to_forks() -> None:
    """Have this process ask no object store when it opens a home, as forks are made of it.

    They would lack the threads of the library. A fork that looks at what has landed brings it itself.
    """
    global _forked
    _forked = os.getpid()


def bring_sources(home: Path) -> None:
    """Have the records of every source that landed elsewhere at hand; nothing with folders."""
    if _forked == os.getpid():
        return
    storage = storage_of(home / "landing" / "any")
    for name in storage.sources():
        folder = home / "landing" / name
        for each in ("manifests", "epochs", "data"):
            # No failpoint: a folder: one that is there already is as good.
            (folder / each).mkdir(mode=0o700, parents=True, exist_ok=True)
        storage.bring(folder, afresh=True)


# --- what landing and lake call ------------------------------------------------------------------


def create_exclusively(path: Path, content: bytes) -> bool:
    """``Storage.create`` where ``path`` is kept."""
    return storage_of(path).create(path, content)


def replace(path: Path, content: bytes) -> None:
    """``Storage.replace`` where ``path`` is kept."""
    storage_of(path).replace(path, content)


def path_at_hand(path: str) -> str:
    """The same of a path as text, as files of tables have it."""
    storage = storage_of(path)
    return path if storage.is_local else os.fspath(storage.at_hand(Path(path)))


def at_hand(path: Path) -> Path:
    """``Storage.at_hand`` where ``path`` is kept."""
    return storage_of(path).at_hand(path)


@dataclass(frozen=True, slots=True)
class _Storage:
    storage: str | None = None


def _met(home: str) -> Storage | None:
    """Return the storage of the folder ``home``; None if it is not a home."""
    if not Path(home, MARKER).exists():
        return None
    # Not ``recorded_storage``: what cannot be opened just now (no more files, say) is not a home of folders.
    try:
        url = read_note(_Storage, Path(home, MARKER)).storage
    except FileNotFoundError:
        return None
    except Unreadable:
        # Whoever opens the home says what is wrong with it.
        url = None
    storage = LOCAL if url is None else open_storage(Path(home), url)
    _behind[home] = storage
    return storage
