"""How a Spark task on another machine than the home reaches landing and lake: through their bucket.

The driver gives each task the path of the home on its own machine, and the URL of the bucket. So a path means
the same to both, and the task reads objects through copies in a folder of its executor, which disappears with
the executor. Credentials are never sent: the executor uses those of its own environment.

Everything else of a home stays on the driver's machine. A task requests what it needs of it, keys and tokens,
from the driver's process (``asked``). It must not make such a file itself (``require_here``).
"""

from __future__ import annotations

import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.sealed_requests import Address, NotAnswered
from omnisupport_ingest.storage import forget_unread, parse_storage, put_behind, storage_of

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

ELSEWHERE = "spark.omnisupport.tasksElsewhere"
"""A setting of a Spark session: ``true`` if its tasks run on other machines than the driver."""

_COPIES_KEPT = timedelta(days=1)
_LOOK_SECONDS = 3600.0

_visits: dict[str, Visit] = {}
"""The homes that this process visits, by path."""

_looked_at: float | None = None
"""When unused copies were last looked for (monotonic seconds)."""


class HomeFileNeeded(IngestError):
    """A task on a machine without the home needs keys of subjects or tokens, which no bucket keeps, and the
    process that has the home does not answer it. Nothing was committed.

    Fix: Set ``OMNISUPPORT_KEY_SERVICE`` to an address by which executors reach the machine with the home, and
    let them connect to it.
    """

    exit_code = 3


class CopiesExposed(IngestError):
    """The folder in which an executor would keep copies of landing and lake is another user's, or a link.
    Nothing was read or written.

    Fix: Remove it, or set ``SPARK_LOCAL_DIRS`` on the executors to a folder of their user.
    """

    exit_code = 3


@dataclass(frozen=True, slots=True)
class Visit:
    """What a task gets: the path of the ``home`` on the driver's machine, and the ``url`` of its landing and
    lake."""

    home: str
    url: str

    @classmethod
    def of(cls, spark: SparkSession, path: Path) -> Visit | None:
        """Return the visit with which tasks of ``spark`` reach ``path``; None if they reach it as the driver
        does."""
        from omnisupport_ingest.bucket.storage import BucketStorage

        storage = storage_of(path)
        if storage.is_local or spark.conf.get(ELSEWHERE, "false") != "true":
            return None
        assert isinstance(storage, BucketStorage)
        return cls(*storage.place)

    @property
    def folder(self) -> Path:
        """The folder for copies and drafts of the tasks of this executor; Spark deletes the folder around
        it, YARN the one of ``LOCAL_DIRS``."""
        given = os.environ.get("SPARK_LOCAL_DIRS") or os.environ.get("LOCAL_DIRS") or ""
        local = given.partition(",")[0] or tempfile.gettempdir()
        return Path(local, f"omnisupport-{sha256(f'{self.home} {self.url}'.encode()).hexdigest()[:16]}")

    def make_folder(self) -> Path:
        """Make the folder, for this user only, and return it. Raises ``CopiesExposed``."""
        # No failpoint: a folder: one that is there already is as good.
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            self.folder.mkdir(mode=0o700)
        found = self.folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise CopiesExposed(
                f"{self.folder}, for copies of landing and lake, is no folder of this user.",
                fix="Remove it, or set SPARK_LOCAL_DIRS on the executors to a folder of their user.",
            )
        if found.st_mode & 0o077:
            # An earlier version made it readable for all.
            self.folder.chmod(0o700)
        return self.folder

    def begin(self) -> None:
        """Make this process, a worker of Spark, reach landing and lake of the home through the bucket."""
        global _looked_at
        from omnisupport_ingest.bucket.storage import BucketStorage

        copies = self.make_folder() / "copies"
        if _visits.get(self.home) != self:
            put_behind(self.home, BucketStorage(Path(self.home), *parse_storage(self.url), copies=copies))
            _visits[self.home] = self
        now = time.monotonic()
        if _looked_at is None or now - _looked_at > _LOOK_SECONDS:
            _looked_at = now
            # No failpoint: copies, which are brought again.
            copies.mkdir(mode=0o700, exist_ok=True)
            forget_unread(copies, datetime.now(UTC) - _COPIES_KEPT)


Task = Callable[[Iterable["pa.RecordBatch"]], Iterator["pa.RecordBatch"]]
"""The kind of function that ``mapInArrow`` takes."""


def visiting(visit: Visit | None, task: Task) -> Task:
    """Return ``task`` preceded by the start of ``visit``; ``task`` itself if ``visit`` is None."""
    return task if visit is None else partial(_visiting, visit=visit, task=task)


def _visiting(batches: Iterable[pa.RecordBatch], visit: Visit, task: Task) -> Iterator[pa.RecordBatch]:
    visit.begin()
    yield from task(batches)


def require_here(path: Path) -> None:
    """Raise ``HomeFileNeeded`` if this process only visits the home and the file ``path`` is not on its
    machine."""
    if _visits_home_of(path) and not path.exists():
        raise _needed(str(path), "which is not on its machine")


def asked_instead(path: Path, service: Address | None) -> Address | None:
    """Return ``service`` if this process only visits the home of the file ``path``, else None.

    On a visit, the file that this machine has at that path may belong to another home, or be a copy.
    """
    return service if _visits_home_of(path) else None


def asked(service: Address, request: dict[str, Any], refusal: type[IngestError]) -> Any:
    """Return what the process that has the home answers to ``request``.

    Raises the ``refusal`` of that process, and ``HomeFileNeeded`` if it does not answer.
    """
    try:
        answer = service.ask(request)
    except NotAnswered as error:
        raise _needed("keys or tokens", f"and nobody answers it: {error}") from None
    if "refused" in answer:
        name, problem, fix = answer["refused"]
        raise refusal(problem, fix=fix) if name == refusal.__name__ else HomeFileNeeded(problem, fix=fix)
    return answer["found"]


def _visits_home_of(path: Path) -> bool:
    return any(path.is_relative_to(home) for home in _visits)


def _needed(what: str, problem: str) -> HomeFileNeeded:
    return HomeFileNeeded(
        f"A task of Spark needs {what}, {problem}.",
        fix="Set OMNISUPPORT_KEY_SERVICE to an address by which executors reach the machine with the home, "
        "and let them connect to it.",
    )
