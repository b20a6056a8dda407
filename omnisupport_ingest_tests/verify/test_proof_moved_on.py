"""``verify`` where a table has moved on: it reads what people read, and raises no alarm for what is new."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from omnisupport_ingest.landing.epochs import EpochFacts, EpochRecord, write_epoch
from omnisupport_ingest.layers.events import deduped, raw
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.read.compare import Comparison
from omnisupport_ingest.sources.postgres.snapshot.comparison_rows import WrittenRows
from omnisupport_ingest.verify.proof import _compare, _Expected, events_per_table
from omnisupport_ingest_tests.layers.story import FIRST, SECOND, SOURCE, START, Change, Commit, Story
from omnisupport_ingest_tests.layers.three_tables import ThreeTables
from omnisupport_ingest_tests.recovery.pipeline import run_layers

EMPTY = Commit(5, 0, [])
LSN = 50
"""Where the source is compared; all that ``AT_LSN`` came from lies below."""

BEGIN = Commit(
    10,
    1,
    [Change("c", id, {"title": title, "body": f"text of {title}"}) for id, title in enumerate("abcdef", 1)],
)
AT_LSN = [{"id": str(id), "title": title, "body": f"text of {title}"} for id, title in enumerate("abcdef", 1)]

SINCE = [
    Commit(60, 2, [Change("u", 1, {"title": "A"}, unchanged=("body",))]),
    Commit(61, 2, [Change("d", 2)]),
    Commit(62, 3, [Change("c", 7, {"title": "g", "body": None})]),
    # A key change that does not send the long text, twice in a row, and a key that is taken again.
    Commit(63, 61, [Change("d", 3), Change("c", 8, {"title": "c"}, unchanged=("body",), moved_from=3)]),
    Commit(64, 62, [Change("d", 8), Change("c", 9, {"title": "C"}, unchanged=("body",), moved_from=8)]),
    Commit(65, 63, [Change("c", 3, {"title": "new", "body": "new"})]),
]
WITHHELD = Commit(70, 64, [Change("u", 4, {"title": "x" * 21}, unchanged=("body",))])
TRUNCATE = [Commit(80, 65, [Change("t")]), Commit(81, 65, [Change("c", 1, {"title": "after", "body": None})])]


@pytest.fixture
def story(tmp_path: Path, spark: SparkSession) -> Story:
    story = Story(tmp_path / "told")
    facts = EpochFacts("7001", 1, "slot", Lsn(0), "desk", "18.4")
    write_epoch(story.store.folder / "epochs", EpochRecord(1, "first start", START, facts))
    story.land_chunk(EMPTY)
    story.land_boundary(EMPTY)
    story.land(BEGIN)
    return story


def publish(story: Story, spark: SparkSession, *commits: Commit) -> None:
    if commits:
        story.land(*commits)
    run_layers(story.workspace, spark, [FIRST, SECOND])


def compared(
    story: Story,
    spark: SparkSession,
    rows: Sequence[Mapping[str, str | None]] = AT_LSN,
    *,
    below: str | None = None,
    sample: int | None = None,
) -> Comparison:
    """What ``verify`` finds when the source has ``rows`` at ``LSN``."""
    folder = Path(tempfile.mkdtemp(dir=story.workspace.home.run))
    path = folder / "notes.parquet"
    schema = pa.schema([(name, pa.string()) for name in ("id", "title", "body")])
    pq.write_table(pa.Table.from_pylist(list(rows), schema), path)
    expected = _Expected(story.contract, path, WrittenRows(len(rows), len(rows), len(rows), below))
    return _compare(story.workspace, lambda: spark, expected, Lsn(LSN), sample)


def spoil(story: Story, id: int, column: str, value: Any) -> None:
    """Change one cell of the newest files of the dimension; their log stays as it is."""
    (file,) = story.workspace.dimension(story.contract).open().all_files()
    table = pq.read_table(file.uri, partitioning=None)
    rows = table.to_pylist()
    assert any(row["id"] == id for row in rows)
    spoiled = [row | {column: value} if row["id"] == id else row for row in rows]
    pq.write_table(pa.Table.from_pylist(spoiled, table.schema), file.uri)


def named(found: Comparison) -> dict[str, tuple[str, ...]]:
    return {each.key: each.columns for each in found.examples}


def test_traffic_alone_is_no_difference_and_wrong_rows_are_found_moved_on_or_not(
    story: Story, spark: SparkSession
) -> None:
    publish(story, spark, *SINCE)
    found = compared(story, spark)
    assert found.holds, found
    assert (found.source_rows, found.current_rows, found.forwarded) == (6, 7, 6)

    spoil(story, 5, "title", "not moved")
    spoil(story, 1, "title", "moved")
    spoil(story, 9, "body", None)
    spoil(story, 7, "_cdc_is_deleted", True)
    spoil(story, 2, "_cdc_is_deleted", False)
    assert named(compared(story, spark)) == {
        "5": ("title",),
        "1": ("title",),
        "9": ("body",),
        "7": ("deleted in the lake",),
        "2": ("not in the source",),
    }


def test_a_row_that_the_dimension_has_twice_is_found_moved_on_or_not(
    story: Story, spark: SparkSession
) -> None:
    publish(story, spark, *SINCE)
    (file,) = story.workspace.dimension(story.contract).open().all_files()
    table = pq.read_table(file.uri, partitioning=None)
    pq.write_table(pa.concat_tables([table, table.filter(pc.is_in(table["id"], pa.array([1, 5])))]), file.uri)
    assert named(compared(story, spark)) == {"1": ("twice in the lake",), "5": ("twice in the lake",)}


def test_a_row_that_was_wrong_before_is_found_when_an_event_leaves_its_fault_there(
    story: Story, spark: SparkSession
) -> None:
    """The text of row 1 is not sent again, so it is the source's alone that tells."""
    publish(story, spark, *SINCE)
    changed = [{**row, "body": "another"} if row["id"] == "1" else row for row in AT_LSN]
    assert named(compared(story, spark, changed)) == {"1": ("body",)}


