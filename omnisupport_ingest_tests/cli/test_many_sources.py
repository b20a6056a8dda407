"""One home, several sources side by side: two PostgreSQL servers by their logs, and a third by a cursor."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dagster as dg
import duckdb
import pytest
from deltalake import DeltaTable

from omnisupport_ingest.cli.up import Captures
from omnisupport_ingest.definitions import build_definitions
from omnisupport_ingest.home import Home
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.runtime.supervisor import Supervisor
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.sources.postgres.embedded.server import EmbeddedPostgres
from omnisupport_ingest.sources.postgres.session.connection import connect
from omnisupport_ingest_tests.cli import pgbench
from omnisupport_ingest_tests.sources.query.tickets import contract_document
from omnisupport_ingest_tests.waiting import until

TICKETS = "CREATE TABLE tickets (id bigint PRIMARY KEY, subject text, updated_at timestamptz DEFAULT now())"


@dataclass
class ManySources:
    """``north`` and ``south``: a server each, both with a table called tickets."""

    north: EmbeddedPostgres
    south: EmbeddedPostgres
    folder: Path
    variables: dict[str, str] = field(default_factory=dict)

    def prepare(self) -> None:
        (self.folder / "contracts" / "data").mkdir(parents=True)
        (self.folder / "contracts" / "sources").mkdir()
        for server in (self.north, self.south):
            self.sql(server, "DROP TABLE IF EXISTS tickets", TICKETS)
        secret = self.folder / "south.dsn"
        secret.touch(mode=0o600)
        secret.write_text(self.south.dsn())
        self.define("north", {"env": "NORTH_DSN"})
        self.define("south", {"file": str(secret)}, log={"slot": "southern", "publication": "southern"})
        self.variables = {
            "OMNISUPPORT_HOME": str(self.folder / "home"),
            "OMNISUPPORT_CONTRACTS_DIR": str(self.folder / "contracts" / "data"),
            "OMNISUPPORT_SPARK_DRIVER_MEMORY": "1g",
            "NORTH_DSN": self.north.dsn(),
        }

    def define(self, name: str, connection: dict[str, str] | None, **members: Any) -> None:
        document = {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "name": name,
            "kind": "postgres_log",
            "description": f"The desk in the {name}.",
            **({} if connection is None else {"connection": connection}),
            **members,
        }
        (self.folder / "contracts" / "sources" / f"{name}.json").write_text(json.dumps(document))
        schema = "main" if document["kind"] == "query" else "public"
        contract = contract_document(schema=schema)
        contract["x-cdc"]["source"] = name
        if document["kind"] in ("kafka", "files"):
            del contract["x-cdc"]["cursor"]
        (self.folder / "contracts" / "data" / f"{name}_tickets.json").write_text(json.dumps(contract))

    def command(self, *arguments: str) -> Any:
        return pgbench.command(*arguments, folder=self.folder, variables=self.variables)

    def done(self, *arguments: str) -> str:
        done = self.command(*arguments)
        assert done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}"
        return str(done.stdout)

    def sql(self, server: EmbeddedPostgres, *statements: str) -> None:
        with connect(server.dsn()) as connection, connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)
        connection.close()

    def shown(self, source: str) -> dict[int, tuple[str, bool]]:
        """The dimension of the source's tickets, by delta-rs and DuckDB alone."""
        files = DeltaTable(str(self.folder / "home" / "lake" / source / "dim_tickets")).file_uris()
        rows = duckdb.sql(f"SELECT id, subject, _cdc_is_deleted FROM read_parquet({files})").fetchall()
        return {number: (subject, gone) for number, subject, gone in rows}

    def events(self, source: str) -> int:
        """Rows that have landed from the source."""
        store = LandingStore(self.folder / "home" / "landing", source)
        return sum(store.read(each).rows for each in store.batch_ids(""))


