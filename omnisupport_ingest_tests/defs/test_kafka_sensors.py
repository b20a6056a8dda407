"""The sensor of a source of topics: lands what is new, tells where it stands, and believes no cursor."""

from __future__ import annotations

import json
from pathlib import Path

import dagster as dg
import pytest

from omnisupport_ingest.definitions import build_definitions
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.sources.kafka import client
from omnisupport_ingest_tests.sources.debezium.recorded import SOURCE, TABLES, contract
from omnisupport_ingest_tests.sources.kafka.broker import running_broker
from omnisupport_ingest_tests.sources.kafka.topics import changes


def test_a_tick_lands_what_is_new_and_a_cursor_that_was_changed_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "ANSWER_SECONDS", 2.0)
    with running_broker(tmp_path / "log") as broker:
        broker.make_topic("t", 2)
        for name in ("data", "sources"):
            (tmp_path / "contracts" / name).mkdir(parents=True)
        document = contract("customers", *TABLES["customers"])
        (tmp_path / "contracts" / "data" / "customers.json").write_text(json.dumps(document))
        definition = {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "name": SOURCE,
            "kind": "kafka",
            "description": "Topics.",
            "kafka": {"topics": ["t"], "settings": {"bootstrap.servers": broker.address}},
        }
        (tmp_path / "contracts" / "sources" / f"{SOURCE}.json").write_text(json.dumps(definition))
        workspace = Workspace.open(
            Settings(home=tmp_path / "home", contracts_dir=tmp_path / "contracts" / "data")
        )
        sensor = build_definitions(workspace).get_repository_def().get_sensor_def(f"topics_{SOURCE}")

        def tick(cursor: str | None) -> dg.SensorResult:
            with dg.DagsterInstance.ephemeral() as instance:
                return sensor(dg.build_sensor_context(instance, cursor=cursor), workspace=workspace)

        broker.produce("t", changes(1, 3), 0)
        first = tick(None)
        assert json.loads(first.cursor or "") == {"t[0]": 3, "t[1]": 0}
        assert len(first.asset_events) == 1
        broker.produce("t", changes(4, 2), 1)
        for cursor in (json.dumps({"t[0]": 0, "t[1]": 900}), "no json", None):
            tick(cursor)
        store = workspace.landing(SOURCE)
        assert [each.rows for each in store.manifests()] == [3, 2]
    # The broker is gone: the tick says so, and the cursor stays.
    gone = tick(first.cursor)
    assert "cannot be read" in str(gone.skip_reason) and gone.cursor == first.cursor
