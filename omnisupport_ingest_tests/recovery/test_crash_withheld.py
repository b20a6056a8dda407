"""A replay is killed at every point of its two commits and of the one after them: nothing withheld is lost.

The window has an event in quarantine whose column no later event carries, so a fold without it shows an
older value as if it were known.
"""

from __future__ import annotations

import itertools
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import duckdb
import pytest

from omnisupport_ingest.lake.sweep import sweep
from omnisupport_ingest.layers.events.quarantine_files import QuarantineFiles, named_anywhere
from omnisupport_ingest.layers.scheduling.pending import pending_windows
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest_tests.layers.story import SOURCE, Change, Commit, Story
from omnisupport_ingest_tests.recovery.pipeline import finish, open_workspace, start

BORN = Commit(10, 1, [Change("c", 1, {"title": "one", "body": "text"})])
TOO_LONG = Commit(20, 2, [Change("u", 1, {"title": "x" * 21}, unchanged=("body",))])
OTHER_WINDOW = Commit(30, 61, [Change("c", 2, {"title": "two", "body": None})])

POINTS = [
    *itertools.product(("lake.write", "lake.place"), ("before", "after"), ("deduped", "quarantine"), (1,)),
    # The quarantine is committed twice: with what is new, and without what is old.
    *itertools.product(("lake.state", "lake.commit"), ("before", "after"), ("quarantine",), (1, 2)),
    # Both windows have a state, and the first commit of deduped is that which names the new files.
    *itertools.product(("lake.state",), ("before", "after"), ("deduped",), (1, 2)),
    *itertools.product(("lake.commit",), ("before", "after"), ("deduped",), (1,)),
]


@pytest.mark.crash
def test_a_replay_killed_anywhere_loses_no_withheld_event(tmp_path: Path, warm: str) -> None:
    folder = tmp_path / "told"
    story = Story(folder)
    story.land(BORN, TOO_LONG, OTHER_WINDOW)
    run(folder, warm)
    assert rows(folder) == [(1, None, "text", ["title"]), (2, "two", None, [])]
    for number, (failpoint, moment, table, times) in enumerate(POINTS):
        point = f"{failpoint}.{moment}@desk/{table}:{times}"
        # Raw stays as it is: made again, it would have everything judged again by the next run.
        process = start(folder, failpoint=point, remote=warm, judge=True)
        assert finish(process) == -signal.SIGKILL, (point, (folder / "pipeline.log").read_text()[-2000:])
        assert withheld(folder) == [20], point
        # What comes next is an append; it does not carry the title.
        story.land(Commit(100 + number, 3, [Change("u", 1, {"body": f"{number}"}, unchanged=("title",))]))
        run(folder, warm)
        assert rows(folder) == [(1, None, f"{number}", ["title"]), (2, "two", None, [])], point
        workspace = open_workspace(folder)
        assert pending_windows(workspace, SOURCE).nothing, point
        sweep_all(workspace)
        assert withheld(folder) == [20], point
        held = workspace.quarantine(SOURCE).open().all_files()
        assert {file.path for file in held} == named_anywhere(workspace, SOURCE), point
    run(folder, warm, replay=True)
    assert rows(folder)[0] == (1, None, f"{number}", ["title"])


def run(folder: Path, warm: str, *, replay: bool = False) -> None:
    """The whole pipeline, to its end."""
    process = start(folder, remote=warm, replay=replay)
    assert finish(process) == 0, (folder / "pipeline.log").read_text()[-2000:]


def rows(folder: Path) -> list[tuple[Any, ...]]:
    """The rows of the dimension: id, title, body, unresolved columns."""
    workspace = open_workspace(folder)
    (contract,) = workspace.contracts.of_source(SOURCE)
    files = [file.uri for file in workspace.dimension(contract).open().all_files()]
    with duckdb.connect() as connection:
        return connection.execute(
            "SELECT id, title, body, coalesce(_cdc_unresolved, []) FROM read_parquet(?) ORDER BY id", [files]
        ).fetchall()


def withheld(folder: Path) -> list[int]:
    """The commit LSNs of the events that the states say are withheld, each read from its file."""
    workspace = open_workspace(folder)
    files = QuarantineFiles.newest(workspace, SOURCE)
    assert files is not None
    if not files.all():
        return []
    with duckdb.connect() as connection:
        found = connection.execute(
            "SELECT commit_lsn FROM read_parquet(?) ORDER BY ALL", [[file.uri for file in files.all()]]
        ).fetchall()
    return [lsn for (lsn,) in found]


def sweep_all(workspace: Workspace) -> None:
    """What the command does, for what was left a moment ago too."""
    for table in workspace.tables():
        spare = named_anywhere(workspace, SOURCE) if table.spec.path.endswith("quarantine") else ()
        sweep(table, timedelta(0), spare=spare)
