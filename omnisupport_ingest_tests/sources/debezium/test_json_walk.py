"""Values in a line: which letters are taken for one, and that no other line is."""

from __future__ import annotations

import json
import re

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from omnisupport_ingest.compiled import compiled_lines
from omnisupport_ingest.sources.debezium.json_walk import VARIABLE_DECIMAL, Slot, Step, Walk
from omnisupport_ingest.sources.debezium.line_blocks import PADDING, Block
from omnisupport_ingest_tests.examples import examples

pytestmark = pytest.mark.skipif(compiled_lines is None, reason="installed without a C compiler")

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
    # What follows the number is not looked at: the line ends there.
    ends = [len(each[0]) if (each := re.match(rb"null|-?[0-9]+", line)) else len(line) for line in lines]
    block.stops = block.starts + np.array(ends)
    kept, (slot,) = Walk((Step.WHOLE,)).through(block, np.arange(len(lines)))
    found = dict(zip(kept.tolist(), zip(slot.begins, slot.ends, slot.is_null, strict=True), strict=True))
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


_LETTERS = st.sampled_from(['"', "\\", "n", "u", "/", "\x01", "\x1f", " ", "é", "x" * 7, "x" * 8, "x" * 40])


@settings(max_examples=examples(300))
@given(st.lists(st.lists(_LETTERS, max_size=8).map("".join), min_size=1, max_size=5))
def test_a_text_is_one_whose_letters_are_those_that_land(contents: list[str]) -> None:
    for content in contents:
        line = f'"{content}"'
        slot = alone(Step.TEXT, line)
        try:
            value = json.loads(line)
        except ValueError:
            assert slot is None
        else:
            # A text that json would write otherwise is left to the exact way.
            assert (slot is not None) == (json.dumps(value, ensure_ascii=False) == line)


_NUMBERS = st.floats(allow_nan=False, allow_infinity=False).map(repr) | st.text(
    "0123456789+-.eE", max_size=12
)


@settings(max_examples=examples(300))
@given(_NUMBERS)
@example("1e5")
@example("-0.10E+05")
@example("9" * 40)
@example("9" * 41)
@example("null")
def test_a_number_is_one_that_json_writes(text: str) -> None:
    expected = re.fullmatch(r"null|-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?", text) and len(text) <= 40
    assert (alone(Step.NUMBER, text) is not None) == bool(expected)


@settings(max_examples=examples(300))
@given(
    st.from_regex(VARIABLE_DECIMAL, fullmatch=True)
    | st.text('{}":, 0123456789-=+/Aacelsuv', max_size=40)
    | st.from_regex(VARIABLE_DECIMAL, fullmatch=True).flatmap(
        lambda text: st.integers(0, len(text) - 1).map(lambda at: text[:at] + text[at + 1 :])
    )
)
def test_a_decimal_with_a_scale_is_what_its_pattern_says(text: str) -> None:
    text = text.rstrip("\n")
    assert (alone(Step.VARIABLE, text) is not None) == (re.search(VARIABLE_DECIMAL, text) is not None)


@settings(max_examples=examples(300))
@given(
    st.lists(st.none() | st.text(st.characters(exclude_categories=["Cc", "Cs"]), max_size=3), max_size=4),
    st.booleans(),
    st.text('[]," nul', max_size=3),
)
def test_a_list_is_one_of_texts_and_nulls(values: list[str | None], apart: bool, behind: str) -> None:
    step, comma = (Step.TEXTS_APART, ", ") if apart else (Step.TEXTS, ",")
    text = json.dumps(values, ensure_ascii=False, separators=(comma, ":"))
    assert alone(step, text) is not None
    assert alone(step, text + behind) is None or not behind
    assert len(values) < 2 or alone(Step.TEXTS if apart else Step.TEXTS_APART, text) is None
    assert all(alone(step, text[:end]) is None for end in range(len(text)))


@pytest.mark.parametrize(("count", "is_read"), [(100, True), (101, False)])
def test_a_list_of_very_many_elements_is_read_alone(count: int, is_read: bool) -> None:
    assert (alone(Step.TEXTS, json.dumps(["x"] * count, separators=(",", ":"))) is not None) == is_read


@pytest.mark.parametrize(
    "text", ["true", "false", "null", "True", "tru", "alse", "falsee", "1", '"true"', ""]
)
def test_a_flag_is_true_or_false(text: str) -> None:
    assert (alone(Step.FLAG, text) is not None) == (text in ("true", "false", "null"))


@settings(max_examples=examples(300))
@given(st.binary(max_size=40), st.lists(st.sampled_from([*Step][1:]), max_size=3))
def test_whatever_a_line_holds_no_step_leaves_it(content: bytes, steps: list[Step]) -> None:
    content = content.replace(b"\n", b"")
    block = Block.of_file(b"[" + content + b"]\n" + PADDING, 1)
    kept, slots = Walk((b"[", *steps, b"]")).through(block, np.arange(1))
    assert len(kept) in (0, 1)
    for slot in slots:
        assert (slot.begins <= slot.ends).all() and (slot.ends < block.stops[kept]).all()


def test_arguments_that_do_not_fit_each_other_are_refused() -> None:
    assert compiled_lines is not None
    one, places = np.zeros(1, np.int64), np.array([0, 1], np.int32)
    good = [b"[1]", one, one + 3, one, bytes([Step.EXPECT, Step.WHOLE]), (b"[", places)]
    assert compiled_lines.walk(*good)[-1] == 0
    wrong = [
        (1, one - 1), (1, one + 4), (2, one + 4), (2, one[:0]), (3, one + 1), (3, one - 1), (4, b"\x08"),
        (4, bytes([Step.EXPECT] * 2)), (5, (b"", places)), (5, (b"[", places[:1])),
        (5, (b"[", places[::-1].copy())),
    ]  # fmt: skip
    for at, value in wrong:
        with pytest.raises(ValueError, match="do not fit"):
            compiled_lines.walk(*(value if i == at else each for i, each in enumerate(good)))
    for no_texts in ([b"[", places], (b"[",), (b"[", places, 0), b"["):
        with pytest.raises(TypeError, match="walk takes 6 arguments"):
            compiled_lines.walk(*good[:5], no_texts)  # type: ignore[arg-type]


def alone(step: Step, text: str) -> Slot | None:
    """The slot of a line that is nothing but ``text``; None if it is not what ``step`` says."""
    content = text.encode()
    block = Block.of_values([content], pa.array([content]))
    kept, (slot,) = Walk((step,)).through(block, np.arange(1))
    if not len(kept):
        return None
    assert (slot.begins[0], slot.ends[0], slot.is_null[0]) == (0, len(content), text == "null")
    return slot
