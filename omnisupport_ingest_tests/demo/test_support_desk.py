"""What the support desk's traffic really puts into the WAL, and that a seed decides all of it."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise

import psycopg2
import pytest

from omnisupport_ingest.demo.actor import WorkloadReport
from omnisupport_ingest.demo.rows import AWKWARD_TEXTS, ROLLED_BACK
from omnisupport_ingest.demo.support_desk import SUPPORT_DESK
from omnisupport_ingest.demo.support_desk.rows import TABLES
from omnisupport_ingest.demo.workload import Workload, WorkloadFailed
from omnisupport_ingest.sources.postgres.embedded.server import EmbeddedPostgres
from omnisupport_ingest.sources.postgres.session.errors import SourceUnavailable

CHANGES = 2000


def databases(postgres: EmbeddedPostgres, names: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    with closing(psycopg2.connect(postgres.dsn("postgres"))) as connection:
        connection.autocommit = True
        cursor = connection.cursor()
        for name in names:
            cursor.execute(f"CREATE DATABASE {name}")
        yield tuple(postgres.dsn(name) for name in names)
        for name in names:
            cursor.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def three_desks(postgres: EmbeddedPostgres) -> Iterator[tuple[str, ...]]:
    yield from databases(postgres, ("desk_a", "desk_b", "desk_c"))


@pytest.fixture
def desk(postgres: EmbeddedPostgres) -> Iterator[str]:
    for [dsn] in databases(postgres, ("desk",)):
        yield dsn


def query(dsn: str, statement: str) -> list[tuple[object, ...]]:
    with closing(psycopg2.connect(dsn)) as connection, connection, connection.cursor() as cursor:
        cursor.execute(statement)
        return cursor.fetchall() if cursor.description else []


def content(dsn: str) -> str:
    """A hash over all rows of all tables."""
    digest = hashlib.sha256()
    for table in TABLES:
        digest.update(repr(query(dsn, f"SELECT t::text FROM support.{table} t ORDER BY 1")).encode())
    return digest.hexdigest()


@dataclass(frozen=True)
class Decoded:
    """A run of 2,000 changes and what pgoutput says about it."""

    dsn: str
    report: WorkloadReport
    kinds: Counter[str]
    transactions: list[int]
    """Changes of each transaction."""
    key_changes: int
    key_changes_with_unsent_body: int
    updates_with_unsent_body: int


@pytest.fixture(scope="module")
def decoded(postgres: EmbeddedPostgres) -> Iterator[Decoded]:
    for [dsn] in databases(postgres, ("desk_decoded",)):
        SUPPORT_DESK.prepare(dsn, seed=1, size=300)
        query(dsn, "CREATE PUBLICATION everything FOR ALL TABLES")
        query(dsn, "SELECT pg_create_logical_replication_slot('desk_decoded', 'pgoutput')")
        report = Workload(SUPPORT_DESK, dsn, seed=1).run(CHANGES)
        messages = query(
            dsn,
            "SELECT data FROM pg_logical_slot_get_binary_changes('desk_decoded', NULL, NULL, "
            "'proto_version', '1', 'publication_names', 'everything')",
        )
        query(dsn, "SELECT pg_drop_replication_slot('desk_decoded')")
        yield judge(dsn, report, [bytes(data) for [data] in messages])  # type: ignore[call-overload]


def judge(dsn: str, report: WorkloadReport, messages: list[bytes]) -> Decoded:
    """Read the messages as the PostgreSQL manual, "Logical Replication Message Formats", says."""
    kinds = Counter(chr(message[0]) for message in messages)
    begins = [number for number, message in enumerate(messages) if message[:1] == b"B"]
    sizes = [
        sum(message[:1] in (b"I", b"U", b"D", b"T") for message in messages[start:end])
        for start, end in pairwise([*begins, len(messages)])
    ]
    keyed = unsent_keyed = unsent = 0
    for message in messages:
        if message[:1] == b"U":
            has_old_key = message[5:6] == b"K"
            at = 6
            if has_old_key:
                at = tuple_at(message, 6)[0] + 1
            column_kinds = tuple_at(message, at)[1]
            keyed += has_old_key
            unsent_keyed += has_old_key and "u" in column_kinds
            unsent += not has_old_key and "u" in column_kinds
    return Decoded(dsn, report, kinds, sizes, keyed, unsent_keyed, unsent)


def tuple_at(message: bytes, at: int) -> tuple[int, str]:
    """Where the TupleData at ``at`` ends, and the kinds of its columns (n, u or t)."""
    count = int.from_bytes(message[at : at + 2], "big")
    at += 2
    kinds = ""
    for _ in range(count):
        kinds += chr(message[at])
        if message[at : at + 1] == b"t":
            at += 4 + int.from_bytes(message[at + 1 : at + 5], "big")
        at += 1
    return at, kinds


def test_the_report_counts_exactly_what_logical_decoding_sends(decoded: Decoded) -> None:
    report = decoded.report
    assert report.changes == CHANGES
    assert decoded.kinds["I"] == report.inserts
    assert decoded.kinds["U"] == report.updates
    assert decoded.kinds["D"] == report.deletes
    assert decoded.kinds["T"] == report.truncates == 1
    assert decoded.kinds["B"] == report.transactions
    assert decoded.key_changes == report.key_changes
    assert max(decoded.transactions) == report.largest_transaction


def test_key_changes_and_updates_with_an_unsent_body_are_among_them(decoded: Decoded) -> None:
    assert decoded.key_changes_with_unsent_body >= decoded.report.key_changes_with_unsent_body >= 4
    assert decoded.updates_with_unsent_body >= decoded.report.updates_with_unsent_body >= 1
    assert decoded.report.key_swaps == 2


def test_every_promised_kind_takes_place_however_small_the_run(postgres: EmbeddedPostgres) -> None:
    for [dsn] in databases(postgres, ("desk_small",)):
        SUPPORT_DESK.prepare(dsn, seed=2, size=30)
        report = Workload(SUPPORT_DESK, dsn, seed=2).run(1)
        missing = [name for name, count in vars(report).items() if count == 0]
        assert missing == []
        assert report.changes < 120


def test_one_transaction_holds_a_tenth_and_most_are_small(decoded: Decoded) -> None:
    assert max(decoded.transactions) == CHANGES // 10
    small = [size for size in decoded.transactions if size <= 20]
    assert len(small) > len(decoded.transactions) / 2
    assert decoded.report.multi_table_transactions > 10


def test_rows_that_were_rolled_back_are_nowhere(decoded: Decoded) -> None:
    assert decoded.report.rolled_back_changes > 0
    assert query(
        decoded.dsn,
        f"SELECT (SELECT count(*) FROM support.tickets WHERE subject = '{ROLLED_BACK}') + "
        f"(SELECT count(*) FROM support.customers WHERE full_name = '{ROLLED_BACK}')",
    ) == [(0,)]


def test_awkward_texts_arrays_and_nulls_are_stored_as_they_are(decoded: Decoded) -> None:
    names = {name for [name] in query(decoded.dsn, "SELECT full_name FROM support.customers")}
    assert len(names & set(AWKWARD_TEXTS)) > len(AWKWARD_TEXTS) * 2 / 3
    tags = [tags for [tags] in query(decoded.dsn, "SELECT tags FROM support.customers")]
    assert None in tags and [] in tags
    assert any(isinstance(some, list) and None in some for some in tags)
    [(deleted, back)] = query(
        decoded.dsn,
        "SELECT count(deleted_at), count(*) FILTER (WHERE deleted_at IS NULL) FROM support.customers",
    )
    assert deleted and back


def test_the_same_seed_gives_the_same_rows_and_another_seed_others(three_desks: tuple[str, ...]) -> None:
    one, same, other = three_desks
    for dsn in (one, same):
        SUPPORT_DESK.prepare(dsn, seed=3, size=60)
    SUPPORT_DESK.prepare(other, seed=4, size=60)
    assert content(one) == content(same) != content(other)
    reports = [Workload(SUPPORT_DESK, dsn, seed=3).run(400) for dsn in (one, same)]
    assert reports[0] == reports[1]
    assert content(one) == content(same)


def test_a_second_run_continues_where_the_first_ended(desk: str) -> None:
    assert SUPPORT_DESK.prepare(desk, seed=5, size=60)
    assert not SUPPORT_DESK.prepare(desk, seed=5, size=60)
    assert [Workload(SUPPORT_DESK, desk, seed=5).run(300).changes for _ in range(3)] == [300, 300, 300]


def test_a_run_is_spread_over_its_time_and_ends_early_when_told(desk: str) -> None:
    SUPPORT_DESK.prepare(desk, seed=6, size=60)
    progress: list[tuple[float, int]] = []
    began = time.monotonic()
    Workload(SUPPORT_DESK, desk, seed=6).run(
        300, 1.0, lambda done: progress.append((time.monotonic() - began, done))
    )
    last_seconds, last_done = progress[-1]
    assert last_done == 300
    assert last_seconds > 0.9
    # None at all by then, where the machine stood still.
    assert max((done for seconds, done in progress if seconds < 0.4), default=0) < 200
    stop = threading.Event()
    threading.Timer(0.3, stop.set).start()
    report = Workload(SUPPORT_DESK, desk, seed=6).run_forever(50, stop)
    assert 0 < report.changes < 200


def test_a_server_that_ends_the_connection_is_a_source_that_does_not_answer(desk: str) -> None:
    SUPPORT_DESK.prepare(desk, seed=7, size=60)
    ended = (
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    with pytest.raises(SourceUnavailable):
        Workload(SUPPORT_DESK, desk, seed=7).run(400, on_progress=lambda _: query(desk, ended))


def test_a_desk_that_was_never_made_is_a_clear_error(desk: str) -> None:
    with pytest.raises(WorkloadFailed, match="SQLSTATE 42P01"):
        Workload(SUPPORT_DESK, desk, seed=7).run(1)


def test_a_server_that_is_stopped_is_a_source_that_does_not_answer() -> None:
    nowhere = "postgresql://me@127.0.0.1:1/support"
    for reach in (
        lambda: SUPPORT_DESK.prepare(nowhere, seed=1),
        lambda: Workload(SUPPORT_DESK, nowhere, seed=1).run(1),
    ):
        with pytest.raises(SourceUnavailable, match=r"127\.0\.0\.1") as found:
            reach()
        assert found.value.exit_code == 4
