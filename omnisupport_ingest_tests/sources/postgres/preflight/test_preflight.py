"""Every finding of the preflight, and that its own SQL repairs it."""

from __future__ import annotations

import psycopg2
import pytest
from psycopg2.extensions import parse_dsn

from omnisupport_ingest.sources.postgres.preflight import (
    Finding,
    Severity,
    blocking,
    preflight,
    require_ready,
)
from omnisupport_ingest.sources.postgres.preflight.server import minor_findings
from omnisupport_ingest.sources.postgres.preflight.source_check import check_source, continuity_findings
from omnisupport_ingest.sources.postgres.protocol.walstream import WalStream
from omnisupport_ingest.sources.postgres.session.connection import connect, connect_replication
from omnisupport_ingest.sources.postgres.session.errors import GapInSource, PreflightFailed, SlotInUse
from omnisupport_ingest.sources.postgres.slot.home_slot import ExpectedSlot, Presence
from omnisupport_ingest_tests.sources.postgres.fronts import pooler
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest, contract
from omnisupport_ingest_tests.waiting import until


def _all_findings(
    source: SourceUnderTest, presence: Presence = Presence.FREE, *, read_by_us: bool = False
) -> tuple[Finding, ...]:
    slot = ExpectedSlot(source.slot, presence, read_by_us)
    return preflight(source.dsn, source.tables, slot=slot, publication=source.slot)


def _findings(source: SourceUnderTest) -> dict[str, Finding]:
    """What blocks."""
    return {finding.check: finding for finding in blocking(_all_findings(source))}


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


@pytest.fixture
def ready(source: SourceUnderTest) -> SourceUnderTest:
    """A source with one table that nothing is wrong with."""
    source.sql("CREATE TABLE t (id int PRIMARY KEY, v text, extra text)")
    source.tables.append(contract("t", ("id", "v")))
    return source


def _repaired(source: SourceUnderTest, check: str) -> Finding:
    """The only thing that blocks, after its own fix has been run and found to help."""
    found = _findings(source)
    assert set(found) == {check}
    source.sql(found[check].fix)
    assert _findings(source) == {}
    source.catch_up()
    return found[check]


def test_publication_that_leaves_out_operations(ready: SourceUnderTest) -> None:
    ready.sql(f"CREATE PUBLICATION {ready.slot} FOR TABLE t WITH (publish = 'insert, update')")
    assert "delete, truncate" in _repaired(ready, "publication_operations").problem


def test_publication_with_a_row_filter_is_noted_with_what_that_means(ready: SourceUnderTest) -> None:
    ready.sql(f"CREATE PUBLICATION {ready.slot} FOR TABLE t WHERE (id > 10)")
    (noted,) = _all_findings(ready)
    assert (noted.check, noted.severity) == ("row_filter", Severity.NOTES)
    assert "only the rows of public.t with (id > 10)" in noted.problem
    ready.catch_up()


def test_column_list_without_a_contracted_column_is_refused_and_its_repair_keeps_the_filter(
    ready: SourceUnderTest,
) -> None:
    ready.sql(f"CREATE PUBLICATION {ready.slot} FOR TABLE t (id, extra) WHERE (id > 10 OR id < 0)")
    assert "does not send v of public.t" in _repaired(ready, "column_list").problem
    assert "(id < 0)" in {each.check: each.problem for each in _all_findings(ready)}["row_filter"]


REFUSED = {
    "filter": ("TABLE t WHERE (v = 'x')", "DEFAULT", "about v, which is not in the replica identity"),
    "included column": (
        "TABLE t WHERE (v = 'x')",
        "USING INDEX t_other",
        "about v, which is not in the replica identity",
    ),
    "two columns": ("TABLE t (id, v) WHERE (id > 0 AND v = 'x')", "DEFAULT", "is about v, which"),
    "column list": ("TABLE t (id, v)", "USING INDEX t_other", "leaves out other, which is in the replica"),
    "column list, whole rows": ("TABLE t (id, v)", "FULL", "does not go with the replica identity FULL"),
}


