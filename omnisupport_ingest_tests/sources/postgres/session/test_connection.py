"""Connections that fail say what to do, and never the password."""

from __future__ import annotations

import copy
from contextlib import closing

import pytest
from psycopg2.errors import InternalError_
from pydantic import SecretStr

from omnisupport_ingest.contracts.named_secrets import NamedSecret
from omnisupport_ingest.sources.postgres.session.connect_errors import destination
from omnisupport_ingest.sources.postgres.session.connection import (
    VALUE_SETTINGS,
    connect,
    connect_replication,
    dsn_parts,
    with_silence,
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


def test_a_message_names_what_libpq_takes_from_its_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGPORT", "1")
    monkeypatch.setenv("PGUSER", "somebody")
    with pytest.raises(SourceUnavailable) as refused:
        connect("host=127.0.0.1 dbname=shop")
    assert "at 127.0.0.1, port 1, database shop, user somebody: " in refused.value.problem
    monkeypatch.setenv("PGSERVICE", "desk")
    assert destination({"dbname": "shop"}) == (
        "the source at the host of the service desk, port of the service desk, database shop, "
        "user of the service desk"
    )


@pytest.mark.parametrize("option", ["sslmode=some", "connect_timeout=long", "target_session_attrs=any-one"])
def test_an_option_with_a_wrong_value_is_refused_as_that(option: str) -> None:
    with pytest.raises(SourceRefused) as refused:
        connect(f"host=127.0.0.1 port=1 {option}")
    assert option.partition("=")[0] in refused.value.problem and "Give this option" in refused.value.fix


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


VANISHING = """
    CREATE SEQUENCE calls;
    CREATE FUNCTION vanishing(times int) RETURNS bigint LANGUAGE plpgsql AS $$
    DECLARE call bigint := nextval('calls');
    BEGIN
      IF call <= times THEN
        RAISE EXCEPTION 'could not open relation with OID 16544' USING ERRCODE = 'XX000';
      END IF;
      RETURN call;
    END $$
"""
"""A query that meets dropped relations at its first calls. A sequence is not rolled back."""


def test_query_that_meets_a_dropped_table_is_sent_again(source: SourceUnderTest) -> None:
    with closing(connect(source.dsn)) as connection, connection.cursor() as cursor:
        cursor.execute(VANISHING)
        cursor.execute("SELECT vanishing(3)")
        assert cursor.fetchone() == (4,)
        with pytest.raises(InternalError_, match="could not open relation"):
            cursor.execute("SELECT vanishing(1000)")
        cursor.execute("BEGIN")
        cursor.execute("SELECT currval('calls')")
        (calls,) = cursor.fetchone()
        with pytest.raises(InternalError_):
            cursor.execute("SELECT vanishing(1000)")
        cursor.execute("ROLLBACK")
        cursor.execute("SELECT currval('calls')")
        assert cursor.fetchone() == (calls + 1,), "within a transaction, it is not"


def test_a_connection_string_of_a_definition_is_named_by_its_variable() -> None:
    dsn = NamedSecret(f"postgresql://me:{PASSWORD}@127.0.0.1:1/db", "NORTH_DSN")
    for given in (dsn, with_silence(dsn, 30), copy.deepcopy(dsn), SecretStr(dsn).get_secret_value()):
        with pytest.raises(SourceUnavailable) as refused:
            connect_replication(given)
        assert "in NORTH_DSN" in refused.value.fix and PASSWORD not in str(refused.value)
    with pytest.raises(BadDsn, match=r"\(NORTH_DSN\)"):
        dsn_parts(NamedSecret("host=a port=b", "NORTH_DSN"))
