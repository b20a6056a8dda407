"""Schema changes of captured tables: what a table was seen to be, and every change of it since.

Only changes of values are in the log; a column that is added, renamed or retyped shows there, if at all, with
the first row that is written afterwards, and a new NOT NULL or enum value never does. So capture compares the
catalogs, at each start and every few seconds, and this file keeps both what was seen last and what had
changed. They are written together: a change is neither missed nor told twice, however capture ends.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.landing.encoding import content_of, decode, encode
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.storage import replace as replace_file

FORMAT_VERSION = 1

FILE = "schema-changes.json"


@dataclass(frozen=True, slots=True)
class SeenColumn:
    """A column. ``number``: PostgreSQL's, which it keeps when it is renamed and never gives to another.

    ``default``: the expression of its default. ``before``: the constant that rows have which are older than
    the column, as text; None: NULL, or not known. ``labels``: those of an enum type.
    """

    number: int
    name: str
    pg_type: str
    not_null: bool
    default: str | None
    before: str | None
    labels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SeenTable:
    """A table: its number ``relation`` and its name at the source, its columns, and those that name a row.

    ``rows``: as the server estimates them; None where it does not.
    """

    relation: int
    name: str
    columns: tuple[SeenColumn, ...]
    key: tuple[str, ...]
    rows: int | None


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference between two looks at a table. ``kind``: one of ``KINDS``; ``column``: its name now, or
    the one that it had; None if the difference is one of the table. ``before`` and ``after``: in words.
    """

    kind: str
    column: str | None
    before: str | None
    after: str | None


KINDS = {
    "column_added": "column added",
    "column_dropped": "column dropped",
    "column_renamed": "column renamed",
    "column_added_again": "column dropped and added again",
    "column_widened": "column widened",
    "column_narrowed": "column narrowed",
    "column_retyped": "column retyped",
    "column_nullable": "column may be NULL now",
    "column_not_null": "column may not be NULL any more",
    "enum_value_added": "enum value added",
    "enum_values_changed": "enum values changed",
    "key_changed": "key changed",
    "table_renamed": "table renamed",
    "table_made_anew": "table made anew",
    "table_gone": "table gone",
}
"""Kinds of changes, and what people call them."""


@dataclass(frozen=True, slots=True)
class SchemaChange:
    """A change of the table that the contract ``table`` is about; the fields of ``Difference`` besides.

    ``number``: counts the changes of a source, from 1. ``noticed_at``: when it was seen. It was made in the
    WAL between ``above`` (0: not known) and ``below``. ``first_commit``: of the first transaction whose rows
    came with the new schema; None as long as there is none. ``rows``: how many the table had, by the server's
    estimate; None: not known.
    """

    number: int
    table: str
    kind: str
    column: str | None
    before: str | None
    after: str | None
    noticed_at: datetime
    epoch: int
    above: Lsn
    below: Lsn
    first_commit: Lsn | None
    rows: int | None


@dataclass(frozen=True, slots=True)
class Seen:
    """The content of the file: tables by the name of their contract as they were seen last, at ``certain`` or
    above in the WAL; every change; and by table the number up to which a person has accepted its changes.
    """

    tables: dict[str, SeenTable]
    certain: Lsn
    changes: tuple[SchemaChange, ...]
    accepted: dict[str, int] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION


_NOTHING = Seen({}, Lsn(0), ())


@dataclass(frozen=True, slots=True)
class Look:
    """When the catalogs were looked at: every statement saw what committed below ``certain``, and the WAL
    ended at ``end`` afterwards.
    """

    epoch: int
    certain: Lsn
    end: Lsn


