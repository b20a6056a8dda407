"""A subject whose values land plain, from a real server to every layer, erased while its rows live."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from omnisupport_ingest.checks import content_checks
from omnisupport_ingest.landing.integrity import sha256_of
from omnisupport_ingest.read.export import Format, export
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest
from omnisupport_ingest_tests.sources.postgres.test_encrypted_at_rest import (
    ADA,
    CUSTOMERS,
    EVE,
    ORDERS,
    Platform,
    erase,
)

RECORD = ("landing", "raw_cdc_staging")
REASON = ("--reason", "request 7")


def plain(document: dict[str, Any]) -> dict[str, Any]:
    found = copy.deepcopy(document)
    found["x-cdc"]["at_rest"]["pii"] = "plain"
    return found


def documents() -> list[dict[str, Any]]:
    orders = plain(ORDERS)
    orders["properties"]["amount"]["maximum"] = 1000
    return [plain(CUSTOMERS), orders]


@pytest.fixture
def platform(source: SourceUnderTest, tmp_path: Path, spark: SparkSession) -> Platform:
    source.sql(
        "CREATE TABLE customers (id int PRIMARY KEY, plan text, email text, full_name text, badge int)",
        "CREATE TABLE orders (id int PRIMARY KEY, customer_id int, address text, amount int)",
        "ALTER TABLE orders REPLICA IDENTITY FULL",
        f"INSERT INTO customers VALUES (1, 'gold', '{ADA}@x.org', '{ADA} L')",
        f"INSERT INTO customers VALUES (2, 'free', '{EVE}@x.org', 'E')",
        f"INSERT INTO orders VALUES (10, 1, '{ADA} street', 5), (20, 2, '{EVE} street', 6)",
    )
    made = Platform(source, tmp_path, spark, documents())
    made.catch_up()
    source.sql(
        f"UPDATE customers SET email = '{ADA}@y.org' WHERE id = 1",
        # One that is deleted, one of nobody, one that is another subject's by now, one that breaks a rule.
        f"INSERT INTO orders VALUES (11, 1, '{ADA} lane', 7), (12, NULL, 'nobody {EVE}', 8)",
        f"INSERT INTO orders VALUES (30, 1, '{ADA} road', 9), (40, 1, '{ADA} court', 5000)",
        f"UPDATE orders SET customer_id = 2, address = '{EVE} road' WHERE id = 30",
        "DELETE FROM orders WHERE id = 11",
    )
    made.catch_up()
    return made


def above_raw(platform: Platform) -> set[str]:
    """The layers above raw, and other places in the home, with a file that has a value of hers."""
    parts = [each.split("/") for each in platform.holding(ADA)]
    return {each[2] if each[0] == "lake" else each[0] for each in parts} - {*RECORD}


def test_a_subject_that_landed_plain_is_erased_above_raw_and_stays_so(
    platform: Platform, tmp_path: Path
) -> None:
    home = platform.source.home_folder
    made = {"deduped_events", "quarantine", "net_changes", "history", "dim_customers", "dim_orders"}
    assert above_raw(platform) == made
    of_customers = next(each for each in platform.workspace.contracts if each.name == "customers")
    exported = tmp_path / "customers.csv"
    export(platform.workspace, of_customers, exported, Format.CSV)
    landed = {path: sha256_of(path) for path in (home / "landing").rglob("*.parquet")}

    refused = erase(platform, "customers", "77", *REASON)
    assert refused.exit_code != 0 and "has no row with that key" in f"{refused.exception} {refused.output}"
    dry = json.loads(erase(platform, "customers", "1", "--dry-run", "--json").stdout)
    # Her row twice; of orders 10, 11 and what its delete shows, 30 and what its update shows, and 40.
    assert (dry["images_plain"], dry["images_encrypted"]) == (8, 0)
    assert dry["cells_readable"] > 8 and not (home / "keys").exists()

    first = json.loads(erase(platform, "customers", "1", *REASON, "--by", "ana", "--json").stdout)
    assert first["state"] == "pending" and set(first["windows_waiting"]) == set(dry["windows"])
    platform.catch_up()
    second = erase(platform, "customers", "1", *REASON, "--by", "bo")
    assert "Certificate (incomplete)" in second.stdout and ADA not in second.output, second.output
    assert above_raw(platform) == set()

    # Her rows live: the source updates one and adds two.
    platform.source.sql(
        f"UPDATE customers SET full_name = '{ADA} again' WHERE id = 1",
        f"INSERT INTO orders VALUES (50, 1, '{ADA} alley', 3), (51, 1, '{ADA} mews', 5001)",
    )
    platform.catch_up()
    assert above_raw(platform) == set()
    check(platform)
    later = json.loads(erase(platform, "customers", "1", *REASON, "--json").stdout)
    assert (later["state"], later["images_plain"], later["windows_waiting"]) == ("incomplete", 11, [])
    # All is judged again; then all is made again from landing.
    platform.catch_up(replay=True)
    assert above_raw(platform) == set()
    check(platform)
    shutil.rmtree(home / "lake")
    platform.catch_up()
    assert above_raw(platform) == set()
    check(platform)

    # The record is what it was; the certificate names it, what else remains, and who asked.
    assert {path: sha256_of(path) for path in landed} == landed
    (path,) = (home / "certificates").iterdir()
    certificate = json.loads(path.read_text())
    assert ADA not in path.read_text() and certificate["asked"]["by"] == "ana"
    assert {each["place"].split("/")[-1] for each in certificate["record"]} == {*RECORD}
    assert all(each["count"] > 0 and len(each["sha256"]) == 64 for each in certificate["record"])
    after = {each["path"]: each for each in certificate["after"]}
    assert certificate["before"] and certificate["swept"]
    assert {after[each["path"]]["count"] for each in certificate["before"]} == {0}
    remains = {each["what"]: each["where"] for each in certificate["remains"]}
    assert remains["images that landed plain"] == sorted(each["path"] for each in certificate["record"])
    assert remains["exports that were written before"] == [str(exported)]


def check(platform: Platform) -> None:
    """Of her rows the keys and what is not personal are shown; of others all."""
    customers, orders = platform.rows("customers"), platform.rows("orders")
    assert [customers[1][name] for name in ("plan", "email", "full_name")] == ["gold", None, None]
    assert not customers[1]["_cdc_unresolved"] and not customers[1]["_cdc_is_deleted"]
    assert [(orders[n]["customer_id"], orders[n]["amount"]) for n in (10, 50)] == [(1, 5), (1, 3)]
    assert [orders[n]["address"] for n in (10, 11, 50)] == [None, None, None]
    assert (orders[20]["address"], orders[12]["address"]) == (f"{EVE} street", f"nobody {EVE}")
    assert (customers[2]["email"], orders[30]["address"]) == (f"{EVE}@x.org", f"{EVE} road")
    for contract in platform.workspace.contracts:
        meets = content_checks.meets_contract(platform.workspace, platform.spark, contract)
        assert meets.passed, meets.summary
