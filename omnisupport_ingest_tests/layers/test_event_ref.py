"""The name of an event, as people read and type it: every event that can be printed can be typed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnisupport_ingest.layers.events.event_ref import EventRef, EventRefRefused
from omnisupport_ingest.sources.query.cursor import NULL_ORDINALS
from omnisupport_ingest_tests.examples import examples

_INT64 = st.integers(-(1 << 63), (1 << 63) - 1) | st.sampled_from(
    [-(1 << 63), (1 << 63) - 1, NULL_ORDINALS.start]
)


@settings(max_examples=examples(300))
@given(epoch=st.integers(0, 10**9 - 1), lsn=st.integers(0, (1 << 63) - 1), ordinal=_INT64, event_hash=_INT64)
def test_what_is_printed_is_read_again(epoch: int, lsn: int, ordinal: int, event_hash: int) -> None:
    ref = EventRef.of(epoch, lsn, ordinal, event_hash)
    assert EventRef.parse(str(ref)) == ref


@pytest.mark.parametrize("ordinal", [1 << 63, -(1 << 63) - 1, 9_999_999_999_999_999_999, 10**19])
def test_an_ordinal_that_no_event_can_have_is_refused(ordinal: int) -> None:
    with pytest.raises(EventRefRefused, match="is not the id of an event"):
        EventRef.parse(f"1:0/0:{ordinal}#0000000000000000")
