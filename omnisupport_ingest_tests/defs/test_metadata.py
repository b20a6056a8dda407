"""Numbers of a dimension: the rows of the table beside those of the window, and shares of at most 1."""

from __future__ import annotations

from dataclasses import replace

import pytest

from omnisupport_ingest.defs.metadata import NET_CHANGES, RAW, checkpoint_metadata, merge_metadata
from omnisupport_ingest.lake.checkpoint import MergeCost
from omnisupport_ingest_tests.layers.test_plan import CHECKPOINT


def test_the_rows_of_a_window_are_not_shown_as_those_of_the_dimension() -> None:
    checkpoint = replace(CHECKPOINT, window="2026-01-01T1200", rows=7)
    assert checkpoint_metadata(replace(checkpoint, layer=RAW))["dagster/row_count"].value == 7
    of_dimension = checkpoint_metadata(replace(checkpoint, layer=NET_CHANGES))
    assert "dagster/row_count" not in of_dimension and of_dimension["window_rows"].value == 7


@pytest.mark.parametrize(
    ("keys", "before", "after", "share"),
    [(40, 36, 40, 1.0), (9, 36, 45, 0.2), (36, 36, 0, 1.0), (2, 40, 40, 0.05), (40, 36, 20, 1.0)],
    ids=["all and new ones", "only new ones", "all purged", "some", "the table was made anew since"],
)
def test_a_merge_changes_at_most_all_keys(keys: int, before: int, after: int, share: float) -> None:
    entries = merge_metadata(MergeCost(keys, before, files=2, held=4), after)
    assert entries["merge_keys"].value == keys
    assert entries["merge_keys_share"].value == pytest.approx(share)
    assert entries["merge_files_share"].value == 0.5
