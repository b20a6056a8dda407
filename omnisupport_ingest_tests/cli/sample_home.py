"""A home whose first batch is in every layer, and commands of this process that read it.

``conftest.py`` makes the fixtures known to every test of commands.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from pyspark.sql import SparkSession

from omnisupport_ingest.landing.manifest import StreamSpan
from omnisupport_ingest.landing.names import stream_batch_id
from omnisupport_ingest.landing.writer import BatchWriter
from omnisupport_ingest.position import Lsn
from omnisupport_ingest_tests.layers.story import FIRST, SOURCE, START, Change, Commit, Story, events
from omnisupport_ingest_tests.recovery.pipeline import open_workspace, run_layers


@dataclass(frozen=True)
class SampleHome:
    """A home whose first batch is in every layer, and whose second one has only landed."""

    folder: Path

    @property
    def home(self) -> Path:
        return self.folder / "home"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Path:
    folder = tmp_path_factory.mktemp("looking") / "sample_home"
    story = Story(folder)
    story.land(
        Commit(10, 1, [Change("c", 1, {"title": "one", "body": "text"}), Change("c", 2, {"title": "two"})]),
        # Its create was never seen, so what it does not carry is not known.
        Commit(20, 2, [Change("u", 3, {"title": "three"}, unchanged=("body",)), Change("d", 2)]),
    )
    run_layers(open_workspace(folder), spark, [FIRST])
    return folder


@pytest.fixture
def sample_home(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SampleHome]:
    shutil.copytree(whole, tmp_path / "sample_home")
    environment = dict(os.environ)
    sample_home = SampleHome(tmp_path / "sample_home")
    monkeypatch.chdir(tmp_path)
    for name, value in (
        ("HOME", sample_home.home),
        ("CONTRACTS_DIR", sample_home.folder / "contracts"),
        ("SOURCE", SOURCE),
    ):
        monkeypatch.setenv(f"OMNISUPPORT_{name}", str(value))
    monkeypatch.delenv("OMNISUPPORT_SOURCE_DSN", raising=False)
    yield sample_home
    # A command that starts Dagster sets variables for the rest of its process.
    os.environ.clear()
    os.environ.update(environment)


def land_another(sample_home: SampleHome) -> None:
    """A batch that continues the stream of the copied home."""
    workspace = open_workspace(sample_home.folder)
    at = START + timedelta(seconds=61)
    span = StreamSpan(Lsn(20), Lsn(30), Lsn(30), Lsn(30), 30, at, at)
    name = stream_batch_id(1, Lsn(20))
    with BatchWriter(workspace.landing(SOURCE), workspace.grid, 1, name, clock=lambda: at) as writer:
        for event in events(Commit(30, 61, [Change("c", 4, {"title": "four"})])):
            writer.add(event)
        writer.seal(stream=span)


def run(command: Any, *arguments: str) -> Result:
    return CliRunner(catch_exceptions=False).invoke(command, list(arguments), standalone_mode=False)


def document(command: Any, *arguments: str) -> Any:
    return json.loads(run(command, *arguments, "--json").stdout)


def tables(seen: Any) -> dict[str, Any]:
    (source,) = seen["sources"]
    return {each["table"].removeprefix(f"{SOURCE}/"): each for each in source["tables"]}


def files_in(folder: Path) -> set[Path]:
    """All but what SQLite keeps beside the index of landing while somebody reads it."""
    beside = ("index.sqlite-shm", "index.sqlite-wal")
    return {each.relative_to(folder) for each in folder.rglob("*") if each.name not in beside}
