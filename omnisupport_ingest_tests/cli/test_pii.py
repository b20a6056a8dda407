"""``pii``: what is in force, what might be personal, and finding a value again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from omnisupport_ingest.cli.main import cli
from omnisupport_ingest.contracts.pii_keys import keys_in_force
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest_tests.layers.story import CONTRACT, SOURCE, Change, Commit, Story

KEYS = "b=env:PII_CLI_B,a=env:PII_CLI_A"
PEOPLE = ("ada@example.org", "eve@example.org", "bob@example.org", "cai@example.org")


@pytest.fixture
def story(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Story:
    """Four rows that have landed, whose titles are addresses, by a contract that hashes them."""
    story = Story(tmp_path)
    changes = [
        Change("c", number, {"title": address, "body": "text"}) for number, address in enumerate(PEOPLE, 1)
    ]
    story.land(Commit(10, 1, changes))
    document = json.loads(json.dumps(CONTRACT))
    document["x-cdc"]["pii"] = {"title": {"policy": "hash", "note": "Joins."}}
    story.write_contract(document)
    for name, value in {
        "OMNISUPPORT_HOME": str(tmp_path / "home"),
        "OMNISUPPORT_CONTRACTS_DIR": str(tmp_path / "contracts"),
        "OMNISUPPORT_WINDOW": "minutes:1",
        "OMNISUPPORT_PII_KEYS": KEYS,
        "PII_CLI_A": "former secret " * 3,
        "PII_CLI_B": "current secret " * 3,
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    return story


def run(*command: str, told: str | None = None) -> Result:
    return CliRunner().invoke(cli, ["pii", *command], input=told)


def test_show_names_policies_and_keys_and_no_secret(story: Story) -> None:
    done = run("show")
    assert "desk.notes.title: hash. Joins." in done.stdout
    assert "Key b, from env PII_CLI_B, current." in done.stdout
    assert "Key a, from env PII_CLI_A, former." in done.stdout
    assert "secret " not in done.stdout
    (column,) = json.loads(run("show", "--json").stdout)["columns"]
    assert column == {
        "table": "desk.notes",
        "column": "title",
        "policy": "hash",
        "mask": None,
        "note": "Joins.",
        "at_rest": "plain",
    }


def test_show_says_which_secret_is_missing(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PII_CLI_A")
    assert "PII_CLI_A" in run("show").stdout.splitlines()[-1]
    assert "PII_CLI_A" in json.loads(run("show", "--json").stdout)["problem"]


def test_scan_tells_what_landed_seems_to_be_and_prints_no_value(story: Story) -> None:
    done = run("scan", "--table", "notes")
    assert "title: e-mail address, by 4 of 4 different values. Proposed: mask (email); it has hash." in (
        done.stdout
    )
    assert "body: free text, by its name. Proposed: mask (text)." in done.stdout
    assert not any(address in done.stdout for address in PEOPLE)
    (table,) = json.loads(run("scan", "--source", SOURCE, "--json").stdout)["tables"]
    assert (table["events"], [each["column"] for each in table["proposals"]]) == (4, ["title", "body"])


def test_scan_shows_what_a_person_has_decided_to_keep_and_not_what_is_still_to_decide(story: Story) -> None:
    document = json.loads(json.dumps(CONTRACT))
    for note, shown in (
        ("People write freely.", "Proposed: mask (text); it has keep: People write freely."),
        ("To decide: free text, by its name; mask (text) would fit.", "Proposed: mask (text).\n"),
    ):
        document["x-cdc"]["pii"] = {"body": {"policy": "keep", "note": note}}
        story.write_contract(document)
        assert shown in run("scan", "--table", "notes").stdout


def test_show_says_where_no_key_is_needed(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    story.write_contract(json.loads(json.dumps(CONTRACT)))
    monkeypatch.delenv("OMNISUPPORT_PII_KEYS")
    assert "names no key; no policy needs one." in run("show").stdout


def test_hash_prints_what_to_look_for_under_every_key(story: Story) -> None:
    meant = [key.hash_of("ada@example.org") for key in keys_in_force(KEYS).all]
    assert run("hash", "-", told="ada@example.org").stdout.split() == meant
    assert run("hash", "ada@example.org").stdout.split() == meant


def test_a_token_is_found_looked_up_and_forgotten(story: Story) -> None:
    tokens = story.workspace.tokens
    tokens.make()
    (token,) = tokens.tokens_of(["ada@example.org"])
    assert run("token", "-", told="ada@example.org").stdout.strip() == token
    assert run("lookup", token).stdout.strip() == "ada@example.org"
    assert run("forget", token).exit_code == 0
    for command in (["lookup", token], ["forget", token], ["token", "ada@example.org"]):
        refused = run(*command)
        assert refused.exit_code == 1 and isinstance(refused.exception, IngestError | SystemExit)
        assert "ada@example.org" not in refused.output


def test_looking_makes_no_map(story: Story) -> None:
    assert run("lookup", "tok_1").exit_code == 1
    assert not story.workspace.tokens.path.exists()
