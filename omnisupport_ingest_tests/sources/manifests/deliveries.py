"""Deliveries of OmniSupport's tickets, written for a test: data files in any format and their manifest."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from omnisupport_ingest.contracts.documents import program_file
from omnisupport_ingest.contracts.load import load_contracts
from omnisupport_ingest.landing.manifest import Manifest
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.sources.manifests.land import Inlet
from omnisupport_ingest.sources.manifests.row_text import array_literal
from omnisupport_ingest.sources.manifests.seed_manifest import SeedManifest, load_manifest
from omnisupport_ingest.windows import WindowGrid, WindowSize

CONTRACTS = load_contracts(program_file("contracts/data"))
NOW = datetime(2026, 4, 20, 9, 30, tzinfo=UTC)
GRID = WindowGrid(WindowSize(60), datetime(2026, 4, 16, tzinfo=UTC))
MANIFESTS = program_file("data/seed_manifests")


def ticket(number: int, updated: str = "2026-04-18 10:00:00+00", **values: Any) -> dict[str, Any]:
    return {
        "ticket_id": f"TKT-20260417-{number:06d}",
        "status": "open",
        "priority": "p2_high",
        "product_line": "studio",
        "sla_tier": "business",
        "subject": f"Ticket {number}",
        "requester_email": None,
        "error_codes": ["STU-1", "a b"],
        "pii_level": "none",
        "quality_gate": "passed",
        "created_at": "2026-04-17 08:00:00+00",
        "updated_at": updated,
        "resolved_at": None,
    } | values


def content(rows: list[dict[str, Any]], suffix: str) -> bytes:
    """``rows`` as the bytes of a file whose name ends with ``suffix``."""
    kind, _, packed = suffix.lstrip(".").partition(".")
    if kind == "parquet":
        sink = io.BytesIO()
        pq.write_table(pa.Table.from_pylist(rows), sink)
        return sink.getvalue()
    if kind == "csv":
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(rows[0])
        for row in rows:
            arrays = {name: array_literal(value) for name, value in row.items() if isinstance(value, list)}
            writer.writerow((row | arrays).values())
        plain = text.getvalue().encode()
    else:
        plain = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if packed == "gz":
        return gzip.compress(plain)
    return pa.Codec("zstd").compress(plain, asbytes=True) if packed == "zst" else plain


def document(mode: str, files: dict[Path, int], **more: Any) -> dict[str, Any]:
    """A manifest of ``files``, each with its number of rows."""
    found: dict[str, Any] = json.loads((MANIFESTS / "omnisupport_tickets_changes.json").read_text())
    found.pop("as_of")
    found["load_mode"] = mode
    found["files"] = [
        {"path": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "rows": rows}
        for path, rows in files.items()
    ]
    gates = found["gates"] | more.pop("gates", {})
    return found | more | {"gates": gates}


def delivery(
    folder: Path,
    mode: str,
    rows: list[dict[str, Any]] | bytes,
    *,
    name: str = "tickets.jsonl",
    count: int | None = None,
    **more: Any,
) -> SeedManifest:
    """The manifest of one file with ``rows``, or with bytes that hold ``count`` of them."""
    path = folder / name
    suffix = "." + name.partition(".")[2]
    path.write_bytes(rows if isinstance(rows, bytes) else content(rows, suffix))
    told = document(mode, {path: len(rows) if count is None else count}, **more)
    manifest = folder / f"{name}.manifest.json"
    manifest.write_text(json.dumps(told))
    return load_manifest(manifest, CONTRACTS)


def inlet(folder: Path, **more: Any) -> Inlet:
    return Inlet(LandingStore(folder / "landing", "omnisupport_files"), GRID, clock=lambda: NOW, **more)


def events(inlet: Inlet) -> list[dict[str, Any]]:
    """Everything that has landed, with its window, in the order of positions."""
    found = []
    for batch in inlet.store.manifests():
        inlet.store.verify(batch)
        for file in batch.files:
            rows = pq.ParquetFile(inlet.store.path_of(file)).read().to_pylist()
            found += [row | {"window": file.window} for row in rows]
    return sorted(found, key=lambda row: (row["ordinal"], row["file_row"] or 0))


def as_before(landing: Path, batch: Manifest) -> None:
    """Make the manifest of ``batch``, in the folder ``landing`` of its source, what the version before
    deliveries without a cursor had a watermark wrote. Open its store anew."""
    path = landing / "manifests" / f"{batch.batch_id}.json"
    document = json.loads(path.read_text()) | {"format_version": 5}
    del document["file"]["snapshots"]
    document["arrival"]["watermark"] = document["arrival"]["watermark_before"] = None
    path.unlink()
    path.write_text(json.dumps(document))
    (landing / "index.sqlite").unlink(missing_ok=True)