class SchemaChanges:
    """The record of one source, in its landing folder. Written by its capture alone; thread-safe.

    Every change of it is durable when the call returns.
    """

    def __init__(self, folder: Path) -> None:
        """``folder``: the landing folder of the source."""
        self._path, self._lock = folder / FILE, threading.Lock()
        self._known: Seen | None = None

    def read(self) -> Seen:
        """What is recorded; errors as of a manifest."""
        try:
            content = content_of(self._path)
        except FileNotFoundError:
            return _NOTHING
        return decode(Seen, content, self._path, newest=FORMAT_VERSION)

    def all(self) -> tuple[SchemaChange, ...]:
        """Every change, in the order in which they were noticed."""
        return self.read().changes

    def seen(
        self,
        look: Look,
        tables: Mapping[str, SeenTable],
        differences: Mapping[str, Sequence[Difference]],
    ) -> tuple[SchemaChange, ...]:
        """Record ``tables``, by contract, as they are now, and the ``differences`` to what they were.

        Returns the new changes. A table that is gone keeps the schema that it had.
        """
        with self._lock:
            known = self._held()
            new: list[SchemaChange] = []
            now = datetime.now(UTC)
            for table, of_table in differences.items():
                was = known.tables.get(table)
                rows = tables[table].rows if table in tables else (was.rows if was else None)
                for each in of_table:
                    number = len(known.changes) + len(new) + 1
                    new.append(
                        SchemaChange(
                            number,
                            table,
                            each.kind,
                            each.column,
                            each.before,
                            each.after,
                            now,
                            look.epoch,
                            known.certain,
                            look.end,
                            None,
                            rows,
                        )
                    )
            changed = {
                name: table for name, table in tables.items() if _differs(known.tables.get(name), table)
            }
            if new or changed:
                self._write(
                    replace(
                        known,
                        tables=known.tables | dict(tables),
                        certain=max(known.certain, look.certain),
                        changes=(*known.changes, *new),
                    )
                )
            else:
                # A look that found nothing is not worth a write; the stretch of the next change begins here.
                self._known = replace(known, certain=max(known.certain, look.certain))
            return tuple(new)

    def first_rows(self, table: str, columns: Mapping[str, str], commit_lsn: Lsn) -> None:
        """Rows of ``table`` with ``columns`` (name → type) came with the transaction that committed at
        ``commit_lsn``: the first with every change that they show."""
        with self._lock:
            known = self._held()
            shown = tuple(
                replace(each, first_commit=commit_lsn)
                if each.table == table and _shows(each, columns, commit_lsn)
                else each
                for each in known.changes
            )
            if shown != known.changes:
                self._write(replace(known, changes=shown))

    def accept(self, tables: Collection[str]) -> None:
        """Accept all changes of ``tables`` so far: a person has had them read again, and capture takes them
        again."""
        with self._lock:
            known = self._held()
            accepted = known.accepted | {
                each.table: len(known.changes) for each in known.changes if each.table in tables
            }
            if accepted != known.accepted:
                self._write(replace(known, accepted=accepted))

    def open_changes(self, table: str) -> tuple[SchemaChange, ...]:
        """The changes of ``table`` that no person has accepted (``accept``)."""
        with self._lock:
            known = self._held()
        least = known.accepted.get(table, 0)
        return tuple(each for each in known.changes if each.table == table and each.number > least)

    def tables(self) -> dict[str, SeenTable]:
        """Tables as they were seen last, by the name of their contract."""
        with self._lock:
            return self._held().tables

    def _held(self) -> Seen:
        if self._known is None:
            self._known = self.read()
        return self._known

    def _write(self, seen: Seen) -> None:
        with failpoint("landing.schema_changes"):
            replace_file(self._path, encode(seen))
        self._known = seen


def _differs(before: SeenTable | None, now: SeenTable) -> bool:
    """Return whether two looks show different schemas; the number of rows does not count."""
    return before is None or replace(before, rows=None) != replace(now, rows=None)


_IN_ROWS = frozenset({"column_added", "column_added_again", "column_renamed"})
"""Changes that rows show by the name of a column."""

_BY_FORM = frozenset({"column_widened", "column_narrowed", "column_retyped"})
"""Changes that the stream describes before the next row."""


def _shows(change: SchemaChange, columns: Mapping[str, str], commit_lsn: Lsn) -> bool:
    if change.first_commit is not None or commit_lsn < change.above:
        return False
    if change.kind in _IN_ROWS:
        name = change.after if change.kind == "column_renamed" else change.column
        return name in columns
    if change.kind == "column_dropped":
        return change.column not in columns
    return change.kind in _BY_FORM and columns.get(change.column or "") == change.after
