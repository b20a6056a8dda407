"""The demo: each domain in its own home; waiting that ends at a gap; the line that it ends with."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
import pytest
from deltalake import write_deltalake

from omnisupport_ingest.cli import demo, demo_settings
from omnisupport_ingest.cli.demo import Demo, DemoStuck, pending_or_stuck, say_what_to_do_next
from omnisupport_ingest.cli.opening import open_home, open_settings
from omnisupport_ingest.contracts.documents import program_file
from omnisupport_ingest.contracts.in_force import in_force
from omnisupport_ingest.contracts.load import load_contracts
from omnisupport_ingest.demo.domain import Domain
from omnisupport_ingest.demo.domains import DOMAINS, embedded_domain
from omnisupport_ingest.demo.social import SOCIAL
from omnisupport_ingest.demo.support_desk import SUPPORT_DESK
from omnisupport_ingest.home import Home
from omnisupport_ingest.landing.epochs import EpochFacts
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.runtime.dagster_services import DAEMON
from omnisupport_ingest.runtime.running import is_stopping
from omnisupport_ingest.runtime.supervisor import Supervisor
from omnisupport_ingest.settings import PREFIX, Settings
from omnisupport_ingest.sources.postgres.embedded.server import database_of
from omnisupport_ingest.windows import WindowSize
from omnisupport_ingest_tests.cli.command import command
from omnisupport_ingest_tests.layers.story import SOURCE, Change, Commit, Story

PROJECT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting is made, and the working directory has neither contracts nor a home."""
    for name in [each for each in os.environ if each.startswith(PREFIX)]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def a_home_of(domain: str) -> Path:
    """A home as the demo makes it, with its first epoch begun."""
    settings = open_settings(**demo_settings.settings_of(domain))
    home = open_home(settings)
    LandingStore(home.landing, settings.source).begin_epoch("first", None)
    return home.path


def test_each_domain_has_a_home_a_database_and_contracts_of_its_own(tmp_path: Path) -> None:
    found = {}
    for domain in (SUPPORT_DESK, SOCIAL):
        settings = open_settings(**demo_settings.settings_of(domain.name))
        assert settings.source == domain.name
        assert embedded_domain(settings) is domain
        assert in_force(settings).contracts == program_file(domain.contracts)
        found[domain.name] = settings.home.absolute()
    assert found == {"support_desk": tmp_path / ".omnisupport", "social": tmp_path / ".omnisupport-social"}
    assert database_of(SUPPORT_DESK.name) != database_of(SOCIAL.name)


