"""Blocks that a thread reads ahead: all of them in order, its error after them, and no thread left behind."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from omnisupport_ingest.sources.query.postgres import read_ahead

Give = Callable[[bytes], None]


def numbers(count: int) -> list[bytes]:
    return [str(number).encode() for number in range(count)]


def test_every_block_is_given_in_its_order() -> None:
    def produce(give: Give) -> None:
        for block in numbers(50):
            give(block)

    with read_ahead(produce) as blocks:
        assert list(blocks) == numbers(50)


def test_an_error_of_the_read_comes_behind_the_blocks_before_it() -> None:
    def produce(give: Give) -> None:
        give(b"first")
        raise LookupError("the server has gone")

    taken = []
    with pytest.raises(LookupError, match="gone"), read_ahead(produce) as blocks:
        taken += blocks
    assert taken == [b"first"]


def test_a_read_whose_blocks_nobody_takes_any_more_ends() -> None:
    ended = threading.Event()

    def produce(give: Give) -> None:
        try:
            for block in numbers(1000):
                give(block)
        finally:
            ended.set()

    with pytest.raises(ZeroDivisionError), read_ahead(produce) as blocks:
        next(blocks)
        raise ZeroDivisionError
    assert ended.is_set()


def test_whoever_has_enough_leaves_and_the_read_ends() -> None:
    ended = threading.Event()

    def produce(give: Give) -> None:
        try:
            for block in numbers(1000):
                give(block)
        finally:
            ended.set()

    with read_ahead(produce) as blocks:
        assert next(blocks) == b"0"
    assert ended.is_set()
