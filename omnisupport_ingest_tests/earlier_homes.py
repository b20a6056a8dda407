"""Homes that earlier versions of the program made, kept in ``fixtures`` for the tests of upgrades.

``python -m omnisupport_ingest_tests.earlier_homes COMMIT`` makes one: it takes the program and its tests as
they were at that commit, has them land a story and take it through the layers, and packs the home with its
contracts as ``fixtures/home-<format>-<commit>.tar.gz``. The checkout needs its history. This version writes
nothing in it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

FIXTURES = Path(__file__).with_name("fixtures")

_TELLS = """
import importlib, sys
from datetime import timedelta
from pathlib import Path
from omnisupport_ingest.contracts.load import load_contracts
from omnisupport_ingest.home import Home
from omnisupport_ingest.runtime.spark import session
from omnisupport_ingest.settings import Settings

# What is called layers today was called stages.
named = "layers" if Path("omnisupport_ingest/layers").exists() else "stages"
Workspace = importlib.import_module(f"omnisupport_ingest.{named}.workspace").Workspace
stories = importlib.import_module(f"omnisupport_ingest_tests.{named}.story")
pipeline = importlib.import_module("omnisupport_ingest_tests.recovery.pipeline")
run = getattr(pipeline, f"run_{named}")
Change, Commit = stories.Change, stories.Commit

folder = Path(sys.argv[1])
story = stories.Story.__new__(stories.Story)
story.contracts = folder / "contracts"
story.contracts.mkdir()
story.write_contract(stories.CONTRACT)
# Windows of a day: Dagster counts every window since the first.
settings = Settings(home=folder / "home", window="daily", contracts_dir=story.contracts, _env_file=None)
home = Home.open(settings.home, settings.window_size, now=stories.START)
story.workspace = Workspace(settings, home, load_contracts(story.contracts))
story.store = story.workspace.landing(stories.SOURCE)
story.clock, story._ends = stories.START + timedelta(days=2), {}

day = 86_400
created = Commit(10, 1, [Change("c", n, {"title": f"note {n}", "body": "text"}) for n in range(1, 7)])
windows = set(story.land(created).windows)
windows |= set(
    story.land(
        Commit(20, 2, [Change("u", 1, {"title": "eins"}, unchanged=("body",)), Change("d", 2)]),
        Commit(30, 3, [Change("d", 3), Change("c", 33, {"title": "moved", "body": "text"}, moved_from=3)]),
    ).windows
)
run(story.workspace, session(settings), sorted(windows), stories.SOURCE)
# Sent again; a row that breaks a rule; and a day later.
windows |= set(story.land_again(created).windows)
windows |= set(story.land(Commit(35, 4, [Change("u", 6, {"title": "x" * 30, "body": "text"})])).windows)
windows |= set(story.land(Commit(40, day + 1, [Change("u", 4, {"title": "vier", "body": None})])).windows)
run(story.workspace, session(settings), sorted(windows), stories.SOURCE)
"""


def unpack(name: str, folder: Path) -> Path:
    """Unpack the fixture ``name`` as ``home`` and ``contracts`` in ``folder``; returns the home."""
    with tarfile.open(FIXTURES / name) as packed:
        packed.extractall(folder, filter="data")
    return folder / "home"


def record(commit: str) -> Path:
    root = Path(__file__).parents[1]
    short = subprocess.check_output(["git", "rev-parse", "--short=8", commit], cwd=root, text=True).strip()
    with tempfile.TemporaryDirectory(prefix="earlier-home-") as name:
        program, made = Path(name) / "program", Path(name) / "made"
        for folder in (program, made):
            folder.mkdir()
        archive = subprocess.Popen(["git", "archive", short], cwd=root, stdout=subprocess.PIPE)
        subprocess.run(["tar", "-x", "-C", str(program)], stdin=archive.stdout, check=True)
        environment = {key: value for key, value in os.environ.items() if not key.startswith("OMNISUPPORT_")}
        subprocess.run(
            [sys.executable, "-c", _TELLS, str(made)],
            cwd=program,
            env=environment | {"PYTHONPATH": str(program)},
            check=True,
        )
        version = json.loads((made / "home" / "home.json").read_text())["format_version"]
        packed = FIXTURES / f"home-{version}-{short}.tar.gz"
        with tarfile.open(packed, "w:gz") as target:
            for each in ("contracts", "home/home.json", "home/landing", "home/lake"):
                target.add(made / each, arcname=each)
    return packed


if __name__ == "__main__":
    print(record(sys.argv[1]))
