"""What the social network's traffic really puts into its tables, and that a seed decides all of it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import closing

import psycopg2
import pytest

from omnisupport_ingest.demo.actor import WorkloadReport
from omnisupport_ingest.demo.rows import AWKWARD_TEXTS, ROLLED_BACK
from omnisupport_ingest.demo.social import SOCIAL
from omnisupport_ingest.demo.social.rows import TABLES
from omnisupport_ingest.demo.workload import Workload
from omnisupport_ingest.sources.postgres.embedded.server import EmbeddedPostgres

CHANGES = 2000

NEVER = {"truncates", "key_changes_with_unsent_body", "key_swaps"}
"""Kinds that the support desk has and this domain has not."""


@pytest.fixture
def network(postgres: EmbeddedPostgres) -> Iterator[str]:
    with closing(psycopg2.connect(postgres.dsn("postgres"))) as connection:
        connection.autocommit = True
        cursor = connection.cursor()
        cursor.execute("CREATE DATABASE network")
        yield postgres.dsn("network")
        cursor.execute("DROP DATABASE network WITH (FORCE)")


def query(dsn: str, statement: str) -> list[tuple[object, ...]]:
    with closing(psycopg2.connect(dsn)) as connection, connection, connection.cursor() as cursor:
        cursor.execute(statement)
        return cursor.fetchall() if cursor.description else []


def content(dsn: str) -> str:
    """A hash over all rows of all tables."""
    digest = hashlib.sha256()
    for table in TABLES.values():
        digest.update(repr(query(dsn, f"SELECT t::text FROM {table.name} t ORDER BY 1")).encode())
    return digest.hexdigest()


def made_and_changed(dsn: str, seed: int) -> tuple[str, WorkloadReport]:
    """The content and the report of a network of ``seed``, made anew."""
    query(dsn, "DROP SCHEMA IF EXISTS social CASCADE")
    assert SOCIAL.prepare(dsn, seed, size=200)
    report = Workload(SOCIAL, dsn, seed).run(CHANGES)
    return content(dsn), report


def test_a_seed_decides_every_row_and_a_run_has_exactly_its_changes(network: str) -> None:
    one, report = made_and_changed(network, 3)
    assert report.changes == CHANGES
    assert made_and_changed(network, 3) == (one, report)
    assert made_and_changed(network, 4)[0] != one
    assert not SOCIAL.prepare(network, 4)
    assert Workload(SOCIAL, network, 4).run(300).changes == 300


def test_every_promised_kind_takes_place_however_small_the_run(network: str) -> None:
    SOCIAL.prepare(network, 2, size=40)
    report = Workload(SOCIAL, network, 2).run(1)
    assert {name for name, count in vars(report).items() if count == 0} == NEVER
    assert report.changes < 160


def test_a_few_posts_have_most_of_the_likes_and_nothing_that_was_taken_back_is_there(network: str) -> None:
    made_and_changed(network, 5)
    [(hot, all_likes, posts)] = query(
        network,
        "SELECT (SELECT sum(n) FROM (SELECT count(*) n FROM social.likes GROUP BY post_id "
        "ORDER BY n DESC LIMIT 20) AS most), (SELECT count(*) FROM social.likes), "
        "(SELECT count(*) FROM social.posts)",
    )
    assert int(str(posts)) > 200
    assert int(str(hot)) > 0.3 * int(str(all_likes))
    assert query(network, f"SELECT FROM social.users WHERE full_name = '{ROLLED_BACK}'") == []
    names = {name for [name] in query(network, "SELECT full_name FROM social.users")}
    assert len(names & set(AWKWARD_TEXTS)) > len(AWKWARD_TEXTS) * 2 / 3
