"""What Dagster keeps of runs over personal values: its storage, its logs, what checks and metadata say."""

from __future__ import annotations

from pathlib import Path

import dagster as dg
import pytest

from omnisupport_ingest.definitions import build_definitions
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest_tests.layers.story import SOURCE, Change, Commit, Story
from omnisupport_ingest_tests.layers.test_privacy import (
    BADGE,
    COMMITS,
    KEYS,
    PERSON,
    document,
    holding,
    values,
)

pytestmark = pytest.mark.usefixtures("spark")

SECRET = "one secret of more than thirty-two characters"
WRONG = (
    # Rows that break rules of personal columns: a type, a pattern, a length; and one that only warns.
    Commit(40, 64, [Change("c", 6, values(6, badge=PERSON))]),
    Commit(41, 65, [Change("c", 7, values(7, email=f"{PERSON} has no address"))]),
    Commit(42, 66, [Change("c", 8, values(8, ssn=f"{PERSON} is too long to be a number"))]),
    Commit(43, 67, [Change("c", 9, values(9, name=f"{PERSON} has a long name"))]),
)


def told(story: Story) -> tuple[Workspace, list[str]]:
    """The home of ``story``, and its windows."""
    contract = document()
    contract["properties"]["ssn"]["maxLength"] = 20
    contract["properties"]["name"] |= {"maxLength": 14, "x-policy": {"maxLength": "warn"}}
    contract["x-cdc"]["quality"] = {
        "rules": [{"name": "other_mail", "expression": "email <> phone", "policy": "reject_batch"}]
    }
    story.write_contract(contract)
    story.land_chunk(Commit(5, 0, []))
    story.land_boundary(Commit(5, 0, []))
    windows = [window for commit in (*COMMITS, *WRONG) for window in story.land(commit).windows]
    settings = story.workspace.settings.model_copy(update={"pii_keys": KEYS})
    return Workspace.open(settings), sorted({*windows})


@pytest.mark.full
def test_no_byte_that_dagster_keeps_has_a_protected_value(
    recent_story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PII_TEST_ONE", SECRET)
    workspace, (first, *_, last) = told(recent_story)
    definitions = build_definitions(workspace)
    tags = {"dagster/asset_partition_range_start": first, "dagster/asset_partition_range_end": last}
    folder = workspace.home.path / "dagster"
    folder.mkdir()
    with dg.DagsterInstance.local_temp(str(folder)) as instance:

        def ran(job: str, **tags: str) -> dg.ExecuteInProcessResult:
            made = definitions.resolve_job_def(job)
            return made.execute_in_process(instance=instance, tags=tags, raise_on_error=False)

        assert ran(f"ingest_{SOURCE}", **tags).success
        assert ran(f"history_{SOURCE}").success
        audited = {each.check_name: each for each in ran(f"audit_{SOURCE}").get_asset_check_evaluations()}
        kept = audited["rules_kept"]
        assert not kept.passed and "name:max_length" in repr(kept.metadata)
        # A run that fails says why, and says no value.
        monkeypatch.delenv("PII_TEST_ONE")
        failed = ran(f"ingest_{SOURCE}", **tags)
        [why, *_] = [each.step_failure_data.error for each in failed.all_node_events if each.is_step_failure]
        assert "PII_TEST_ONE" in repr(why)
    home = workspace.home.path
    record = (home / "landing", workspace.raw(SOURCE).folder)
    found = {each for each in holding([home], PERSON, BADGE, SECRET) if not {*record} & {*each.parents}}
    assert {each.relative_to(home) for each in found} == {Path("pii_tokens.sqlite")}
    # The search is not at fault.
    assert holding(record, PERSON) and holding([folder], "name:max_length")
