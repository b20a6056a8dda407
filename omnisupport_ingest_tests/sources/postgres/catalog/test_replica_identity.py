"""What the old row of a change carries, by replica identity: the key of the contract always, or an error."""

from __future__ import annotations

import json

import psycopg2
import pytest

from omnisupport_ingest.sources.postgres.session.errors import PreflightFailed, TableMissedChanges
from omnisupport_ingest.sources.postgres.snapshot.requests import SnapshotRequests
from omnisupport_ingest_tests.sources.postgres.snapshot_facts import complete
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest, contract, folded

COLUMNS = ("id", "other", "v")
LONG = "repeat('long text ', 1000)"


@pytest.fixture
def things(source: SourceUnderTest) -> SourceUnderTest:
    """A source with a table that has two unique indexes, captured up to now."""
    source.sql(
        "CREATE TABLE things (id int PRIMARY KEY, other int NOT NULL UNIQUE, v text)",
        "ALTER TABLE things ALTER COLUMN v SET STORAGE EXTERNAL",
    )
    source.tables.append(contract("things", COLUMNS))
    source.catch_up()
    return source


def changed(source: SourceUnderTest) -> None:
    source.sql(
        f"INSERT INTO things VALUES (1, 10, {LONG}), (2, 20, {LONG}), (3, 30, 'c')",
        "UPDATE things SET other = 11 WHERE id = 1",
        "UPDATE things SET id = 4 WHERE id = 2",
        "DELETE FROM things WHERE id = 3",
    )


@pytest.mark.parametrize("identity", ["DEFAULT", "FULL", "USING INDEX things_pkey"])
def test_changes_of_every_kind_are_followed(things: SourceUnderTest, identity: str) -> None:
    things.sql(f"ALTER TABLE things REPLICA IDENTITY {identity}")
    changed(things)
    things.catch_up()
    assert folded(things.events(), "things") == things.rows("things", COLUMNS)


def test_identity_of_a_wider_index_is_followed_by_the_key_of_the_contract(things: SourceUnderTest) -> None:
    things.sql(
        "CREATE UNIQUE INDEX wide ON things (other, id)",
        "ALTER TABLE things REPLICA IDENTITY USING INDEX wide",
    )
    changed(things)
    things.catch_up()
    events = things.changes()
    assert [event.op for event in events] == ["c", "c", "c", "u", "d", "c", "d"]
    assert json.loads(events[-1].before or "") == {"id": "3", "other": "30"}
    assert folded(things.events(), "things") == things.rows("things", COLUMNS)


def test_index_without_the_key_is_refused_at_the_start_and_where_it_is_set_meanwhile(
    things: SourceUnderTest,
) -> None:
    things.sql("INSERT INTO things VALUES (1, 10, 'a')")
    things.catch_up()
    things.sql("ALTER TABLE things REPLICA IDENTITY USING INDEX things_other_key", "DELETE FROM things")
    with pytest.raises(PreflightFailed, match="is not in its replica identity"):
        things.catch_up()
    things.sql("ALTER TABLE things REPLICA IDENTITY DEFAULT")
    # It is as it should be now; what was written meanwhile does not say which row it is about.
    landed = things.store.batch_ids()
    for _ in range(2):
        with pytest.raises(TableMissedChanges, match="key column id of its contract is not in"):
            things.catch_up()
    assert things.store.batch_ids() == landed
    things.capture().begin_new_epoch("the key was not sent")
    things.catch_up()
    assert folded(things.events(), "things") == things.rows("things", COLUMNS) == {}


def test_nothing_is_refused_though_the_source_itself_refuses_updates_and_deletes(
    things: SourceUnderTest,
) -> None:
    things.sql("ALTER TABLE things REPLICA IDENTITY NOTHING", "INSERT INTO things VALUES (1, 10, 'a')")
    for statement in ("UPDATE things SET v = 'b'", "DELETE FROM things"):
        with pytest.raises(psycopg2.errors.ObjectNotInPrerequisiteState):
            things.sql(statement)
    with pytest.raises(PreflightFailed, match="is not in its replica identity"):
        things.catch_up()
    things.sql("ALTER TABLE things REPLICA IDENTITY DEFAULT", "UPDATE things SET v = 'b'")
    things.catch_up()
    assert folded(things.events(), "things") == things.rows("things", COLUMNS)


