"""Values that no type holds, in files: their rows go to quarantine, the rest goes on."""

from __future__ import annotations

import hashlib
import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from omnisupport_ingest.sources.manifests.land import Inlet, land
from omnisupport_ingest.sources.manifests.seed_manifest import load_manifest
from omnisupport_ingest_tests.foreign_bytes import DEEP, Raw, text_of
from omnisupport_ingest_tests.sources.debezium.recorded import SOURCE, START, Recorder
from omnisupport_ingest_tests.sources.debezium.told import envelope

LONG = "9" * 5000
NUMERIC = "8" * 100_000
NESTED = "[" * DEEP + "]" * DEEP


def reasons(recorder: Recorder, spark: SparkSession) -> dict[str, list[str]]:
    """Of each quarantined event its key, with the reason and the broken rules."""
    snapshot = recorder.workspace.quarantine(SOURCE).open()
    files = [path for window in snapshot.windows() for path in snapshot.files(window)]
    rows = snapshot.read(spark, files).select("key", "reason", "rules").collect()
    return {row["key"]: [row["reason"], *row["rules"]] for row in rows}


@pytest.mark.slow
def test_poison_in_a_file_of_events_stops_neither_its_window_nor_the_files_after_it(
    tmp_path: Path, spark: SparkSession
) -> None:
    recorder = Recorder(tmp_path, "all_types")

    def line(id: int, lsn: int, **values: Any) -> bytes:
        return text_of(envelope("c", {"id": id, **values}, lsn=lsn, order=1, table="all_types")).encode()

    recorder.land_lines(
        "poison.jsonl",
        [
            line(1, 1000, i8=LONG),
            line(2, 1001, i8=Raw(LONG)),
            line(3, 1002, i8="0" * 5000 + "7"),
            line(4, 1003, n=Raw(NUMERIC), n10_2=Raw(NUMERIC)),
            line(5, 1004, jb=NESTED, t="plain"),
            line(6, 1005, n="9" * 140_000),
        ],
    )
    recorder.land_lines("after.jsonl", [line(7, 1006, t="after")])
    (judged,) = recorder.run(spark)
    assert (judged.raw, judged.deduped, judged.quarantined) == (7, 4, 3)
    assert reasons(recorder, spark) == {
        '["1"]': ["row_rule", "i8:type"],
        '["2"]': ["row_rule", "i8:type"],
        '["6"]': ["row_rule", "n:type"],
    }
    rows = {key: row for (key,), row in recorder.state(spark, "all_types").items()}
    assert (rows[3]["i8"], rows[4]["n"], rows[4]["n10_2"]) == (7, NUMERIC, None)
    assert (rows[5]["jb"], rows[5]["t"], rows[7]["t"]) == (NESTED, "plain", "after")
    again = recorder.run(spark)
    assert [each.content_hash for each in again] == [judged.content_hash]


@pytest.mark.slow
def test_poison_in_a_seed_file_goes_to_quarantine_row_by_row(tmp_path: Path, spark: SparkSession) -> None:
    recorder = Recorder(tmp_path, "all_types")
    rows = [
        {"id": 1, "i8": Raw(LONG)},
        {"id": 2, "i8": LONG},
        {"id": 3, "n": Raw(NUMERIC)},
        {"id": 4, "t": "x"},
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(text_of(row) + "\n" for row in rows))
    document = {
        "name": "seed",
        "description": "Rows.",
        "owner": "team:tests",
        "license": "CC0-1.0",
        "load_mode": "full_snapshot",
        "contract": {"source": SOURCE, "schema": "public", "table": "all_types", "version": "1.0.0"},
        "files": [{"path": data.name, "sha256": hashlib.sha256(data.read_bytes()).hexdigest(), "rows": 4}],
        "gates": {
            "checksum": "reject",
            "row_count": "reject",
            "schema": "reject",
            "unknown_column": "reject",
            "row": "quarantine",
        },
    }
    path = tmp_path / "seed.json"
    path.write_text(json.dumps(document))
    store, grid = recorder.workspace.landing(SOURCE), recorder.workspace.grid
    seed = load_manifest(path, recorder.workspace.contracts)
    land(seed, Inlet(store, grid, clock=lambda: START + timedelta(hours=1)))
    (judged,) = recorder.run(spark)
    assert judged.quarantined == 2
    assert set(reasons(recorder, spark)) == {'["1"]', '["2"]'}
    dimension = recorder.state(spark, "all_types")
    assert (dimension[3,]["n"], dimension[4,]["t"]) == (NUMERIC, "x")