@pytest.mark.parametrize("partitioned", [False, True], ids=["one table", "a partition"])
@pytest.mark.parametrize(("what", "identity", "why"), REFUSED.values(), ids=REFUSED.keys())
def test_publication_for_which_postgresql_refuses_writes_is_warned_of(
    source: SourceUnderTest, what: str, identity: str, why: str, partitioned: bool
) -> None:
    columns = "(id int NOT NULL PRIMARY KEY, v text, other int NOT NULL)"
    table = "t_1" if partitioned else "t"
    if partitioned:
        source.sql(f"CREATE TABLE t {columns} PARTITION BY RANGE (id)")
        source.sql("CREATE TABLE t_1 PARTITION OF t FOR VALUES FROM (0) TO (100)")
    else:
        source.sql(f"CREATE TABLE t {columns}")
    source.sql(
        f"CREATE UNIQUE INDEX t_other ON {table} (id, other) INCLUDE (v)",
        f"ALTER TABLE {table} REPLICA IDENTITY {identity}",
        f"CREATE PUBLICATION {source.slot} FOR {what} WITH (publish_via_partition_root = true)",
        "INSERT INTO t VALUES (1, 'x', 1)",
    )
    source.tables.append(contract("t", ("id", "v")))
    with pytest.raises(psycopg2.Error, match="cannot update table"):
        source.sql("UPDATE t SET v = 'x'")
    (warned,) = [each for each in _all_findings(source) if each.severity is Severity.WARNS]
    assert warned.check == "refused_writes" and why in warned.problem
    assert f"deletes of public.{table}" in warned.problem
    source.sql(warned.fix)
    assert not [each for each in _all_findings(source) if each.severity is Severity.WARNS]
    source.sql("UPDATE t SET v = 'x'")


def test_refused_writes_of_several_tables_are_each_the_warning_of_its_own_table(
    source: SourceUnderTest,
) -> None:
    for name, column in (("t", "v"), ("u", "w"), ("whole", "v")):
        source.sql(f"CREATE TABLE {name} (id int PRIMARY KEY, {column} text)")
        source.tables.append(contract(name, ("id", column)))
    source.sql(f"CREATE PUBLICATION {source.slot} FOR TABLE t WHERE (v = 'x'), u WHERE (w = 'x'), whole")
    warned = [each for each in _all_findings(source) if each.severity is Severity.WARNS]
    assert {(each.table, "about v" in each.problem, "about w" in each.problem) for each in warned} == {
        ("t", True, False),
        ("u", False, True),
    }


def test_column_list_of_what_the_contract_names_is_only_noted(ready: SourceUnderTest) -> None:
    ready.sql(f"CREATE PUBLICATION {ready.slot} FOR TABLE t (id, v)")
    (noted,) = _all_findings(ready)
    assert (noted.check, noted.severity) == ("column_list", Severity.NOTES)
    assert "extra" in noted.problem


def test_partitioned_table_that_is_published_under_the_names_of_its_partitions_is_right(
    source: SourceUnderTest,
) -> None:
    source.sql(
        "CREATE TABLE t (id int PRIMARY KEY, v text) PARTITION BY RANGE (id)",
        "CREATE TABLE t_low PARTITION OF t FOR VALUES FROM (0) TO (100)",
        f"CREATE PUBLICATION {source.slot} FOR TABLE t",
    )
    source.tables.append(contract("t", ("id", "v")))
    assert _all_findings(source) == ()
    source.catch_up()


@pytest.mark.parametrize("ours", [True, False])
def test_partitioned_table_of_which_partitions_alone_are_published_is_added(
    source: SourceUnderTest, ours: bool
) -> None:
    source.sql(
        "CREATE TABLE t (id int PRIMARY KEY, v text) PARTITION BY RANGE (id)",
        "CREATE TABLE t_low PARTITION OF t FOR VALUES FROM (0) TO (100)",
        f"CREATE PUBLICATION {source.slot} FOR TABLE t_low",
    )
    source.tables.append(contract("t", ("id", "v")))
    role, superuser = f"{source.slot}_role", source.dsn
    source.sql(f"CREATE ROLE {role} LOGIN REPLICATION", f"GRANT SELECT ON t TO {role}")
    try:
        if not ours:
            source.dsn = superuser.replace("user=postgres", f"user={role}")
        (found,) = _all_findings(source)
        severity = Severity.NOTES if ours else Severity.BLOCKS
        assert (found.check, found.severity) == ("publication", severity)
    finally:
        source.dsn = superuser
        source.sql(f"REVOKE ALL ON t FROM {role}", f"DROP ROLE {role}")
    if not ours:
        source.sql(found.fix.partition(";")[0])
    assert not blocking(_all_findings(source))
    source.catch_up()


