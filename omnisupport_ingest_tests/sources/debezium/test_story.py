"""Recorded files through every layer: the dimensions are what the recorded SQL left, as far as told."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from omnisupport_ingest.lake.checkpoint import Checkpoint
from omnisupport_ingest.sources.debezium.handling import Handling
from omnisupport_ingest_tests.sources.debezium.recorded import DEFAULTS, STRING_MODES, STRINGS, Recorder

RECORDED = {"transaction": (DEFAULTS, Handling()), "lsn": (STRINGS, STRING_MODES)}
"""Order → the file that has it, and how its connector wrote values."""

UPDATED = "2026-01-02 03:04:05.678901"
Whole = Callable[[str], tuple[Recorder, Checkpoint]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Whole:
    """By order: the home that the whole file landed in at once, and the checkpoint of its window."""

    @cache
    def made(order: str) -> tuple[Recorder, Checkpoint]:
        path, handling = RECORDED[order]
        recorder = Recorder(tmp_path_factory.mktemp("whole") / order, handling=handling)
        recorder.land(path)
        (judged,) = recorder.run(spark)
        return recorder, judged

    return made


def alive(rows: dict[tuple[Any, ...], dict[str, Any]]) -> set[tuple[Any, ...]]:
    return {key for key, row in rows.items() if not row["_cdc_is_deleted"]}


@pytest.mark.slow
@pytest.mark.parametrize("order", ["transaction", "lsn"])
def test_the_dimensions_are_what_the_sql_left(whole: Whole, spark: SparkSession, order: str) -> None:
    recorder, judged = whole(order)
    (manifest,) = recorder.inlet.store.manifests()
    assert (judged.raw, judged.duplicates, judged.quarantined) == (manifest.rows, 0, 0)

    customers = recorder.state(spark, "customers")
    assert set(customers) == {(id,) for id in (1, 2, 3, 4, 5, 10, 11, 20, 22, 24, 30)}
    assert alive(customers) == set()
    assert (customers[1,]["status"], customers[1,]["name"]) == ("x", "Name 1")
    assert (customers[3,]["org_id"], customers[3,]["full_name"]) == (5_000_000_000, "Name 3")
    assert customers[1,]["updated_at"] == UPDATED

    types = recorder.state(spark, "all_types")
    assert alive(types) == {(id,) for id in (1, 3, 4, 5, 6)}
    first = types[1,]
    assert (first["t"], first["jb"]) == ("changed", '{"a": 2, "z": 1, "new": true}')
    assert bytes(first["by"]) == bytes.fromhex("deadbeef00ff")
    assert (str(first["n10_2"]), first["n"]) == ("12345678.90", "123456789.123456789012345678")
    assert (first["ia"], str(first["d"])) == ([1, 2, None], "2026-02-28")
    assert (types[4,]["f4"], types[5,]["i8"]) == (float("-inf"), -(2**63))

    compkey = recorder.state(spark, "compkey")
    assert alive(compkey) == {(number, "bulk") for number in range(111, 161)}
    assert compkey[160, "bulk"]["c"] == "row 160"
    assert compkey[105, "bulk"]["_cdc_is_deleted"]
    assert alive(recorder.state(spark, "uidx")) == set()
    assert {key: row["a"] for key, row in recorder.state(spark, "gen").items()} == {(1,): 22}
    assert alive(recorder.state(spark, "toasty_full")) == set()

    moved = recorder.state(spark, "toasty")[2,]
    assert moved["_cdc_is_deleted"]
    if order == "transaction":
        # The unsent column came along with the key.
        assert (len(moved["big"]), moved["big"][-1], moved["small"]) == (9601, "x", "v1")
    else:
        # Without total_order nothing says surely where the old row stands, so nothing is guessed.
        assert (moved["big"], moved["_cdc_unresolved"]) == (None, ["big"])


@pytest.mark.slow
def test_the_same_file_twice_and_overlapping_ones_change_nothing(
    whole: Whole, tmp_path: Path, spark: SparkSession
) -> None:
    tables = ("customers", "toasty")
    recorder, judged = whole("transaction")
    again = Recorder(tmp_path, *tables)
    again.land(DEFAULTS)
    assert again.land(DEFAULTS).already_landed
    overlap = again.land_lines("overlap.jsonl", DEFAULTS.read_bytes().splitlines()[20:200])
    (overlapped,) = again.run(spark)
    assert overlapped.deduped == judged.deduped
    assert overlapped.duplicates == overlap.manifest.rows > 60
    for table in tables:
        assert again.state(spark, table) == recorder.state(spark, table)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("order", "seed"), [pytest.param("transaction", 1, marks=pytest.mark.slow), ("lsn", 2)]
)
def test_shuffled_files_in_any_order_leave_the_same_state(
    whole: Whole, tmp_path: Path, spark: SparkSession, order: str, seed: int
) -> None:
    tables = ("customers", "toasty")
    recorder, judged = whole(order)
    path, handling = RECORDED[order]
    chance = random.Random(seed)
    lines = path.read_bytes().splitlines()
    lines += chance.sample(lines, len(lines) // 3)
    chance.shuffle(lines)
    torn = Recorder(tmp_path, *tables, handling=handling)
    cuts = sorted(chance.sample(range(1, len(lines)), 3))
    for number, (start, end) in enumerate(zip([0, *cuts], [*cuts, len(lines)], strict=True)):
        torn.land_lines(f"{number}.jsonl", lines[start:end])
        if number == 1:
            # What has come so far is taken in; the rest arrives after it.
            torn.run(spark)
    (found,) = torn.run(spark)
    assert found.deduped == judged.deduped
    for table in tables:
        assert torn.state(spark, table) == recorder.state(spark, table)
