"""Finds durable effects in source text: what writes, moves or removes something that outlives a process.

It reads syntax, not types, so it goes by names: ``Path.unlink`` is any call of a method ``unlink``.
What it cannot see: an effect behind a name made at run time, and what a library does out of sight.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass

FUNCTIONS = {
    *(f"os.{name}" for name in (
        "link", "symlink", "rename", "renames", "replace", "remove", "unlink", "rmdir", "removedirs",
        "mkdir", "makedirs", "truncate", "ftruncate", "write", "pwrite", "mkfifo",
    )),
    *(f"shutil.{name}" for name in (
        "rmtree", "move", "copy", "copy2", "copyfile", "copytree", "make_archive",
    )),
    *(f"tempfile.{name}" for name in ("mkdtemp", "mkstemp", "NamedTemporaryFile", "TemporaryDirectory")),
    "omnisupport_ingest.durable.create_exclusively",
    "omnisupport_ingest.durable.replace",
    "omnisupport_ingest.storage.create_exclusively",
    "omnisupport_ingest.storage.replace",
    "omnisupport_ingest.storage.update",
    "obstore.put",
    "obstore.copy",
    "obstore.delete",
    "deltalake.write_deltalake",
    "deltalake.convert_to_deltalake",
    "deltalake.DeltaTable.create",
    "pyarrow.parquet.ParquetWriter",
    "pyarrow.parquet.write_table",
    "pyarrow.csv.write_csv",
    "pyarrow.OSFile",
    "pyarrow.dataset.write_dataset",
}  # fmt: skip

METHODS = {
    # pathlib
    "write_text", "write_bytes", "unlink", "rmdir", "mkdir", "touch", "symlink_to", "hardlink_to",
    # storage
    "upload", "send_file", "remove_folder",
    # deltalake
    "create_write_transaction", "restore", "repair", "create_checkpoint", "cleanup_metadata",
    # Spark
    "saveAsTable", "insertInto", "writeTo",
    # replication
    "send_feedback", "PQputCopyData", "send_copy_data",
    # Dagster
    "add_backfill", "update_backfill", "launch_run", "submit_run", "create_run", "create_run_for_job",
    "delete_run", "add_run_tags", "wipe_assets", "free_concurrency_slots_for_run", "execute_in_process",
    "add_dynamic_partitions", "delete_dynamic_partition", "update_instigator_state", "update_cursor",
}  # fmt: skip

_ONE_PATH = {"rename", "replace"}
"""Path's, when called with one argument; those of texts, times and data frames take others."""

_HANDLES = {"alter", "optimize", "write", "writeStream"}
"""Attributes that hand out a writer: of a Delta table, and of a data frame (where not called)."""

_SQL = re.compile(
    r"\b(INSERT\s+INTO|UPDATE\s+\S+\s+SET|DELETE\s+FROM|TRUNCATE|CREATE|DROP|ALTER|COMMENT\s+ON"
    r"|CREATE_REPLICATION_SLOT|DROP_REPLICATION_SLOT|pg_drop_replication_slot|pg_create_\w+"
    r"|pg_replication_slot_advance|pg_logical_emit_message|pg_terminate_backend|COPY\b.*\bTO)\b",
    re.DOTALL,
)
_REASON = "# No failpoint: "
_WRITING_FLAGS = {"O_WRONLY", "O_RDWR", "O_CREAT", "O_TRUNC", "O_APPEND"}
_WRITING_MODES = re.compile(r"[rwaxbt+]*[wax+][rwaxbt+]*")


@dataclass(frozen=True)
class Effect:
    """``what`` is done on ``line`` in ``function`` (dotted, empty outside).

    ``failpoint``: the one around it. ``reason``: the line of the comment in its function that says why it
    needs none.
    """

    what: str
    line: int
    function: str
    failpoint: str | None
    reason: int | None


@dataclass(frozen=True)
class Scan:
    """Every effect of a module, every failpoint that it passes, and the lines of all reasons."""

    effects: tuple[Effect, ...]
    failpoints: tuple[tuple[str | None, int], ...]
    reasons: tuple[int, ...]


@functools.cache
def scan(source: str) -> Scan:
    """The effects and failpoints in the text of a module. A name that is no literal counts as None."""
    reasons = tuple(
        number for number, line in enumerate(source.splitlines(), 1) if line.strip().startswith(_REASON)
    )
    visitor = _Visitor(reasons)
    visitor.visit(ast.parse(source))
    return Scan(tuple(visitor.effects), tuple(visitor.failpoints), reasons)


