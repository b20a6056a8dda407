"""One database over two slots: a workload over both, one capture killed, windows at the lowest watermark."""

from __future__ import annotations

import copy
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import duckdb
import psycopg2
import pytest
from deltalake import DeltaTable

from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.layers.lateness import Lateness
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.sources.postgres.preflight.shared_database import (
    shared_database_findings,
    shared_table_findings,
)
from omnisupport_ingest_tests.cli import pgbench
from omnisupport_ingest_tests.sources.postgres.conftest import source as source
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest
from omnisupport_ingest_tests.sources.query.tickets import contract_document
from omnisupport_ingest_tests.waiting import until

ORDERS, LINES = "shop_orders", "shop_lines"
TABLES = {ORDERS: "orders", LINES: "lines"}


@dataclass
class Shop:
    """A database whose table ``orders`` comes by one slot, and ``lines`` by another."""

    source: SourceUnderTest
    folder: Path
    variables: dict[str, str] = field(default_factory=dict)

    def prepare(self) -> None:
        for name in ("data", "sources"):
            (self.folder / "contracts" / name).mkdir(parents=True)
        for name, table in TABLES.items():
            self.source.sql(
                f"CREATE TABLE {table} (id bigint PRIMARY KEY, subject text,"
                " updated_at timestamptz DEFAULT now())",
                f"INSERT INTO {table} SELECT n, 'before' FROM generate_series(1, 50) n",
            )
            self.define(name)
            self.contract(name, table)
        self.variables = {
            "OMNISUPPORT_HOME": str(self.folder / "home"),
            "OMNISUPPORT_CONTRACTS_DIR": str(self.folder / "contracts" / "data"),
            "OMNISUPPORT_WINDOW": "minutes:1",
            "OMNISUPPORT_BATCH_MAX_SECONDS": "0.3",
            "OMNISUPPORT_SPARK_DRIVER_MEMORY": "1g",
            "SHOP_DSN": self.source.dsn,
        }

    def define(self, name: str, **members: Any) -> None:
        own = f"{self.source.slot}_{name}"
        document = {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "name": name,
            "kind": "postgres_log",
            "description": "A slot of the shop.",
            "connection": {"env": "SHOP_DSN"},
            "database": "shop",
            "log": {"slot": own, "publication": own},
            **members,
        }
        (self.folder / "contracts" / "sources" / f"{name}.json").write_text(json.dumps(document))

    def contract(self, source: str, table: str) -> Path:
        document = copy.deepcopy(contract_document())
        document["x-cdc"] |= {"source": source, "table": table, "lateness": {"allowed": "PT0S", "max": "P7D"}}
        path = self.folder / "contracts" / "data" / f"{source}_{table}.json"
        path.write_text(json.dumps(document))
        return path

    def command(self, *arguments: str) -> Any:
        return pgbench.command(*arguments, folder=self.folder, variables=self.variables)

    def done(self, *arguments: str) -> str:
        done = self.command(*arguments)
        assert done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}"
        return str(done.stdout)

    def capture(self, name: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "omnisupport_ingest.cli.main", "capture", name],
            cwd=self.folder,
            env=pgbench.environment(self.variables),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def workspace(self) -> Workspace:
        given = {"home": self.folder / "home", "contracts_dir": self.folder / "contracts" / "data"}
        return Workspace.open(Settings(window="minutes:1", _env_file=None, **given))

    def landed(self, name: str) -> int:
        store = LandingStore(self.folder / "home" / "landing", name)
        return sum(store.read(each).rows for each in store.batch_ids(""))

    def shown(self, name: str) -> dict[int, str]:
        table = DeltaTable(str(self.folder / "home" / "lake" / name / f"dim_{TABLES[name]}"))
        rows = duckdb.sql(
            f"SELECT id, subject FROM read_parquet({table.file_uris()}) WHERE NOT _cdc_is_deleted"
        ).fetchall()
        return dict(rows)

    def there(self, name: str) -> dict[int, str]:
        return dict(self.source.query(f"SELECT id, subject FROM {TABLES[name]}"))

    @contextmanager
    def workload(self) -> Iterator[None]:
        """Transactions that change both tables, again and again."""
        stop = threading.Event()

        def trade() -> None:
            with closing(psycopg2.connect(self.source.dsn)) as connection:
                number = 50
                while not stop.wait(0.02):
                    number += 1
                    with connection, connection.cursor() as cursor:
                        for table in TABLES.values():
                            cursor.execute(f"INSERT INTO {table} VALUES (%s, 'new')", (number,))
                            cursor.execute(
                                f"UPDATE {table} SET subject = %s WHERE id = %s",
                                (f"at {number}", number % 50 + 1),
                            )
                            cursor.execute(f"DELETE FROM {table} WHERE id = %s", (number - 30,))

        thread = threading.Thread(target=trade)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


