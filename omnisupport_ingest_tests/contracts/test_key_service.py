"""A task on a machine without the home gets keys and tokens from the process that has it."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from omnisupport_ingest import sealed_requests, visiting
from omnisupport_ingest.contracts import key_service
from omnisupport_ingest.contracts.key_service import KeyServiceRefused, for_tasks
from omnisupport_ingest.contracts.protection import Secrets
from omnisupport_ingest.contracts.subject_keys import FILE, SubjectKeys, SubjectKeysUnreadable
from omnisupport_ingest.contracts.token_map import FILE as TOKENS
from omnisupport_ingest.contracts.token_map import TokenMap, TokenMapUnreadable
from omnisupport_ingest.sealed_requests import Address
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.visiting import HomeFileNeeded, Visit

ADA, EVE = ("desk", "person", "ada"), ("desk", "person", "eve")


class Away:
    """The same secrets as the driver has them, and as a task on a machine without the home gets them."""

    def __init__(self, home: Path, elsewhere: Path) -> None:
        self.home, self.tokens, self.subjects = home, TokenMap(home / TOKENS), SubjectKeys(home / FILE)
        self.tokens.make()
        self.ada, self.eve = self.subjects.keys_of([ADA, EVE])
        self.sent = self.for_tasks()
        assert self.sent.tokens is not None and self.sent.subjects is not None
        received = pickle.loads(pickle.dumps(self.sent))
        self.tokens_there = replace(received.tokens, path=elsewhere / TOKENS)
        self.subjects_there = replace(received.subjects, path=elsewhere / FILE)

    def for_tasks(self, **settings: str) -> Secrets:
        secrets = Secrets(tokens=self.tokens, subjects=self.subjects)
        return for_tasks(secrets, cluster(self.home, **settings))


@pytest.fixture
def away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Away:
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir()
    monkeypatch.setattr(sealed_requests, "_WAIT_SECONDS", 0.0)
    monkeypatch.setitem(visiting._visits, str(elsewhere), Visit(str(elsewhere), "s3://bucket"))
    return Away(home, elsewhere)


def cluster(home: Path, **more: str) -> Settings:
    return Settings(home=home, spark_master="spark://127.0.0.1:7077", _env_file=None, **more)


def test_keys_and_tokens_are_those_of_the_home(away: Away) -> None:
    found = away.subjects_there.by_id([away.eve.id, away.ada.id, away.eve.id])
    assert [*found] == [away.eve.id, away.ada.id]
    assert [each.secret for each in found.values()] == [away.eve.secret, away.ada.secret]
    assert away.subjects_there.digest_key() == away.subjects.digest_key()
    known = away.tokens.tokens_of(["a", "b"])
    assert away.tokens_there.tokens_of(["b", "new", "a"])[::2] == known[::-1]
    assert away.tokens_there.tokens_of(["new"]) == away.tokens.tokens_of(["new"])
    assert not away.subjects_there.path.parent.exists() and not away.tokens_there.path.exists()


def test_a_destroyed_key_is_none(away: Away) -> None:
    away.subjects.destroy([away.ada.id])
    found = away.subjects_there.by_id([away.ada.id, away.eve.id])
    assert [each.secret for each in found.values()] == [None, away.eve.secret]


def test_what_the_home_refuses_a_task_is_refused(away: Away) -> None:
    with pytest.raises(SubjectKeysUnreadable, match="lacks the key"):
        away.subjects_there.by_id([bytes(len(away.ada.id))])
    away.tokens.path.write_bytes(b"no map" * 1000)
    with pytest.raises(TokenMapUnreadable, match="cannot be used") as refused:
        away.tokens_there.tokens_of(["a"])
    assert "backup" in refused.value.fix


def test_no_secret_is_shown_where_the_others_are(away: Away) -> None:
    assert away.subjects_there.service is not None
    secret = away.subjects_there.service.secret
    for shown in (repr(away.sent), repr(away.subjects_there), repr(away.tokens_there)):
        assert secret.hex() not in shown and repr(secret) not in shown


def test_the_process_that_has_the_home_reads_it_without_asking(
    away: Away, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sealed_requests.Address, "_ask", None)
    assert away.sent.tokens is not None and away.sent.subjects is not None
    assert away.sent.tokens.tokens_of(["a"]) == away.tokens.tokens_of(["a"])
    assert away.sent.subjects.by_id([away.ada.id])[away.ada.id].secret == away.ada.secret


def test_a_task_asks_also_where_its_machine_has_a_map_of_its_own(away: Away) -> None:
    away.tokens_there.path.parent.mkdir()
    TokenMap(away.tokens_there.path).make()
    assert away.tokens_there.tokens_of(["a"]) == away.tokens.tokens_of(["a"])


def test_without_an_answer_the_address_is_named(away: Away) -> None:
    assert away.subjects_there.service is not None
    nobody = replace(away.subjects_there.service, secret=bytes(32))
    with pytest.raises(HomeFileNeeded, match=f"127.0.0.1:{nobody.port}") as refused:
        replace(away.subjects_there, service=nobody).by_id([away.ada.id])
    assert "OMNISUPPORT_KEY_SERVICE" in refused.value.fix


def address_of(secrets: Secrets) -> Address:
    assert secrets.tokens is not None and secrets.tokens.service is not None
    return secrets.tokens.service


def test_it_starts_once_for_a_home_and_only_where_there_is_something_to_ask_for(
    away: Away, tmp_path: Path
) -> None:
    assert address_of(away.for_tasks()) == address_of(away.sent)
    assert address_of(for_tasks(Secrets(tokens=away.tokens), cluster(away.home))) == address_of(away.sent)
    started = key_service._service.cache_info().currsize
    assert for_tasks(Secrets(), cluster(tmp_path / "another")) == Secrets()
    assert key_service._service.cache_info().currsize == started


def test_it_listens_where_the_setting_says_at_the_first_port_that_is_free(
    away: Away, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = address_of(away.sent)
    assert own.host == "127.0.0.1", "the address that leads to the master"
    found = address_of(away.for_tasks(key_service=f"localhost:{own.port}"))
    assert found.host == "localhost" and own.port < found.port < own.port + 16
    assert found.ask({"tokens_of": ["a"]}) == {"found": away.tokens.tokens_of(["a"])}
    # No address of this machine: it leads here from elsewhere.
    monkeypatch.setattr(sealed_requests, "_EVERY", "127.0.0.1")
    behind = address_of(away.for_tasks(key_service="192.0.2.7:0"))
    assert behind.host == "192.0.2.7"
    assert replace(behind, host="127.0.0.1").ask({"tokens_of": ["a"]}) == found.ask({"tokens_of": ["a"]})


def test_where_it_cannot_listen_the_setting_is_named_and_without_one_the_task_is_refused(
    away: Away, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sealed_requests, "_PORTS", 1)
    taken = f"127.0.0.1:{address_of(away.sent).port}"
    for address in (taken, "no..host:7099"):
        with pytest.raises(KeyServiceRefused, match=address):
            away.for_tasks(key_service=address)
    key_service._service.cache_clear()
    on_yarn = cluster(away.home).model_copy(update={"spark_master": "yarn"})
    found = for_tasks(Secrets(tokens=away.tokens), on_yarn)
    assert found.tokens is not None and found.tokens.service is None
    assert "OMNISUPPORT_KEY_SERVICE" in caplog.text
    with pytest.raises(HomeFileNeeded, match="pii_tokens"):
        replace(found.tokens, path=away.tokens_there.path).tokens_of(["a"])


@pytest.mark.parametrize(
    "address", ["7099", "host", "host:port", "http://host:7099", "host:7099:1", "host:65536", "0.0.0.0:7099"]
)
def test_the_setting_is_host_and_port(tmp_path: Path, address: str) -> None:
    with pytest.raises(ValueError, match="host:port"):
        cluster(tmp_path, key_service=address)


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("spark://127.0.0.1:7077", "127.0.0.1"),
        ("spark://127.0.0.1:7077,127.0.0.2:7077", "127.0.0.1"),
        ("sc://127.0.0.1:15002/;token=abc", "127.0.0.1"),
        ("k8s://https://127.0.0.1:6443", "127.0.0.1"),
        ("spark://[::1]:7077", "::1"),
        ("yarn", None),
        ("spark://no-such-host.invalid:7077", None),
    ],
)
def test_the_address_is_the_one_that_leads_to_the_cluster(url: str, host: str | None) -> None:
    assert key_service._own_host(url) == host
