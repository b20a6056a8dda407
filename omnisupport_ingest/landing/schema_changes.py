"""Record the schemas of a source's tables as they were last seen, and every change of them since.

The log holds changes of values only. A column that is added, renamed or retyped shows at the earliest with
the next row that is written; a new NOT NULL or enum value never shows. So capture compares the catalogs at
each start and every few seconds, and a reading by a cursor compares them when it begins. For events and
files, the columns of each batch are compared. One file keeps both the last seen schemas and the changes, so a
change is neither missed nor recorded twice, however the process ends.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.landing.encoding import content_of, decode
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.records import Document, Format, encode
from omnisupport_ingest.storage import replace as replace_file

FORMAT_VERSION = 2

FILE = "schema-changes.json"

UNKNOWN = Lsn(0)
"""Stands for an unknown LSN."""


@dataclass(frozen=True, slots=True)
class SeenColumn:
    """A column of a table.

    Attributes:
        number: PostgreSQL's number of the column. It stays when the column is renamed, and no other column
            ever gets it. If the source does not give it, a number of ours: then a renamed column has a new
            one.
        pg_type: as ``format_type`` writes it; empty: not known.
        default: expression of its default.
        before: constant, as text, that rows older than the column have; None: NULL, or not known.
        labels: values of an enum type.
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
    """A table at the source.

    Attributes:
        relation: its OID; 0: not known.
        key: the columns that identify a row; empty: not known.
        rows: the server's estimate of its rows; None where there is none.
        at: for a source whose rows show their schema, the time of the newest row that showed it. Older rows
            that come later say nothing about the table as it is now.
    """

    relation: int
    name: str
    columns: tuple[SeenColumn, ...]
    key: tuple[str, ...]
    rows: int | None
    at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference between two observations of a table.

    ``kind``: one of ``KINDS``. ``column``: its present or former name; None if the difference concerns the
    table. ``before`` and ``after``: in words.
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
"""Kinds of changes, and their names for people."""


