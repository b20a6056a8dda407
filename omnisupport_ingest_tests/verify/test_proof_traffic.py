"""``verify`` against a real source that changes while it is compared: no alarm, and no fault overlooked."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from omnisupport_ingest.layers.scheduling.pending import pending_windows
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.verify.proof import Proof, prove
from omnisupport_ingest_tests.layers.story import CONTRACT
from omnisupport_ingest_tests.recovery.pipeline import run_layers
from omnisupport_ingest_tests.sources.postgres.conftest import source as source
from omnisupport_ingest_tests.sources.postgres.source_under_test import SOURCE, SourceUnderTest

KEYS = 12
_UNLESS_THERE = "ON CONFLICT DO NOTHING"


class Traffic:
    """Statements on ``notes``, drawn from a seed: long values that updates do not send, keys that change."""

    def __init__(self, source: SourceUnderTest, seed: int) -> None:
        self._source, self._random = source, random.Random(seed)

    def run(self, statements: int, *, truncate: bool = True) -> None:
        self._source.sql(*(self._statement(truncate) for _ in range(statements)))

    def _statement(self, truncate: bool) -> str:
        chosen, other = (self._random.randint(1, KEYS) for _ in range(2))
        title = f"t{self._random.randint(0, 99)}"
        free = f"WHERE id = {chosen} AND NOT EXISTS (SELECT 1 FROM notes WHERE id = {other})"
        kinds = {
            f"UPDATE notes SET title = '{title}' WHERE id = {chosen}": 6,
            f"UPDATE notes SET id = {other} {free}": 3,
            f"INSERT INTO notes VALUES ({chosen}, '{title}', repeat('{title}', 3000)) {_UNLESS_THERE}": 4,
            f"DELETE FROM notes WHERE id = {chosen}": 2,
            "TRUNCATE notes": 0.3 if truncate else 0,
        }
        (statement,) = self._random.choices(list(kinds), list(kinds.values()))
        return statement


@pytest.mark.slow
def test_verify_under_traffic_finds_a_wrong_row_and_nothing_else(
    source: SourceUnderTest, spark: SparkSession
) -> None:
    source.sql(
        "CREATE TABLE notes (id bigint PRIMARY KEY, title text, body text)",
        "ALTER TABLE notes ALTER body SET STORAGE EXTERNAL",
        f"INSERT INTO notes SELECT n, 'one', repeat('text', 3000) FROM generate_series(1, {KEYS}) n",
        "INSERT INTO notes VALUES (100, 'quiet', 'quiet'), (101, 'moves', 'moves')",
    )
    folder = source.home_folder.parent / "contracts"
    folder.mkdir()
    contract = CONTRACT | {"x-cdc": CONTRACT["x-cdc"] | {"source": SOURCE}}
    (folder / "notes.json").write_text(json.dumps(contract))
    source.overrides["contracts_dir"] = folder
    workspace = Workspace.open(source.settings)
    source.tables = list(workspace.contracts.of_source(SOURCE))
    traffic = Traffic(source, seed=11)

    def take_in() -> None:
        source.catch_up()
        while windows := pending_windows(workspace, SOURCE).windows:
            run_layers(workspace, spark, windows, SOURCE)

    def proved(*, spoiled: bool = False) -> Proof:
        """Compare while the source goes on: what the dimension shows is beyond the LSN by then."""
        moved = False

        def advance(_lsn: Lsn) -> None:
            nonlocal moved
            if not moved:
                traffic.run(25, truncate=not spoiled)
                source.sql("UPDATE notes SET title = title || '.' WHERE id = 101")
                moved = True
            take_in()
            if spoiled:
                _spoil(workspace)

        found = prove(workspace, lambda: spark, advance=advance)
        assert found.tables["notes"].forwarded > 1
        return found

    take_in()
    asked = 0

    def never_idle(_lsn: Lsn) -> None:
        """Take in what has landed; then more lands, as always while the source has traffic."""
        nonlocal asked
        asked += 1
        assert asked <= 4, "the proof waits for what lands after the LSN"
        take_in()
        source.sql(f"UPDATE notes SET title = 'more {asked}' WHERE id = 100")
        source.catch_up()

    assert prove(workspace, lambda: spark, advance=never_idle).holds
    assert not pending_windows(workspace, SOURCE).nothing
    for _ in range(4):
        proof = proved()
        assert proof.holds, proof
        traffic.run(10)
    source.sql(
        "INSERT INTO notes VALUES (100, 'quiet', 'quiet'), (101, 'moves', 'moves') ON CONFLICT DO NOTHING"
    )
    proof = proved(spoiled=True)
    assert not proof.holds
    assert {each.key: each.columns for each in proof.tables["notes"].examples} == {
        "100": ("body",),
        "101": ("body",),
    }


def _spoil(workspace: Workspace) -> None:
    """Change the text of two rows of the dimension, one that has moved on and one that has not."""
    (contract,) = workspace.contracts.of_source(SOURCE)
    for file in workspace.dimension(contract).open().all_files():
        table = pq.read_table(file.uri, partitioning=None)
        rows = [row | ({"body": "spoiled"} if row["id"] >= 100 else {}) for row in table.to_pylist()]
        pq.write_table(pa.Table.from_pylist(rows, table.schema), Path(file.uri))
