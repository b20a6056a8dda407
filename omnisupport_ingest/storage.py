"""The storage of landing and lake: the folders of the home, or an object store behind them.

There is one interface with two implementations. ``LocalStorage`` uses the folders: links, renames, fsync.
With ``BucketStorage`` (``bucket``) the objects are the record, and the home's folders ``landing`` and
``lake`` hold copies of them. A new file counts once the store has it; a file that is read is downloaded once,
because no data file ever changes. So Spark, DuckDB and Arrow always read plain files, and the copies may be
lost at any time.

The home's ``home.json`` says which of the two a path has (``storage_of``). It is read once per process; tasks
on Spark's workers find it in the same way.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
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

AT_ONCE = 8
"""Most requests at the same time in one upload or look."""

DRAFTS = "drafts"
"""The folder in a table for files of tasks that share no folder with their driver: objects that no log names.
``sweep`` deletes them, like files that a killed writer left."""

COPIED = (".parquet", ".bin")
"""Ends of the names of data files and files of deletion vectors: of these there are copies."""

_CUT_OFF = re.compile(r"\..+\.[0-9a-f]{32}")
"""Matches a file that is being written under another name; an old one is of a process that was killed."""

_LOCAL_ONLY = frozenset({"index", "noted", "snapshot_requests", ".staging"})
"""Folders of landing and lake that only this home has: what can be made again from the rest, requests to a
running capture, and drafts."""

_IN_LANDING = re.compile(
    r"manifests|epochs|snapshots|data|positions|(accepted-loss|lost-changes|parked|published)-e[0-9]+\.json"
    r"|partitions-.*\.json|schema-changes\.json|keys\.json"
)
"""What the storage keeps of the landing folder of a source. The rest only this home has: the state of
capture, a cursor."""


class StorageRefused(IngestError):
    """``OMNISUPPORT_STORAGE`` is no usable URL, is not the one of this home, or leads to what another home
    keeps or to a store that ignores the conditions of puts.

    Fix: Leave it out, as a home knows its own; for a new home give ``s3://BUCKET/PREFIX`` in a store that
    honours ``If-None-Match`` and ``If-Match``.
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
    """A file in the storage: its path in the home, size in bytes, when it was written, its version if it has
    one."""

    path: Path
    bytes: int
    written: datetime
    version: str | None = None


Change = Callable[[bytes | None], bytes | None]
"""A function from the content of a file (None: it does not exist) to its new content; None: leave it as it
is."""


class Storage(Protocol):
    """The operations that landing and lake need from their storage. Paths are those of the home."""

    is_local: bool

    def create(self, path: Path, content: bytes) -> bool:
        """Make ``path`` with all of ``content``, durable. Returns False and does nothing if it exists."""

    def replace(self, path: Path, content: bytes) -> None:
        """Replace the content of ``path`` by ``content`` in one durable step."""

    def update(self, path: Path, change: Change) -> None:
        """Replace the content of ``path`` by what ``change`` makes of it, in one durable step.

        In an object store ``change`` gets the content that the store has now, and is called again with newer
        content if another machine replaces it meanwhile, so no change of another is overwritten.
        """

    def upload(self, paths: Iterable[Path]) -> None:
        """Store the finished files ``paths``; on return they are durable. Raises ``FileNotFoundError``."""

    def at_hand(self, path: Path) -> Path:
        """Return ``path`` as a file of this machine that can be opened; it does not exist if the storage has
        none."""

    def exists(self, path: Path) -> bool:
        """Whether the storage has ``path``."""

    def version(self, path: Path) -> tuple[object, ...] | None:
        """Return a value that differs for every version of the file; None if it does not exist."""

    def size(self, path: Path) -> int | None:
        """Return the size in bytes in the storage, not of a copy; None if it has no such file."""

    def digest(self, path: Path) -> tuple[int, str]:
        """Return size in bytes and SHA-256 in the storage, not of a copy. Raises ``FileNotFoundError``."""

    def read(self, path: Path) -> bytes:
        """Return the content of ``path`` in the storage now, not that of a copy: for a file that others
        replace. Raises ``FileNotFoundError``."""

    def first(self, path: Path, content: bytes) -> bytes:
        """Return the content of ``path`` in the storage; if it had none, that is now ``content``. Makes no
        copy."""

    def listed(self, folder: Path) -> Iterator[Kept]:
        """Yield every file of the storage below ``folder``."""

    def sources(self) -> list[str]:
        """Return the names of the sources that have landed and whose records may not be on this machine."""

    def bring(self, folder: Path, *, afresh: bool = False) -> None:
        """Bring the records (all except data files) of a source's landing ``folder`` to this machine.

        Records that others made in the last seconds may be missing; with ``afresh`` none is.
        """

    def unlink(self, path: Path) -> None:
        """Delete a file and its copy here. A missing file is no error."""

    def remove_folder(self, folder: Path) -> bool:
        """Delete everything below ``folder``, copies included. Returns False if there was nothing. Calling it
        again completes an interrupted call."""

    def copies(self, folder: Path) -> Iterator[Path]:
        """Yield the files below ``folder`` that are copies of data files in an object store."""

    def require_conditions(self) -> None:
        """Raise ``StorageRefused`` if the store ignores the condition of a put: two writers would both
        win."""

    def keeps_versions(self) -> bool:
        """Whether the store itself keeps what is deleted, as a bucket with versions does."""

    def table_uri(self, folder: Path) -> str:
        """Return the URI at which delta-rs finds the table of ``folder``."""

    def unreachable(self, problem: Exception) -> Exception:
        """Return our error for ``problem``, which another library met in the store: it names the kind, and no
        request."""


