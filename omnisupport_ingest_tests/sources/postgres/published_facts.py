"""Publications of a part of a table: tables to test with, and what of them has landed."""

from __future__ import annotations

from dataclasses import replace

import pyarrow.parquet as pq

from omnisupport_ingest.contracts.model import Column
from omnisupport_ingest.landing.lost_changes import LostChanges
from omnisupport_ingest.sources.postgres.snapshot.requests import SnapshotRequests
from omnisupport_ingest_tests.landing.batches import is_stream
from omnisupport_ingest_tests.sources.postgres.snapshot_facts import make_papers
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest, contract, folded

COLUMNS = ("id", "region", "v", "long")
EU = "region = 'eu' OR v LIKE '%both%'"
US = "region = 'us'"

PAPERS = ("id", "v", "long")
PUBLISHED_PAPERS = "papers WHERE id <= 1000"

Rows = dict[str, dict[str, str | None]]


def make_people(source: SourceUnderTest, *, key: str = "PRIMARY KEY") -> None:
    """1,000 rows, of which those of ``EU`` are published, every third; read in chunks of 50."""
    source.sql(
        f"CREATE TABLE people (id int NOT NULL {key}, region text, v text, long text)"
        " WITH (autovacuum_enabled = false)",
        "ALTER TABLE people ALTER long SET STORAGE EXTERNAL, REPLICA IDENTITY FULL",
        "INSERT INTO people SELECT n, CASE WHEN n % 3 = 0 THEN 'eu' ELSE 'us' END,"
        " CASE WHEN n % 3 = 0 THEN 'sent' ELSE 'kept back' END, repeat(n::text, 3000)"
        " FROM generate_series(1, 1000) n",
    )
    publish(source, f"TABLE people WHERE ({EU})")
    columns = (Column("id", "integer"), *(Column(name, "text") for name in COLUMNS[1:]))
    source.tables.append(replace(contract("people", COLUMNS), columns=columns))
    source.overrides |= {"snapshot_chunk_rows": 50, "snapshot_threads": 2}


def make_odd_papers(source: SourceUnderTest) -> None:
    """Papers 1 to 300 and 1001 to 1010, of which those above 1,000 are not published."""
    make_papers(source, 1, 300)
    source.sql(
        "INSERT INTO papers SELECT n, 'aside', repeat(n::text, 3000) FROM generate_series(1001, 1010) n"
    )
    publish(source, "TABLE papers WHERE (id <= 1000)")


def held(source: SourceUnderTest, table: str = "people") -> Rows:
    """The rows of ``table`` by all that has landed."""
    return folded(source.events(), table)


def sent(source: SourceUnderTest, condition: str = EU) -> Rows:
    """The rows of ``people`` now that meet ``condition``."""
    return source.rows(f"people WHERE {condition}", COLUMNS)


def publish(source: SourceUnderTest, what: str) -> None:
    """Make the publication of capture, of ``what`` alone."""
    source.sql(f"CREATE PUBLICATION {source.slot} FOR {what} WITH (publish_via_partition_root = true)")


def publish_otherwise(source: SourceUnderTest, what: str) -> str:
    """SQL: have the publication send ``what``, and nothing else."""
    return f"ALTER PUBLICATION {source.slot} SET {what}"


def read_again(source: SourceUnderTest, *names: str) -> None:
    """The repair of a table with missed changes: ``source snapshot``, and capture goes on."""
    for name in names:
        SnapshotRequests(source.store.folder).write(name, "a test")
    source.catch_up()


def written_in_the_home(source: SourceUnderTest) -> str:
    """All that is in the files of the home, values of Parquet files as they are read."""
    found = []
    for path in sorted(each for each in source.home_folder.rglob("*") if each.is_file()):
        content = path.read_bytes()
        found.append(content.decode(errors="replace"))
        if path.suffix == ".parquet":
            found.append(str(pq.read_table(path, partitioning=None).to_pylist()))
    return "\n".join(found)


def columns_in_manifests(source: SourceUnderTest, table: str) -> dict[str, set[tuple[str, ...]]]:
    """The columns of ``table`` by what was landed: ``snapshot`` and ``stream``."""
    found: dict[str, set[tuple[str, ...]]] = {"snapshot": set(), "stream": set()}
    for batch in source.manifests():
        way = "stream" if is_stream(batch.batch_id) else "snapshot"
        found[way] |= {each.columns for each in batch.relations if each.table == table}
    return found


def lost(source: SourceUnderTest) -> int:
    """How many stretches of lost changes are written down in the newest epoch."""
    epoch = source.store.current_epoch()
    assert epoch is not None
    return len(LostChanges(source.store.folder, epoch.number).all())
