"""Personal data by policy: what people query has protected values alone, through every layer and way."""

from __future__ import annotations

import copy
import json
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from pyspark.sql import SparkSession

from omnisupport_ingest.checks import content_checks, history_checks
from omnisupport_ingest.cli.main import cli
from omnisupport_ingest.contracts.pii_keys import PiiKeyMissing, keys_in_force
from omnisupport_ingest.lake.sweep import sweep
from omnisupport_ingest.layers.events.event_files import EventFiles
from omnisupport_ingest.layers.histories import history
from omnisupport_ingest.layers.scheduling.pending import pending_windows
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.position import Lsn, Position
from omnisupport_ingest.read.as_of import Reading
from omnisupport_ingest.read.brought_forward import MovedOn
from omnisupport_ingest.read.compare import Sample, compare
from omnisupport_ingest.read.dimension_rows import DimensionRows
from omnisupport_ingest.read.export import Format, write_rows
from omnisupport_ingest.read.protected_rows import protect_rows
from omnisupport_ingest.read.replay_preview import preview_replay
from omnisupport_ingest.review.erasing import erase, key_text
from omnisupport_ingest_tests.layers.story import (
    CONTRACT,
    FIRST,
    SECOND,
    SOURCE,
    Change,
    Commit,
    Story,
)
from omnisupport_ingest_tests.recovery.pipeline import run_layers

WINDOWS = (FIRST, SECOND)
PERSON = "zebrafinch"
"""In every value of a column with a policy, but for numbers."""

BADGE = "918273645"
EMAIL = f"{PERSON}@example.org"
KEYS = "k1=env:PII_TEST_ONE"
ROTATED = "k2=env:PII_TEST_TWO,k1=env:PII_TEST_ONE"

COLUMNS = {
    "id": ("integer", "bigint", None),
    "title": ("string", "text", None),
    "body": ("string", "text", None),
    "name": ("string", "text", {"policy": "mask", "mask": "name"}),
    "email": ("string", "text", {"policy": "hash"}),
    "badge": ("integer", "bigint", {"policy": "hash"}),
    "phone": ("string", "text", {"policy": "tokenize"}),
    "ssn": ("string", "text", {"policy": "drop"}),
}


def document(**policies: dict[str, str] | None) -> dict[str, Any]:
    made = copy.deepcopy(CONTRACT)
    made["properties"] = {
        name: {"type": kind if name == "id" else [kind, "null"], "x-pg-type": pg, "description": name}
        for name, (kind, pg, _) in COLUMNS.items()
    }
    made["properties"]["email"]["pattern"] = "@"
    told = {name: policy for name, (_, _, policy) in COLUMNS.items() if policy} | policies
    made["x-cdc"]["pii"] = {name: {"note": "A test.", **policy} for name, policy in told.items() if policy}
    return made


def values(number: int, **told: str | None) -> dict[str, str | None]:
    return {
        "title": f"title {number}",
        "body": "long",
        "name": f"{PERSON} {number}",
        "email": EMAIL,
        "badge": BADGE,
        "phone": f"+41 {PERSON} {number}",
        "ssn": f"{PERSON}-{number}",
        # No contract names it.
        "other": PERSON,
    } | told


def without(row: dict[str, str | None], *names: str) -> dict[str, str | None]:
    return {name: value for name, value in row.items() if name not in names}


MANY = range(100, 200)
COMMITS = (
    Commit(10, 1, [Change("c", number, values(number)) for number in (1, 2, 3, 4)]),
    # Enough for the kernels that take whole columns.
    Commit(11, 2, [Change("c", number, values(number)) for number in MANY]),
    Commit(12, 3, [Change("c", 5, values(5, email=f"{PERSON} has no address"))]),
    Commit(20, 61, [Change("u", 1, without(values(10), "email", "ssn"), unchanged=("email", "ssn"))]),
    Commit(21, 62, [Change("d", 2)]),
    Commit(22, 63, [Change("d", 3), Change("c", 30, without(values(3), "email"), ("email",), moved_from=3)]),
)


@pytest.fixture(scope="module", autouse=True)
def keys() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PII_TEST_ONE", "one secret of more than thirty-two characters")
        patch.setenv("PII_TEST_TWO", "two secret of more than thirty-two characters")
        patch.setenv("OMNISUPPORT_PII_KEYS", KEYS)
        yield


