"""``contracts withdraw`` and ``sources retire``: said first, done in order, finished by the same call."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from omnisupport_ingest.contracts.in_force import contracts_in_force
from omnisupport_ingest.contracts.learned import LearnedColumns
from omnisupport_ingest.contracts.load import load_contract
from omnisupport_ingest.failpoints import VARIABLE
from omnisupport_ingest.home import Home
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.read.export_ledger import note_export
from omnisupport_ingest.read.verified import EQUAL, Verified, verified_of, write_verified
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.sources.postgres.catalog.publication import read_publication
from omnisupport_ingest.sources.postgres.slot.home_slot import SlotIntent
from omnisupport_ingest.storage import storage_of
from omnisupport_ingest.windows import WindowSize
from omnisupport_ingest.withdrawal import leave_publication
from omnisupport_ingest_tests.cli.command import command
from omnisupport_ingest_tests.layers.story import CONTRACT, SOURCE, Change, Commit, Story
from omnisupport_ingest_tests.sources.postgres.conftest import source
from omnisupport_ingest_tests.sources.postgres.snapshot_facts import COLUMNS
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest, contract

__all__ = ["source"]


@pytest.fixture
def folder(kept_in: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with tables ``notes`` and ``other`` of one source that comes by files, ``far`` of another."""
    story = Story(tmp_path / "told")
    for name, of_source in (("other", SOURCE), ("far", "shop")):
        document = copy.deepcopy(CONTRACT)
        document["x-cdc"] |= {"table": name, "source": of_source}
        (story.contracts / f"{name}.json").write_text(json.dumps(document))
    story.land(Commit(10, 1, [Change("c", 1, {"title": "one", "body": "text"})]))
    for table in ("dim_other", "dim_notes", "history/dim_other_history"):
        kept = story.workspace.home.lake / SOURCE / table
        kept.mkdir(parents=True)
        (kept / "part.parquet").write_bytes(b"rows")
        storage_of(kept / "part.parquet").upload([kept / "part.parquet"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMNISUPPORT_HOME", str(tmp_path / "told" / "home"))
    monkeypatch.setenv("OMNISUPPORT_CONTRACTS_DIR", str(story.contracts))
    return tmp_path / "told"


OF_OTHER = {"pattern": "other_*", "schema": "public", "table": "other"}
OF_NOTES = {"pattern": "o*", "schema": "public", "table": "notes"}
"""Patterns of files. The first one that matches counts, so the wider would take the files of the other."""


def is_kept(folder: Path) -> bool:
    """Whether anything of ``folder`` is there: here, or in the bucket behind it."""
    return folder.exists() or any(True for _ in storage_of(folder).listed(folder))


def in_force() -> set[str]:
    return {f"{each.source}.{each.name}" for each in contracts_in_force(Settings(_env_file=None))}


def test_a_withdrawn_table_leaves_its_contract_and_keeps_its_files_unless_they_are_to_go(folder: Path):
    lake = folder / "home" / "lake" / SOURCE
    done = command("contracts", "withdraw", "other", "--yes")
    assert done.code == 0, done.output
    assert f"Assets {SOURCE}/dim_other" in done.out
    assert f"{lake / 'dim_other'}: stays." in done.out
    assert in_force() == {f"{SOURCE}.notes", "shop.far"}
    moved = folder / "withdrawn" / f"{SOURCE}.other.json"
    assert load_contract(moved).name == "other"
    assert (lake / "dim_other").is_dir()
    again = command("contracts", "withdraw", "other", "--yes", "--drop-data")
    assert again.code == 0, again.output
    assert f"{lake / 'dim_other'}: DELETED." in again.out
    assert not is_kept(lake / "dim_other") and not is_kept(lake / "history" / "dim_other_history")
    assert is_kept(lake / "dim_notes")
    assert command("contracts", "withdraw", "unknown", "--yes").code == 2


def test_a_retired_source_takes_its_contracts_and_the_last_contract_stays(folder: Path):
    done = command("sources", "retire", SOURCE, "--yes", "--drop-data")
    assert done.code == 0, done.output
    assert in_force() == {"shop.far"}
    assert not is_kept(folder / "home" / "landing" / SOURCE)
    assert not is_kept(folder / "home" / "lake" / SOURCE)
    assert {each.name for each in (folder / "withdrawn").iterdir()} == {"desk.notes.json", "desk.other.json"}
    last = command("sources", "retire", "shop", "--yes")
    assert last.code == 1 and "No contract would be left" in last.err
    assert in_force() == {"shop.far"}
    assert command("sources", "retire", SOURCE, "--yes").code == 1


def test_what_was_known_of_a_tables_equality_goes_with_its_data(folder: Path):
    """A table of that name that comes back was never compared."""
    home = Home.open(folder / "home", WindowSize(1))
    by_name = {each.name: each for each in contracts_in_force(Settings(_env_file=None))}
    for name in ("notes", "other"):
        write_verified(home, by_name[name], Verified(name, EQUAL, datetime(2026, 1, 1, tzinfo=UTC)))
    ranges = folder / "home" / "verified" / SOURCE / "other.ranges.json"
    ranges.write_text("{}")
    assert command("contracts", "withdraw", "other", "--yes").code == 0
    assert verified_of(home, by_name["other"]) is not None, "its data is there"
    assert command("contracts", "withdraw", "other", "--yes", "--drop-data").code == 0
    assert verified_of(home, by_name["other"]) is None and not ranges.exists()
    assert verified_of(home, by_name["notes"]) is not None
    assert command("sources", "retire", SOURCE, "--yes", "--drop-data").code == 0
    assert not ranges.parent.exists()


def test_what_may_have_values_elsewhere_is_named(folder: Path, tmp_path: Path):
    exported, inbox = tmp_path / "notes.csv", folder / "home" / "inbox" / SOURCE
    exported.write_text("id\n")
    note_export(folder / "home", f"{SOURCE}.notes", exported, 1)
    for name in ("landed", "refused"):
        (inbox / name).mkdir(parents=True)
        (inbox / name / "day.jsonl").write_text("{}")
    (inbox / "next.jsonl").write_text("{}")
    of_table = command("contracts", "withdraw", "notes", "--yes", "--drop-data")
    assert f"Exports: {exported} stays." in of_table.out
    assert (
        "Events, with those of other tables: landing, raw, deduped events, quarantine stay." in of_table.out
    )
    of_source = command("sources", "retire", SOURCE, "--yes", "--drop-data")
    assert f"Exports: {exported} stays." in of_source.out
    assert f"{inbox / 'landed'}: DELETED." in of_source.out
    assert [each.name for each in inbox.iterdir()] == ["next.jsonl"], "nobody has read it"


def test_the_last_table_with_a_policy_is_not_withdrawn_as_its_values_would_come_uncovered(folder: Path):
    """Without its contract nothing says what of its events, which stay in deduped events, is personal."""
    file = folder / "contracts" / "other.json"
    document = json.loads(file.read_text())
    document["x-cdc"]["pii"] = {"title": {"policy": "drop", "note": "A name."}}
    file.write_text(json.dumps(document))
    refused = command("contracts", "withdraw", "other", "--yes")
    assert refused.code == 1, refused.output
    assert "policy for personal data" in refused.err
    assert in_force() == {f"{SOURCE}.notes", f"{SOURCE}.other", "shop.far"}
    assert command("contracts", "withdraw", "notes", "--yes").code == 0


def test_a_withdrawn_contract_takes_along_what_it_has_learned(folder: Path):
    """A later contract of that name does not have it, and one that is put back loses nothing."""
    home, moved = folder / "home", folder / "withdrawn" / f"{SOURCE}.other.json"
    size = {"type": ["integer", "null"], "x-pg-type": "integer", "description": "Pieces.", "default": None}
    LearnedColumns(home, SOURCE).learn("other", {"size": size})
    LearnedColumns(home, SOURCE).learn("notes", {"size": size})
    assert command("contracts", "withdraw", "other", "--yes").code == 0
    assert json.loads(moved.read_text())["properties"]["size"] == size
    assert LearnedColumns(home, SOURCE).of("other") == {}
    assert LearnedColumns(home, SOURCE).of("notes") == {"size": size}, "the contract that stays has it"
    moved.rename(folder / "contracts" / "other.json")
    (back,) = (each for each in contracts_in_force(Settings(_env_file=None)) if each.name == "other")
    assert "size" in {each.name for each in back.source_columns}


def test_nothing_is_changed_without_a_yes(folder: Path):
    refused = command("contracts", "withdraw", "other")
    assert refused.code != 0
    assert in_force() == {f"{SOURCE}.notes", f"{SOURCE}.other", "shop.far"}


def test_a_contract_whose_file_is_gone_already_is_put_back_first(folder: Path, tmp_path: Path):
    """By its file alone the command knows what table of the source it was, and what is personal in it."""
    file = folder / "contracts" / "other.json"
    LandingStore(folder / "home" / "landing", SOURCE).begin_epoch("first", None)
    assert command("contracts", "use", str(file.parent)).code == 0
    kept = file.rename(tmp_path / "other.json")
    (gone,) = json.loads(command("status", "--json").out)["contracts_gone"]
    assert (gone["source"], gone["table"]) == (SOURCE, "public.other")
    seen = " ".join(command("status").out.split())
    assert f"the contract of public.other of {SOURCE} is not in {file.parent} any more" in seen
    refused = command("contracts", "withdraw", "other", "--yes")
    assert refused.code == 1 and f"Put the contract of other back into {file.parent}" in refused.err
    kept.rename(file)
    assert command("contracts", "withdraw", "other", "--yes").code == 0
    assert json.loads(command("status", "--json").out)["contracts_gone"] == [], "it was withdrawn"


def add_contract(folder: Path, stem: str, **policy: object) -> Path:
    """A contract in the file ``stem``.json, with ``policy`` in its x-cdc."""
    document = copy.deepcopy(CONTRACT)
    document["x-cdc"] |= policy
    file = folder / "contracts" / f"{stem}.json"
    file.write_text(json.dumps(document))
    return file


def test_the_same_call_never_goes_to_another_table_that_has_the_name_at_its_source(folder: Path):
    add_contract(folder, "partner", source="partner", table="other", name="partner_other")
    left = folder / "home" / "lake" / "partner" / "dim_partner_other"
    left.mkdir(parents=True)
    assert command("contracts", "withdraw", "other", "--yes").code == 0
    again = command("contracts", "withdraw", "other", "--yes", "--drop-data")
    assert again.code == 0, again.output
    assert f"{SOURCE}.other is withdrawn already" in again.out
    assert "partner.partner_other" in in_force() and left.is_dir()
    assert not is_kept(folder / "home" / "lake" / SOURCE / "dim_other")
    doubtful = command("contracts", "withdraw", "public.other", "--yes", "--drop-data")
    assert doubtful.code == 2, doubtful.output
    assert f"contracts withdraw other --source {SOURCE} (withdrawn already: public.other)" in doubtful.err
    assert "contracts withdraw partner_other --source partner (in force: public.other)" in doubtful.err
    assert "partner.partner_other" in in_force() and left.is_dir()


def test_a_name_of_one_in_force_and_of_one_withdrawn_is_refused_until_the_source_is_named(folder: Path):
    assert command("contracts", "withdraw", "other", "--yes").code == 0
    add_contract(folder, "other", source="shop", table="other")
    doubtful = command("contracts", "withdraw", "other", "--yes", "--drop-data")
    assert doubtful.code == 2, doubtful.output
    assert "shop.other" in in_force() and is_kept(folder / "home" / "lake" / SOURCE / "dim_other")
    assert command("contracts", "withdraw", "other", "--source", "shop", "--yes").code == 0
    assert "shop.other" not in in_force()
    assert (folder / "withdrawn" / "shop.other.json").is_file()


def test_a_contract_withdrawn_again_under_its_name_leaves_the_earlier_one(folder: Path):
    withdrawn = folder / "withdrawn"
    for version in ("1.0.0", "2.0.0", "3.0.0"):
        add_contract(folder, "other", table="other", version=version)
        done = command("contracts", "withdraw", "other", "--yes")
        assert done.code == 0, done.output
    assert f"moves to {withdrawn / 'desk.other.3.json'}; what was withdrawn earlier" in done.out
    kept = [withdrawn / f"desk.other{number}.json" for number in ("", ".2", ".3")]
    assert [load_contract(each).version for each in kept] == ["1.0.0", "2.0.0", "3.0.0"]
    assert command("contracts", "withdraw", "other", "--yes", "--drop-data").code == 0
    kept[2].rename(folder / "contracts" / "other.json")
    assert command("contracts", "withdraw", "other", "--yes").code == 0
    assert kept[2].is_file() and len(list(withdrawn.iterdir())) == 3


@pytest.mark.parametrize(
    ("members", "printed", "left"),
    [
        ({}, None, {}),
        (
            {
                "kind": "kafka",
                "kafka": {"topics": ["o"], "settings": {"bootstrap.servers": "127.0.0.1:1"}},
                "tables": {"other": {"mode": "cdc"}, "notes": {"mode": "cdc"}},
            },
            'tables.other: {"mode":"cdc"} is taken out',
            {
                "kind": "kafka",
                "kafka": {"topics": ["o"], "settings": {"bootstrap.servers": "127.0.0.1:1"}},
                "tables": {"notes": {"mode": "cdc"}},
            },
        ),
        ({"events": {"tables": [OF_OTHER, OF_NOTES]}}, None, {"events": {"tables": [OF_OTHER, OF_NOTES]}}),
    ],
)
def test_the_table_leaves_the_definition_that_names_it(
    folder: Path, members: dict[str, object], printed: str | None, left: dict[str, object]
) -> None:
    """By its tables, not by what else has the name: the source, a pattern, a description."""
    (folder / "sources").mkdir()
    definition = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "name": SOURCE,
        "kind": "files",
        "description": "other",
        **members,
    }
    file = folder / "sources" / f"{SOURCE}.json"
    file.write_text(json.dumps(definition))
    command("contracts", "withdraw", "other")
    assert json.loads(file.read_text()) == definition
    done = command("contracts", "withdraw", "other", "--yes")
    assert done.code == 0, done.output
    assert "is taken out" not in done.out if printed is None else printed in done.out
    kept = {name: value for name, value in definition.items() if name not in members or name == "kind"}
    assert json.loads(file.read_text()) == kept | left
    assert command("sources", "validate").code == 0


def test_the_only_table_that_a_definition_names_is_not_withdrawn_alone(folder: Path) -> None:
    (folder / "sources").mkdir()
    definition = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "name": SOURCE,
        "kind": "kafka",
        "description": "One topic.",
        "kafka": {"topics": ["o"], "settings": {"bootstrap.servers": "127.0.0.1:1"}},
        "tables": {"other": {"mode": "cdc"}},
    }
    (folder / "sources" / f"{SOURCE}.json").write_text(json.dumps(definition))
    refused = command("contracts", "withdraw", "other", "--yes")
    assert refused.code == 1, refused.output
    assert f"sources retire {SOURCE}" in refused.err and f"{SOURCE}.other" in in_force()


