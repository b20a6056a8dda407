"""A proof that was asked for before the first snapshot: no state of the table at that LSN can be told."""

from __future__ import annotations

import json

import pytest
from pyspark.sql import SparkSession

from omnisupport_ingest.checks.lake_checks import tables_complete
from omnisupport_ingest.layers.scheduling.pending import pending_windows
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.read.as_of import TableIncomplete
from omnisupport_ingest.verify.proof import prove
from omnisupport_ingest_tests.layers.story import CONTRACT
from omnisupport_ingest_tests.recovery.pipeline import run_layers
from omnisupport_ingest_tests.sources.postgres.conftest import source as source
from omnisupport_ingest_tests.sources.postgres.source_under_test import SOURCE, SourceUnderTest


@pytest.mark.slow
def test_verify_refuses_a_table_whose_history_starts_later_and_proves_it_the_next_time(
    source: SourceUnderTest, spark: SparkSession
) -> None:
    source.sql("CREATE TABLE notes (id bigint PRIMARY KEY, title text, body text)")
    source.sql("INSERT INTO notes VALUES (1, 'one', 'text')")
    folder = source.home_folder.parent / "contracts"
    folder.mkdir()
    contract = CONTRACT | {"x-cdc": CONTRACT["x-cdc"] | {"source": SOURCE}}
    (folder / "notes.json").write_text(json.dumps(contract))
    source.overrides["contracts_dir"] = folder
    workspace = Workspace.open(source.settings)
    source.tables = list(workspace.contracts.of_source(SOURCE))

    def advance(_lsn: Lsn) -> None:
        source.catch_up()
        if windows := pending_windows(workspace, SOURCE).windows:
            run_layers(workspace, spark, windows, SOURCE)

    with pytest.raises(TableIncomplete, match=r"Table notes has no state at .* its history there starts at"):
        prove(workspace, lambda: spark, advance=advance)
    assert {name: each.passed for name, each in tables_complete(workspace, SOURCE).items()} == {"notes": True}

    source.sql("UPDATE notes SET title = 'two'")
    proof = prove(workspace, lambda: spark, advance=advance)
    assert proof.holds
    assert proof.tables["notes"].source_rows == 1