def opened(folder: Path, keys: str | None = KEYS, contract: dict[str, Any] | None = None) -> Story:
    """The story that was told in ``folder``, under these keys and this contract."""
    story = Story.__new__(Story)
    story.contracts = folder / "contracts"
    if contract is not None:
        story.write_contract(contract)
    from omnisupport_ingest_tests.recovery.pipeline import open_workspace

    settings = open_workspace(folder).settings.model_copy(update={"pii_keys": keys})
    story.workspace = Workspace.open(settings)
    story.store = story.workspace.landing(SOURCE)
    return story


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Story:
    folder = tmp_path_factory.mktemp("privacy") / "told"
    story = Story(folder)
    story.write_contract(document())
    for commit in COMMITS:
        story.land(commit)
    story = opened(folder)
    run(story, spark)
    return story


@pytest.fixture
def story(told: Story, tmp_path: Path) -> Story:
    """A copy of ``told``, to be gone on with."""
    shutil.copytree(told.workspace.home.path.parent, tmp_path / "told")
    return opened(tmp_path / "told")


def run(story: Story, spark: SparkSession, *, replay: bool = False) -> None:
    run_layers(story.workspace, spark, WINDOWS, replay=replay)
    history.materialize(story.workspace, spark, story.contract, "run")


def protected_tables(story: Story) -> list[Path]:
    raw = story.workspace.raw(SOURCE).folder
    return [table.folder for table in story.workspace.tables() if table.folder != raw]


def holding(folders: Sequence[Path], *texts: str) -> set[Path]:
    """The files below ``folders``, of whatever version, that have one of ``texts``: as bytes or in a
    value."""
    found = set()
    for file in (each for folder in folders for each in folder.rglob("*") if each.is_file()):
        content = file.read_bytes()
        if file.suffix == ".parquet":
            table = pq.read_table(file, partitioning=None)
            content += repr((table.to_pylist(), table.schema.metadata)).encode()
        if any(text.encode() in content for text in texts):
            found.add(file)
    return found


def rows(story: Story, spark: SparkSession, table: str = "dimension") -> dict[int, dict[str, Any]]:
    snapshot = getattr(story.workspace, table)(story.contract).open()
    return {row["id"]: row.asDict() for row in snapshot.read(spark, snapshot.all_files()).collect()}


def hashes(story: Story) -> dict[str, str]:
    found = {}
    for table in story.workspace.tables():
        snapshot = table.open()
        for window in snapshot.windows():
            state = snapshot.state(window)
            assert state is not None
            found[f"{table.spec.path} {window}"] = state.checkpoint.content_hash
    return found


def source_folder(folder: Path) -> Path:
    made = folder / "source"
    made.mkdir(parents=True)
    return made


def source_rows(folder: Path, shown: Sequence[tuple[int, dict[str, str | None]]]) -> Path:
    """Rows of the source as ``write_text_rows`` writes them."""
    columns = {
        name: [str(number) if name == "id" else row.get(name) for number, row in shown] for name in COLUMNS
    }
    path = folder / "source.parquet"
    pq.write_table(pa.table({name: pa.array(each, pa.string()) for name, each in columns.items()}), path)
    return path


# 5 is in quarantine, so what the lake has of it is not known.
AT_SOURCE = [
    (1, values(10, ssn=f"{PERSON}-1")),
    (4, values(4)),
    (30, values(3)),
    *((number, values(number)) for number in MANY),
]


# --- what is where -------------------------------------------------------------------------------


def test_no_byte_of_what_people_query_has_a_protected_value(told: Story) -> None:
    assert holding(protected_tables(told), PERSON, BADGE) == set()
    lake = told.workspace.home.lake
    raw = told.workspace.raw(SOURCE).folder
    # Not the search is at fault: raw and landing are the record, and hold them.
    assert holding([raw], PERSON) and holding([told.workspace.home.landing], PERSON)
    assert {file for file in holding([lake], PERSON, BADGE) if raw not in file.parents} == set()


