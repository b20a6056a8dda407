"""Files of checkpoints that others changed: held against the home, or named with the field."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from omnisupport_ingest.contracts.documents import program_file
from omnisupport_ingest.contracts.load import load_contracts
from omnisupport_ingest.defs.sensors import SensorCursor
from omnisupport_ingest.defs.source_health import HealthCursor
from omnisupport_ingest.home import Home
from omnisupport_ingest.json_values import to_plain
from omnisupport_ingest.lake.schema import Retyped
from omnisupport_ingest.layers.checkpoint_file import (
    CheckpointFileUnreadable,
    HomeContradicts,
    describe,
    read_file,
    require_held,
)
from omnisupport_ingest.layers.type_changes import ask_for, waiting
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.records import encode
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.windows import WindowSize
from omnisupport_ingest_tests.examples import examples
from omnisupport_ingest_tests.foreign_bytes import IN_THE_PLACE, in_time, mutated
from omnisupport_ingest_tests.lake.tables import W1, checkpoint

SOURCE = {
    "epochs": {
        "1": {"system_identifier": "7", "timeline": 1, "slot": "s", "consistent_point": "0/5"},
        "2": None,
    },
    "batches": 1,
    "last_batch_id": "e000001-s-0000000000000005",
    "stream_epoch": 1,
    "stream_end": "0/9",
    "watermark": None,
}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    folder = tmp_path_factory.mktemp("home")
    workspace = Workspace(
        Settings(home=folder, _env_file=None),
        Home.open(folder, WindowSize(60)),
        load_contracts(program_file("contracts/data")),
    )
    workspace.landing("support_desk")
    return workspace


@settings(max_examples=examples(200), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=mutated([{"checkpoints": [to_plain(checkpoint(W1))], "sources": {"support_desk": SOURCE}}]))
def test_any_file_is_held_against_the_home_or_named(
    workspace: Workspace, tmp_path: Path, data: bytes
) -> None:
    path = tmp_path / "checkpoints.json"
    content = data
    if data.startswith(b"{") and data.endswith(b"}") and len(data) > 2:
        described = to_plain(describe(workspace))
        members = {name: described[name] for name in ("format_version", "made_at", "window", "first_window")}
        content = json.dumps(members).encode()[:-1] + b", " + data[1:]
    path.write_bytes(content)
    with in_time():
        try:
            require_held(workspace, read_file(path), path)
        except CheckpointFileUnreadable as refused:
            assert str(path) in refused.problem and refused.fix and len(refused.problem) < 1000
        except HomeContradicts as refused:
            assert str(path) in refused.problem


def test_what_was_exported_is_held(workspace: Workspace, tmp_path: Path) -> None:
    path = tmp_path / "checkpoints.json"
    path.write_bytes(encode(describe(workspace)))
    require_held(workspace, read_file(path), path)
    document = to_plain(describe(workspace)) | {"sources": {"support_desk": SOURCE}}
    path.write_text(json.dumps(document | {"checkpoints": [to_plain(checkpoint(W1))]}))
    with pytest.raises(HomeContradicts, match="epoch 1 has not begun here"):
        require_held(workspace, read_file(path), path)


@pytest.mark.parametrize("what", IN_THE_PLACE)
def test_what_is_no_file_of_checkpoints_is_named_and_not_waited_for(tmp_path: Path, what: str) -> None:
    path = tmp_path / "checkpoints.json"
    IN_THE_PLACE[what](path)
    with in_time(), pytest.raises(CheckpointFileUnreadable, match=r"checkpoints\.json"):
        read_file(path)


@settings(max_examples=examples(100))
@given(
    mutated(
        [{"last_batch_id": "b", "lsn": None, "attempt": 1, "level": 2, "problems": ["a"], "recorded_at": 5}]
    )
)
def test_any_cursor_of_a_sensor_is_read(content: bytes) -> None:
    text = content.decode(errors="replace")
    with in_time():
        assert isinstance(SensorCursor.from_text(text).attempt, int)
        assert isinstance(HealthCursor.from_text(text).recorded_at, float)


RETYPED: Any = SimpleNamespace(retyped=(Retyped("title", "string", "integer"),))
"""A table with a column of another type, which no run takes by itself."""


def retype_note(workspace: Workspace) -> Path:
    """The note of a person who asked for the new types, written anew."""
    for file in (workspace.home.lake / "support_desk" / "retyped").glob("*"):
        file.rmdir() if file.is_dir() and not file.is_symlink() else file.unlink()
    contract = workspace.contracts.of_source("support_desk")[0]
    ask_for(workspace, contract)
    (file,) = (workspace.home.lake / "support_desk" / "retyped").iterdir()
    assert waiting(workspace, contract, RETYPED) == ()
    return file


@settings(max_examples=examples(60))
@given(data=mutated([{"contract": "0" * 64}]))
def test_a_note_that_asks_for_other_types_and_is_not_of_this_contract_asks_for_nothing(
    workspace: Workspace, data: bytes
) -> None:
    retype_note(workspace).write_bytes(data)
    with in_time():
        found = waiting(workspace, workspace.contracts.of_source("support_desk")[0], RETYPED)
        assert found == RETYPED.retyped


@pytest.mark.parametrize("what", IN_THE_PLACE)
def test_what_stands_in_the_place_of_such_a_note_asks_for_nothing_and_is_not_waited_for(
    workspace: Workspace, what: str
) -> None:
    file = retype_note(workspace)
    file.unlink()
    IN_THE_PLACE[what](file)
    with in_time():
        found = waiting(workspace, workspace.contracts.of_source("support_desk")[0], RETYPED)
        assert found == RETYPED.retyped