class LocalStorage:
    """The folders of the home themselves."""

    is_local = True

    def create(self, path: Path, content: bytes) -> bool:
        # No failpoint: its callers put one around the call.
        return durable.create_exclusively(path, content)

    def replace(self, path: Path, content: bytes) -> None:
        # No failpoint: its callers put one around the call.
        durable.replace(path, content)

    def update(self, path: Path, change: Change) -> None:
        try:
            before = read_file(path)
        except FileNotFoundError:
            before = None
        content = change(before)
        if content is not None:
            # No failpoint: its callers put one around the call.
            durable.replace(path, content)

    def upload(self, paths: Iterable[Path]) -> None:
        """Do nothing: the writer of a local file has synced it."""

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
                # A draft of another process may have disappeared.
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

    def require_conditions(self) -> None:
        """Do nothing: links and renames of a file system have them."""

    def keeps_versions(self) -> bool:
        return False

    def table_uri(self, folder: Path) -> str:
        return str(folder)

    def unreachable(self, problem: Exception) -> Exception:
        return problem


LOCAL: Storage = LocalStorage()

_behind: dict[str, Storage] = {}
"""The storage of each home that this process has used."""


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
    """Make this process reach landing and lake of ``home`` through ``storage``, whatever is at that path
    here."""
    _behind[home] = storage


def forget_home(home: Path) -> None:
    """Forget the storage of ``home``, which has just been moved; the next use looks it up again."""
    _behind.pop(os.fspath(home), None)


def _shown(url: str) -> str:
    """Return ``url`` for a message, or only the setting's name if ``url`` may contain a secret."""
    return repr(url) if re.fullmatch(r"[\w./~-]{1,60}(://[\w./~-]{0,60})?", url) else "OMNISUPPORT_STORAGE"


def parse_storage(url: str) -> tuple[str, str]:
    """Return the bucket's URL and the prefix in it, without slashes at its ends. Raises ``StorageRefused``.

    Credentials come from the provider's own chain (environment, instance). A URL that contains some is
    refused, and the message does not show them.
    """
    match = _URL.fullmatch(url.strip())
    if match is None:
        raise StorageRefused(
            f"{_shown(url)} is no URL for landing and lake.",
            fix="Give OMNISUPPORT_STORAGE, or `home copy`, s3://BUCKET/PREFIX (or gs://, az://: built in the "
            "same way, not tested), without credentials, options or spaces: keys come from the environment, "
            "as the provider documents it. For a folder leave it out: landing and lake are in "
            "OMNISUPPORT_HOME then.",
        )
    prefix = (match["prefix"] or "").strip("/")
    if any(part in ("", ".", "..") for part in prefix.split("/")) and prefix:
        raise StorageRefused(
            "The prefix of OMNISUPPORT_STORAGE has an empty step, or one of dots.",
            fix="Give s3://BUCKET/PREFIX with plain names.",
        )
    return f"{match['scheme']}://{match['bucket']}", prefix


def open_storage(home: Path, url: str) -> Storage:
    """Return the object store at ``url``, with copies below ``home``."""
    from omnisupport_ingest.bucket.storage import BucketStorage

    return BucketStorage(home, *parse_storage(url))


def recorded_storage(home: Path) -> str | None:
    """Return the URL of the home's landing and lake; None if they are in its own folders."""
    try:
        return read_note(_Storage, home / MARKER).storage
    except (OSError, Unreadable):
        # The command that opens the home reports what is wrong with it.
        return None


def is_kept(home: Path, path: Path) -> bool:
    """Whether ``path`` below ``home`` belongs to what the storage keeps, not only to this home."""
    parts = path.relative_to(home).parts
    return _belongs(parts) and not parts[-1].startswith(".")


def _belongs(parts: Sequence[str]) -> bool:
    """Whether the storage keeps a path, given by its steps from ``landing`` or ``lake`` on."""
    if len(parts) > 2 and parts[0] == "landing" and _IN_LANDING.fullmatch(parts[2]) is None:
        return False
    return _LOCAL_ONLY.isdisjoint(parts)


