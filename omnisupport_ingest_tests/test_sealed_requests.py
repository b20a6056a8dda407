"""Requests that only who has the secret can ask, read or answer."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnisupport_ingest import sealed_requests
from omnisupport_ingest.sealed_requests import Address, Answering, NotAnswered

LOOPBACK = "127.0.0.1"
asked: list[dict[str, Any]] = []


def echo(request: dict[str, Any]) -> dict[str, Any]:
    asked.append(request)
    return {"said": request}


@pytest.fixture(scope="module")
def answering() -> Iterator[Answering]:
    service = Answering(LOOPBACK, 0, echo)
    yield service
    service.close()


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealed_requests, "_WAIT_SECONDS", 0.0)
    asked.clear()


@given(told=st.dictionaries(st.text(), st.one_of(st.text(), st.integers(0, 2**53), st.none(), st.booleans())))
def test_what_is_asked_is_answered(told: dict[str, Any], answering: Answering) -> None:
    assert answering.address(LOOPBACK).ask(told) == {"said": told}


def test_many_ask_at_once_and_much(answering: Answering) -> None:
    address, found = answering.address(LOOPBACK), list[int]()

    def ask(number: int) -> None:
        text = str(number) * 1_000_000
        found.append(number if address.ask({"text": text}) == {"said": {"text": text}} else -1)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert sorted(found) == list(range(8))


def test_who_has_another_secret_is_not_heard(answering: Answering) -> None:
    address = answering.address(LOOPBACK)
    with pytest.raises(NotAnswered, match=f"{LOOPBACK}:{address.port}"):
        replace(address, secret=bytes(32)).ask({"text": "a"})
    assert asked == []
    assert address.secret.hex() not in repr(address) and repr(address.secret) not in repr(address)


class Between:
    """Somebody between the two, who hands on what each sends and may change one byte of it."""

    def __init__(self, port: int, changed: int | None, to_server: bool) -> None:
        self._port, self._changed, self._to_server = port, changed, to_server
        self.sent = bytearray()
        self._listener = socket.create_server((LOOPBACK, 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            one, _ = self._listener.accept()
            other = socket.create_connection((LOOPBACK, self._port))
            for source, target, ours in ((one, other, self._to_server), (other, one, not self._to_server)):
                arguments = (source, target, self._changed if ours else None, ours)
                threading.Thread(target=self._hand_on, args=arguments, daemon=True).start()

    def _hand_on(
        self, source: socket.socket, target: socket.socket, changed: int | None, noted: bool
    ) -> None:
        with suppress(OSError):
            self._hand_all_on(source, target, changed, noted)
        for each in (source, target):
            # The other thread waits for one of them, so closing it would end nothing.
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _hand_all_on(
        self, source: socket.socket, target: socket.socket, changed: int | None, noted: bool
    ) -> None:
        seen = 0
        while piece := bytearray(source.recv(65536)):
            if changed is not None and seen <= changed < seen + len(piece):
                piece[changed - seen] ^= 1
            seen += len(piece)
            if noted:
                self.sent += piece
            target.sendall(piece)


REQUEST_BEGINS, ANSWER_BEGINS = 32 + 4, 16 + 4


@pytest.mark.parametrize("byte", [0, 31, REQUEST_BEGINS, REQUEST_BEGINS + 12, REQUEST_BEGINS + 20])
def test_a_request_that_was_changed_is_not_answered(answering: Answering, byte: int) -> None:
    address = answering.address(LOOPBACK)
    between = Between(address.port, byte, to_server=True)
    with pytest.raises(NotAnswered):
        replace(address, port=between.port).ask({"text": "a"})
    assert asked == []


@pytest.mark.parametrize("byte", [0, 16, 19, ANSWER_BEGINS, ANSWER_BEGINS + 12, ANSWER_BEGINS + 20])
def test_an_answer_that_was_changed_is_not_believed(
    answering: Answering, byte: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = answering.address(LOOPBACK)
    # A length that is too large is waited for.
    monkeypatch.setattr(sealed_requests, "_ANSWER_SECONDS", 0.2)
    between = Between(address.port, byte, to_server=False)
    with pytest.raises(NotAnswered):
        replace(address, port=between.port).ask({"text": "a"})


def test_what_was_recorded_is_of_no_use_and_shows_nothing(answering: Answering) -> None:
    address = answering.address(LOOPBACK)
    between = Between(address.port, None, to_server=True)
    replace(address, port=between.port).ask({"text": "a secret text"})
    recorded = bytes(between.sent)
    assert len(asked) == 1 and len(recorded) > REQUEST_BEGINS
    assert b"secret" not in recorded and address.secret not in recorded
    with socket.create_connection((LOOPBACK, address.port)) as again:
        again.recv(16)
        again.sendall(recorded)
        again.settimeout(10)
        try:
            left = again.recv(1)
        except ConnectionResetError:
            left = b""
    assert left == b"" and len(asked) == 1


class Replaying:
    """Somebody who has recorded a connection of another, and gives the answer of it to whoever asks."""

    def __init__(self, recorded: bytes, *, ends: bool = False) -> None:
        self._listener = socket.create_server((LOOPBACK, 0))
        self.port, self._recorded, self._ends = self._listener.getsockname()[1], recorded, ends
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            connection.sendall(self._recorded)
            if self._ends:
                connection.close()


def test_a_recorded_answer_is_not_taken_for_another_request(answering: Answering) -> None:
    address = answering.address(LOOPBACK)
    between = Between(address.port, None, to_server=False)
    assert replace(address, port=between.port).ask({"text": "a"}) == {"said": {"text": "a"}}
    replaying = Replaying(bytes(between.sent))
    for asked_now in ({"text": "b"}, {"text": "a"}):
        with pytest.raises(NotAnswered):
            replace(address, port=replaying.port).ask(asked_now)


def test_who_proves_nothing_is_let_go_and_others_are_answered_meanwhile(
    answering: Answering, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sealed_requests, "_CONNECT_SECONDS", 1.0)
    silent = [socket.create_connection((LOOPBACK, answering.address(LOOPBACK).port)) for _ in range(10)]
    assert answering.address(LOOPBACK).ask({"n": 1}) == {"said": {"n": 1}}
    for each in silent:
        each.settimeout(10)
        while each.recv(64):
            pass
        each.close()


def test_too_many_who_prove_nothing_are_not_let_in(
    answering: Answering, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sealed_requests, "_UNPROVEN", 2)
    monkeypatch.setattr(sealed_requests, "_ROOM_SECONDS", 0.01)
    service = Answering(LOOPBACK, 0, echo)
    address = service.address(LOOPBACK)
    silent = [socket.create_connection((LOOPBACK, address.port)) for _ in range(2)]
    for each in silent:
        each.recv(16)
    with pytest.raises(NotAnswered):
        address.ask({"n": 1})
    silent[0].close()
    monkeypatch.setattr(sealed_requests, "_TRIES", 100)
    monkeypatch.setattr(sealed_requests, "_WAIT_SECONDS", 0.05)
    assert address.ask({"n": 2}) == {"said": {"n": 2}}
    service.close()


def test_its_port_is_free_for_the_next_one_at_once() -> None:
    first = Answering(LOOPBACK, 0, echo)
    port = first.address(LOOPBACK).port
    for _ in range(3):
        first.address(LOOPBACK).ask({})
    first.close()
    second = Answering(LOOPBACK, port, echo)
    assert second.address(LOOPBACK).port == port
    second.close()


@pytest.mark.parametrize("told", [bytes(16) + bytes(4), bytes(16) + b"\0\0\0\x04spam", b"HTTP/1.1 400 Bad"])
def test_another_program_at_the_address_is_no_answer(told: bytes) -> None:
    with pytest.raises(NotAnswered):
        Address(LOOPBACK, Replaying(told, ends=True).port, bytes(32)).ask({})


def test_many_more_than_may_be_unproven_are_all_answered(answering: Answering) -> None:
    found = list[Any]()
    threads = [
        threading.Thread(target=lambda: found.append(answering.address(LOOPBACK).ask({"n": 1})))
        for _ in range(150)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert found == [{"said": {"n": 1}}] * 150


def test_a_thread_that_does_not_start_takes_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealed_requests, "_UNPROVEN", 1)
    service = Answering(LOOPBACK, 0, echo)
    real, left = threading.Thread.start, [1, 1]

    def start(self: threading.Thread) -> None:
        if left and "process_request_thread" in repr(self):
            left.pop()
            raise RuntimeError("can't start new thread")
        real(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    assert service.address(LOOPBACK).ask({"n": 1}) == {"said": {"n": 1}}
    assert left == []
    service.close()


def test_nobody_at_the_address_is_said(answering: Answering) -> None:
    with socket.create_server((LOOPBACK, 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(NotAnswered, match="refused"):
        Address(LOOPBACK, port, bytes(32)).ask({})


def test_one_that_is_away_for_a_moment_is_asked_again(
    answering: Answering, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = answering.address(LOOPBACK)
    real, left = Address._ask, [OSError("reset"), EOFError("ended")]

    def once_more(self: Address, request: dict[str, Any]) -> dict[str, Any]:
        if left:
            raise left.pop()
        return real(self, request)

    monkeypatch.setattr(Address, "_ask", once_more)
    assert address.ask({"n": 1}) == {"said": {"n": 1}}


def test_what_the_answering_side_cannot_do_is_in_its_log(caplog: pytest.LogCaptureFixture) -> None:
    def broken(request: dict[str, Any]) -> dict[str, Any]:
        raise KeyError(request["text"])

    service = Answering(LOOPBACK, 0, broken)
    with pytest.raises(NotAnswered, match="ended"):
        service.address(LOOPBACK).ask({"text": "personal"})
    service.close()
    assert "cannot be answered: KeyError at" in caplog.text and "in broken" in caplog.text
    assert "personal" not in caplog.text
