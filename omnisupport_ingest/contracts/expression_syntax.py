"""Which SQL expressions may be rules about a row, and the database in memory that parses and binds them.

DuckDB parses an expression. Its syntax tree may have columns of the contract, constants, operators, CASE,
casts, and functions whose result depends on the row alone. Then DuckDB binds it to the types of its columns.
The database has no file and no network, and its settings are locked.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

from omnisupport_ingest.contracts.pg_types import Kind, PgType

if TYPE_CHECKING:
    import duckdb

    from omnisupport_ingest.contracts.model import Column

LONGEST = 2_000
"""Characters of an expression."""

_MEMORY = "512MB"
_CONNECTIONS = 4

_ALLOWED = frozenset(
    ("COLUMN_REF", "CONSTANT", "COMPARISON", "CONJUNCTION", "OPERATOR", "FUNCTION", "CASE", "CAST", "BETWEEN")
)
"""Classes of nodes of DuckDB's syntax tree: no subquery, window, lambda, star, parameter or setting."""

_NODES = {"SUBQUERY": "a query", "WINDOW": "a window function", "LAMBDA": "a lambda", "STAR": "a star"}

_NOT_OF_THE_ROW = frozenset(
    (
        *("age", "version", "hash", "current_localtime", "current_localtimestamp"),
        *("json_serialize_plan", "json_deserialize_sql", "create_sort_key"),
    )
)
"""Functions that DuckDB calls consistent, and that read the clock or differ between versions of DuckDB."""

_OF_ANY_SIZE = frozenset(("lpad", "rpad", "bitstring", "list_resize", "array_resize", "bar"))
"""Functions with a number for the size of their result: one row could take minutes and gigabytes."""

_STOPS_A_QUERY = frozenset(("timezone", "like_escape", "not_like_escape", "ilike_escape", "not_ilike_escape"))
"""``AT TIME ZONE`` and ``ESCAPE``: an invalid value fails the whole query, and TRY does not catch it. If
another function does so, rows are evaluated one by one, which is slow.
"""


class ExpressionProblem(ValueError):
    """An expression that cannot be a rule, with the ``fix``."""

    def __init__(self, problem: str, fix: str) -> None:
        super().__init__(problem)
        self.fix = fix


class _NotSql(ExpressionProblem):
    """An expression that DuckDB cannot parse."""

    def __init__(self, why: str, fix: str = "Correct it; DuckDB's SQL is meant.") -> None:
        first = why.strip().splitlines()[0] if why.strip() else "it cannot be parsed"
        super().__init__(f"is no expression of SQL: {first}", fix)
        self._why = why

    def naming(self, columns: Iterable[str], expression: str) -> _NotSql:
        """Return the problem with the words of ``expression`` that are ``columns`` and also keywords of
        DuckDB."""
        unquoted = set(re.split(r"\W+", re.sub(r"\"[^\"]*\"|'[^']*'", " ", expression.lower())))
        names = [name for name in columns if name.lower() in unquoted & _keywords()]
        if not names:
            return self
        listed = ", ".join(map(quoted, names))
        return _NotSql(self._why, f"Write {listed} in double quotes: DuckDB has that word as a keyword.")


def columns_of(expression: str, columns: Sequence[Column]) -> tuple[str, ...]:
    """Return the columns among ``columns`` that ``expression`` names, in their order.

    Raises ``ExpressionProblem`` if it is not SQL, has a part that is not allowed, or is not a boolean.
    """
    return _columns_of(expression, tuple(columns))


