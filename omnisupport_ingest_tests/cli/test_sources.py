"""``sources new``, ``list``, ``validate`` and ``diff``: definitions as a person makes and checks them."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from omnisupport_ingest.cli.contracts_new import own_folder
from omnisupport_ingest.cli.opening import open_home, open_settings
from omnisupport_ingest.contracts.documents import program_file
from omnisupport_ingest.contracts.in_force import contracts_in_force, in_force
from omnisupport_ingest.contracts.sources import load_source, sources_in_force
from omnisupport_ingest.home import Home
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.sources.postgres.capture.requests import PauseRequest
from omnisupport_ingest.sources.query.run import QuerySource
from omnisupport_ingest.windows import WindowSize
from omnisupport_ingest_tests.cli.command import command, environment
from omnisupport_ingest_tests.sources.query.tickets import contract_document

SECRET = "s3cret-word"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A project folder with a contract of the source ``desk``."""
    (tmp_path / "contracts" / "data").mkdir(parents=True)
    write_contract(tmp_path, "desk")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DESK_URL", raising=False)
    contracts = str(tmp_path / "contracts" / "data")
    with environment(home=str(tmp_path / "home"), contracts_dir=contracts):
        yield tmp_path


def write_contract(folder: Path, source: str) -> None:
    updated = {"type": "string", "x-pg-type": "timestamp with time zone", "description": "Last change."}
    document = contract_document(schema="main", updated_at=updated)
    document["required"] = ["id", "updated_at"]
    document["x-cdc"]["source"] = source
    (folder / "contracts" / "data" / f"{source}_tickets.json").write_text(json.dumps(document))


def made(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "contracts" / "sources" / f"{name}.json").read_text())
    return found


def documents(*arguments: str) -> Any:
    return json.loads(command(*arguments, "--json").out)


@pytest.mark.parametrize(
    ("options", "members"),
    [
        (("postgres_log", "--env", "DESK_URL"), {"connection": {"env": "DESK_URL"}}),
        (("postgres_log",), {"connection": {"embedded": True}}),
        (("postgres_log", "--file", "/run/desk.dsn"), {"connection": {"file": "/run/desk.dsn"}}),
        (
            ("query", "--env", "DESK_URL", "--every", "PT5M", "--compare-every", "P1D"),
            {"schedule": {"sync_every": "PT5M", "compare_every": "P1D"}},
        ),
        (("files", "--description", "Files of the desk."), {"description": "Files of the desk."}),
        (
            ("kafka", "--servers", "k:9092", "--topic", "a", "--topic", "^b"),
            {"kafka": {"topics": ["a", "^b"], "settings": {"bootstrap.servers": "k:9092"}}},
        ),
    ],
    ids=str,
)
def test_new_writes_a_definition_that_is_valid(
    folder: Path, options: tuple[str, ...], members: dict[str, Any]
) -> None:
    done = command("sources", "new", "desk", "--kind", *options)
    assert done.code == 0, done.output
    found = made(folder, "desk")
    assert {name: found[name] for name in members} == members
    path = folder / "contracts" / "sources" / "desk.json"
    assert load_source(path).kind == options[0]
    before = path.read_bytes()
    assert SECRET.encode() not in before
    # One that is there is never overwritten.
    again = command("sources", "new", "desk", "--kind", "files")
    assert again.code == 2 and "is there already" in again.err
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("query", "--env", "A", "--file", "/b"), "one of --env and --file"),
        (("kafka", "--servers", "k:9092"), "needs --servers and --topic"),
        (("query", "--env", "A", "--topic", "t"), "which no other kind has"),
        (("query",), "needs a connection"),
        (("query", "--env", f"postgresql://me:{SECRET}@h/d"), "connection.env"),
        (("query", "--file", f"postgresql://me:{SECRET}@h/d"), "connection.file"),
        (("query", "--env", "A", "--every", "soon"), "sync_every"),
    ],
    ids=str,
)
def test_new_refuses_what_cannot_be_and_writes_nothing(
    folder: Path, options: tuple[str, ...], told: str
) -> None:
    done = command("sources", "new", "desk", "--kind", *options)
    assert done.code != 0 and told in done.err
    assert SECRET not in done.output
    assert not (folder / "contracts" / "sources").exists()


