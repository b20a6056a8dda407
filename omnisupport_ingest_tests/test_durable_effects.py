"""Every durable effect of the package passes a failpoint, or says in a comment why it needs none."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import omnisupport_ingest
from omnisupport_ingest_tests.durable_effects import Effect, effects_outside_failpoints, scan

PACKAGE = Path(omnisupport_ingest.__file__).parent
MODULES = sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py"))
PAGE = PACKAGE.parent / "docs" / "recovery.md"

CALLED_FROM_OUTSIDE = {
    "lake.write",
    "lake.place",
    "landing.data",
    "source.slot",
    "kafka.mirror",
    "sensor.answer",
}
"""They stand around calls of functions whose effects are found where they are made, or around what a cluster
or Dagster makes durable.
"""


def without_reason(module: str) -> list[Effect]:
    return list(effects_outside_failpoints((PACKAGE / module).read_text()))


@pytest.mark.parametrize("module", MODULES)
def test_every_durable_effect_passes_a_failpoint_or_says_why_not(module: str) -> None:
    bare = without_reason(module)
    assert not bare, "\n".join(
        f"{module}:{effect.line} does {effect.what} in {effect.function or 'the module'}: put `with "
        "failpoint(...)` around it, or `# No failpoint: REASON.` into that function"
        for effect in bare
    )


@pytest.mark.parametrize("module", MODULES)
def test_a_reason_stands_in_a_function_that_needs_it(module: str) -> None:
    found = scan((PACKAGE / module).read_text())
    explained = {effect.reason for effect in found.effects if effect.failpoint is None}
    assert set(found.reasons) <= explained


def failpoints() -> dict[str, set[str]]:
    """The names that the package passes, each with its modules."""
    passed: dict[str, set[str]] = {}
    for module in MODULES:
        for name, line in scan((PACKAGE / module).read_text()).failpoints:
            assert name is not None, f"{module}:{line}: the name of a failpoint is written out"
            passed.setdefault(name, set()).add(module)
    return passed


def test_documentation_lists_the_failpoints_there_are() -> None:
    table = PAGE.read_text().split("| failpoint | durable behind it |")[1].split("\n\n")[0]
    assert sorted(re.findall(r"^\| `([a-z_.]+)` \| \S", table, re.MULTILINE)) == sorted(failpoints())


def test_every_failpoint_is_died_at() -> None:
    """By a test that names it: as it stands, or with ``.before`` or ``.after`` behind it."""
    tests = [path for path in Path(__file__).parent.rglob("*.py") if path != Path(__file__)]
    text = "\n".join(path.read_text() for path in tests)
    assert [name for name in failpoints() if f'"{name}"' not in text and f'"{name}.' not in text] == []


def test_a_failpoint_holds_something() -> None:
    """One around nothing durable would be counted as a point that was tested."""
    around_nothing = set()
    for module in MODULES:
        found = scan((PACKAGE / module).read_text())
        held = {effect.failpoint for effect in found.effects}
        around_nothing |= {name for name, _ in found.failpoints if name not in held}
    assert around_nothing == CALLED_FROM_OUTSIDE


PLANTED = {
    "os.link": "import os\ndef f(a, b):\n    os.link(a, b)",
    "os under another name": "import os as o\ndef f(a, b):\n    o.replace(a, b)",
    "a name of os": "from os import replace\ndef f(a, b):\n    replace(a, b)",
    "shutil.rmtree": "import shutil\ndef f(a):\n    shutil.rmtree(a)",
    "os.open for writing": "import os\ndef f(a):\n    return os.open(a, os.O_WRONLY | os.O_CREAT)",
    "open for writing": "def f(a):\n    with open(a, 'ab') as file:\n        return file",
    "open in a mode from elsewhere": "def f(a, mode):\n    return open(a, mode)",
    "Path.open for writing": "def f(path):\n    return path.open('w')",
    "Path.open by keyword": "def f(path):\n    return path.open(mode='xb')",
    "Path.write_text": "def f(path):\n    path.write_text('x')",
    "Path.unlink": "def f(path):\n    path.unlink(missing_ok=True)",
    "Path.rename": "def f(path, other):\n    path.rename(other)",
    "Path.mkdir": "def f(path):\n    path.mkdir()",
    "our own durable write": "from omnisupport_ingest import durable\ndef f(a):\n    durable.replace(a, b'')",
    "our own durable name": (
        "from omnisupport_ingest.durable import create_exclusively as make\ndef f(a):\n    make(a, b'')"
    ),
    "a Delta commit": "def f(handle):\n    handle.create_write_transaction([], mode='append')",
    "a Delta write": "from deltalake import write_deltalake\ndef f(a, rows):\n    write_deltalake(a, rows)",
    "a new Delta table": "from deltalake import DeltaTable\ndef f(a, s):\n    DeltaTable.create(a, s)",
    "Delta columns": "def f(handle, fields):\n    handle.alter.add_columns(fields)",
    "a Delta vacuum": "def f(handle):\n    handle.vacuum(retention_hours=1, dry_run=False)",
    "a Delta compaction": "def f(handle):\n    handle.optimize.compact()",
    "a data frame's writer": "def f(frame, a):\n    frame.write.parquet(a)",
    "a data frame's writer kept": "def f(frame, a):\n    writer = frame.write\n    writer.parquet(a)",
    "a Parquet file": "import pyarrow.parquet as pq\ndef f(rows, a):\n    pq.write_table(rows, a)",
    "a confirmation": "def f(cursor, lsn):\n    cursor.send_feedback(flush_lsn=lsn)",
    "a backfill": "def f(instance, backfill):\n    instance.add_backfill(backfill)",
    "an event of Dagster": "def f(instance, event):\n    instance.report_runless_asset_event(event)",
    "a slot": "def f(cursor):\n    cursor.execute('SELECT pg_drop_replication_slot(%s)', ('s',))",
    "a table at the source": "def f(cursor, name):\n    cursor.execute(f'CREATE TABLE {name} (id int)')",
    "SQL from elsewhere": "def f(cursor, statement):\n    cursor.execute(statement)",
    "an export": "def f(connection, a):\n    connection.execute(f\"COPY (SELECT 1) TO '{a}'\")",
    "in another thread than its failpoint": (
        "from omnisupport_ingest.failpoints import failpoint\nimport os\ndef f(run, a):\n"
        "    with failpoint('lake.commit'):\n        run(lambda: os.unlink(a))"
    ),
    "behind its failpoint": (
        "from omnisupport_ingest.failpoints import failpoint\nimport os\ndef f(a):\n"
        "    with failpoint('lake.commit'):\n        pass\n    os.unlink(a)"
    ),
    "inside another function of that name": (
        "import os\ndef failpoint(name):\n    ...\ndef f(a):\n    with failpoint('x'):\n        os.unlink(a)"
    ),
}


@pytest.mark.parametrize("planted", PLANTED.values(), ids=PLANTED.keys())
def test_a_planted_effect_is_found(planted: str) -> None:
    found = list(effects_outside_failpoints(planted))
    assert found and all(effect.function for effect in found)


HARMLESS = {
    "a text": "def f(text):\n    return text.replace('a', 'b')",
    "a time": "def f(moment):\n    return moment.replace(minute=0)",
    "a dataclass": "from dataclasses import replace\ndef f(x):\n    return replace(x, a=1)",
    "open for reading": "def f(path):\n    return open(path).read(), path.open('rb').read(), path.open()",
    "os.open for reading": "import os\ndef f(a):\n    return os.open(a, os.O_RDONLY | os.O_DIRECTORY)",
    "a file's own write": "def f(file):\n    file.write(b'x')",
    "a dry vacuum": "def f(handle):\n    return handle.vacuum(dry_run=True)",
    "with its reason": "def f(path):\n    # No failpoint: scratch.\n    path.unlink()",
    "a question": "def f(cursor):\n    cursor.execute('SELECT 1')",
    "in its failpoint": (
        "from omnisupport_ingest.failpoints import failpoint\nimport os\ndef f(a):\n"
        "    with failpoint('lake.commit', a):\n        os.unlink(a)"
    ),
}


@pytest.mark.parametrize("text", HARMLESS.values(), ids=HARMLESS.keys())
def test_what_is_not_durable_is_left_alone(text: str) -> None:
    assert list(effects_outside_failpoints(text)) == []


@pytest.mark.parametrize(
    ("module", "function", "what"),
    [
        ("lake/commit.py", "commit_actions", ".create_write_transaction"),
        ("sources/postgres/protocol/walstream.py", "WalStream.confirm", ".send_copy_data"),
    ],
)
def test_a_planted_effect_in_a_real_module_is_found(module: str, function: str, what: str) -> None:
    """A commit or a confirmation without its failpoint: the `with` is taken out of the module's text."""
    tree = ast.parse((PACKAGE / module).read_text())

    class WithoutFailpoints(ast.NodeTransformer):
        def visit_With(self, node: ast.With) -> list[ast.stmt]:
            self.generic_visit(node)
            return node.body

    bare = ast.unparse(ast.fix_missing_locations(WithoutFailpoints().visit(tree)))
    (found,) = effects_outside_failpoints(bare)
    assert (found.function, found.what) == (function, what)
