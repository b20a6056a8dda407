"""What an operator does, on the social network and a platform that runs: pause and resume, a gap that is
repaired, a table that is read again, Dagster's records rebuilt, a window replayed. Its keys have two columns
in places, and its accounts are soft-deleted."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deltalake
import psycopg2
import pytest

from omnisupport_ingest.contracts.documents import program_file
from omnisupport_ingest.demo.social import SOCIAL
from omnisupport_ingest.demo.workload import Workload
from omnisupport_ingest.lake.layout import WHOLE_TABLE
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.sources.postgres.embedded.dsn import source_dsn
from omnisupport_ingest.windows import OUT_OF_RANGE
from omnisupport_ingest_tests.cli import pgbench
from omnisupport_ingest_tests.waiting import PATIENCE, until

_CONTRACTS = program_file(SOCIAL.contracts)
_SEED = 7
_RUN_SECONDS = 900

_WIPE = """
import os
from dagster import DagsterInstance
from omnisupport_ingest.cli.opening import existing_home, open_settings
from omnisupport_ingest.runtime.dagster_home import dagster_environment
settings = open_settings()
os.environ.update(dagster_environment(settings, existing_home(settings)))
with DagsterInstance.get() as instance:
    instance.wipe_assets(list(instance.all_asset_keys()))
"""

_BACKFILL = """
import os, sys
from dagster import DagsterInstance
from omnisupport_ingest.cli.opening import existing_home, open_settings
from omnisupport_ingest.runtime.dagster_home import dagster_environment
settings = open_settings()
os.environ.update(dagster_environment(settings, existing_home(settings)))
with DagsterInstance.get() as instance:
    print(instance.get_backfill(sys.argv[1]).status.value)