def test_the_windows_of_a_new_home_begin_when_it_is_made_unless_a_setting_says_when(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = datetime.now(UTC)
    settings = open_settings(**demo_settings.new_home_overrides(Settings()))
    grid = open_home(settings).grid
    assert str(grid.size) == demo_settings.WINDOW
    assert grid.truncate(before) <= grid.first <= datetime.now(UTC), "windows before would look like a gap"
    monkeypatch.setenv("OMNISUPPORT_FIRST_WINDOW", "2026-01-01T00:00:00+00:00")
    assert demo_settings.new_home_overrides(Settings()) == {"window": demo_settings.WINDOW}


def test_a_home_knows_its_domain_in_every_later_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNISUPPORT_HOME", str(a_home_of("social")))
    settings = open_settings(**demo_settings.settings_of(None))
    assert embedded_domain(settings) is SOCIAL
    assert in_force(settings).contracts == program_file(SOCIAL.contracts)
    assert open_settings(**demo_settings.settings_of("social")) == settings


@pytest.mark.parametrize(("has", "asked"), [("social", "support_desk"), ("support_desk", "social")])
def test_a_home_of_another_domain_is_refused_with_the_ways_out(
    has: str, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = a_home_of(has)
    monkeypatch.setenv("OMNISUPPORT_HOME", str(home))
    done = command("demo", "--domain", asked)
    assert done.code == 3
    assert f"{home} has the source {has}, and --domain is {asked}" in done.output
    assert "Unset OMNISUPPORT_HOME" in done.output and "leave --domain out" in done.output


def test_a_domain_that_there_is_not_is_a_usage_error_that_names_those_there_are() -> None:
    done = command("demo", "--domain", "shop")
    assert done.code == 2
    assert "no domain 'shop'" in done.output and "support_desk, social" in done.output


def test_contracts_of_the_working_directory_go_before_those_of_the_program(tmp_path: Path) -> None:
    shutil.copytree(program_file("contracts/social"), tmp_path / "contracts" / "social")
    home = a_home_of("social")
    assert in_force(open_settings(home=home)).contracts == tmp_path / "contracts" / "social" / "data"


@pytest.mark.parametrize("domain", [SUPPORT_DESK, SOCIAL], ids=lambda domain: domain.name)
@pytest.mark.parametrize("named", [True, False], ids=["named", "by the setting or none"])
def test_in_a_project_with_contracts_of_its_own_the_demo_takes_those_of_the_program_and_says_so(
    domain: Domain[Any], named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command("init", ".").code == 0
    contract_of_shop(tmp_path / "contracts" / "data")
    if not named and domain is SOCIAL:
        monkeypatch.setenv("OMNISUPPORT_SOURCE", "social")
    began = list[Demo]()
    monkeypatch.setattr(demo, "run", lambda of: began.append(of) or 0)
    done = command("demo", *(("--domain", domain.name) if named else ()))
    assert done.code == 0, done.output
    assert f"contracts/data has no table of {domain.name}: the demo takes its own contracts" in done.err
    assert f"its own decision table: {demo_settings.DECISIONS} of this folder is for your tables" in done.err
    in_its_own = named and domain is SOCIAL
    assert (".omnisupport becomes its home" in done.err) is not in_its_own
    [of] = began
    assert of.domain is domain and of.settings.source == domain.name
    has = in_force(of.settings)
    assert has.contracts == program_file(domain.contracts)
    assert has.decision_table == program_file(demo_settings.DECISIONS), (
        "the copy of the project is for its own tables"
    )
    assert of.workspace.contracts.sources() == load_contracts(program_file(domain.contracts)).sources()
    monkeypatch.setenv("OMNISUPPORT_CONTRACTS_DIR", "contracts/data")
    refused = command("demo", *(("--domain", domain.name) if named else ()))
    assert refused.code == 2
    assert f"is contracts/data, which has no table of {domain.name}. Unset it" in refused.err


def contract_of_shop(folder: Path) -> None:
    """A contract of a table that no demo has."""
    document = json.loads(program_file("contracts/data/tickets.json").read_text())
    document["x-cdc"]["source"] = "shop"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tickets.json").write_text(json.dumps(document))


@pytest.fixture
def began(monkeypatch: pytest.MonkeyPatch) -> list[Demo]:
    """The demos that began, none of which starts anything."""
    found = list[Demo]()
    monkeypatch.setattr(demo, "run", lambda of: found.append(of) or 0)
    return found


def test_the_way_back_from_a_home_that_was_to_be_ones_own_leads_to_a_demo_beside_it(
    tmp_path: Path, began: list[Demo], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command("init", ".").code == 0
    done = command("demo")
    assert (
        ".omnisupport becomes its home. If that is to be for your tables: Ctrl-C, then "
        "`omnisupport-ingest clean`, then `OMNISUPPORT_HOME=.omnisupport-demo omnisupport-ingest demo`."
    ) in done.err
    assert command("clean", "--yes").code == 0 and not (tmp_path / ".omnisupport").exists()
    monkeypatch.setenv("OMNISUPPORT_HOME", ".omnisupport-demo")
    again = command("demo")
    assert again.code == 0 and "becomes its home" not in again.err
    assert began[-1].home.path == tmp_path / ".omnisupport-demo"


@pytest.mark.parametrize("project", ["the table alone", "no contract yet"])
def test_the_decision_table_of_the_folder_is_that_of_the_demo_unless_it_is_for_others_contracts(
    project: str, tmp_path: Path, began: list[Demo]
) -> None:
    if project == "the table alone":
        (tmp_path / demo_settings.DECISIONS).parent.mkdir(parents=True)
        shutil.copy(program_file(demo_settings.DECISIONS), tmp_path / demo_settings.DECISIONS)
    else:
        assert command("init", ".").code == 0
    done = command("demo")
    assert done.code == 0, done.output
    assert in_force(began[0].settings).decision_table == tmp_path / demo_settings.DECISIONS
    assert demo_settings.DECISIONS not in done.err
    assert in_force(began[0].settings).contracts == program_file(SUPPORT_DESK.contracts)


def test_a_folder_that_is_named_from_the_home_of_the_person_is_found(
    tmp_path: Path, began: list[Demo], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "person"))
    shutil.copytree(program_file("contracts/data"), tmp_path / "person" / "c")
    monkeypatch.setenv("OMNISUPPORT_CONTRACTS_DIR", "~/c")
    done = command("demo")
    assert done.code == 0, done.output
    assert in_force(began[0].settings).contracts == tmp_path / "person" / "c"


@pytest.mark.parametrize(
    ("setting", "expected"),
    [("broken", "a.json is not valid JSON"), ("missing", "missing is not a folder of contracts")],
)
def test_contracts_that_a_setting_names_and_that_cannot_be_read_have_their_own_error(
    setting: str, expected: str, tmp_path: Path, began: list[Demo], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "a.json").write_text("{")
    monkeypatch.setenv("OMNISUPPORT_CONTRACTS_DIR", setting)
    done = command("demo")
    assert done.code == 2 and expected in done.err and "has no table of" not in done.err
    assert began == [] and not (tmp_path / ".omnisupport").exists()


def test_a_contract_of_the_folder_that_may_be_of_the_domain_must_be_readable(
    tmp_path: Path, began: list[Demo]
) -> None:
    (tmp_path / "contracts" / "data").mkdir(parents=True)
    (tmp_path / "contracts" / "data" / "tickets.json").write_text("{")
    done = command("demo")
    assert done.code == 2 and "tickets.json is not valid JSON" in done.err
    assert began == [] and not (tmp_path / ".omnisupport").exists()


@pytest.mark.parametrize("fault", ["contracts of others", "broken contracts", "broken decision table"])
def test_a_demo_that_cannot_begin_again_keeps_its_home(
    fault: str, tmp_path: Path, began: list[Demo], monkeypatch: pytest.MonkeyPatch
) -> None:
    home = a_home_of("support_desk")
    if fault == "contracts of others":
        contract_of_shop(tmp_path / "shop")
        monkeypatch.setenv("OMNISUPPORT_CONTRACTS_DIR", "shop")
    elif fault == "broken contracts":
        shutil.copytree(program_file("contracts/data"), tmp_path / "contracts" / "data")
        (tmp_path / "contracts" / "data" / "agents.json").write_text("{")
    else:
        (tmp_path / demo_settings.DECISIONS).parent.mkdir(parents=True)
        (tmp_path / demo_settings.DECISIONS).write_text("nothing")
    refused = command("demo", "--fresh")
    assert refused.code == 2, refused.output
    assert (home / "home.json").exists() and began == []


def test_a_demo_that_ended_before_its_capture_began_can_begin_again_in_a_project(
    tmp_path: Path, began: list[Demo]
) -> None:
    assert command("init", ".").code == 0
    assert command("demo").code == 0
    again = command("demo", "--fresh")
    assert again.code == 0, again.output
    assert len(began) == 2


def test_a_home_that_was_captured_from_another_server_is_refused_before_anything_starts(
    began: list[Demo], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMNISUPPORT_SOURCE_DSN", "host=db.example dbname=shop")
    settings = open_settings()
    facts = EpochFacts("7300", 1, "omnisupport", Lsn(100), "shop", "16.4")
    LandingStore(open_home(settings).landing, settings.source).begin_epoch("first", facts)
    monkeypatch.delenv("OMNISUPPORT_SOURCE_DSN")
    done = command("demo")
    assert done.code == 4 and "shop was captured from a server" in done.err
    assert began == []


def test_a_home_of_other_tables_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contract_of_shop(tmp_path / "contracts" / "data")
    LandingStore(open_home(open_settings()).landing, "shop").begin_epoch("first", None)
    monkeypatch.setattr(demo, "run", lambda _: pytest.fail("nothing is started"))
    done = command("demo")
    assert done.code == 3
    assert f"{tmp_path / '.omnisupport'} has tables of shop, and none of support_desk" in done.err
    assert "OMNISUPPORT_HOME" in done.err


_OPENED = """
from omnisupport_ingest.cli import demo_settings
from omnisupport_ingest.cli.opening import open_home, open_settings
from omnisupport_ingest.contracts.in_force import in_force
from omnisupport_ingest.contracts.load import load_contracts
from omnisupport_ingest.landing.store import LandingStore
settings = open_settings(**demo_settings.settings_of("social"))
store = LandingStore(open_home(settings).landing, settings.source)
if store.current_epoch() is None:
    store.begin_epoch("first", None)
print(in_force(open_settings(home=settings.home)).contracts)
"""


def test_the_home_of_a_domain_outlives_the_folder_that_the_program_is_installed_in(tmp_path: Path) -> None:
    found = []
    for place in ("one", "other"):
        package = tmp_path / place / "omnisupport_ingest"
        if place == "one":
            shutil.copytree(PROJECT / "omnisupport_ingest", package)
            for folder in ("contracts", "reports"):
                shutil.copytree(PROJECT / folder, package / "packaged" / folder)
        else:
            (tmp_path / "one").rename(tmp_path / "other")
        done = subprocess.run(
            [sys.executable, "-c", _OPENED],
            env={**os.environ, "PYTHONPATH": str(tmp_path / place)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        found.append(Path(done.stdout.strip()))
    assert found == [
        tmp_path / place / "omnisupport_ingest/packaged/contracts/social/data" for place in ("one", "other")
    ]


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize(("arguments", "expected"), [(["DOMAIN=social"], ["--domain", "social"]), ([], [])])
def test_make_hands_the_domain_on_if_it_is_named_to_it(arguments: list[str], expected: list[str]) -> None:
    told = subprocess.run(
        [
            "make",
            "--dry-run",
            "--directory",
            str(PROJECT),
            "--assume-old=.venv/.installed",
            "demo",
            *arguments,
        ],
        env={
            # What a make around these tests was given is not for the one that they run.
            **{name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "ARGS")},
            "DOMAIN": "a.variable.of.somebody",
        },
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    [line] = [each for each in told.splitlines() if "omnisupport-ingest demo" in each]
    assert line.split()[1:] == ["demo", *expected]


@pytest.mark.slow
def test_the_social_network_is_demonstrated_end_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder without contracts, as of an installed program; composite keys go through every layer."""
    monkeypatch.setenv("OMNISUPPORT_SPARK_DRIVER_MEMORY", "1g")
    run = [sys.executable, "-m", "omnisupport_ingest.cli.main"]
    done = subprocess.run(
        [*run, "demo", "--domain", "social", "--changes", "400"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Changing the social network" in done.stdout
    assert "every content hash as before" in done.stdout
    assert "No difference." in done.stdout
    assert "OMNISUPPORT_HOME=.omnisupport-social make up" in done.stdout
    lake = tmp_path / ".omnisupport-social" / "lake" / "social"
    follows = deltalake.DeltaTable(lake / "dim_follows").to_pandas()
    assert not follows.duplicated(["follower_id", "followee_id"]).any()
    assert follows["_cdc_is_deleted"].any() and not follows["_cdc_is_deleted"].all()
    users = deltalake.DeltaTable(lake / "dim_users").to_pandas()
    closed = users[users["deleted_at"].notna()]
    assert len(closed) and closed["_cdc_is_deleted"].all()
    # Ticks that waited for news were told that the daemon ends, and were no failure.
    home = tmp_path / ".omnisupport-social"
    assert (home / "run" / f"{DAEMON}.stopping").exists() and not is_stopping(home / "run", DAEMON)
    assert "Traceback" not in (home / "logs" / f"{DAEMON}.log").read_text()
    assert (
        subprocess.run(
            [*run, "clean", "--yes"], env={**os.environ, "OMNISUPPORT_HOME": ".omnisupport-social"}
        ).returncode
        == 0
    )
    assert not (tmp_path / ".omnisupport-social").exists()


def test_a_gap_ends_the_demo_until_a_new_epoch_has_begun(tmp_path: Path) -> None:
    story = Story(tmp_path)
    for lsn in (10, 20, 30):
        batch = story.land(Commit(lsn, 1, [Change("c", lsn, {"title": "one", "body": None})]))
        if lsn == 20:
            gone = story.store.folder / "manifests" / f"{batch.batch_id}.json"
    assert pending_or_stuck(story.workspace, SOURCE).landed == 3
    gone.unlink()
    with pytest.raises(DemoStuck, match="The chain of epoch 1 is broken") as raised:
        pending_or_stuck(story.workspace, SOURCE)
    assert "capture --new-epoch" in raised.value.fix
    story.store.begin_epoch("a batch is missing", None)
    assert pending_or_stuck(story.workspace, SOURCE).landed == 1


@pytest.mark.parametrize("domain", DOMAINS.values(), ids=DOMAINS.keys())
def test_the_last_line_reads_the_table_in_any_shell(
    tmp_path: Path, domain: Domain[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    settings = Settings(home=tmp_path / "my home", source=domain.name, _env_file=None)
    home = Home.open(settings.home, WindowSize(60))
    write_deltalake(home.lake / domain.name / f"dim_{domain.shown}", pa.table({"n": ["printer on fire"]}))
    with Supervisor(home) as supervisor:
        say_what_to_do_next(Demo(settings, home, supervisor, changes=120, seed=1, again=""))
    line = capsys.readouterr().out.rstrip().splitlines()[-1].partition("Query it: ")[2]
    done = subprocess.run(
        ["/bin/sh", "-c", line], env={"PATH": "/nowhere"}, capture_output=True, text=True, check=False
    )
    assert "printer on fire" in done.stdout, done.stderr
