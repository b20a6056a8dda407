"""Policies reach sealed windows whatever becomes of contracts, types and removals in between."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from omnisupport_ingest.contracts.pii_keys import keys_in_force
from omnisupport_ingest.lake.commit import WindowChange
from omnisupport_ingest.lake.ledger import LedgerUnreadable
from omnisupport_ingest.landing.manifest import StreamSpan
from omnisupport_ingest.layers.dimension import dimensions
from omnisupport_ingest.layers.events import deduped, raw
from omnisupport_ingest.layers.events.quarantine_files import QuarantineFiles
from omnisupport_ingest.layers.events.sealed_policies import SealedPolicies, apply_policies
from omnisupport_ingest.layers.removed import RAW, Removed
from omnisupport_ingest.layers.scheduling.pending import pending_windows
from omnisupport_ingest.layers.type_changes import ask_for
from omnisupport_ingest.layers.versions import RulesVersions
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.read.former_policies import former_policies
from omnisupport_ingest.retention.plan import plan_retention
from omnisupport_ingest.retention.removing import carry_out
from omnisupport_ingest.review.subject_erasure import look_up_subject
from omnisupport_ingest_tests.layers.story import FIRST, SOURCE, START, Change, Commit, Story, events
from omnisupport_ingest_tests.layers.test_privacy import KEYS, ROTATED, document
from omnisupport_ingest_tests.retention.test_killed import REMOVE, killed
from omnisupport_ingest_tests.retention.test_story import DAY

PLAIN: dict[str, Any] = dict.fromkeys(("name", "email", "badge", "phone", "ssn"))
PLAIN["body"] = {"policy": "keep"}
HASHED = {"policy": "hash"}
SUBJECT = {"people": "id", "notes": "badge"}

RUN = """
import sys
from omnisupport_ingest.layers.events.sealed_policies import SealedPolicies, apply_policies
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.settings import Settings
home, contracts, window = sys.argv[1:]
settings = Settings(
    home=home, contracts_dir=contracts, window="minutes:1", pii_keys="k1=env:PII_TEST_ONE", _env_file=None
)
apply_policies(Workspace.open(settings), "desk", [window], "run")
"""


@pytest.fixture(scope="module", autouse=True)
def keys() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PII_TEST_ONE", "one secret of more than thirty-two characters")
        patch.setenv("PII_TEST_TWO", "two secret of more than thirty-two characters")
        yield


def values(who: str) -> dict[str, str | None]:
    return {"title": "7", "name": who, "email": f"{who}@example.org", "badge": "2", "phone": who}


def by(story: Story, table: str = "notes", *, keys: str = KEYS, **policies: dict[str, str] | None) -> None:
    """Edit the contract of ``table``."""
    made = document(**{**PLAIN, **policies})
    made["x-cdc"] |= {
        "table": table,
        "retention": {"landing": "P7D", "raw": "P10D"},
        "at_rest": {"pii": "plain", "subject": "person", "subject_column": SUBJECT[table]},
    }
    (story.contracts / f"{table}.json").write_text(json.dumps(made))
    reopen(story, keys)


def reopen(story: Story, keys: str = KEYS) -> None:
    settings = story.workspace.settings.model_copy(update={"pii_keys": keys})
    story.workspace = Workspace.open(settings)
    story.store = story.workspace.landing(SOURCE)


def land(story: Story, *told: tuple[str, Commit], late: bool = False) -> None:
    """Land transactions on tables: ``late``: in a batch after all others, as a second delivery would."""
    found = [row._replace(source_table=table) for table, commit in told for row in events(commit)]
    found = [row._replace(after='{"content": "personal"}') if row.op == "m" else row for row in found]
    before, last = story._end, told[-1][1]
    end = Lsn(before.value + 1) if late else Lsn(last.lsn)
    when = START if late else START + timedelta(seconds=last.second)
    story._seal(found, StreamSpan(before, end, end, end, end.value, START if late else when, when))


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Story:
    """A window with events of two tables, and a message; it may be sealed."""
    story = Story(tmp_path_factory.mktemp("tables") / "told")
    by(story)
    by(story, "people")
    story.clock = START + timedelta(days=60)
    land(
        story,
        ("notes", Commit(10, 1, [Change("c", 1, values("ada"))])),
        ("people", Commit(11, 2, [Change("c", 2, values("eve"))])),
        ("loose", Commit(12, 3, [Change("m", None, {})])),
    )
    land(
        story,
        ("people", Commit(30, 11 * DAY, [Change("u", 2, {"title": "again", "body": "long"})])),
        ("notes", Commit(31, 11 * DAY, [Change("c", 300, {"title": "new"})])),
    )
    while windows := pending_windows(story.workspace, SOURCE).windows:
        for layer in (raw, deduped):
            layer.materialize(story.workspace, spark, SOURCE, windows, "run")
        for contract in story.workspace.contracts.of_source(SOURCE):
            dimensions.materialize(story.workspace, spark, contract, windows, "run")
    return story


@pytest.fixture(scope="module")
def sealed(closed: Story, tmp_path_factory: pytest.TempPathFactory) -> Story:
    story = closed.copied(tmp_path_factory.mktemp("sealed") / "copy")
    carry_out(story.workspace, plan_retention(story.workspace, SOURCE), removed_by="test")
    assert Removed.open(story.workspace, SOURCE).finally_sealed == {FIRST}
    return story


@pytest.fixture
def story(sealed: Story, tmp_path: Path) -> Story:
    return sealed.copied(tmp_path / "copy")


def applied(story: Story) -> None:
    apply_policies(story.workspace, SOURCE, [FIRST], "run")


def judge(story: Story, spark: SparkSession) -> None:
    reopen(story)
    for layer in (raw, deduped):
        layer.materialize(story.workspace, spark, SOURCE, [FIRST], "run")


def images(story: Story, table: str, *, withheld: bool = False) -> list[dict[str, Any] | None]:
    files = QuarantineFiles.newest(story.workspace, SOURCE)
    assert files is not None and files.deduped is not None
    of = files.of(FIRST) if withheld else files.deduped.files(FIRST)
    chosen = [file for file in of if withheld or dict(file.partition)["source_table"] == table]
    found = [row for file in chosen for row in pq.ParquetFile(file.uri).read().to_pylist()]
    if withheld:
        found = [row for row in found if row["source_table"] == table]
    return [None if row["after"] is None else json.loads(row["after"]) for row in found]


def test_what_came_while_a_contract_was_away_does_not_stay_plain(story: Story, spark: SparkSession) -> None:
    by(story, "people", email=HASHED)
    applied(story)
    contract = (story.contracts / "people.json").read_text()
    (story.contracts / "people.json").unlink()
    land(story, ("people", Commit(15, 4, [Change("u", 2, values("late"))])), late=True)
    judge(story, spark)
    assert "late@example.org" in str(images(story, "people", withheld=True))
    (story.contracts / "people.json").write_text(contract)
    reopen(story)
    assert FIRST in pending_windows(story.workspace, SOURCE).windows
    applied(story)
    assert "late@example.org" not in str(images(story, "people", withheld=True))
    hashed = keys_in_force(KEYS).current.hash_of("eve@example.org")
    assert [each and each["email"] for each in images(story, "people")] == [hashed]


def naming(story: Story, former: str, version: str) -> None:
    """Let the sealed window name ``version`` in place of the one that begins with ``former``; empty: beside
    the others."""
    snapshot = story.workspace.deduped(SOURCE).open()
    state = snapshot.state(FIRST)
    assert state is not None
    stay = [each for each in state.versions if not former or not each.startswith(former)]
    changed = replace(state, versions=(*stay, version))
    snapshot.commit([WindowChange(FIRST, (), (), changed, replaces=False)])


def test_a_contract_that_nobody_noted_is_no_reason_to_leave_others_plain(story: Story) -> None:
    with_messages(story)
    naming(story, "contract:people:", f"contract:people:{'0' * 64}")
    by(story, email=HASHED)
    applied(story)
    assert images(story, "loose") == [None] and former_policies(story.workspace, SOURCE) == []


def test_of_a_table_that_nobody_knows_accepted_events_stay_and_are_named(story: Story) -> None:
    with_messages(story)
    naming(story, "", f"contract:gone:{'0' * 64}")
    by(story, email=HASHED)
    applied(story)
    assert images(story, "loose") != [None]
    (found,) = [each for each in former_policies(story.workspace, SOURCE) if each.column == "*"]
    assert "1 sealed window with events of tables without a contract was judged by" in found.sentence
    version = story.workspace.deduped(SOURCE).open().version
    applied(story)
    assert story.workspace.deduped(SOURCE).open().version == version


def with_messages(story: Story) -> None:
    assert images(story, "loose") and images(story, "loose") != [None]


def test_what_its_types_wait_for_is_not_rewritten_before(story: Story) -> None:
    before = images(story, "notes")
    by(story, badge=HASHED)
    applied(story)
    assert images(story, "notes") == before
    # The mistake is taken back, and nothing is lost.
    by(story)
    applied(story)
    assert images(story, "notes") == before and former_policies(story.workspace, SOURCE) == []
    by(story, badge=HASHED)
    ask_for(story.workspace, story.workspace.contracts.of_source(SOURCE)[0])
    applied(story)
    (image,) = images(story, "notes")
    assert image is not None and image["badge"] == keys_in_force(KEYS).current.hash_of("2")


def test_where_its_rows_once_named_a_subject_otherwise_nobody_finds_it(story: Story) -> None:
    notes, people = story.workspace.contracts.of_source(SOURCE)
    not_searched = "tables whose sealed windows were not searched"
    assert not_searched not in str(look_up_subject(story.workspace, people, '["2"]').remains)
    by(story, badge=HASHED)
    ask_for(story.workspace, story.workspace.contracts.of_source(SOURCE)[0])
    applied(story)
    by(story)
    applied(story)
    notes, people = story.workspace.contracts.of_source(SOURCE)
    (found,) = (
        each
        for each in look_up_subject(story.workspace, people, '["2"]').remains
        if each["what"] == not_searched
    )
    assert notes.full_name in str(found) and people.full_name not in str(found)


def test_a_window_of_which_a_file_is_gone_is_left_out_and_named(
    story: Story, caplog: pytest.LogCaptureFixture
) -> None:
    snapshot = story.workspace.deduped(SOURCE).open()
    Path(snapshot.files(FIRST)[0].full_path).unlink()
    by(story, email=HASHED)
    applied(story)
    assert f"A file of the sealed window {FIRST} of {SOURCE} is gone" in caplog.text
    assert story.workspace.deduped(SOURCE).open().version == snapshot.version


def test_only_files_of_its_tables_are_rewritten(story: Story) -> None:
    by(story, email=HASHED)
    applied(story)
    by(story, email=HASHED, phone=HASHED)
    workspace, judged = story.workspace, story.workspace.deduped(SOURCE).open()
    state = judged.state(FIRST)
    assert state is not None
    policies = SealedPolicies(workspace, SOURCE, RulesVersions(workspace, SOURCE))
    rewriting = policies.rewriting(state, workspace.secrets(workspace.contracts.of_source(SOURCE)))
    assert rewriting is not None and rewriting.tables == {"notes"}
    (file,) = rewriting.accepted_in(judged.files(FIRST))
    assert dict(file.partition)["source_table"] == "notes"


def test_a_damaged_record_is_named(story: Story) -> None:
    policies = story.workspace.policies(SOURCE)

    def damaged(entries: Any) -> Any:
        rows = entries.slice(0, 1).drop_columns(["sequence"])
        at = rows.schema.get_field_index("policies")
        return rows.set_column(at, rows.schema.field(at), [["{"]])

    policies.append(damaged)
    reopen(story)
    with pytest.raises(LedgerUnreadable, match="policy_ledger cannot be read: its policies"):
        applied(story)


@pytest.mark.crash
def test_a_removal_that_was_not_finished_does_not_keep_values_plain(closed: Story, tmp_path: Path) -> None:
    story = closed.copied(tmp_path / "copy")
    killed(REMOVE, "lake.commit.after@raw_cdc_staging", story.workspace.home.path, story.contracts)
    by(story, email=HASHED)
    (removal,) = (each for each in Removed.open(story.workspace, SOURCE).unfinished if each.layer == RAW)
    assert removal.window == FIRST and FIRST in pending_windows(story.workspace, SOURCE).windows
    applied(story)
    hashed = keys_in_force(KEYS).current.hash_of("ada@example.org")
    assert [each and each["email"] for each in images(story, "notes")] == [hashed]


@pytest.mark.crash
def test_files_by_a_key_that_was_replaced_are_not_used_again(story: Story) -> None:
    by(story, email=HASHED)
    killed(RUN, "lake.commit.before@deduped_events", story.workspace.home.path, story.contracts, FIRST)
    reopen(story, ROTATED)
    applied(story)
    hashed = keys_in_force(ROTATED).current.hash_of("ada@example.org")
    assert [each and each["email"] for each in images(story, "notes")] == [hashed]
