"""One broker for the tests of topics; each test has topics of its own."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from omnisupport_ingest_tests.sources.kafka.broker import Broker, running_broker
from omnisupport_ingest_tests.sources.kafka.topics import Reader, holding


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with running_broker(tmp_path_factory.mktemp("broker") / "log") as running:
        yield running


@pytest.fixture
def prefix() -> str:
    return f"t{uuid.uuid4().hex[:8]}."


@pytest.fixture
def reader(broker: Broker, prefix: str, tmp_path: Path) -> Reader:
    return Reader(tmp_path, broker.address, prefix)


@pytest.fixture
def one_partition(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The cluster says that topics have one partition, until this is undone: the broker of the tests
    cannot add any."""
    holding(monkeypatch, lambda held: [each for each in held if each.partition == 0])
    return monkeypatch
