"""Tables of withdrawn contracts that share a subject: no certificate is complete while they have data."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from omnisupport_ingest.contracts.load import load_contract
from omnisupport_ingest.contracts.subject_keys import FILE, SubjectKeys
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.read.export_ledger import note_export
from omnisupport_ingest.review import subject_erasure
from omnisupport_ingest.review.erasing import key_text
from omnisupport_ingest.review.subject_erasure import erase_subject, look_up_subject
from omnisupport_ingest.sources.encrypting import EncryptedLanding
from omnisupport_ingest.storage import storage_of
from omnisupport_ingest_tests.cli.command import command
from omnisupport_ingest_tests.layers.story import CONTRACT, SOURCE, Change, Commit, Story
from omnisupport_ingest_tests.recovery.pipeline import open_workspace

WITHDRAWN = "tables of withdrawn contracts"


def document(table: str, subject: str | None) -> dict[str, Any]:
    found = copy.deepcopy(CONTRACT)
    found["x-cdc"] |= {"table": table, "pii": {"body": {"policy": "keep", "note": "A test."}}}
    if subject is not None:
        found["x-cdc"] |= {"at_rest": {"pii": "encrypted", "subject": subject, "subject_column": "id"}}
    return found


@pytest.fixture
def story(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Story:
    """Row 1 of ``notes`` landed encrypted, of the subject ``person``; nothing waits to be judged."""
    story = Story(tmp_path / "told")
    story.write_contract(document("notes", "person"))
    story.workspace = open_workspace(tmp_path / "told")
    home = story.workspace.home
    landing = EncryptedLanding(SOURCE, SubjectKeys(home.path / FILE), lambda: [story.contract])
    story.store = LandingStore(home.landing, SOURCE, as_landed=landing, divisions_as_landed=landing.divisions)
    story.land(Commit(20, 61, [Change("c", 1, {"title": "one", "body": "Ada"})]))
    monkeypatch.setattr(subject_erasure, "windows_waiting", lambda *_: [])
    return story


def withdraw(story: Story, table: str, subject: str | None) -> None:
    """``table`` is withdrawn, and its dimension is there."""
    file = story.contracts.parent / "withdrawn" / f"{SOURCE}.{table}.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(document(table, subject)))
    story.workspace.dimension(load_contract(file)).open()


def certificate(workspace: Workspace, story: Story) -> tuple[str, dict[str, Any]]:
    done = erase_subject(workspace, story.contract, key_text(["1"]), erased_by="ana", why="request 7")
    assert done.certificate is not None
    found = json.loads(done.certificate.read_text())
    assert done.complete == (found["state"] == "complete")
    return found["state"], {each["what"]: each for each in found["remains"]}


def test_no_certificate_is_complete_while_a_withdrawn_table_of_the_subject_has_data(story: Story) -> None:
    withdraw(story, "tickets", "person")
    dry = look_up_subject(story.workspace, story.contract, key_text(["1"]))
    assert WITHDRAWN in [each["what"] for each in dry.remains]
    export = story.workspace.home.path / "tickets.csv"
    export.write_text("Ada")
    note_export(story.workspace.home.path, f"{SOURCE}.tickets", export, 1)
    state, remains = certificate(story.workspace, story)
    assert state == "pending"
    (named,) = remains["exports of withdrawn tables"]["where"]
    assert named.startswith(f"{export} (SHA-256 ")
    assert remains[WITHDRAWN]["where"] == [f"{SOURCE}/dim_tickets"]
    assert f"contracts withdraw tickets --source {SOURCE} --drop-data" in remains[WITHDRAWN]["why"]
    folder = story.workspace.home.lake / SOURCE / "dim_tickets"
    storage_of(folder).remove_folder(folder)
    state, remains = certificate(story.workspace, story)
    assert (state, WITHDRAWN in remains) == ("complete", False)


def test_withdrawn_tables_of_others_are_named_and_those_without_personal_values_are_not(story: Story) -> None:
    withdraw(story, "staff", None)
    state, remains = certificate(story.workspace, story)
    assert (state, remains[WITHDRAWN]["where"]) == ("complete", [f"{SOURCE}/dim_staff"])
    file = story.contracts.parent / "withdrawn" / f"{SOURCE}.staff.json"
    file.write_text(json.dumps(document("staff", None) | {"x-cdc": CONTRACT["x-cdc"] | {"table": "staff"}}))
    assert WITHDRAWN not in certificate(story.workspace, story)[1]


def test_the_command_does_not_say_that_no_cell_is_left(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    withdraw(story, "tickets", "person")
    home = story.workspace.home
    monkeypatch.setenv("OMNISUPPORT_HOME", str(home.path))
    monkeypatch.setenv("OMNISUPPORT_CONTRACTS_DIR", str(story.contracts))
    done = command("erase", "notes", "1", "--source", SOURCE, "--subject", "--reason", "request 7")
    assert done.code == 0, done.output
    assert "but in tables of withdrawn contracts" in done.out and "(not complete yet)" in done.out
    assert f"contracts withdraw tickets --source {SOURCE} --drop-data" in done.out
    refused = command("erase", "tickets", "1", "--source", SOURCE, "--reason", "request 7")
    assert refused.code == 1 and "is withdrawn" in refused.err and "--drop-data" in refused.err
    assert command("erase", "unknown", "1", "--source", SOURCE, "--reason", "request 7").code == 2