def test_the_dimension_shows_what_the_policies_leave(told: Story, spark: SparkSession) -> None:
    found, key = rows(told, spark), keys_in_force(KEYS).current
    assert "ssn" not in found[1]
    first = found[4]
    assert (first["title"], first["name"]) == ("title 4", "z*** 4***")
    assert (first["email"], first["badge"]) == (key.hash_of(EMAIL), key.hash_of(BADGE))
    assert told.workspace.tokens.value_of(first["phone"]) == f"+41 {PERSON} 4"
    # Sent in other events or under another key, a value is the same everywhere.
    assert {row["email"] for number, row in found.items() if number != 5} == {key.hash_of(EMAIL)}
    assert (found[1]["title"], found[1]["_cdc_unresolved"] or []) == ("title 10", [])
    assert found[2]["_cdc_is_deleted"] and found[30]["name"] == "z*** 3***"
    meets = content_checks.meets_contract(told.workspace, spark, told.contract)
    assert meets.passed, meets.summary
    for check in (history_checks.open_rows_are_current_state, history_checks.versions_do_not_overlap):
        assert check(told.workspace, spark, told.contract).passed


def test_only_their_owner_may_read_landing_and_raw(told: Story) -> None:
    for folder in (told.workspace.home.landing, told.workspace.raw(SOURCE).folder):
        for path in (folder, *folder.rglob("*")):
            mode = stat.S_IMODE(path.stat().st_mode)
            if path.parent.name == "_delta_log":
                # In a folder that only its owner enters.
                continue
            assert not mode & 0o077, f"{path} has mode {mode:o}"
    assert stat.S_IMODE(told.workspace.home.path.stat().st_mode) == 0o700
    assert stat.S_IMODE(told.workspace.tokens.path.stat().st_mode) == 0o600


def test_whatever_shows_rows_shows_protected_ones(told: Story, spark: SparkSession, tmp_path: Path) -> None:
    dimension = [file.uri for file in told.workspace.dimension(told.contract).open().all_files()]
    for form in Format:
        out = tmp_path / f"rows.{form.value}"
        write_rows(told.contract, dimension, out, form, deleted=True)
    assert holding([tmp_path], PERSON, BADGE) == set()
    files = EventFiles.newest(told.workspace, SOURCE)
    assert files is not None
    state = Reading((told.contract,), Position(1, Lsn(13), 0), files).table(spark, told.contract)
    assert {row["name"] for row in state.where("id < 3").collect()} == {"z*** 1***", "z*** 2***"}
    assert PERSON not in repr(state.collect())


@pytest.mark.parametrize(
    "command",
    [
        ["landing", "tail", "--source", SOURCE, "-n", "1000"],
        ["quarantine", "list", "--json"],
        ["quarantine", "show", "--values"],
        ["export", "notes", "--out"],
        ["status", "--json"],
        ["tail", "notes", "-n", "1000"],
        ["tail", "notes", "-n", "1000", "--json"],
        ["explain", "notes", "--key", "4"],
        ["explain", "notes", "--key", "4", "--json"],
        ["explain", "notes", "--key", "5", "--column", "email", "--json"],
        ["windows", "--json"],
        ["ledger", "--json"],
        ["pii", "scan", "--json"],
        ["report", "--json"],
    ],
    ids=" ".join,
)
def test_no_command_prints_a_protected_value(told: Story, tmp_path: Path, command: list[str]) -> None:
    folder = told.workspace.home.path.parent
    environment = {
        "OMNISUPPORT_HOME": str(folder / "home"),
        "OMNISUPPORT_CONTRACTS_DIR": str(folder / "contracts"),
        "OMNISUPPORT_WINDOW": "minutes:1",
        "OMNISUPPORT_SOURCE": SOURCE,
    }
    runner = CliRunner(env=environment)
    if command[:2] == ["quarantine", "show"]:
        listed = json.loads(runner.invoke(cli, ["quarantine", "list", "--json"]).stdout)
        command = [*command, listed["sources"][0]["listed"][0]["id"]]
    if command[-1] == "--out":
        command = [*command, str(tmp_path / "notes.csv")]
    done = runner.invoke(cli, command)
    assert done.exit_code == 0, done.output
    assert PERSON not in done.output and BADGE not in done.output
    assert holding([tmp_path], PERSON, BADGE) == set()
    if command[0] == "landing":
        assert "z*** 4***" in done.output