def with_journal(source: SourceUnderTest, identity: str) -> SourceUnderTest:
    """``source`` with a published table ``journal`` that has no key of any kind."""
    source.sql(
        "CREATE TABLE journal (at int NOT NULL, what text)",
        f"ALTER TABLE journal REPLICA IDENTITY {identity}",
        f"ALTER PUBLICATION {source.slot} ADD TABLE journal",
    )
    return source


@pytest.mark.parametrize("identity", ["DEFAULT", "NOTHING"])
def test_keyless_table_without_contract_lands_its_inserts_and_nothing_else_may_happen_to_it(
    things: SourceUnderTest, identity: str
) -> None:
    with_journal(things, identity)
    things.sql("INSERT INTO journal VALUES (1, 'a'), (1, 'a')", "INSERT INTO things VALUES (1, 10, 'a')")
    for statement in ("UPDATE journal SET what = 'b'", "DELETE FROM journal"):
        with pytest.raises(psycopg2.errors.ObjectNotInPrerequisiteState, match="replica identity"):
            things.sql(statement)
    things.catch_up()
    journal = [event for event in things.changes() if event.source_table == "journal"]
    assert [(event.op, event.key, json.loads(event.after or "")) for event in journal] == [
        ("c", None, {"at": "1", "what": "a"})
    ] * 2
    assert len({(event.commit_lsn, event.ordinal) for event in journal}) == 2
    assert folded(things.events(), "things") == things.rows("things", COLUMNS)


def test_keyless_full_table_without_contract_lands_its_changes_whole_and_without_a_key(
    things: SourceUnderTest,
) -> None:
    with_journal(things, "FULL")
    things.sql(
        "INSERT INTO journal VALUES (1, 'a'), (1, 'a')",
        "UPDATE journal SET at = 2",
        "DELETE FROM journal WHERE ctid = (SELECT min(ctid) FROM journal)",
    )
    things.catch_up()
    first, second = {"at": "1", "what": "a"}, {"at": "2", "what": "a"}
    landed = [
        (
            event.op,
            event.key,
            *(json.loads(image) if image else None for image in (event.before, event.after)),
        )
        for event in things.changes()
    ]
    # An update is no move: without a key nothing says which row it was.
    assert landed == [
        *[("c", None, None, first)] * 2,
        *[("u", None, first, second)] * 2,
        ("d", None, second, None),
    ]
    # No snapshot of it is taken, so rows from before it was published are nowhere.
    assert {event.source_table for event in things.events("r", "b")} == {"things"}


@pytest.mark.parametrize("identity", ["DEFAULT", "NOTHING"])
def test_contract_of_a_keyless_table_is_refused_unless_it_sends_whole_rows(
    things: SourceUnderTest, identity: str
) -> None:
    with_journal(things, identity).sql("INSERT INTO journal VALUES (1, 'a')")
    things.tables.append(contract("journal", ("at", "what"), key=("at",)))
    fix = 'ALTER TABLE "public"."journal" ADD PRIMARY KEY ("at")'
    for number in (2, 3):
        things.sql(
            f"INSERT INTO journal VALUES ({number}, 'b')", f"INSERT INTO things VALUES ({number}, {number})"
        )
        with pytest.raises(
            PreflightFailed, match=r"Key column at of public\.journal is not in its replica"
        ) as no:
            things.catch_up()
        assert fix in no.value.fix and "things" not in str(no.value)
        assert folded(things.events(), "things") == things.rows("things", COLUMNS), "the other goes on"
        assert complete(things, "things") and not complete(things, "journal")
        # What the stream has of it is in raw alone.
        journal = [event for event in things.events() if event.source_table == "journal"]
        assert [(event.op, event.key) for event in journal] == [("c", None)] * number
    things.sql(
        fix, "ALTER TABLE journal REPLICA IDENTITY DEFAULT", "UPDATE journal SET what = 'c' WHERE at = 3"
    )
    things.catch_up()
    assert complete(things, "journal")
    assert folded(things.events(), "journal") == {
        f'["{at}"]': {"at": f"{at}", "what": what} for at, what in enumerate("abc", 1)
    }


