"""The private Dagster calls that launch a backfill, against the installed version.

If this module fails after an upgrade of Dagster, ``defs/backfills.py`` is the one place to mend.
"""

from __future__ import annotations

import dagster as dg
import pytest

from omnisupport_ingest.defs.backfills import Backfill, BackfillRefused, backfill_status, launch_backfill
from omnisupport_ingest_tests.layers.story import FIRST, SECOND, SOURCE


@pytest.fixture
def instance():
    with dg.instance_for_test() as instance:
        yield instance


@pytest.mark.quick
def test_a_backfill_covers_its_windows_in_every_layer_and_is_listed(instance, definitions):
    backfill_id = launch_backfill(
        instance,
        definitions.resolve_asset_graph(),
        Backfill(SOURCE, [SECOND, FIRST], "replay", tags={"omnisupport/batches": "2"}),
    )
    (listed,) = instance.get_backfills()
    assert listed.backfill_id == backfill_id
    assert listed.title == "replay"
    assert listed.tags["omnisupport/batches"] == "2"
    subset = listed.get_target_root_partitions_subset  # Present as long as the asset backfill page needs it.
    assert subset is not None
    data = listed.asset_backfill_data
    assert {key.to_user_string() for key in data.target_subset.asset_keys} == {
        "desk/raw_cdc_staging",
        "desk/deduped_events",
        "desk/dim_notes",
    }
    windows = data.target_subset.get_partitions_subset(dg.AssetKey(["desk", "dim_notes"]))
    assert set(windows.get_partition_keys()) == {FIRST, SECOND}


def test_its_status_is_read_back(instance, definitions):
    backfill_id = launch_backfill(
        instance, definitions.resolve_asset_graph(), Backfill(SOURCE, [FIRST], "replay")
    )
    status = backfill_status(instance, backfill_id)
    assert (status.status, status.finished, status.succeeded) == ("REQUESTED", False, False)


def test_a_window_that_is_no_partition_is_refused(instance, definitions):
    with pytest.raises(BackfillRefused, match="2025-01-01T0000"):
        launch_backfill(
            instance,
            definitions.resolve_asset_graph(),
            Backfill(SOURCE, [FIRST, "2025-01-01T0000"], "replay"),
        )
    assert not instance.get_backfills()


def test_an_unknown_source_is_refused_with_the_known_ones(instance, definitions):
    with pytest.raises(BackfillRefused, match="one of these sources: desk"):
        launch_backfill(instance, definitions.resolve_asset_graph(), Backfill("elsewhere", [FIRST], "replay"))


def test_an_unknown_backfill_is_refused(instance):
    with pytest.raises(BackfillRefused, match="nothing"):
        backfill_status(instance, "nothing")
