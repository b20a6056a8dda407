"""Writers that do everything a transaction can, at random, several at a time."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import ExitStack

from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest, contract
from omnisupport_ingest_tests.sources.postgres.two_readers import COLUMNS, LONG, run, session

WRITERS = 3


class Script:
    """Writers that do something at random, in turns; each has tables of its own, and one is for all."""

    def __init__(self, source: SourceUnderTest, seed: int, *, messages: bool) -> None:
        self.random, self.source, self.messages = random.Random(seed), source, messages
        self.next_id = 1
        self.depth = [-1] * WRITERS
        """Open savepoints of each writer; -1 outside of a transaction."""
        self.columns = 0

    @staticmethod
    def tables() -> list[str]:
        return ["shared", *(f"{name}_{writer}" for name in ("mine", "theirs") for writer in range(WRITERS))]

    def prepare(self) -> None:
        for name in self.tables():
            self.source.sql(
                f"CREATE TABLE {name} (id bigint PRIMARY KEY, body text, tag text)",
                f"ALTER TABLE {name} ALTER COLUMN body SET STORAGE EXTERNAL",
            )
            self.source.tables.append(contract(name, COLUMNS))
        for writer in range(WRITERS):
            self.source.sql(
                f"ALTER TABLE theirs_{writer} REPLICA IDENTITY FULL",
                f"ALTER TABLE theirs_{writer} ADD COLUMN of bigint REFERENCES mine_{writer}",
            )
        self.source.sql("CREATE TABLE elsewhere (id bigint, body text, tag text)")

    def play(self, steps: int, pause: float = 0, go_on: Callable[[], bool] = lambda: False) -> None:
        """Do so many things, and more while ``go_on`` says so, with ``pause`` seconds behind each."""
        with ExitStack() as stack:
            writers = [stack.enter_context(session(self.source)) for _ in range(WRITERS)]
            done = 0
            while done < steps or go_on():
                number = self.random.randrange(WRITERS)
                run(writers[number], *self._step(number))
                time.sleep(pause)
                done += 1
            for number, writer in enumerate(writers):
                if self.depth[number] >= 0 and self.random.random() < 0.7:
                    run(writer, "COMMIT")

    def _step(self, writer: int) -> list[str]:
        if self.depth[writer] < 0:
            self.depth[writer] = 0
            return ["BEGIN", self._change(writer)]
        roll = self.random.random()
        if roll < 0.12:
            self.depth[writer] = -1
            return ["COMMIT"]
        if roll < 0.16:
            self.depth[writer] = -1
            return ["ROLLBACK"]
        if roll < 0.34:
            self.depth[writer] += 1
            return [f"SAVEPOINT s{self.depth[writer]}", self._change(writer)]
        if self.depth[writer] and roll < 0.5:
            to = self.random.randint(1, self.depth[writer])
            back = self.random.random() < 0.6
            self.depth[writer] = to - 1
            # What is rolled back to stands still; here it is left for good.
            return [f"ROLLBACK TO s{to}", f"RELEASE s{to}"] if back else [f"RELEASE s{to}"]
        return [self._change(writer)]

    def _change(self, writer: int) -> str:
        table = self.random.choice(
            ["shared", "elsewhere", *(f"{name}_{writer}" for name in ("mine", "theirs"))]
        )
        first, rows = self.next_id, self.random.choice([1, 3, 60, 150])
        insert = (
            f"INSERT INTO {table} (id, body, tag) SELECT g, {LONG}, md5(g::text)"
            f" FROM generate_series({first}, {first + rows - 1}) g"
        )
        if table in ("shared", "elsewhere"):
            self.next_id += rows
            return insert
        if self.messages and self.random.random() < 0.2:
            transactional = self.random.choice(["true", "true", "false"])
            return f"SELECT pg_logical_emit_message({transactional}, 'audit', repeat('x', 1000))"
        self.columns += 1
        some = f"WHERE abs(id) % {self.random.randint(2, 5)} = 0"
        change = self.random.choice(
            [
                insert,
                insert,
                insert,
                f"UPDATE theirs_{writer} SET tag = 'changed' {some}",
                f"UPDATE mine_{writer} SET tag = 'changed' {some}",
                f"UPDATE theirs_{writer} SET id = -id {some}",
                f"UPDATE theirs_{writer} SET body = {LONG} {some}",
                f"DELETE FROM theirs_{writer} {some}",
                f"TRUNCATE mine_{writer} CASCADE",
                f"TRUNCATE theirs_{writer}",
                f"ALTER TABLE {table} ADD COLUMN c{self.columns} int DEFAULT {self.columns}",
            ]
        )
        self.next_id += rows
        return change
