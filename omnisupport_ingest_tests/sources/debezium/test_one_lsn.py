"""Two contents for one (LSN, table, key, operation), from a Debezium without transaction metadata."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from omnisupport_ingest.checks import lake_checks as checks
from omnisupport_ingest.layers.reviews import ReviewLedger
from omnisupport_ingest.review.quarantined import quarantined
from omnisupport_ingest.sources.debezium import events
from omnisupport_ingest_tests.sources.debezium.recorded import SOURCE, Recorder
from omnisupport_ingest_tests.sources.debezium.told import customer, envelope


@pytest.fixture
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Changes land with the identity that an earlier version gave them: a hash of the content in it."""
    told_today = events._identity

    def told(*about: Any) -> str | None:
        identity = told_today(*about)
        if identity is None or about[0].op == "r":
            return identity
        content = events.hashlib.sha256(repr(about[2]).encode()).hexdigest()[:16]
        return json.dumps([*json.loads(identity), content], separators=(",", ":"))

    with monkeypatch.context() as patched:
        patched.setattr(events, "_identity", told)
        yield


STORY = [
    envelope("c", customer(1, name="made")),
    envelope("c", customer(2, name="made in the same bulk")),
    envelope("u", customer(1, name="one"), lsn=1001),
    envelope("u", customer(1, name="other"), lsn=1001),
    envelope("u", customer(2, name="moved away"), lsn=1002),
    envelope("d", customer(2), lsn=1003),
    envelope("c", customer(3, name="moved here"), lsn=1003),
]


def judged(recorder: Recorder, spark: SparkSession) -> tuple[list[tuple[str, str]], Any]:
    (found,) = recorder.run(spark)
    workspace = recorder.workspace
    rows = quarantined(workspace, SOURCE, ReviewLedger.open(workspace, SOURCE))
    assert not checks.no_collisions(workspace, SOURCE).passed
    assert len({row.identity_hash for row in rows}) == 1
    return [(row.reason, row.op) for row in rows], (found.deduped, found.duplicates)


def test_both_contents_are_quarantined_and_the_check_is_red(tmp_path: Path, spark: SparkSession) -> None:
    recorder = Recorder(tmp_path, "customers")
    recorder.land_values("one.jsonl", *STORY)
    assert judged(recorder, spark) == ([("collision", "u")] * 2, (5, 0))
    state = recorder.state(spark, "customers")
    assert {"email", "name"} <= set(state[1,]["_cdc_unresolved"])
    assert (state[2,]["_cdc_is_deleted"], state[3,]["name"]) == (True, "moved here")


@pytest.mark.slow
def test_what_an_earlier_version_landed_is_judged_as_today(
    tmp_path: Path, spark: SparkSession, as_before: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(tmp_path, "customers")
    recorder.land_values("one.jsonl", *STORY[:3])
    monkeypatch.undo()
    recorder.land_values("two.jsonl", *STORY[2:], STORY[0])
    assert judged(recorder, spark) == ([("collision", "u")] * 2, (5, 2))