@pytest.fixture
def shop(source: SourceUnderTest, tmp_path: Path) -> Shop:
    made = Shop(source, tmp_path)
    made.prepare()
    return made


def marks(shop: Shop) -> dict[str, Any]:
    return shop.workspace().input_watermarks(ORDERS)


@pytest.mark.slow
def test_one_capture_is_killed_the_other_goes_on_and_windows_wait_for_both(shop: Shop):
    running = {name: shop.capture(name) for name in TABLES}
    try:
        with shop.workload():
            until(lambda: all(shop.landed(name) > 60 for name in TABLES))
            running[LINES].send_signal(signal.SIGKILL)
            running[LINES].wait()
            stood = shop.landed(LINES)
            # The last window of which it sent something ends for the one that goes on. The watermark lies
            # seconds before the last commit, so the window that it is in may have no events.
            workspace = shop.workspace()
            window = max(workspace.landing(LINES).windows())
            end = workspace.grid.end_of(window)
            until(lambda: (marks(shop)[ORDERS] or end) > end + timedelta(seconds=1), seconds=120)
            workspace = shop.workspace()
            assert shop.landed(LINES) == stood
            assert Lateness.of(workspace, ORDERS).closed(window, marks(shop)[ORDERS])
            assert workspace.closing_watermark(ORDERS) == marks(shop)[LINES] < end
            assert not Lateness.of(workspace, ORDERS).closed(window, workspace.closing_watermark(ORDERS))

            running[LINES] = shop.capture(LINES)
            until(lambda: marks(shop)[LINES] > end, seconds=60)
        until(lambda: min(marks(shop).values()) > end)
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()
    # Each chain is whole, and each slot has sent its tables alone.
    for name, table in TABLES.items():
        store = LandingStore(shop.folder / "home" / "landing", name)
        assert store.landed().gap is None
        files = [file for each in store.batch_ids("") for file in store.read(each).files]
        named = {key for file in files for key in file.rows_per_table}
        assert named == {f"public.{table}"}
    for name in TABLES:
        told = json.loads(shop.done("sync", name, "--verify", "full", "--json"))
        assert told["verify"]["holds"]
        assert shop.shown(name) == shop.there(name)
    listed = json.loads(shop.done("windows", "--source", ORDERS, "--json"))[0]
    assert listed["inputs"] == [LINES, ORDERS]
    assert {each["window"]: each["stand"] for each in listed["windows"]}[window] == "closed"
    status = json.loads(shop.command("status", "--json").stdout)
    shown = {each["source"]: each["inputs"] for each in status["sources"]}
    assert shown[ORDERS].keys() == {ORDERS, LINES}


def blocked(shop: Shop, name: str) -> str:
    done = shop.command("preflight", name, "--json")
    findings = json.loads(done.stdout)["findings"]
    found = [each for each in findings if each["check"] == "divided"]
    assert done.returncode == (1 if found else 0), done.stdout
    return "\n".join(f"{each['what']} {each['fix']}" for each in found)


@pytest.mark.full
def test_a_table_comes_by_one_slot_alone(shop: Shop):
    """What would land twice is refused at the start; a table moves by being withdrawn and read anew."""
    assert blocked(shop, ORDERS) == ""
    shop.done("capture", ORDERS, "--once")
    shop.done("capture", LINES, "--once")
    shop.source.sql("CREATE TABLE notes (id bigint PRIMARY KEY, subject text, updated_at timestamptz)")

    # A contract for each of both.
    doubled = shop.contract(LINES, "orders")
    assert "public.orders has a contract for each of shop_lines and shop_orders" in blocked(shop, LINES)
    refused = shop.command("capture", LINES, "--once")
    assert refused.returncode == 5 and "A table belongs to one slot" in refused.stderr
    validated = shop.command("sources", "validate")
    assert validated.returncode == 1 and "public.orders" in validated.stdout
    doubled.unlink()

    # A publication that has the other's table, by name and as one of all tables.
    own = f"{shop.source.slot}_{LINES}"
    shop.source.sql(f"ALTER PUBLICATION {own} ADD TABLE orders")
    for name in TABLES:
        told = blocked(shop, name)
        assert f"Publication {own} of {LINES} publishes public.orders, which {ORDERS} captures" in told
    shop.source.sql(f"ALTER PUBLICATION {own} DROP TABLE orders")
    assert blocked(shop, ORDERS) == ""

    # The contract alone does not move a table: the first slot still sends it.
    lines = shop.folder / "contracts" / "data" / f"{LINES}_lines.json"
    shop.contract(LINES, "notes")
    lines.rename(shop.folder / "lines.json")
    moved = shop.contract(ORDERS, "lines")
    assert f"Publication {own} of {LINES} publishes public.lines, which {ORDERS} captures" in blocked(
        shop, ORDERS
    )
    moved.unlink()
    (shop.folder / "lines.json").rename(lines)
    # Withdrawn first, it is read anew by the other.
    shop.done("contracts", "withdraw", "lines", "--source", LINES, "--yes")
    shop.contract(ORDERS, "lines")
    assert blocked(shop, ORDERS) == ""
    before = shop.landed(ORDERS)
    shop.done("capture", ORDERS, "--once")
    assert shop.landed(ORDERS) - before >= 50


