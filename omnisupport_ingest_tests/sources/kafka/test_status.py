"""``source status NAME`` of a source of topics: how far behind each partition is, and what is gone unread.

Told by librdkafka's mock cluster, whose partitions have true ends and which deletes records.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from omnisupport_ingest.contracts.in_force import contracts_in_force
from omnisupport_ingest.contracts.sources import sources_in_force
from omnisupport_ingest.home import Home
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.sources.kafka import client
from omnisupport_ingest.sources.kafka.run import KafkaSource
from omnisupport_ingest_tests.cli.command import command, environment
from omnisupport_ingest_tests.sources.debezium.recorded import SOURCE, TABLES, contract
from omnisupport_ingest_tests.sources.kafka.broker import Broker, mock_cluster
from omnisupport_ingest_tests.sources.kafka.test_faults import TOPIC, overtake
from omnisupport_ingest_tests.sources.kafka.topics import changes, write_key

pytestmark = pytest.mark.full


@pytest.fixture
def mock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Broker]:
    """A cluster, and a home whose source is its topic; the working directory is the project's."""
    monkeypatch.setattr(client, "ANSWER_SECONDS", 3.0)
    monkeypatch.setattr(client, "_ID_SECONDS", 0.3)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "contracts" / "data").mkdir(parents=True)
    document = contract("customers", *TABLES["customers"])
    (tmp_path / "contracts" / "data" / "customers.json").write_text(json.dumps(document))
    contracts = str(tmp_path / "contracts" / "data")
    with mock_cluster() as cluster, environment(home=str(tmp_path / "home"), contracts_dir=contracts):
        made = command(
            *("sources", "new", SOURCE, "--kind", "kafka", "--servers", cluster.address, "--topic", TOPIC)
        )
        assert made.code == 0, made.output
        Home.open(tmp_path / "home", Settings().window_size)
        yield cluster


def sync() -> None:
    settings = Settings()
    home = Home.open(settings.home, settings.window_size)
    contracts = contracts_in_force(settings)
    definition = sources_in_force(settings, contracts).find(SOURCE)
    KafkaSource.of(definition, contracts, home, settings).sync()


def status() -> tuple[int, dict[str, Any], str]:
    done = command("source", "status", SOURCE, "--json")
    return done.code, json.loads(done.out), command("source", "status", SOURCE).out


def test_lag_is_what_has_not_landed_of_each_partition(mock: Broker) -> None:
    mock.produce(TOPIC, changes(1, 5))
    mock.produce(TOPIC, changes(10, 2), 1)
    code, told, shown = status()
    assert (code, told["state"], told["behind"]) == (0, "STOPPED", 7)
    assert not (Settings().home / "landing" / SOURCE).exists(), "a look makes nothing"
    first = told["partitions"][0]
    assert first == {
        "topic": TOPIC,
        "partition": 0,
        "landed": None,
        "low": 0,
        "end": 5,
        "behind": 5,
        "gone": 0,
        "parked": None,
        "landed_at": None,
        "seconds_since_landed": None,
    }
    assert f"{TOPIC}[0]: nothing has landed of 5, 5 behind" in shown
    sync()
    code, told, shown = status()
    assert (code, told["behind"]) == (0, 0)
    checked = command("preflight", SOURCE, "--json")
    assert (checked.code, json.loads(checked.out)["ready"]) == (0, True)
    assert [each["landed"] for each in told["partitions"]][:2] == [5, 2]
    assert f"{TOPIC}[1]: landed up to offset 2 of 2, 0 behind, newest record landed" in shown
    first, second = told["partitions"][:2]
    assert 0 <= first["seconds_since_landed"] < 60 and first["landed_at"] == second["landed_at"]
    assert told["partitions"][2]["landed_at"] is None, "nothing of it has ever landed"
    mock.produce(TOPIC, changes(20, 3), 1)
    assert [each["behind"] for each in status()[1]["partitions"]][:2] == [0, 3]
    sync()
    later = status()[1]["partitions"]
    assert later[0]["landed_at"] == first["landed_at"] < later[1]["landed_at"]


