"""Finds columns of a table that could be its cursor, each with the reasons for or against it.

Only facts of the database count: what sets the column (a trigger, a default, nothing), whether it may be
NULL, whether it is the first column of an index, and whether its values rise with the order of the rows in
the server's statistics. No catalog says whether an application sets a column with every change. If the name
of a column suggests it, the reason says that it is only the name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from psycopg2.extensions import connection as Connection

from omnisupport_ingest.contracts.cursor_policy import TIMES
from omnisupport_ingest.contracts.model import CursorCandidate
from omnisupport_ingest.contracts.names import TableName
from omnisupport_ingest.contracts.pg_types import PgType

_CHANGED = re.compile(r"updat|modif|chang|touch|version|_ts$|rev", re.IGNORECASE)
_RISING = 0.9
"""Smallest correlation with the order of the rows at which a column counts as rising."""

_COLUMNS = """
SELECT n.nspname::text, c.relname::text, a.attname::text, format_type(a.atttypid, a.atttypmod), a.attnotnull,
       pg_get_expr(d.adbin, d.adrelid) IS NOT NULL OR a.attidentity <> '',
       EXISTS (SELECT 1 FROM pg_index i JOIN pg_class x ON x.oid = i.indexrelid
               JOIN pg_am m ON m.oid = x.relam WHERE i.indrelid = c.oid AND i.indkey[0] = a.attnum
               AND m.amname = 'btree' AND i.indisvalid
               AND i.indpred IS NULL),
       (SELECT s.correlation FROM pg_stats s WHERE s.schemaname = n.nspname AND s.tablename = c.relname
        AND s.attname = a.attname AND NOT s.inherited),
       (SELECT min(t.tgname::text) FROM pg_trigger t JOIN pg_proc p ON p.oid = t.tgfoid
        WHERE t.tgrelid = c.oid AND NOT t.tgisinternal AND t.tgenabled IN ('O', 'A') AND (t.tgtype & 1) = 1
        AND (t.tgtype & 2) = 2 AND (t.tgtype & 16) = 16
        AND p.prosrc ~* ('new\\.["]?' || a.attname || '["]?\\s*:?=')),
       EXISTS (SELECT 1 FROM pg_index i WHERE i.indrelid = c.oid AND i.indisprimary
               AND a.attnum = ANY (i.indkey))
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace JOIN pg_attribute a ON a.attrelid = c.oid
LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum
WHERE c.relkind IN ('r', 'p') AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = ''
  AND n.nspname <> 'information_schema' AND n.nspname !~ '^pg_'
  AND a.atttypid IN ('date'::regtype, 'timestamp'::regtype, 'timestamptz'::regtype, 'int8'::regtype,
                     'int4'::regtype)
ORDER BY 1, 2, a.attnum
"""


@dataclass(frozen=True, slots=True)
class ColumnFacts:
    """Facts of a column in the catalogs. ``correlation``: of its values with the order of the rows; None
    without statistics. ``trigger``: a trigger that sets it before every update, as far as the text of its
    function shows."""

    name: str
    pg_type: str
    not_null: bool
    default: bool
    indexed: bool
    correlation: float | None
    trigger: str | None
    in_key: bool

    @property
    def is_time(self) -> bool:
        return PgType.parse(self.pg_type).kind in TIMES


def cursor_candidates(connection: Connection) -> dict[TableName, tuple[CursorCandidate, ...]]:
    """Return the candidates of every table, the usable ones first. Raises psycopg2's errors."""
    columns_of: dict[TableName, list[ColumnFacts]] = {}
    with connection.cursor() as cursor:
        # No failpoint: a SELECT, put together elsewhere.
        cursor.execute(_COLUMNS)
        for schema, table, *facts in cursor.fetchall():
            columns_of.setdefault((schema, table), []).append(ColumnFacts(*facts))
    return {
        table: tuple(sorted(map(judged, columns), key=lambda each: not each.usable))
        for table, columns in columns_of.items()
    }


def judged(column: ColumnFacts, *, triggers_known: bool = True) -> CursorCandidate:
    """Return whether the column can be a cursor, and why. ``triggers_known``: triggers were looked up."""
    about = [
        "an index begins with it" if column.indexed else "no index begins with it",
        "NOT NULL" if column.not_null else "may be NULL",
    ]
    if column.correlation is not None:
        rises = "rises" if column.correlation >= _RISING else "does not rise"
        about.append(f"{rises} with the order of the rows in the server's sample ({column.correlation:.2f})")
    if column.in_key:
        return CursorCandidate(column.name, False, "part of the key: an update leaves it as it is")
    if column.trigger is not None:
        first = f"the trigger {column.trigger} sets it before every update"
        if not column.default:
            first += ", and nothing at an insert unless that trigger does"
        return CursorCandidate(column.name, True, "; ".join([first, *about]))
    if column.is_time and _CHANGED.search(column.name):
        by = "the application has to do: no trigger does"
        if not triggers_known:
            by = "the application or a trigger has to do: triggers of this database were not looked at"
        first = f"by its name it is set with every change, which {by}"
        return CursorCandidate(column.name, True, "; ".join([first, *about]))
    if column.default:
        first = "it is set at the insert alone, by a default: updates would not be seen"
    else:
        seen = (
            "nothing in the database, nor its name,"
            if triggers_known
            else "its name does not suggest, and nothing"
        )
        first = f"{seen} says that it grows with every change"
    return CursorCandidate(column.name, False, "; ".join([first, *about]))
