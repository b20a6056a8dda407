"""Folding by whole columns gives the very rows of the exact fold, whatever the images of the events are.

Images are NULL, no JSON, of another program's spelling, lack columns that no event names as unsent, or have a
name twice; columns were added later, with defaults; events are withheld, move keys, or share a position.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from omnisupport_ingest.cdc import late_images
from omnisupport_ingest.cdc.event_fold import TableColumns, fold_groups
from omnisupport_ingest.cdc.key_changes import OLD_KEY_ENDED
from omnisupport_ingest.cdc.late_images import IMAGES, ROW
from omnisupport_ingest_tests.cdc.kernels import EVENTS
from omnisupport_ingest_tests.examples import examples

_START = datetime(2026, 11, 1, tzinfo=UTC)
_NON_KEY = ("a", "b", "c")
_VALUES = (None, "", "v0", "v1", 'ü"\\\n')


def image(rng: Random, key: str) -> str | None:
    row = {"id": key} | {name: rng.choice(_VALUES) for name in _NON_KEY if rng.random() < 0.75}
    odd = (
        None,
        "not JSON",
        "{}",
        json.dumps({"id": key, "a": "x", "b": None, "c": "z"}),
        f'{{"id":"{key}","a":"1","a":"2"}}',
        f'{{"id":"{key}","a":5}}',
        compact({name: row[name] for name in reversed(row)}),
        compact(row | {"other": "q"}),
    )
    return rng.choice(odd) if rng.random() < 0.3 else compact(row)


def compact(row: dict[str, str | None]) -> str:
    return json.dumps(row, separators=(",", ":"), ensure_ascii=False)


def drawn(rng: Random) -> list[dict[str, Any]]:
    """Draw events as ``fold.to_fold`` gives them, each with the number of its images."""
    rows: list[dict[str, Any]] = []
    keys, lsn = rng.choice((("1", "2", "3"), ("1", "x", ""))), 0
    for number in range(rng.randrange(1, 14)):
        lsn += rng.random() > 0.03
        op, key = rng.choice("cuuurd" if rng.random() < 0.9 else "tb"), rng.choice(keys)
        row = dict.fromkeys(EVENTS.names) | {
            "window": f"w{rng.randrange(2)}",
            "key": None if op in "tb" else json.dumps([key]),
            "op": op,
            "epoch": 1,
            "commit_lsn": lsn,
            "ordinal": rng.choice((0, 0, 2)),
            "source_ts": _START + timedelta(seconds=lsn),
            "before": image(rng, key) if rng.random() < 0.25 else None,
            "after": image(rng, key) if op in "cur" else None,
            "unchanged": [each for each in (*_NON_KEY, "other") if rng.random() < 0.1] or None,
            "moved_from_key": json.dumps([rng.choice(keys)]) if op == "c" and rng.random() < 0.15 else None,
            "batch_id": f"b{rng.randrange(2)}",
            "landed_at": _START,
            "withheld": rng.random() < 0.2,
            ROW: number,
        }
        rows.append(row)
        if row["moved_from_key"] and not row["withheld"]:
            rows.append({**row, "key": row["moved_from_key"], "op": OLD_KEY_ENDED})
    if rng.random() < 0.5:
        rng.shuffle(rows)
    return rows


def rows_of(batches: Iterable[pa.RecordBatch]) -> list[dict[str, Any]]:
    rows = [row for each in batches for row in each.to_pylist(maps_as_pydicts="strict")]
    for row in rows:
        row["_cdc_column_positions"] = sorted((row["_cdc_column_positions"] or {}).items(), key=repr)
        for name in ("_cdc_unresolved", "_cdc_deletes"):
            row[name] = sorted(row[name] or (), key=repr)
    return sorted(rows, key=repr)


@settings(max_examples=examples(100))
@given(st.integers(0, (1 << 32) - 1).map(Random))
def test_columns_and_the_exact_fold_agree_whatever_the_images_are(rng: Random) -> None:
    rows = drawn(rng)
    defaults = [(name, rng.choice((None, "default"))) for name in ("b", "c") if rng.random() < 0.6]
    table_columns = TableColumns(("a", "id", "b", "c"), ("id",), tuple(defaults))
    events = pa.Table.from_pylist(rows, schema=EVENTS)
    exact = rows_of(fold_groups(events.to_batches(), table_columns, few=len(rows)))
    assert rows_of(fold_groups(events.to_batches(), table_columns, few=0)) == exact

    images = {row[ROW]: {name: row[name] for name in IMAGES} for row in rows}
    schema = pa.schema([EVENTS.field(name) for name in IMAGES])
    numbered = events.drop_columns(list(IMAGES)).append_column(ROW, pa.array([row[ROW] for row in rows]))
    late = late_images.fold_late(
        numbered.combine_chunks(),
        lambda numbers: pa.Table.from_pylist([images[each] for each in numbers.tolist()], schema=schema),
        table_columns,
        most_images=rng.choice((1, 3, len(rows))),
    )
    assert rows_of(batch for part in late for batch in part) == exact