@pytest.fixture
def many(postgres: EmbeddedPostgres, warm: str, tmp_path: Path) -> Iterator[ManySources]:
    south = EmbeddedPostgres(tmp_path / "south")
    south.start()
    made = ManySources(postgres, south, tmp_path)
    try:
        made.prepare()
        made.variables |= pgbench.on(warm)
        yield made
    finally:
        south.destroy()
        with connect(postgres.dsn()) as connection, connection.cursor() as cursor:
            cursor.execute("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots")
            cursor.execute("DROP PUBLICATION IF EXISTS omnisupport_ingest_north")
            cursor.execute("DROP TABLE tickets")
        connection.close()


@pytest.mark.slow
def test_two_servers_and_a_cursor_fill_one_lake_and_hold_up_nobody(many: ManySources):
    many.sql(many.north, "INSERT INTO tickets SELECT n, 'n' || n FROM generate_series(1, 100) n")
    many.sql(many.south, "INSERT INTO tickets SELECT n, 's' || n FROM generate_series(1, 50) n")
    east = sqlite3.connect(many.folder / "east.db", isolation_level=None)
    east.execute(
        "CREATE TABLE tickets (id INTEGER PRIMARY KEY, subject TEXT,"
        " updated_at DATETIME DEFAULT (datetime('now')))"
    )
    east.execute("INSERT INTO tickets (id, subject) VALUES (1, 'east')")
    many.define("east", {"env": "EAST_URL"}, kind="query")
    many.variables["EAST_URL"] = f"sqlite:///{many.folder / 'east.db'}"

    listed = json.loads(many.done("sources", "list", "--json"))["sources"]
    kinds = {each["name"]: each["kind"] for each in listed}
    assert kinds == {
        "north": "postgres_log",
        "south": "postgres_log",
        "east": "query",
        "support_desk": "postgres_log",
    }
    for name in ("north", "south", "east"):
        many.done("preflight", name)
    for name in ("north", "south"):
        told = json.loads(many.done("sync", name, "--verify", "full", "--json"))
        assert (told["source"], told["verify"]["holds"]) == (name, True)
        assert told["slot"]["remove_with"] == f"omnisupport-ingest source drop {name}"
    many.done("sync", "east")
    assert many.shown("north") == {n: (f"n{n}", False) for n in range(1, 101)}
    assert many.shown("south") == {n: (f"s{n}", False) for n in range(1, 51)}
    assert many.shown("east") == {1: ("east", False)}
    slots = {name: connect(server.dsn()) for name, server in (("north", many.north), ("south", many.south))}
    for name, slot in (("north", "omnisupport_ingest_north"), ("south", "southern")):
        with slots[name].cursor() as cursor:
            cursor.execute("SELECT array_agg(slot_name::text) FROM pg_replication_slots")
            assert cursor.fetchone() == ([slot],)
        slots[name].close()

    # One is paused, the other goes on; its state is told by name.
    many.done("source", "pause", "north", "--reason", "maintenance")
    many.sql(many.north, "UPDATE tickets SET subject = 'later' WHERE id = 7")
    many.sql(
        many.south, "UPDATE tickets SET subject = 'changed' WHERE id = 7", "DELETE FROM tickets WHERE id = 8"
    )
    refused = many.command("sync", "north")
    assert refused.returncode != 0 and "paused" in refused.stderr
    assert "the source north: add that name" in refused.stderr
    many.done("sync", "south")
    assert many.shown("south")[7] == ("changed", False) and many.shown("south")[8][1]
    assert many.shown("north")[7] == ("n7", False)
    status = json.loads(many.command("source", "status", "north", "--json").stdout)
    assert (status["source"], status["state"]) == ("north", "PAUSED")
    assert json.loads(many.done("source", "status", "south", "--json"))["state"] == "STOPPED"
    many.done("source", "resume", "north")

    # One server is down, the other goes on.
    many.south.stop()
    away = many.command("sync", "south")
    assert away.returncode == 4, away.stderr
    many.done("sync", "north")
    assert many.shown("north")[7] == ("later", False)
    logs = {each["name"]: each for each in json.loads(many.command("status", "--json").stdout)["other_logs"]}
    assert (logs["north"]["reachable"], logs["south"]["reachable"]) == (True, False)
    assert logs["north"]["slot"]["there"]

    many.south.start()
    many.sql(many.south, "INSERT INTO tickets VALUES (99, 'back')")
    many.done("sync", "south")
    assert many.shown("south")[99] == ("back", False)

    # Leaving one leaves the other.
    many.done("source", "drop", "south", "--yes")
    many.done("sync", "north")
    east.close()


