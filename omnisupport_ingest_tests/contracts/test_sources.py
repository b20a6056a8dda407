"""Definitions of sources: what may be written, what is refused and why, and what needs none."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from omnisupport_ingest.contracts.documents import program_file
from omnisupport_ingest.contracts.load import load_contract, load_contracts
from omnisupport_ingest.contracts.model import ContractError
from omnisupport_ingest.contracts.named_secrets import ConnectionMissing
from omnisupport_ingest.contracts.sources import (
    SourceKind,
    SourceUnknown,
    load_source,
    load_sources,
    log_settings,
    source_of,
    sources_in_force,
)
from omnisupport_ingest.settings import Settings, SnapshotMode

QUERY = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "name": "shop",
    "kind": "query",
    "description": "A shop.",
    "connection": {"env": "SHOP_URL"},
    "schedule": {"sync_every": "PT30S", "compare_every": "P1D"},
}


def read(change: Callable[[dict[str, Any]], object], folder: Path = Path("sources")):
    document = json.loads(json.dumps(QUERY))
    change(document)
    return source_of(document, folder / "shop.json")


def test_a_query_source_says_how_often():
    found = read(lambda document: None)
    assert (found.kind, found.sync_every, found.compare_every) == (
        SourceKind.QUERY,
        timedelta(seconds=30),
        timedelta(days=1),
    )


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda it: it.update(name="other"), "the file is shop.json"),
        (lambda it: it.update(kind="pulsar"), "kind"),
        (lambda it: it.update(kind="kafka"), "takes no connection"),
        (lambda it: it.update(kafka={"topics": ["t"], "settings": {"bootstrap.servers": "k:1"}}), "has none"),
        (lambda it: it.pop("connection"), "needs a connection"),
        (lambda it: it.update(connection={"embedded": True}), "followed by its log"),
        (lambda it: it.update(connection={"env": "A", "file": "/b"}), "connection"),
        (lambda it: it.update(connection={"url": "postgresql://u:secret@h/d"}), "connection"),
        (lambda it: it.update(connection={"env": "postgresql://u@h/d"}), "env"),
        (lambda it: it.update(schedule={"sync_every": "PT0S"}), "no length of time"),
        (lambda it: it.update(schedule={"sync_every": "1 minute"}), "sync_every"),
        (lambda it: it.update(tables={"orders": {"mode": "cdc"}}), "cannot be carried out"),
        (lambda it: it.update(kind="files"), "takes no connection"),
        (lambda it: it.update(kind="postgres_log"), "schedule"),
        (lambda it: it.update(password="x"), "password"),
    ],
)
def test_what_cannot_be_is_refused_with_its_place(change: Callable[[dict[str, Any]], object], told: str):
    with pytest.raises(ContractError, match=told) as refused:
        read(change)
    assert "secret" not in str(refused.value)


KAFKA = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "name": "nova",
    "kind": "kafka",
    "description": "Topics.",
    "kafka": {
        "topics": ["orders", "^nova\\."],
        "settings": {"bootstrap.servers": "k:9092", "sasl.username": "me", "ssl.ca.location": "/ca.pem"},
        "secrets": {"sasl.password": {"env": "NOVA_PASSWORD"}},
    },
}


def read_kafka(change: Callable[[dict[str, Any]], object]):
    document = json.loads(json.dumps(KAFKA))
    change(document)
    return source_of(document, Path("sources") / "nova.json")


def test_topics_are_chosen_by_name_or_pattern_and_secrets_come_by_name(monkeypatch: pytest.MonkeyPatch):
    found = read_kafka(lambda document: document.update(events={"order": "arrival"}))
    assert (found.kind, found.connection, found.events) == (
        SourceKind.KAFKA,
        "Kafka at k:9092",
        {"order": "arrival"},
    )
    topics = found.kafka
    assert topics is not None
    chosen = [each for each in ("orders", "orders2", "nova.a", "novaxa", "my.nova.a") if topics.chooses(each)]
    assert chosen == ["orders", "nova.a"]
    monkeypatch.delenv("NOVA_PASSWORD", raising=False)
    with pytest.raises(ConnectionMissing, match=r"NOVA_PASSWORD, which .* setting sasl\.password"):
        topics.client_settings()
    monkeypatch.setenv("NOVA_PASSWORD", "hunter2")
    settings = topics.client_settings()
    assert (settings["sasl.password"], settings["isolation.level"]) == ("hunter2", "read_committed")
    assert "hunter2" not in repr(found)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda it: it.pop("kafka"), "topics are needed"),
        (lambda it: it["kafka"]["settings"].pop("bootstrap.servers"), "bootstrap.servers"),
        (lambda it: it["kafka"].update(topics=[]), "topics"),
        (lambda it: it["kafka"].update(topics=["^("]), "no regular expression"),
        (lambda it: it["kafka"]["settings"].update({"sasl.password": "x"}), "is a secret"),
        (lambda it: it["kafka"]["settings"].update({"ssl.key.pem": "x"}), "is a secret"),
        (
            lambda it: it["kafka"]["settings"].update({"isolation.level": "read_uncommitted"}),
            "always read_comm",
        ),
        (lambda it: it["kafka"]["settings"].update({"auto.offset.reset": "latest"}), "always error"),
        (lambda it: it["kafka"]["secrets"].update({"sasl.password": {"text": "x"}}), "sasl.password"),
        (lambda it: it.update(schedule={"compare_every": "P1D"}), "not compared"),
        (lambda it: it.update(page_rows=5), "page_rows"),
        (lambda it: it.update(tables={"orders": {"mode": "incremental_cursor"}}), "cannot be carried out"),
        (
            lambda it: it.update(events={"fields": {"op": "kind", "deleted": "kind"}}),
            "has the name of deleted",
        ),
    ],
)
def test_what_a_source_of_topics_cannot_be(change: Callable[[dict[str, Any]], object], told: str):
    with pytest.raises(ContractError, match=told):
        read_kafka(change)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"tables": {"orders": {"mode": "cdc"}}}, "manifest says its mode itself"),
        ({"events": {"tombstones": "delete"}}, "neither its position nor its time"),
    ],
)
def test_what_a_source_of_files_cannot_be(more: dict[str, Any], told: str):
    document = {each: KAFKA[each] for each in ("$schema", "name", "description")} | {"kind": "files"}
    with pytest.raises(ContractError) as refused:
        source_of(document | more, Path("sources") / "nova.json")
    assert told in f"{refused.value} {refused.value.fix}"
    ordered = {"events": {"tombstones": "delete", "order": "arrival"}}
    assert source_of(document | ordered, Path("sources") / "nova.json").kind is SourceKind.FILES


def test_a_table_without_a_contract_is_named():
    found = read(lambda it: it.update(tables={"orders": {"mode": "incremental_cursor"}}))
    with pytest.raises(ContractError, match=r"tables\.orders"):
        found.tables(load_contracts(program_file("contracts/data")))


def test_a_connection_comes_from_a_variable_or_a_private_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    found = read(lambda document: None)
    monkeypatch.delenv("SHOP_URL", raising=False)
    with pytest.raises(ConnectionMissing, match="SHOP_URL"):
        found.connection_text()
    monkeypatch.setenv("SHOP_URL", "sqlite:///x")
    assert found.connection_text() == "sqlite:///x"
    secret = tmp_path / "shop"
    secret.write_text("postgresql://u@h/d\n")
    secret.chmod(0o644)
    by_file = read(lambda it: it.update(connection={"file": str(secret)}))
    with pytest.raises(ConnectionMissing, match="others than its owner"):
        by_file.connection_text()
    secret.chmod(0o600)
    assert by_file.connection_text() == "postgresql://u@h/d"


def test_every_source_that_contracts_name_has_a_definition_written_or_not(tmp_path: Path):
    settings = Settings(home=tmp_path / "home", contracts_dir=program_file("contracts/data"))
    there = sources_in_force(settings)
    kinds = {each.name: each.kind.value for each in there.all}
    assert kinds == {
        "omnisupport_files": "files",
        "partner_desk": "files",
        "support_desk": "postgres_log",
        "support_files": "files",
    }
    with pytest.raises(SourceUnknown, match="no source 'shop'"):
        there.find("shop")
    bare = tmp_path / "bare" / "data"
    bare.mkdir(parents=True)
    for path in program_file("contracts/data").glob("*.json"):
        (bare / path.name).write_text(path.read_text())
    implied = sources_in_force(Settings(home=tmp_path / "home", contracts_dir=bare))
    assert {each.name: each.kind.value for each in implied.all} == kinds


@pytest.mark.parametrize(
    "path", sorted(program_file("contracts/sources").glob("*.json")), ids=lambda p: p.stem
)
def test_the_definitions_that_come_with_the_program_are_valid(path: Path):
    definition = load_source(path)
    assert definition.tables(load_contracts(program_file("contracts/data")))
    assert load_sources(path.parent)


@pytest.mark.parametrize(
    ("cursor", "told"),
    [
        ({"field": "nothing"}, "not a column"),
        ({"field": "subject"}, "neither a time nor a whole number"),
        ({"field": "updated_at", "event_time": "subject"}, "no time"),
        ({"field": "updated_at", "lookback": "ten"}, "duration"),
        ({"field": "id", "lookback": 5}, "says nothing of the time"),
        ({"field": "id", "event_time": "updated_at"}, "must be a number"),
    ],
)
def test_a_cursor_that_cannot_be_is_refused(tmp_path: Path, cursor: dict[str, Any], told: str):
    document = json.loads(program_file("contracts/data/tickets.json").read_text())
    document["x-cdc"]["cursor"] = cursor
    path = tmp_path / "tickets.json"
    path.write_text(json.dumps(document))
    with pytest.raises(ContractError, match=told):
        load_contract(path)


def test_a_cursor_changes_nothing_that_has_landed(tmp_path: Path):
    plain = load_contract(program_file("contracts/data/tickets.json"))
    document = json.loads(program_file("contracts/data/tickets.json").read_text())
    document["x-cdc"]["cursor"] = {"field": "updated_at", "candidates": []}
    path = tmp_path / "tickets.json"
    path.write_text(json.dumps(document))
    found = load_contract(path)
    assert found.cursor is not None
    assert found.cursor.lookback == timedelta(minutes=10)
    assert found.fingerprint == plain.fingerprint


LOG = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "name": "north",
    "kind": "postgres_log",
    "description": "A second server.",
    "connection": {"env": "NORTH_DSN"},
}


def log(**members: Any):
    return source_of(LOG | members, Path("sources") / f"{members.get('name', 'north')}.json")


def test_a_log_has_a_slot_and_a_publication_named_after_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NORTH_DSN", "dbname=north password=s3cret")
    settings = Settings(_env_file=None, slot="ours")
    found = log_settings(settings, log(name="North"))
    assert (found.source, found.slot, found.publication) == (
        "North",
        "ours_north",
        "omnisupport_ingest_north",
    )
    assert found.source_dsn is not None and found.source_dsn.get_secret_value().endswith("s3cret")
    assert found.home == settings.home and log_settings(found, log(name="North")) == found
    given = {"slot": "mine", "publication": "Theirs", "snapshot_mode": "never"}
    told = log_settings(settings, log(log=given))
    assert (told.slot, told.publication, told.snapshot_mode) == ("mine", "Theirs", SnapshotMode.NEVER)


def test_the_homes_own_log_keeps_the_slot_of_the_settings_whether_it_has_a_file_or_not(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("NORTH_DSN", "dbname=north")
    plain = Settings(_env_file=None, source="north")
    assert log_settings(plain, log()).slot == plain.slot
    with_dsn = Settings(_env_file=None, source="north", source_dsn="dbname=other")  # type: ignore[arg-type]
    with pytest.raises(ContractError, match="OMNISUPPORT_SOURCE_DSN is another"):
        log_settings(with_dsn, log())
    # The definition of the embedded server leaves the setting what it was.
    assert log_settings(with_dsn, log(connection={"embedded": True})) == with_dsn


def test_a_log_without_its_variable_or_with_too_long_a_name_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("NORTH_DSN", raising=False)
    with pytest.raises(ConnectionMissing, match="NORTH_DSN"):
        log_settings(Settings(_env_file=None), log())
    monkeypatch.setenv("NORTH_DSN", "dbname=north")
    long = "n" * 60
    with pytest.raises(ContractError, match="more than the 63 bytes"):
        log_settings(Settings(_env_file=None), log(name=long))
    with pytest.raises(SourceUnknown, match="has no log"):
        log_settings(Settings(_env_file=None), read(lambda document: None))


def test_every_contract_of_a_log_is_captured_or_none_may_be_named(tmp_path: Path):
    contracts = load_contracts(program_file("contracts/data"))
    chosen = {"tickets": {"mode": "cdc"}}
    with pytest.raises(ContractError, match="agents has a contract and is left out"):
        log(name="support_desk", tables=chosen).tables(contracts)