def test_an_event_withheld_since_leaves_its_row_unresolved_and_showing_the_older_value_is_a_difference(
    story: Story, spark: SparkSession
) -> None:
    publish(story, spark, WITHHELD)
    found = compared(story, spark)
    assert (found.differences, found.forwarded, found.unresolved, found.holds) == (0, 1, 1, False), found
    # Of a sample, a key that has events is left out.
    assert compared(story, spark, below="ffffffff", sample=5).holds
    spoil(story, 4, "_cdc_unresolved", [])
    spoil(story, 4, "title", "d")
    assert named(compared(story, spark)) == {"4": ("title",)}


def test_a_truncate_since_is_no_difference_and_a_row_that_outlives_it_is(
    story: Story, spark: SparkSession
) -> None:
    publish(story, spark, *TRUNCATE)
    found = compared(story, spark)
    assert found.holds and found.current_rows == 1, found
    # Of a sample, a key that has events is left out, and what the truncate did to the others is seen.
    assert compared(story, spark, below="ffffffff", sample=5).holds
    spoil(story, 6, "_cdc_is_deleted", False)
    assert named(compared(story, spark)) == {"6": ("not in the source",)}
    assert named(compared(story, spark, below="ffffffff", sample=5)) == {"6": ("not in the source",)}


def test_an_event_withheld_after_a_truncate_leaves_its_row_unresolved(
    story: Story, spark: SparkSession
) -> None:
    publish(
        story, spark, *TRUNCATE, Commit(90, 66, [Change("u", 1, {"title": "x" * 21}, unchanged=("body",))])
    )
    found = compared(story, spark)
    assert (found.differences, found.unresolved, found.holds) == (0, 1, False), found


def test_what_is_judged_and_not_in_the_dimension_yet_is_no_difference(
    story: Story, spark: SparkSession
) -> None:
    publish(story, spark, SINCE[0])
    story.land(*SINCE[1:])
    for layer in (raw, deduped):
        layer.materialize(story.workspace, spark, SOURCE, [FIRST, SECOND], "run")
    found = compared(story, spark)
    assert found.holds and (found.current_rows, found.forwarded) == (6, 1), found
    # Made from files that a replay has replaced since.
    deduped.materialize(story.workspace, spark, SOURCE, [FIRST], "run", replay=True)
    found = compared(story, spark)
    assert found.holds and found.forwarded == 1, found


def test_events_that_landed_and_are_not_judged_yet_do_not_unbalance_the_counts(
    story: Story, spark: SparkSession
) -> None:
    publish(story, spark, SINCE[0])
    before = events_per_table(story.workspace, SOURCE)["public.notes"]
    assert before.raw == before.deduped + before.duplicates + before.quarantined == 8
    story.land(*SINCE[1:])
    raw.materialize(story.workspace, spark, SOURCE, [FIRST, SECOND], "run")
    assert events_per_table(story.workspace, SOURCE)["public.notes"] == before
    # Where values may have landed encrypted, copies are compared by more than their hashes.
    story.workspace.subjects.keys_of([(SOURCE, "customer", "1")])
    assert events_per_table(story.workspace, SOURCE)["public.notes"] == before
    assert not [*story.workspace.home.run.glob("proof-*")]


def test_events_of_tables_of_one_name_in_two_schemas_are_counted_apart(
    tmp_path: Path, spark: SparkSession
) -> None:
    story = ThreeTables(tmp_path)
    document = json.loads((story.contracts / "notes.json").read_text())
    document["x-cdc"] |= {"schema": "hr", "name": "hr_notes"}
    (story.contracts / "hr_notes.json").write_text(json.dumps(document))
    story.reopen()
    story.land_of(1, "notes", "hr.notes")
    story.land_of(2, "hr.notes")
    for layer in (raw, deduped):
        layer.materialize(story.workspace, spark, SOURCE, [FIRST], "run")
    counted = events_per_table(story.workspace, SOURCE)
    assert (counted["public.notes"].raw, counted["public.notes"].deduped) == (1, 1)
    assert (counted["hr.notes"].raw, counted["hr.notes"].deduped) == (2, 2)
