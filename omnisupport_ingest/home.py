"""The home folder: the place of landing, lake, Dagster's own files and logs, and the facts that they share.

``home.json`` is written once, when the folder is made. It fixes what must not change under existing data: the
format version and the grid of windows.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from omnisupport_ingest.durable import create_exclusively
from omnisupport_ingest.durable import replace as replace_file
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.foreign import parse_json, read_file
from omnisupport_ingest.records import Format, NewerFormat, encode
from omnisupport_ingest.storage import (
    Storage,
    StorageRefused,
    bring_sources,
    forget_home,
    open_storage,
    parse_storage,
    recorded_storage,
)
from omnisupport_ingest.windows import WindowGrid, WindowSize

FORMAT_VERSION = 2
"""Version of the layout of a home; raised when older code could not read a newer one.

1: ``dim_<table>`` was the net changes, ``published/<table>`` the current state.
"""

_GRACE_BEFORE_CREATION = timedelta(hours=1)
"""Windows begin this long before the home is made: every window since then is a Dagster partition."""


class HomeMismatch(IngestError):
    """The home is of another version of the program, or has other windows, another source or other contracts
    than the settings say; or the file that says so cannot be read.

    Fix: Set what the message names as the home has it, or use another ``OMNISUPPORT_HOME``.
    """

    exit_code = 3


class HomeUnwritable(IngestError):
    """The home, or a folder of it, cannot be made or written.

    Fix: Give this user the right, or set ``OMNISUPPORT_HOME`` to a folder that it may write.
    """

    exit_code = 3


@dataclass(frozen=True)
class Home:
    """An opened home folder. Folders below it are made when first used; only the owner can read them."""

    path: Path
    grid: WindowGrid

    @classmethod
    def open(
        cls,
        path: Path,
        window: WindowSize,
        *,
        now: datetime | None = None,
        first: datetime | None = None,
        earlier: bool = False,
        storage: str | None = None,
    ) -> Home:
        """Open the home at ``path``, or make it if it is missing. Raises ``HomeMismatch`` if it does not fit.

        ``first`` (UTC): windows begin with the one that contains this time; None: an hour before the home is
        made. ``now`` (timezone-aware): the time of creation, for tests. ``earlier``: also open a home of an
        earlier format, to remove it or to convert it (``adopt``). ``storage``: URL of the object store for
        landing and lake of a new home; if another machine has made a home there, it is used as it is. Raises
        ``StorageRefused`` if this home keeps them elsewhere.
        """
        path = path.absolute()
        with _writable(path):
            # No failpoint: a folder: one that is there already is as good.
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
        marker = path / "home.json"
        if not marker.exists():
            created = now or datetime.now(UTC)
            start = _truncated(window, first or created - _GRACE_BEFORE_CREATION)
            record = {
                "format_version": FORMAT_VERSION,
                "window": str(window),
                "first_window": start.isoformat(),
                "created": created.isoformat(),
            }
            if storage is not None:
                record = _in_store(path, storage, record)
            # Another process may be making the same home: the first marker counts for both.
            with failpoint("home.marker"), _writable(path):
                create_exclusively(marker, encode(record))
        elif storage is not None:
            _require_storage(path, storage)
        if not (path / "landing").exists():
            bring_sources(path)
        grid = _read_marker(marker, window, earlier=earlier)
        if first is not None and _truncated(window, first) != grid.first:
            raise HomeMismatch(
                f"The windows of {path} begin at {grid.first:%Y-%m-%dT%H%M}, but OMNISUPPORT_FIRST_WINDOW is "
                f"{first:%Y-%m-%dT%H:%M}.",
                fix="Leave the setting out: it counts when a home is made. For an earlier first window make "
                "another home (OMNISUPPORT_HOME).",
            )
        return cls(path, grid)

    @property
    def is_earlier(self) -> bool:
        """Whether the home has an earlier format than this program writes."""
        return _FORMAT.decode(read_file(self._marker)).format_version < FORMAT_VERSION

    def require_convertible(self) -> None:
        """Raise ``HomeMismatch`` if the home is of an earlier format and its lake is in an object store.

        Machines that share the store would take its tables for those of either format.
        """
        place = recorded_storage(self.path)
        if place is not None and self.is_earlier:
            raise HomeMismatch(
                f"{self.path} is of an earlier format, and its lake in {place} cannot be converted.",
                fix="Copy landing/ of the bucket to the folder of a new home without OMNISUPPORT_STORAGE, "
                "make its lake with `omnisupport-ingest materialize`, then copy it to another prefix: "
                "`omnisupport-ingest home copy`.",
            )

    def adopt(self) -> None:
        """Record that the home now has the format of this program. Raises ``HomeMismatch`` as
        ``require_convertible`` does."""
        self.require_convertible()
        record = parse_json(read_file(self._marker)) | {"format_version": FORMAT_VERSION}
        with failpoint("home.marker"), _writable(self.path):
            replace_file(self._marker, encode(record))

    def move_to(self, storage: Storage, url: str) -> None:
        """Record that ``storage`` at ``url`` now keeps landing and lake, which have been copied there.

        Raises ``StorageRefused`` if another home has been put there meanwhile.
        """
        record = parse_json(read_file(self._marker))
        bucket, prefix = parse_storage(url)
        with failpoint("home.marker", "store"):
            kept = storage.first(self._marker, encode(record))
        if parse_json(kept) != record:
            raise _other_home()
        record |= {"storage": f"{bucket}/{prefix}".rstrip("/")}
        with failpoint("home.marker"), _writable(self.path):
            replace_file(self._marker, encode(record))
        forget_home(self.path)

    def require_own_marker(self, storage: Storage) -> None:
        """Raise ``StorageRefused`` if ``storage`` has the marker of another home; having none is as good."""
        try:
            kept = storage.read(self._marker)
        except FileNotFoundError:
            return
        if parse_json(kept) != parse_json(read_file(self._marker)):
            raise _other_home()

    @property
    def _marker(self) -> Path:
        return self.path / "home.json"

    @property
    def landing(self) -> Path:
        return self._folder("landing")

    @property
    def lake(self) -> Path:
        return self._folder("lake")

    @property
    def dagster(self) -> Path:
        return self._folder("dagster")

    @property
    def logs(self) -> Path:
        return self._folder("logs")

    @property
    def postgres(self) -> Path:
        return self._folder("postgres")

    @property
    def run(self) -> Path:
        """The folder of locks, process ids and addresses of running processes.

        Nothing in it outlives a restart.
        """
        return self._folder("run")

    @property
    def inbox(self) -> Path:
        """The watched folder for files of events. Its user makes it; the watcher starts once it exists."""
        return self.path / "inbox"

    def _folder(self, name: str) -> Path:
        folder = self.path / name
        with _writable(folder):
            # No failpoint: a folder: one that is there already is as good.
            folder.mkdir(exist_ok=True, mode=0o700)
        return folder


@contextmanager
def _writable(folder: Path) -> Iterator[None]:
    """Raise ``HomeUnwritable`` for ``folder`` if the block cannot write there.

    The error of a full disk is raised unchanged.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise HomeUnwritable(
            f"{folder} cannot be made or written: {error.strerror or type(error).__name__}.",
            fix="Set OMNISUPPORT_HOME to a folder that this user may make and write, or give it the right.",
        ) from error


