"""Commands that only look: they change nothing in the home, and no Spark is started for them."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import omnisupport_ingest.cli.export as cli_export
import omnisupport_ingest.cli.replay as cli_replay
import omnisupport_ingest.cli.verify as cli_verify
from bench.commands import LOOKS
from omnisupport_ingest.runtime import spark as runtime_spark
from omnisupport_ingest_tests.cli.command import command
from omnisupport_ingest_tests.cli.sample_home import SampleHome, files_in, land_another
from omnisupport_ingest_tests.waiting import PATIENCE

LOOKING = (
    "status",
    "status --all --json",
    "ledger",
    "doctor",
    "report --json",
    "explain notes --key 1",
    "explain notes --key 3 --column body --json",
    "tail notes",
    "windows",
    "quarantine list",
    "landing list",
    "checkpoint show",
)

WITHOUT_PANDAS = """
import sys
import omnisupport_ingest.cli.main as program

program.cli({line!r}.split(), standalone_mode=False)
assert "pyarrow" in sys.modules
assert "pandas" not in sys.modules

import pyarrow as pa

numbers = pa.table({{"number": [1, None]}}).to_pandas()
assert pa.array(numbers["number"]).null_count == 1, "pyarrow does not know a series"
"""

IMPORTED = """
import json, sys
import click
from omnisupport_ingest.errors import IngestError
import omnisupport_ingest.cli.main as program

try:
    program.cli({line!r}, standalone_mode=False)
except (IngestError, click.ClickException) as error:
    print(error, file=sys.stderr)
print(json.dumps(sorted(sys.modules)), file=sys.stderr)
"""
HEAVY = {"pandas", "dagster", "pandera", "matplotlib", "IPython"}
MOST_MODULES = 1_600
"""A module takes half a millisecond on the machine of the table in the documentation."""


def contents(home: Path) -> dict[Path, str]:
    """Every file but SQLite's, which notes who looked, with a hash of its content."""
    return {
        each: hashlib.sha256((home / each).read_bytes()).hexdigest()
        for each in files_in(home)
        if (home / each).is_file() and "sqlite" not in each.name
    }


def test_what_only_looks_changes_nothing_and_starts_no_spark(
    sample_home: SampleHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise AssertionError("a command that only looks asked for Spark")

    land_another(sample_home)
    monkeypatch.setattr(runtime_spark, "session", refused)
    for module in (cli_export, cli_replay, cli_verify):
        monkeypatch.setattr(module, "session", refused)
    before = contents(sample_home.home)
    for each in LOOKING:
        done = command(*each.split())
        assert done.code in (0, 1), (each, done.output)
        assert contents(sample_home.home) == before, each


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        "status",
        "export notes --out notes.csv",
    ],
)
def test_a_command_that_looks_leaves_out_pandas_and_whoever_wants_it_has_it(
    sample_home: SampleHome, line: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_PANDAS.format(line=line)],
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.drawn(8)
@pytest.mark.slow
@pytest.mark.parametrize("name", LOOKS)
def test_a_command_that_looks_imports_little(sample_home: SampleHome, tmp_path: Path, name: str) -> None:
    """Imports are most of the time of such a command, and the same on any machine, as seconds are not."""
    (batch, *_) = json.loads(command("landing", "list", "--json").out)["listed"]
    found = {"folder": str(tmp_path), "table": "notes", "key": "1", "batch": batch["batch_id"]}
    line = [*name.split(), *(each.format(**found) for each in LOOKS[name])]
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED.format(line=line)],
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    modules = json.loads(done.stderr.splitlines()[-1])
    assert HEAVY & {each.partition(".")[0] for each in modules} == set()
    assert len(modules) <= MOST_MODULES
