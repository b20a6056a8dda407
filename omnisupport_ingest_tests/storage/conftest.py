"""One S3 server for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from omnisupport_ingest_tests.sources.postgres.conftest import source
from omnisupport_ingest_tests.storage.s3_server import S3Server, s3_server

__all__ = ["s3", "source"]


@pytest.fixture(scope="session")
def s3_process() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


@pytest.fixture
def s3(s3_process: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """The server, with its variables in this process's environment."""
    for name, value in s3_process.variables.items():
        monkeypatch.setenv(name, value)
    return s3_process