def _in_store(path: Path, url: str, record: dict[str, object]) -> dict[str, object]:
    """Return the marker of a home whose landing and lake are at ``url``: the one that another machine has put
    there, or else ``record``, which is put there now.

    Only the home's own copy of the marker has the URL.
    """
    bucket, prefix = parse_storage(url)
    store = open_storage(path, url)
    store.require_conditions()
    with failpoint("home.marker", "store"):
        content = store.first(path / "home.json", encode(record))
    marker: dict[str, object] = parse_json(content)
    return marker | {"storage": f"{bucket}/{prefix}".rstrip("/")}


def _other_home() -> StorageRefused:
    return StorageRefused(
        "A home is kept there already, and a copy would mix the two.",
        fix="Give a prefix that nothing was put to.",
    )


def _require_storage(path: Path, url: str) -> None:
    """Raise ``StorageRefused`` if the home keeps landing and lake elsewhere than at ``url``."""
    bucket, prefix = parse_storage(url)
    given_url, recorded_url = f"{bucket}/{prefix}".rstrip("/"), recorded_storage(path)
    if recorded_url == given_url:
        return
    if recorded_url is None:
        raise StorageRefused(
            f"{path} has its landing and lake in its own folders, but OMNISUPPORT_STORAGE is {given_url}.",
            fix=f"To copy them there, stop what runs on the home: `omnisupport-ingest home copy {given_url}`."
            " Or begin with an empty home (OMNISUPPORT_HOME), or leave OMNISUPPORT_STORAGE out.",
        )
    raise StorageRefused(
        f"{path} has its landing and lake in {recorded_url}, but OMNISUPPORT_STORAGE is {given_url}.",
        fix=f"Set OMNISUPPORT_STORAGE={recorded_url}, or leave it out: a home knows its own; or use "
        "another home.",
    )


def _truncated(window: WindowSize, moment: datetime) -> datetime:
    return WindowGrid(window, datetime(1970, 1, 1, tzinfo=UTC)).truncate(moment)


@dataclass(frozen=True, slots=True)
class _Marker:
    """The members of ``home.json`` that are read. Other members stay when it is written again."""

    format_version: int
    window: str
    first_window: datetime


_FORMAT = Format(_Marker, FORMAT_VERSION, strict=False)


def _read_marker(marker: Path, window: WindowSize, *, earlier: bool) -> WindowGrid:
    try:
        record = _FORMAT.decode(read_file(marker))
        grid = WindowGrid(WindowSize.parse(record.window), record.first_window)
    except PermissionError:
        raise
    except NewerFormat as newer:
        raise HomeMismatch(
            f"{os.fspath(marker.parent)} {newer}.",
            fix="Use the newer omnisupport_ingest that made it, or another OMNISUPPORT_HOME.",
        ) from None
    except (OSError, ValueError, IngestError) as error:
        raise HomeMismatch(
            f"{os.fspath(marker)} cannot be read: {error}.",
            fix="Restore home.json from a backup, or start with an empty home (OMNISUPPORT_HOME).",
        ) from error
    if record.format_version < FORMAT_VERSION and not earlier:
        raise HomeMismatch(
            f"{os.fspath(marker.parent)} has format version {record.format_version}, whose dimensions are "
            f"stored otherwise than in version {FORMAT_VERSION}, which this program reads and writes.",
            fix="Stop what runs on it and make its dimensions again from what has landed: "
            "omnisupport-ingest rebuild",
        )
    if grid.size != window:
        raise HomeMismatch(
            f"{os.fspath(marker.parent)} has {grid.size} windows, but OMNISUPPORT_WINDOW is {window}.",
            fix=f"Set OMNISUPPORT_WINDOW={grid.size}, or use another OMNISUPPORT_HOME for {window} windows.",
        )
    return grid
