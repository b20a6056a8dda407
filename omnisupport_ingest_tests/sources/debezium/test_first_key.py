"""The key with which events of a table land first stays, whatever key its contract gets."""

from __future__ import annotations

import json
import os
import time
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
from omnisupport_ingest_tests.sources.debezium.recorded import SOURCE, TABLES, Recorder, contract
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


def by_email(document: dict[str, Any]) -> None:
    by_id_and_email(document)
    document["x-cdc"]["key"] = document["required"] = ["email"]
    del document["properties"]["id"]


def of_toasty(number: int) -> dict[str, Any]:
    return envelope("c", {"id": number, "small": "text"}, lsn=2000 + number, table="toasty")


def test_events_do_not_land_by_a_contract_that_has_no_column_of_their_key(recorder: Recorder) -> None:
    edit(recorder, by_email)
    with pytest.raises(LandedKeyChanged, match=r"the key \(email\), .* of it has the key \(id\)"):
        recorder.land_values("2.jsonl", envelope("c", customer(2), lsn=1002))
    assert [each["key"] for each in recorder.events()] == ['["1"]']
    keys = LandedKeys(recorder.inlet.store.folder).of(CUSTOMERS)
    assert keys is not None and (keys.newest, len(keys.eras)) == (("id",), 1)


def test_a_file_with_several_tables_is_refused_at_its_first_row_of_that_one_and_begins_no_epoch(
    tmp_path: Path,
) -> None:
    recorder = Recorder(tmp_path, "customers", "toasty")
    recorder.land_values("1.jsonl", envelope("c", customer(1), lsn=1001))
    edit(recorder, by_email)
    values = [*map(of_toasty, range(100)), envelope("c", customer(2), lsn=1002), of_toasty(200)]
    for new_epoch in (None, "set up anew"):
        with pytest.raises(LandedKeyChanged, match=r"2\.jsonl, line 101: .*the key \(email\)"):
            recorder.land_values("2.jsonl", *values, new_epoch=new_epoch)
    epoch = recorder.inlet.store.current_epoch()
    assert epoch is not None and epoch.number == 1
    recorder.land_values("3.jsonl", of_toasty(300))
    assert len(recorder.events()) == 2, "a file of the other table alone lands"

    def back(document: dict[str, Any]) -> None:
        document |= contract("customers", *TABLES["customers"])

    edit(recorder, back)
    recorder.land_values("2.jsonl", *values)
    assert len(recorder.events()) == 104


@pytest.mark.parametrize("watched", [False, True], ids=["named files", "the inbox"])
def test_a_file_that_waits_for_its_contract_stops_no_other_file(tmp_path: Path, watched: bool) -> None:
    recorder = Recorder(tmp_path, "customers", "toasty")
    recorder.land_values("0.jsonl", envelope("c", customer(1), lsn=1001))
    edit(recorder, by_email)
    settings = recorder.workspace.settings
    inbox = settings.home / "inbox" / SOURCE
    inbox.mkdir(parents=True)
    told = {
        "1.jsonl": of_toasty(1),
        "2.jsonl": envelope("c", customer(2), lsn=1002),
        "3.jsonl": of_toasty(3),
        "4.jsonl": envelope("c", customer(4), lsn=1004),
        "5.jsonl": of_toasty(5),
    }
    for name, value in told.items():
        (inbox / name).write_text(json.dumps(value) + "\n")
    # The last one is not complete when the inbox is looked at first.
    for name in list(told)[:-1]:
        os.utime(inbox / name, (time.time() - 60, time.time() - 60))
    paths = [str(inbox / name) for name in told]
    arguments = ("--watch", "--once") if watched else (*paths, "--source", SOURCE)
    with environment(home=str(settings.home), contracts_dir=str(settings.contracts_dir)):
        done = command("land", *arguments)
        assert done.code == 2 and "2.jsonl, line 1: " in done.output and "x-cdc.key" in done.output
        tables = [each["source_table"] for each in recorder.events()]
        assert sorted(tables) == ["customers", "toasty", "toasty", "toasty"]
        if watched:
            assert sorted(each.name for each in inbox.glob("*.jsonl")) == ["2.jsonl", "4.jsonl"]
        else:
            assert "4.jsonl, line 1: " in done.output
            document = json.loads(command("land", *arguments, "--json").out)
            assert [each["file"][-7:] for each in document["files"] if "refused" in each] == [
                "2.jsonl",
                "4.jsonl",
            ]
        path = Path(settings.contracts_dir) / "customers.json"
        path.write_text(json.dumps(contract("customers", *TABLES["customers"])))
        assert command("land", *arguments).code == 0
    assert len(recorder.events()) == 6


def test_files_ordered_by_arrival_wait_behind_one_that_does(tmp_path: Path) -> None:
    """Its rows of other tables would land above those of the next file."""
    recorder = Recorder(tmp_path, "customers", "toasty")
    settings = recorder.workspace.settings
    (tmp_path / "sources").mkdir()
    definition = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "name": SOURCE,
        "kind": "files",
        "description": "By arrival.",
        "events": {"order": "arrival"},
    }
    (tmp_path / "sources" / f"{SOURCE}.json").write_text(json.dumps(definition))
    paths = []
    for number, value in enumerate([envelope("c", customer(1)), envelope("c", customer(2)), of_toasty(3)]):
        paths.append(str(recorder.file(f"{number}.jsonl", [json.dumps(value).encode()])))
    with environment(home=str(settings.home), contracts_dir=str(settings.contracts_dir)):
        assert command("land", paths[0], "--source", SOURCE).code == 0
        edit(recorder, by_email)
        assert command("land", *paths[1:], "--source", SOURCE).code == 2
    assert len(recorder.events()) == 1


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