class _Visitor(ast.NodeVisitor):
    def __init__(self, reasons: tuple[int, ...]) -> None:
        self.effects: list[Effect] = []
        self.failpoints: list[tuple[str | None, int]] = []
        self._reasons = reasons
        self._lines = [(0, 0)]
        self._names: dict[str, str] = {}
        self._inside: list[str] = []
        self._around: list[str] = []

    # --- names ------------------------------------------------------------------------------------

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._names[alias.asname or alias.name.partition(".")[0]] = (
                alias.name if alias.asname else alias.name.partition(".")[0]
            )

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            self._names[alias.asname or alias.name] = f"{node.module}.{alias.name}"

    def _dotted(self, node: ast.expr) -> str:
        if isinstance(node, ast.Name):
            return self._names.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            return f"{self._dotted(node.value)}.{node.attr}"
        return "?"

    # --- places -----------------------------------------------------------------------------------

    def _within(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        # A function made inside a failpoint is not run inside of it.
        around, self._around = self._around, []
        self._inside.append(node.name)
        self._lines.append((node.lineno, node.end_lineno or node.lineno))
        self.generic_visit(node)
        self._lines.pop()
        self._inside.pop()
        self._around = around

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _within

    def visit_Lambda(self, node: ast.Lambda) -> None:
        around, self._around = self._around, []
        self.generic_visit(node)
        self._around = around

    def visit_With(self, node: ast.With) -> None:
        passed = 0
        for item in node.items:
            self.visit(item)
            name = self._failpoint_in(item.context_expr)
            if name is not None:
                self._around.append(name)
                passed += 1
        for statement in node.body:
            self.visit(statement)
        del self._around[len(self._around) - passed :]

    def _failpoint_in(self, node: ast.expr) -> str | None:
        if not (
            isinstance(node, ast.Call)
            and self._dotted(node.func) == "omnisupport_ingest.failpoints.failpoint"
        ):
            return None
        name = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else None
        self.failpoints.append((name if isinstance(name, str) else None, node.lineno))
        return name if isinstance(name, str) else "?"

    # --- effects ----------------------------------------------------------------------------------

    def _found(self, what: str, node: ast.expr) -> None:
        around = self._around[-1] if self._around else None
        begin, end = self._lines[-1]
        reason = next((line for line in self._reasons if begin <= line <= end), None)
        self.effects.append(Effect(what, node.lineno, ".".join(self._inside), around, reason))

    def visit_Call(self, node: ast.Call) -> None:
        if what := self._effect(node):
            self._found(what, node)
        if isinstance(node.func, ast.Attribute):
            # The method of a call is looked at here, so that only attributes that are not called count.
            self.visit(node.func.value)
        for child in (*node.args, *(keyword.value for keyword in node.keywords)):
            self.visit(child)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if node.attr in _HANDLES:
            self._found(f".{node.attr}", node)
        self.generic_visit(node)

    def _effect(self, node: ast.Call) -> str | None:
        name = self._dotted(node.func)
        if name in FUNCTIONS:
            return name
        if name == "os.open":
            flags = {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}
            return name if flags & _WRITING_FLAGS else None
        if name == "open":
            return name if len(node.args) > 1 and _writes(node.args[1]) else _by_mode(name, node)
        if not isinstance(node.func, ast.Attribute):
            return None
        method = node.func.attr
        if method in METHODS or method.startswith("report_"):
            return f".{method}"
        if method in _ONE_PATH and len(node.args) == 1 and not node.keywords:
            return f".{method}"
        if method == "open":
            # Many things are opened; a path is, where a mode is written out.
            literal = bool(node.args) and isinstance(node.args[0], ast.Constant)
            return f".{method}" if literal and _writes(node.args[0]) else _by_mode(f".{method}", node)
        if method == "vacuum":
            dry = {each.arg: each.value for each in node.keywords}.get("dry_run")
            return None if isinstance(dry, ast.Constant) and dry.value is True else f".{method}"
        if method in ("execute", "executemany", "sql", "query") and node.args:
            return self._statement(method, node.args[0])
        return None

    def _statement(self, method: str, statement: ast.expr) -> str | None:
        if isinstance(statement, ast.Name | ast.Attribute) and method.startswith("execute"):
            return f".{method}(a statement made elsewhere)"
        text = " ".join(
            each.value
            for each in ast.walk(statement)
            if isinstance(each, ast.Constant) and isinstance(each.value, str)
        )
        found = _SQL.search(text)
        return f".{method}({' '.join(found.group(1).split())[:30]})" if found else None


def _writes(mode: ast.expr) -> bool:
    if isinstance(mode, ast.Constant):
        return isinstance(mode.value, str) and _WRITING_MODES.fullmatch(mode.value) is not None
    return True


def _by_mode(name: str, node: ast.Call) -> str | None:
    mode = {each.arg: each.value for each in node.keywords}.get("mode")
    return name if mode is not None and _writes(mode) else None


def effects_outside_failpoints(source: str) -> Iterator[Effect]:
    """The effects in the text of a module without a failpoint around them and without a reason."""
    return (effect for effect in scan(source).effects if effect.failpoint is None and effect.reason is None)