# --- pure functions ------------------------------------------------------------------------------


def test_a_replay_and_a_rebuild_come_to_the_same_hashes(story: Story, spark: SparkSession) -> None:
    before, shown = hashes(story), rows(story, spark)
    run(story, spark, replay=True)
    assert hashes(story) == before
    preview = preview_replay(story.workspace, spark, SOURCE, list(WINDOWS), [story.contract])
    assert preview.changes_nothing
    shutil.rmtree(story.workspace.home.lake)
    again = opened(story.workspace.home.path.parent)
    run(again, spark)
    assert hashes(again) == before
    assert {number: row["phone"] for number, row in rows(again, spark).items()} == {
        number: row["phone"] for number, row in shown.items()
    }


def test_another_key_makes_every_window_again_and_both_can_be_told_meanwhile(
    story: Story, spark: SparkSession, tmp_path: Path
) -> None:
    before, folder = rows(story, spark), story.workspace.home.path.parent
    assert pending_windows(story.workspace, SOURCE).nothing
    rotated = opened(folder, ROTATED)
    assert pending_windows(rotated.workspace, SOURCE).windows == WINDOWS
    assert rows(rotated, spark)[4]["email"].startswith("k1:")
    # What the lake has under the former key is known for what it is.
    assert compared(rotated, source_folder(tmp_path), AT_SOURCE) == {}
    run(rotated, spark)
    assert pending_windows(rotated.workspace, SOURCE).nothing
    after = rows(rotated, spark)
    assert {row["email"].partition(":")[0] for row in after.values() if row["email"]} == {"k2"}
    assert {number: row["phone"] for number, row in after.items()} == {
        number: row["phone"] for number, row in before.items()
    }
    state = rotated.workspace.deduped(SOURCE).open().state(FIRST)
    assert state is not None and state.checkpoint.changed_by == ("key of hashes",)


def test_without_the_key_nothing_is_judged_and_the_fix_is_named(story: Story, spark: SparkSession) -> None:
    folder, before = story.workspace.home.path.parent, hashes(story)
    without_key = opened(folder, None)
    # Looking works; a run says what is missing.
    assert pending_windows(without_key.workspace, SOURCE).windows == WINDOWS
    with pytest.raises(PiiKeyMissing, match="OMNISUPPORT_PII_KEYS names no key") as missing:
        run(without_key, spark)
    assert "openssl rand" in missing.value.fix
    assert hashes(without_key) == before


def test_no_secret_is_in_any_file_of_the_home(told: Story) -> None:
    home = told.workspace.home.path
    assert holding([home], os.environ["PII_TEST_ONE"]) == set()
    assert holding([home], told.workspace.secrets([told.contract]).keys.current.check())


def test_a_lost_map_of_tokens_is_seen_and_every_token_made_again(story: Story, spark: SparkSession) -> None:
    before = rows(story, spark)[4]["phone"]
    story.workspace.tokens.path.unlink()
    again = opened(story.workspace.home.path.parent)
    assert pending_windows(again.workspace, SOURCE).windows == WINDOWS
    run(again, spark)
    found = rows(again, spark)
    assert found[4]["phone"] != before and again.workspace.tokens.value_of(before) is None
    assert len({row["phone"] for row in found.values() if row["phone"]}) == len(MANY) + 5 - 1
    assert pending_windows(again.workspace, SOURCE).nothing


def test_a_policy_that_comes_later_leaves_no_byte_once_old_files_are_swept(
    story: Story, spark: SparkSession
) -> None:
    folder = story.workspace.home.path.parent
    plain = opened(folder, contract=document(name=None, ssn={"policy": "keep"}))
    run(plain, spark)
    assert rows(plain, spark)[4]["ssn"] == f"{PERSON}-4"
    assert holding(protected_tables(plain), PERSON)
    again = opened(folder, contract=document())
    run(again, spark)
    assert rows(again, spark)[4].get("ssn") is None
    for table in again.workspace.tables():
        sweep(table, timedelta(0))
    assert holding(protected_tables(again), PERSON, BADGE) == set()


# --- comparing and erasing -----------------------------------------------------------------------


