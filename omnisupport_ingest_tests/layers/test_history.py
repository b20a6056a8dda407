"""Histories and reads of the past, from landed batches through the real layers, held against the oracle."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F

from omnisupport_ingest.cdc.history import history as right_history
from omnisupport_ingest.checks.history_checks import open_rows_are_current_state, versions_do_not_overlap
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.lake.checkpoint import Checkpoint
from omnisupport_ingest.landing.manifest import ChunkSpan
from omnisupport_ingest.layers.dimension import dimensions, net_changes
from omnisupport_ingest.layers.events import deduped, raw
from omnisupport_ingest.layers.histories import history
from omnisupport_ingest.position import LOWEST_ORDINAL, Lsn
from omnisupport_ingest.position import Position as Place
from omnisupport_ingest.read.as_of import (
    At,
    CannotRead,
    NotTakenIn,
    TableIncomplete,
    open_reading,
    read_as_of,
)
from omnisupport_ingest_tests.layers.story import FIRST, SECOND, SOURCE, START, Change, Commit, Story, events
from omnisupport_ingest_tests.oracle.model import Event, Image, Key, Position, TableShape
from omnisupport_ingest_tests.oracle.oracle import current_state, live

SHAPE = TableShape("notes", ("title", "body"))
EMPTY = Commit(5, 0, [])
TOO_LONG = "x" * 21
TOLD = (
    Commit(10, 1, [Change("c", 1, {"title": "one", "body": "long"}), Change("c", 2, {"title": "two"})]),
    Commit(20, 2, [Change("u", 1, {"title": "uno"}, unchanged=("body",)), Change("u", 1, {"title": "eins"})]),
    # Its title breaks a rule of the contract: quarantined.
    Commit(30, 3, [Change("u", 2, {"title": TOO_LONG, "body": "B2"})]),
    Commit(40, 61, [Change("d", 1), Change("c", 9, {"title": "uno"}, unchanged=("body",), moved_from=1)]),
    Commit(50, 62, [Change("d", 2), Change("c", 2, {"title": "again", "body": None})]),
    Commit(60, 63, [Change("t"), Change("c", 3, {"title": "three", "body": "B3"})]),
)
END = 70
Live = dict[int, tuple[tuple[str, str | None], ...]]


def land(story: Story, commits: Iterable[Commit] = TOLD) -> None:
    story.land_chunk(EMPTY)
    story.land_boundary(EMPTY)
    for commit in commits:
        story.land(commit)
    story.land_idle(END)


def take_in(story: Story, spark: SparkSession, *windows: str, replay: bool = False) -> None:
    for layer in (raw, deduped):
        layer.materialize(story.workspace, spark, SOURCE, windows, "run", replay=replay)
    net_changes.materialize(story.workspace, spark, story.contract, windows, "run", replay=replay)
    dimensions.update(story.workspace, spark, story.contract, "run", whole=replay)


def make(story: Story, spark: SparkSession) -> Checkpoint:
    return history.materialize(story.workspace, spark, story.contract, "run")


def versions(story: Story, spark: SparkSession) -> DataFrame:
    snapshot = story.workspace.history(story.contract).open()
    return snapshot.read(spark, snapshot.all_files())


def told_to_oracle(commits: Sequence[Commit] = TOLD) -> list[Event]:
    found = []
    for commit in commits:
        changes = iter(commit.changes)
        for landed in events(commit):
            change = next(changes)
            found.append(
                Event(
                    Position(landed.epoch, landed.commit_lsn, landed.ordinal),
                    landed.op,
                    SHAPE.name,
                    None if change.id is None else (str(change.id),),
                    landed.source_ts,
                    after=change.values if landed.op in "cu" else None,
                    unchanged=frozenset(change.unchanged),
                    moved_from=None if change.moved_from is None else (str(change.moved_from),),
                    quarantined=change.values.get("title") == TOO_LONG,
                )
            )
    return found


def expected(at: Position, all_events: Sequence[Event] | None = None) -> Live:
    """The live rows that the oracle comes to at ``at``, by id, with their known values."""
    known = all_events if all_events is not None else told_to_oracle()
    rows = live(current_state([event for event in known if event.at <= at], SHAPE))
    return {_id(key): _values(row.values) for key, row in rows.items()}


def _id(key: Key) -> int:
    return int(key[0])


def _values(values: Image) -> tuple[tuple[str, str | None], ...]:
    return tuple(sorted(values.items()))


def shown(rows: Sequence[Row]) -> Live:
    """Live rows of a dimension or its history, by id, with their known values."""
    found = {}
    for row in (each for each in rows if not each["_cdc_is_deleted"]):
        assert row["id"] not in found
        found[row["id"]] = _values(
            {name: row[name] for name in SHAPE.columns if name not in row["_cdc_unresolved"]}
        )
    return found


def held_at(rows: Sequence[Row], at: Position) -> list[Row]:
    """The versions that hold at ``at``."""
    return [
        row
        for row in rows
        if tuple(row["_cdc_valid_from_position"]) <= at
        and (row["_cdc_valid_to_position"] is None or at < tuple(row["_cdc_valid_to_position"]))
    ]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Story:
    """Everything landed in order, in every layer, with its history."""
    told = Story(tmp_path_factory.mktemp("history") / "told")
    land(told)
    take_in(told, spark, FIRST, SECOND)
    make(told, spark)
    return told


class TestHistory:
    @pytest.mark.slow
    def test_at_every_position_it_holds_the_rows_that_a_read_as_of_there_gives_and_the_oracle(
        self, story: Story, spark: SparkSession
    ) -> None:
        rows = versions(story, spark).collect()
        for at in sorted({event.at for event in told_to_oracle()}):
            assert shown(held_at(rows, at)) == expected(at)
            place = Place(at.epoch, Lsn(at.commit_lsn), at.ordinal)
            read = read_as_of(story.workspace, spark, [story.contract], place)
            assert shown(read["notes"].collect()) == expected(at)

    @pytest.mark.quick
    def test_its_open_versions_are_the_rows_of_the_dimension_and_none_overlaps(
        self, story: Story, spark: SparkSession
    ) -> None:
        found = open_rows_are_current_state(story.workspace, spark, story.contract)
        assert (found.passed, found.numbers) == (
            True,
            {"open_versions": 1, "keys_different": 0, "compared": 1},
        )
        assert "the rows of the dimension" in found.summary
        found = versions_do_not_overlap(story.workspace, spark, story.contract)
        assert (found.passed, found.numbers) == (True, {"versions": 8, "versions_wrong": 0})

    def test_it_is_not_written_again_while_its_events_are_the_same(
        self, story: Story, spark: SparkSession
    ) -> None:
        before, table = make(story, spark), story.workspace.history(story.contract)
        files = [file.path for file in table.open().all_files()]
        take_in(story, spark, FIRST, SECOND, replay=True)
        after = make(story, spark)
        assert [file.path for file in table.open().all_files()] == files
        assert after.content_hash == before.content_hash
        assert make(story, spark).delta_version == after.delta_version

    @pytest.mark.slow
    def test_events_that_land_late_and_out_of_order_and_twice_give_the_same_history(
        self, story: Story, spark: SparkSession, tmp_path: Path
    ) -> None:
        late = Story(tmp_path / "late")
        late.land(EMPTY, *TOLD[3:5])
        take_in(late, spark, FIRST, SECOND)
        first = make(late, spark)
        # As a second delivery would: below what has been folded and merged.
        for commit in (TOLD[2], TOLD[0], TOLD[5], TOLD[1], TOLD[0]):
            late.land_again(commit)
        late.land_chunk(EMPTY)
        late.land_boundary(EMPTY)
        take_in(late, spark, FIRST, SECOND)
        done = make(late, spark)
        assert done.content_hash == make(story, spark).content_hash
        assert done.content_hash != first.content_hash
        assert done.rows == 8
        assert open_rows_are_current_state(late.workspace, spark, late.contract).passed

    @pytest.mark.slow
    def test_a_dimension_of_other_events_is_not_what_it_is_held_against(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        ahead = Story(tmp_path / "ahead")
        land(ahead, TOLD[:3])
        take_in(ahead, spark, FIRST)
        ahead.land(Commit(80, 65, [Change("u", 1, {"title": "newer"})]))
        for layer in (raw, deduped):
            layer.materialize(ahead.workspace, spark, SOURCE, [SECOND], "run")
        make(ahead, spark)
        behind = open_rows_are_current_state(ahead.workspace, spark, ahead.contract)
        # The last run has an event that the dimension has not, so all is compared though nobody asked.
        assert behind.passed
        assert "the dimension was made from others" in behind.summary
        # Now it is the other way round: the history is the older one.
        ahead.land(Commit(90, 66, [Change("d", 1)]))
        take_in(ahead, spark, SECOND)
        since = open_rows_are_current_state(ahead.workspace, spark, ahead.contract)
        assert (since.passed, since.numbers["open_versions"]) == (True, 1)
        assert "that have not changed since" in since.summary
        older = open_rows_are_current_state(ahead.workspace, spark, ahead.contract, whole=True)
        assert older.passed
        assert "the dimension was made from others" in older.summary
        assert older.numbers == {"open_versions": 2, "keys_different": 0, "compared": 1}


class TestChecksFindMistakes:
    @pytest.fixture
    def told(self, spark: SparkSession, tmp_path: Path) -> Story:
        story = Story(tmp_path / "wrong")
        land(story, TOLD[:3])
        take_in(story, spark, FIRST)
        return story

    def test_before_there_is_a_history_they_say_so_and_make_none(
        self, told: Story, spark: SparkSession
    ) -> None:
        for check in (open_rows_are_current_state, versions_do_not_overlap):
            found = check(told.workspace, spark, told.contract)
            assert found.passed
            assert "not been made yet" in found.summary
        assert not told.workspace.history(told.contract).exists

    def test_a_history_that_stepped_over_withheld_is_found(
        self, told: Story, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def without_withheld(rows: DataFrame, contract: TableContract, *, partitions: int) -> DataFrame:
            return right_history(rows.where(~F.col("withheld")), contract, partitions=partitions)

        monkeypatch.setattr(history, "history", without_withheld)
        make(told, spark)
        found = open_rows_are_current_state(told.workspace, spark, told.contract)
        assert (found.passed, found.numbers["keys_different"]) == (False, 1)

    def test_versions_that_were_never_closed_are_found(
        self, told: Story, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def all_open(rows: DataFrame, contract: TableContract, *, partitions: int) -> DataFrame:
            right = right_history(rows, contract, partitions=partitions)
            never = F.lit(None).cast(right.schema["_cdc_valid_to_position"].dataType)
            return right.withColumn("_cdc_valid_to_position", never)

        monkeypatch.setattr(history, "history", all_open)
        make(told, spark)
        found = versions_do_not_overlap(told.workspace, spark, told.contract)
        assert (found.passed, found.numbers["versions_wrong"]) == (False, 3)


def second(number: float) -> datetime:
    return START + timedelta(seconds=number)


class TestReadingAsOf:
    @pytest.mark.parametrize(
        ("at", "below"),
        [
            (Lsn(30), Place(1, Lsn(31), 0)),
            (Lsn(35), Place(1, Lsn(36), 0)),
            (Place(1, Lsn(10), 0), Place(1, Lsn(10), 1)),
            (second(2), Place(1, Lsn(30), 0)),
            (second(2.5), Place(1, Lsn(30), 0)),
            (second(61).astimezone(UTC), Place(1, Lsn(50), 0)),
        ],
    )
    def test_a_place_stands_for_one_position(self, story: Story, at: At, below: Place) -> None:
        assert open_reading(story.workspace, [story.contract], at).below == below

    @pytest.mark.slow
    def test_an_lsn_is_everything_committed_at_or_below_it(self, story: Story, spark: SparkSession) -> None:
        for lsn in (10, 15, 50):
            read = read_as_of(story.workspace, spark, [story.contract], Lsn(lsn))
            assert shown(read["notes"].collect()) == expected(Position(1, lsn, 1000))

    @pytest.mark.parametrize(
        ("at", "error", "words"),
        [
            (second(-1), TableIncomplete, "has no state at 0/5"),
            (second(500), TableIncomplete, "may still come"),
            (Lsn(3), TableIncomplete, "its history there starts at 0/5"),
            (Lsn(90), TableIncomplete, "has landed up to 0/46 and must pass"),
            (Place(2, Lsn(10), 0), TableIncomplete, "has not been read in epoch 2"),
            (START.replace(tzinfo=None), CannotRead, "no time zone"),
        ],
    )
    def test_a_place_without_a_state_is_refused(
        self, story: Story, at: At, error: type[Exception], words: str
    ) -> None:
        with pytest.raises(error, match=words):
            open_reading(story.workspace, [story.contract], at)

    def test_an_epoch_from_which_nothing_has_landed_is_refused(self, story: Story) -> None:
        with pytest.raises(CannotRead, match=r"Nothing has landed from desk in epoch 9") as refused:
            open_reading(story.workspace, [story.contract], Lsn(10), epoch=9)
        assert "(1)" in refused.value.fix

    @pytest.mark.slow
    def test_a_commit_whose_time_runs_against_the_log_is_not_taken_out_of_its_order(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        told = Story(tmp_path / "clock")
        stepped = (
            Commit(10, 1, [Change("c", 1, {"title": "one"})]),
            Commit(20, 9, [Change("u", 1, {"title": "ahead"})]),
            Commit(30, 3, [Change("u", 1, {"title": "behind"})]),
        )
        land(told, stepped)
        take_in(told, spark, FIRST)
        # At second 5 the third commit's time has passed, but not that of the one before it in the log.
        assert open_reading(told.workspace, [told.contract], second(5)).below == Place(1, Lsn(20), 0)
        read = read_as_of(told.workspace, spark, [told.contract], second(5))
        assert shown(read["notes"].collect()) == {1: (("title", "one"),)}
        make(told, spark)
        (backwards,) = versions(told, spark).where("_cdc_valid_to < _cdc_valid_from").collect()
        assert backwards["title"] == "ahead"
        assert versions_do_not_overlap(told.workspace, spark, told.contract).passed

    def test_what_has_landed_below_and_is_not_in_the_lake_is_waited_for(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        told = Story(tmp_path / "behind")
        with pytest.raises(NotTakenIn, match="Nothing of desk"):
            open_reading(told.workspace, [told.contract], Lsn(10))
        land(told, TOLD[:2])
        take_in(told, spark, FIRST)
        told.land(Commit(80, 65, [Change("d", 1)]))
        told.land_idle(90)
        open_reading(told.workspace, [told.contract], Lsn(79))
        with pytest.raises(NotTakenIn, match="1 batch of desk that landed below 1:0/51:0"):
            open_reading(told.workspace, [told.contract], Lsn(80))

    @pytest.mark.slow
    def test_an_lsn_is_of_the_newest_epoch_that_reached_it_unless_another_is_named(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        told = Story(tmp_path / "epochs")
        land(told, [Commit(10, 1, [Change("c", 1, {"title": "one"})])])
        read = Commit(6, 5, [Change("r", 1, {"title": "read again", "body": None})])
        told.land_chunk(read, epoch=2)
        told.land_boundary(read, epoch=2)
        told.land_idle(40, epoch=2)
        take_in(told, spark, FIRST)
        for epoch, title in ((None, "read again"), (1, "one"), (2, "read again")):
            rows = read_as_of(told.workspace, spark, [told.contract], Lsn(20), epoch=epoch)
            assert dict(shown(rows["notes"].collect())[1])["title"] == title
        # Only the first epoch's stream got there.
        assert open_reading(told.workspace, [told.contract], Lsn(60)).below.epoch == 1
        make(told, spark)
        assert [
            (row["_cdc_opened_by"], row["_cdc_closed_by"])
            for row in versions(told, spark).orderBy("_cdc_valid_from_position").collect()
        ] == [("c", "b"), ("r", None)]

    @pytest.mark.slow
    def test_rows_that_an_old_snapshot_read_again_later_hide_no_transaction(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        """Earlier versions landed them with the clock of the read at the LSN of the snapshot."""
        story = Story(tmp_path / "again")
        land_snapshot(story, "others", (12, 20, 10), {0: (1,)})
        land(story, [Commit(30, 20, [Change("c", 3, {"title": "three"})])])
        land_snapshot_rows(story, "others", (20, 45, 50), 1, (2,))
        story.land(Commit(80, 55, [Change("c", 5, {"title": "five"})]))
        story.land_idle(90)
        take_in(story, spark, FIRST)
        assert open_reading(story.workspace, [story.contract], second(35)).below == Place(1, Lsn(80), 0)

    @pytest.mark.slow
    def test_a_snapshot_that_is_read_again_is_one_step(self, spark: SparkSession, tmp_path: Path) -> None:
        story = Story(tmp_path / "step")
        land(story, [Commit(10, 1, [Change("c", id, {"title": "one"}) for id in (1, 2)])])
        # Capture was started again while the server was idle: the same LSN, a later clock.
        land_snapshot(story, "notes", (END, END, 10), {0: (1,), 1: (2,)}, clocks={1: 20})
        story.land_idle(90)
        take_in(story, spark, FIRST)
        before = Place(1, Lsn(END), LOWEST_ORDINAL)
        for moment in (second(5), second(10), second(15)):
            assert open_reading(story.workspace, [story.contract], moment).below == before
        rows = read_as_of(story.workspace, spark, [story.contract], second(15))["notes"].collect()
        assert sorted(shown(rows)) == [1, 2]
        for ordinal in (-100, -99, -98):
            with pytest.raises(TableIncomplete, match="a snapshot of it was being read"):
                open_reading(story.workspace, [story.contract], Place(1, Lsn(END), ordinal))

    @pytest.mark.slow
    def test_a_time_before_a_new_epoch_is_of_the_epoch_whose_watermark_covers_it(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        story = Story(tmp_path / "idle")
        land(story, [Commit(10, 1, [Change("c", 1, {"title": "one"})])])
        story.land_keepalive(80, 50)
        read = Commit(100, 61, [Change("r", 1, {"title": "read again", "body": None})])
        story.land_chunk(read, epoch=2)
        story.land_boundary(read, epoch=2)
        story.land_idle(120, epoch=2)
        take_in(story, spark, FIRST, SECOND)
        assert open_reading(story.workspace, [story.contract], second(30)).below == Place(1, Lsn(80), 0)
        with pytest.raises(TableIncomplete, match="in epoch 2: its history there starts"):
            open_reading(story.workspace, [story.contract], second(55))


def land_snapshot(
    story: Story,
    table: str,
    read: tuple[int, int, int],
    chunks: dict[int, tuple[int, ...]],
    clocks: dict[int, int] | None = None,
) -> None:
    """Land a snapshot: ``read`` is low, high and second, ``chunks`` the ids by chunk.

    ``clocks``: the seconds of chunks that were read at other times.
    """
    low, high, at = read
    for number, ids in chunks.items():
        land_snapshot_rows(story, table, (low, high, (clocks or {}).get(number, at)), number, ids)
    land_snapshot_rows(story, table, read, len(chunks), None)


def land_snapshot_rows(
    story: Story, table: str, read: tuple[int, int, int], number: int, ids: tuple[int, ...] | None
) -> None:
    """Land chunk ``number`` with rows of ``ids``; None: the snapshot end."""
    low, high, at = read
    span = ChunkSpan("again", table, number, 1, Lsn(low), Lsn(high), second(at), boundary=ids is None)
    changes = [Change("b")] if ids is None else [Change("r", id, {"title": "read"}) for id in ids]
    rows = [
        event._replace(
            ordinal=-100 if ids is None else -99 + number,
            source_table=table,
            chunk_id=None if ids is None else span.id,
        )
        for event in events(Commit(low, at, changes))
    ]
    story.land_span(rows, span)