def test_new_in_a_folder_without_contracts_writes_there_and_not_where_the_program_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(program_file("contracts/sources").iterdir())
    with environment(home=str(tmp_path / "home")):
        told = command("sources", "new", "desk", "--kind", "query", "--env", "DESK_URL")
    try:
        assert sorted(program_file("contracts/sources").iterdir()) == before
    finally:
        (program_file("contracts/sources") / "desk.json").unlink(missing_ok=True)
    assert told.code == 0 and load_source(tmp_path / "contracts" / "sources" / "desk.json").name == "desk"


@pytest.mark.parametrize("recorded", [False, True], ids=["new home", "home with data"])
def test_new_writes_nothing_among_the_contracts_of_a_domain_that_come_with_the_program(
    recorded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    program = program_file("contracts/social")
    before = sorted(program.rglob("*"))
    with environment(source="social"):
        if recorded:
            LandingStore(open_home(open_settings()).landing, "social").begin_epoch("first", None)
            assert in_force(open_settings()).contracts == program / "data"
        assert own_folder(open_settings()) == Path("contracts/data"), "of `contracts new` too"
        told = command("sources", "new", "shop", "--kind", "query", "--env", "SHOP_URL")
    try:
        assert sorted(program.rglob("*")) == before
    finally:
        if sorted(program.rglob("*")) != before:
            (program / "sources" / "shop.json").unlink()
            (program / "sources").rmdir()
    assert told.code == 0 and load_source(tmp_path / "contracts" / "sources" / "shop.json").name == "shop"
    assert ("contracts use" in told.err) is recorded


def test_new_in_a_checkout_writes_beside_the_contracts_in_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout = tmp_path / "checkout"
    shutil.copytree(program_file("contracts"), checkout / "contracts")
    monkeypatch.chdir(checkout)
    monkeypatch.setattr("omnisupport_ingest.contracts.documents._PACKAGE", checkout / "omnisupport_ingest")
    with environment(source="social"):
        told = command("sources", "new", "shop", "--kind", "query", "--env", "SHOP_URL")
        assert own_folder(open_settings()) == checkout / "contracts" / "social" / "data"
    assert told.code == 0 and (checkout / "contracts" / "social" / "sources" / "shop.json").exists()


def test_list_shows_every_source_with_what_has_landed_and_no_secret(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DESK_URL", f"postgresql://me:{SECRET}@h/d")
    command("sources", "new", "desk", "--kind", "query", "--env", "DESK_URL")
    write_contract(folder, "shop")
    landing = folder / "home" / "landing"
    for batch in ("one", "two"):
        (landing / "desk" / "manifests").mkdir(parents=True, exist_ok=True)
        (landing / "desk" / "manifests" / f"{batch}.json").write_text("{}")
    PauseRequest(LandingStore(landing, "desk").folder).write("maintenance")
    found = {each["name"]: each for each in documents("sources", "list")["sources"]}
    kinds = {name: each["kind"] for name, each in found.items()}
    assert kinds == {"desk": "query", "shop": "files", "support_desk": "postgres_log"}
    desk = found["desk"]
    assert (desk["batches"], desk["paused"], desk["connection"]) == (2, True, "variable DESK_URL")
    assert (desk["tables"], found["shop"]["tables"]) == (["main.tickets"], ["main.tickets"])
    assert (found["shop"]["path"], found["support_desk"]["tables"]) == (None, [])
    shown = command("sources", "list").out
    assert "2 batches landed, paused" in shown and "no contract names it" in shown
    assert SECRET not in shown


def test_validate_names_each_definition_that_cannot_work(folder: Path) -> None:
    command("sources", "new", "desk", "--kind", "query", "--env", "DESK_URL")
    command("sources", "new", "alone", "--kind", "files")
    command("sources", "new", "topics", "--kind", "kafka", "--servers", "k:9092", "--topic", "t")
    write_contract(folder, "topics")
    path = folder / "contracts" / "sources" / "topics.json"
    document = made(folder, "topics")
    document["kafka"]["settings"]["no.such.setting"] = "x"
    path.write_text(json.dumps(document))
    done = command("sources", "validate")
    assert done.code == 1
    lines = {line.partition(":")[0]: line for line in done.out.splitlines()}
    assert "DESK_URL" in lines["desk"] and "is not set" in lines["desk"]
    assert "no contract names it as x-cdc.source" in lines["alone"]
    assert "no.such.setting" in lines["topics"]
    assert "support_desk" not in lines
    told = {each["name"]: each["problem"] for each in documents("sources", "validate")["sources"]}
    assert told["support_desk"] is None and "Fix:" in told["desk"]


def test_contracts_are_held_against_the_kind_of_their_source(folder: Path) -> None:
    """What `land`, `sync` and retention refuse later is refused by `contracts validate`, and says why."""
    path = folder / "contracts" / "data" / "desk_tickets.json"
    document = json.loads(path.read_text())
    first = next(name for name in document["properties"] if name not in ("id", "updated_at"))
    document["x-cdc"] |= {
        "pii": {first: {"policy": "drop", "note": "Names."}},
        "at_rest": {"pii": "encrypted"},
        "retention": {"landing": "P7D", "raw": "P30D"},
    }
    cursor = document["x-cdc"].pop("cursor")
    path.write_text(json.dumps(document))
    # Nothing defines desk, and it is not the source of the settings: so its tables come as files.
    assert documents("contracts", "validate")["problems"] == []
    document["x-cdc"]["retention"]["net_changes"] = "P30D"
    path.write_text(json.dumps(document))
    (problem,) = [each["problem"] for each in documents("contracts", "validate")["problems"]]
    assert "desk_tickets.json at $.x-cdc.retention.net_changes" in problem and "as files" in problem
    assert "no definition of desk is in force" in problem
    assert "define desk for whole deliveries with the kind files" in command("contracts", "validate").err

    # Defined as files, they may be whole tables, which only rise; what has landed decides (`retention plan`).
    command("sources", "new", "desk", "--kind", "files")
    definition = folder / "contracts" / "sources" / "desk.json"
    assert documents("contracts", "validate")["problems"] == []
    path.write_text(json.dumps({**document, "x-cdc": document["x-cdc"] | {"cursor": cursor}}))
    (problem,) = [each["problem"] for each in documents("contracts", "validate")["problems"]]
    assert "as files (kind files in" in problem
    path.write_text(json.dumps(document))
    definition.write_text(json.dumps(made(folder, "desk") | {"events": {"order": "arrival"}}))
    (problem,) = [each["problem"] for each in documents("contracts", "validate")["problems"]]
    assert "$.x-cdc.retention.net_changes" in problem
    definition.unlink()

    command("sources", "new", "desk", "--kind", "query", "--env", "DESK_URL")
    done = command("contracts", "validate")
    assert done.code == 1 and done.err.count("sources/desk.json") == 2
    assert "$.x-cdc.cursor: names no field" in done.err and "by a cursor (kind query in " in done.err
    assert done.err.count("or define desk with the kind postgres_log") == 2

    (folder / "contracts" / "sources" / "desk.json").unlink()
    command("sources", "new", "desk", "--kind", "postgres_log", "--env", "DESK_URL")
    assert command("contracts", "validate").code == 0
    (folder / "contracts" / "sources" / "desk.json").write_text("{")
    done = command("contracts", "validate")
    assert done.code == 1 and "desk.json is not valid JSON" in done.err


def test_validate_says_that_a_log_has_no_connection_string(folder: Path) -> None:
    command("sources", "new", "desk", "--kind", "postgres_log", "--env", "DESK_URL")
    done = command("sources", "validate")
    assert done.code == 1 and "desk: The variable DESK_URL" in done.out


def test_a_definition_that_is_none_is_refused_with_its_place(folder: Path) -> None:
    (folder / "contracts" / "sources").mkdir()
    (folder / "contracts" / "sources" / "desk.json").write_text('{"name": "desk"')
    for verb in ("list", "validate", "diff"):
        done = command("sources", verb)
        assert done.code == 2 and "desk.json" in done.err


def test_diff_tells_what_database_home_and_definitions_have_otherwise(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DESK_URL", f"sqlite:///{folder / 'desk.db'}")
    base = sqlite3.connect(folder / "desk.db", isolation_level=None)
    command("sources", "new", "desk", "--kind", "query", "--env", "DESK_URL", "--compare-every", "P1D")
    (folder / "home" / "landing" / "left_behind").mkdir(parents=True)

    def differences(*name: str) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for each in documents("sources", "diff", *name)["differences"]:
            found.setdefault(each["source"], []).append(each["what"])
        return found

    told = differences()
    assert told["left_behind"] == ["it has landed, and nothing defines it any more"]
    assert told["desk"][0] == "nothing has landed" and "tickets" in told["desk"][1]
    assert set(differences("desk")) == {"desk"}

    base.execute("CREATE TABLE tickets (id INTEGER PRIMARY KEY, subject TEXT, updated_at DATETIME NOT NULL)")
    without_index = command("sources", "diff", "desk")
    assert without_index.code == 1 and "CREATE INDEX" in without_index.out
    base.execute("CREATE INDEX tickets_cursor ON tickets (updated_at, id)")
    (folder / "home" / "landing" / "desk" / "manifests").mkdir(parents=True)
    (folder / "home" / "landing" / "desk" / "manifests" / "one.json").write_text("{}")
    assert differences("desk") == {}
    assert command("sources", "diff", "desk").out == "Nothing differs.\n"
    assert command("sources", "diff", "desk").code == 0
    unknown = command("sources", "diff", "dsek")
    assert unknown.code == 2 and "Name one of: desk, support_desk" in unknown.err
    base.close()


def test_what_cannot_be_reached_is_named_by_the_variable_of_its_definition(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DESK_URL", f"host=127.0.0.1 port=1 dbname=x password={SECRET}")
    for kind in ("query", "postgres_log"):
        assert command("sources", "new", "desk", "--kind", kind, "--env", "DESK_URL").code == 0
        done = command("preflight", "desk")
        assert done.code == 1 and "correct host and port in DESK_URL" in done.out
        (folder / "contracts" / "sources" / "desk.json").unlink()
        assert "OMNISUPPORT_SOURCE_DSN" not in done.output and SECRET not in done.output
    command("sources", "new", "desk", "--kind", "query", "--env", "DESK_URL")
    monkeypatch.setenv("DESK_URL", f"sqlite:///{folder}/nowhere.db")
    done = command("sources", "diff", "desk")
    assert f"no database file at {folder}/nowhere.db" in done.out and "(DESK_URL)" in done.out


def test_a_source_is_listed_and_checked_before_it_has_a_contract(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "contracts" / "data" / "desk_tickets.json").unlink()
    monkeypatch.setenv("DESK_URL", f"sqlite:///{folder / 'desk.db'}")
    sqlite3.connect(folder / "desk.db").close()
    made = command("sources", "new", "desk", "--kind", "query", "--env", "DESK_URL")
    step = "omnisupport-ingest contracts new --all --source desk"
    assert step in made.out
    listed = command("sources", "list")
    assert listed.code == 0 and step in listed.out
    checked = command("sources", "validate")
    assert checked.code == 1 and f"Fix: {step}" in checked.out
    for verb in (("preflight", "desk"), ("sources", "diff", "desk")):
        done = command(*verb)
        assert done.code == 1 and step in done.out
    # A broken contract is told as before.
    (folder / "contracts" / "data" / "broken.json").write_text("{")
    assert command("sources", "list").code == 2


def test_a_definition_in_a_folder_without_contracts_is_in_force_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with environment(home=str(tmp_path / "home")):
        command("sources", "new", "desk", "--kind", "query", "--env", "DESK_URL")
        assert "desk" in {each["name"] for each in documents("sources", "list")["sources"]}


def test_contracts_of_a_query_source_are_proposed_and_then_it_is_ready(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps of docs/ways_in.md, for SQLite."""
    (folder / "contracts" / "data" / "desk_tickets.json").unlink()
    monkeypatch.setenv("DESK_URL", f"sqlite:///{folder / 'desk.db'}")
    base = sqlite3.connect(folder / "desk.db", isolation_level=None)
    base.execute(
        "CREATE TABLE orders (id INTEGER PRIMARY KEY, code VARCHAR(3) NOT NULL UNIQUE, odd,"
        " price DECIMAL(4, 2), updated_at TIMESTAMP NOT NULL, at TIMESTAMPTZ)"
    )
    base.execute("CREATE INDEX orders_cursor ON orders (updated_at, id)")
    base.execute("CREATE TABLE lines (id INTEGER PRIMARY KEY, version INTEGER)")
    base.execute("CREATE TABLE notes (what TEXT NOT NULL)")
    base.execute("CREATE UNIQUE INDEX some_notes ON notes (what) WHERE what > 'm'")
    base.close()
    command("sources", "new", "desk", "--kind", "query", "--env", "DESK_URL", "--compare-every", "P1D")
    without = command("contracts", "new", "--all")
    assert without.code == 2 and "--source desk" in without.err
    done = command("contracts", "new", "--all", "--source", "desk")
    assert done.code == 1 and "main.notes has no primary key" in done.out
    assert "main.lines  names no cursor" in done.out
    written = json.loads((folder / "contracts" / "data" / "orders.json").read_text())
    types = {name: each["x-pg-type"] for name, each in written["properties"].items()}
    assert types == {
        "id": "bigint",
        "code": "text",
        "odd": "text",
        "price": "numeric",
        "updated_at": "timestamp without time zone",
        "at": "text",
    }
    assert "correct x-pg-type" in written["properties"]["odd"]["description"]
    assert written["required"] == ["id", "code", "updated_at"]
    policy = written["x-cdc"]
    assert (policy["key"], policy["cursor"]["field"]) == (["id"], "updated_at")
    why = {each["column"]: each["why"] for each in policy["cursor"]["candidates"]}
    assert "no trigger does" not in why["updated_at"] and "an index begins with it" in why["updated_at"]
    unready = command("sources", "validate")
    assert unready.code == 1 and "lines.json names no cursor" in unready.out
    assert "by the reasons in its candidates" in unready.out
    (folder / "contracts" / "data" / "lines.json").unlink()
    assert command("sources", "validate").code == 0
    ready = command("preflight", "desk")
    assert ready.code == 0 and "Nothing blocks" in ready.out
    refused = command("contracts", "new", "--all", "--source", "files")
    assert refused.code == 2


def test_times_in_columns_of_text_are_named_and_a_type_that_a_person_corrects_stays(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite holds no value to a declared type, so that says nothing against the contract's."""
    path = folder / "contracts" / "data" / "desk_tickets.json"
    path.unlink()
    monkeypatch.setenv("DESK_URL", f"sqlite:///{folder / 'desk.db'}")
    base = sqlite3.connect(folder / "desk.db", isolation_level=None)
    base.execute(
        "CREATE TABLE tickets (id INTEGER PRIMARY KEY, updated_at TEXT NOT NULL, closed_on VARCHAR(30),"
        " begins TIMESTAMPTZ, dateOfBirth CLOB, seenAt TEXT, candidate TEXT, timezone TEXT, done INTEGER)"
    )
    base.execute(
        "INSERT INTO tickets (id, updated_at, begins) VALUES (1, '2026-11-20 10:00:00', '2026-11-20')"
    )
    command("sources", "new", "desk", "--kind", "query", "--env", "DESK_URL")
    assert command("contracts", "new", "--all", "--source", "desk", "--owner", "team:desk").code == 0
    path = folder / "contracts" / "data" / "tickets.json"
    document = json.loads(path.read_text())
    cursor = document["x-cdc"]["cursor"]
    numbers = ("id", "done")
    candidates = {each["column"]: each for each in cursor["candidates"] if each["column"] not in numbers}
    assert [*candidates] == ["updated_at", "closed_on", "dateOfBirth", "seenAt"]
    for each in candidates.values():
        assert not each["usable"]
        assert "correct x-pg-type to a time if it holds ISO texts in UTC" in each["why"]
    assert cursor["field"] is None

    for name in ("updated_at", "closed_on", "begins"):
        document["properties"][name]["x-pg-type"] = "timestamp with time zone"
    cursor["field"] = "updated_at"
    path.write_text(json.dumps(document))
    source = query_source(folder)
    assert source.sync().finished
    proposed = documents("contracts", "propose", "tickets")
    assert (proposed["steps"], proposed["for_a_person"]) == ([], [])

    # What a change of the table itself says is followed.
    base.execute("ALTER TABLE tickets DROP done")
    base.execute("ALTER TABLE tickets ADD done TEXT")
    assert source.sync().finished
    proposed = documents("contracts", "propose", "tickets")
    assert [each["at"] for each in proposed["steps"]] == ["properties.done.x-pg-type"]
    base.close()


def query_source(folder: Path) -> QuerySource:
    """The source ``desk``, in a home that is made if need be."""
    settings = open_settings()
    home = Home.open(folder / "home", WindowSize.parse("hourly"))
    contracts = contracts_in_force(settings)
    return QuerySource.of(sources_in_force(settings, contracts).find("desk"), contracts, home)


@pytest.mark.parametrize("named", [False, True])
def test_contracts_cannot_be_proposed_for_files(
    folder: Path, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    command("sources", "new", "boxes", "--kind", "files")
    if named:
        monkeypatch.setenv("OMNISUPPORT_SOURCE", "boxes")
    done = command("contracts", "new", "--all", "--source", "boxes")
    assert done.code == 2 and "by hand" in done.err


@pytest.mark.parametrize("name", ["boxes", "omnisupport"])
def test_a_home_of_files_alone_has_no_log(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("OMNISUPPORT_SOURCE", name)
    command("sources", "new", "boxes", "--kind", "files")
    write_contract(folder, "boxes")
    Home.open(folder / "home", WindowSize.parse("hourly"))
    found = documents("status")
    assert (found["source"], found["other_logs"]) == (None, [])
    shown = command("status").out
    assert "capture" not in shown and "PostgreSQL" not in shown
    done = command("contracts", "propose", "boxes.tickets")
    assert done.code != 2 and "has no log" not in done.output


def test_where_the_password_of_a_named_log_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DESK_URL", f"host=127.0.0.1 port=1 dbname=x password={SECRET}")
    command("sources", "new", "desk", "--kind", "postgres_log", "--env", "DESK_URL")
    done = command("source", "connect", "desk", "--print")
    assert "The password is in DESK_URL" in done.err and SECRET not in done.output


def test_the_fix_for_a_named_log_without_contracts_is_a_command_for_that_log(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DESK_URL", "host=127.0.0.1 port=1 dbname=x")
    command("sources", "new", "lognorth", "--kind", "postgres_log", "--env", "DESK_URL")

    done = command("preflight", "lognorth")

    assert "omnisupport-ingest contracts new --all --source lognorth" in done.err
    assert "OMNISUPPORT_SOURCE" not in done.err and "Note:" not in done.err


def test_no_note_is_made_on_a_source_that_does_not_exist(folder: Path) -> None:
    done = command("capture", "nope")
    assert "There is no source 'nope'." in done.err
    assert "Note:" not in done.err and "--kind query" not in done.err


@pytest.mark.parametrize(
    "refused", [("verify", "desk"), ("source", "drop", "desk"), ("source", "grants", "desk")], ids=" ".join
)
def test_no_note_is_made_on_a_source_that_has_no_log(folder: Path, refused: tuple[str, ...]) -> None:
    """It would say to add the name to `sources list`, which takes none."""
    command("sources", "new", "desk", "--kind", "query", "--env", "DESK_URL")
    done = command(*refused)
    assert done.code == 2 and "desk is a source of the kind query" in done.err
    assert "Note:" not in done.err


@pytest.mark.parametrize("how", [("--env", "DESK_URL"), ("--file", "/nowhere/desk.dsn")], ids=["env", "file"])
def test_grants_of_a_named_log_need_no_connection_if_the_database_is_given(
    folder: Path, how: tuple[str, str]
) -> None:
    command("sources", "new", "desk", "--kind", "postgres_log", *how)
    done = command("source", "grants", "desk", "--database", "shop")
    assert done.code == 0, done.output
    assert 'GRANT CONNECT ON DATABASE "shop"' in done.out and '"omnisupport_ingest_desk"' in done.out
    without = command("source", "grants", "desk")
    assert without.code == 2 and how[1] in without.err


def test_grants_of_the_own_source_need_no_connection_of_its_definition(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMNISUPPORT_SOURCE", "desk")
    command("sources", "new", "desk", "--kind", "postgres_log", "--env", "DESK_URL")
    done = command("source", "grants", "--database", "shop")
    assert done.code == 0 and 'GRANT CONNECT ON DATABASE "shop"' in done.out, done.output


@pytest.fixture
def others_only(folder: Path) -> Path:
    """The project with the one source ``desk``, which is read by a cursor. Nobody uses ``support_desk``, the
    source of the settings."""
    command("sources", "new", "desk", "--kind", "query", "--env", "DESK_URL", "--compare-every", "P1D")
    Home.open(folder / "home", WindowSize.parse("hourly"))
    return folder


@pytest.mark.parametrize(
    "without_a_name",
    [
        *("preflight", "source status", "source grants", "source grants --database x", "source restart"),
        *("source snapshot tickets", "contracts diff", "verify", "sync", "capture --once"),
    ],
)
def test_where_nobody_uses_the_own_source_a_command_without_a_name_says_to_name_one(
    others_only: Path, without_a_name: str
) -> None:
    done = command(*without_a_name.split())
    assert done.code == 2 and "No contract names the source 'support_desk'" in done.err
    assert "Fix: Name the source: desk (query)." in done.err
    assert "--source support_desk" not in done.err
    assert not (others_only / "home" / "postgres").exists(), "no server is made for a source that nobody uses"


def test_before_there_is_any_contract_the_source_is_to_be_named_as_well(others_only: Path) -> None:
    (others_only / "contracts" / "data" / "desk_tickets.json").unlink()
    command("sources", "new", "box", "--kind", "files")
    done = command("preflight")
    assert done.code == 2 and "Fix: Name the source: box (files) or desk (query)." in done.err


@pytest.mark.parametrize("used", ["by a connection", "by a definition"])
def test_an_own_source_that_is_set_up_is_told_to_get_its_contracts(
    others_only: Path, monkeypatch: pytest.MonkeyPatch, used: str
) -> None:
    if used == "by a connection":
        monkeypatch.setenv("OMNISUPPORT_SOURCE_DSN", "host=127.0.0.1 port=1 dbname=shop")
        monkeypatch.setenv("OMNISUPPORT_SOURCE", "shop")
    else:
        command("sources", "new", "shop", "--kind", "postgres_log")
        monkeypatch.setenv("OMNISUPPORT_SOURCE", "shop")
    for verb in (("preflight",), ("contracts", "diff")):
        done = command(*verb)
        assert "Fix: Make them: omnisupport-ingest contracts new --all --source shop" in done.err
    assert "shop: nothing has landed" in command("sources", "diff").out


def test_diff_leaves_out_an_own_source_that_nobody_uses(
    others_only: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DESK_URL", f"sqlite:///{others_only / 'desk.db'}")
    base = sqlite3.connect(others_only / "desk.db", isolation_level=None)
    base.execute("CREATE TABLE tickets (id INTEGER PRIMARY KEY, subject TEXT, updated_at DATETIME NOT NULL)")
    base.execute("CREATE INDEX tickets_cursor ON tickets (updated_at, id)")
    base.close()
    assert command("sources", "diff").out == "desk: nothing has landed\n"
    land_something(others_only, "desk")
    done = command("sources", "diff")
    assert (done.code, done.out) == (0, "Nothing differs.\n")
    # Who names it is answered, and what it has landed is not passed over.
    assert command("sources", "diff", "support_desk").out == "support_desk: nothing has landed\n"


def land_something(folder: Path, source: str) -> None:
    manifests = folder / "home" / "landing" / source / "manifests"
    manifests.mkdir(parents=True)
    (manifests / "one.json").write_text("{}")


def test_landing_names_the_sources_that_have_landed_or_else_those_that_are_defined(others_only: Path) -> None:
    before = command("landing", "list")
    assert before.code == 1 and "Nothing has landed from support_desk" in before.err
    assert "Defined are: desk." in before.err and "omnisupport-ingest up" in before.err
    land_something(others_only, "desk")
    after = command("landing", "list")
    assert after.code == 1 and "Fix: Name one of them: --source desk." in after.err
