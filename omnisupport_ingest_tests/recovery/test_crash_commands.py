"""Commands are killed at the failpoint of what they write, and do it when they are called again."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass

import dagster as dg
import pytest

from omnisupport_ingest_tests.recovery.crash import CrashDesk, Point, died, finished

pytestmark = pytest.mark.crash

SWEEP = """
from datetime import timedelta
from omnisupport_ingest.lake.sweep import sweep
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.layers.workspace import Workspace
for table in Workspace.open(Settings(_env_file=None)).tables():
    sweep(table, timedelta(seconds=-5))
"""

BACKFILL = """
import dagster as dg
from omnisupport_ingest.definitions import build_definitions
from omnisupport_ingest.defs.backfills import Backfill, launch_backfill
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.layers.workspace import Workspace
workspace = Workspace.open(Settings(_env_file=None))
window = workspace.deduped("support_desk").open().windows()[0]
with dg.DagsterInstance.get() as instance:
    graph = build_definitions(workspace).resolve_asset_graph()
    launch_backfill(instance, graph, Backfill("support_desk", [window], "crash"))
"""

COVERED = {
    "home.marker",
    "home.in_force",
    "runtime.file",
    "dagster.materialization",
    "dagster.backfill",
    "checkpoint.file",
    "export.file",
    "contract.file",
    "lake.sweep",
    "lake.sweep_delete",
    "source.pause",
    "source.resume",
    "source.publication_drop",
}


@dataclass(frozen=True)
class Killed:
    """Kills a call of the desk at both kinds of point, as often as is asked for."""

    desk: CrashDesk
    moment: str
    times: int

    def command(self, name: str, *arguments: str) -> None:
        """Kill the command, then let it come to its end."""
        point = Point(name, self.moment)
        for _ in range(self.times):
            died(self.desk.command(*arguments, at=point), point)
        finished(self.desk.command(*arguments))

    def script(self, name: str, text: str) -> None:
        point = Point(name, self.moment)
        for _ in range(self.times):
            died(self.desk.run("-c", text, at=point), point)
        finished(self.desk.run("-c", text))


@pytest.mark.parametrize(("moment", "times"), itertools.product(("before", "after"), (1, 3)))
def test_commands_killed_at_their_gates_are_carried_out_by_the_same_command(
    crash_desk: CrashDesk, moment: str, times: int
) -> None:
    desk, killed = crash_desk, Killed(crash_desk, moment, times)
    folder = desk.folder

    makes_a_home = ("land", "--watch", "--once")
    for attempt in range(times):
        # After its failpoint a home is there, so the next one is another.
        home = folder / f"home-{attempt if moment == 'after' else 0}"
        made = {"OMNISUPPORT_HOME": str(home)}
        point = Point("home.marker", moment)
        died(desk.command(*makes_a_home, at=point, given=made), point)
        assert (home / "home.json").exists() == (moment == "after")
    finished(desk.command(*makes_a_home, given=made))
    assert json.loads((home / "home.json").read_text())["window"] == "minutes:1"

    for attempt in range(times):
        home = folder / f"recorded-{attempt if moment == 'after' else 0}"
        made = {"OMNISUPPORT_HOME": str(home)}
        point = Point("home.in_force", moment)
        died(desk.command(*makes_a_home, at=point, given=made), point)
        assert (home / "in_force.json").exists() == (moment == "after")
    finished(desk.command(*makes_a_home, given=made))
    assert json.loads((home / "in_force.json").read_text())["tables"]

    point = Point("contract.file", moment)
    (folder / "made").mkdir()
    new = ("contracts", "new", "--table", "support.agents", "--out", str(folder / "made"), "--force")
    for _ in range(times):
        died(desk.command(*new, at=point), point)
    finished(desk.command(*new))
    assert [path.name for path in (folder / "made").glob("*.json")] == ["agents.json"]

    for _ in range(3):
        desk.change()
        finished(desk.capture())
        finished(desk.layers())

    killed.command("runtime.file", "checkpoint", "rebuild")
    dagster = desk.workspace.home.dagster
    for path in sorted(dagster.rglob("*.db*")):
        path.unlink()
    killed.command("dagster.materialization", "checkpoint", "rebuild")
    assert "0 partitions are reported" in finished(desk.command("checkpoint", "rebuild")).out

    killed.command("checkpoint.file", "checkpoint", "export", "--out", str(folder / "checkpoints.json"))
    finished(desk.command("checkpoint", "import", str(folder / "checkpoints.json")))
    killed.command("export.file", "export", "tickets", "--out", str(folder / "tickets.jsonl"))
    assert (
        len((folder / "tickets.jsonl").read_text().splitlines())
        == desk.source.query("SELECT count(*) FROM support.tickets")[0][0]
    )

    if not desk.in_bucket:
        # Objects are not moved aside before they are deleted.
        killed.script("lake.sweep", SWEEP)
    for _ in range(3):
        desk.change()
        finished(desk.capture())
        finished(desk.layers())
    killed.script("lake.sweep_delete", SWEEP)

    killed.command("source.pause", "source", "pause", "--reason", "crash")
    assert desk.capture().code == 1
    if moment == "before":
        killed.command("source.resume", "source", "resume")
    else:
        point = Point("source.resume", moment)
        for _ in range(times):
            finished(desk.command("source", "pause"))
            died(desk.command("source", "resume", at=point), point)
    desk.ends_well()

    killed.script("dagster.backfill", BACKFILL)
    with dg.DagsterInstance.from_config(str(dagster)) as instance:
        # Asking again asks for another replay, which changes nothing.
        assert len(instance.get_backfills()) == 1 + (times if moment == "after" else 0)

    point = Point("source.publication_drop", moment)
    for _ in range(times if moment == "before" else 1):
        died(desk.command("source", "drop", "--yes", at=point), point)
    for _ in range(times - 1 if moment == "after" else 0):
        finished(desk.capture("--new-epoch", "it was dropped"))
        died(desk.command("source", "drop", "--yes", at=point), point)
    finished(desk.command("source", "drop", "--yes"))
    assert desk.source.query(f"SELECT FROM pg_replication_slots WHERE slot_name = '{desk.source.slot}'") == []
    assert desk.source.query("SELECT FROM pg_publication") == []
