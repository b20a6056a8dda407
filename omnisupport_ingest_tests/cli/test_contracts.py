"""``contracts``: made from a source, checked, and held against it again, as a person runs it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from omnisupport_ingest.contracts.load import load_contract, load_contracts
from omnisupport_ingest_tests.cli.command import command, environment
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest


@pytest.fixture
def folder(source: SourceUnderTest, tmp_path: Path) -> Iterator[Path]:
    """The folder of contracts, still to be made; the settings name it and the source."""
    path = tmp_path / "contracts"
    with environment(
        contracts_dir=str(path),
        source_dsn=source.dsn,
        source="shop",
        home=str(tmp_path / "home"),
        publication=source.slot,
    ):
        yield path


def asked(*arguments: str) -> Any:
    """The JSON answer of a command, which is all it prints on standard output."""
    return json.loads(command("contracts", *arguments, "--json").out)


@pytest.mark.quick
def test_a_contract_per_table_and_the_refused_ones_by_name(source: SourceUnderTest, folder: Path) -> None:
    source.sql(
        "CREATE TABLE orders (id int PRIMARY KEY, total numeric(10,2))",
        "CREATE TABLE events (at timestamptz, what text)",
        'CREATE TABLE "Weird Name" (id int PRIMARY KEY)',
        "CREATE SCHEMA archive",
        "CREATE TABLE archive.orders (id int PRIMARY KEY, email text)",
    )
    done = command("contracts", "new", "--all")
    assert done.code == 1
    assert "3 written, 0 kept, 1 refused." in done.out
    assert "public.events has no primary key" in done.out
    assert "ADD PRIMARY KEY" in done.out and "USING INDEX" in done.out and "leave it out" in done.out
    assert {(each.full_name, each.name) for each in load_contracts(folder)} == {
        ("public.orders", "public_orders"),
        ("archive.orders", "archive_orders"),
        ("public.Weird Name", "Weird_Name"),
    }
    assert sorted(path.name for path in folder.iterdir()) == [
        "Weird_Name.json",
        "archive_orders.json",
        "public_orders.json",
    ]
    assert command("contracts", "validate").code == 0
    assert command("contracts", "diff").code == 0
    personal = json.loads((folder / "archive_orders.json").read_text())["x-cdc"]["pii"]
    assert personal["email"]["policy"] == "keep", "a person decides"
    assert "To decide: e-mail address" in personal["email"]["note"]


def test_what_is_there_is_kept_until_it_is_forced(source: SourceUnderTest, folder: Path) -> None:
    source.sql("CREATE TABLE orders (id int PRIMARY KEY)")
    assert command("contracts", "new", "--table", "public.orders").code == 0
    path = folder / "orders.json"
    mine = path.read_text().replace("(no comment at the source)", "of mine")
    (folder / "sales.json").write_text(mine)
    path.unlink()
    source.sql("ALTER TABLE orders ADD COLUMN total int")
    kept = command("contracts", "new", "--all")
    assert (kept.code, "0 written, 1 kept, 0 refused." in kept.out) == (0, True)
    assert (folder / "sales.json").read_text() == mine
    assert command("contracts", "new", "--all", "--force").code == 0
    assert [path.name for path in folder.iterdir()] == ["sales.json"]
    assert load_contract(folder / "sales.json").column_names == ("id", "total")


def test_the_file_of_another_source_is_never_taken(source: SourceUnderTest, folder: Path) -> None:
    source.sql("CREATE TABLE orders (id int PRIMARY KEY)")
    with environment(source="other"):
        command("contracts", "new", "--all")
    before = (folder / "orders.json").read_text()
    (answer,) = asked("new", "--all", "--force")["tables"]
    assert answer["path"] == str(folder / "shop.orders.json")
    assert (folder / "orders.json").read_text() == before
    assert command("contracts", "validate").code == 0


def test_a_table_is_named_as_the_source_writes_it(source: SourceUnderTest, folder: Path) -> None:
    source.sql(
        'CREATE TABLE "Orders" (id int PRIMARY KEY)',
        'CREATE SCHEMA "a.b"',
        "CREATE SCHEMA a",
        'CREATE TABLE "a.b".c (id int PRIMARY KEY)',
        'CREATE TABLE a."b.c" (id int PRIMARY KEY)',
    )
    answers = asked(
        *("new", "--table", "public.orders", "--table", "Orders", "--table", '"a.b".c', "--table", "a.b.c")
    )["tables"]
    by_table = {answer["table"]: answer for answer in answers}
    assert by_table["public.orders"]["fix"] == "Did you mean public.Orders?"
    assert by_table["public.Orders"]["status"] == "written"
    assert [answer["status"] for answer in answers if answer["table"] == "a.b.c"] == ["refused", "written"]
    ambiguous = next(answer for answer in answers if "several" in (answer["problem"] or ""))
    assert ambiguous["fix"] == 'Quote its parts: "a"."b.c" or "a.b"."c"'


def test_nothing_or_everything_at_once_is_a_usage_error(folder: Path) -> None:
    assert command("contracts", "new").code == 2
    assert command("contracts", "new", "--all", "--table", "t").code == 2


def test_an_owner_that_cannot_be_is_refused_before_anything_is_written(
    source: SourceUnderTest, folder: Path
) -> None:
    source.sql("CREATE TABLE orders (id int PRIMARY KEY)")
    done = command("contracts", "new", "--all", "--owner", "me")
    assert (done.code, "Write team:NAME" in done.err) == (2, True)
    assert not list(folder.glob("*.json"))


def test_a_source_that_is_away_is_told(folder: Path, tmp_path: Path) -> None:
    with environment(source_dsn=f"host={tmp_path} dbname=x"):
        assert command("contracts", "new", "--all").code == 4


def test_without_a_source_the_embedded_one_must_be_there(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMNISUPPORT_SOURCE_DSN")
    done = command("contracts", "new", "--all")
    assert (done.code, "There is no home" in done.err) == (4, True)
    assert "Set OMNISUPPORT_SOURCE_DSN to the source, in .env" in done.err
    assert not (tmp_path / "home").exists()


def test_every_broken_contract_is_told_and_not_only_the_first(source: SourceUnderTest, folder: Path) -> None:
    source.sql("CREATE TABLE a (id int PRIMARY KEY)", "CREATE TABLE b (id int PRIMARY KEY)")
    command("contracts", "new", "--all")
    (folder / "broken.json").write_text("{")
    (folder / "copy.json").write_text((folder / "a.json").read_text())
    done = command("contracts", "validate")
    assert done.code == 1
    assert "broken.json is not valid JSON" in done.err
    assert "both contracts for public.a" in done.err
    assert "2 contracts" in done.out and "can be read; there are 2 problems." in done.out
    answer = asked("validate")
    assert [contract["name"] for contract in answer["contracts"]] == ["a", "b"]
    assert len(answer["problems"]) == 2
    (folder / "copy.json").unlink()
    (folder / "b.json").unlink()
    one = command("contracts", "validate").out
    assert "1 contract in" in one and "can be read; there is 1 problem." in one


def test_nobody_is_asked_for_an_owner_that_was_given(source: SourceUnderTest, folder: Path) -> None:
    source.sql("CREATE TABLE a (id int PRIMARY KEY)")
    assert "name an owner" in command("contracts", "new", "--all").out
    assert "name an owner" not in command("contracts", "new", "--all", "--force", "--owner", "team:a").out


def test_a_table_that_has_moved_on_is_a_difference(source: SourceUnderTest, folder: Path) -> None:
    source.sql("CREATE TABLE a (id int PRIMARY KEY, v int)", "CREATE TABLE b (id int PRIMARY KEY)")
    command("contracts", "new", "--all")
    source.sql("ALTER TABLE a ALTER v TYPE text", "ALTER TABLE b ADD extra int")
    done = command("contracts", "diff")
    assert done.code == 1
    assert "is left out of capture: Column v of public.a is text" in done.out
    assert "note:" in done.out and "extra of public.b" in done.out
    assert "2 contracts of shop compared with their tables: 1 with a difference" in done.out
    answer = asked("diff", "--table", "public.b")
    assert [contract["name"] for contract in answer["contracts"]] == ["b"]
    assert (answer["matters"], command("contracts", "diff", "--table", "b").code) == (False, 0)
    assert command("contracts", "diff", "--table", "c").code == 2


def test_a_table_outside_the_publication_and_one_that_is_gone(source: SourceUnderTest, folder: Path) -> None:
    source.sql("CREATE TABLE a (id int PRIMARY KEY)", "CREATE TABLE b (id int PRIMARY KEY)")
    command("contracts", "new", "--all")
    assert asked("diff")["publication"] == {"name": source.slot, "exists": False}
    source.sql(f"CREATE PUBLICATION {source.slot} FOR TABLE a", "DROP TABLE b")
    source.sql("CREATE TABLE c (id int PRIMARY KEY)")
    command("contracts", "new", "--table", "c")
    found = {each["name"]: [f["check"] for f in each["findings"]] for each in asked("diff")["contracts"]}
    assert found == {"a": [], "b": ["table"], "c": ["publication"]}


def test_of_a_query_source_a_table_without_wal_is_proposed_with_its_cursor(
    source: SourceUnderTest, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REPLICA_URL", source.dsn)
    monkeypatch.delenv("OMNISUPPORT_SOURCE_DSN")
    source.sql(
        "CREATE UNLOGGED TABLE orders (id int PRIMARY KEY, twice int GENERATED ALWAYS AS (id * 2) STORED,"
        " updated_at timestamptz NOT NULL)",
        "ALTER TABLE orders REPLICA IDENTITY NOTHING",
        "CREATE TABLE events (at timestamptz, what text)",
    )
    assert command("sources", "new", "replica", "--kind", "query", "--env", "REPLICA_URL").code == 0
    done = command("contracts", "new", "--all", "--source", "replica")
    assert done.code == 1 and "1 written, 0 kept, 1 refused." in done.out
    assert "public.events has no primary key" in done.out and "REPLICA IDENTITY" not in done.out
    (contract,) = load_contracts(folder)
    assert (contract.source, contract.column_names) == ("replica", ("id", "twice", "updated_at"))
    assert contract.cursor is not None and contract.cursor.field == "updated_at"
    assert command("sources", "validate").code == 0
