"""Personal values that land encrypted, from a real server to every layer; and a subject that is erased."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from pyspark.sql import SparkSession

from omnisupport_ingest.checks import content_checks
from omnisupport_ingest.cli.main import cli
from omnisupport_ingest.contracts.load import load_contracts
from omnisupport_ingest.landing.integrity import sha256_of, verify
from omnisupport_ingest.layers.histories import history
from omnisupport_ingest.layers.scheduling.pending import pending_windows
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.read.export import Format, export
from omnisupport_ingest.storage import at_hand, open_storage, storage_of
from omnisupport_ingest_tests.recovery.pipeline import run_layers
from omnisupport_ingest_tests.sources.postgres.source_under_test import SOURCE, SourceUnderTest

ADA, EVE = "zebrafinch", "bullfinch"
"""In every personal text of either."""

BADGE = "918273645"
"""Of the first one: a number, which statistics have as their highest."""


def document(table: str, columns: dict[str, str], personal: Sequence[str], at_rest: Any) -> dict[str, Any]:
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": table,
        "description": table,
        "type": "object",
        "required": ["id"],
        "additionalProperties": True,
        "properties": {
            name: {
                "type": "integer" if name == "id" else ["integer" if kind == "integer" else "string", "null"],
                "x-pg-type": kind,
                "description": name,
            }
            for name, kind in columns.items()
        },
        "x-cdc": {
            "version": "1.0.0",
            "source": SOURCE,
            "schema": "public",
            "table": table,
            "owner": "team:tests",
            "key": ["id"],
            "events": {"soft_delete_column": None},
            "lateness": {"allowed": "PT1H", "max": "P7D"},
            "at_rest": at_rest,
            "pii": {name: {"policy": "keep", "note": "A test."} for name in personal},
        },
    }


CUSTOMERS = document(
    "customers",
    {"id": "integer", "plan": "text", "email": "text", "full_name": "text", "badge": "integer"},
    ["email", "full_name", "badge"],
    {"pii": "encrypted", "subject": "customer"},
)
CUSTOMERS["x-cdc"]["deletion_vectors"] = True
ORDERS = document(
    "orders",
    {"id": "integer", "customer_id": "integer", "address": "text", "amount": "integer"},
    ["address"],
    {"pii": "encrypted", "subject": "customer", "subject_column": "customer_id"},
)


class Platform:
    """A source, its contracts, and the lake that is made of it."""

    def __init__(
        self,
        source: SourceUnderTest,
        folder: Path,
        spark: SparkSession,
        documents: Sequence[dict[str, Any]] = (CUSTOMERS, ORDERS),
    ) -> None:
        contracts = folder / "contracts"
        contracts.mkdir()
        for each in documents:
            (contracts / f"{each['x-cdc']['table']}.json").write_text(json.dumps(each))
        self.source, self.spark = source, spark
        source.overrides["contracts_dir"] = contracts
        source.tables = list(load_contracts(contracts))

    @property
    def workspace(self) -> Workspace:
        return Workspace.open(self.source.settings)

    def catch_up(self, *, replay: bool = False) -> None:
        self.source.catch_up()
        workspace = self.workspace
        windows = sorted({*pending_windows(workspace, SOURCE).windows, *self.windows()})
        run_layers(workspace, self.spark, windows, SOURCE, replay=replay)
        for contract in workspace.contracts:
            history.materialize(workspace, self.spark, contract, "run", replay=replay)

    def windows(self) -> list[str]:
        table = self.workspace.deduped(SOURCE)
        return list(table.open().windows()) if table.exists else []

    def rows(self, table: str) -> dict[int, dict[str, Any]]:
        contract = next(each for each in self.workspace.contracts if each.name == table)
        snapshot = self.workspace.dimension(contract).open()
        return {row["id"]: row.asDict() for row in snapshot.read(self.spark, snapshot.all_files()).collect()}

    def holding(self, text: str) -> set[str]:
        """The files of the home, and objects of its bucket, that have ``text``, as bytes or in a decoded
        value."""
        found, home = set(), self.source.home_folder
        for folder in (home / "landing", home / "lake"):
            for each in storage_of(folder / "any").listed(folder):
                at_hand(each.path)
        for file in (each for each in home.rglob("*") if each.is_file()):
            content = file.read_bytes()
            if file.suffix == ".parquet":
                table = pq.read_table(file, partitioning=None)
                content += repr((table.to_pylist(), table.schema.metadata)).encode()
            if text.encode() in content:
                found.add(file.relative_to(home).as_posix())
        return found


@pytest.fixture
def platform(source: SourceUnderTest, tmp_path: Path, spark: SparkSession) -> Iterator[Platform]:
    source.sql(
        "CREATE TABLE customers (id int PRIMARY KEY, plan text, email text NOT NULL, full_name text, "
        "badge int)",
        "CREATE TABLE orders (id int PRIMARY KEY, customer_id int, address text, amount int)",
        "ALTER TABLE orders REPLICA IDENTITY FULL",
        # Read by the snapshot.
        f"INSERT INTO customers VALUES (1, 'gold', '{ADA}@x.org', '{ADA} L', {BADGE})",
        f"INSERT INTO customers VALUES (2, 'free', '{EVE}@x.org', 'E')",
        "INSERT INTO customers SELECT n, 'free', 'c' || n || '@x.org' FROM generate_series(100, 250) n",
        f"INSERT INTO orders VALUES (10, 1, '{ADA} street', 5), (20, 2, '{EVE} street', 6)",
    )
    made = Platform(source, tmp_path, spark)
    made.catch_up()
    # By the stream: an update, a key change, a delete with its whole old row, a row of nobody.
    source.sql(
        f"UPDATE customers SET email = '{ADA}@y.org' WHERE id = 1",
        f"INSERT INTO orders VALUES (11, 1, '{ADA} lane', 7), (12, NULL, 'nobody {EVE}', 8)",
        "UPDATE orders SET id = 13 WHERE id = 10",
        # A row that is another subject's by now.
        f"INSERT INTO orders VALUES (30, 1, '{ADA} road', 9)",
        f"UPDATE orders SET customer_id = 2, address = '{EVE} road' WHERE id = 30",
        "UPDATE customers SET id = 251 WHERE id = 250",
        "DELETE FROM orders WHERE id = 11",
    )
    made.catch_up()
    yield made


def erase(platform: Platform, *arguments: str) -> Any:
    settings = platform.source.settings
    environment = {
        "OMNISUPPORT_HOME": str(settings.home),
        "OMNISUPPORT_WINDOW": "minutes:1",
        "OMNISUPPORT_SOURCE": SOURCE,
        "OMNISUPPORT_CONTRACTS_DIR": str(settings.contracts_dir),
    }
    return CliRunner().invoke(cli, ["erase", *arguments, "--subject"], env={**os.environ, **environment})


@pytest.mark.drawn(1)
def test_a_subject_is_erased_from_every_byte_of_the_home(
    kept_in: str | None, platform: Platform, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    home = platform.source.home_folder
    holding = platform.holding(ADA)
    # Landing and raw never had it; the tables above them have: they are to be queried.
    assert holding and {each.split("/")[2] for each in holding} == {
        "deduped_events",
        "net_changes",
        "history",
        "dim_customers",
        "dim_orders",
    }
    numbered = platform.holding(BADGE)
    assert {each.split("/")[2] for each in numbered} == {
        "deduped_events",
        "net_changes",
        "history",
        "dim_customers",
    }
    assert not [each for each in numbered if "_delta_log" in each], "no value is a bound in the log"
    customers, orders = platform.rows("customers"), platform.rows("orders")
    assert (customers[1]["email"], customers[1]["full_name"]) == (f"{ADA}@y.org", f"{ADA} L")
    assert (orders[13]["address"], orders[11]["address"]) == (f"{ADA} street", f"{ADA} lane")
    assert (orders[12]["address"], len(customers)) == (f"nobody {EVE}", 154)
    of_customers = next(each for each in platform.workspace.contracts if each.name == "customers")
    marked = platform.workspace.dimension(of_customers).open().all_files()
    assert any(each.vector is not None for each in marked), "her first address is in a dead row"
    exported = tmp_path / "customers.csv"
    export(platform.workspace, of_customers, exported, Format.CSV)
    landed = {path: sha256_of(path) for path in (home / "landing").rglob("*.parquet")}

    # A key that is missing, though nobody destroyed it, is a loss: nothing is judged.
    keys = home / "keys" / "subjects.sqlite"
    keys.rename(tmp_path / "keys.sqlite")
    with pytest.raises(Exception, match="the home has no keys of subjects"):
        run_layers(platform.workspace, platform.spark, platform.windows(), SOURCE, judge=True)
    assert platform.rows("customers") == customers
    (tmp_path / "keys.sqlite").rename(keys)

    for wrong, problem in (
        (["customers", "77"], "has no row with that key"),
        (["orders", "20", "21"], "is id"),
    ):
        refused = erase(platform, *wrong, "--reason", "a test")
        assert refused.exit_code != 0 and problem in f"{refused.exception} {refused.output}"
    dry = erase(platform, "customers", "1", "--dry-run")
    assert dry.exit_code == 0 and platform.holding(ADA) == holding
    first = erase(platform, "customers", "1", "--reason", "request 7", "--by", "ana")
    assert first.exit_code == 0, first.output
    assert (
        "nobody can read" in first.stdout and "not complete yet" in first.stdout and ADA not in first.output
    )

    # A run that had read values has died since, or is about to.
    once = next(each for each in sorted(holding) if "/dim_customers/" in each)
    left = home / "lake" / SOURCE / "dim_customers" / "g0099-0123456789abcdef" / "part-0.parquet"
    left.parent.mkdir()
    shutil.copyfile(home / once, left)
    draft = left.parents[1] / ".staging" / "dead" / "part-0.parquet"
    draft.parent.mkdir()
    # Judged again, all of it; and once more by a replay of everything.
    platform.catch_up()
    if kept_in is not None:
        # Another machine has swept by now; the copies here are nobody's.
        there = tmp_path / "there"
        for each in holding:
            open_storage(there, kept_in).unlink(there / each)
    draft.write_bytes(b"PAR1, not whole")
    early = json.loads(erase(platform, "customers", "1", "--reason", "request 7", "--json").stdout)
    assert (early["cells_readable"] > 0, early["complete"]) == (True, False)
    [named] = [each["where"] for each in early["remains"] if each["what"] == "files that no table names"]
    assert named == sorted(each.relative_to(home).as_posix() for each in (left, draft))
    draft.unlink()
    assert platform.holding(ADA) == {left.relative_to(home).as_posix()}
    for path in (left, left.parent):
        os.utime(path, (0, 0))
    second = erase(platform, "customers", "1", "--reason", "request 7", "--by", "bo")
    assert second.exit_code == 0 and "Certificate (complete)" in second.stdout, second.output
    assert platform.holding(ADA) == platform.holding(BADGE) == set()
    platform.catch_up(replay=True)
    # The source still has the row, and its later changes land without values too.
    platform.source.sql(f"UPDATE customers SET full_name = '{ADA} again' WHERE id = 1")
    platform.catch_up()
    assert platform.holding(ADA) == platform.holding(BADGE) == set()

    customers, orders = platform.rows("customers"), platform.rows("orders")
    shown = [customers[1][name] for name in ("plan", "email", "full_name", "badge")]
    assert shown == ["gold", None, None, None]
    assert not customers[1]["_cdc_unresolved"] and not customers[1]["_cdc_is_deleted"]
    assert [orders[number]["address"] for number in (11, 13)] == [None, None]
    assert (orders[20]["address"], orders[12]["address"]) == (f"{EVE} street", f"nobody {EVE}")
    assert (customers[2]["email"], customers[100]["email"]) == (f"{EVE}@x.org", "c100@x.org")
    for contract in platform.workspace.contracts:
        meets = content_checks.meets_contract(platform.workspace, platform.spark, contract)
        assert meets.passed, meets.summary
        quarantine = platform.workspace.quarantine(SOURCE).open()
        assert not quarantine.all_files(), "a value whose key is gone is no fault"

    # What landed is what it was, byte for byte; the certificate says so, and names what is left.
    assert {path: sha256_of(path) for path in landed} == landed
    store = platform.source.store
    for manifest in store.manifests():
        for file in manifest.files:
            verify(store.folder, file)
    (path,) = (home / "certificates").iterdir()
    certificate = json.loads(path.read_text())
    assert path.stat().st_mode & 0o777 == 0o600 and ADA not in path.read_text()
    assert (certificate["state"], certificate["asked"]["by"]) == ("complete", "ana")
    assert certificate["before"] and sum(each["count"] for each in certificate["before"]) > 6
    for each in certificate["before"]:
        now = next(after for after in certificate["after"] if after["path"] == each["path"])
        assert (now["sha256"], now["count"]) in ((None, 0), (each["sha256"], 0))
    remains = {each["what"]: each["where"] for each in certificate["remains"]}
    assert "bounds of integer columns" not in remains
    assert orders[30]["address"] == f"{EVE} road"
    assert remains["exports that were written before"] == [str(exported)]
    assert ("homes of other machines on this bucket" in remains) == (kept_in is not None)
    if kept_in is not None:
        # What a bucket keeps of former versions can be read: no certificate calls that complete.
        request.getfixturevalue("s3").keep_versions(kept_in)
        kept = json.loads(erase(platform, "customers", "1", "--reason", "request 7", "--json").stdout)
        assert not kept["complete"]
        assert "former versions of objects" in {each["what"] for each in kept["remains"]}
    named = remains["encrypted images, which nobody can read"]
    assert set(named) == {each["path"] for each in certificate["encrypted"]}
    assert {each.split("/")[0] for each in named} == {"landing", "lake"}

    # Who had another key before has images by another one, and the certificate says so.
    moved = json.loads(erase(platform, "customers", "251", "--dry-run", "--json").stdout)
    assert "images of its rows that are of another subject" in {each["what"] for each in moved["remains"]}
    # What has landed and is not judged yet may be in the hands of a run: nothing is complete.
    platform.source.sql(f"INSERT INTO customers VALUES (500, 'free', '{ADA} 500')")
    platform.source.catch_up()
    early = json.loads(erase(platform, "customers", "500", "--reason", "request 8", "--json").stdout)
    assert (early["cells_readable"], early["complete"]) == (0, False)
    assert "windows that wait to be judged" in {each["what"] for each in early["remains"]}
