"""What is on its way is never compared: it is waited for, and named if it does not come."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from omnisupport_ingest.contracts.load import load_contracts
from omnisupport_ingest.equality.standing import Comparable, NotComparable, comparable
from omnisupport_ingest.landing.lost_changes import LostChanges
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.read.as_of import TableIncomplete
from omnisupport_ingest_tests.layers.story import CONTRACT, FIRST, SECOND, SOURCE, Change, Commit, Story
from omnisupport_ingest_tests.recovery.pipeline import run_layers

READ = Commit(5, 1, [Change("r", n, {"title": "one", "body": "text"}) for n in range(1, 5)])


def test_a_dimension_is_compared_when_it_holds_everything_below_the_lsn(
    tmp_path: Path, spark: SparkSession
) -> None:
    story = Story(tmp_path)
    story.store.begin_epoch("the first one", None)

    def at(lsn: int) -> Comparable:
        return comparable(story.workspace, story.contract, Lsn(lsn), time.monotonic())

    def refused(lsn: int, why: str) -> None:
        with pytest.raises((NotComparable, TableIncomplete), match=why):
            at(lsn)

    def take_in() -> None:
        run_layers(story.workspace, spark, [FIRST], SOURCE)

    refused(6, "landing is at nothing, and the source at 0/6")
    story.land_chunk(READ)
    story.land_boundary(READ)
    story.land(Commit(10, 2, [Change("u", 1, {"title": "two", "body": "text"})]))
    refused(20, "landing is at 0/A, and the source at 0/14")
    refused(10, "is not there yet")
    take_in()
    assert at(10).moved == (("1",),), "its update is at the LSN"
    story.land(Commit(20, 3, [Change("u", 2, {"title": "two", "body": "text"})]))
    refused(20, "1 batch with changes of it before 0/14 is not in the dimension yet")
    assert at(10).moved == (("1",),), "what is above the LSN and not shown is no matter"
    take_in()
    assert set(at(10).moved) == {("1",), ("2",)} and at(20).moved == (("2",),)

    story.land(Commit(25, 61, [Change("u", 3, {"title": "two", "body": "text"})]))
    run_layers(story.workspace, spark, [FIRST, SECOND], SOURCE)
    newer = at(25)
    assert newer.moved == (("3",),)
    assert len(newer.version.accepted) == 1, "windows without an event at the LSN or above are not read"
    assert set(newer.version.accepted) < set(at(10).version.accepted)

    story.land(Commit(30, 4, [Change("t")]))
    take_in()
    refused(20, "truncated or read again while it was compared")
    LostChanges(story.store.folder, 1).add(story.contract.name, "was out", Lsn(12))
    refused(30, "may be missing")

    document = CONTRACT | {"x-cdc": CONTRACT["x-cdc"] | {"version": "1.1.0"}}
    story.write_contract(document)
    story.workspace = replace(story.workspace, contracts=load_contracts(story.contracts))
    refused(30, "its contract is new")
