"""What an erasure of a subject finds, and what its certificate says where it cannot find or reach all."""

from __future__ import annotations

import copy
import json
import shutil
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from deltalake.transaction import AddAction

from omnisupport_ingest.contracts.in_force import contracts_in_force, use
from omnisupport_ingest.contracts.model import ContractError
from omnisupport_ingest.contracts.subject_keys import FILE, SubjectKeys
from omnisupport_ingest.lake.table import LakeTable
from omnisupport_ingest.landing.kept_positions import keep_positions
from omnisupport_ingest.landing.standing import LandedPart
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.layers.erasures import DestroyedKeysLost, refuse_lost
from omnisupport_ingest.layers.removed import BEGUN, DONE, RAW, Removal
from omnisupport_ingest.layers.versions import RulesVersions
from omnisupport_ingest.read.export_ledger import note_export
from omnisupport_ingest.retention.removing import _rows
from omnisupport_ingest.review import subject_erasure
from omnisupport_ingest.review.erasing import ErasureRefused, key_text
from omnisupport_ingest.review.subject_erasure import SubjectErased, erase_subject, look_up_subject
from omnisupport_ingest.sources.encrypting import EncryptedLanding
from omnisupport_ingest_tests.cli.command import command
from omnisupport_ingest_tests.layers.story import CONTRACT, SOURCE, START, Change, Commit, Story
from omnisupport_ingest_tests.recovery.pipeline import open_workspace

SEALED_WINDOW = "2026-01-01T1100"
SEALED = "sealed windows with cells that can be read"
HASHES = "hashes in the positions that are kept"
CELLS, NOT_SEARCHED = "cells that can be read", "tables whose sealed windows were not searched"


def document(table: str = "notes", *, subject_column: str = "id", hashed: bool = False) -> dict[str, Any]:
    found = copy.deepcopy(CONTRACT)
    pii = {"body": {"policy": "keep", "note": "A test."}}
    if hashed:
        pii[subject_column] = {"policy": "hash", "note": "Whose."}
    found["x-cdc"] |= {
        "table": table,
        "pii": pii,
        "at_rest": {"pii": "encrypted", "subject": "person", "subject_column": subject_column},
    }
    return found


def told(folder: Path, contract: dict[str, Any]) -> Story:
    """Row 1 of ``notes`` landed encrypted; its title names the person 42."""
    story = Story(folder)
    story.write_contract(contract)
    story.workspace = open_workspace(folder)
    home = story.workspace.home
    landing = EncryptedLanding(SOURCE, SubjectKeys(home.path / FILE), lambda: [story.contract])
    story.store = LandingStore(home.landing, SOURCE, as_landed=landing, divisions_as_landed=landing.divisions)
    story.land(Commit(20, 61, [Change("c", 1, {"title": "p42", "body": "Ada"})]))
    return story


@pytest.fixture(autouse=True)
def nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject_erasure, "windows_waiting", lambda *_: [])


def place(table: LakeTable, row: dict[str, Any], partition: str = "") -> None:
    """Commit a file with ``row`` to ``table``, as no run would."""
    table.open()
    columns = {name: pa.nulls(1, pa.string()) if value is None else [value] for name, value in row.items()}
    if "_cdc_exact" in row:
        texts = [list(row["_cdc_exact"].items())]
        columns["_cdc_exact"] = pa.array(texts, pa.map_(pa.string(), pa.string()))
    file = table.folder / "made-by-a-test.parquet"
    pq.write_table(pa.table(columns), file)
    place_file(table, file, partition)
    file.unlink()


def place_file(table: LakeTable, content: Path, partition: str = "") -> None:
    """Commit ``content`` to ``table`` as a file of ``partition``."""
    table.open()
    delta = DeltaTable(str(table.folder))
    file = table.folder / partition / "part-test.parquet"
    file.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(content, file)
    values = dict(part.split("=", 1) for part in partition.split("/") if part)
    path = file.relative_to(table.folder).as_posix()
    added = AddAction(path, file.stat().st_size, values, 0, True, json.dumps({"numRecords": 1}))
    delta.create_write_transaction([added], mode="append", schema=delta.schema(), partition_by=[*values])


