"""Deliveries whose files have other columns than those before: as far as a format tells, it is recorded."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from omnisupport_ingest.landing.schema_changes import SchemaChanges
from omnisupport_ingest.sources.manifests.land import Inlet, land
from omnisupport_ingest_tests.sources.manifests.deliveries import NOW, delivery, inlet, ticket

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
