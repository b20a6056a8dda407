"""Scenarios that are about windows, not events, are counted in the metadata, with what found them."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest
from dagster._core.execution.context.metadata_logging import OutputMetadataAccumulator

from omnisupport_ingest.contracts.decision_table import SCENARIOS, DetectedScenario
from omnisupport_ingest.defs import keys
from omnisupport_ingest.defs.assets import _mirror
from omnisupport_ingest.defs.metadata import checkpoint_metadata
from omnisupport_ingest.defs.sensors import _observed
from omnisupport_ingest.landing.chain import Gap
from omnisupport_ingest.layers.checkpoints import found_before, with_found
from omnisupport_ingest.layers.plan import REPEATED
from omnisupport_ingest.layers.scheduling.pending import Pending
from omnisupport_ingest.layers.versions import found_in
from omnisupport_ingest.position import Lsn
from omnisupport_ingest_tests.layers.test_plan import CHECKPOINT

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
NOTHING = Pending(
    windows=(), batches=0, landed=0, last_batch_id=None, last_lsn=None, watermark=None, gap=None
)
CONTRACT_CHANGE = DetectedScenario("contract_change", "contract_version")
REVIEW_DECISION = DetectedScenario("review_decision", "review_ledger")


def mirrored(tags: dict[str, str]) -> dict[str, Any]:
    """The metadata that a run with ``tags`` gives the window of a checkpoint."""
    key = dg.AssetKey("table")
    step = SimpleNamespace(_metadata_accumulator=OutputMetadataAccumulator.empty())
    context = SimpleNamespace(
        run=SimpleNamespace(tags=tags),
        asset_key=key,
        get_step_execution_context=lambda: step,
        has_partition_key_range=True,
        partition_keys=[CHECKPOINT.window],
    )
    _mirror(context, [CHECKPOINT], 0.0, {})  # type: ignore[arg-type]
    return {**step._metadata_accumulator.get_asset_metadata(key, CHECKPOINT.window)}


@pytest.mark.parametrize(
    ("tags", "times"), [({}, 1), ({keys.TAKE_NEW_TAG: "1"}, 0), ({keys.LATE_TAG: "1"}, 0)]
)
def test_a_backfill_that_somebody_asked_for_is_counted(tags: dict[str, str], times: int) -> None:
    found = mirrored(tags)
    assert found["scenario_manual_backfill"].value == times
    assert ("detected_by" in found) == bool(times)
    if times:
        assert found["detected_by"].value == "manual_backfill: operator"


def test_a_repeated_write_is_counted_in_the_run_that_asked_for_it() -> None:
    entries = checkpoint_metadata(with_found(CHECKPOINT, REPEATED))
    assert entries["scenario_duplicate_event"].value == 1
    assert entries["detected_by"].value == "duplicate_event: idempotency_key"


@pytest.mark.parametrize(
    ("held", "wanted", "found"),
    [
        (("logic:1", "contract:a:1"), ("logic:1", "contract:a:2"), {CONTRACT_CHANGE}),
        (("decisions:1",), ("decisions:2",), {CONTRACT_CHANGE}),
        (("contract:a:1",), ("contract:a:1", "reviews:7"), {REVIEW_DECISION}),
        (("contract:a:1",), ("contract:a:2", "reviews:7"), {CONTRACT_CHANGE, REVIEW_DECISION}),
        (("logic:1",), ("logic:2",), set()),
    ],
)
def test_a_window_is_made_again_for_what_it_is_judged_by(
    held: tuple[str, ...], wanted: tuple[str, ...], found: set[DetectedScenario]
) -> None:
    assert found_in(held, wanted) == found


def test_a_checkpoint_of_an_older_version_names_no_detectors_and_has_a_place_for_every_count() -> None:
    old = replace(CHECKPOINT, scenarios={"row_rule": 3})
    assert found_before(old) == {DetectedScenario("row_rule", "contract"): 3}


def test_landing_counts_gaps_and_recoveries_with_what_found_them() -> None:
    gap = Gap(1, "batch", Lsn(5), "next", Lsn(9))
    pending = replace(NOTHING, recoveries=2, gap=gap)
    found = _observed("desk", pending, NOON).metadata
    assert (found["scenario_crash_after_emit"].value, found["scenario_stream_gap"].value) == (2, 1)
    assert found["detected_by"].value == "crash_after_emit: recovery_lsn, stream_gap: chain_lsn"
    found = _observed("desk", NOTHING, NOON).metadata
    assert (found["scenario_crash_after_emit"].value, found["scenario_stream_gap"].value) == (0, 0)
    assert "detected_by" not in found


@pytest.mark.parametrize(
    ("layer", "counted"),
    [
        ("raw_cdc_staging", {"events_raw"}),
        ("deduped_events", {"events_raw", "events_deduped", "events_duplicate", "events_quarantined"}),
        ("net_changes", {"events_deduped"}),
    ],
)
def test_a_layer_shows_no_zero_of_what_it_does_not_count(layer: str, counted: set[str]) -> None:
    entries = checkpoint_metadata(replace(CHECKPOINT, layer=layer))
    assert {name for name in entries if name.startswith("events_")} == counted


def test_every_scenario_has_a_counter() -> None:
    counted = {name for layer in ("raw_cdc_staging", "deduped_events") for name in entries_of(layer)}
    # Those of landing are metadata of its asset.
    assert counted | {"crash_after_emit", "stream_gap"} == SCENARIOS.keys()


def entries_of(layer: str) -> set[str]:
    entries = checkpoint_metadata(replace(CHECKPOINT, layer=layer))
    return {name.removeprefix("scenario_") for name in entries if name.startswith("scenario_")}
