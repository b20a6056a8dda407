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
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.landing.encoding import content_of, decode
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.records import Document, Format, encode
from omnisupport_ingest.storage import update

FORMAT_VERSION = 3

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
        before_known: whether ``before`` is proven to be what older rows have, as no row was written anew
            when the column was added.
    """

    number: int
    name: str
    pg_type: str
    not_null: bool
    default: str | None
    before: str | None
    labels: tuple[str, ...]
    before_known: bool = False


@dataclass(frozen=True, slots=True)
class SeenTable:
    """A table at the source.

    Attributes:
        relation: its OID; 0: not known.
        key: the columns that identify a row; empty: not known.
        rows: the server's estimate of its rows; None where there is none.
        at: for a source whose rows show their schema, the time of the newest row that showed it. Older rows
            that come later say nothing about the table as it is now.
        storage: the files of its rows (``relfilenode``; a hash of them if it has partitions), which are
            others once its rows were written anew; None: not known.
        last_number: the largest number that a column of it has had; a column added later has a larger one.
    """

    relation: int
    name: str
    columns: tuple[SeenColumn, ...]
    key: tuple[str, ...]
    rows: int | None
    at: datetime | None = None
    storage: str | None = None
    last_number: int = 0


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
    "column_converted": "column converted by an expression",
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
class RecordedSchemas:
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
        document = document | {"tables": {name: _with(each, at=None) for name, each in tables.items()}}
    if isinstance(changes, list):
        document = document | {"changes": [_with(each, place=None) for each in changes]}
    return document


def _with_storage(document: Document) -> Document:
    """Add what version 2 did not record: whether the rows were written anew. So no NULL is proven."""
    tables = document.get("tables")
    if not isinstance(tables, dict):
        return document
    each = {
        name: _with(table, storage=None, last_number=0)
        | {"columns": [_with(column, before_known=_has_before(column)) for column in table["columns"]]}
        if isinstance(table, dict) and isinstance(table.get("columns"), list)
        else table
        for name, table in tables.items()
    }
    return document | {"tables": each}


def _has_before(column: Any) -> bool:
    return isinstance(column, dict) and column.get("before") is not None


def _with(member: Any, **added: Any) -> Any:
    return member | added if isinstance(member, dict) else member


_FORMAT = Format(RecordedSchemas, FORMAT_VERSION, {1: _with_places, 2: _with_storage})


_NOTHING = RecordedSchemas({}, UNKNOWN, ())


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

    Only the process that lands the source's rows writes it; it is thread-safe. In a bucket, what another
    machine recorded stays. Every change is durable when the call returns.
    """

    def __init__(self, folder: Path) -> None:
        """``folder``: the landing folder of the source."""
        self._path, self._lock = folder / FILE, threading.Lock()
        self._known: RecordedSchemas | None = None

    def read(self) -> RecordedSchemas:
        """Return what is recorded. Raises the errors of ``encoding.decode``."""
        try:
            content = content_of(self._path)
        except FileNotFoundError:
            return _NOTHING
        return decode(_FORMAT, content, self._path)

    def held(self) -> RecordedSchemas:
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
            before = self._held()
            now = datetime.now(UTC)

            def noticed(known: RecordedSchemas) -> RecordedSchemas:
                # Another machine may have recorded a table in the same way meanwhile.
                recorded = {
                    name
                    for name, table in tables.items()
                    if known.tables.get(name) != before.tables.get(name)
                    and not _differs(known.tables.get(name), table)
                }
                open_differences = {name: each for name, each in differences.items() if name not in recorded}
                new = _numbered(known, look, tables, open_differences, now)
                changed = any(_differs(known.tables.get(name), table) for name, table in tables.items())
                if not new and not changed:
                    return known
                certain = max(known.certain, look.certain)
                return replace(
                    known,
                    tables=known.tables | dict(tables),
                    certain=certain,
                    changes=(*known.changes, *new),
                )

            if noticed(before) == before:
                # Nothing changed, so nothing is written; the range of the next change begins here.
                self._known = replace(before, certain=max(before.certain, look.certain))
                return ()
            found: list[SchemaChange] = []

            def changed(known: RecordedSchemas) -> RecordedSchemas:
                after = noticed(known)
                found[:] = after.changes[len(known.changes) :]
                return after

            self._change(changed)
            return tuple(found)

    def first_rows(self, table: str, columns: Mapping[str, str], commit_lsn: Lsn) -> None:
        """Record that rows of ``table`` with ``columns`` (name → type) came with the transaction that
        committed at ``commit_lsn``.

        This becomes the ``first_commit`` of every change that the columns show.
        """

        def shown(known: RecordedSchemas) -> RecordedSchemas:
            changes = tuple(
                replace(each, first_commit=commit_lsn)
                if each.table == table and _shows(each, columns, commit_lsn)
                else each
                for each in known.changes
            )
            return known if changes == known.changes else replace(known, changes=changes)

        with self._lock:
            self._change(shown)

    def accept(self, tables: Collection[str]) -> None:
        """Record that a person accepted all changes of ``tables`` so far, by having the tables read again.
        Capture then follows the tables again."""

        def taken(known: RecordedSchemas) -> RecordedSchemas:
            accepted = known.accepted | {
                each.table: len(known.changes) for each in known.changes if each.table in tables
            }
            return known if accepted == known.accepted else replace(known, accepted=accepted)

        with self._lock:
            self._change(taken)

    def take_back_proof(self, table: str, columns: Collection[str]) -> None:
        """Record that nothing proves what older rows of ``table`` have in ``columns``."""

        def unproven(known: RecordedSchemas) -> RecordedSchemas:
            seen = known.tables[table]
            each = (
                replace(each, before_known=False) if each.name in columns else each for each in seen.columns
            )
            return replace(known, tables=known.tables | {table: replace(seen, columns=tuple(each))})

        with self._lock:
            self._change(unproven)

    def open_changes(self, table: str) -> tuple[SchemaChange, ...]:
        """Return the changes of ``table`` that no person has accepted (``accept``)."""
        with self._lock:
            known = self._held()
        least = known.accepted.get(table, 0)
        return tuple(each for each in known.changes if each.table == table and each.number > least)

    def tables(self) -> dict[str, SeenTable]:
        """Return the last seen tables, by the name of their contract."""
        return self.held().tables

    def _held(self) -> RecordedSchemas:
        if self._known is None:
            self._known = self.read()
        return self._known

    def _change(self, change: Callable[[RecordedSchemas], RecordedSchemas]) -> None:
        """Replace what is recorded by what ``change`` makes of it; it gets what the storage has now."""
        held = self._held()
        if change(held) == held:
            return
        result = held

        def changed(content: bytes | None) -> bytes | None:
            nonlocal result
            stored = _NOTHING if content is None else decode(_FORMAT, content, self._path)
            stored = replace(stored, certain=max(stored.certain, held.certain))
            result = change(stored)
            return None if result == stored else encode(result)

        with failpoint("landing.schema_changes"):
            update(self._path, changed)
        self._known = result


