"""A stricter policy reaches sealed windows: what judging them again would have given, from what is stored."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from pyspark.sql import SparkSession

from omnisupport_ingest.checks.lake_checks import counts_add_up
from omnisupport_ingest.cli.main import cli
from omnisupport_ingest.contracts.pii_keys import keys_in_force
from omnisupport_ingest.lake.commit import WindowChange
from omnisupport_ingest.lake.sweep import sweep
from omnisupport_ingest.layers.dimension import net_changes
from omnisupport_ingest.layers.events import deduped, raw
from omnisupport_ingest.layers.events.quarantine_files import QuarantineFiles
from omnisupport_ingest.layers.events.sealed_policies import PoliciesChanged, apply_policies
from omnisupport_ingest.layers.histories import history
from omnisupport_ingest.layers.plan import RequestedWork
from omnisupport_ingest.layers.removed import Removed
from omnisupport_ingest.layers.reviews import ReviewLedger
from omnisupport_ingest.layers.scheduling.pending import pending_windows, standing_of_windows
from omnisupport_ingest.layers.window_update import LayerRun
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.read.compare import compare
from omnisupport_ingest.read.protected_rows import protect_rows
from omnisupport_ingest.retention.plan import plan_retention
from omnisupport_ingest.retention.removing import carry_out
from omnisupport_ingest.review.deciding import decide
from omnisupport_ingest.review.quarantined import quarantined
from omnisupport_ingest_tests.layers.story import FIRST, SECOND, SOURCE, START, Change, Commit, Story
from omnisupport_ingest_tests.layers.test_privacy import (
    AT_SOURCE,
    COMMITS,
    EMAIL,
    KEYS,
    PERSON,
    document,
    hashes,
    holding,
    rows,
    source_folder,
    source_rows,
    without,
)
from omnisupport_ingest_tests.retention.test_killed import killed
from omnisupport_ingest_tests.retention.test_story import DAY, take_all

SEALED = {FIRST, SECOND}

PLAIN = dict.fromkeys(("name", "email", "badge", "phone", "ssn"))
NEWEST: dict[str, str | None] = {
    "title": "newest",
    "body": "long",
    "name": "New",
    "email": "new@example.com",
    "badge": "1",
    "phone": "2",
    "ssn": "3",
}
STRICT: dict[str, Any] = {
    "name": {"policy": "mask", "mask": "name"},
    "email": {"policy": "hash"},
    "badge": None,
    "phone": {"policy": "tokenize"},
    "ssn": {"policy": "drop"},
}

RUN = """
import sys
from omnisupport_ingest.layers.events.sealed_policies import apply_policies
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.settings import Settings
home, contracts, *windows = sys.argv[1:]
settings = Settings(
    home=home, contracts_dir=contracts, window="minutes:1", pii_keys="k1=env:PII_TEST_ONE", _env_file=None
)
apply_policies(Workspace.open(settings), "desk", windows, "run")
"""


@pytest.fixture(scope="module", autouse=True)
def keys() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PII_TEST_ONE", "one secret of more than thirty-two characters")
        patch.setenv("OMNISUPPORT_PII_KEYS", KEYS)
        yield


def by(story: Story, **policies: dict[str, str] | None) -> None:
    """Edit the contract of the story."""
    made = document(**{**PLAIN, **policies})
    made["x-cdc"]["retention"] = {"landing": "P7D", "raw": "P10D"}
    story.write_contract(made)
    reopen(story)


def reopen(story: Story) -> None:
    settings = story.workspace.settings.model_copy(update={"pii_keys": KEYS})
    story.workspace = Workspace.open(settings)


def run(story: Story, spark: SparkSession) -> None:
    take_all(story, spark)
    history.materialize(story.workspace, spark, story.contract, "run")


def seal(story: Story) -> None:
    carry_out(story.workspace, plan_retention(story.workspace, SOURCE), removed_by="test")
    assert Removed.open(story.workspace, SOURCE).sealed == SEALED


@pytest.fixture(scope="module")
def landed(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Story:
    """Two windows whose values are plain, and may be sealed; in quarantine is one event that was discarded.
    The newest window has nothing personal."""
    story = Story(tmp_path_factory.mktemp("landed") / "told")
    by(story)
    story.store, story.clock = story.workspace.landing(SOURCE), START + timedelta(days=60)
    story.land(*COMMITS)
    story.land(Commit(30, 11 * DAY, [Change("c", 300, NEWEST)]))
    run(story, spark)
    (row,) = quarantined(story.workspace, SOURCE, ReviewLedger.open(story.workspace, SOURCE))
    decide(story.workspace, SOURCE, "discard", [row.event], reviewer="ana", why="looked at")
    reopen(story)
    run(story, spark)
    return story


@pytest.fixture(scope="module")
def sealed(landed: Story, tmp_path_factory: pytest.TempPathFactory) -> Story:
    story = landed.copied(tmp_path_factory.mktemp("sealed") / "copy")
    seal(story)
    return story


@pytest.fixture
def story(sealed: Story, tmp_path: Path) -> Story:
    return sealed.copied(tmp_path / "copy")


def images(story: Story, *, withheld: bool = False) -> list[tuple[int, int, str, dict[str, Any] | None, int]]:
    """Position, operation, image and hash of the events of the sealed windows, in order."""
    files = QuarantineFiles.newest(story.workspace, SOURCE)
    assert files is not None and files.deduped is not None
    of = files.of if withheld else files.deduped.files
    found = [row for window in SEALED for file in of(window) for row in pq.read_table(file.uri).to_pylist()]
    return sorted(
        (
            row["commit_lsn"],
            row["ordinal"],
            row["op"],
            None if row["after"] is None else json.loads(row["after"]),
            row["event_hash"],
        )
        for row in found
    )


def values_of(story: Story, column: str, *, withheld: bool = False) -> set[str | None]:
    found = (image for *_, image, _ in images(story, withheld=withheld) if image)
    return {image[column] for image in found if column in image}


def swept(story: Story) -> None:
    for table in story.workspace.tables():
        sweep(table, timedelta(0))


def compared(story: Story, folder: Path) -> dict[str, tuple[str, ...]]:
    """The columns that differ from the source's, by key; without the row whose event is in quarantine."""
    expected = source_rows(source_folder(folder), [*AT_SOURCE, (300, NEWEST)])
    protect_rows(story.contract, expected, story.workspace.secrets([story.contract]))
    files = [file.uri for file in story.workspace.dimension(story.contract).open().all_files()]
    return {
        each.key: each.columns
        for each in compare(story.contract, expected, files).examples
        if each.key != "5"
    }