def forget_unread(folder: Path, before: datetime) -> None:
    """Delete local data files below ``folder`` that nobody has written or read since ``before``: copies of
    objects, drafts of dead writers, and downloads that were cut off.

    A running writer may have linked an old file into a new folder, so files in recently changed folders stay.
    Nobody links a download.
    """
    limit = before.timestamp()
    for path, _folders, names in os.walk(folder):
        is_old = changed_before(Path(path), limit)
        files = [
            Path(path, name)
            for name in names
            if _CUT_OFF.fullmatch(name) or (is_old and name.endswith(COPIED))
        ]
        for file in files:
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
"""The process that has called ``leave_to_forks``."""


def leave_to_forks() -> None:
    """From now on, do not use an object store in this process when it opens a home, because it will be
    forked.

    Forks would lack the threads of the library. A fork that needs the landed records brings them itself.
    """
    global _forked
    _forked = os.getpid()


def bring_sources(home: Path) -> None:
    """Bring the records of every source that has landed elsewhere to this machine; does nothing for a home of
    folders."""
    if _forked == os.getpid():
        return
    storage = storage_of(home / "landing" / "any")
    for name in storage.sources():
        folder = home / "landing" / name
        for each in ("manifests", "epochs", "data"):
            # No failpoint: a folder: one that is there already is as good.
            (folder / each).mkdir(mode=0o700, parents=True, exist_ok=True)
        storage.bring(folder, afresh=True)


def has_landed(home: Path, source: str) -> bool:
    """Whether anything has landed of ``source``, on this machine or on another that has the same storage.
    Makes no folder."""
    folder = home / "landing" / source / "manifests"
    if folder.is_dir():
        return True
    return _forked != os.getpid() and any(True for _ in storage_of(folder).listed(folder))


def landed_sources(home: Path) -> list[str]:
    """Return the names of the sources of which anything has landed, as ``has_landed`` says, sorted."""
    landing = home / "landing"
    here = {each.parent.name for each in landing.glob("*/manifests")}
    elsewhere = storage_of(landing / "any").sources() if _forked != os.getpid() else []
    return sorted(here.union(elsewhere))


# --- what landing and lake call ------------------------------------------------------------------


def create_exclusively(path: Path, content: bytes) -> bool:
    """Call ``Storage.create`` of the storage of ``path``."""
    return storage_of(path).create(path, content)


def replace(path: Path, content: bytes) -> None:
    """Call ``Storage.replace`` of the storage of ``path``."""
    storage_of(path).replace(path, content)


def update(path: Path, change: Change) -> None:
    """Call ``Storage.update`` of the storage of ``path``."""
    storage_of(path).update(path, change)


def put_back(path: Path, with_folders: str) -> str:
    """Return the sentence that tells a person how to put back a damaged or missing file or folder ``path``.

    ``with_folders``: the sentence for a home of folders. In an object store the file of the home is a copy,
    and restoring it would change nothing.
    """
    storage = storage_of(path)
    if storage.is_local:
        return with_folders
    return (
        f"Put {storage.table_uri(path)} back from a backup of the bucket, or as an older version of the "
        f"object; then delete the copy in each home ({path})."
    )


def take_away(path: Path, with_folders: str) -> str:
    """Return the clause that tells a person how to take away a file or folder ``path``; ``with_folders``: as
    in ``put_back``."""
    storage = storage_of(path)
    if storage.is_local:
        return with_folders
    return (
        f"stop what runs on every machine, move {storage.table_uri(path)} out of the prefix, then delete the "
        f"copy in each home ({path})"
    )


def path_at_hand(path: str) -> str:
    """Do the same as ``at_hand`` for a path as text, as in files of tables."""
    storage = storage_of(path)
    return path if storage.is_local else os.fspath(storage.at_hand(Path(path)))


def at_hand(path: Path) -> Path:
    """Call ``Storage.at_hand`` of the storage of ``path``."""
    return storage_of(path).at_hand(path)


@dataclass(frozen=True, slots=True)
class _Storage:
    storage: str | None = None


def _met(home: str) -> Storage | None:
    """Return the storage of the folder ``home``; None if it is not a home."""
    if not Path(home, MARKER).exists():
        return None
    # Not ``recorded_storage``: a marker that cannot be opened now (too many open files, for example) does not
    # mean a home of folders.
    try:
        url = read_note(_Storage, Path(home, MARKER)).storage
    except FileNotFoundError:
        return None
    except Unreadable:
        # The command that opens the home reports what is wrong with it.
        url = None
    storage = LOCAL if url is None else open_storage(Path(home), url)
    _behind[home] = storage
    return storage
