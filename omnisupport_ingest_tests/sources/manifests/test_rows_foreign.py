"""Deliveries that others wrote: rows that land and can be judged, or the file, its line and the reason."""

from __future__ import annotations

import hashlib
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from omnisupport_ingest.cdc.images import read_image
from omnisupport_ingest.contracts.documents import program_file
from omnisupport_ingest.contracts.row_rules import RowRules
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.sources.manifests.land import SeedRefused
from omnisupport_ingest.sources.manifests.row_text import RowFault, read_row
from omnisupport_ingest.sources.manifests.seed_manifest import SeedManifestError, load_manifest
from omnisupport_ingest_tests.examples import examples
from omnisupport_ingest_tests.foreign_bytes import (
    DEEP,
    IN_THE_PLACE,
    ODD_VALUES,
    Raw,
    in_time,
    mutated,
    text_of,
)
from omnisupport_ingest_tests.sources.manifests.test_land import CONTRACTS, delivery, landed, row

CONTRACT = next(each for each in CONTRACTS if each.source == "support_files")
RULES = RowRules(CONTRACT)
SEED = json.loads(program_file("data/seed_manifests/legacy_tickets_2025.json").read_text())
SEED["as_of"] = "2026-01-01T00:00:00Z"
ROW: dict[str, Any] = {**dict.fromkeys(CONTRACT.column_names), **row(1, tags=["a b", 1, None])}


@settings(max_examples=examples(300))
@given(mutated([ROW]))
def test_any_line_is_a_row_that_can_be_judged_or_a_fault(line: bytes) -> None:
    with in_time():
        try:
            found = read_row(line, CONTRACT)
        except RowFault as fault:
            assert len(str(fault)) < 300
            return
        image = json.dumps(found, ensure_ascii=False)
        image.encode()
        assert read_image(image) == found
        RULES.broken(found)


def test_any_value_of_any_column_is_a_row_or_a_fault() -> None:
    for name in CONTRACT.column_names:
        for odd in ODD_VALUES:
            line = text_of({**ROW, name: odd}).encode(errors="surrogatepass")
            with in_time():
                try:
                    RULES.broken(read_row(line, CONTRACT))
                except RowFault as fault:
                    assert len(str(fault)) < 300


@settings(max_examples=examples(150), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=mutated([SEED]))
def test_any_file_is_a_seed_manifest_or_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "seed.json"
    path.write_bytes(content)
    with in_time():
        try:
            seed = load_manifest(path, CONTRACTS)
        except SeedManifestError as refused:
            assert str(path) in refused.problem and refused.fix and len(refused.problem) < 2000
            return
        with pytest.raises(SeedRefused):
            # Its data files are elsewhere.
            landed(seed, LandingStore(tmp_path / "landing", "support_files"))


@pytest.mark.parametrize("what", IN_THE_PLACE)
def test_what_is_no_data_file_or_no_manifest_is_refused_and_not_waited_for(tmp_path: Path, what: str) -> None:
    seed = delivery(tmp_path, [row(1)])
    store = LandingStore(tmp_path / "landing", "support_files")
    for path, words in ((tmp_path / "delivery.jsonl", "delivery.jsonl"), (seed.path, "delivery.json")):
        path.unlink()
        IN_THE_PLACE[what](path)
        with in_time(), pytest.raises((SeedRefused, SeedManifestError), match=words):
            landed(seed if path != seed.path else load_manifest(path, CONTRACTS), store)
    assert store.batch_ids() == []


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (Raw("[" * DEEP + "]" * DEEP), "nested deeper than 200 levels"),
        (Raw('"\\ud800"'), "half of a surrogate pair"),
        (Raw('"a\\u0000"'), "NUL"),
        (Raw("1e99999999999999999999"), "too many digits"),
        (Raw('{"a": 1, "a": 2}'), "stands twice"),
    ],
)
def test_a_line_with_it_is_refused_by_file_and_line(tmp_path: Path, value: Raw, words: str) -> None:
    content = (text_of(row(1)) + "\n" + text_of(row(2, subject=value)) + "\n").encode()
    seed = delivery(tmp_path, [row(1)])
    (tmp_path / "delivery.jsonl").write_bytes(content)
    document = json.loads(seed.path.read_text())
    document["files"][0] |= {"sha256": hashlib.sha256(content).hexdigest(), "rows": 2}
    seed.path.write_text(json.dumps(document))
    store = LandingStore(tmp_path / "landing", "support_files")
    with in_time(), pytest.raises(SeedRefused, match=rf"delivery\.jsonl, line 2: .*{words}"):
        landed(load_manifest(seed.path, CONTRACTS), store)
    assert store.batch_ids() == []


@pytest.mark.parametrize("text", ["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00", "x" * 5000])
def test_a_moment_beyond_the_calendar_is_none(tmp_path: Path, text: str) -> None:
    with pytest.raises(SeedManifestError, match="no moment"):
        delivery(tmp_path, [row(1)], lambda document: document.update(as_of=text))
    assert delivery(tmp_path, [row(1)]).as_of in (None, datetime(2026, 1, 1, tzinfo=UTC))
