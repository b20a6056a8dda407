"""The compiled functions give what the exact ways in Python give, and survive whatever bytes they get."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnisupport_ingest.compiled import compiled_frames, compiled_rows
from omnisupport_ingest.landing.rows import LandedEvent
from omnisupport_ingest.sources.postgres.protocol import copy_rows, frames, parsed_rows
from omnisupport_ingest.sources.postgres.protocol.copy_rows import copied_rows
from omnisupport_ingest.sources.postgres.protocol.copy_socket import Lines
from omnisupport_ingest_tests.sources.postgres.protocol.test_change_block import (
    AGENTS,
    COMMENTS,
    PARTS,
    STREAMS,
    TICKETS,
    Step,
    all_at_once,
    encoded,
    one_by_one,
)

pytestmark = pytest.mark.skipif(compiled_rows is None, reason="installed without a C compiler")

MESSAGES = [
    encoded(b"I", TICKETS, (b"N", ["1", 'x"\n', None])),
    encoded(b"U", AGENTS, (b"O", ["1", "net", "a"]), (b"N", ["1", "net", '"b"'])),
    encoded(b"D", COMMENTS, (b"K", ["1", "7", None])),
    encoded(b"U", PARTS, (b"N", ["1", "v"])),
]


def told(of: Callable[[], object]) -> object:
    """What ``of`` returns, or the type of what it raises."""
    try:
        return of()
    except Exception as problem:
        return type(problem)


@given(STREAMS)
def test_without_them_the_events_are_the_same(steps: list[Step]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parsed_rows, "compiled_rows", None)
        assert all_at_once(steps, lambda _: False) == one_by_one(steps)


@given(
    st.lists(st.sampled_from(MESSAGES), min_size=1, max_size=4),
    st.integers(0, 3),
    st.lists(st.tuples(st.integers(25, 80), st.integers(0, 255)), min_size=1, max_size=4),
    st.integers(0, 30),
)
def test_a_damaged_message_is_told_from_the_others_as_it_is_alone(
    messages: list[bytes], which: int, damages: Sequence[tuple[int, int]], cut: int
) -> None:
    which %= len(messages)
    damaged = bytearray(messages[which])
    for at, byte in damages:
        damaged[at % len(damaged)] = byte
    # The header is of the connection, which is not what is shown here.
    damaged[:25] = messages[which][:25]
    messages[which] = bytes(damaged[: max(31, len(damaged) - cut)])
    steps = [Step(each) for each in messages]

    def found() -> list[LandedEvent]:
        return all_at_once(steps, lambda _: False)

    compiled = told(found)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parsed_rows, "compiled_rows", None)
        assert compiled == told(found)


@given(
    st.lists(
        st.sampled_from([b'"', b"\\", b"\n", b"N", b"v", b"x", b"\x01", b"\xc3\xa9", b"\xff"]), max_size=30
    )
)
def test_lines_of_any_bytes_are_read_as_they_are_one_by_one(pieces: list[bytes]) -> None:
    lines = b"".join(pieces) + b"\n"

    def found() -> tuple[list[str | None], ...]:
        rows = copied_rows(Lines.of(lines), ("a", "b"), [1], [0, 1])
        return (
            rows.keys.to_pylist(),
            rows.images.to_pylist(),
            *(rows.texts(each).to_pylist() for each in (0, 1)),
        )

    compiled = told(found)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copy_rows, "compiled_rows", None)
        exact = told(found)
    if isinstance(compiled, tuple) and isinstance(exact, tuple):
        # Texts of columns are escaped where they were compiled.
        compiled, exact = compiled[:2], exact[:2]
    assert compiled == exact


@given(st.binary(max_size=60), st.integers(0, 70), st.integers(0, 70))
def test_frames_of_any_bytes_end_where_they_end_one_by_one(content: bytes, at: int, filled: int) -> None:
    filled = min(filled, len(content))
    at = min(at, filled)
    data = bytearray(content)
    found = frames.frame_bounds(data, at, filled, 1 << 32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frames, "compiled_frames", None)
        assert found.tolist() == frames.frame_bounds(data, at, filled, 1 << 32).tolist()


def test_arguments_that_do_not_fit_each_other_are_refused() -> None:
    assert compiled_frames is not None and compiled_rows is not None
    numbers, block = np.arange(3), b"abc"
    for starts, ends in (
        (numbers, numbers[:2]),
        (numbers, numbers + 9),
        (numbers - 1, numbers),
        (numbers + 1, numbers),
    ):
        with pytest.raises(ValueError, match="not within the data"):
            compiled_frames.join(block, starts, ends)
    with pytest.raises(ValueError, match="no array of items"):
        compiled_frames.join(block, b"x", numbers)
    for at, filled in ((-1, 2), (2, 1), (0, 4)):
        with pytest.raises(ValueError, match="not within the data"):
            compiled_frames.find_frames(block, at, filled, 9, -1)
    names, none = np.array([0, 4], np.int32), np.array([], np.int32)
    first, last = numbers * 0, numbers * 0 + 2
    good = {"data": b"x\n", "from": first, "to": last, "names": b'"a":', "name_at": names, "key": none}
    assert compiled_rows.convert_lines(*good.values(), none) is not None
    for name, wrong in (
        ("name_at", names[:1]), ("name_at", names * 9), ("name_at", names[::-1].copy()),
        ("key", np.array([1], np.int32)), ("key", np.array([-1], np.int32)),
        ("from", first - 1), ("from", last + 1), ("to", last + 1), ("to", last[:0]),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="do not fit"):
            compiled_rows.convert_lines(*(good | {name: wrong}).values(), none)
    for asked in ([1], [-1]):
        with pytest.raises(ValueError, match="do not fit"):
            compiled_rows.convert_lines(*good.values(), np.array(asked, np.int32))
    # A piece that is not one line.
    for data, end in ((b"x\ny\n", 4), (b"x\n", 1), (b"x\n", 0)):
        odd = good | {"data": data, "to": first + end}
        assert compiled_rows.convert_lines(*odd.values(), none) is None
    with pytest.raises(TypeError):
        compiled_frames.join(block)  # type: ignore[call-arg]


def test_tables_that_do_not_fit_their_columns_are_refused() -> None:
    assert compiled_rows is not None
    one, small = np.ones(1, np.int64), np.zeros(1, np.uint8)
    good = {
        "pieces": [(MESSAGES[0], one * 0, one * len(MESSAGES[0]))],
        "table_of": np.zeros(1, np.int32),
        "columns": one, "first": one * 0, "keys_of": one, "first_key": one * 0, "keys": one * 0,
        "partitioned": small, "has_identity": small, "flags": small, "names": b'"a":',
        "name_at": np.array([0, 4], np.int32),
    }  # fmt: skip
    converted, columns, *_ = compiled_rows.convert_changes(*good.values(), False)
    assert converted == b"\0" and len(columns) == 3
    for name, wrong in (
        ("pieces", [(MESSAGES[0], one * -1, one)]), ("pieces", [(MESSAGES[0], one, one * 999)]),
        ("pieces", [(MESSAGES[0], one, one * 0)]), ("pieces", [(MESSAGES[0], one, one[:0])]), ("pieces", []),
        ("table_of", np.zeros(2, np.int32)), ("columns", one * 2),
        ("columns", one * -1), ("first", one), ("keys_of", one * 2), ("keys", one), ("keys", one * -1),
        ("first_key", one * -1), ("partitioned", np.zeros(0, np.uint8)), ("flags", np.zeros(2, np.uint8)),
        ("name_at", np.array([0, 5], np.int32)), ("name_at", np.array([3, 2], np.int32)),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="do not fit"):
            compiled_rows.convert_changes(*(good | {name: wrong}).values(), False)
    for pieces in (7, [7], [(MESSAGES[0], one)], [(7, one, one)]):
        with pytest.raises((TypeError, IndexError)):
            compiled_rows.convert_changes(*(good | {"pieces": pieces}).values(), False)
    # A table that is not among them is left to the exact way.
    for number in (-1, 1, 1 << 30):
        found = compiled_rows.convert_changes(
            *(good | {"table_of": np.array([number], np.int32)}).values(), False
        )
        assert found[0] == b"\0"


def test_what_is_too_large_for_one_array_is_refused_and_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    class TooLarge:
        @staticmethod
        def convert_lines(*_: object) -> None:
            raise OverflowError

    monkeypatch.setattr(copy_rows, "compiled_rows", TooLarge)
    assert copied_rows(Lines.of(b"1\n"), ("a",), [0]).images.equals(pa.array(['{"a":"1"}']))
