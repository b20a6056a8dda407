"""The longest numbers and the deepest documents of PostgreSQL, from its tables to the dimensions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from psycopg2 import errors
from pyspark.sql import SparkSession

from omnisupport_ingest.contracts.model import Column, Contracts, TableContract
from omnisupport_ingest.lake.checkpoint import Checkpoint
from omnisupport_ingest.layers.dimension import dimensions, net_changes
from omnisupport_ingest.layers.events import deduped, raw
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.windows import without_sentinel
from omnisupport_ingest_tests.foreign_bytes import DEEP
from omnisupport_ingest_tests.sources.postgres.source_under_test import SOURCE, SourceUnderTest, contract

NUMBER = "9" * 100_000
LONGEST = "-" + "9" * 131_072 + "." + "7" * 16_383


def typed(**columns: str) -> TableContract:
    made = contract("things", list(columns))
    return replace(
        made,
        columns=tuple(Column(name, kind, nullable=name != "id") for name, kind in columns.items()),
    )


def through_all_layers(
    source: SourceUnderTest, spark: SparkSession
) -> tuple[list[Checkpoint], dict[str, Any]]:
    """What judging said of each window, and the rows of the dimension by their ids."""
    source.catch_up()
    workspace = Workspace(source.settings, source.home, Contracts(tuple(source.tables)))
    windows = sorted({w for each in source.store.manifests() for w in without_sentinel(each.windows)})
    raw.materialize(workspace, spark, SOURCE, windows, "run")
    judged = deduped.materialize(workspace, spark, SOURCE, windows, "run")
    (table,) = source.tables
    net_changes.materialize(workspace, spark, table, windows, "run")
    dimensions.update(workspace, spark, table, "run")
    snapshot = workspace.dimension(table).open()
    rows = snapshot.read(spark, snapshot.files("")).collect()
    return judged, {str(row["id"]): row.asDict() for row in rows}


def deepest_document(source: SourceUnderTest) -> str:
    """The JSON array nested as deep as the server takes it, which no document of ours would be read at."""
    levels = DEEP
    while True:
        try:
            source.sql(f"SELECT repeat('[', {levels})::text || repeat(']', {levels})::text")
            source.sql(f"SELECT (repeat('[', {levels}) || repeat(']', {levels}))::jsonb")
        except errors.StatementTooComplex:
            levels //= 2
        else:
            assert levels > 2000
            return "[" * levels + "]" * levels


@pytest.mark.slow
def test_a_numeric_and_a_document_of_any_size_are_published_as_they_are(
    source: SourceUnderTest, spark: SparkSession
) -> None:
    deep = deepest_document(source)
    source.sql(
        "CREATE TABLE things"
        " (id bigint PRIMARY KEY, amount numeric, price numeric, document jsonb, note text)",
        f"INSERT INTO things VALUES (1, {NUMBER}, {NUMBER}, '{deep}', 'before')",
    )
    kinds = {
        "id": "bigint",
        "amount": "numeric",
        "price": "numeric(12,2)",
        "document": "jsonb",
        "note": "text",
    }
    source.tables = [typed(**kinds)]
    source.catch_up()
    source.sql(
        f"INSERT INTO things VALUES (2, {LONGEST}, {LONGEST}, '{deep}', 'streamed')",
        "INSERT INTO things VALUES (3, 5, 1.50, '[]', 'plain')",
        "UPDATE things SET note = 'updated' WHERE id = 1",
    )
    judged, rows = through_all_layers(source, spark)
    assert sum(each.quarantined for each in judged) == 0
    assert set(rows) == {"1", "2", "3"}
    for id, number, note in (("1", NUMBER, "updated"), ("2", LONGEST, "streamed")):
        row = rows[id]
        # The column of twelve digits has no room for it; its exact text stands beside it.
        assert (row["amount"], row["price"], row["_cdc_exact"]) == (number, None, {"price": number})
        assert (row["document"], row["note"], row["_cdc_unresolved"]) == (deep, note, [])
    assert (rows["3"]["amount"], str(rows["3"]["price"]), rows["3"]["_cdc_exact"]) == ("5", "1.50", {})
