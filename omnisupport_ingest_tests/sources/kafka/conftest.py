"""One broker for the tests of topics; each test has topics of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from omnisupport_ingest_tests.sources.kafka.broker import Broker, running_broker


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with running_broker(tmp_path_factory.mktemp("broker") / "log") as running:
        yield running