def test_a_table_that_another_contract_references_is_refused_and_the_place_named(folder: Path) -> None:
    reference = {"columns": ["id"], "table": "other", "name": "to_other"}
    add_contract(folder, "notes", quality={"references": [reference]})
    refused = command("contracts", "withdraw", "other", "--yes")
    assert refused.code == 1, refused.output
    assert "notes.json (x-cdc.quality.references[0], to_other)" in refused.err
    assert f"{SOURCE}.other" in in_force() and not (folder / "withdrawn").exists()
    add_contract(folder, "notes")
    assert command("contracts", "withdraw", "other", "--yes").code == 0
    assert command("contracts", "validate").code == 0


@pytest.mark.crash
@pytest.mark.parametrize(
    "point",
    [
        "contract.file.before",
        "contract.file.after",
        "contract.withdrawn.before",
        "contract.withdrawn.after",
        "lake.withdrawn.before",
        "lake.withdrawn.after",
    ],
)
def test_a_withdrawal_killed_at_its_gates_is_finished_by_the_same_call(folder: Path, point: str):
    (folder / "sources").mkdir()
    definition = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "name": SOURCE,
        "kind": "kafka",
        "description": "Events.",
        "kafka": {"topics": ["o"], "settings": {"bootstrap.servers": "127.0.0.1:1"}},
        "tables": {"other": {"mode": "cdc"}, "notes": {"mode": "cdc"}},
    }
    file = folder / "sources" / f"{SOURCE}.json"
    file.write_text(json.dumps(definition))
    arguments = ("contracts", "withdraw", "other", "--yes", "--drop-data")
    died = subprocess.run(
        [sys.executable, "-m", "omnisupport_ingest.cli.main", *arguments],
        env={**os.environ, VARIABLE: point},
        check=False,
        capture_output=True,
    )
    assert died.returncode == -9, died.stderr.decode()
    assert command(*arguments).code == 0
    assert in_force() == {f"{SOURCE}.notes", "shop.far"}
    assert [*json.loads(file.read_text())["tables"]] == ["notes"]
    assert (folder / "withdrawn" / f"{SOURCE}.other.json").is_file()
    assert not (folder / "home" / "lake" / SOURCE / "dim_other").exists()


