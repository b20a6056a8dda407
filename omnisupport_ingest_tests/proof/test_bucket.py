"""A small home whose landing and lake are in a bucket, as ``make prove BUCKET=1`` runs many."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from omnisupport_ingest.storage import storage_of
from omnisupport_ingest_tests.proof.run import ELSEWHERE, prove
from omnisupport_ingest_tests.proof.story import draw
from omnisupport_ingest_tests.storage.s3_server import S3Server

SEEDS = range(3010, 3011)


@pytest.mark.slow
def test_a_bucket_holds_what_the_oracle_comes_to_for_another_machine_too(
    spark: SparkSession, s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last comparisons are those of a machine that has nothing of landing and lake but what is there."""
    monkeypatch.setenv("OMNISUPPORT_STORAGE", s3.place())
    said: list[str] = []
    story = replace(draw(SEEDS, slots=2, steps=0), gaps=())
    proved = prove(story, tmp_path / "home", spark, say=said.append)
    assert not storage_of(proved.workspace.home.lake / "any").is_local
    assert said.index(ELSEWHERE) < said.index("  rebuild")
    assert proved.tally.comparisons == 4 and proved.tally.things["rebuilds from landing"]
