"""A delivery lands whole, once, and above every earlier one; a faulty one does not land at all."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from omnisupport_ingest.contracts.documents import program_file
from omnisupport_ingest.contracts.load import load_contracts
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.sources.manifests.land import FIRST_ORDINAL, Delivery, Inlet, SeedRefused, land
from omnisupport_ingest.sources.manifests.seed_manifest import SeedManifest, load_manifest
from omnisupport_ingest.windows import WindowGrid, WindowSize

CONTRACTS = load_contracts(program_file("contracts/data"))
NOW = datetime(2026, 11, 21, 9, 30, tzinfo=UTC)
GRID = WindowGrid(WindowSize(60), datetime(2026, 11, 21, tzinfo=UTC))


@pytest.fixture
def store(tmp_path: Path) -> LandingStore:
    return LandingStore(tmp_path / "landing", "support_files")


def row(number: int, **values: object) -> dict[str, object]:
    return {"ticket_ref": f"HD-2025-{number:05d}", "subject": "s", "escalated": False} | values


def delivery(
    folder: Path,
    rows: list[dict[str, object]],
    change: Callable[[dict[str, Any]], object] = lambda document: None,
    name: str = "delivery",
) -> SeedManifest:
    content = "".join(json.dumps(each) + "\n" for each in rows).encode()
    data = folder / f"{name}.jsonl"
    data.write_bytes(content)
    document = json.loads(program_file("data/seed_manifests/legacy_tickets_2025.json").read_text())
    sha256 = hashlib.sha256(content).hexdigest()
    document["files"] = [{"path": data.name, "sha256": sha256, "rows": len(rows)}]
    change(document)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(document))
    return load_manifest(path, CONTRACTS)


def landed(seed: SeedManifest, store: LandingStore, now: datetime = NOW) -> Delivery:
    return land(seed, Inlet(store, GRID, clock=lambda: now))


def events_of(store: LandingStore, landing: Delivery) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for file in landing.batches[0].files:
        rows += pq.ParquetFile(store.path_of(file)).read().to_pylist()
    return rows


def test_rows_land_as_a_finished_snapshot_of_their_table(tmp_path: Path, store: LandingStore) -> None:
    landing = landed(delivery(tmp_path, [row(1, tags=["a b"]), row(2, novel=1)]), store)
    assert not landing.already_landed
    boundary, first, second = events_of(store, landing)
    assert (boundary["op"], boundary["key"], boundary["ordinal"]) == ("b", None, FIRST_ORDINAL)
    assert (first["op"], first["key"], first["ordinal"]) == ("r", '["HD-2025-00001"]', FIRST_ORDINAL + 1)
    assert (first["epoch"], first["commit_lsn"], first["source_ts"]) == (1, 0, NOW)
    assert (first["source_schema"], first["source_table"]) == ("files", "legacy_tickets")
    after = json.loads(first["after"])
    assert (after["tags"], after["escalated"], after["body"]) == ('{"a b"}', "f", None)
    assert json.loads(second["after"])["novel"] == "1"
    assert landing.batches[0].windows == ("2026-11-21T0900",)
    store.verify(landing.batches[0])


def test_the_same_content_again_changes_nothing_and_says_so(tmp_path: Path, store: LandingStore) -> None:
    seed = delivery(tmp_path, [row(1)])
    first = landed(seed, store)
    again = landed(seed, store, NOW + timedelta(hours=3))
    assert again.batches == first.batches and again.already_landed and not first.already_landed
    assert store.batch_ids() == [first.batches[0].batch_id]
    assert first.batches[0].file is not None
    assert first.batches[0].batch_id == f"f-{seed.files[0].sha256[:32]}"


def test_a_later_delivery_stands_above_the_earlier_one(tmp_path: Path, store: LandingStore) -> None:
    first = landed(delivery(tmp_path, [row(1), row(2)]), store)
    second = landed(delivery(tmp_path, [row(2), row(3)], name="later"), store)
    assert second.batches[0].files[0].first > first.batches[0].files[0].last
    assert second.batches[0].files[0].last.ordinal < 0


def test_a_snapshot_may_come_in_several_files(tmp_path: Path, store: LandingStore) -> None:
    part = delivery(tmp_path, [row(1)], name="part")

    def both(document: dict[str, Any]) -> None:
        file = part.files[0]
        document["files"].append({"path": file.path.name, "sha256": file.sha256, "rows": file.rows})

    landing = landed(delivery(tmp_path, [row(2)], both), store)
    assert [event["key"] for event in events_of(store, landing)] == [
        None,
        '["HD-2025-00002"]',
        '["HD-2025-00001"]',
    ]


def test_an_empty_delivery_empties_the_table(tmp_path: Path, store: LandingStore) -> None:
    assert [event["op"] for event in events_of(store, landed(delivery(tmp_path, []), store))] == ["b"]


def test_the_moment_the_data_describes_decides_the_window(tmp_path: Path, store: LandingStore) -> None:
    seed = delivery(tmp_path, [row(1)], lambda d: d.update(as_of="2026-11-21T03:20:00+00:00"))
    assert landed(seed, store).batches[0].windows == ("2026-11-21T0300",)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d["files"][0].update(sha256="0" * 64), "gate checksum: reject"),
        (lambda d: d["files"][0].update(rows=3), "has 2 rows"),
        (lambda d: d["files"][0].update(path="gone.jsonl"), "cannot be read"),
        (lambda d: d["gates"].update(unknown_column="reject"), "line 2: .*'novel'"),
        (lambda d: d.update(as_of="2025-12-31T00:00:00Z"), "in no window of this home, which begins at"),
        (lambda d: d.update(as_of="2126-01-01T00:00:00Z"), "more than a day ahead of the clock"),
    ],
)
def test_a_delivery_that_is_not_as_described_leaves_nothing(
    tmp_path: Path, store: LandingStore, change: Callable[[dict[str, Any]], object], words: str
) -> None:
    seed = delivery(tmp_path, [row(1), row(2, novel="s3cret")], change)
    with pytest.raises(SeedRefused, match=words) as refused:
        landed(seed, store)
    assert "s3cret" not in str(refused.value)
    assert store.batch_ids() == []
    assert not any((store.folder / "data").iterdir())


def test_a_line_that_is_no_row_refuses_the_whole_delivery(tmp_path: Path, store: LandingStore) -> None:
    with pytest.raises(SeedRefused, match=r"line 2: the key column 'ticket_ref' has no value"):
        landed(delivery(tmp_path, [row(1), row(2, ticket_ref=None)]), store)
    assert store.batch_ids() == []


def test_the_delivery_of_the_repository_lands(store: LandingStore) -> None:
    seed = load_manifest(program_file("data/seed_manifests/legacy_tickets_2025.json"), CONTRACTS)
    landing = landed(seed, store)
    assert landing.batches[0].rows == seed.rows + 1
    assert landing.batches[0].files[0].ordered