def test_a_withdrawn_table_leaves_the_publication_and_capture_of_the_others_goes_on(
    source: SourceUnderTest,
) -> None:
    for table in ("stays", "goes"):
        source.sql(f"CREATE TABLE {table} (id int PRIMARY KEY, v text)")
        source.tables.append(contract(table, COLUMNS))
    source.catch_up()
    gone = source.tables.pop()
    with source.connected() as connection:
        assert leave_publication(connection, source.slot, gone) is None
        found = read_publication(connection, source.slot)
        assert found is not None and not found.covers(("public", "goes"))
        assert leave_publication(connection, source.slot, gone) is None, "it has left already"
    source.sql("INSERT INTO stays VALUES (1, 'one')", "INSERT INTO goes VALUES (1, 'unseen')")
    source.catch_up()
    assert {each.source_table for each in source.changes()} == {"stays"}


@pytest.fixture
def captured(source: SourceUnderTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SourceUnderTest:
    """A home with contracts ``stays`` and ``goes`` of one log, whose tables have a row each, and ``far``."""
    contracts = tmp_path / "contracts" / "data"
    contracts.mkdir(parents=True)
    own = source.settings.source
    for table, of_source in (("stays", own), ("goes", own), ("far", "f")):
        document = copy.deepcopy(CONTRACT)
        document["x-cdc"] |= {"table": table, "source": of_source}
        (contracts / f"{table}.json").write_text(json.dumps(document))
        source.sql(f"CREATE TABLE {table} (id bigint PRIMARY KEY, title text, body text)")
    assert source.home.path
    monkeypatch.chdir(tmp_path)
    for name, value in {
        "HOME": str(source.home_folder),
        "CONTRACTS_DIR": str(contracts),
        "WINDOW": "minutes:1",
        "SOURCE": source.settings.source,
        "SOURCE_DSN": source.dsn,
        "SLOT": source.slot,
        "PUBLICATION": source.slot,
    }.items():
        monkeypatch.setenv(f"OMNISUPPORT_{name}", value)
    return source


@pytest.mark.parametrize("covers", ["ALL TABLES", "TABLES IN SCHEMA public", "TABLE above"])
def test_a_table_that_cannot_leave_its_publication_alone_is_told_before_anything_is_moved(
    captured: SourceUnderTest, covers: str
) -> None:
    if captured.server_version() < 150000 and "SCHEMA" in covers:
        pytest.skip("schemas are published since PostgreSQL 15")
    captured.sql(
        "CREATE TABLE above (id bigint PRIMARY KEY, title text, body text) PARTITION BY RANGE (id)",
        "DROP TABLE goes",
        "CREATE TABLE goes PARTITION OF above FOR VALUES FROM (0) TO (100)",
        f"CREATE PUBLICATION {captured.slot} FOR {covers}",
    )
    refused = command("contracts", "withdraw", "goes")
    assert refused.code != 0 and "public.goes stays published" in refused.out
    done = command("contracts", "withdraw", "goes", "--yes")
    assert done.code == 0, done.output
    assert done.out.index("public.goes stays published") < done.out.index("The contract is in")
    assert "is not in publication" not in done.out
    (sql,) = (
        line.partition("that they have now): ")[2] for line in done.out.splitlines() if "now): " in line
    )
    captured.sql(*sql.split("; ")) if sql.startswith("BEGIN") else captured.sql(sql)
    with captured.connected() as connection:
        published = read_publication(connection, captured.slot)
    assert published is not None and {*published.tables} == {("public", "stays")}
    again = command("contracts", "withdraw", "goes", "--yes")
    assert again.code == 0 and "is not in publication" in again.out


@pytest.mark.parametrize("gone", ["refuses connections", "no such database", "variable unset", "embedded"])
def test_a_source_that_does_not_come_back_is_retired_and_the_sql_for_its_server_printed(
    captured: SourceUnderTest, monkeypatch: pytest.MonkeyPatch, gone: str
) -> None:
    definitions = Path("contracts") / "sources"
    definitions.mkdir()
    definition = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "name": "lost",
        "kind": "postgres_log",
        "description": "A database that is gone.",
        "connection": {"embedded": True} if gone == "embedded" else {"env": "LOST_DSN"},
        "log": {"slot": "lost_slot", "publication": "lost_publication"},
    }
    (definitions / "lost.json").write_text(json.dumps(definition))
    document = json.loads((Path("contracts") / "data" / "goes.json").read_text())
    document["x-cdc"] |= {"source": "lost"}
    (Path("contracts") / "data" / "lost.json").write_text(json.dumps(document))
    dsn = {"refuses connections": "postgresql://u:secret@127.0.0.1:1/lost", "no such database": captured.dsn}
    if gone in dsn:
        monkeypatch.setenv("LOST_DSN", dsn[gone].replace(captured.slot, "no_such_database"))
    landing = captured.home.landing / "lost"
    refused = command("sources", "retire", "lost")
    assert refused.code != 0 and "Publication lost_publication" in refused.out, refused.output
    assert not landing.exists(), "nothing has landed"
    LandingStore(captured.home.landing, "lost")
    SlotIntent(landing).record("lost_slot")
    done = command("sources", "retire", "lost", "--yes", "--drop-data")
    assert done.code == 0, done.output
    assert "The source does not answer: " in done.out and "secret" not in done.output
    assert "SELECT pg_drop_replication_slot('lost_slot');" in done.out
    assert 'DROP PUBLICATION IF EXISTS "lost_publication";' in done.out
    assert not landing.exists() and not (definitions / "lost.json").exists()
    assert in_force() == {f"{captured.settings.source}.{each}" for each in ("goes", "stays")} | {"f.far"}