@dataclass(frozen=True, slots=True)
class SchemaChange:
    """A recorded change of the table with the contract ``table``; it has the fields of ``Difference`` too.

    Attributes:
        number: counts the changes of a source, from 1.
        noticed_at: when it was seen.
        above: the change was made above this LSN; 0: not known.
        below: the change was made below this LSN; 0: not known.
        first_commit: commit LSN of the first transaction whose rows came with the new schema; None until
            there is one.
        rows: the server's estimate of the table's rows at that time; None: not known. If ``place`` is set:
            how many rows of its batch came with the new schema.
        place: for a source whose rows show their schema, the first row that shows the change, in words.
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
    place: str | None = None


@dataclass(frozen=True, slots=True)
class Seen:
    """The content of the file.

    Attributes:
        tables: last seen tables, by the name of their contract.
        certain: LSN at or above which they were seen.
        changes: every change.
        accepted: by table, the number up to which a person has accepted its changes.
    """

    tables: dict[str, SeenTable]
    certain: Lsn
    changes: tuple[SchemaChange, ...]
    accepted: dict[str, int] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION


def _with_places(document: Document) -> Document:
    """Add what version 1 did not record; it knew only captured logs."""
    tables, changes = document.get("tables"), document.get("changes")
    if isinstance(tables, dict):
        document = document | {"tables": {name: _with(each, "at") for name, each in tables.items()}}
    if isinstance(changes, list):
        document = document | {"changes": [_with(each, "place") for each in changes]}
    return document


def _with(member: object, name: str) -> object:
    return member | {name: None} if isinstance(member, dict) else member


_FORMAT = Format(Seen, FORMAT_VERSION, {1: _with_places})


_NOTHING = Seen({}, UNKNOWN, ())


@dataclass(frozen=True, slots=True)
class Look:
    """When the catalogs were read. Every statement saw all commits below ``certain``; afterwards the WAL
    ended at ``end``. ``place``: as in ``SchemaChange``, if rows were looked at and no catalogs."""

    epoch: int
    certain: Lsn = UNKNOWN
    end: Lsn = UNKNOWN
    place: str | None = None


class SchemaChanges:
    """The record of one source, in its landing folder.

    Only the process that lands the source's rows writes it; it is thread-safe. Every change is durable when
    the call returns.
    """

    def __init__(self, folder: Path) -> None:
        """``folder``: the landing folder of the source."""
        self._path, self._lock = folder / FILE, threading.Lock()
        self._known: Seen | None = None

    def read(self) -> Seen:
        """Return what is recorded. Raises the errors of ``encoding.decode``."""
        try:
            content = content_of(self._path)
        except FileNotFoundError:
            return _NOTHING
        return decode(_FORMAT, content, self._path)

    def held(self) -> Seen:
        """Return what is recorded, read from disk once: for the one process that writes the record."""
        with self._lock:
            return self._held()

    def all(self) -> tuple[SchemaChange, ...]:
        """Return every change, in the order in which they were noticed."""
        return self.read().changes

    def seen(
        self,
        look: Look,
        tables: Mapping[str, SeenTable],
        differences: Mapping[str, Sequence[Difference]],
    ) -> tuple[SchemaChange, ...]:
        """Record ``tables``, by contract, as they are now, and the ``differences`` from their earlier
        schemas.

        Returns the new changes. A table that is gone keeps its last schema.
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
                            look.place,
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
                # Nothing changed, so nothing is written; the range of the next change begins here.
                self._known = replace(known, certain=max(known.certain, look.certain))
            return tuple(new)

    def first_rows(self, table: str, columns: Mapping[str, str], commit_lsn: Lsn) -> None:
        """Record that rows of ``table`` with ``columns`` (name → type) came with the transaction that
        committed at ``commit_lsn``.

        This becomes the ``first_commit`` of every change that the columns show.
        """
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
        """Record that a person accepted all changes of ``tables`` so far, by having the tables read again.
        Capture then follows the tables again."""
        with self._lock:
            known = self._held()
            accepted = known.accepted | {
                each.table: len(known.changes) for each in known.changes if each.table in tables
            }
            if accepted != known.accepted:
                self._write(replace(known, accepted=accepted))

    def open_changes(self, table: str) -> tuple[SchemaChange, ...]:
        """Return the changes of ``table`` that no person has accepted (``accept``)."""
        with self._lock:
            known = self._held()
        least = known.accepted.get(table, 0)
        return tuple(each for each in known.changes if each.table == table and each.number > least)

    def tables(self) -> dict[str, SeenTable]:
        """Return the last seen tables, by the name of their contract."""
        return self.held().tables

    def _held(self) -> Seen:
        if self._known is None:
            self._known = self.read()
        return self._known

    def _write(self, seen: Seen) -> None:
        with failpoint("landing.schema_changes"):
            replace_file(self._path, encode(seen))
        self._known = seen


def _differs(before: SeenTable | None, now: SeenTable) -> bool:
    """Whether two observations show different schemas. The number of rows and their time do not count."""
    return before is None or replace(before, rows=None, at=None) != replace(now, rows=None, at=None)


_IN_ROWS = frozenset({"column_added", "column_added_again", "column_renamed"})
"""Changes that show in rows by the name of a column."""

KINDS_OF_TYPES = frozenset({"column_widened", "column_narrowed", "column_retyped"})
"""Changes of a column's type, which the stream sends before the next row."""


def _shows(change: SchemaChange, columns: Mapping[str, str], commit_lsn: Lsn) -> bool:
    if change.first_commit is not None or commit_lsn < change.above:
        return False
    if change.kind in _IN_ROWS:
        name = change.after if change.kind == "column_renamed" else change.column
        return name in columns
    if change.kind == "column_dropped":
        return change.column not in columns
    return change.kind in KINDS_OF_TYPES and columns.get(change.column or "") == change.after


_SAME_TEXT = (
    re.compile(r"smallint|integer|bigint"),
    re.compile(r"text|character varying(\(\d+\))?"),
)
"""Types between which a value keeps its text. (``character`` pads, and ``numeric`` writes its own digits.)"""


def gives_other_keys(change: SchemaChange) -> bool:
    """Return whether the text of a key may differ after ``change``, if its column is in the key. Then rows
    have other keys, because a row is known by the text of its key."""
    if change.kind in KINDS_OF_TYPES:
        types = (change.before or "", change.after or "")
        return not any(all(map(same.fullmatch, types)) for same in _SAME_TEXT)
    return change.kind in ("column_dropped", "column_renamed", "column_added_again")
