"""Traffic on the support desk: a given number of changes, spread over a given time."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial

import psycopg2

from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.sources.postgres.connection import writer_dsn
from omnisupport_ingest.sources.postgres.support_desk import scenes
from omnisupport_ingest.sources.postgres.support_desk.desk import Desk
from omnisupport_ingest.sources.postgres.support_desk.report import WorkloadReport
from omnisupport_ingest.sources.postgres.support_desk.traffic import some_traffic

_LARGE_SHARE = 0.10
"""Part of all changes that is one transaction."""

_SMALL_SHARE_OF_TRANSACTIONS = 0.77
"""Transactions of a handful of rows: most of the transactions, about a tenth of the changes."""

_MEDIUM_ROWS = (50, 250)
_SECONDS_OF_A_ROUND = 60


Step = Callable[[], None]


class WorkloadFailed(IngestError):
    """The source refused or broke off the traffic."""

    exit_code = 4


class Workload:
    """Traffic for the support desk at ``dsn``, which ``seed.prepare`` has filled.

    The same ``seed`` on the same content makes the same changes in the same order; only the pace
    differs. One workload at a time: it keeps account of the keys it made.
    """

    def __init__(self, dsn: str, seed: int) -> None:
        self._dsn = dsn
        self._seed = seed

    def run(
        self,
        changes: int,
        min_seconds: float = 0.0,
        on_progress: Callable[[int], None] | None = None,
        stop: threading.Event | None = None,
    ) -> WorkloadReport:
        """Commit ``changes`` row changes, spread evenly over at least ``min_seconds``.

        All scenes take place, the TRUNCATE near the middle, so very small numbers (below about 120)
        are exceeded. ``on_progress`` gets the number of changes committed so far, after every step.
        Setting ``stop`` ends the run after the open transaction. Raises ``WorkloadFailed``.
        """
        stop = stop or threading.Event()
        began = time.monotonic()
        with self._desk() as desk:
            for step in _steps(desk, changes):
                step()
                if on_progress is not None:
                    on_progress(desk.report.changes)
                due = began + min_seconds * min(1.0, desk.report.changes / max(1, changes))
                if stop.wait(max(0.0, due - time.monotonic())):
                    break
            return desk.report

    def run_forever(self, rate_per_second: float, stop: threading.Event) -> WorkloadReport:
        """Make about ``rate_per_second`` changes until ``stop`` is set; all scenes every minute or so."""
        total = WorkloadReport()
        changes = max(200, round(rate_per_second * _SECONDS_OF_A_ROUND))
        while not stop.is_set():
            total += self.run(changes, changes / rate_per_second, stop=stop)
        return total

    @contextmanager
    def _desk(self) -> Iterator[Desk]:
        try:
            with closing(psycopg2.connect(writer_dsn(self._dsn))) as connection:
                yield Desk(connection, self._seed)
        except psycopg2.Error as error:
            # The text of a database error may quote row values: the code says enough.
            raise WorkloadFailed(
                f"The source did not take the traffic: {type(error).__name__}"
                f"{f' (SQLSTATE {error.pgcode})' if error.pgcode else ''}.",
                fix="Check that the server runs and that the support desk was made and filled; its log "
                "tells more.",
            ) from None


def _steps(desk: Desk, changes: int) -> Iterator[Step]:
    """The run as steps of one scene or one transaction each, in order; scenes at even distances."""
    early, late = scenes.BEFORE_THE_MIDDLE, scenes.AFTER_THE_MIDDLE
    plan: deque[tuple[float, Step]] = deque()
    for number, scene in enumerate(early):
        plan.append((0.45 * number / len(early), partial(scene, desk)))
    for number, scene in enumerate(late):
        plan.append((0.5 + 0.2 * number / len(late), partial(scene, desk)))
    plan.append((0.7, partial(_transaction, desk, int(changes * _LARGE_SHARE), 1000)))
    while plan or desk.done < changes:
        share, step = plan[0] if plan else (1.0, None)
        if step is not None and desk.done >= share * changes:
            plan.popleft()
            yield step
        else:
            room = max(1, int(share * changes) - desk.done)
            yield partial(_traffic, desk, room, changes)


def _traffic(desk: Desk, room: int, changes: int) -> None:
    """One ordinary transaction of up to ``room`` changes, small or medium."""
    if desk.rng.random() < _SMALL_SHARE_OF_TRANSACTIONS:
        rows = desk.rng.randint(1, 8)
        _transaction(desk, min(rows, room), 3)
    else:
        rows = min(desk.rng.randint(*_MEDIUM_ROWS), max(10, changes // 50))
        _transaction(desk, min(rows, room), 100)


def _transaction(desk: Desk, rows: int, at_once: int) -> None:
    """One transaction of exactly ``rows`` changes, in statements of up to ``at_once``."""
    with desk.transaction():
        end = desk.done + rows
        while desk.done < end:
            some_traffic(desk, min(at_once, end - desk.done))
