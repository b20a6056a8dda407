"""The state of the support desk as its traffic sees it: which keys live, which are gone, what was done."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import cast
from uuid import UUID

import psycopg2

from omnisupport_ingest.sources.postgres.support_desk import statements
from omnisupport_ingest.sources.postgres.support_desk.report import WorkloadReport
from omnisupport_ingest.sources.postgres.support_desk.rows import LONG_BODY, RowMaker
from omnisupport_ingest.sources.postgres.support_desk.statements import KEY_COLUMNS, Key

_SECONDS_BETWEEN_RUNS = 7 * 24 * 3600


class Keys:
    """The keys of one table: those of its rows and those of rows deleted by this traffic."""

    def __init__(self, live: list[Key]) -> None:
        self.live = live
        self.gone: list[Key] = []

    def some(self, rng: random.Random, count: int) -> list[Key]:
        """Up to ``count`` different live keys."""
        return rng.sample(self.live, min(count, len(self.live)))

    def kill(self, rng: random.Random, count: int) -> list[Key]:
        """Move up to ``count`` live keys to the gone ones and return them."""
        chosen = []
        for _ in range(min(count, len(self.live))):
            at = rng.randrange(len(self.live))
            self.live[at], self.live[-1] = self.live[-1], self.live[at]
            chosen.append(self.live.pop())
        self.gone += chosen
        return chosen

    def revive(self, count: int) -> list[Key]:
        """Make up to ``count`` gone keys live again, the oldest first, and return them."""
        back, self.gone = self.gone[:count], self.gone[count:]
        self.live += back
        return back

    def rename(self, old: Key, new: Key) -> None:
        self.live[self.live.index(old)] = new


class Desk:
    """A connection to the support desk with what is needed to make sensible changes to it.

    The random numbers depend on ``seed`` and on how many organizations were ever made, which grows
    with every run: the same seed on the same database gives the same changes, and a second run
    continues instead of repeating the keys of the first.
    """

    def __init__(self, connection: psycopg2.extensions.connection, seed: int) -> None:
        self._connection = connection
        self.cursor = connection.cursor()
        self.cursor.execute("SELECT last_value FROM support.organizations_id_seq")
        run = cast(int, self._one()[0])
        self.rng = random.Random(f"workload {seed} {run}")  # noqa: S311 (repeatable, not secret)
        self.rows = RowMaker(self.rng, first_second=run * _SECONDS_BETWEEN_RUNS)
        self.keys = {table: Keys(self._load(table)) for table in KEY_COLUMNS}
        self._next_ticket = 1 + max((cast(int, key[0]) for key in self.keys["tickets"].live), default=0)
        self._next_agent = 1 + len(self.keys["agents"].live)
        self._next_comment: dict[int, int] = {}
        for ticket, number in cast(list[tuple[int, int]], self.keys["ticket_comments"].live):
            self._next_comment[ticket] = max(self._next_comment.get(ticket, 1), number + 1)
        connection.rollback()
        self.report = WorkloadReport()
        self._open = WorkloadReport()
        self._tables: set[str] = set()

    def _load(self, table: str) -> list[Key]:
        columns = ", ".join(column for column, _ in KEY_COLUMNS[table])
        self.cursor.execute(f"SELECT {columns} FROM support.{table} ORDER BY {columns}")
        return [tuple(row) for row in self.cursor.fetchall()]

    def _one(self) -> tuple[object, ...]:
        return cast(tuple[object, ...], self.cursor.fetchone())

    # Transactions. Keys are not restored by a rollback: what is to be rolled back leaves them alone.

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit what the block did, and count it."""
        yield
        self._connection.commit()
        done = self._open
        several = len(self._tables) > 1
        self.report += replace(
            done,
            transactions=1,
            multi_table_transactions=int(several),
            largest_transaction=done.changes,
        )
        self._open, self._tables = WorkloadReport(), set()

    @contextmanager
    def rolled_back_transaction(self) -> Iterator[None]:
        """Take back what the block did."""
        yield
        self._connection.rollback()
        self.report += WorkloadReport(rolled_back_transactions=1, rolled_back_changes=self._open.changes)
        self._open, self._tables = WorkloadReport(), set()

    @contextmanager
    def rolled_back_savepoint(self) -> Iterator[None]:
        """Take back what the block did, and go on with the transaction around it."""
        before, tables = self._open, set(self._tables)
        self.cursor.execute("SAVEPOINT regret")
        yield
        self.cursor.execute("ROLLBACK TO SAVEPOINT regret")
        undone = self._open.changes - before.changes
        self._open = before + WorkloadReport(rolled_back_savepoints=1, rolled_back_changes=undone)
        self._tables = tables

    @property
    def done(self) -> int:
        """Changes so far, those of the open transaction included."""
        return self.report.changes + self._open.changes

    def note(self, what: WorkloadReport) -> None:
        """Count kinds beside the row counts that the methods below keep."""
        self._open += what

    # Changes, counted.

    def insert(self, table: str, rows: Sequence[tuple[object, ...]]) -> None:
        self._changed(table, WorkloadReport(inserts=statements.insert(self.cursor, table, rows)))

    def update(self, table: str, assignments: str, rows: Sequence[tuple[Key, tuple[object, ...]]]) -> int:
        count = statements.update(self.cursor, table, assignments, rows)
        self._changed(table, WorkloadReport(updates=count))
        return count

    def delete(self, table: str, keys: Sequence[Key]) -> None:
        self._changed(table, WorkloadReport(deletes=statements.delete(self.cursor, table, keys)))

    def truncate(self, table: str) -> None:
        self.cursor.execute(f"TRUNCATE support.{table}")
        self._changed(table, WorkloadReport(truncates=1))

    def change_key(self, table: str, old: Key, new: Key) -> None:
        """Give a row a new key and touch nothing else that is stored out of line."""
        at = self.rows.now() if table == "tickets" else None
        count = statements.change_key(self.cursor, table, old, new, at)
        self._changed(table, WorkloadReport(updates=count, key_changes=count))

    def _changed(self, table: str, what: WorkloadReport) -> None:
        if what.changes:
            self._tables.add(table)
        self._open += what

    # Keys and rows.

    def insert_organization(self) -> Key:
        self.insert("organizations", [self.rows.organization()])
        self.cursor.execute("SELECT currval('support.organizations_id_seq')")
        key = tuple(self._one())
        self.keys["organizations"].live.append(key)
        return key

    def new_ticket_key(self) -> Key:
        self._next_ticket += 1
        return (self._next_ticket - 1,)

    def new_comment_key(self, ticket: object) -> Key:
        number = self._next_comment.get(cast(int, ticket), 1)
        self._next_comment[cast(int, ticket)] = number + 1
        return (ticket, number)

    def new_uuid(self) -> UUID:
        return UUID(int=self.rng.getrandbits(128), version=4)

    def new_agent_handle(self) -> str:
        """A handle with the random part that keeps it apart from those that a TRUNCATE forgot."""
        self._next_agent += 1
        return f"agent-{self._next_agent:04d}-{self.rng.getrandbits(32):08x}"

    def new_row(self, table: str, key: Key) -> tuple[object, ...]:
        """A new row of customers, tickets or ticket_comments with ``key``."""
        if table == "ticket_comments":
            return self.rows.comment(cast(tuple[int, int], key))
        organization = cast(int, self.rng.choice(self.keys["organizations"].live)[0])
        if table == "customers":
            return self.rows.customer(organization, key=cast(str, key[0]))
        return self.rows.ticket(cast(int, key[0]), organization, self._any("customers"), self._any("agents"))

    def _any(self, table: str) -> str | None:
        live = self.keys[table].live
        return cast(str, self.rng.choice(live)[0]) if live and self.rng.random() < 0.9 else None

    def with_long_body(self, table: str, count: int) -> list[Key]:
        """The first ``count`` keys of rows whose body is stored out of line; fewer if there are fewer."""
        columns = ", ".join(column for column, _ in KEY_COLUMNS[table])
        self.cursor.execute(
            f"SELECT {columns} FROM support.{table} WHERE octet_length(body) > %s "
            f"ORDER BY {columns} DESC LIMIT %s",
            (LONG_BODY, count),
        )
        return [tuple(row) for row in self.cursor.fetchall()]