def test_publication_of_a_whole_schema_covers_its_tables(ready: SourceUnderTest) -> None:
    ready.sql(f"CREATE PUBLICATION {ready.slot} FOR TABLES IN SCHEMA public")
    assert _all_findings(ready) == ()
    ready.catch_up()


def test_publication_that_lacks_a_table_is_extended_by_capture_or_by_its_owner(
    ready: SourceUnderTest,
) -> None:
    ready.sql("CREATE TABLE other (id int PRIMARY KEY)", f"CREATE PUBLICATION {ready.slot} FOR TABLE other")
    (noted,) = _all_findings(ready)
    assert (noted.check, noted.severity) == ("publication", Severity.NOTES)
    role, superuser = f"{ready.slot}_role", ready.dsn
    ready.sql(f"CREATE ROLE {role} LOGIN REPLICATION", f"GRANT SELECT ON t TO {role}")
    ready.dsn = superuser.replace("user=postgres", f"user={role}")
    (blocked,) = blocking(_all_findings(ready))
    assert "does not own the publication and does not own public.t" in blocked.problem
    ready.dsn = superuser
    ready.sql(blocked.fix)
    ready.dsn = superuser.replace("user=postgres", f"user={role}")
    assert _findings(ready) == {}
    ready.dsn = superuser
    ready.sql(f"DROP OWNED BY {role}", f"DROP ROLE {role}")


def test_row_security_that_hides_rows_from_the_capture_role(ready: SourceUnderTest) -> None:
    role, superuser = f"{ready.slot}_role", ready.dsn
    ready.sql(
        "INSERT INTO t VALUES (1), (2)",
        f"CREATE ROLE {role} LOGIN REPLICATION",
        f"GRANT SELECT ON t TO {role}",
        "ALTER TABLE t ENABLE ROW LEVEL SECURITY",
        "CREATE POLICY odd ON t USING (id % 2 = 1)",
        f"CREATE PUBLICATION {ready.slot} FOR TABLE t",
    )
    ready.dsn = superuser.replace("user=postgres", f"user={role}")
    found = _findings(ready)
    assert set(found) == {"row_security"}
    with pytest.raises(PreflightFailed, match="hides rows"):
        ready.catch_up()
    ready.dsn = superuser
    ready.sql(found["row_security"].fix)
    ready.dsn = superuser.replace("user=postgres", f"user={role}")
    assert _findings(ready) == {}
    ready.catch_up()
    assert len(ready.events("r")) == 2
    ready.dsn = superuser
    ready.sql("DROP POLICY odd ON t", f"DROP OWNED BY {role}", f"DROP ROLE {role}")


def test_slot_of_another_is_told_with_who_has_it(ready: SourceUnderTest) -> None:
    ready.sql(f"SELECT pg_create_logical_replication_slot('{ready.slot}', 'pgoutput')")
    (blocked,) = blocking(_all_findings(ready))
    assert blocked.check == "slot_taken"
    assert f"pgoutput, database {ready.slot}, nobody reads it now" in blocked.problem
    with pytest.raises(SlotInUse):
        require_ready([blocked])
    assert f"pg_drop_replication_slot('{ready.slot}')" in blocked.fix
    assert blocking(_all_findings(ready, Presence.EITHER)) == []


def test_slot_of_ours_that_is_read_blocks_unless_our_own_capture_reads_it(ready: SourceUnderTest) -> None:
    ready.catch_up()
    stranger = connect_replication(ready.dsn, application_name="a stranger")
    reader = WalStream(stranger, ready.slot, ready.slot, ready.confirmed())
    (blocked,) = blocking(_all_findings(ready, Presence.EITHER))
    assert blocked.check == "slot_active"
    assert "application a stranger, user postgres" in blocked.problem
    (noted,) = _all_findings(ready, Presence.EITHER, read_by_us=True)
    assert noted.severity is Severity.NOTES
    reader.close()


