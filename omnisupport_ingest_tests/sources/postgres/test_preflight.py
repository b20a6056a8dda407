"""Every finding of the preflight, and that its own SQL repairs it."""

from __future__ import annotations

import pytest

from omnisupport_ingest.sources.postgres.preflight import Finding, preflight
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest, contract


def _findings(source: SourceUnderTest) -> dict[str, Finding]:
    found = preflight(source.dsn, source.tables, slot=source.slot, publication=source.slot)
    return {finding.check: finding for finding in found}


def test_ordinary_table_has_nothing_to_find(source: SourceUnderTest) -> None:
    source.sql("CREATE TABLE t (id int PRIMARY KEY, v text)")
    source.tables.append(contract("t", ("id", "v")))
    assert _findings(source) == {}


@pytest.mark.parametrize(
    ("definition", "check"),
    [
        ("id int, v text", "key_not_null"),
        ("id int NOT NULL, v text", "replica_identity"),
        ("id int NOT NULL, v text, PRIMARY KEY (id) DEFERRABLE", "deferrable_key"),
    ],
)
def test_key_that_cannot_name_rows_is_repaired_by_the_fix(
    source: SourceUnderTest, definition: str, check: str
) -> None:
    source.sql(f"CREATE TABLE t ({definition})")
    source.tables.append(contract("t", ("id", "v")))
    found = _findings(source)
    assert check in found
    source.sql(*(finding.fix for finding in found.values() if finding.check != "replica_identity"))
    for finding in _findings(source).values():
        source.sql(finding.fix)
    assert _findings(source) == {}


def test_unique_index_as_replica_identity_will_do(source: SourceUnderTest) -> None:
    source.sql(
        "CREATE TABLE t (pk int PRIMARY KEY, id int NOT NULL UNIQUE)",
        "ALTER TABLE t REPLICA IDENTITY USING INDEX t_id_key",
    )
    source.tables.append(contract("t", ("id",)))
    assert _findings(source) == {}


def test_table_and_column_that_do_not_exist_are_named(source: SourceUnderTest) -> None:
    source.sql("CREATE TABLE t (id int PRIMARY KEY)")
    source.tables += [contract("t", ("id", "colour")), contract("missing", ("id",))]
    found = _findings(source)
    assert "colour" in found["column"].problem and "public.missing" in found["table"].problem


def test_unlogged_table_and_view_are_refused(source: SourceUnderTest) -> None:
    source.sql("CREATE UNLOGGED TABLE t (id int PRIMARY KEY)")
    source.tables.append(contract("t", ("id",)))
    source.sql(_findings(source)["table"].fix)
    assert _findings(source) == {}


def test_role_without_rights_is_told_each_grant(source: SourceUnderTest) -> None:
    role = f"{source.slot}_role"
    source.sql("CREATE TABLE t (id int PRIMARY KEY)", f"CREATE ROLE {role} LOGIN")
    source.tables.append(contract("t", ("id",)))
    superuser = source.dsn
    source.dsn = superuser.replace("user=postgres", f"user={role}")
    assert set(_findings(source)) == {"replication_right", "select_right", "publication"}
    fixes = [f"ALTER ROLE {role} REPLICATION", f"GRANT SELECT ON t TO {role}"]
    source.dsn = superuser
    source.sql(*fixes, f"CREATE PUBLICATION {source.slot} FOR TABLE t")
    source.dsn = superuser.replace("user=postgres", f"user={role}")
    assert _findings(source) == {}
    source.catch_up()
    source.dsn = superuser
    source.sql("INSERT INTO t VALUES (1)", f"DROP OWNED BY {role}", f"DROP ROLE {role}")