def place_event(story: Story, table: str = "notes") -> None:
    """An accepted event of row 2 with the subject of row 1 stands in the window ``SEALED_WINDOW``."""
    row = {
        "source_schema": "public",
        "key": '["2"]',
        "before": None,
        "after": '{"id":"1","title":"p42","body":"Ada sealed"}',
    }
    place(story.workspace.deduped(SOURCE), row, f"window={SEALED_WINDOW}/source_table={table}")


def seal(story: Story) -> None:
    """Retention has removed the events of ``SEALED_WINDOW`` from raw."""
    removal = Removal(RAW, SEALED_WINDOW, START, 1, 1, 1, "raw is kept for P10D", "test", datetime.now(UTC))
    for step in (BEGUN, DONE):
        story.workspace.removals(SOURCE).append(lambda _, step=step: _rows([removal], step))


def erased(story: Story) -> tuple[SubjectErased, dict[str, Any], dict[str, Any]]:
    """Erase the subject of row 1; the result, the certificate, and what remains by its name."""
    done = erase_subject(story.workspace, story.contract, key_text(["1"]), erased_by="ana", why="request 7")
    assert done.certificate is not None
    found = json.loads(done.certificate.read_text())
    assert done.complete == (found["state"] == "complete")
    return done, found, {each["what"]: each for each in found["remains"]}


def test_sealed_rows_that_nobody_can_compare_keep_a_certificate_from_being_complete(tmp_path: Path) -> None:
    story = told(tmp_path, document(subject_column="title", hashed=True))
    place_event(story)
    _, found, remains = erased(story)
    assert (found["state"], NOT_SEARCHED in remains) == ("complete", False), "no window is sealed"
    seal(story)
    _, found, remains = erased(story)
    assert (found["state"], remains[NOT_SEARCHED]["where"]) == ("incomplete", ["public.notes"])


def test_sealed_rows_that_could_not_be_rewritten_are_counted(tmp_path: Path) -> None:
    story = told(tmp_path, document(subject_column="title"))
    place_event(story)
    seal(story)
    _, found, remains = erased(story)
    assert (found["state"], NOT_SEARCHED in remains) == ("pending", False)
    assert len(remains[CELLS]["where"]) == 1
    assert remains[SEALED]["where"] == [SEALED_WINDOW] and "stays pending" in remains[SEALED]["why"]


def test_a_subject_whose_images_are_all_sealed_is_erased_by_its_own_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    story = told(tmp_path, document())
    place_event(story)
    seal(story)
    shutil.rmtree(story.store.folder / "data")
    monkeypatch.setenv("OMNISUPPORT_HOME", str(story.workspace.home.path))
    monkeypatch.setenv("OMNISUPPORT_CONTRACTS_DIR", str(story.contracts))
    asked = ("erase", "notes", "1", "--source", SOURCE, "--subject")
    dry = command(*asked, "--dry-run")
    assert (dry.code, "1 cell above raw can be read" in dry.out) == (0, True), dry.output
    done = command(*asked, "--reason", "request 7", "--json")
    told_of = json.loads(done.out)
    # The event that the test placed there has no state of its window, so it cannot be rewritten.
    assert (done.code, told_of["sealed_windows"], told_of["complete"]) == (0, [SEALED_WINDOW], False)
    (key,) = story.workspace.subjects.ids_of([(SOURCE, "person", "1")])
    assert story.workspace.subjects.destroyed([key]) == {key}
    # Nobody landed by the number 7.
    refused = command("erase", "notes", "7", "--source", SOURCE, "--subject", "--reason", "request 7")
    assert refused.code == 1 and "as PostgreSQL prints it" in refused.err


def test_a_row_that_cannot_say_whose_it_is_as_its_images_are_sealed_is_refused_with_that_cause(
    tmp_path: Path,
) -> None:
    story = told(tmp_path, document(subject_column="title"))
    place_event(story)
    seal(story)
    shutil.rmtree(story.store.folder / "data")
    with pytest.raises(ErasureRefused, match="retention has removed them") as refused:
        look_up_subject(story.workspace, story.contract, key_text(["2"]))
    assert "whose key title is" in refused.value.fix