def kept(story: Story) -> dict[str, int]:
    return dict(standing_of_windows(story.workspace, SOURCE).former)


def test_a_stricter_policy_reaches_what_retention_has_sealed(
    landed: Story, story: Story, spark: SparkSession, tmp_path: Path
) -> None:
    home = story.workspace.home.path
    assert holding([home], PERSON)
    by(story, **STRICT)
    assert {*pending_windows(story.workspace, SOURCE).windows} >= SEALED
    run(story, spark)
    assert pending_windows(story.workspace, SOURCE).nothing and kept(story) == {}
    swept(story)
    # The map of tokens is the record of what they stand for.
    assert holding([home], PERSON) == {story.workspace.tokens.path}
    shown = rows(story, spark)
    key = keys_in_force(KEYS).current
    assert "ssn" not in shown[4]
    assert (shown[4]["title"], shown[4]["name"]) == ("title 4", "z*** 4***")
    assert {row["email"] for number, row in shown.items() if number not in (5, 300)} == {key.hash_of(EMAIL)}
    assert story.workspace.tokens.value_of(shown[4]["phone"]) == f"+41 {PERSON} 4"
    assert counts_add_up(story.workspace, SOURCE).passed
    assert compared(story, tmp_path) == {}

    # The same as where nothing is sealed, and all is judged again from raw.
    other = landed.copied(tmp_path / "other")
    shutil.copy(story.workspace.tokens.path, other.workspace.tokens.path)
    by(other, **STRICT)
    run(other, spark)
    assert not Removed.open(other.workspace, SOURCE).sealed
    assert images(story) == images(other)
    for one, two in zip(*(images(each, withheld=True) for each in (story, other)), strict=True):
        assert one == two
    record = other.workspace.raw(SOURCE).spec.path
    mine, its = (
        {name: each for name, each in hashes(of).items() if not name.startswith(record)}
        for of in (story, other)
    )
    assert mine == its

    # A second run changes nothing; nor does a history that is made anew.
    before, version = hashes(story), story.workspace.deduped(SOURCE).open().version
    net_changes.materialize(story.workspace, spark, story.contract, sorted(SEALED), "run", replay=True)
    assert hashes(story) == before
    apply_policies(story.workspace, SOURCE, sorted(SEALED), "run")
    assert story.workspace.deduped(SOURCE).open().version == version
    made = story.workspace.history(story.contract).open().state("")
    again = history.materialize(story.workspace, spark, story.contract, "run", replay=True)
    assert made is not None and again.content_hash == made.checkpoint.content_hash


