"""The erasure of a subject whose values land plain: what is refused, recorded and named."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from omnisupport_ingest.cdc.protecting import Protections
from omnisupport_ingest.contracts.in_force import contracts_in_force
from omnisupport_ingest.contracts.model import ContractError, Contracts
from omnisupport_ingest.contracts.subject_keys import SubjectKeysUnreadable
from omnisupport_ingest.landing.manifest import StreamSpan
from omnisupport_ingest.landing.rows import LandedEvent
from omnisupport_ingest.layers.erasures import DestroyedKeysLost, _named_in, erased_subjects
from omnisupport_ingest.layers.events.judging_rules import rules_in_force
from omnisupport_ingest.layers.versions import RulesVersions
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.read.protected_rows import LandedProtection
from omnisupport_ingest.review import subject_erasure
from omnisupport_ingest.review.erasing import ErasureRefused, key_text
from omnisupport_ingest.review.subject_erasure import SubjectErased, erase_subject, look_up_subject
from omnisupport_ingest_tests.cli.command import command
from omnisupport_ingest_tests.layers.story import (
    CONTRACT,
    FIRST,
    SECOND,
    SOURCE,
    START,
    Change,
    Commit,
    Story,
    events,
)
from omnisupport_ingest_tests.recovery.pipeline import open_workspace

PLAIN = {"pii": "plain", "subject": "person", "subject_column": "title"}
"""A row is of whom its title names."""

COMMAND = ("erase", "notes", "1", "--source", SOURCE, "--subject")


def document(at_rest: dict[str, str] | None) -> dict[str, Any]:
    found = copy.deepcopy(CONTRACT)
    found["x-cdc"] |= {"pii": {"body": {"policy": "keep", "note": "A test."}}}
    if at_rest is not None:
        found["x-cdc"]["at_rest"] = at_rest
    return found


def sent(op: str, number: int, who: str, body: str) -> Change:
    return Change(op, number, {"title": who, "body": body})


@pytest.fixture
def story(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Story:
    """Rows 1 and 2 are of anna, row 3 is of eve, row 4 was of anna and is eve's; nothing is judged yet."""
    monkeypatch.setattr(subject_erasure, "windows_waiting", lambda *_: [])
    made = Story(tmp_path / "story")
    made.write_contract(document(PLAIN))
    made.workspace = open_workspace(tmp_path / "story")
    of = enumerate(("anna", "anna", "eve", "anna"), start=1)
    made.land(Commit(10, 1, [sent("c", number, who, f"{who} {number}") for number, who in of]))
    made.land(Commit(20, 61, [sent("u", 4, "eve", "eve 4")]))
    return made


def erased(story: Story, key: str = "1") -> tuple[SubjectErased, dict[str, Any]]:
    done = erase_subject(story.workspace, story.contract, key_text([key]), erased_by="ana", why="request 7")
    assert done.certificate is not None
    return done, json.loads(done.certificate.read_text())


def named_windows(story: Story) -> set[str]:
    return {*story.workspace.subjects.destroyed_by_window(SOURCE)}


@pytest.mark.parametrize("at_rest", [None, {"pii": "plain"}])
def test_a_contract_that_names_no_subject_is_refused_with_what_to_write(story: Story, at_rest: Any) -> None:
    story.write_contract(document(at_rest))
    workspace = open_workspace(story.contracts.parent)
    (contract,) = workspace.contracts.of_source(SOURCE)
    with pytest.raises(ErasureRefused, match="does not say whose a row is") as refused:
        look_up_subject(workspace, contract, key_text(["1"]))
    for member in ("x-cdc.at_rest", '"subject"', '"subject_column"', "x-cdc.pii"):
        assert member in refused.value.fix


