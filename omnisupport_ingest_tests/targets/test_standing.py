"""How far a target is behind is known in the home, with the last error: by status, alarms and metrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from omnisupport_ingest.cli import status_targets
from omnisupport_ingest.cli.metrics import PREFIX, Looks
from omnisupport_ingest.cli.status import status_document
from omnisupport_ingest.cli.status_targets import target_facts, targets_document
from omnisupport_ingest.lake.log import committed_at
from omnisupport_ingest.targets import sync as syncing
from omnisupport_ingest.targets.standing import note_synced, standing_of
from omnisupport_ingest.targets.sync import TargetUnavailable
from omnisupport_ingest_tests.cli.command import command, environment
from omnisupport_ingest_tests.layers.story import SECOND, SOURCE, Story
from omnisupport_ingest_tests.layers.test_layers import run
from omnisupport_ingest_tests.targets.test_target import (
    ENV,
    UPDATE,
    Warehouse,
    story,
    sync,
    told,
    warehouse,
    with_target,
)

__all__ = ["story", "warehouse"]

pytestmark = pytest.mark.usefixtures("spark")

NOWHERE = "host=127.0.0.1 port=1 dbname=none password=hunter2"


def shown(story: Story) -> dict[str, Any]:
    (found,) = targets_document(story.workspace, SOURCE)
    return found


def in_words(story: Story) -> str:
    ((_, text),) = target_facts([shown(story)])
    return text


def update(story: Story, spark: SparkSession) -> None:
    story.land(UPDATE)
    run(story, spark, SECOND)


def test_a_target_is_up_to_date_until_the_dimension_has_another_version(
    story: Story, warehouse: Warehouse, spark: SparkSession
) -> None:
    assert in_words(story) == f"{warehouse.schema}.notes: no sync of it is known here"
    sync(story)
    told_now = shown(story)
    assert (told_now["versions_behind"], told_now["seconds_behind"], told_now["problem"]) == (0, 0.0, None)
    assert "up to date, synced" in in_words(story)
    update(story, spark)
    standing = standing_of(story.workspace, story.contract)
    snapshot = story.workspace.dimension(story.contract).open()
    assert standing.last is not None and standing.last.version is not None
    assert standing.versions == snapshot.version - standing.last.version > 0
    assert standing.behind_since == committed_at(snapshot.table, standing.last.version + 1)
    assert "version" in in_words(story) and "behind for" in in_words(story)
    sync(story)
    assert shown(story)["versions_behind"] == 0


def test_a_sync_that_fails_is_noted_with_its_error_until_one_succeeds(
    story: Story, warehouse: Warehouse, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync(story)
    update(story, spark)
    with monkeypatch.context() as away:
        away.setenv(ENV, NOWHERE)
        with pytest.raises(TargetUnavailable) as down:
            sync(story)
        first = shown(story)["problem"]
        assert (first["problem"], first["fix"]) == (down.value.problem, down.value.fix)
        with pytest.raises(TargetUnavailable):
            sync(story)
    failing = shown(story)
    assert failing["problem"]["since"] == first["since"] and failing["problem"]["at"] >= first["at"]
    assert failing["versions_behind"] > 0, "what it has is as before"
    assert "hunter2" not in json.dumps(failing)
    sync(story)
    assert (shown(story)["problem"], shown(story)["versions_behind"]) == (None, 0)


def test_an_unexpected_error_is_noted_without_its_message(
    story: Story, warehouse: Warehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ValueError("row 4711")

    monkeypatch.setattr(syncing._Sync, "run", broken)
    with pytest.raises(ValueError, match="4711"):
        sync(story)
    found = shown(story)
    assert found["problem"]["problem"] == "ValueError in a sync." and "4711" not in json.dumps(found)
    assert found["version"] is None and found["seconds_behind"] is not None


def test_of_another_target_in_the_contract_nothing_is_known_yet(story: Story, warehouse: Warehouse) -> None:
    sync(story)
    document = with_target(warehouse)
    document["x-cdc"]["target"]["table"] = "other"
    told(story, document)
    assert shown(story)["synced_at"] is None
    assert "no sync of it is known here" in in_words(story)


def values(document: dict[str, Any]) -> dict[str, float]:
    """The metrics of targets, by name."""
    return {
        sample.name.removeprefix(PREFIX): sample.value
        for family in Looks(lambda: document).collect()
        for sample in family.samples
        if sample.name.startswith(f"{PREFIX}target_")
    }


def test_status_alarms_and_metrics_tell_of_a_target_that_is_late_or_fails(
    story: Story,
    warehouse: Warehouse,
    spark: SparkSession,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    settings = story.workspace.settings
    table = f"{SOURCE}.{story.contract.name}"
    sync(story)
    with environment(home=str(settings.home), contracts_dir=str(settings.contracts_dir), source=SOURCE):
        assert values(status_document()) == {
            "target_behind_versions": 0,
            "target_behind_seconds": 0,
            "target_failing": 0,
        }
        update(story, spark)
        kinds = [each["kind"] for each in json.loads(command("alarms", "--json").out)["problems"]]
        assert not [each for each in kinds if each.startswith("target")], "it may take a while"
        monkeypatch.setattr(status_targets, "LATE_SECONDS", 0.0)
        document = status_document()
        assert any("is late: 1 version" in each for each in document["health"]["reasons"])
        found = values(document)
        assert found["target_behind_versions"] == 1 and found["target_behind_seconds"] > 0
        late = {each["kind"]: each for each in json.loads(command("alarms", "--json").out)["problems"]}
        assert late[f"target late {table}"]["fix"] == f"omnisupport-ingest target status {table}"

        monkeypatch.setenv(ENV, NOWHERE)
        with pytest.raises(TargetUnavailable) as down:
            sync(story)
        failing = {each["kind"]: each for each in json.loads(command("alarms", "--json").out)["problems"]}
        assert failing[f"target {table}"]["fix"] == down.value.fix
        assert values(status_document())["target_failing"] == 1
        text = " ".join(command("status").out.split())
        assert "the last sync failed" in text and "hunter2" not in text


def test_a_note_that_cannot_be_written_spoils_no_sync(story: Story, warehouse: Warehouse) -> None:
    (story.workspace.home.run / "targets").write_text("a file where the folder of notes would be")
    synced = sync(story)
    assert len(warehouse.rows()) == 40
    note_synced(story.workspace.home, story.contract, synced.table_id, synced.delta_version)
    assert standing_of(story.workspace, story.contract).last is None