def test_slot_that_was_dropped_is_told_by_the_proof_of_continuity(ready: SourceUnderTest) -> None:
    ready.catch_up()
    assert list(continuity_findings(ready.dsn, ready.store)) == []
    assert check_source(ready.dsn, ready.settings, ready.home, ready.tables) == ()
    ready.sql(f"SELECT pg_drop_replication_slot('{ready.slot}')")
    (gap,) = check_source(ready.dsn, ready.settings, ready.home, ready.tables)
    assert "is gone" in gap.problem and "--new-epoch" in gap.fix
    with pytest.raises(GapInSource):
        require_ready([gap])


def test_everything_is_listed_at_once_the_worst_first(source: SourceUnderTest) -> None:
    source.sql(
        "CREATE TABLE t (id int, v text)",
        f"CREATE PUBLICATION {source.slot} FOR TABLE t WITH (publish = 'insert')",
        f"SELECT pg_create_logical_replication_slot('{source.slot}', 'pgoutput')",
    )
    source.tables += [contract("t", ("id", "v")), contract("missing", ("id",))]
    found = _all_findings(source)
    assert {each.check for each in blocking(found)} == {
        "key_not_null",
        "replica_identity",
        "table",
        "publication_operations",
        "slot_taken",
    }
    assert [each.severity for each in found] == sorted(each.severity for each in found)
    with pytest.raises(PreflightFailed) as refused:
        require_ready(found)
    assert all(each.problem in refused.value.problem and each.fix in refused.value.fix for each in found)


def test_nothing_is_changed_at_the_source_that_is_not_ready(ready: SourceUnderTest) -> None:
    ready.sql(f"SELECT pg_create_logical_replication_slot('{ready.slot}', 'pgoutput')")
    with pytest.raises(SlotInUse):
        ready.catch_up()
    assert ready.query("SELECT pubname FROM pg_publication") == []
    assert ready.store.current_epoch() is None


def test_pooler_in_between_is_noticed_by_its_forged_process_id_and_its_refusal(
    ready: SourceUnderTest,
) -> None:
    folder = parse_dsn(ready.dsn)["host"]
    with pooler(f"{folder}/.s.PGSQL.5432") as port:
        direct = ready.dsn
        ready.dsn = f"host=127.0.0.1 port={port} user=postgres dbname={ready.slot}"
        found = _findings(ready)
        assert set(found) == {"pooler", "replication_connection"}
        assert "unsupported startup parameter" in found["replication_connection"].problem
        ready.dsn = direct
    assert _findings(ready) == {}


def test_settings_without_which_a_forgotten_slot_does_harm_are_warned_of(ready: SourceUnderTest) -> None:
    admin = connect(ready.dsn)
    settings = {"max_slot_wal_keep_size": "-1"}
    if ready.server_version() >= 180000:
        settings["idle_replication_slot_timeout"] = "1h"
    with admin.cursor() as cursor:
        try:
            for name, value in settings.items():
                cursor.execute(f"ALTER SYSTEM SET {name} = '{value}'")
            cursor.execute("SELECT pg_reload_conf()")
            _wait_for_setting(ready, "max_slot_wal_keep_size", "-1")
            found = [each for each in _all_findings(ready) if each.severity is Severity.WARNS]
            assert {each.check for each in found} == set(settings)
            for each in found:
                cursor.execute(each.fix.partition(";")[0])
            cursor.execute("SELECT pg_reload_conf()")
            _wait_for_setting(ready, "max_slot_wal_keep_size", "50GB")
            assert not [each for each in _all_findings(ready) if each.severity is Severity.WARNS]
        finally:
            for name in settings:
                cursor.execute(f"ALTER SYSTEM RESET {name}")
            cursor.execute("SELECT pg_reload_conf()")
    admin.close()


def _wait_for_setting(source: SourceUnderTest, name: str, value: str) -> None:
    until(lambda: source.query(f"SHOW {name}") == [(value,)])


@pytest.mark.parametrize(
    ("version", "mended"),
    [(150012, "15.13"), (150013, None), (170004, "17.5"), (170006, None), (180000, None), (130021, "14.18")],
)
def test_release_that_may_lose_changes_of_an_added_table_is_warned_of(
    version: int, mended: str | None
) -> None:
    found = list(minor_findings(version))
    assert [each.severity for each in found] == ([Severity.WARNS] if mended else [])
    assert all(f"which {mended} mends" in each.problem for each in found)
