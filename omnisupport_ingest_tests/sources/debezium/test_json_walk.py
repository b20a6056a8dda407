"""Numbers in a line: which letters are taken for one, and that no other line is."""

from __future__ import annotations

import re

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from omnisupport_ingest.sources.debezium.json_walk import Walk
from omnisupport_ingest.sources.debezium.line_blocks import PADDING, Block
from omnisupport_ingest_tests.examples import examples

_DIGITS = st.text("0123456789", max_size=30)
_BEHIND = st.text("0/:;9.e-,}é\xb0n", max_size=9)
_TEXTS = st.one_of(
    st.builds(
        lambda sign, digits, behind: sign + digits + behind,
        st.sampled_from(["", "-", "--"]),
        _DIGITS,
        _BEHIND,
    ),
    st.integers(-(1 << 64), 1 << 64).map(str),
    st.builds(
        lambda edge, step: str(edge + step), st.sampled_from([-(1 << 63), 1 << 63]), st.integers(-2, 2)
    ),
    st.builds(lambda behind: "null" + behind, _BEHIND),
)


@settings(max_examples=examples(300))
@given(st.lists(_TEXTS, min_size=1, max_size=5))
@example(["0", "-0", "00", "-", "", "null", "1\xb0", "12345678\xb9"])
def test_a_whole_number_is_one_that_json_writes_and_64_bits_hold(texts: list[str]) -> None:
    # Each letter is a byte, also one that no text has.
    lines = [each.encode("latin-1") for each in texts]
    block = Block.of_file(b"\n".join([*lines, b""]) + PADDING, 1)
    walk = Walk(block, np.arange(len(lines)))
    walk.whole()
    (slot,) = walk.slots
    found = dict(
        zip(walk.lines.tolist(), zip(slot.begins, slot.ends, slot.is_null, strict=True), strict=True)
    )
    for i, line in enumerate(lines):
        number = re.match(rb"-?[0-9]+", line)
        if line.startswith(b"null"):
            begin, end, is_null = found[i]
            assert is_null and block.content[begin:end] == b"null"
        elif number is not None and str(int(number[0])).encode() == number[0] and _fits(int(number[0])):
            begin, end, is_null = found[i]
            assert not is_null and block.content[begin:end] == number[0]
        else:
            assert i not in found


def _fits(number: int) -> bool:
    return -(1 << 63) <= number < 1 << 63
