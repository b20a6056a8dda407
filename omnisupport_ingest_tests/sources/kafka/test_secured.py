"""SASL and TLS: the definition's settings reach the library, and a cluster that refuses them says why."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import KafkaError

from omnisupport_ingest.contracts.kafka_topics import KafkaTopics
from omnisupport_ingest.sources.kafka import client
from omnisupport_ingest.sources.kafka.client import Cluster
from omnisupport_ingest.sources.kafka.errors import KafkaUnreachable
from omnisupport_ingest_tests.sources.kafka.broker import Broker, running_broker
from omnisupport_ingest_tests.sources.kafka.front import Front, front
from omnisupport_ingest_tests.sources.kafka.topics import Reader, changes

pytestmark = pytest.mark.full

USER, PASSWORD = "ingest", "hunter2-secret"
SECRETS = {"sasl.password": ("env", "NOVA_PASSWORD")}


@pytest.fixture(autouse=True)
def short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "ANSWER_SECONDS", 5.0)
    monkeypatch.setenv("NOVA_PASSWORD", PASSWORD)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Front, Broker]]:
    """A broker behind TLS that lets in one user, and a client of it that may."""
    folder = tmp_path_factory.mktemp("guarded")
    with (
        front(folder, tls=True, users={USER: PASSWORD}) as before,
        running_broker(folder / "log", before=before),
    ):
        broker = Broker(before.address, {**secured(before), "sasl.password": PASSWORD})
        broker.make_topic("nova", 2)
        broker.produce("nova", changes(1, 3))
        yield before, broker


def secured(before: Front, **others: str) -> dict[str, str]:
    settings = {
        "security.protocol": "SASL_SSL",
        "ssl.ca.location": str(before.certificate),
        "sasl.mechanism": "PLAIN",
        "sasl.username": USER,
    }
    return settings | {name.replace("_", "."): value for name, value in others.items()}


def test_records_land_over_tls_from_a_cluster_that_asks_who_it_is(
    guarded: tuple[Front, Broker], tmp_path: Path
) -> None:
    before, broker = guarded
    before.let_in.clear()
    reader = Reader(tmp_path, before.address, "nova", secured=secured(before), secrets=SECRETS)
    assert reader.sync().faults == [] and reader.keys() == [1, 2, 3]
    assert set(before.let_in) == {USER}
    broker.produce("nova", changes(4, 2), 1)
    assert reader.sync().records == 2 and reader.keys() == [1, 2, 3, 4, 5]
    assert all(each.behind == 0 for each in reader.source.lags())


def refusal(reader: Reader) -> str:
    with pytest.raises(KafkaUnreachable) as refused:
        reader.sync()
    assert reader.store.current_epoch() is None, "nothing has begun"
    assert PASSWORD not in str(refused.value) and "hunter3" not in str(refused.value)
    assert "kafka.settings" in refused.value.fix
    return refused.value.problem


def test_a_wrong_password_is_told_as_the_cluster_tells_it(
    guarded: tuple[Front, Broker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOVA_PASSWORD", "hunter3-wrong")
    before, _ = guarded
    problem = refusal(Reader(tmp_path, before.address, "nova", secured=secured(before), secrets=SECRETS))
    assert "the user or its password is wrong" in problem


def test_a_mechanism_that_the_cluster_has_not_is_told_with_those_that_it_has(
    guarded: tuple[Front, Broker], tmp_path: Path
) -> None:
    before, _ = guarded
    other = secured(before, sasl_mechanism="SCRAM-SHA-256")
    problem = refusal(Reader(tmp_path, before.address, "nova", secured=other, secrets=SECRETS))
    assert "SCRAM-SHA-256" in problem and "supported mechanisms: PLAIN" in problem


@pytest.mark.parametrize("mechanism", ["SCRAM-SHA-256", "SCRAM-SHA-512"])
def test_records_land_from_a_cluster_to_which_both_sides_prove_the_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mechanism: str
) -> None:
    (tmp_path / "broker").mkdir()
    with (
        front(tmp_path / "broker", tls=True, users={USER: PASSWORD}, mechanisms=(mechanism,)) as before,
        running_broker(tmp_path / "log", before=before),
    ):
        settings = secured(before, sasl_mechanism=mechanism)
        broker = Broker(before.address, {**settings, "sasl.password": PASSWORD})
        broker.make_topic("nova", 1)
        broker.produce("nova", changes(1, 3))
        before.let_in.clear()
        reader = Reader(tmp_path / "reader", before.address, "nova", secured=settings, secrets=SECRETS)
        assert reader.sync().faults == [] and reader.keys() == [1, 2, 3]
        assert set(before.let_in) == {USER}
        monkeypatch.setenv("NOVA_PASSWORD", "hunter3-wrong")
        other = Reader(tmp_path / "other", before.address, "nova", secured=settings, secrets=SECRETS)
        assert "the user or its password is wrong" in refusal(other)


def test_a_certificate_that_nobody_trusts_is_told(guarded: tuple[Front, Broker], tmp_path: Path) -> None:
    before, _ = guarded
    settings = secured(before)
    del settings["ssl.ca.location"]
    problem = refusal(Reader(tmp_path, before.address, "nova", secured=settings, secrets=SECRETS))
    assert "certificate verify failed" in problem


def test_a_client_that_speaks_no_tls_is_pointed_to_the_setting(
    guarded: tuple[Front, Broker], tmp_path: Path
) -> None:
    """The library sees a connection that ends, and no more."""
    before, _ = guarded
    reader = Reader(tmp_path, before.address, "nova")
    with pytest.raises(KafkaUnreachable) as refused:
        reader.sync()
    assert "security.protocol" in refused.value.fix


def test_why_a_broker_refuses_is_told_though_the_library_sums_up_behind_it() -> None:
    # One that takes the connection and says nothing, so that the client has nothing of its own to tell.
    silent = socket.create_server(("127.0.0.1", 0))
    topics = KafkaTopics(
        ("t",), {"bootstrap.servers": f"127.0.0.1:{silent.getsockname()[1]}", "log_level": "0"}
    )
    with silent, Cluster("nova", topics) as cluster:
        cluster._note(KafkaError(KafkaError._AUTHENTICATION, "the user is not known"))
        cluster._note(KafkaError(KafkaError._ALL_BROKERS_DOWN, "1/1 brokers are down"))
        assert "the user is not known" in cluster.unreachable("no answer").problem


@pytest.mark.parametrize("mechanism", ["SCRAM-SHA-256", "SCRAM-SHA-512"])
def test_a_broker_that_does_not_know_the_user_says_so(tmp_path: Path, mechanism: str) -> None:
    """By the broker itself, which has no users."""
    with running_broker(tmp_path / "log", closed=True) as broker:
        settings = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": mechanism, "sasl.username": USER}
        problem = refusal(Reader(tmp_path, broker.address, "nova", secured=settings, secrets=SECRETS))
    assert "SCRAM authentication failed: broker responded with unknown-user" in problem