@pytest.fixture
def keyless(source: SourceUnderTest) -> SourceUnderTest:
    """A table ``things`` without any index; its contract says that ``id`` is the key. Nothing is captured."""
    source.sql(
        "CREATE TABLE things (id int NOT NULL, other int, v text)",
        "ALTER TABLE things ALTER COLUMN v SET STORAGE EXTERNAL",
        "ALTER TABLE things REPLICA IDENTITY FULL",
        f"INSERT INTO things SELECT n, n * 10, {LONG} || n FROM generate_series(1, 9) n",
    )
    source.tables.append(contract("things", COLUMNS))
    return source


def test_keyless_full_table_is_followed_by_the_key_that_its_contract_declares(
    keyless: SourceUnderTest,
) -> None:
    keyless.catch_up()
    assert folded(keyless.events(), "things") == keyless.rows("things", COLUMNS)
    keyless.sql(
        "INSERT INTO things VALUES (10, 100, 'ten')",
        "UPDATE things SET other = 21 WHERE id = 2",
        "UPDATE things SET v = NULL WHERE id = 3",
        "UPDATE things SET id = 40 WHERE id = 4",
        "DELETE FROM things WHERE id IN (5, 10)",
    )
    # A key that is free again, and one that is given back within a transaction.
    keyless.transaction(
        "INSERT INTO things VALUES (4, 44, 'four again')",
        "UPDATE things SET id = -6 WHERE id = 6",
        "UPDATE things SET id = 6 WHERE id = 7",
        "UPDATE things SET id = 7 WHERE id = -6",
    )
    keyless.catch_up()
    events, changes = keyless.events(), keyless.changes()
    assert [event.op for event in changes] == [*"cuudcddc", *"dc" * 3]
    # A column that was not sent stands in the old row, which is whole.
    (moved,) = [event for event in changes if event.moved_from_key == '["4"]']
    assert moved.key == '["40"]' and moved.unchanged == ["v"]
    assert json.loads(moved.before or "").keys() == set(COLUMNS)
    assert folded(events, "things") == keyless.rows("things", COLUMNS)


@pytest.mark.parametrize(
    ("statement", "followed", "read_again"),
    [
        pytest.param("UPDATE things SET id = 1 WHERE id = 2", 8, 8, id="for good"),
        # As with a deferrable key: each row takes the key of one that has not moved on yet.
        pytest.param("UPDATE things SET id = id + 1", 1, 9, id="within a statement"),
    ],
)
def test_rows_that_share_a_declared_key_are_one_row_as_every_start_has_warned(
    keyless: SourceUnderTest, statement: str, followed: int, read_again: int, caplog: pytest.LogCaptureFixture
) -> None:
    keyless.catch_up()
    assert "rows that share it would be taken for one row" in caplog.text
    keyless.sql(statement)
    keyless.catch_up()
    assert keyless.query("SELECT count(*) FROM things") == [(9,)]
    assert len(folded(keyless.events(), "things")) == followed
    # Another read knows only of those that share a key now.
    SnapshotRequests(keyless.store.folder).write("things", "a test")
    keyless.catch_up()
    assert len(folded(keyless.events(), "things")) == read_again