def test_images_count_once_wherever_they_are(tmp_path: Path) -> None:
    story = told(tmp_path, document())
    (part,) = story.store.parts(story.store.windows()[0])
    landed = story.store.folder / part.path
    raw = story.workspace.raw(SOURCE)
    place_file(raw, landed, f"window={part.window}")
    assert erased(story)[0].images == 1
    landed.unlink()
    assert erased(story)[0].images == 1, "raw has it still"


def test_events_of_a_withdrawn_table_are_counted_where_its_data_was_dropped(tmp_path: Path) -> None:
    story = told(tmp_path, document())
    file = story.contracts.parent / "withdrawn" / f"{SOURCE}.tickets.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(document("tickets")))
    place_event(story, "tickets")
    seal(story)
    _, found, remains = erased(story)
    assert (found["state"], len(remains[CELLS]["where"])) == ("pending", 1)
    file.write_text(json.dumps(document("tickets", subject_column="title", hashed=True)))
    _, found, remains = erased(story)
    assert (found["state"], remains[NOT_SEARCHED]["where"]) == ("incomplete", ["public.tickets"])


def test_a_former_file_of_raw_that_shows_the_subject_keeps_a_certificate_from_being_complete(
    tmp_path: Path,
) -> None:
    story = told(tmp_path, document())
    raw = story.workspace.raw(SOURCE)
    raw.open()
    (part,) = story.store.parts(story.store.windows()[0])
    landed = pq.read_table(story.store.folder / part.path)
    shown = pa.array(['{"id":"1","title":"p42","body":"Ada plain"}'])
    former = raw.folder / "part-former.parquet"
    pq.write_table(landed.set_column(landed.column_names.index("after"), "after", shown), former)
    (raw.folder / "part-draft.parquet").write_bytes(b"a run is writing it")
    _, found, remains = erased(story)
    assert found["state"] == "incomplete"
    assert [Path(each).name for each in remains["images that landed plain"]["where"]] == [former.name]


def test_every_export_is_named_also_one_that_was_moved_before_another_took_its_path(tmp_path: Path) -> None:
    story = told(tmp_path, document())
    home = story.workspace.home.path
    export = home / "notes.csv"
    export.write_text("Ada in May")
    note_export(home, f"{SOURCE}.notes", export, 1)
    export.rename(home / "notes-may.csv")
    export.write_text("Ada in June")
    note_export(home, f"{SOURCE}.notes", export, 1)
    _, _, remains = erased(story)
    assert remains["exports that were written before"]["where"] == [str(export)]
    (moved,) = remains["exports that are not what was written, or not there any more"]["where"]
    assert moved == f"{export} (SHA-256 {sha256(b'Ada in May').hexdigest()})"


def test_hashes_that_are_kept_with_positions_are_named(tmp_path: Path) -> None:
    """Of a row without a key, or of a line that was no event, they are hashes of its values."""
    story = told(tmp_path, document())
    assert HASHES not in erased(story)[2]
    for batch in story.store.manifests():
        for file in batch.files:
            keep_positions(story.store.folder, LandedPart.of(batch, file))
    _, found, remains = erased(story)
    assert remains[HASHES]["where"] == [f"landing/{SOURCE}/positions"]
    assert found["state"] == "complete", "nobody can read them"


def test_a_killed_command_leaves_who_asked_and_the_windows_that_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    story = told(tmp_path, document())
    keys = story.workspace.subjects

    def killed(_keys: SubjectKeys, ids: Any) -> int:
        destroy(keys, ids)
        raise KeyboardInterrupt

    destroy = SubjectKeys.destroy
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(SubjectKeys, "destroy", killed)
        erased(story)
    (file,) = (story.workspace.home.path / "certificates").glob("*.json")
    begun = json.loads(file.read_text())
    assert (begun["state"], begun["asked"]["by"]) == ("pending", "ana")
    assert keys.destroyed_by_window(SOURCE).keys() == {*story.store.windows()}
    done = erase_subject(story.workspace, story.contract, key_text(["1"]), erased_by="bob", why="?")
    found = json.loads(file.read_text())
    assert (done.certificate, found["state"], found["asked"]) == (file, "complete", begun["asked"])