def test_looking_up_finds_all_of_the_subject_and_makes_nothing(story: Story) -> None:
    found = look_up_subject(story.workspace, story.contract, key_text(["1"]))
    assert (found.certificate, found.state, found.images, found.plain_images) == (None, None, 0, 3)
    assert found.windows == (FIRST,)
    home = story.workspace.home.path
    assert not (home / "keys").exists() and not (home / "certificates").exists()


def test_a_mistyped_key_and_a_row_of_two_subjects_are_refused_and_make_nothing(story: Story) -> None:
    for key, problem in (("77", "has no row with that key"), ("4", "has belonged to 2 subjects")):
        with pytest.raises(ErasureRefused, match=problem):
            erased(story, key)
    assert not (story.workspace.home.path / "keys").exists()
    # Once one of both is erased, the row is the other's.
    erased(story, "1")
    done, _ = erased(story, "4")
    assert done.plain_images == 5 and set(done.windows) == {FIRST, SECOND}


def test_the_record_names_the_windows_of_the_subject_and_holds_no_value(story: Story) -> None:
    done, certificate = erased(story)
    assert (done.plain_images, done.images, certificate["state"]) == (3, 0, "incomplete")
    assert certificate["keys"]["destroyed_now"] == 0 and len(certificate["keys"]["ids"]) == 2
    (file,) = certificate["record"]
    assert (file["place"], file["count"]) == ("landing", 3) and len(file["sha256"]) == 64
    assert named_windows(story) == {FIRST}
    for path in (done.certificate, story.workspace.subjects.path):
        assert path is not None and b"anna" not in path.read_bytes()
    subjects = erased_subjects(story.workspace, SOURCE)
    assert subjects.among([("person", "anna"), ("person", "eve")]) == [True, False]


