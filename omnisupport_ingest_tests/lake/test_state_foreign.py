"""States and ledgers that others changed: what they say, or the file by its name."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omnisupport_ingest.lake import ledger
from omnisupport_ingest.lake.ledger import LedgerUnreadable
from omnisupport_ingest.lake.state import (
    FOOTER_KEY,
    StateFromNewerVersion,
    StateUnreadable,
    WindowState,
    read_state,
)
from omnisupport_ingest_tests.examples import examples
from omnisupport_ingest_tests.foreign_bytes import IN_THE_PLACE, in_time, mutated
from omnisupport_ingest_tests.lake.tables import W1, state

SCHEMA = pa.schema([("n", pa.int64())])
STATE = json.loads(state(W1, ["b1", "b2"]).to_text())
same_folder = settings(
    max_examples=examples(150), suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def footer(path: Path, content: bytes) -> None:
    pq.write_table(SCHEMA.with_metadata({FOOTER_KEY: content}).empty_table(), path)


@same_folder
@given(content=mutated([STATE]))
def test_any_text_in_a_footer_is_a_state_or_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / f"{hash(content) % 10**9}.parquet"
    footer(path, content)
    with in_time():
        try:
            found = read_state(path)
        except (StateUnreadable, StateFromNewerVersion) as refused:
            assert str(path) in refused.problem and refused.fix and len(refused.problem) < 1000
        else:
            assert WindowState.from_text(found.to_text()) == found


@same_folder
@given(cut=st.integers(0, 2000), tail=st.binary(max_size=40))
def test_any_bytes_are_a_state_or_a_ledger_file_or_named(tmp_path: Path, cut: int, tail: bytes) -> None:
    path = tmp_path / f"{cut}-{tail.hex()}.parquet"
    footer(path, json.dumps(STATE).encode())
    path.write_bytes(path.read_bytes()[:cut] + tail)
    with in_time():
        try:
            read_state(path)
        except (StateUnreadable, StateFromNewerVersion) as refused:
            assert str(path) in refused.problem
        try:
            ledger._read(path, SCHEMA)
        except LedgerUnreadable as refused:
            assert str(path) in refused.problem


@pytest.mark.parametrize("what", IN_THE_PLACE)
def test_what_stands_in_the_place_of_a_file_of_the_lake_is_named_and_not_waited_for(
    tmp_path: Path, what: str
) -> None:
    path = tmp_path / "state.parquet"
    IN_THE_PLACE[what](path)
    with in_time(), pytest.raises(StateUnreadable, match=r"state\.parquet"):
        read_state(path)
    with in_time(), pytest.raises(LedgerUnreadable, match=r"state\.parquet"):
        ledger._read(path, SCHEMA)
