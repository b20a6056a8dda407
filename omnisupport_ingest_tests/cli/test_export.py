"""``export``: the current state of a table as a file, and how far it is."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from click import UsageError

from omnisupport_ingest.cli.export import export
from omnisupport_ingest.contracts.model import UnknownTable
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.lake.snapshot import TableNote, TableSnapshot
from omnisupport_ingest.lake.table import LakeTable
from omnisupport_ingest.progress import Stage, listening
from omnisupport_ingest.read.export import Format, NoDimension
from omnisupport_ingest.read.export import export as write
from omnisupport_ingest.read.export_ledger import ExportedFile, exported_files, still_there
from omnisupport_ingest_tests.cli.sample_home import SampleHome, document, land_another, run
from omnisupport_ingest_tests.layers.story import SOURCE
from omnisupport_ingest_tests.recovery.pipeline import open_workspace


def test_export_writes_the_live_rows_for_their_owner_alone_and_says_how_far(
    sample_home: SampleHome, tmp_path: Path
) -> None:
    out = tmp_path / "notes.jsonl"
    done = run(export, "notes", "--out", str(out))
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["id"] for row in rows] == [1, 3]
    assert rows[1]["body"] is None
    assert rows[1]["_cdc_unresolved"] == ["body"]
    assert out.stat().st_mode & 0o777 == 0o600
    assert "2 rows of desk.notes" in done.stdout
    assert "Complete to 0/14" in done.stdout
    assert "1 row with unresolved values" in done.stderr
    assert [each.name for each in tmp_path.iterdir() if each.name.startswith(".")] == []


def test_export_says_how_far_it_is_while_it_writes(sample_home: SampleHome, tmp_path: Path) -> None:
    workspace = open_workspace(sample_home.folder)
    shares = []

    def hear(stage: Stage) -> None:
        assert stage.share is not None
        shares.append((stage.what, stage.share()))

    with listening(hear):
        write(workspace, workspace.contracts.of_source(SOURCE)[0], tmp_path / "again.csv", Format.CSV)
    ((what, share),) = shares
    assert what == "writing notes"
    assert share <= 1


def test_export_opens_only_what_its_table_is_made_of(
    sample_home: SampleHome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A source may have hundreds of tables, and each opened table has the state of every window."""
    opened, look = set[str](), LakeTable.look

    def noted(table: LakeTable, *before: TableNote | None) -> TableSnapshot | None:
        opened.add(table.spec.path)
        return look(table, *before)

    monkeypatch.setattr(LakeTable, "look", noted)
    run(export, "notes", "--out", str(tmp_path / "notes.csv"))
    assert opened == {f"{SOURCE}/dim_notes", f"{SOURCE}/net_changes/notes"}


def test_export_into_a_folder_has_the_name_of_the_table(sample_home: SampleHome, tmp_path: Path) -> None:
    run(export, "notes", "--out", f"{tmp_path}/new/")
    assert [each.name for each in (tmp_path / "new").iterdir()] == ["notes.csv"]


def test_export_finds_a_table_by_its_name_at_the_source(sample_home: SampleHome, tmp_path: Path) -> None:
    for name in ("public.notes", 'public."notes"', "NOTES"):
        out = tmp_path / "notes.csv"
        assert document(export, name, "--out", str(out))["table"] == "desk.notes"
        out.unlink()


def test_export_with_deleted_rows_takes_the_place_of_an_older_file(
    sample_home: SampleHome, tmp_path: Path
) -> None:
    out = tmp_path / "notes.csv"
    out.write_text("older")
    out.chmod(0o644)
    record = document(export, "desk.notes", "--out", str(out), "--include-deleted")
    assert (record["rows"], record["unresolved"], record["pending_batches"]) == (3, 2, 0)
    assert len(out.read_text().splitlines()) == 4
    assert out.stat().st_mode & 0o777 == 0o600


def test_export_is_in_the_ledger_before_its_file_has_its_name(
    sample_home: SampleHome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that is killed between the two leaves no file with rows that no certificate names."""
    out, known, replace = tmp_path / "notes.csv", list[ExportedFile](), os.replace

    def renamed(draft: Path, path: Path) -> None:
        known.extend(each for each in exported_files(sample_home.home) if each.path == str(path))
        replace(draft, path)

    monkeypatch.setattr("omnisupport_ingest.read.export.os.replace", renamed)
    run(export, "notes", "--out", str(out))
    assert [each.rows for each in known] == [2] and still_there(known[0])


def test_export_writes_the_file_that_a_link_names_and_replaces_no_pipe(
    sample_home: SampleHome, tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()
    link, target = tmp_path / "latest.csv", tmp_path / "data" / "notes-1.csv"
    link.symlink_to(target)
    for _ in range(2):
        run(export, "notes", "--out", str(link))
        assert link.is_symlink() and len(target.read_text().splitlines()) == 3
    os.mkfifo(tmp_path / "pipe.csv")
    with pytest.raises(UsageError, match=r"pipe\.csv is a pipe or a device"):
        run(export, "notes", "--out", str(tmp_path / "pipe.csv"))
    assert (tmp_path / "pipe.csv").is_fifo()


def test_export_says_what_has_landed_and_is_not_in_the_file(sample_home: SampleHome, tmp_path: Path) -> None:
    land_another(sample_home)
    record = document(export, "notes", "--out", str(tmp_path / "notes.parquet"))
    assert (record["complete_to"], record["pending_batches"]) == (None, 1)


def test_export_of_a_table_that_nobody_knows_lists_the_tables(
    sample_home: SampleHome, tmp_path: Path
) -> None:
    with pytest.raises(UnknownTable) as raised:
        run(export, "tickets", "--out", str(tmp_path / "tickets.csv"))
    assert "desk.notes" in raised.value.fix
    assert not (tmp_path / "tickets.csv").exists()


def test_export_does_not_say_how_far_it_is_where_that_cannot_be_read(
    sample_home: SampleHome, tmp_path: Path
) -> None:
    log = sample_home.home / "lake" / SOURCE / "net_changes" / "notes" / "_delta_log"
    shutil.rmtree(log)
    log.mkdir()
    (log / f"{0:020d}.json").write_bytes(bytes(100))
    with pytest.raises(IngestError, match=r"The log of .*net_changes/notes cannot be read"):
        run(export, "notes", "--out", str(tmp_path / "notes.csv"))


def test_export_of_a_table_without_a_dimension(sample_home: SampleHome, tmp_path: Path) -> None:
    shutil.rmtree(sample_home.home / "lake" / SOURCE / "dim_notes")
    with pytest.raises(NoDimension):
        run(export, "notes", "--out", str(tmp_path / "notes.csv"))
