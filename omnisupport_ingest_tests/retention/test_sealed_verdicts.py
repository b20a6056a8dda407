"""Nothing is accepted in a sealed window, by either kernel, and what is judged elsewhere does not change."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from omnisupport_ingest.cdc import ordinary
from omnisupport_ingest.cdc.judging import ACCEPTED, DUPLICATE, QUARANTINED
from omnisupport_ingest.contracts.decision_table import TOO_LATE
from omnisupport_ingest.windows import OUT_OF_RANGE
from omnisupport_ingest_tests.cdc.test_kernel_judging import drawn, drawn_rules, judged, randoms
from omnisupport_ingest_tests.examples import examples


@settings(max_examples=examples(100))
@given(randoms, st.sampled_from((0, ordinary.FEW)))
def test_events_of_a_sealed_window_wait_in_quarantine_whatever_they_are(rng: Random, few: int) -> None:
    deliveries = drawn(rng)
    both = drawn_rules(rng, deliveries)
    windows = sorted({each.window for each in deliveries} - {OUT_OF_RANGE})
    sealed = frozenset(rng.sample(windows, len(windows) // 2))
    before = judged(deliveries, both.kernel, 5, few)
    after = judged(deliveries, replace(both.kernel, sealed=sealed), 5, few)
    for each in deliveries:
        verdict, reason, *_ = after[each.number]
        if each.window not in sealed:
            assert after[each.number] == before[each.number]
        elif before[each.number][0] == DUPLICATE:
            assert verdict == DUPLICATE
        else:
            assert verdict == QUARANTINED
            assert before[each.number][0] != ACCEPTED or reason == TOO_LATE