def _numbered(
    known: RecordedSchemas,
    look: Look,
    tables: Mapping[str, SeenTable],
    differences: Mapping[str, Sequence[Difference]],
    now: datetime,
) -> list[SchemaChange]:
    """Return the ``differences`` as changes that follow the known ones."""
    new: list[SchemaChange] = []
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
    return new


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


def renamed_key(changes: Iterable[SchemaChange], table: str, key: tuple[str, ...]) -> tuple[str, ...]:
    """Return ``key`` of ``table`` with the names that its columns have now at the source, by ``changes``."""
    of_table = (each for each in changes if (each.table, each.kind) == (table, "column_renamed"))
    # Columns that swapped their names did so between the same two looks.
    for _, look in groupby(of_table, key=lambda each: each.noticed_at):
        names = {each.before: each.after for each in look if each.before and each.after}
        key = tuple(names.get(each, each) for each in key)
    return key


def gives_other_keys(change: SchemaChange) -> bool:
    """Return whether the text of a key may differ after ``change``, if its column is in the key. Then rows
    have other keys, because a row is known by the text of its key."""
    if change.kind in KINDS_OF_TYPES:
        types = (change.before or "", change.after or "")
        return not any(all(map(same.fullmatch, types)) for same in _SAME_TEXT)
    return change.kind in ("column_dropped", "column_renamed", "column_added_again")


_TEXTS = re.compile(r"text|character varying(?:\((\d+)\))?")
_NUMERIC = re.compile(r"numeric(?:\(\d+,(-?\d+)\))?")
_BITS = re.compile(r"bit varying(?:\((\d+)\))?")
_TIME = re.compile(r"(time(?:stamp)?)(?:\((\d)\))? (with(?:out)? time zone)")
_WHOLE = re.compile(r"smallint|integer|bigint")
_WRITTEN_ALIKE = re.compile(rf"{_WHOLE.pattern}|{_NUMERIC.pattern}|uuid")
"""Types whose values become a text as the log writes them, whatever the session's settings are."""

_MOST_DIGITS = 6
"""Digits of a second's fraction in a time whose type names none."""


def may_alter_values(change: SchemaChange) -> bool:
    """Return whether the change of a column's type may have altered values that the rows had.

    The server converts every stored value to the new type (it rounds, cuts or pads), and sends no event for
    it; nor does it where a value of an enum type is renamed or removed. Where the types alone keep every
    value, it counts as kept: a ``USING`` expression does not always show (``column_converted``).
    """
    if change.kind in ("enum_values_changed", "column_converted"):
        return True
    return change.kind in KINDS_OF_TYPES and not keeps_values(change.before or "", change.after or "")


def keeps_values(before: str, after: str) -> bool:
    """Return whether every value of type ``before`` is the same value in type ``after``, as far as is known.

    Both as ``format_type`` writes them.
    """
    if before == after:
        return True
    if before.endswith("[]") and after.endswith("[]"):
        before, after = before.removesuffix("[]"), after.removesuffix("[]")
    if after in ("text", "character varying"):
        return bool(_TEXTS.fullmatch(before) or _WRITTEN_ALIKE.fullmatch(before))
    if _WHOLE.fullmatch(before):
        number = _NUMERIC.fullmatch(after)
        return bool(_WHOLE.fullmatch(after)) or (number is not None and int(number[1] or 0) >= 0)
    for kind in (_TEXTS, _NUMERIC, _BITS):
        was, now = kind.fullmatch(before), kind.fullmatch(after)
        if was is not None and now is not None:
            return now[1] is None or (was[1] is not None and int(now[1]) >= int(was[1]))
    was, now = _TIME.fullmatch(before), _TIME.fullmatch(after)
    if was is not None and now is not None and (was[1], was[3]) == (now[1], now[3]):
        return int(now[2] or _MOST_DIGITS) >= int(was[2] or _MOST_DIGITS)
    return False