def test_what_cannot_be_computed_stays_is_named_and_may_be_dropped(
    story: Story, spark: SparkSession, tmp_path: Path
) -> None:
    by(story, **STRICT)
    run(story, spark)
    hashed, tokens = values_of(story, "email"), values_of(story, "phone")
    by(story, name={"policy": "hash"}, email={"policy": "tokenize"}, phone=None, ssn=None)
    run(story, spark)
    # Nothing is hashed or tokenized twice, and nothing comes back.
    assert values_of(story, "email") == hashed and values_of(story, "phone") == tokens
    assert all(each is None or "***" in each for each in values_of(story, "name"))
    assert values_of(story, "ssn") == set()
    # In quarantine, where nobody can release it, it is emptied.
    assert values_of(story, "email", withheld=True) == values_of(story, "name", withheld=True) == {None}
    assert kept(story) == {
        "notes.name mask:name": 2,
        "notes.email hash": 2,
        "notes.phone tokenize": 2,
    }
    # A comparison with the source says so, too.
    different = compared(story, tmp_path)
    assert {"name", "email", "phone"} <= {*different["1"]}
    runner = CliRunner(
        env={
            "OMNISUPPORT_HOME": str(story.workspace.home.path),
            "OMNISUPPORT_CONTRACTS_DIR": str(story.contracts),
            "OMNISUPPORT_WINDOW": "minutes:1",
            "OMNISUPPORT_SOURCE": SOURCE,
        }
    )
    shown = runner.invoke(cli, ["pii", "show"])
    says = "desk.notes.name: 2 sealed windows have values by mask:name, and the contract says hash; they stay"
    assert says in shown.output
    assert "by tokenize, and the contract says keep; nothing brings these back" in shown.output
    (listed, *_) = json.loads(runner.invoke(cli, ["pii", "show", "--json"]).stdout)["sealed"]
    assert listed == {
        "table": "desk.notes",
        "column": "email",
        "policy": "hash",
        "wanted": "tokenize",
        "windows": 2,
    }
    assert "3 columns of sealed windows by former ones" in runner.invoke(cli, ["status"]).output

    by(story, name={"policy": "mask", "mask": "text"}, email={"policy": "drop"}, phone=None)
    run(story, spark)
    assert values_of(story, "name") == {"***", None} - ({None} - values_of(story, "name"))
    assert values_of(story, "email") == set()
    swept(story)
    assert holding([story.workspace.home.lake], *{each for each in hashed if each}) == set()
    assert kept(story) == {"notes.phone tokenize": 2}


def test_what_came_to_quarantine_by_a_laxer_policy_is_emptied_not_hashed_twice(
    story: Story, spark: SparkSession
) -> None:
    by(story, phone={"policy": "hash"})
    run(story, spark)
    hashed = values_of(story, "phone")
    by(story)
    run(story, spark)
    assert values_of(story, "phone") == hashed and kept(story) == {"notes.phone hash": 2}
    late = Commit(
        15,
        4,
        [Change("u", 4, {"title": "late", "phone": "late-number", "name": "Late", "other": "late-other"})],
    )
    story.land_again(late)
    reopen(story)
    run(story, spark)
    assert "late-number" in values_of(story, "phone", withheld=True)
    by(story, phone={"policy": "hash"}, name={"policy": "mask", "mask": "name"})
    run(story, spark)
    assert values_of(story, "phone") == hashed and kept(story) == {}
    assert values_of(story, "phone", withheld=True) == {None}
    # The event is still withheld, and so are the columns that it carried.
    assert "phone" in rows(story, spark)[4]["_cdc_unresolved"]
    assert "L***" in values_of(story, "name", withheld=True)
    swept(story)
    record = story.workspace.raw(SOURCE).folder
    for text in ("late-number", "late-other"):
        assert holding([story.workspace.home.lake], text) == holding([record], text) != set()


