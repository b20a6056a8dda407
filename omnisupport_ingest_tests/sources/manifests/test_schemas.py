"""Deliveries whose files have other columns than those before: as far as a format tells, it is recorded."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from omnisupport_ingest.landing.schema_changes import SchemaChanges
from omnisupport_ingest.sources.manifests.land import Inlet, land
from omnisupport_ingest.sources.manifests.seed_manifest import load_manifest
from omnisupport_ingest_tests.sources.manifests.deliveries import (
    CONTRACTS,
    NOW,
    content,
    delivery,
    document,
    inlet,
    ticket,
)

ACCEPTED = {"unknown_column": "accept"}


def deliver(into: Inlet, folder: Path, name: str, row: dict[str, Any], *, hours: int, **more: Any) -> None:
    """One file with ``row``, as the table was so many ``hours`` before now."""
    at = (NOW - timedelta(hours=hours)).isoformat()
    mode = more.pop("mode", "incremental_cursor")
    land(delivery(folder, mode, [row], name=name, as_of=at, gates=ACCEPTED, **more), into)


def changes(into: Inlet) -> list[tuple[str, str | None, str | None, str | None, str | None]]:
    found = SchemaChanges(into.store.folder).all()
    return [(each.kind, each.column, each.before or None, each.after or None, each.place) for each in found]


def without(row: dict[str, Any], name: str) -> dict[str, Any]:
    return {each: value for each, value in row.items() if each != name}


@pytest.mark.parametrize(("suffix", "kind"), [("csv", None), ("parquet", "bigint")])
def test_a_file_that_names_its_columns_tells_what_came_and_what_is_gone(
    tmp_path: Path, suffix: str, kind: str | None
) -> None:
    into = inlet(tmp_path)
    deliver(into, tmp_path, f"1.{suffix}", ticket(1, subject="s", requester_email="x"), hours=9)
    deliver(into, tmp_path, f"3.{suffix}", without(ticket(3, size=5), "sla_tier"), hours=7)
    deliver(into, tmp_path, f"2.{suffix}", ticket(2), hours=8)
    deliver(into, tmp_path, f"0.{suffix}", ticket(4, old=1), hours=1, mode="backfill")
    text = "text" if kind else None
    assert changes(into) == [
        ("column_dropped", "sla_tier", text, None, f"3.{suffix}"),
        ("column_added", "size", None, kind, f"3.{suffix}"),
    ]


def test_rows_that_name_their_columns_themselves_tell_new_ones_alone(tmp_path: Path) -> None:
    into = inlet(tmp_path)
    deliver(into, tmp_path, "1.jsonl", ticket(1), hours=9)
    deliver(into, tmp_path, "2.jsonl", without(ticket(2, size=5), "sla_tier"), hours=8)
    deliver(into, tmp_path, "3.jsonl", ticket(3), hours=7)
    assert changes(into) == [("column_added", "size", None, None, "2.jsonl")]


def test_the_same_delivery_again_tells_nothing(tmp_path: Path) -> None:
    into = inlet(tmp_path)
    deliver(into, tmp_path, "1.csv", ticket(1), hours=9)
    for _ in range(2):
        deliver(into, tmp_path, "2.csv", ticket(2, size=5), hours=8)
    assert [each[1] for each in changes(into)] == ["size"]


def test_types_that_a_file_of_another_format_names_are_no_change(tmp_path: Path) -> None:
    into = inlet(tmp_path)
    row = ticket(1, requester_email="x", resolved_at="2026-04-18 10:00:00+00")
    for number, suffix in enumerate(("jsonl", "csv", "parquet", "csv")):
        deliver(into, tmp_path, f"{number}.{suffix}", row | {"subject": suffix}, hours=9 - number)
    assert changes(into) == []


def test_a_file_without_a_header_tells_no_values_as_columns(tmp_path: Path) -> None:
    into = inlet(tmp_path)
    deliver(into, tmp_path, "1.csv", ticket(1), hours=9)
    plain = b"TKT-20260417-000001,open,anna@example.com\nTKT-20260417-000002,new,bert@example.com\n"
    at = (NOW - timedelta(hours=8)).isoformat()
    gates = ACCEPTED | {"schema": "quarantine"}
    land(delivery(tmp_path, "incremental_cursor", plain, name="2.csv", count=1, as_of=at, gates=gates), into)
    assert changes(into) == []


def test_a_delivery_of_several_files_names_the_one_with_the_new_column(tmp_path: Path) -> None:
    into = inlet(tmp_path)
    deliver(into, tmp_path, "1.csv", ticket(1), hours=9)
    files = {tmp_path / "2.csv": ticket(2), tmp_path / "3.csv": ticket(3, size=1)}
    for path, row in files.items():
        path.write_bytes(content([row], "csv"))
    told = document(
        "incremental_cursor",
        dict.fromkeys(files, 1),
        gates=ACCEPTED,
        as_of=(NOW - timedelta(hours=8)).isoformat(),
    )
    (tmp_path / "both.json").write_text(json.dumps(told))
    land(load_manifest(tmp_path / "both.json", CONTRACTS), into)
    assert changes(into) == [("column_added", "size", None, None, "3.csv")]


def test_a_file_that_waits_as_a_whole_tells_nothing(tmp_path: Path) -> None:
    into = inlet(tmp_path)
    deliver(into, tmp_path, "1.csv", ticket(1), hours=9)
    at = (NOW - timedelta(hours=8)).isoformat()
    gates = ACCEPTED | {"row_count": "quarantine"}
    rows = [ticket(2, size=5)]
    land(delivery(tmp_path, "incremental_cursor", rows, name="2.csv", count=2, as_of=at, gates=gates), into)
    assert changes(into) == []
    deliver(into, tmp_path, "3.csv", ticket(2, size=5), hours=8)
    assert [each[1] for each in changes(into)] == ["size"]
