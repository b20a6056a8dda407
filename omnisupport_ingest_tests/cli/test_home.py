"""``sweep``: every table of the lake loses its old leftovers, and nothing else."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from omnisupport_ingest.cli.home import sweep
from omnisupport_ingest.lake.commit import WindowChange
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.settings import Settings
from omnisupport_ingest_tests.lake.tables import W1, state

HOUR = 3600


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    monkeypatch.setenv("OMNISUPPORT_HOME", str(tmp_path / "home"))
    return Workspace.open(Settings())


def leftover(folder: Path, *, hours: float) -> Path:
    """What a run that was killed while it wrote left in a table ``hours`` ago."""
    draft = folder / ".staging" / "of-a-killed-run"
    draft.mkdir(parents=True)
    then = time.time() - hours * HOUR
    os.utime(draft, (then, then))
    return draft


def test_old_leftovers_of_every_table_are_removed_and_counted(workspace: Workspace) -> None:
    tables = list(workspace.tables())
    assert len(tables) == 3 * len(workspace.contracts.sources()) + 3 * len(tuple(workspace.contracts))
    first, last = tables[0], tables[-1]
    for table in (first, last):
        table.open()
    old, young = leftover(first.folder, hours=30), leftover(last.folder, hours=2)

    done = CliRunner().invoke(sweep, [])
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[0] == f"{first.spec.path}: 1"
    assert done.output.splitlines()[-1].startswith("1 folders")
    assert (old.exists(), young.exists()) == (False, True)

    done = CliRunner().invoke(sweep, ["--older-than-hours", "1", "--json"])
    printed = json.loads(done.stdout)
    assert (printed["removed"], printed["tables"][last.spec.path], printed["tables"][first.spec.path]) == (
        1,
        1,
        0,
    )
    assert not young.exists()


def test_quarantined_events_that_a_window_names_stay_whatever_the_log_of_their_table_says(
    workspace: Workspace,
) -> None:
    source = workspace.settings.source
    table, deduped = workspace.quarantine(source), workspace.deduped(source)
    table.open()
    units = [f"window={W1}/g0002-{digit * 16}" for digit in "ab"]
    for unit in units:
        file = table.folder / unit / "reason=row_rule" / "part-0.parquet"
        file.parent.mkdir(parents=True)
        file.write_bytes(b"events")
        then = time.time() - 30 * HOUR
        for each in (file, table.folder / unit):
            os.utime(each, (then, then))
    named = replace(state(W1, ["unit"]), companions=(f"{units[0]}/reason=row_rule/part-0.parquet",))
    deduped.open().commit([WindowChange(W1, (), (), named, True)])

    done = CliRunner().invoke(sweep, [])
    assert done.exit_code == 0, done.output
    assert [(table.folder / unit).exists() for unit in units] == [True, False]


def test_what_a_run_in_progress_may_need_cannot_be_swept() -> None:
    assert CliRunner().invoke(sweep, ["--older-than-hours", "0"]).exit_code == 2
