"""A table of which the publication sends some rows: ``verify`` compares those, through every layer."""

from __future__ import annotations

import json

import pytest
from pyspark.sql import SparkSession

from omnisupport_ingest.checks.content_checks import no_unresolved_cells
from omnisupport_ingest.layers.scheduling.pending import pending_windows
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.verify.proof import Proof, prove
from omnisupport_ingest_tests.layers.story import CONTRACT
from omnisupport_ingest_tests.recovery.pipeline import run_layers
from omnisupport_ingest_tests.sources.postgres.conftest import source as source
from omnisupport_ingest_tests.sources.postgres.published_facts import publish
from omnisupport_ingest_tests.sources.postgres.range_facts import ask
from omnisupport_ingest_tests.sources.postgres.source_under_test import SOURCE, SourceUnderTest


@pytest.mark.slow
def test_filtered_table_is_proved_and_a_row_that_came_in_without_a_long_value_is_not_until_it_is_read(
    source: SourceUnderTest, spark: SparkSession
) -> None:
    source.sql(
        "CREATE TABLE notes (id bigint PRIMARY KEY, title text, body text)",
        "ALTER TABLE notes ALTER body SET STORAGE EXTERNAL",
        "INSERT INTO notes SELECT n, 'one', repeat('text', 3000) FROM generate_series(95, 105) n",
    )
    publish(source, "TABLE notes WHERE (id < 100)")
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

    def proved() -> Proof:
        return prove(workspace, lambda: spark, advance=advance)

    source.catch_up()
    source.sql("UPDATE notes SET title = 'two'", "UPDATE notes SET id = id + 10 WHERE id = 96")
    proof = proved()
    assert proof.holds and proof.tables["notes"].source_rows == 4
    assert (proof.tables["notes"].current_rows, proof.tables["notes"].deleted_rows) == (4, 1)

    source.sql("UPDATE notes SET id = 1 WHERE id = 101")
    proof = proved()
    assert not proof.holds and proof.tables["notes"].unresolved == 1
    checked = no_unresolved_cells(workspace, spark, source.tables[0])
    assert (checked.passed, checked.numbers) == (False, {"rows_unresolved": 1, "cells_unresolved": 1})

    ask(source, ["1"], ["1"])
    source.catch_up()
    proof = proved()
    assert proof.holds and proof.tables["notes"].current_rows == 5
    assert no_unresolved_cells(workspace, spark, source.tables[0]).passed