def compared(
    story: Story, folder: Path, shown: Sequence[tuple[int, dict[str, str | None]]]
) -> dict[str, tuple[str, ...]]:
    """The columns in which rows differ, by key; without the row whose event is in quarantine."""
    expected = source_rows(folder, shown)
    protect_rows(story.contract, expected, story.workspace.secrets([story.contract]))
    assert not holding([expected.parent], PERSON, BADGE) and stat.S_IMODE(expected.stat().st_mode) == 0o600
    files = [file.uri for file in story.workspace.dimension(story.contract).open().all_files()]
    found = compare(story.contract, expected, files)
    return {each.key: each.columns for each in found.examples if each.key != "5"}


def test_verify_compares_what_the_policies_leave(told: Story, tmp_path: Path) -> None:
    assert compared(told, tmp_path, AT_SOURCE) == {}


@pytest.mark.parametrize(
    ("column", "told_value", "seen"),
    [
        ("email", "other@example.org", True),
        ("email", None, True),
        ("badge", "1", True),
        ("phone", "other", True),
        ("name", "Other 4", True),
        # What the lake cannot show cannot differ.
        ("name", "zorro 4", False),
        ("ssn", "other", False),
    ],
)
def test_verify_sees_another_value_wherever_the_lake_would_show_it(
    told: Story, tmp_path: Path, column: str, told_value: str | None, seen: bool
) -> None:
    shown = [(number, row | {column: told_value} if number == 4 else row) for number, row in AT_SOURCE]
    assert compared(told, tmp_path, shown) == ({"4": (column,)} if seen else {})


def test_newer_events_are_compared_whichever_key_their_hashes_are_by(
    story: Story, spark: SparkSession, tmp_path: Path
) -> None:
    """Another key is in force, and no window is made again yet: the lake has hashes by the former one."""
    rotated = opened(story.workspace.home.path.parent, ROTATED)
    contract = rotated.contract
    at_lsn = [(number, values(number)) for number in (1, 2, 3, 4, *MANY)]
    files = EventFiles.newest(rotated.workspace, SOURCE)
    assert files is not None
    told = ([file.uri for file in each] for each in (files.accepted(contract), files.withheld))
    sample = Sample(None, *map(tuple, told), 1, 20)
    table = rotated.workspace.dimension(contract)
    dimension = [file.uri for file in table.open().all_files()]
    found = {}
    for name, other in (("same", {}), ("other", {"email": "other@example.org"})):
        folder = source_folder(tmp_path / name)
        shown = [(number, row | other if number == 1 else row) for number, row in at_lsn]
        expected = source_rows(folder, shown)
        protect_rows(contract, expected, rotated.workspace.secrets([contract]))
        compared = MovedOn(contract, expected, dimension, sample, False, table.folder).compare(spark)
        assert compared.forwarded == 4
        found[name] = {each.key: each.columns for each in compared.examples if each.key != "5"}
    # The update of row 1 did not send its address.
    assert found == {"same": {}, "other": {"1": ("email",)}}


def test_recovery_takes_no_row_of_a_protected_table_for_the_same(told: Story, tmp_path: Path) -> None:
    files = [file.uri for file in told.workspace.dimension(told.contract).open().all_files()]
    held = DimensionRows(told.contract, files, tmp_path)
    assert not held.same(source_rows(tmp_path, AT_SOURCE[:-1]))
    assert held.unmet() == [key_text([str(MANY[-1])]), key_text(["5"])]
    held.close()


def test_what_is_erased_is_gone_with_its_protected_values(story: Story, spark: SparkSession) -> None:
    before = rows(story, spark)[2]
    erase(story.workspace, story.contract, key_text(["2"]), erased_by="ana", why="request 7")
    run(story, spark)
    row = rows(story, spark)[2]
    assert [row[name] for name in ("title", "name", "email", "badge", "phone")] == [None] * 5
    for table in story.workspace.tables():
        sweep(table, timedelta(0))
    # The token and the title are of that row alone.
    assert holding(protected_tables(story), before["phone"], 'title 2"', "title 2'") == set()
    assert holding(protected_tables(story), rows(story, spark)[4]["phone"])
    assert holding(protected_tables(story), PERSON, BADGE) == set()
