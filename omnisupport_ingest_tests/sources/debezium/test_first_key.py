"""The key with which events of a table land first stays, whatever key its contract gets."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from omnisupport_ingest.checks.quality_checks import schemas_as_contracted
from omnisupport_ingest.contracts.landed_keys import APART, LOST, KeysOfTable, LandedKeyChanged, LandedKeys
from omnisupport_ingest.contracts.model import KeyEra
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.read.schema_changes import waiting_keys
from omnisupport_ingest_tests.cli.command import command, environment
from omnisupport_ingest_tests.sources.debezium.recorded import SOURCE, Recorder
from omnisupport_ingest_tests.sources.debezium.test_schema_story import followed
from omnisupport_ingest_tests.sources.debezium.told import customer, envelope

CUSTOMERS = "public.customers"


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    recorder = Recorder(tmp_path, "customers")
    recorder.land_values("1.jsonl", envelope("c", customer(1), lsn=1001))
    return recorder


def edit(recorder: Recorder, change: Callable[[dict[str, Any]], None]) -> None:
    """Edit the contract's file, and go on as a new process does."""
    path = Path(recorder.contract("customers").path)
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    followed(recorder)


def by_id_and_email(document: dict[str, Any]) -> None:
    document["x-cdc"]["key"] = ["id", "email"]
    document["properties"]["email"]["type"] = "string"
    document["required"] = ["id", "email"]


def test_another_key_of_the_contract_does_not_count_and_is_told(recorder: Recorder) -> None:
    edit(recorder, by_id_and_email)
    contract = recorder.contract("customers")
    assert (contract.key, contract.next_key) == (("id",), ("id", "email"))
    recorder.land_values("2.jsonl", envelope("u", customer(1, email="b@example.com"), lsn=1002))
    assert [each["key"] for each in recorder.events()] == ['["1"]', '["1"]'], "they are one row"

    check = schemas_as_contracted(recorder.workspace, SOURCE, ["customers"])["customers"]
    assert (
        not check.passed and "have landed with the key (id), and (id, email) of its contract" in check.summary
    )
    settings = recorder.workspace.settings
    with environment(home=str(settings.home), contracts_dir=str(settings.contracts_dir)):
        told = command("contracts", "changes")
        (key,) = json.loads(command("contracts", "changes", "--json").out)["keys_that_wait"]
        status = json.loads(command("status", "--json").out)["schema_changes"]
    assert told.code == 1 and "x-cdc.key is id; with another key the table needs its own home" in told.out
    assert key == status[0] and key["table"] == "customers"

    def back(document: dict[str, Any]) -> None:
        document["x-cdc"]["key"] = ["id"]

    edit(recorder, back)
    assert schemas_as_contracted(recorder.workspace, SOURCE, ["customers"])["customers"].passed


def test_events_do_not_land_by_a_contract_that_has_no_column_of_their_key(recorder: Recorder) -> None:
    def by_email(document: dict[str, Any]) -> None:
        by_id_and_email(document)
        document["x-cdc"]["key"] = document["required"] = ["email"]
        del document["properties"]["id"]

    edit(recorder, by_email)
    with pytest.raises(LandedKeyChanged, match=r"the key \(email\), .* of it has the key \(id\)"):
        recorder.land_values("2.jsonl", envelope("c", customer(2), lsn=1002))
    assert [each["key"] for each in recorder.events()] == ['["1"]']
    keys = LandedKeys(recorder.inlet.store.folder).of(CUSTOMERS)
    assert keys is not None and (keys.newest, len(keys.eras)) == (("id",), 1)


def test_a_reading_by_a_key_that_tells_nothing_apart_is_told_and_one_that_goes_on_is_not(
    recorder: Recorder,
) -> None:
    edit(recorder, by_id_and_email)
    era = KeyEra(("id", "email"), 2, Lsn(0), 0)

    def waiting(apart: str) -> list[str]:
        record = LandedKeys(recorder.inlet.store.folder)
        first = KeysOfTable.first(("id",))
        record.update(lambda _: {CUSTOMERS: replace(first.begin(era), apart=apart)})
        followed(recorder)
        return [each.what for each in waiting_keys(recorder.workspace, SOURCE)]

    (what,) = waiting(LOST)
    assert what.startswith("nothing unique at the source is within its key (id, email) any more")
    assert waiting(APART) == []
