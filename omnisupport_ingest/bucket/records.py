"""Brings the records of landing from a bucket to this machine: manifests, epochs and whatever else is no
data."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from omnisupport_ingest.bucket.copies import version_of
from omnisupport_ingest.storage import AT_ONCE, Kept, is_kept

if TYPE_CHECKING:
    from omnisupport_ingest.bucket.storage import BucketStorage

_LOOK_SECONDS = 5.0
"""Seconds between two looks for what other machines have landed."""

_LOOK_AT_ALL_SECONDS = 600.0
"""Seconds between two complete listings; looks in between list only names after the highest known one."""

_DATA = frozenset(("data", "positions"))
"""Folders whose files are no records: one is brought when it is read."""

_STREAM = re.compile(r"e[0-9]{6,9}-s-")


@dataclass(frozen=True, slots=True)
class _Look:
    """The last look for records, and the last complete one (monotonic seconds); the highest stream batch
    known."""

    at: float
    all_at: float
    highest: str


class Records:
    """The records of the landing folders of ``home``, whose objects are in ``storage``. Thread-safe."""

    def __init__(self, home: Path, storage: BucketStorage) -> None:
        self._home, self._storage = home, storage
        self._lock = threading.Lock()
        self._looked: dict[Path, _Look] = {}

    def bring(self, folder: Path, *, afresh: bool) -> None:
        """Download the records of ``folder`` that are new or replaced.

        The first call in a process, and a call every ten minutes, looks for all records, and forgets those
        that are gone from the store. In between, at most every five seconds, a call looks for manifests after
        the highest known stream batch, which needs one request for up to a thousand of them. ``afresh``: look
        for all of them now.
        """
        now = time.monotonic()
        with self._lock:
            look = None if afresh else self._looked.get(folder)
            if look is not None and now - look.at < _LOOK_SECONDS:
                return
            manifests = folder / "manifests"
            if look is None or now - look.all_at >= _LOOK_AT_ALL_SECONDS:
                # Before the listing: the object of a copy is older than the copy, so the listing has it.
                here = self._copies(folder)
                records = list(self._listed(folder))
                self._forget_gone(folder, here, {each.path for each in records})
                look = _Look(now, now, "")
            else:
                records = list(self._storage.listed(manifests, after=look.highest))
            self._bring_all([each for each in records if _is_news(each)])
            names = [each.path.name for each in records if each.path.parent == manifests]
            streams = [name for name in names if _STREAM.match(name)]
            self._looked[folder] = replace(look, at=now, highest=max([look.highest, *streams]))

    def _listed(self, folder: Path) -> Iterator[Kept]:
        kept, folders = self._storage.listed_in(folder)
        yield from kept
        for name in folders:
            if name not in _DATA:
                yield from self._storage.listed(folder / name)

    def _copies(self, folder: Path) -> dict[Path, int]:
        """Return the inodes of the records of ``folder`` that are on this machine, by path."""
        found = {}
        with contextlib.suppress(FileNotFoundError):
            for each in (entry for entry in folder.iterdir() if entry.name not in _DATA):
                for file in each.iterdir() if each.is_dir() else (each,):
                    with contextlib.suppress(FileNotFoundError):
                        if is_kept(self._home, file):
                            found[file] = file.stat().st_ino
        return found

    def _forget_gone(self, folder: Path, here: dict[Path, int], listed: set[Path]) -> None:
        """Delete the copies of records that are gone from the store, as ``sources retire --drop-data`` on
        another machine leaves them, with the copies of their batches' data."""
        missing = [path for path in here if path not in listed]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            # Each object is requested by itself: a store may leave one out of a list.
            versions = list(pool.map(self._storage.version, missing))
        for path in (path for path, version in zip(missing, versions, strict=True) if version is None):
            with contextlib.suppress(FileNotFoundError):
                # Another file by now: this home has put the record again.
                if path.stat().st_ino == here[path]:
                    # No failpoint: a copy of an object that is gone; the next look deletes it.
                    path.unlink()
            if path.parent.name == "manifests":
                for copy in self._storage.copies(folder / "data" / path.stem):
                    copy.unlink(missing_ok=True)
                for copy in self._storage.copies(folder / "positions"):
                    if copy.name.startswith(f"{path.stem}."):
                        copy.unlink(missing_ok=True)

    def _bring_all(self, kept: list[Kept]) -> None:
        if not kept:
            return
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for _ in pool.map(lambda each: self._storage.fetch(each.path, each.path), kept):
                pass


def _is_news(kept: Kept) -> bool:
    try:
        version = version_of(kept.path)
        if version is None and kept.path.parent.name in ("manifests", "epochs"):
            # The copy was not downloaded (``home copy``), or the file system has no attributes. These records
            # change only when their source was dropped and began again.
            return kept.path.stat().st_size != kept.bytes
    except FileNotFoundError:
        return True
    return version != kept.version