@lru_cache(maxsize=1024)
def _columns_of(expression: str, columns: tuple[Column, ...]) -> tuple[str, ...]:
    # Contracts are read often, and opening a database costs more than all else of it.
    if len(expression) > LONGEST:
        raise ExpressionProblem(f"has {len(expression)} characters", f"Write at most {LONGEST}.")
    try:
        tree = _tree(expression)
    except _NotSql as problem:
        raise problem.naming([each.name for each in columns], expression) from None
    named = _names_in(tree)
    known = {column.name.lower(): column.name for column in columns}
    found = set()
    for name in named:
        if name.lower() not in known:
            near = difflib.get_close_matches(name.lower(), known, n=1)
            fix = f"Write {known[near[0]]}, if that is meant." if near else "Name columns under properties."
            raise ExpressionProblem(f"names {name!r}, which is not a column of this contract", fix)
        found.add(known[name.lower()])
    if not found:
        raise ExpressionProblem("names no column", "Let it say something about the row.")
    used = tuple(column for column in columns if column.name in found)
    _bind(expression, used)
    return tuple(column.name for column in used)


def quoted(name: str) -> str:
    """Return ``name`` as an identifier of SQL."""
    return '"' + name.replace('"', '""') + '"'


def _tree(expression: str) -> dict[str, Any]:
    """Return the syntax tree of ``expression``. Raises ``ExpressionProblem`` unless it is a single
    expression."""
    tree = _parsed(f"SELECT ({expression}\n) FROM rows")
    selected = tree.get("select_list", ())
    (node,) = selected if len(selected) == 1 else ({},)
    if not node or node.get("alias") or _without(tree) != _plain():
        raise ExpressionProblem("is not one expression", "Write one expression that is true or false.")
    return dict(node)


@cache
def _plain() -> Any:
    """Return the syntax tree around an expression in ``_tree``."""
    return _without(_parsed("SELECT (true\n) FROM rows"))


def _parsed(query: str) -> dict[str, Any]:
    import duckdb

    # The query is only parsed, not run.
    try:
        ((text,),) = connection().execute("SELECT json_serialize_sql(?)", [query]).fetchall()
    except duckdb.Error as problem:
        raise _NotSql(str(problem)) from None
    found = json.loads(text)
    if found["error"] or len(found["statements"]) != 1:
        raise _NotSql(found.get("error_message") or "it has several statements")
    return dict(found["statements"][0]["node"])


@cache
def _keywords() -> frozenset[str]:
    """Return the words that are no column in DuckDB's SQL unless they are quoted."""
    kinds = "keyword_category IN ('reserved', 'type_function')"
    # No failpoint: it only reads a list that is part of DuckDB.
    query = f"SELECT keyword_name FROM duckdb_keywords() WHERE {kinds}"
    return frozenset(word for (word,) in connection().execute(query).fetchall())


def _without(tree: Any) -> Any:
    """Return ``tree`` without its select list and without positions in the text."""
    if isinstance(tree, Mapping):
        left_out = ("select_list", "query_location", "query_location_length")
        return {name: _without(each) for name, each in tree.items() if name not in left_out}
    return [_without(each) for each in tree] if isinstance(tree, list) else tree


def _names_in(node: Any) -> Iterator[str]:
    """Yield the columns named in a syntax tree. Raises ``ExpressionProblem`` for a node that is not
    allowed."""
    if isinstance(node, list):
        for each in node:
            yield from _names_in(each)
        return
    if not isinstance(node, dict):
        return
    kind = node.get("class")
    if kind == "TYPE":
        return
    if kind is not None and kind not in _ALLOWED:
        what = _NODES.get(kind, f"{kind.lower().replace('_', ' ')}")
        raise ExpressionProblem(
            f"has {what}", "Use columns, constants, operators, CASE, casts and functions of the row alone."
        )
    if kind == "COLUMN_REF":
        names = node["column_names"]
        yield names[0] if len(names) == 1 else ".".join(names)
        return
    if kind == "FUNCTION":
        _check_function(node)
    for name, each in node.items():
        if name != "qualified_name":
            yield from _names_in(each)