def test_an_older_file_of_keys_stops_judging_instead_of_bringing_values_back(tmp_path: Path) -> None:
    story = told(tmp_path, document())
    keys = story.workspace.subjects
    without_any = keys.path.read_bytes()
    story.land(Commit(30, 62, [Change("c", 2, {"title": "p43", "body": "Eve"})]))
    erased(story)
    (window,) = story.store.windows()
    after_one, of_one = keys.path.read_bytes(), RulesVersions(story.workspace, SOURCE).of(window)
    second = erase_subject(story.workspace, story.contract, key_text(["2"]), erased_by="ana", why="8")
    assert second.certificate is not None
    held = RulesVersions(story.workspace, SOURCE).of(window)
    refuse_lost(story.workspace, SOURCE, window, of_one, held)
    keys.path.write_bytes(without_any)
    with pytest.raises(DestroyedKeysLost, match="would come back"):
        refuse_lost(story.workspace, SOURCE, window, held, RulesVersions(story.workspace, SOURCE).of(window))
    keys.path.write_bytes(after_one)
    with pytest.raises(DestroyedKeysLost, match="would come back") as refused:
        refuse_lost(story.workspace, SOURCE, window, held, of_one)
    assert second.certificate.name in refused.value.fix
    erase_subject(story.workspace, story.contract, key_text(["2"]), erased_by="ana", why="8")
    refuse_lost(story.workspace, SOURCE, window, held, RulesVersions(story.workspace, SOURCE).of(window))


@pytest.mark.parametrize("name", ["swept-0123abcd", "swept-0123abcd.parquet"])
def test_a_file_that_a_killed_sweep_had_moved_aside_is_left_over(tmp_path: Path, name: str) -> None:
    story = told(tmp_path, document())
    table = story.workspace.dimension(story.contract)
    place(table, {"_cdc_key": '["9"]', "id": 9, "title": "p9", "body": "Eve"})
    aside = table.folder / ".staging" / name
    aside.parent.mkdir(exist_ok=True)
    pq.write_table(pa.table({"_cdc_key": ['["1"]'], "id": [1], "body": ["Ada"]}), aside)
    scratch = story.workspace.home.run / "repair-desk-abc"
    scratch.mkdir(parents=True)
    _, found, remains = erased(story)
    assert (found["state"], "files that no table names" in remains) == ("pending", True)
    assert not scratch.exists()


@pytest.mark.parametrize("at_rest", [{"pii": "encrypted", "subject": "client"}, None])
def test_an_erased_subject_gets_no_key_under_another_name(tmp_path: Path, at_rest: Any) -> None:
    story = told(tmp_path, document())
    settings = story.workspace.settings
    changed = document()
    changed["x-cdc"] |= {"at_rest": at_rest} if at_rest else {}
    if at_rest is None:
        del changed["x-cdc"]["at_rest"]
    story.write_contract(changed)
    contracts_in_force(settings)
    story.write_contract(document())
    erased(story)
    story.write_contract(changed)
    with pytest.raises(ContractError, match="would land readable") as refused:
        contracts_in_force(settings)
    assert '"subject": "person"' in refused.value.fix
    with pytest.raises(ContractError, match="would land readable"):
        use(settings, story.workspace.home, str(story.contracts), None)
    story.write_contract(document())
    contracts_in_force(settings)


def test_texts_of_values_that_their_column_cannot_hold_are_cells(tmp_path: Path) -> None:
    story = told(tmp_path, document())
    row = {"_cdc_key": '["1"]', "id": 1, "title": "p42", "body": None, "_cdc_exact": {"body": "Ada exact"}}
    place(story.workspace.history(story.contract), row)
    done, found, _ = erased(story)
    assert (found["state"], done.cells) == ("pending", 1)


def test_the_command_does_not_say_that_nothing_can_be_read_while_windows_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    story = told(tmp_path, document())
    monkeypatch.setattr(subject_erasure, "windows_waiting", lambda *_: [SEALED_WINDOW])
    monkeypatch.setenv("OMNISUPPORT_HOME", str(story.workspace.home.path))
    monkeypatch.setenv("OMNISUPPORT_CONTRACTS_DIR", str(story.contracts))
    done = command("erase", "notes", "1", "--source", SOURCE, "--subject", "--reason", "request 7")
    assert done.code == 0, done.output
    assert "a run may write what it has read, until windows are judged again" in done.out
    assert f"Stale now: window {SEALED_WINDOW}." in done.out and "swept" not in done.out
