"""The names of subjects that were erased, by table, in the home's file of keys.

Under another name an erased subject would be another one. So contracts are checked against these names
whenever they are read (``in_force``), without the libraries that keys need.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from omnisupport_ingest.errors import IngestError

FILE = "keys/subjects.sqlite"
"""Path of the file of keys, below the home."""

TABLE = """
CREATE TABLE IF NOT EXISTS named (
    source TEXT, table_name TEXT, name TEXT, PRIMARY KEY (source, table_name)
) WITHOUT ROWID
"""


_WAIT_SECONDS = 30.0

_PLAIN = "plain:"
"""Prefix of the name of a subject whose values land plain; a name has no colon."""


class ErasedName(NamedTuple):
    """The name of a table's subjects when one was erased, and whether its values landed encrypted then."""

    name: str
    encrypted: bool


class ErasedSubjectsUnreadable(IngestError):
    """The names of erased subjects cannot be read, so no contract can be checked against them. Nothing was
    changed.

    Fix: Run the same again if another process is writing keys; else restore ``keys/`` of the home from its
    newest backup.
    """

    exit_code = 3


def note(base: sqlite3.Connection, source: str, names: Mapping[str, ErasedName]) -> None:
    """Record ``names`` by table, within the open transaction; the first name of a table counts.

    A table whose values land encrypted by now must stay so, if it was plain in an earlier record.
    """
    # No failpoint: the one of the transaction, in subject_keys.
    base.executemany(
        "INSERT INTO named VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET name = excluded.name "
        f"WHERE named.name = '{_PLAIN}' || excluded.name",
        (
            (source, table, each.name if each.encrypted else f"{_PLAIN}{each.name}")
            for table, each in sorted(names.items())
        ),
    )


def names_once_erased(path: Path) -> dict[tuple[str, str], ErasedName]:
    """Return the names in the file of keys at ``path``, by source and table.

    Empty if the file or its table does not exist: nobody was erased. Raises ``ErasedSubjectsUnreadable``.
    """
    try:
        path.stat()
        # Not read-only: the journal of a killed writer could not be rolled back then. No file is made.
        at = f"{path.absolute().as_uri()}?mode=rw"
        with closing(sqlite3.connect(at, uri=True, timeout=_WAIT_SECONDS)) as base:
            if base.execute("SELECT 1 FROM sqlite_schema WHERE name = 'named'").fetchone() is None:
                return {}
            rows = base.execute("SELECT source, table_name, name FROM named").fetchall()
    except FileNotFoundError:
        return {}
    except (OSError, sqlite3.Error) as problem:
        raise ErasedSubjectsUnreadable(
            f"The names of erased subjects in {path} cannot be read: {problem}.",
            fix="If another process is writing keys, run the same again. If this user may not read the file, "
            "run it as the user of the home. Else restore the file from its newest backup.",
        ) from None
    return {
        (source, table): ErasedName(name.removeprefix(_PLAIN), not name.startswith(_PLAIN))
        for source, table, name in rows
    }
