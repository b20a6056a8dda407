"""Row images of any content are judged and folded, or quarantined as unreadable; nothing else happens."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings

from omnisupport_ingest.cdc.erasing import Erasures, Span, key_hash
from omnisupport_ingest.cdc.event_fold import fold_groups
from omnisupport_ingest.cdc.fold import table_columns_of
from omnisupport_ingest.cdc.images import is_whole, read_image
from omnisupport_ingest.cdc.judging import ACCEPTED, QUARANTINED, JudgingRules, judge_batches
from omnisupport_ingest.contracts.decision_table import (
    MALFORMED,
    ROW_RULE,
    default_decision_table,
    load_decision_table,
)
from omnisupport_ingest_tests.contracts.test_rules import CONTRACT, FINE
from omnisupport_ingest_tests.examples import examples
from omnisupport_ingest_tests.foreign_bytes import DEEP, Raw, in_time, mutated, text_of

NOON = datetime(2026, 11, 20, 12, tzinfo=UTC)
RULES = JudgingRules((CONTRACT,), load_decision_table(default_decision_table()), timedelta(hours=1))
TIME = pa.timestamp("us", tz="UTC")
SCHEMA = pa.schema(
    [
        *((name, pa.string()) for name in ("window", "op", "source_schema", "source_table", "key")),
        *((name, pa.string()) for name in ("before", "after", "moved_from_key", "batch_id", "envelope")),
        ("identity", pa.string()),
        *((name, pa.int64()) for name in ("commit_lsn", "ordinal", "event_hash", "file_row", "copy")),
        *((name, pa.int32()) for name in ("epoch", "newest_epoch_before")),
        *((name, TIME) for name in ("source_ts", "watermark_before", "landed_at")),
        *((name, pa.bool_()) for name in ("collision", "misplaced")),
        ("unchanged", pa.list_(pa.string())),
    ]
)


def event(ordinal: int, after: str | None, **values: Any) -> dict[str, Any]:
    made = {
        "window": "2026-11-20T1200",
        "op": "c",
        "source_schema": "public",
        "source_table": "parcels",
        "key": f'["{ordinal}"]',
        "after": after,
        "batch_id": "b",
        "commit_lsn": 1,
        "ordinal": ordinal,
        "event_hash": ordinal,
        "copy": 1,
        "epoch": 1,
        "newest_epoch_before": 1,
        "source_ts": NOON,
        "landed_at": NOON,
        "collision": False,
    }
    return {name: (made | values).get(name) for name in SCHEMA.names}


def judged(*events: dict[str, Any]) -> pa.Table:
    return pa.Table.from_batches(judge_batches([pa.RecordBatch.from_pylist(list(events), SCHEMA)], RULES))


def folded(found: pa.Table) -> pa.Table:
    """Fold judged events as the layers do: quarantined ones are withheld."""
    held = pa.array([verdict == QUARANTINED for verdict in found["verdict"].to_pylist()])
    return pa.Table.from_batches(
        fold_groups(found.append_column("withheld", held).to_batches(), table_columns_of(CONTRACT))
    )


@settings(max_examples=examples(150))
@given(mutated([FINE]), mutated([FINE]))
def test_any_image_is_judged_and_folded_and_the_row_beside_it_is_accepted(
    after: bytes, before: bytes
) -> None:
    odd = after.decode(errors="replace")
    update = event(3, odd, op="u", unchanged=["label"], before=before.decode(errors="replace"))
    good = event(1, text_of(FINE))
    with in_time():
        found = judged(good, event(2, odd), update)
        rows = folded(found)
    verdicts = found["verdict"].to_pylist()
    assert verdicts[0] == ACCEPTED
    assert set(verdicts) <= {ACCEPTED, QUARANTINED}
    assert {reason for reason in found["reason"].to_pylist() if reason} <= {MALFORMED, ROW_RULE}
    assert sorted(rows["_cdc_key"].to_pylist()) == ['["1"]', '["2"]', '["3"]']
    erased = Erasures({("public", "parcels", key_hash('["2"]')): (Span(None, (1, 1, 9)),)})
    judging_rules = JudgingRules(RULES.contracts, RULES.decisions, RULES.window_length, erasures=erased)
    batch = pa.RecordBatch.from_pylist([good, event(2, odd), update], SCHEMA)
    left, landed = (
        [row["after"] for row in rows.to_pylist()]
        for rows in (pa.Table.from_batches(judge_batches([batch], judging_rules)), batch)
    )
    assert (left[0], left[2]) == (landed[0], landed[2])
    assert left[1] is None or set(json.loads(left[1])) <= {"id"}


@pytest.mark.parametrize(
    ("image", "reason", "rules"),
    [
        ({**FINE, "id": "9" * 5000}, ROW_RULE, ["id:type"]),
        ({**FINE, "id": Raw("9" * 5000)}, ROW_RULE, ["id:type"]),
        ({**FINE, "id": "0" * 5000 + "5"}, None, []),
        ({**FINE, "value": "9" * 131_072}, None, []),
        ({**FINE, "value": "9" * 131_073}, ROW_RULE, ["value:type"]),
        ({**FINE, "value": "9" * 100_000 + "x"}, ROW_RULE, ["value:type"]),
        ({**FINE, "label": Raw("[" * DEEP + "]" * DEEP)}, MALFORMED, []),
        ({**FINE, "label": Raw("[" * 201 + "]" * 201)}, MALFORMED, []),
        ({**FINE, "label": Raw('"\\ud800"')}, MALFORMED, []),
        (Raw("[" * DEEP), MALFORMED, []),
        ([], MALFORMED, []),
    ],
)
def test_a_poisoned_image_has_its_reason(image: Any, reason: str | None, rules: list[str]) -> None:
    with in_time():
        found = judged(event(1, text_of(image)))
    assert (found["reason"].to_pylist(), found["rules"].to_pylist()) == ([reason], [rules])
    assert folded(found).num_rows == 1


def test_the_depth_of_an_image_is_judged_alike_wherever_python_stands() -> None:
    deep, deeper = (text_of({"a": Raw("[" * levels + "]" * levels)}) for levels in (199, 200))

    def called_deep(left: int) -> None:
        if left:
            called_deep(left - 1)
        else:
            assert read_image(deep) is not None and read_image(deeper) is None

    called_deep(1)
    called_deep(500)


@pytest.mark.parametrize(
    ("key", "whole"),
    [
        (None, False),
        ('["1"]', True),
        ('["null"]', True),
        ('["1",null]', False),
        ("null", False),
        ("[null", False),
        ("[" * 100_000 + "null", False),
        ('{"id":null}', False),
    ],
)
def test_a_key_that_is_no_array_of_texts_is_not_whole(key: str | None, whole: bool) -> None:
    assert is_whole(key) is whole