def test_a_table_is_withdrawn_where_the_variable_of_its_source_is_not_set(captured: SourceUnderTest) -> None:
    definitions = Path("contracts") / "sources"
    definitions.mkdir()
    definition = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "name": "f",
        "kind": "postgres_log",
        "description": "A database that is gone.",
        "connection": {"env": "LOST_DSN"},
    }
    (definitions / "f.json").write_text(json.dumps(definition))
    done = command("contracts", "withdraw", "far", "--yes")
    assert done.code == 0, done.output
    assert "The source does not answer: The variable LOST_DSN" in done.out
    assert f'ALTER PUBLICATION "{captured.slot}_f" DROP TABLE "public"."far";' in done.out


def test_the_last_table_of_a_log_is_not_withdrawn_as_nobody_would_read_its_slot(
    captured: SourceUnderTest,
) -> None:
    assert command("capture", "--once").code == 0
    assert command("contracts", "withdraw", "goes", "--yes").code == 0
    own = captured.settings.source
    refused = command("contracts", "withdraw", "stays", "--yes")
    assert refused.code == 1, refused.output
    assert f"stays is the last table of {own}" in refused.err and f"sources retire {own}" in refused.err
    assert in_force() == {f"{own}.stays", "f.far"}
    assert command("sources", "retire", own, "--yes").code == 0
    assert captured.query(f"SELECT FROM pg_replication_slots WHERE slot_name = '{captured.slot}'") == []