def _check_function(node: Mapping[str, Any]) -> None:
    name = str(node["function_name"]).lower()
    if name in _STOPS_A_QUERY:
        raise ExpressionProblem(
            f"calls {name}, which fails for the rows of a whole batch where one value is odd",
            "Leave AT TIME ZONE and ESCAPE out; times are in UTC.",
        )
    if node.get("is_operator"):
        return
    if name not in _functions():
        near = difflib.get_close_matches(name, _functions(), n=1)
        fix = f"Write {near[0]}, if that is meant." if near else "Use a scalar function of DuckDB."
        if name in _every_function():
            fix = "Use a function that gives the same for the same row, today and tomorrow."
        raise ExpressionProblem(f"calls {name}, which an expression may not", fix)


@cache
def _functions() -> frozenset[str]:
    """Return the scalar functions whose result depends on their arguments alone."""
    found = connection().execute(
        "SELECT lower(function_name) FROM duckdb_functions() GROUP BY 1 HAVING "
        "bool_and(function_type = 'scalar' AND stability = 'CONSISTENT' AND NOT has_side_effects)"
    )
    return frozenset(name for (name,) in found.fetchall()) - _NOT_OF_THE_ROW - _OF_ANY_SIZE


@cache
def _every_function() -> frozenset[str]:
    found = connection().execute("SELECT DISTINCT lower(function_name) FROM duckdb_functions()")
    return frozenset(name for (name,) in found.fetchall())


def _bind(expression: str, columns: Sequence[Column]) -> None:
    """Raise ``ExpressionProblem`` if DuckDB cannot evaluate ``expression`` over ``columns`` to true or
    false."""
    import duckdb

    nothing = ", ".join(f"CAST(NULL AS {_sql_type(each.type)}) AS {quoted(each.name)}" for each in columns)
    # Described only, so nothing is computed.
    try:
        described = connection().execute(f"DESCRIBE SELECT ({expression}\n) FROM (SELECT {nothing}) AS rows")
        ((_, found, *_),) = described.fetchall()
    except duckdb.Error as problem:
        first = str(problem).strip().splitlines()[0]
        raise ExpressionProblem(
            f"does not fit the types of its columns: {first}",
            "Compare values of one type; cast where that is meant.",
        ) from None
    if found != "BOOLEAN":
        raise ExpressionProblem(f"gives {found}, not BOOLEAN", "Write what must be true of the row.")


def _sql_type(of: PgType) -> str:
    """Return the SQL type of values of ``of`` in an expression, as ``expressions`` gives them to DuckDB."""
    return "DOUBLE" if of.kind is Kind.NUMERIC_TEXT else of.in_duckdb


@contextmanager
def closing_after() -> Iterator[None]:
    """Return a context that closes the connection of this thread at the end of the outermost one.

    So many contracts are read with one connection. DuckDB always starts threads, and a process with threads
    must not be forked (``runtime.fork_server``).
    """
    outermost = not getattr(_reading, "contracts", False)
    _reading.contracts = True
    try:
        yield
    finally:
        if outermost:
            _reading.contracts = False
            _close()


_reading = threading.local()


def _close() -> None:
    held = _held.pop((os.getpid(), threading.get_ident()), None)
    if held is not None:
        held.close()


_held: dict[tuple[int, int], duckdb.DuckDBPyConnection] = {}
"""Connections by process and thread: threads must not share one, and a forked process needs its own."""


def connection() -> duckdb.DuckDBPyConnection:
    """Return a database in memory, without files and network, with locked settings."""
    import duckdb

    mine = os.getpid(), threading.get_ident()
    if mine in _held:
        return _held[mine]
    made = duckdb.connect(config={"threads": 1, "enable_external_access": "false"})
    for setting in (
        "autoinstall_known_extensions = false",
        "autoload_known_extensions = false",
        "TimeZone = 'UTC'",
        f"memory_limit = '{_MEMORY}'",
        "lock_configuration = true",
    ):
        made.execute(f"SET {setting}")
    while len(_held) >= _CONNECTIONS:
        # The oldest is most likely of a thread that has ended.
        _held.pop(next(iter(_held)))
    return _held.setdefault(mine, made)
