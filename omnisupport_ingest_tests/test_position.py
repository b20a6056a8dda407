"""Positions order as the source committed, and read back from their text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnisupport_ingest.position import Lsn, Position

lsns = st.integers(0, (1 << 64) - 1).map(Lsn)
positions = st.builds(Position, st.integers(1, 3), st.integers(0, 3).map(Lsn), st.integers(-3, 3))


@given(lsns)
def test_lsn_reads_back_from_its_text(lsn: Lsn) -> None:
    assert Lsn.parse(str(lsn)) == lsn


@given(lsns, lsns)
def test_lsns_order_as_byte_offsets(a: Lsn, b: Lsn) -> None:
    assert (a < b) == (a.value < b.value)


def test_lsn_reads_as_postgresql_writes_it() -> None:
    assert Lsn.parse("16/B374D848") == Lsn(0x16_B374D848)
    assert str(Lsn(0x16_0000000A)) == "16/A"


@pytest.mark.parametrize("text", ["", "16", "16/", "G/1", "123456789/0", "1/123456789", " 1/2", "-1/2"])
def test_other_text_is_no_lsn(text: str) -> None:
    with pytest.raises(ValueError, match="not an LSN"):
        Lsn.parse(text)


@pytest.mark.parametrize("value", [-1, 1 << 64])
def test_number_beyond_64_bits_is_no_lsn(value: int) -> None:
    with pytest.raises(ValueError, match="unsigned 64-bit"):
        Lsn(value)


@given(positions)
def test_position_reads_back_from_its_text(position: Position) -> None:
    assert Position.parse(str(position)) == position


@given(positions, positions)
def test_positions_order_by_epoch_then_commit_then_ordinal(a: Position, b: Position) -> None:
    parts = [(each.epoch, each.commit_lsn.value, each.ordinal) for each in (a, b)]
    assert (a < b) == (parts[0] < parts[1])
    assert (a == b) == (parts[0] == parts[1])


def test_snapshot_row_stands_below_every_change_at_its_watermark() -> None:
    assert Position(1, Lsn(9), -1) < Position(1, Lsn(9), 0) < Position(2, Lsn(0), -1)