def test_a_slot_of_a_log_without_contracts_is_a_problem_until_the_source_is_retired(
    captured: SourceUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its contracts are gone, however that came about, and the server keeps its WAL for nobody."""

    def unread() -> list[str]:
        found = json.loads(command("alarms", "--json").out)["problems"]
        return [each["fix"] for each in found if each["kind"].startswith("unread slot")]

    assert command("capture", "--once").code == 0
    assert unread() == []
    own = captured.settings.source
    for table in ("stays", "goes"):
        (Path("contracts") / "data" / f"{table}.json").unlink()
    assert command("contracts", "use", str(Path("contracts") / "data"), "--yes").code == 0
    assert unread() == [f"omnisupport-ingest sources retire {own}"]
    seen = " ".join(command("status").out.split())
    assert f"no table of {own} has a contract, and the server keeps its WAL for slot {captured.slot}" in seen
    # The same of a log that is not the home's own.
    definitions = Path("contracts") / "sources"
    definitions.mkdir()
    definition = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "name": own,
        "kind": "postgres_log",
        "description": "A database.",
        "connection": {"env": "OTHER_DSN"},
        "log": {"slot": captured.slot, "publication": captured.slot},
    }
    (definitions / f"{own}.json").write_text(json.dumps(definition))
    monkeypatch.setenv("OTHER_DSN", captured.dsn)
    monkeypatch.setenv("OMNISUPPORT_SOURCE", "f")
    assert unread() == [f"omnisupport-ingest sources retire {own}"]
    assert command("sources", "retire", own, "--yes").code == 0
    assert unread() == []