def test_what_the_source_sends_later_makes_no_window_stale_but_after_a_killed_command(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(subject_erasure, "erase_in_sealed_windows", killed)
        erased(story)
    # Nobody knows what a run has judged meanwhile.
    story.land(Commit(30, 62, [sent("u", 1, "anna", "anna again")]))
    erased(story)
    assert named_windows(story) == {FIRST, SECOND}
    before = RulesVersions(story.workspace, SOURCE).apart()
    story.land(Commit(40, 121, [sent("u", 1, "anna", "anna once more")]))
    done, certificate = erased(story)
    assert (done.plain_images, sum(each["count"] for each in certificate["record"])) == (5, 5)
    assert RulesVersions(story.workspace, SOURCE).apart() == before


def test_a_certificate_is_completed_though_retention_has_removed_what_said_whose_the_row_is(
    story: Story,
) -> None:
    first, before = erased(story)
    for file in (story.workspace.home.landing / SOURCE).rglob("*.parquet"):
        file.unlink()
    done, after = erased(story)
    assert (done.certificate, done.state) == (first.certificate, "complete")
    assert (after["keys"]["ids"], after["record"]) == (before["keys"]["ids"], [])
    # A mistyped key has no certificate.
    with pytest.raises(ErasureRefused, match="has no row with that key"):
        erased(story, "77")


def test_without_the_record_nothing_is_judged_as_if_nobody_was_erased(story: Story) -> None:
    keys = story.workspace.subjects
    erased(story, "3")
    older = keys.path.read_bytes()
    done, _ = erased(story)
    assert erased_subjects(story.workspace, SOURCE)
    keys.path.write_bytes(older)
    with pytest.raises(DestroyedKeysLost, match="would come back") as refused:
        erased_subjects(story.workspace, SOURCE)
    assert done.certificate is not None and done.certificate.name in refused.value.fix
    erased(story)
    assert erased_subjects(story.workspace, SOURCE).among([("person", "anna")]) == [True]
    shutil.rmtree(keys.path.parent)
    with pytest.raises(SubjectKeysUnreadable, match="which subjects are erased"):
        erased_subjects(story.workspace, SOURCE)


@pytest.mark.parametrize("withdrawn", [True, False])
def test_a_table_without_its_contract_brings_nothing_back(story: Story, withdrawn: bool) -> None:
    erased(story)
    (file,) = story.contracts.glob("*.json")
    away = story.contracts.parent / "withdrawn" / f"{SOURCE}.notes.json"
    away.parent.mkdir()
    file.rename(away if withdrawn else story.contracts.parent / "lost.json")
    workspace = replace(story.workspace, contracts=Contracts(()))
    subjects = erased_subjects(workspace, SOURCE)
    assert subjects.among([("person", "anna"), ("person", "eve")]) == [True, False]
    of_table = {("public", "notes")}
    assert ({*subjects.tables}, subjects.unnamed) == ((of_table, set()) if withdrawn else (set(), of_table))
    event = events(Commit(50, 200, [sent("u", 1, "anna", "anna")]))[0]
    left = LandedProtection(Protections.of((), workspace.secrets(())), subjects).of(event).after
    assert json.loads(left or "null") == ({"id": "1", "title": "anna", "body": None} if withdrawn else None)
    shutil.rmtree(workspace.subjects.path.parent)
    with pytest.raises((SubjectKeysUnreadable, DestroyedKeysLost)):
        erased_subjects(workspace, SOURCE)


def test_a_certificate_that_names_no_keys_is_read_once(story: Story) -> None:
    path = story.workspace.home.path / "certificate.json"
    path.write_text(json.dumps({"source": SOURCE, "state": "complete"}))
    assert [_named_in(path, 1, 2) for _ in range(2)] == [(SOURCE, frozenset())] * 2


@pytest.mark.parametrize("at_rest", [PLAIN | {"subject": "client"}, {"pii": "plain"}])
def test_an_erased_subject_keeps_its_name(story: Story, at_rest: Any) -> None:
    erased(story)
    story.write_contract(document(at_rest))
    with pytest.raises(ContractError, match="would be readable again") as problem:
        contracts_in_force(story.workspace.settings)
    assert '"pii": "plain" and "subject": "person"' in problem.value.fix


def test_a_table_that_shares_the_subject_after_its_erasure_keeps_its_name(story: Story) -> None:
    erased(story)
    joined = document(PLAIN)
    joined["title"], joined["x-cdc"]["table"] = "Letters", "letters"
    file = story.contracts / "letters.json"
    file.write_text(json.dumps(joined))
    workspace = open_workspace(story.contracts.parent)
    assert len(workspace.contracts.of_source(SOURCE)) == 2
    rules_in_force(workspace, SOURCE, RulesVersions(workspace, SOURCE), workspace.raw(SOURCE).open(), ())
    joined["x-cdc"]["at_rest"] = PLAIN | {"subject": "writer"}
    file.write_text(json.dumps(joined))
    with pytest.raises(ContractError, match="letters belong to the subject 'writer'"):
        contracts_in_force(story.workspace.settings)


def test_an_erased_subject_may_land_encrypted_from_then_on(story: Story) -> None:
    erased(story)
    story.write_contract(document(PLAIN | {"pii": "encrypted"}))
    contracts_in_force(story.workspace.settings)
    workspace = open_workspace(story.contracts.parent)
    assert erased_subjects(workspace, SOURCE).among([("person", "anna")]) == [True]
    (contract,) = workspace.contracts.of_source(SOURCE)
    erase_subject(workspace, contract, key_text(["1"]), erased_by="ana", why="request 7")
    story.write_contract(document(PLAIN))
    with pytest.raises(ContractError, match="would land readable"):
        contracts_in_force(story.workspace.settings)


def test_what_landed_is_shown_without_the_values_of_erased_subjects(story: Story) -> None:
    erased(story)
    shown = LandedProtection.open(story.workspace.settings, SOURCE)
    commit = Commit(50, 200, [sent("u", 1, "anna", "anna"), sent("c", 9, "eve", "eve")])
    after = [json.loads(shown.of(each).after or "") for each in events(commit)]
    assert [(each["title"], each["body"]) for each in after] == [("anna", None), ("eve", "eve")]


def test_who_follows_what_lands_sees_no_value_of_who_is_erased_meanwhile(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMNISUPPORT_HOME", str(story.workspace.home.path))
    monkeypatch.setenv("OMNISUPPORT_CONTRACTS_DIR", str(story.contracts))
    follow = ("-m", "omnisupport_ingest.cli.main", "landing", "tail", "--source", SOURCE, "-n", "1", "-f")
    with subprocess.Popen([sys.executable, *follow], stdout=subprocess.PIPE, text=True) as following:
        try:
            assert following.stdout is not None
            assert json.loads(following.stdout.readline())["after"]["body"] == "eve 4"
            erased(story)
            story.land(Commit(30, 62, [sent("u", 1, "anna", "anna again")]))
            shown = json.loads(following.stdout.readline())["after"]
            assert shown == {"id": "1", "title": "anna", "body": None}
        finally:
            following.kill()


def test_the_command_says_what_is_recorded_and_what_landing_keeps(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMNISUPPORT_HOME", str(story.workspace.home.path))
    monkeypatch.setenv("OMNISUPPORT_CONTRACTS_DIR", str(story.contracts))
    dry = command(*COMMAND, "--dry-run")
    assert dry.code == 0 and "3 images that landed plain" in dry.out, dry.output
    assert "Nothing was recorded" in dry.out
    done = command(*COMMAND, "--reason", "request 7")
    assert done.code == 0 and "recorded as erased" in done.out, done.output
    assert "keep 3 images that landed plain, until retention removes them" in done.out
    assert "Certificate (incomplete)" in done.out
    shown = json.loads(command(*COMMAND, "--reason", "request 7", "--json").out)
    assert (shown["state"], shown["complete"], shown["images_plain"]) == ("incomplete", False, 3)


def test_the_old_key_in_a_key_change_is_no_second_subject_without_a_value(story: Story) -> None:
    story.write_contract(document({"pii": "plain", "subject": "person", "subject_column": "id"}))
    workspace = open_workspace(story.contracts.parent)
    commit = Commit(
        60, 70, [sent("d", 1, "anna", ""), Change("c", 7, {"title": "anna", "body": "anna"}, (), 1)]
    )
    moved = [each._replace(before='{"id":"1"}') for each in events(commit)]
    end = Lsn(60)
    story._seal(moved, StreamSpan(Lsn(20), end, end, end, 60, START, START))
    (contract,) = workspace.contracts.of_source(SOURCE)
    found = look_up_subject(workspace, contract, key_text(["7"]))
    assert found.plain_images == 1
    assert "images of its rows that are of another subject" in {each["what"] for each in found.remains}


def test_a_window_is_named_though_only_a_delivered_line_has_the_subject(story: Story) -> None:
    line = json.dumps({"op": "d", "before": {"id": 9, "title": "anna", "body": "anna 9"}, "after": None})
    unread = json.dumps({"id": 8, "title": "anna", "body": "anna 8"})
    (deleted, kept_out) = events(Commit(30, 130, [sent("d", 9, "", ""), sent("u", 8, "", "")]))
    land(
        story,
        deleted._replace(before=key_image(9), envelope=line),
        kept_out._replace(after=None, envelope=unread, identity='["kept out","files","1","a"]'),
    )
    done, certificate = erased(story)
    assert (done.plain_images, sum(each["count"] for each in certificate["record"])) == (5, 5)
    assert named_windows(story) == {FIRST, "2026-01-01T1202"}


def land(story: Story, *landed: LandedEvent) -> None:
    """Land ``landed`` as the next batch, as it came."""
    end = Lsn(landed[-1].commit_lsn)
    story._seal([*landed], StreamSpan(Lsn(20), end, end, end, 60, START, START))


def key_image(number: int) -> str:
    return f'{{"id":"{number}"}}'