@pytest.mark.slow
def test_under_up_each_log_has_a_capture_and_a_new_one_is_a_file(
    many: ManySources, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (many.folder / "contracts" / "sources" / "south.json").rename(many.folder / "south.json")
    (many.folder / "contracts" / "data" / "south_tickets.json").rename(many.folder / "south_tickets.json")
    monkeypatch.chdir(many.folder)
    for name, value in many.variables.items():
        monkeypatch.setenv(name, value)
    settings = Settings(_env_file=None)
    home = Home.open(settings.home, settings.window_size)
    captures = Captures(settings, home)
    with Supervisor(home) as supervisor:
        captures.start(supervisor)
        assert supervisor.names == ("capture-north",)
        many.sql(many.north, "INSERT INTO tickets VALUES (1, 'one')")
        until(lambda: many.events("north") > 0)

        (many.folder / "south_tickets.json").rename(many.folder / "contracts" / "data" / "south_tickets.json")
        (many.folder / "south.json").rename(many.folder / "contracts" / "sources" / "south.json")
        captures.start_new(supervisor)
        assert supervisor.names == ("capture-north", "capture-south")
        assert "south is captured from now on" in capsys.readouterr().out
        many.sql(many.south, "INSERT INTO tickets VALUES (1, 'one')")
        until(lambda: many.events("south") > 0)

        before = many.events("north")
        many.done("source", "pause", "north")
        many.south.stop()
        many.sql(many.north, "INSERT INTO tickets VALUES (2, 'two')")
        many.south.start()
        many.sql(many.south, "INSERT INTO tickets VALUES (2, 'two')")
        landed = many.events("south")
        until(lambda: many.events("south") > landed)
        assert many.events("north") == before
        many.done("source", "resume", "north")
        until(lambda: many.events("north") > before)


def test_one_graph_has_every_source_and_each_log_its_health(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    many = ManySources(None, None, tmp_path)  # type: ignore[arg-type]
    for folder in ("data", "sources"):
        (tmp_path / "contracts" / folder).mkdir(parents=True)
    many.define("north", {"env": "NORTH_DSN"})
    many.define("south", {"file": "/run/south.dsn"})
    many.define("east", {"env": "EAST_URL"}, kind="query")
    topics = {"topics": ["^west"], "settings": {"bootstrap.servers": "127.0.0.1:1"}}
    many.define("west", None, kind="kafka", kafka=topics)
    many.define("drop", None, kind="files")
    monkeypatch.delenv("NORTH_DSN", raising=False)
    given = Settings(home=tmp_path / "home", contracts_dir=tmp_path / "contracts" / "data", _env_file=None)
    workspace = Workspace.open(given)
    definitions = build_definitions(workspace)
    graph = definitions.resolve_asset_graph()
    every = ("north", "south", "east", "west", "drop")
    for source in every:
        assert graph.has(dg.AssetKey([source, "dim_tickets"]))
    kinds = {name: graph.get(dg.AssetKey([name, "landing"])).kinds for name in every}
    assert ["postgres" in kinds[name] for name in kinds] == [True, True, False, False, False]
    names = {each.name for each in definitions.sensors or ()}
    assert {"source_health_north", "source_health_south", "cursor_east", "topics_west"} <= names
    assert {f"wal_batches_{source}" for source in every} <= names
    assert not {f"source_health_{source}" for source in ("east", "west", "drop")} & names
