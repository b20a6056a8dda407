"""``checkpoint``: shown, exported, and compared with the home when it is imported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from omnisupport_ingest.cli.checkpoint import checkpoint
from omnisupport_ingest.layers.checkpoint_file import CheckpointFileUnreadable, HomeContradicts
from omnisupport_ingest_tests.cli.sample_home import SampleHome, document, land_another, run
from omnisupport_ingest_tests.layers.story import SOURCE


def test_checkpoints_of_one_table_as_json(sample_home: SampleHome) -> None:
    (one,) = document(checkpoint, "show", "--table", "net_changes/notes")
    assert (one["table"], one["rows"], one["cursor"]) == ("desk/net_changes/notes", 3, "1:0/14:2")


def exported(sample_home: SampleHome) -> tuple[Path, dict[str, Any]]:
    path = sample_home.folder / "checkpoints.json"
    run(checkpoint, "export", "--out", str(path))
    return path, json.loads(path.read_text())


def test_a_home_holds_what_its_own_file_says_and_more_after_it_went_on(sample_home: SampleHome) -> None:
    path, record = exported(sample_home)
    assert len(record["checkpoints"]) == 4
    assert "three" not in path.read_text()
    land_another(sample_home)
    assert "holds all 4 checkpoints" in run(checkpoint, "import", str(path), "--check").stdout


def test_importing_tells_dagster_of_partitions_it_does_not_know_and_once_only(
    sample_home: SampleHome,
) -> None:
    path, _ = exported(sample_home)
    assert "3 partitions are reported" in run(checkpoint, "import", str(path)).stdout
    assert "0 partitions are reported" in run(checkpoint, "import", str(path)).stdout


def test_what_was_written_and_reported_is_said_as_json_too(sample_home: SampleHome) -> None:
    path = sample_home.folder / "checkpoints.json"
    written = document(checkpoint, "export", "--out", str(path))
    assert written == {"file": str(path), "checkpoints": 4, "sources": [SOURCE]}
    checked = document(checkpoint, "import", str(path), "--check")
    assert checked == {"held": 4, "partitions_reported": None}
    assert document(checkpoint, "import", str(path)) == {"held": 4, "partitions_reported": 3}
    assert document(checkpoint, "rebuild") == {"partitions_reported": 0}


def refused(path: Path, record: Any) -> str:
    path.write_text(json.dumps(record))
    with pytest.raises(HomeContradicts) as raised:
        run(checkpoint, "import", str(path))
    return raised.value.problem


def test_a_file_that_is_ahead_of_landing_is_refused(sample_home: SampleHome) -> None:
    path, record = exported(sample_home)
    record["sources"][SOURCE]["stream_end"] = "0/15"
    assert "ends at 0/14 here, at 0/15 in it" in refused(path, record)


def test_a_file_that_is_ahead_of_the_lake_is_refused_with_every_window(sample_home: SampleHome) -> None:
    path, record = exported(sample_home)
    record["checkpoints"][0] |= {"cursor": "1:0/15:0", "idempotency_key": "another"}
    record["checkpoints"][1]["window"] = "2026-01-01T1203"
    problem = refused(path, record)
    assert "complete to 1:0/14:2 here, to 1:0/15:0 in it" in problem
    assert "2026-01-01T1203: has no checkpoint here" in problem


def test_a_lake_with_other_rows_from_the_same_inputs_contradicts_the_file(sample_home: SampleHome) -> None:
    path, record = exported(sample_home)
    record["checkpoints"][2]["content_hash"] = "0" * 48
    assert "made from the same inputs" in refused(path, record)


def test_a_home_of_other_windows_contradicts_the_file(sample_home: SampleHome) -> None:
    path, record = exported(sample_home)
    record["window"] = "hourly"
    assert "its window is minutes:1, in the file it is hourly" in refused(path, record)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format_version": 1}', '{"format_version": 99}'])
def test_a_file_that_is_none_of_ours_is_refused(
    sample_home: SampleHome, tmp_path: Path, content: str
) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(CheckpointFileUnreadable):
        run(checkpoint, "import", str(path))
