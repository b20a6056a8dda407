"""Drafts of tasks on their way to the driver, which brings them into their place.

Where tasks share the driver's files, they write to the folder of the draft. Where they do not, and a bucket
keeps the lake, each task writes to a folder of its executor, puts what is finished into the bucket, and
answers with the names. The driver brings those that it needs as files; the bucket copies them to their final
names, as their bytes are there. Names are of one attempt each, so what an attempt sends whose answer does not
count is seen by nobody, and ``sweep`` deletes it.
"""

from __future__ import annotations

import shutil
import tempfile
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from omnisupport_ingest.bucket import BucketStorage
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.lake import layout
from omnisupport_ingest.lake.commit import StagedFileMissing
from omnisupport_ingest.lake.stats import rows_in
from omnisupport_ingest.storage import DRAFTS, StorageUnreachable, storage_of
from omnisupport_ingest.visiting import Visit

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_AT_ONCE = 8
"""Files that are sent or brought at a time."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A file that a task has sent: its path below the draft's folder, its rows and bytes."""

    name: str
    rows: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Drafts:
    """What the tasks of one piece of work write.

    ``folder``: the draft on the driver's machine. ``objects``: the path of its objects, if tasks ``visit``.
    """

    folder: Path
    objects: Path
    visit: Visit | None

    @classmethod
    def of(cls, spark: SparkSession, folder: Path) -> Drafts:
        """``folder``: in the staging folder of a table."""
        assert folder.parent.name == layout.STAGING, "drafts are of a table"
        table = folder.parent.parent
        return cls(folder, table / DRAFTS / folder.name, Visit.of(spark, table))

    @classmethod
    def beside(cls, spark: SparkSession, table: Path, folder: Path) -> Drafts:
        """Of a ``folder`` that is in no table: its objects are with those of ``table`` meanwhile."""
        return cls(folder, table / DRAFTS / uuid.uuid4().hex, Visit.of(spark, table))

    # --- in a task --------------------------------------------------------------------------------

    @contextmanager
    def begun(self) -> Iterator[Path]:
        """Give the folder to write to; one of this machine's own is removed at the end."""
        if self.visit is None:
            yield self.folder
            return
        self.visit.begin()
        # No failpoint: a draft that no table names yet.
        self.visit.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        own = Path(tempfile.mkdtemp(prefix="draft-", dir=self.visit.folder))
        try:
            yield own
        finally:
            shutil.rmtree(own, ignore_errors=True)

    def sent(self, folder: Path) -> list[Draft]:
        """Send the finished files in the ``folder`` that ``begun`` gave, and say which they are.

        Nothing is sent where the driver sees the folder.
        """
        if self.visit is None:
            return []
        found = [
            Draft(file.relative_to(folder).as_posix(), rows_in(file), file.stat().st_size)
            for file in sorted(folder.rglob("*.parquet"))
        ]
        names = [each.name for each in found]
        # No failpoint: drafts that no table names. Who dies here is begun again, under other names.
        _each(lambda name: self._storage.send_file(folder / name, self.objects / name), names)
        for name in names:
            (folder / name).unlink()
        return found

    # --- in the driver ----------------------------------------------------------------------------

    def bring(self, names: Collection[str]) -> None:
        """Have what tasks have sent as ``names`` as files of the draft's folder, where it is not written to
        by them. Raises ``StagedFileMissing`` if one is gone."""
        if self.visit is None:
            return
        _each(lambda name: self._storage.fetch(self.objects / name, self.folder / name), names)
        if gone := [name for name in names if not (self.folder / name).exists()]:
            raise StagedFileMissing(
                f"{self.objects / gone[0]}, which a task has sent, is gone from the bucket.",
                fix="Run the same work again: it stages its files again.",
            )

    def lend(self, file: Path) -> str:
        """Return the path by which tasks read a ``file`` of the driver, which is sent for it if need be."""
        if self.visit is None:
            return str(file)
        path = self.objects / f"{file.name}.parquet"
        # No failpoint: an object that no table names.
        self._storage.send_file(file, path)
        return str(path)

    def paths(self, names: Iterable[str]) -> list[str]:
        """The paths by which tasks read again what they have sent as ``names``."""
        return [str(self.objects / name) for name in names]

    def keep(self, paths: Iterable[str]) -> None:
        """Have the bucket keep files of the table, ``paths`` in it, that drafts became: so that tasks read
        them, and while it can copy the drafts. The commit that names them sends no byte again."""
        if self.visit is None:
            return
        table = self.objects.parent.parent
        with failpoint("lake.upload", table):
            self._storage.upload([table / path for path in paths])

    def clear(self) -> None:
        """Delete the draft. ``sweep`` deletes what cannot be deleted now."""
        # No failpoint: a draft that no table names.
        shutil.rmtree(self.folder, ignore_errors=True)
        self.clear_objects()

    def clear_objects(self) -> None:
        """Delete what the bucket has of the draft."""
        if self.visit is not None:
            with suppress(StorageUnreachable):
                # No failpoint: drafts that no table names.
                self._storage.remove_folder(self.objects)

    @property
    def _storage(self) -> BucketStorage:
        storage = storage_of(self.objects)
        assert isinstance(storage, BucketStorage), "there is no visit without a bucket"
        return storage


def _each(do: Callable[[str], None], names: Collection[str]) -> None:
    with ThreadPoolExecutor(min(_AT_ONCE, len(names) or 1)) as pool:
        for _ in pool.map(do, names):
            pass
