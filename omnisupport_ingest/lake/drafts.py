"""Drafts: files that Spark tasks write, and how the driver collects them.

Where tasks share the driver's files, they write straight to the folder of the draft. Elsewhere a bucket keeps
the lake. Each task then writes to a folder of its executor, uploads the finished files, and returns their
names. The driver downloads the files that it needs here; the others become files of the table by a copy
within the bucket, so their bytes are not sent again. Every attempt of a task uses names of its own. Nobody
reads what a discarded attempt uploaded, and ``sweep`` deletes it.
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

from omnisupport_ingest.bucket.storage import BucketStorage
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.lake import layout
from omnisupport_ingest.lake.commit import StagedFileMissing
from omnisupport_ingest.lake.stats import rows_in
from omnisupport_ingest.storage import AT_ONCE, DRAFTS, StorageUnreachable, storage_of
from omnisupport_ingest.visiting import Visit

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True, slots=True)
class Draft:
    """A file that a task has uploaded: its path below the draft's folder, its rows and bytes."""

    name: str
    rows: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Drafts:
    """The files that the tasks of one piece of work write.

    ``folder``: the draft on the driver's machine. ``objects``: the path of its objects in the bucket.
    ``visit``: how tasks work without the driver's files; None if they share them.
    """

    folder: Path
    objects: Path
    visit: Visit | None

    @classmethod
    def of(cls, spark: SparkSession, folder: Path) -> Drafts:
        """Return the drafts in ``folder``, which lies in the staging folder of a table."""
        assert folder.parent.name == layout.STAGING, "drafts are of a table"
        table = folder.parent.parent
        return cls(folder, table / DRAFTS / folder.name, Visit.of(spark, table))

    @classmethod
    def beside(cls, spark: SparkSession, table: Path, folder: Path) -> Drafts:
        """Return the drafts in a ``folder`` outside of any table; their objects are kept with ``table``."""
        return cls(folder, table / DRAFTS / uuid.uuid4().hex, Visit.of(spark, table))

    # --- in a task --------------------------------------------------------------------------------

    @contextmanager
    def begun(self) -> Iterator[Path]:
        """Yield the folder to write to. Where it belongs to this task alone, it is removed at the end."""
        if self.visit is None:
            yield self.folder
            return
        self.visit.begin()
        # No failpoint: a draft that no table names yet.
        own = Path(tempfile.mkdtemp(prefix="draft-", dir=self.visit.make_folder()))
        try:
            yield own
        finally:
            shutil.rmtree(own, ignore_errors=True)

    def sent(self, folder: Path) -> list[Draft]:
        """Upload the finished files in ``folder``, which ``begun`` yielded; return what was uploaded.

        Where the driver sees the folder, nothing is uploaded and the list is empty.
        """
        if self.visit is None:
            return []
        found = [
            Draft(file.relative_to(folder).as_posix(), rows_in(file), file.stat().st_size)
            for file in sorted(folder.rglob("*.parquet"))
        ]
        names = [each.name for each in found]
        # No failpoint: drafts that no table names. A task that dies here is run again, under other names.
        _each(lambda name: self._storage.send_file(folder / name, self.objects / name), names)
        for name in names:
            (folder / name).unlink()
        return found

    # --- in the driver ----------------------------------------------------------------------------

    def bring(self, names: Collection[str]) -> None:
        """Download the files ``names`` that tasks uploaded to the draft's folder, unless the tasks wrote them
        there. Raises ``StagedFileMissing`` if one is gone."""
        if self.visit is None:
            return
        _each(lambda name: self._storage.fetch(self.objects / name, self.folder / name), names)
        if gone := [name for name in names if not (self.folder / name).exists()]:
            raise StagedFileMissing(
                f"{self.objects / gone[0]}, which a task has sent, is gone from the bucket.",
                fix="Run the same work again: it stages its files again.",
            )

    def lend(self, file: Path) -> str:
        """Return the path by which tasks read the driver's ``file``; upload it if they cannot see it."""
        if self.visit is None:
            return str(file)
        path = self.objects / f"{file.name}.parquet"
        # No failpoint: an object that no table names.
        self._storage.send_file(file, path)
        return str(path)

    def paths(self, names: Iterable[str]) -> list[str]:
        """Return the paths by which later tasks read the uploaded files ``names``."""
        return [str(self.objects / name) for name in names]

    def keep(self, paths: Iterable[str]) -> None:
        """Store files of the table, given by ``paths`` in it, in the bucket, so that tasks can read them.

        Call it while the bucket still has the drafts they were made from: it then copies those, and the
        commit sends no byte again.
        """
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
        """Delete the draft's objects from the bucket."""
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
    with ThreadPoolExecutor(min(AT_ONCE, len(names) or 1)) as pool:
        for _ in pool.map(do, names):
            pass
