"""How a task of Spark reaches landing and lake from a machine that does not have the home: by their bucket.

The driver tells each task where the home is on its own machine, and the URL of the bucket. So paths mean the
same to both, and the task reads objects by copies in a folder of its executor, which goes with the executor.
Credentials are never sent: the executor has those of its own environment.

Whatever else a home has stays on the driver's machine. A task that needs a file of it is refused
(``require_here``); it must not make one of its own.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.storage import forget_unread, parse_storage, put_behind, storage_of

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

ELSEWHERE = "spark.omnisupport.tasksElsewhere"
"""The setting of a Spark session that is ``true`` where its tasks run on other machines than the driver."""

_COPIES_KEPT = timedelta(days=1)
_LOOK_SECONDS = 3600.0

_visits: dict[str, Visit] = {}
"""The homes that this process visits, by their paths."""

_looked_at: float | None = None
"""When copies that nobody reads any more were looked for (monotonic seconds)."""


class HomeFileNeeded(IngestError):
    """A task on a machine without the home needs a file of it that no bucket keeps: the keys of subjects, or
    the map of tokens. Nothing was committed.

    Fix: Give each executor the folder of the home under the same path, or run where contracts encrypt or
    tokenize on one machine.
    """

    exit_code = 3


@dataclass(frozen=True, slots=True)
class Visit:
    """What a task gets: the path of the ``home`` on the driver's machine, and the ``url`` at which it
    keeps landing and lake."""

    home: str
    url: str

    @classmethod
    def of(cls, spark: SparkSession, path: Path) -> Visit | None:
        """The visit by which tasks of ``spark`` reach ``path``; None where they have it as the driver has."""
        from omnisupport_ingest.bucket import BucketStorage

        storage = storage_of(path)
        if storage.is_local or spark.conf.get(ELSEWHERE, "false") != "true":
            return None
        assert isinstance(storage, BucketStorage)
        return cls(*storage.place)

    @property
    def folder(self) -> Path:
        """The folder in which tasks of this executor have copies and drafts; Spark deletes what it is in."""
        local = os.environ.get("SPARK_LOCAL_DIRS", "").partition(",")[0] or tempfile.gettempdir()
        return Path(local, f"omnisupport-{sha256(f'{self.home} {self.url}'.encode()).hexdigest()[:16]}")

    def begin(self) -> None:
        """Have this process, a worker of Spark, reach landing and lake of the home by the bucket."""
        global _looked_at
        from omnisupport_ingest.bucket import BucketStorage

        copies = self.folder / "copies"
        if _visits.get(self.home) != self:
            put_behind(self.home, BucketStorage(Path(self.home), *parse_storage(self.url), copies=copies))
            _visits[self.home] = self
        now = time.monotonic()
        if _looked_at is None or now - _looked_at > _LOOK_SECONDS:
            _looked_at = now
            # No failpoint: copies, which are brought again.
            copies.mkdir(mode=0o700, parents=True, exist_ok=True)
            forget_unread(copies, datetime.now(UTC) - _COPIES_KEPT)


Task = Callable[[Iterable["pa.RecordBatch"]], Iterator["pa.RecordBatch"]]
"""What ``mapInArrow`` takes."""


def visiting(visit: Visit | None, task: Task) -> Task:
    """Return ``task`` so that it begins with ``visit``; itself where tasks need none."""
    return task if visit is None else partial(_visiting, visit=visit, task=task)


def _visiting(batches: Iterable[pa.RecordBatch], visit: Visit, task: Task) -> Iterator[pa.RecordBatch]:
    visit.begin()
    yield from task(batches)


def require_here(path: Path) -> None:
    """Refuse to go on without the file ``path`` of a home that this process only visits
    (``HomeFileNeeded``)."""
    if any(path.is_relative_to(home) for home in _visits) and not path.exists():
        raise HomeFileNeeded(
            f"A task of Spark needs {path}, which is not on its machine.",
            fix="Mount the home of the driver on the executors under the same path, or unset "
            "OMNISUPPORT_SPARK_MASTER and OMNISUPPORT_SPARK_REMOTE, so that Spark runs on this machine.",
        )
