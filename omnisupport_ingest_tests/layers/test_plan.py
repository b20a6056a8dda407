"""When a window has nothing to do, takes what is new, or is made again; and what names the work."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from omnisupport_ingest.lake.checkpoint import Checkpoint
from omnisupport_ingest.lake.state import WindowState
from omnisupport_ingest.layers.plan import Upstream, WindowPlan, Work, decide, idempotency_key, unit_key

CHECKPOINT = Checkpoint(
    layer="deduped_events",
    table="t",
    source="s",
    window="w",
    cursor="",
    watermark=None,
    dedupe_key="",
    idempotency_key="",
    last_batch_id=None,
    batches=0,
    lsn_start=None,
    lsn_end=None,
    rows=0,
    raw=0,
    deduped=0,
    duplicates=0,
    quarantined=0,
    content_hash="",
    generation=1,
    delta_version=None,
    run_id="",
    committed_at=datetime(2026, 1, 1, tzinfo=UTC),
    upstream_version=None,
)
STATE = WindowState(1, ("a", "b"), "table", CHECKPOINT, versions=("v1",))
SAME = Upstream(frozenset("ab"), "table", ("v1",))


@pytest.mark.parametrize(
    ("state", "upstream", "rewritten", "replay", "work"),
    [
        pytest.param(None, SAME, False, False, Work.APPEND, id="never made: all of it is new"),
        pytest.param(None, SAME, True, False, Work.REPLACE, id="rewritten by another program"),
        pytest.param(STATE, SAME, False, False, Work.NOTHING, id="taken already"),
        pytest.param(
            STATE, replace(SAME, units=frozenset("abc")), False, False, Work.APPEND, id="one is new"
        ),
        pytest.param(
            STATE, replace(SAME, units=frozenset("ac")), False, False, Work.REPLACE, id="one is gone"
        ),
        pytest.param(STATE, replace(SAME, table_id="other"), False, False, Work.REPLACE, id="another table"),
        pytest.param(STATE, replace(SAME, versions=("v2",)), False, False, Work.REPLACE, id="other versions"),
        pytest.param(STATE, SAME, False, True, Work.REPLACE, id="replay"),
    ],
)
def test_decide(state, upstream, rewritten, replay, work):
    assert decide(state, upstream, rewritten=rewritten, replay=replay) is work


def test_the_idempotency_key_knows_no_order_and_no_repetition_of_inputs():
    def key(inputs: list[str], **other: str) -> str:
        given = {"layer": "l", "table": "t", "window": "w"} | other
        return idempotency_key(**given, inputs=inputs, versions=["v"])

    assert key(["a", "b"]) == key(["b", "a", "b"])
    assert len({key(["a"]), key(["b"]), key(["a"], window="x"), key(["a"], layer="m")}) == 4


def test_appends_that_end_at_the_same_inputs_but_read_different_ones_are_different_units():
    both = WindowPlan("w", Work.APPEND, frozenset("ab"), 1)
    one = WindowPlan("w", Work.APPEND, frozenset("b"), 1)
    assert unit_key([("key", both)]) != unit_key([("key", one)])
    assert unit_key([("key", both)]) == unit_key([("key", replace(both, generation=2))])