"""


@dataclass
class Platform:
    """``up`` on the social network, and the commands beside it."""

    folder: Path
    process: subprocess.Popen[str]

    @property
    def variables(self) -> dict[str, str]:
        return {
            "OMNISUPPORT_HOME": str(self.folder / "home"),
            "OMNISUPPORT_SOURCE": "social",
            "OMNISUPPORT_CONTRACTS_DIR": str(_CONTRACTS),
            "OMNISUPPORT_WEBSERVER_PORT": "0",
            "OMNISUPPORT_SPARK_DRIVER_MEMORY": "1g",
        }

    @property
    def settings(self) -> Settings:
        return Settings(_env_file=None, home=self.folder / "home", source="social", contracts_dir=_CONTRACTS)

    @property
    def dsn(self) -> str:
        return source_dsn(self.settings, Workspace.open(self.settings).home)

    @property
    def landing(self) -> LandingStore:
        return LandingStore(self.folder / "home" / "landing", "social")

    def run(self, *arguments: str, code: int = 0) -> str:
        done = pgbench.command(*arguments, folder=self.folder, variables=self.variables)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    def script(self, text: str, *arguments: str) -> str:
        """Run Python in the environment of the commands."""
        return subprocess.run(
            [sys.executable, "-c", text, *arguments],
            cwd=self.folder,
            env=pgbench.environment(self.variables),
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()

    def sql(self, *statements: str) -> list[tuple[Any, ...]]:
        with closing(psycopg2.connect(self.dsn)) as connection, connection.cursor() as cursor:
            connection.autocommit = True
            for statement in statements:
                cursor.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def change(self, seed: int) -> None:
        Workload(SOCIAL, self.dsn, seed).run(150)

    def wait(self, what: str, seen: Callable[[], bool]) -> None:
        until(lambda: seen() or self.process.poll() is not None, _RUN_SECONDS, every=1.0)
        assert self.process.poll() is None, f"up ended while waiting for {what}"

    def pairs(self, table: str) -> set[tuple[int, int]]:
        """The live keys of a dimension whose key has two columns."""
        folder = self.folder / "home" / "lake" / "social" / f"dim_{table}"
        if not (folder / "_delta_log").exists():
            return set()
        rows = deltalake.DeltaTable(folder).to_pandas()
        live = rows[~rows["_cdc_is_deleted"]]
        return set(zip(live["follower_id"].tolist(), live["followee_id"].tolist(), strict=True))

    def follows(self) -> set[tuple[int, int]]:
        return {(a, b) for a, b in self.sql("SELECT follower_id, followee_id FROM social.follows")}

    def is_complete(self) -> bool:
        """Whether every dimension is equal to the source, by the command for that."""
        done = pgbench.command("verify", "--json", folder=self.folder, variables=self.variables)
        return done.returncode == 0 and json.loads(done.stdout)["holds"] is True

    def has_nothing_pending(self) -> bool:
        """Whether every table that an ingest run makes has all that has landed."""
        done = pgbench.command("status", "--json", folder=self.folder, variables=self.variables)
        tables = [each for of in json.loads(done.stdout)["sources"] for each in of["tables"]]
        # The quarantine is committed with the deduped events, and has no number.
        return all(
            each["there"] and not each["pending_batches"]
            for each in tables
            if each["pending_batches"] is not None
        )

    def hashes(self) -> dict[tuple[str, str], str]:
        """The content hash of every window of every table that an ingest run makes.

        Histories are left out: their own job makes them on the hour, whatever else is done.
        """
        shown = json.loads(self.run("checkpoint", "show", "--json"))
        made = (each for each in shown if not each["table"].startswith("social/history/"))
        return {(each["table"], each["window"]): each["content_hash"] for each in made}


@contextmanager
def running(folder: Path) -> Iterator[Platform]:
    found = Platform(folder, None)  # type: ignore[arg-type]
    with (folder / "up.out").open("w") as out:
        found.process = subprocess.Popen(
            [sys.executable, "-m", "omnisupport_ingest.cli.main", "up"],
            cwd=folder,
            env=pgbench.environment(found.variables),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
        )
    try:
        yield found
        found.process.send_signal(signal.SIGTERM)
        assert found.process.wait(PATIENCE) == 0
    finally:
        if found.process.poll() is None:
            found.process.kill()
            found.process.wait()


@pytest.mark.slow
def test_what_operators_do_ends_in_the_state_of_the_source(tmp_path: Path) -> None:
    with running(tmp_path) as platform:
        platform.wait("the first rows", lambda: len(platform.pairs("follows")) > 0)
        paused_and_resumed(platform)
        repaired_after_a_gap(platform)
        read_again(platform)
        assert platform.is_complete()
        records_rebuilt_and_a_window_replayed(platform)
        assert platform.is_complete()


def paused_and_resumed(platform: Platform) -> None:
    platform.run("source", "pause", "--reason", "the indexes are built anew")
    status = json.loads(platform.run("source", "status", "--json"))
    assert status["state"] == "PAUSED"
    landed = len(platform.landing.batch_ids())
    platform.change(_SEED)
    missing = platform.follows() ^ platform.pairs("follows")
    assert missing, "the workload has changed pairs"
    assert len(platform.landing.batch_ids()) == landed, "nothing lands while it is paused"
    platform.run("source", "resume")
    platform.wait("what was changed meanwhile", lambda: platform.pairs("follows") == platform.follows())


def repaired_after_a_gap(platform: Platform) -> None:
    """The slot is lost while nobody reads it; rows vanish and change that no event tells of."""
    platform.run("source", "pause", "--reason", "somebody drops the slot")
    before = platform.landing.current_epoch()
    assert before is not None
    platform.sql(
        "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE database ="
        " current_database()",
        "DELETE FROM social.follows WHERE ctid IN (SELECT ctid FROM social.follows LIMIT 25)",
        "UPDATE social.users SET deleted_at = now() WHERE id IN (SELECT id FROM social.users"
        " WHERE deleted_at IS NULL ORDER BY id LIMIT 3)",
    )
    platform.run("source", "resume")

    def has_failed() -> bool:
        done = pgbench.command("status", "--json", folder=platform.folder, variables=platform.variables)
        return any(
            "capture of social has failed" in each for each in json.loads(done.stdout)["health"]["reasons"]
        )

    platform.wait("the capture to name the gap", has_failed)
    repair = ("source", "repair", "--mode", "resnapshot", "--reason", "the slot was dropped")

    def is_repaired() -> bool:
        done = pgbench.command(*repair, folder=platform.folder, variables=platform.variables)
        # 6: the failed capture is just trying again.
        assert done.returncode in (0, 6), done.stderr
        return done.returncode == 0

    platform.wait("the repair", is_repaired)
    epoch = platform.landing.current_epoch()
    assert epoch is not None and epoch.number == before.number + 1
    platform.wait(
        "what vanished in the gap to be deleted", lambda: platform.pairs("follows") == platform.follows()
    )
    platform.wait("every table", platform.is_complete)


def read_again(platform: Platform) -> None:
    ended = _snapshot_ends(platform, "likes")
    platform.run("source", "snapshot", "likes", "--reason", "to be sure")
    platform.change(_SEED + 1)
    platform.wait("the snapshot to end", lambda: _snapshot_ends(platform, "likes") == ended + 1)
    platform.wait("all tables to be equal", platform.is_complete)


def _snapshot_ends(platform: Platform, table: str) -> int:
    manifests = platform.landing.manifests()
    return sum(
        each.chunk is not None and each.chunk.table == table and each.chunk.boundary for each in manifests
    )


def records_rebuilt_and_a_window_replayed(platform: Platform) -> None:
    platform.wait("every table to have all", platform.has_nothing_pending)
    before = platform.hashes()
    platform.script(_WIPE)
    assert json.loads(platform.run("checkpoint", "rebuild", "--json"))["partitions_reported"] > 0
    assert json.loads(platform.run("checkpoint", "rebuild", "--json"))["partitions_reported"] == 0
    window = min(window for _, window in before if window not in (WHOLE_TABLE, OUT_OF_RANGE))
    asked = json.loads(platform.run("replay", "--from", window, "--reason", "to be sure", "--json"))

    def is_done() -> bool:
        state = platform.script(_BACKFILL, asked["backfill"])
        assert "FAIL" not in state
        return state == "COMPLETED_SUCCESS"

    platform.wait("the replay", is_done)
    assert platform.hashes() == before, "a replay of unchanged inputs has the same content"
