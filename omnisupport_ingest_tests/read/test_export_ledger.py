"""The ledger of exports: a line that was cut off takes no other one with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from omnisupport_ingest.read.export_ledger import FILE, ExportLedgerUnreadable, exported_files, note_export


def test_a_line_that_was_cut_off_stays_one_of_its_own(tmp_path: Path) -> None:
    exported = tmp_path / "customers}.csv"
    exported.write_text("id\n1\n")
    ledger = tmp_path / FILE
    note_export(tmp_path, "desk.customers", exported, 1)
    whole = ledger.read_bytes()
    for cut in (1, len(whole) - 1, whole.index(b"}") + 1):
        ledger.write_bytes(whole + whole[:cut])
        note_export(tmp_path, "desk.orders", exported, 2)
        known = ["desk.customers", *(["desk.customers"] if cut == len(whole) - 1 else []), "desk.orders"]
        assert [each.table for each in exported_files(tmp_path)] == known
    ledger.write_bytes(whole.replace(b'"rows":1', b'"rows":x') + whole)
    with pytest.raises(ExportLedgerUnreadable):
        exported_files(tmp_path)
