"""What a target's server refuses is said in its own words, as of a target; on a real server."""

from __future__ import annotations

import io
import secrets
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
from psycopg2.extensions import make_dsn

from omnisupport_ingest.contracts.model import TableContract, TargetPolicy
from omnisupport_ingest.sources.postgres.session.connection import with_silence
from omnisupport_ingest.targets.columns import TargetRefused
from omnisupport_ingest.targets.sync import TargetUnavailable, _connect, _copy, _copy_out, _errors
from omnisupport_ingest_tests.layers.notes import CONTRACT
from omnisupport_ingest_tests.sources.postgres.conftest import source
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest

__all__ = ["source"]

ENV = "TESTED_WAREHOUSE_DSN"
POLICY = TargetPolicy(ENV, None, "warehouse", "notes")


def contract() -> TableContract:
    return replace(CONTRACT, target=POLICY)


def test_a_role_that_is_not_there_is_refused_in_the_words_of_a_target(
    source: SourceUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENV, make_dsn(source.dsn, user="nobody_here", password="s3cret"))
    with pytest.raises(TargetRefused, match='role "nobody_here" does not exist') as refused:
        _connect(contract(), POLICY)
    assert refused.value.problem.startswith("Cannot connect to the target warehouse.notes at ")
    assert refused.value.fix == f"Correct the user in {ENV}, or create the role."
    assert "s3cret" not in str(refused.value)


def test_a_server_that_is_away_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV, "postgresql://me:s3cret@127.0.0.1:1/none")
    with pytest.raises(TargetUnavailable, match="Connection refused") as away:
        _connect(contract(), POLICY)
    assert ENV in away.value.fix and "OMNISUPPORT_SOURCE_DSN" not in str(away.value)


def test_a_role_needs_the_right_to_make_temporary_tables(
    source: SourceUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    role = f"warehouse_{secrets.token_hex(4)}"
    source.sql(f"CREATE ROLE {role} LOGIN", f"REVOKE TEMPORARY ON DATABASE {source.slot} FROM PUBLIC")
    monkeypatch.setenv(ENV, make_dsn(source.dsn, user=role))
    try:
        with (
            closing(_connect(contract(), POLICY)) as connection,
            connection.cursor() as cursor,
            pytest.raises(TargetRefused, match="permission denied to create temporary tables") as refused,
            _errors(contract(), POLICY),
        ):
            cursor.execute("CREATE TEMP TABLE leaving (_cdc_key text)")
        assert "GRANT TEMPORARY ON DATABASE" in refused.value.fix
        source.sql(f"GRANT TEMPORARY ON DATABASE {source.slot} TO {role}")
        with closing(_connect(contract(), POLICY)) as connection, connection.cursor() as cursor:
            cursor.execute("CREATE TEMP TABLE leaving (_cdc_key text)")
    finally:
        source.sql(f"DROP OWNED BY {role}", f"DROP ROLE {role}")


SILENCE, PAUSE = 2.0, 9.0
"""Seconds that a target may be silent, and that we let it wait for us: it is asked in between, twice."""


class _Slow(io.BytesIO):
    """A file on a disk that does not come along with its first block."""

    def write(self, block: Any) -> int:
        if not self.tell():
            time.sleep(PAUSE)
        return super().write(block)


def test_a_target_that_waits_for_us_is_not_silent(
    source: SourceUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a socket of this machine nobody knows when something came last."""
    monkeypatch.setenv(ENV, with_silence(source.dsn, SILENCE))
    many, file = 200_000, _Slow()

    def blocks() -> Iterator[bytes]:
        yield b"0\n"
        time.sleep(PAUSE)
        yield b"1\n"

    with closing(_connect(contract(), POLICY)) as connection, connection.cursor() as cursor:
        _copy_out(cursor, f"COPY (SELECT repeat('x', 100) FROM generate_series(1, {many})) TO STDOUT", file)
        assert len(file.getvalue()) == many * 101
        cursor.execute("CREATE TEMP TABLE coming (number int)")
        _copy(cursor, "COPY coming FROM STDIN", blocks())
        cursor.execute("SELECT sum(number) FROM coming")
        assert cursor.fetchone() == (1,)
