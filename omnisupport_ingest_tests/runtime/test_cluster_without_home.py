"""A real cluster whose workers do not see the home: all they need is the bucket of landing and lake."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from omnisupport_ingest.contracts.in_force import record_in_force
from omnisupport_ingest.contracts.load import default_contracts_dir
from omnisupport_ingest.contracts.subject_keys import FILE as SUBJECT_KEYS
from omnisupport_ingest.contracts.token_map import FILE as TOKENS
from omnisupport_ingest.home import Home
from omnisupport_ingest.lake.file_rows import rows_of
from omnisupport_ingest.lake.schema import arrow_schema
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.runtime.environment import settings_environment
from omnisupport_ingest.runtime.standalone import WorkerSize, start_standalone
from omnisupport_ingest.runtime.supervisor import Service, Supervisor
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.storage import DRAFTS, storage_of
from omnisupport_ingest_tests.runtime import cluster_whole
from omnisupport_ingest_tests.runtime.cluster_whole import SOURCE, START, looks_of
from omnisupport_ingest_tests.storage.s3_server import S3Server
from omnisupport_ingest_tests.waiting import PATIENCE

_HIDDEN = """
set -e
home=$1 kept=$2; shift 2
mount --bind "$home/run" "$kept"
mount -t tmpfs none "$home"
mkdir "$home/run"
mount --bind "$kept" "$home/run"
mount -o remount,ro "$home"
exec "$@"
"""
"""Runs a command that sees of the home ``run`` alone, where a worker of ours has its folder; the home itself
is an empty folder that nothing can be written to."""

_UNSHARE = ("unshare", "--mount") if os.geteuid() == 0 else ("unshare", "--map-root-user", "--mount")


def _can_hide() -> bool:
    if shutil.which(_UNSHARE[0]) is None:
        return False
    tried = [*_UNSHARE, "mount", "-t", "tmpfs", "none", "/mnt"]
    return subprocess.run(tried, capture_output=True, check=False).returncode == 0


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not _can_hide(), reason="the home cannot be hidden from a process here"),
]


class Hiding(Supervisor):
    """A supervisor whose services do not see the home."""

    def __init__(self, home: Home, kept: Path) -> None:
        super().__init__(home)
        self._of, self._kept = home.path, kept

    def start(self, service: Service) -> None:
        hidden = (*_UNSHARE, "sh", "-c", _HIDDEN, "sh", str(self._of), str(self._kept))
        super().start(replace(service, command=(*hidden, *service.command)))


@pytest.mark.drawn(1)
@pytest.mark.parametrize("landed", ["plain", "encrypted"])
def test_workers_that_see_no_home_make_of_a_bucket_what_one_machine_makes_of_folders(
    landed: str, tmp_path: Path, s3: S3Server
) -> None:
    """Encrypted: both homes have the same keys of subjects and the same tokens; two rows are erased."""
    encrypted = landed == "encrypted"
    write_contract(tmp_path / "contracts", protected=encrypted)
    away, alone = both(tmp_path, s3)
    if encrypted:
        keys_and_tokens_are_in_the_home(away)
        return
    assert closed(away) != []
    looks, expected_looks = (json.loads(looks_of(each).read_text()) for each in (away, alone))
    assert looks == expected_looks and len(looks["past"]) > 1_000 and looks["preview"]["events"] > 20_000


def keys_and_tokens_are_in_the_home(away: Settings) -> None:
    """One key was destroyed, so its values are NULL in the dimension, and every token has its value."""
    keys, tokens = away.home / SUBJECT_KEYS, away.home / TOKENS
    with closing(sqlite3.connect(keys)) as base:
        assert base.execute("SELECT count(*) FROM keys WHERE secret IS NULL").fetchone() > (0,)
    with closing(sqlite3.connect(tokens)) as base:
        made = dict(base.execute("SELECT token, value FROM tokens"))
    workspace = Workspace.open(away)
    table = workspace.dimension(workspace.contracts.of_source(SOURCE)[0])
    rows = rows_of(table.open().all_files(), arrow_schema(table.spec.schema, without=()))
    assert len(rows) > 500 and 0 < rows["body"].null_count < len(rows)
    shown = set(rows["agent_handle"].drop_null().to_pylist())
    assert shown and shown <= made.keys()


def both(tmp_path: Path, s3: S3Server) -> tuple[Settings, Settings]:
    """Run on a cluster whose workers do not see the home, and on one machine; both have the same content."""
    kept, said = tmp_path / "kept", tmp_path / "said"
    for folder in (kept, said):
        folder.mkdir()
    away = opened(tmp_path, "away", s3.place())
    home = Home.open(away.home, away.window_size)
    with Hiding(home, kept) as supervisor:
        on_cluster = start_standalone(supervisor, away, home, 2, WorkerSize(memory="512m"))
        run(on_cluster, str(said))
    alone = opened(tmp_path, "alone", None)
    run(alone)
    seen = [each.read_text() for each in said.glob("seen-*")]
    assert seen == ["run", "run"], "both executors looked, and saw nothing of the home"
    found, expected = hashes(away), hashes(alone)
    assert {name for name, _ in expected} >= {f"{SOURCE}/{name}" for name in TABLES}
    assert found == expected
    assert closed(away) == closed(alone)
    assert drafts_left(away) == []
    for file in (*home.path.rglob("*"), *tmp_path.glob("*.log")):
        if file.is_file() and not file.is_socket():
            assert b"SECRET-that-no-file-may-hold" not in file.read_bytes(), file
    return away, alone


TABLES = (
    *("raw_cdc_staging", "deduped_events", "quarantine"),
    *("net_changes/tickets", "dim_tickets", "history/dim_tickets_history"),
)


def write_contract(folder: Path, *, protected: bool = False) -> None:
    """The tickets; ``protected``: personal values land encrypted by customer, and agents become tokens."""
    folder.mkdir()
    contract = json.loads((default_contracts_dir() / "tickets.json").read_text())
    contract["x-cdc"]["lateness"] = {"allowed": "PT1H", "max": "P7D"}
    if protected:
        contract["x-cdc"]["pii"]["agent_handle"] = {"policy": "tokenize", "note": "A test."}
        contract["x-cdc"]["at_rest"] = {
            "pii": "encrypted",
            "subject": "asker",
            "subject_column": "customer_id",
        }
        for name in contract["x-cdc"]["pii"]:
            contract["properties"][name]["type"] = ["string", "null"]
        contract["required"] = [each for each in contract["required"] if each not in contract["x-cdc"]["pii"]]
    (folder / "tickets.json").write_text(json.dumps(contract))


def opened(root: Path, name: str, storage: str | None) -> Settings:
    settings = Settings(
        home=root / name,
        window="hourly",
        contracts_dir=root / "contracts",
        source=SOURCE,
        storage=storage,
        spark_driver_memory="768m",
        _env_file=None,
    )
    home = Home.open(settings.home, settings.window_size, first=START, storage=storage)
    record_in_force(settings, home)
    return settings


def run(settings: Settings, *arguments: str) -> None:
    log = settings.home.with_suffix(".log")
    with log.open("ab") as output:
        done = subprocess.run(
            [sys.executable, "-m", cluster_whole.__name__, *arguments],
            cwd=Path(__file__).parents[2],
            env={**os.environ, **settings_environment(settings)},
            stdout=output,
            stderr=output,
            timeout=10 * PATIENCE,
        )
    assert done.returncode == 0, log.read_text()[-4000:]


def hashes(settings: Settings) -> dict[tuple[str, str], str]:
    """The content hash of every window of every table, histories and quarantine among them."""
    found = {}
    for table in Workspace.open(settings).tables():
        snapshot = table.look()
        for window in [] if snapshot is None else snapshot.windows():
            state = snapshot.state(window)
            assert state is not None, (table.spec.path, window)
            found[table.spec.path, window] = state.checkpoint.content_hash
    return found


def closed(settings: Settings) -> list[str]:
    """The windows of raw whose files were brought together."""
    raw = Workspace.open(settings).raw(SOURCE).open()
    states = {window: raw.state(window) for window in raw.windows()}
    return [window for window, state in states.items() if state is not None and state.checkpoint.closed]


def drafts_left(settings: Settings) -> list[Path]:
    lake = Home.open(settings.home, settings.window_size).lake
    return [each.path for each in storage_of(lake / "any").listed(lake) if DRAFTS in each.path.parts]
