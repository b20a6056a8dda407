"""A domain as a value: the tables of a demonstration database, its first rows, and the traffic on it.

``domains.py`` lists the domains of the program. All other modules know tables only by their contracts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from importlib.resources import files
from typing import Generic, TypeVar

from psycopg2.extensions import connection as Connection
from psycopg2.extensions import cursor as Cursor

from omnisupport_ingest.demo.actor import Actor
from omnisupport_ingest.sources.postgres.session.connection import connect_writer, source_errors

A = TypeVar("A", bound=Actor)

Action = Callable[[A, int], None]
"""Changes up to the given number of rows of one table in the open transaction."""

Scene = Callable[[A], None]
"""A few rows that tell one story, in their own transactions. Every workload, however small, has all
scenes."""


@dataclass(frozen=True)
class Domain(Generic[A]):
    """A demonstration database.

    ``name``: the name of the source, and so of its folders in landing and lake. ``title``: for people.
    ``schema``: the schema of its tables, which ``schema.sql`` in ``package`` makes. ``contracts``: folder of
    its contracts, relative to the program. ``shown``: the dimension that the demo shows how to read.
    """

    name: str
    title: str
    schema: str
    package: str
    contracts: str
    shown: str
    fill: Callable[[Cursor, int, int], None]
    """Inserts the first rows; takes seed and size."""
    size: int
    """Default size for ``fill``, in rows of ``shown``."""
    actor: Callable[[Connection, int], A]
    """Connects the traffic; takes the seed."""
    traffic: Mapping[Action[A], int]
    """Ordinary actions → their share of the traffic."""
    before_the_middle: tuple[Scene[A], ...]
    after_the_middle: tuple[Scene[A], ...]

    def create(self, connection: Connection) -> bool:
        """Make schema and tables in the open transaction. Returns False if the schema exists already."""
        with connection.cursor() as cursor:
            cursor.execute("SELECT FROM pg_namespace WHERE nspname = %s", (self.schema,))
            if cursor.fetchone() is not None:
                return False
            cursor.execute(files(self.package).joinpath("schema.sql").read_text(encoding="utf-8"))
            return True

    def prepare(self, dsn: str, seed: int, *, size: int | None = None) -> bool:
        """Make the tables and fill them in one transaction. Returns False, without any change, if they exist.

        The same ``seed`` and ``size`` (rows of ``shown``) give the same rows. Raises ``SourceUnavailable``.
        """
        doing = "the tables of the demo were made"
        with source_errors(doing), closing(connect_writer(dsn)) as connection, connection:
            if not self.create(connection):
                return False
            with connection.cursor() as cursor:
                self.fill(cursor, seed, self.size if size is None else size)
            return True