@pytest.mark.full
def test_another_database_is_no_input(shop: Shop):
    shop.done("capture", ORDERS, "--once")
    other = f"{shop.source.slot}_other"
    shop.source.sql(f"CREATE DATABASE {other} STRATEGY file_copy")
    dsn = psycopg2.extensions.make_dsn(shop.source.dsn, dbname=other)
    try:
        with closing(psycopg2.connect(dsn)) as connection, connection, connection.cursor() as cursor:
            cursor.execute("CREATE TABLE lines (id bigint PRIMARY KEY, subject text, updated_at timestamptz)")
        shop.variables["OTHER_DSN"] = dsn
        shop.define(LINES, connection={"env": "OTHER_DSN"})
        told = blocked(shop, LINES)
        assert "said to share database shop" in told and f"the first reads {other} of server" in told
    finally:
        shop.source.sql(f"DROP DATABASE {other} WITH (FORCE)")


@pytest.mark.full
def test_sources_of_a_database_move_to_another_server_one_after_the_other(shop: Shop):
    for name in TABLES:
        shop.done("capture", name, "--once")
    there = f"{shop.source.slot}_there"
    shop.source.sql(f"CREATE DATABASE {there} STRATEGY file_copy")
    dsn = psycopg2.extensions.make_dsn(shop.source.dsn, dbname=there)

    def divided(name: str) -> list[str]:
        settings = shop.workspace().settings.model_copy(update={"source": name, "publication": "unused"})
        return [each.problem for each in shared_database_findings(dsn, settings)]

    try:
        shop.variables["THERE_DSN"] = dsn
        with pytest.MonkeyPatch.context() as patch:
            for name, value in shop.variables.items():
                patch.setenv(name, value)
            shop.define(ORDERS, connection={"env": "THERE_DSN"})
            assert [LINES in each for each in divided(ORDERS)] == [True], "the other stays where it was"
            shop.define(LINES, connection={"env": "THERE_DSN"})
            assert [divided(name) for name in TABLES] == [[], []]
    finally:
        shop.source.sql(f"DROP DATABASE {there} WITH (FORCE)")


def test_a_table_that_another_slot_sends_is_not_added_to_a_running_capture(shop: Shop):
    own = f"{shop.source.slot}_{LINES}"
    shop.source.sql(
        "CREATE TABLE notes (id bigint PRIMARY KEY, subject text, updated_at timestamptz)",
        f"CREATE PUBLICATION {own} FOR TABLE lines, notes",
    )
    shop.contract(ORDERS, "notes")
    # What cannot be read of the other's landing is for its own start to say.
    store = LandingStore(shop.folder / "home" / "landing", LINES)
    (store.folder / "epochs" / "000001.json").write_text("{")
    settings = shop.workspace().settings.model_copy(update={"source": ORDERS, "publication": "orders"})
    (added,) = [each for each in shop.workspace().contracts.of_source(ORDERS) if each.table == "notes"]
    with closing(psycopg2.connect(shop.source.dsn)) as connection:
        found = shared_table_findings(connection, settings, [added])
        assert [each.table for each in found] == [added.name]
        assert f"Publication {own} of {LINES} publishes public.notes" in found[0].problem
        shop.source.sql(found[0].fix)
        assert shared_table_findings(connection, settings, [added]) == ()
    assert shared_database_findings(shop.source.dsn, settings) == ()


def test_a_slot_of_a_database_is_defined_by_one_command(tmp_path: Path):
    (tmp_path / "contracts" / "data").mkdir(parents=True)
    variables = {"OMNISUPPORT_HOME": str(tmp_path / "home"), "OMNISUPPORT_CONTRACTS_DIR": "contracts/data"}
    given = (
        "sources",
        "new",
        "Shop_Lines",
        "--kind",
        "postgres_log",
        "--env",
        "SHOP_DSN",
        "--database",
        "shop",
    )
    done = pgbench.command(*given, folder=tmp_path, variables=variables)
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "contracts" / "sources" / "Shop_Lines.json").read_text())
    assert document["database"] == "shop"
    assert document["log"] == {"slot": "shop_lines", "publication": "shop_lines"}
