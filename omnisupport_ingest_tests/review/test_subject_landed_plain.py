"""A subject whose first values landed plain: what its erasure leaves of these, and how it ends."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from omnisupport_ingest.contracts.subject_keys import FILE, SubjectKeys
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.layers.histories import history
from omnisupport_ingest.read.subject_traces import named_in_lake
from omnisupport_ingest.review.erasing import key_text
from omnisupport_ingest.review.subject_erasure import SubjectErased, erase_subject
from omnisupport_ingest.sources.encrypting import EncryptedLanding
from omnisupport_ingest_tests.layers.story import (
    CONTRACT,
    FIRST,
    SECOND,
    SOURCE,
    THIRD,
    Change,
    Commit,
    Story,
)
from omnisupport_ingest_tests.recovery.pipeline import open_workspace, run_layers

PLAIN, ENCRYPTED = "Ada in plain", "Ada encrypted"
CELLS, IMAGES = "cells that can be read", "images that landed plain"


@pytest.fixture
def story(tmp_path: Path, spark: SparkSession) -> Story:
    """Row 1 landed plain, and was updated since the contract says encrypted."""
    story = Story(tmp_path / "told")
    story.land(Commit(10, 1, [Change("c", 1, {"title": "one", "body": PLAIN})]))
    run(story, spark)
    encrypted = copy.deepcopy(CONTRACT)
    encrypted["x-cdc"] |= {
        "pii": {"body": {"policy": "keep", "note": "A test."}},
        "at_rest": {"pii": "encrypted"},
    }
    story.write_contract(encrypted)
    story.workspace = open_workspace(tmp_path / "told")
    home = story.workspace.home
    landing = EncryptedLanding(SOURCE, SubjectKeys(home.path / FILE), lambda: [story.contract])
    story.store = LandingStore(home.landing, SOURCE, as_landed=landing, divisions_as_landed=landing.divisions)
    story.land(Commit(20, 61, [Change("u", 1, {"title": "one", "body": ENCRYPTED})]))
    run(story, spark)
    return story


def run(story: Story, spark: SparkSession, windows: Sequence[str] = (FIRST, SECOND, THIRD)) -> None:
    run_layers(story.workspace, spark, windows)
    history.materialize(story.workspace, spark, story.contract, "run")


def erased(story: Story) -> tuple[SubjectErased, dict[str, Any]]:
    done = erase_subject(story.workspace, story.contract, key_text(["1"]), erased_by="ana", why="request 7")
    assert done.certificate is not None
    return done, json.loads(done.certificate.read_text())


def test_what_landed_plain_goes_above_raw_and_stays_in_landing_and_raw(
    story: Story, spark: SparkSession
) -> None:
    done, certificate = erased(story)
    assert (certificate["state"], done.images, done.plain_images) == ("pending", 1, 1)
    assert certificate["keys"]["destroyed_now"] == 1 and set(done.waiting) == {FIRST, SECOND}
    run(story, spark)
    done, certificate = erased(story)
    remains = {each["what"]: each["where"] for each in certificate["remains"]}
    assert (certificate["state"], CELLS in remains, done.cells) == ("incomplete", False, 0)
    assert story.contract.subject is not None
    of = (story.contract.subject.name, "1")
    ids = story.workspace.subjects.ids_of([(SOURCE, *of)])
    assert named_in_lake(story.workspace, story.contract, ids) == {of}
    assert done.swept and len(remains[IMAGES]) == 2, "one file of landing, one of raw"
    assert remains[IMAGES] == sorted(each["path"] for each in certificate["record"])