def test_a_run_by_other_contracts_does_not_add_to_a_window_that_was_rewritten_meanwhile(
    story: Story, spark: SparkSession
) -> None:
    former = story.workspace
    story.land_again(Commit(15, 4, [Change("u", 4, {"title": "late", "email": "late@example.org"})]))
    raw.materialize(former, spark, SOURCE, [FIRST], "run")
    by(story, email={"policy": "hash"})
    apply_policies(story.workspace, SOURCE, sorted(SEALED), "run")
    begun = deduped._Update(
        former.deduped(SOURCE).open(),
        LayerRun(former, spark, SOURCE, "run", RequestedWork(replay=False)),
        watermark=None,
    )
    with pytest.raises(PoliciesChanged, match="since it began"):
        begun.job(FIRST)
    run(story, spark)
    assert values_of(story, "email") == {keys_in_force(KEYS).current.hash_of(EMAIL)}
    assert "late@example.org" not in str(images(story, withheld=True))


def test_a_window_of_an_earlier_version_is_known_once_a_run_has_noted_the_contracts(
    story: Story, spark: SparkSession
) -> None:
    shutil.rmtree(story.workspace.policies(SOURCE).folder)
    reopen(story)
    apply_policies(story.workspace, SOURCE, [], "run")
    by(story, email={"policy": "hash"})
    run(story, spark)
    assert values_of(story, "email") == {keys_in_force(KEYS).current.hash_of(EMAIL)}


def test_of_a_window_by_a_contract_that_nobody_noted_values_are_never_guessed(
    story: Story, spark: SparkSession
) -> None:
    by(story, email={"policy": "hash"})
    run(story, spark)
    forgetting(story)
    by(story, email={"policy": "hash"}, name={"policy": "mask", "mask": "name"}, ssn={"policy": "drop"})
    before = values_of(story, "email")
    run(story, spark)
    assert values_of(story, "email") == before and values_of(story, "ssn") == set()
    assert kept(story) == {f"notes.{column} unknown": 2 for column in ("email", "name")}
    assert values_of(story, "email", withheld=True) == {None}
    by(story, email={"policy": "drop"}, name={"policy": "mask", "mask": "text"}, ssn={"policy": "drop"})
    run(story, spark)
    swept(story)
    assert "notes.email unknown" not in kept(story) and "notes.name unknown" not in kept(story)
    assert holding([story.workspace.home.lake], EMAIL) == set()


def forgetting(story: Story) -> None:
    """Lose what is known of the policies of the sealed windows, as if an earlier version had sealed them by
    contracts that are gone."""
    shutil.rmtree(story.workspace.policies(SOURCE).folder)
    table = story.workspace.deduped(SOURCE)
    snapshot = table.open()
    changes = []
    for window in sorted(SEALED):
        state = snapshot.state(window)
        assert state is not None
        versions = tuple(
            f"contract:notes:{'0' * 64}" if each.startswith("contract:") else each
            for each in state.versions
            if not each.startswith("policies:")
        )
        changes.append(WindowChange(window, (), (), replace(state, versions=versions), replaces=False))
    snapshot.commit(changes)


@pytest.mark.crash
@pytest.mark.parametrize(
    "point",
    [
        "lake.ledger.after@policy_ledger",
        "lake.commit.after@policy_ledger",
        "lake.place.before@deduped_events",
        "lake.commit.before@quarantine",
        "lake.commit.after@quarantine",
        "lake.commit.before@deduped_events",
        "lake.commit.after@deduped_events",
    ],
)
def test_a_run_killed_while_it_applies_a_policy_is_ended_by_the_next(
    story: Story, spark: SparkSession, point: str
) -> None:
    by(story, **STRICT)
    killed(RUN, point, story.workspace.home.path, story.contracts, *sorted(SEALED))
    reopen(story)
    run(story, spark)
    assert pending_windows(story.workspace, SOURCE).nothing
    assert values_of(story, "email") == {keys_in_force(KEYS).current.hash_of(EMAIL)}
    files = QuarantineFiles.newest(story.workspace, SOURCE)
    assert files is not None and all(files.unsettled(window) is None for window in SEALED)
    swept(story)
    assert holding([story.workspace.home.path], PERSON) == {story.workspace.tokens.path}
    assert without(rows(story, spark)[4], "phone")["name"] == "z*** 4***"
