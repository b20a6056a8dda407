"""Messages come in their order while earlier ones land, and the client is used by one thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from omnisupport_ingest.sources.kafka.read_ahead import _MESSAGE_BYTES, ReadAhead


class Client:
    """Gives lists of values, then nothing, or raises."""

    def __init__(self, answers: Sequence[Sequence[bytes]], then: BaseException | None = None) -> None:
        self.answers, self.then = [*answers], then
        self.threads: set[int] = set()
        self.asked = 0
        self.more = threading.Semaphore(0)

    def consume(self) -> Any:
        self.threads.add(threading.get_ident())
        self.asked += 1
        self.more.release()
        if self.answers:
            return self.answers.pop(0)
        if self.then is not None:
            raise self.then
        return []


@contextmanager
def ahead_of(client: Client, most_bytes: int = 100) -> Iterator[ReadAhead]:
    with ReadAhead(client.consume, most_bytes) as ahead:
        yield ahead


def test_messages_come_in_their_order_and_an_error_after_them() -> None:
    client = Client([[b"a", b"b"], [], [b"c"]], KeyError("gone"))
    with ahead_of(client) as ahead:
        assert [ahead.take() for _ in range(3)] == [[b"a", b"b"], [], [b"c"]]
        for _ in range(2):
            with pytest.raises(KeyError, match="gone"):
                ahead.take()


def test_no_more_is_read_while_much_waits() -> None:
    client = Client([[b"x" * 60]] * 9)
    # A message takes more than its value.
    with ahead_of(client, 2 * (60 + _MESSAGE_BYTES)) as ahead:
        for expected in (2, 3, 4):
            while client.asked < expected:
                assert client.more.acquire(timeout=10)
            assert client.asked == expected
            assert ahead.take() == [b"x" * 60]


def test_what_uses_the_client_is_done_by_the_thread_that_reads_also_while_much_waits() -> None:
    client, done = Client([[b"x" * 200]]), threading.Event()
    by: list[int] = []

    def task() -> None:
        by.append(threading.get_ident())
        done.set()

    with ahead_of(client) as ahead:
        assert client.more.acquire(timeout=10)
        ahead.between(task)
        assert done.wait(10)
    assert {*by} == client.threads
    ahead.between(task)
    assert by[-1] == threading.get_ident(), "nobody reads any more"


def test_a_task_is_not_lost_when_reading_ends() -> None:
    for _ in range(200):
        client, done = Client([], KeyError("gone")), threading.Event()
        with ahead_of(client) as ahead:
            ahead.between(done.set)
        assert done.is_set()


def test_an_error_is_told_also_if_a_task_that_waits_fails() -> None:
    asked, told = threading.Event(), list[BaseException]()

    def consume() -> Any:
        assert asked.wait(10)
        raise KeyError("gone")

    def fail() -> None:
        raise ValueError("the client is closed")

    def take(ahead: ReadAhead) -> None:
        try:
            ahead.take()
        except KeyError as problem:
            told.append(problem)

    ahead = ReadAhead(consume, 100)
    with pytest.MonkeyPatch.context() as patch, ahead:
        patch.setattr(threading, "excepthook", lambda _: None)
        ahead.between(fail)
        taker = threading.Thread(target=take, args=[ahead], daemon=True)
        taker.start()
        asked.set()
        taker.join(10)
        assert len(told) == 1
