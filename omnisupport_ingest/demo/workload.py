"""Traffic on a domain: a given number of changes, spread over a given time."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import Generic

import psycopg2

from omnisupport_ingest.demo.actor import WorkloadReport
from omnisupport_ingest.demo.domain import A, Domain
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.sources.postgres.session.connection import connect_writer, source_errors

_LARGE_SHARE = 0.10
"""The share of all changes that one large transaction gets."""

_SMALL_SHARE_OF_TRANSACTIONS = 0.77
"""Transactions of a handful of rows: most of the transactions, about a tenth of the changes."""

_MEDIUM_ROWS = (50, 250)
_SECONDS_OF_A_ROUND = 60


Step = Callable[[], None]


class WorkloadFailed(IngestError):
    """The source refused the traffic of the demo.

    Fix: See that the tables of the demo are there, and what the log of the server says; then start again.
    """

    exit_code = 4


class Workload(Generic[A]):
    """Traffic for ``domain`` at ``dsn``, which ``Domain.prepare`` has filled.

    The same ``seed`` on the same content makes the same changes in the same order, at any pace. Only one
    workload may run at a time, because it keeps a record of the keys it made.
    """

    def __init__(self, domain: Domain[A], dsn: str, seed: int) -> None:
        self._domain = domain
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

        All scenes run, so a very small number (below about 120) is exceeded. ``on_progress`` gets the number
        of changes committed so far, after every step. Setting ``stop`` ends the run after the open
        transaction. Raises ``WorkloadFailed``, or ``SourceUnavailable`` as capture does.
        """
        stop = stop or threading.Event()
        began = time.monotonic()
        with self._actor() as actor:
            for step in self._steps(actor, changes):
                step()
                if on_progress is not None:
                    on_progress(actor.report.changes)
                due = began + min_seconds * min(1.0, actor.report.changes / max(1, changes))
                if stop.wait(max(0.0, due - time.monotonic())):
                    break
            return actor.report

    def run_forever(self, rate_per_second: float, stop: threading.Event) -> WorkloadReport:
        """Make about ``rate_per_second`` changes until ``stop`` is set; all scenes run about once a
        minute."""
        total = WorkloadReport()
        changes = max(200, round(rate_per_second * _SECONDS_OF_A_ROUND))
        while not stop.is_set():
            total += self.run(changes, changes / rate_per_second, stop=stop)
        return total

    @contextmanager
    def _actor(self) -> Iterator[A]:
        try:
            with source_errors("the demo changed rows"), closing(connect_writer(self._dsn)) as connection:
                yield self._domain.actor(connection, self._seed)
        except psycopg2.Error as error:
            # The text of a database error may quote row values; the code is enough.
            raise WorkloadFailed(
                f"The source did not take the traffic: {type(error).__name__}"
                f"{f' (SQLSTATE {error.pgcode})' if error.pgcode else ''}.",
                fix=f"Check that {self._domain.title} was made and filled; the log of the server tells more.",
            ) from None

    def _steps(self, actor: A, changes: int) -> Iterator[Step]:
        """Yield the steps of the run in order, each one scene or one transaction; scenes come at even
        distances."""
        early, late = self._domain.before_the_middle, self._domain.after_the_middle
        plan: deque[tuple[float, Step]] = deque()
        for number, scene in enumerate(early):
            plan.append((0.45 * number / len(early), partial(scene, actor)))
        for number, scene in enumerate(late):
            plan.append((0.5 + 0.2 * number / len(late), partial(scene, actor)))
        plan.append((0.7, partial(self._transaction, actor, int(changes * _LARGE_SHARE), 1000)))
        while plan or actor.done < changes:
            share, step = plan[0] if plan else (1.0, None)
            if step is not None and actor.done >= share * changes:
                plan.popleft()
                yield step
            else:
                room = max(1, int(share * changes) - actor.done)
                yield partial(self._traffic, actor, room, changes)

    def _traffic(self, actor: A, room: int, changes: int) -> None:
        """Make one ordinary transaction of up to ``room`` changes, small or medium."""
        if actor.rng.random() < _SMALL_SHARE_OF_TRANSACTIONS:
            rows = actor.rng.randint(1, 8)
            self._transaction(actor, min(rows, room), 3)
        else:
            rows = min(actor.rng.randint(*_MEDIUM_ROWS), max(10, changes // 50))
            self._transaction(actor, min(rows, room), 100)

    def _transaction(self, actor: A, rows: int, at_once: int) -> None:
        """Make one transaction of exactly ``rows`` changes, in statements of up to ``at_once``.

        Each statement is of one kind, drawn by its share of ordinary traffic.
        """
        weights = self._domain.traffic
        with actor.transaction():
            end = actor.done + rows
            while actor.done < end:
                [action] = actor.rng.choices(list(weights), weights=list(weights.values()))
                action(actor, min(at_once, end - actor.done))