@pytest.mark.parametrize(
    ("identity", "seen"),
    [
        pytest.param("FULL", False, id="FULL"),
        pytest.param("USING INDEX part_other_key", True, id="USING INDEX part_other_key"),
        pytest.param("USING INDEX part_other_key", False, id="USING INDEX part_other_key for a time"),
        pytest.param("NOTHING", False, id="NOTHING"),
    ],
)
def test_partition_with_another_identity_than_its_root_loses_no_change(
    source: SourceUnderTest, identity: str, seen: bool
) -> None:
    """The server writes the old row of a partition by the partition's identity, and describes the root's.

    ``seen``: a start finds that identity, before it is made good again.
    """
    source.sql(
        "CREATE TABLE things (id int PRIMARY KEY, other int, v text) PARTITION BY RANGE (id)",
        "CREATE TABLE part PARTITION OF things FOR VALUES FROM (0) TO (100)",
        "ALTER TABLE part ALTER COLUMN other SET NOT NULL",
        "ALTER TABLE part ADD UNIQUE (other)",
        "INSERT INTO things VALUES (1, 10, 'a'), (2, 20, 'b'), (3, 30, 'c')",
    )
    source.sql("CREATE TABLE agents (id int PRIMARY KEY, v text)", "INSERT INTO agents VALUES (1, 'a')")
    source.tables += [contract("things", COLUMNS), contract("agents", ("id", "v"))]
    source.catch_up()
    source.sql(f"ALTER TABLE part REPLICA IDENTITY {identity}")
    if identity == "NOTHING":
        with pytest.raises(psycopg2.errors.ObjectNotInPrerequisiteState):
            source.sql("DELETE FROM things WHERE id = 3")
        return
    source.sql("DELETE FROM things WHERE id = 3", "UPDATE things SET v = 'x' WHERE id = 1")
    source.sql("UPDATE things SET id = 5 WHERE id = 2")
    if identity != "FULL":
        left = "not in the replica identity of its partition" if seen else "part: key column id .* is not in"
        if seen:
            source.sql("UPDATE agents SET v = 'beside'")
            with pytest.raises(PreflightFailed, match=r"is not in the replica identity of .*part") as no:
                source.catch_up()
            assert "agents" not in str(no.value)
            agents_go_on(source)
        source.sql("ALTER TABLE part REPLICA IDENTITY DEFAULT")
        for round_ in range(2):
            # It is as it should be now; what was written meanwhile does not say which row it is about.
            source.sql(f"UPDATE agents SET v = 'round {round_}'")
            with pytest.raises(TableMissedChanges, match=left) as told:
                source.catch_up()
            assert list(told.value.reasons) == ["things"] and "source snapshot things" in told.value.fix
            agents_go_on(source)
        SnapshotRequests(source.store.folder).write("things", "the key was not sent")
    source.catch_up()
    assert folded(source.events(), "things") == source.rows("things", COLUMNS)
    assert complete(source, "things") and [each.number for each in source.store.epochs()] == [1]


def agents_go_on(source: SourceUnderTest) -> None:
    """What is written to ``agents`` lands while ``things`` is left out."""
    assert folded(source.events(), "agents") == source.rows("agents", ("id", "v"))
    assert complete(source, "agents") and not complete(source, "things")


def test_root_that_says_full_and_partitions_that_do_not_leave_no_null_that_was_not_sent(
    source: SourceUnderTest,
) -> None:
    """ALTER TABLE of the root leaves its partitions as they are: they send keys, called whole rows."""
    source.sql(
        "CREATE TABLE things (id int PRIMARY KEY, other int, v text) PARTITION BY RANGE (id)",
        "CREATE TABLE part PARTITION OF things FOR VALUES FROM (0) TO (100)",
        "ALTER TABLE part ALTER COLUMN v SET STORAGE EXTERNAL",
        f"INSERT INTO things VALUES (1, 10, {LONG}), (2, 20, {LONG}), (3, 30, {LONG})",
        "ALTER TABLE things REPLICA IDENTITY FULL",
    )
    source.tables.append(contract("things", COLUMNS))
    source.catch_up()
    source.sql(
        "UPDATE things SET id = 5 WHERE id = 2",
        "UPDATE things SET other = 11 WHERE id = 1",
        "DELETE FROM things WHERE id = 3",
    )
    source.catch_up()
    gone, moved, *_, deleted = source.changes()
    assert [json.loads(event.before or "") for event in (gone, moved, deleted)] == [
        {"id": "2"},
        {"id": "2"},
        {"id": "3"},
    ]
    assert moved.unchanged == ["v"]
    assert folded(source.events(), "things") == source.rows("things", COLUMNS)
