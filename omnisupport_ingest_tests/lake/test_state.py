"""States and checkpoints keep their values on the way to disk and back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.json_values import from_note, to_plain
from omnisupport_ingest.lake import state as states
from omnisupport_ingest.lake.checkpoint import Checkpoint
from omnisupport_ingest.lake.state import (
    FOOTER_KEY,
    StateFromNewerVersion,
    StateUnreadable,
    WindowState,
    read_state,
    write_state,
)
from omnisupport_ingest_tests.lake.tables import W1, checkpoint, state

SCHEMA = pa.schema([("n", pa.int64())])


@pytest.mark.parametrize("made", [checkpoint(W1), replace(checkpoint(W1), watermark=None, lsn_end=None)])
def test_a_checkpoint_comes_back_from_json(made: Checkpoint) -> None:
    assert from_note(Checkpoint, to_plain(made)) == made
    assert from_note(Checkpoint, {**to_plain(made), "added_later": 1}) == made


def test_a_state_comes_back_from_a_file_without_rows(tmp_path: Path) -> None:
    made = state(W1, ["b1", "b2"], generation=3)
    path = tmp_path / "window=W" / "state.parquet"
    size = write_state(path, made, SCHEMA)
    assert read_state(path) == made
    assert size == path.stat().st_size
    assert (pq.read_table(path).num_rows, pq.read_schema(path).names) == (0, ["n"])
    assert write_state(path, made, SCHEMA) == size


def test_a_process_keeps_the_states_that_it_read_last_and_no_more_than_so_many_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [tmp_path / f"{number}.parquet" for number in range(4)]
    for number, path in enumerate(paths):
        write_state(path, state(W1, [str(number)]), SCHEMA)
    parsed: list[str] = []
    of_text = WindowState.from_text
    monkeypatch.setattr(WindowState, "from_text", lambda text: parsed.append(text) or of_text(text))
    monkeypatch.setattr(states, "_KEPT_BYTES", 3 * len(state(W1, ["0"]).to_text()))
    states._kept.clear()
    for _ in range(2):
        assert [read_state(path).inputs for path in paths[:3]] == [("0",), ("1",), ("2",)]
    assert len(parsed) == 3
    # The first was read last but for the fourth, so the second has to go.
    for number, more in ((0, 0), (3, 1), (0, 0), (2, 0), (1, 1)):
        before = len(parsed)
        assert read_state(paths[number]).inputs == (str(number),)
        assert len(parsed) - before == more, number


def test_the_same_work_is_recognised_whoever_did_it() -> None:
    made = state(W1, ["b1", "b2"])
    assert made.same_work(state(W1, ["b2", "b1"], run_id="another"))
    assert not made.same_work(state(W1, ["b1"]))
    assert not made.same_work(state(W1, ["b1", "b2"], generation=2))


def test_a_state_of_a_closed_window_comes_back_and_one_of_an_older_version_is_open() -> None:
    open_state = state(W1, ["b1", "b2"])
    closed = replace(
        open_state,
        checkpoint=replace(open_state.checkpoint, closed=True),
        compacted_units={"g0001/all": ("g0001/one", "g0001/two")},
    )
    assert WindowState.from_text(closed.to_text()) == closed
    assert closed.closed
    record = json.loads(open_state.to_text())
    del record["compacted_units"], record["checkpoint"]["closed"]
    assert WindowState.from_text(json.dumps(record)) == open_state
    assert not open_state.closed


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("", StateUnreadable),
        ("{}", StateUnreadable),
        ("[]", StateUnreadable),
        (state(W1, []).to_text().replace('version":1', 'version":99'), StateFromNewerVersion),
    ],
)
def test_a_state_that_cannot_be_read_names_its_file(
    tmp_path: Path, text: str, refusal: type[IngestError]
) -> None:
    path = tmp_path / "state.parquet"
    metadata: dict[bytes | str, bytes | str] = {FOOTER_KEY: text.encode()}
    pq.write_table(SCHEMA.with_metadata(metadata).empty_table(), path)
    with pytest.raises(refusal, match=r"state\.parquet"):
        read_state(path)
    assert WindowState.from_text(state(W1, []).to_text()) == state(W1, [])
