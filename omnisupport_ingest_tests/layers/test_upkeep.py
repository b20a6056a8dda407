"""What upkeep promises of waste, fresh files and the work of one update, over many updates."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from omnisupport_ingest.layers.dimension import tidying
from omnisupport_ingest.layers.dimension.tidying import FRESH_GENERATIONS, fresh_to_merge, ranges_to_rewrite
from omnisupport_ingest_tests.examples import examples

counts = st.integers(0, 10_000)


@settings(max_examples=examples(200))
@given(st.lists(st.tuples(counts, counts, counts), min_size=1, max_size=80))
def test_only_ranges_that_are_due_are_written_anew_and_of_these_the_worst(
    drawn: list[tuple[int, int, int]],
) -> None:
    stored, waste, sent = (np.array(each, np.int64) for each in zip(*drawn, strict=True))
    chosen = set(ranges_to_rewrite(stored, waste, sent).tolist())
    share = (waste + sent) / np.maximum(stored, 1)
    at_once = {n for n in range(len(drawn)) if sent[n] and sent[n] >= tidying.DENSE * stored[n]}
    assert at_once <= chosen
    worn = {n for n in range(len(drawn)) if waste[n] and share[n] > tidying.TOO_MUCH_WASTE}
    assert worn <= chosen
    others = chosen - at_once - worn
    assert len(others) <= max(1, len(drawn) * tidying.RANGES_AT_ONCE)
    assert all(share[n] > tidying.WASTE for n in others)
    left = [share[n] for n in range(len(drawn)) if n not in chosen and waste[n]]
    assert not others or max(left, default=0) <= min(share[n] for n in others)


def test_updates_of_few_keys_anywhere_never_write_the_whole_table_anew_and_waste_stays_low() -> None:
    rng = np.random.default_rng(1)
    stored, waste = np.full(200, 20_000), np.zeros(200, np.int64)
    most = 0
    for _ in range(400):
        sent = np.bincount(rng.integers(0, 200, 60_000), minlength=200)
        rewritten = ranges_to_rewrite(stored, waste, sent)
        waste += 2 * sent
        waste[rewritten] = 0
        most = max(most, len(rewritten))
    assert most <= 200 // 16
    assert waste.max() < stored[0]


@settings(max_examples=examples(100))
@given(st.lists(st.integers(1, 5_000), min_size=1, max_size=300))
def test_generations_of_fresh_files_stay_few_and_their_rows_are_not_written_again_at_every_update(
    sizes: list[int],
) -> None:
    live: list[int] = []
    moved = 0
    for size in sizes:
        merged = fresh_to_merge(live, live)
        together = sum(live[number] for number in merged)
        moved += together
        live = [rows for number, rows in enumerate(live) if number not in merged] + [together + size]
        assert len(live) <= FRESH_GENERATIONS
    # A row moves only when its generation about doubles.
    assert moved <= sum(sizes) * (2 + np.log2(1 + len(sizes)))


def test_a_generation_that_is_half_dead_leaves() -> None:
    assert fresh_to_merge([50, 51, 0], [100, 100, 10]) == [0, 2]