def test_the_look_at_the_whole_platform_has_the_lag_and_waits_for_no_cluster(
    mock: Broker, tmp_path: Path
) -> None:
    mock.produce(TOPIC, changes(1, 5))
    told = json.loads(command("status", "--json").out)
    (reading,) = told["readings"]
    assert (reading["source"], reading["behind"], reading["problem"]) == (SOURCE, 5, None)
    assert f"{SOURCE}, Kafka at {mock.address}, STOPPED, 5 records behind" in command("status").out

    path = tmp_path / "contracts" / "sources" / f"{SOURCE}.json"
    path.write_text(path.read_text().replace(mock.address, "127.0.0.1:1"))
    began = time.monotonic()
    away = json.loads(command("status", "--json").out)
    assert time.monotonic() - began < 5
    assert away["readings"][0]["problem"]["fix"] and away["home"] == told["home"]
    assert away["health"]["level"] == "warning"
    assert f"{SOURCE} cannot be looked at" in away["health"]["reasons"]


def test_a_paused_source_says_so_and_its_lag_grows(mock: Broker) -> None:
    mock.produce(TOPIC, changes(1, 1))
    sync()
    assert command("source", "pause", SOURCE).code == 0
    mock.produce(TOPIC, changes(2, 4))
    code, told, shown = status()
    assert (code, told["state"], told["behind"]) == (0, "PAUSED", 4)
    assert shown.startswith(f"{SOURCE}: PAUSED, Kafka at {mock.address}")


def test_records_that_were_deleted_before_they_landed_are_a_gap_and_not_well(mock: Broker) -> None:
    mock.produce(TOPIC, changes(1, 2))
    sync()
    overtake(mock)
    code, told, shown = status()
    first = told["partitions"][0]
    assert code == 1
    assert first["gone"] == first["low"] - first["landed"] > 0
    assert first["behind"] == first["end"] - first["low"]
    assert f"{first['gone']} offsets were deleted before: a gap" in shown
    checked = command("preflight", SOURCE, "--json")
    offsets = [each for each in json.loads(checked.out)["findings"] if each["check"] == "offsets"]
    assert checked.code == 1 and "--accept-gap" in offsets[0]["fix"]


def test_a_table_that_waits_for_its_contract_is_named_with_its_partitions_and_the_fix(
    mock: Broker, tmp_path: Path
) -> None:
    mock.produce(TOPIC, changes(1, 2))
    sync()
    write_key(tmp_path / "contracts" / "data", "email")
    mock.produce(TOPIC, changes(3, 2))
    sync()
    code, told, shown = status()
    assert (code, told["behind"]) == (1, 2)
    assert [each["parked"] for each in told["partitions"]] == ["public.customers", None, None, None]
    (table,) = told["parked"]
    assert table["table"] == "customers" and "x-cdc.key" in table["fix"]
    assert f"{TOPIC}[0]: landed up to offset 2 of 4, 2 behind" in shown
    assert "waits before a row of public.customers" in shown
    assert "customers is left out: " in shown and "Fix: Give the contract that key again" in shown
    checked = json.loads(command("preflight", SOURCE, "--json").out)
    (finding,) = [each for each in checked["findings"] if each["check"] == "landed_key"]
    assert not checked["ready"] and "public.customers the key (email)" in json.dumps(finding)

    whole = json.loads(command("status", "--json").out)
    (key,) = whole["schema_changes"]
    assert (key["table"], key["parked"]) == ("customers", True) and "nothing of it lands" in key["what"]
    assert f"left out: customers (source status {SOURCE})" in command("status").out
    assert "nothing of it lands" in command("contracts", "changes").out
    found = json.loads(command("alarms", "--json").out)
    assert any("nothing of it lands" in json.dumps(each) for each in found["problems"])

    write_key(tmp_path / "contracts" / "data", "id")
    sync()
    code, told, _ = status()
    assert (code, told["behind"], told["parked"]) == (0, 0, [])
    assert json.loads(command("status", "--json").out)["schema_changes"] == []


def test_a_cluster_that_does_not_answer_is_named_with_a_fix(mock: Broker, tmp_path: Path) -> None:
    path = tmp_path / "contracts" / "sources" / f"{SOURCE}.json"
    path.write_text(path.read_text().replace(mock.address, "127.0.0.1:1"))
    code, told, shown = status()
    assert (code, told["behind"], told["partitions"]) == (1, None, [])
    checked = command("preflight", SOURCE)
    assert checked.code == 1 and "127.0.0.1:1" in checked.out
    assert "127.0.0.1:1" in told["problem"]["problem"] and "Fix: Check that it is up" in shown
