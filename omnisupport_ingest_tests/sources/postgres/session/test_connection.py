"""Connections that fail say what to do, and never the password."""

from __future__ import annotations

import pytest

from omnisupport_ingest.sources.postgres.session.connection import (
    VALUE_SETTINGS,
    connect,
    connect_replication,
)
from omnisupport_ingest.sources.postgres.session.errors import BadDsn, SourceRefused, SourceUnavailable
from omnisupport_ingest_tests.sources.postgres.awkward import Shop
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest

PASSWORD = "s3cret-word"


@pytest.mark.parametrize(
    "dsn",
    [
        f"postgresql://me:{PASSWORD}@localhost:port/db",
        f"postgresql://me:{PASSWORD}/more@localhost/db",
        f"postgresql://me:123/{PASSWORD}@localhost/db",
        f"host=localhost passwrod={PASSWORD}",
        PASSWORD,
    ],
)
def test_connection_string_that_cannot_be_read(dsn: str) -> None:
    with pytest.raises(BadDsn) as refused:
        connect(dsn)
    assert PASSWORD not in str(refused.value)


def test_server_that_is_not_there() -> None:
    with pytest.raises(SourceUnavailable) as refused:
        connect(f"postgresql://me:{PASSWORD}@127.0.0.1:1/db")
    assert "127.0.0.1" in refused.value.problem and PASSWORD not in str(refused.value)
    assert "OMNISUPPORT_SOURCE_DSN" in refused.value.fix


def test_database_that_does_not_exist(source: SourceUnderTest) -> None:
    with pytest.raises(SourceRefused) as refused:
        connect(source.dsn.replace(source.slot, "no_such_database"))
    assert "create the database" in refused.value.fix


@pytest.mark.parametrize("opened", [connect, connect_replication])
def test_settings_that_shape_values_are_pinned_on_every_connection(
    source: SourceUnderTest, opened: type
) -> None:
    connection = opened(source.dsn + " options='-c DateStyle=German -c work_mem=8MB'")
    with connection.cursor() as cursor:
        for name, value in VALUE_SETTINGS.items():
            cursor.execute(f"SELECT current_setting('{name}')")
            assert cursor.fetchone()[0].split(",")[0] == value
        cursor.execute("SELECT current_setting('work_mem'), current_setting('client_encoding')")
        assert cursor.fetchone() == ("8MB", "UTF8")
    connection.close()


def test_memory_for_decoding_is_set_by_a_role_that_may_only_replicate(shop: Shop) -> None:
    connection = connect_replication(shop.dsn(), decoding_memory=100_000)
    with connection.cursor() as cursor:
        cursor.execute("SELECT current_setting('logical_decoding_work_mem'), current_setting('is_superuser')")
        assert cursor.fetchone() == ("97kB", "off")
    connection.close()
