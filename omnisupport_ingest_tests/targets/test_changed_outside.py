"""Two syncs at once, a target that somebody has emptied, and values that a column of it refuses."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner
from pyspark.sql import SparkSession

from omnisupport_ingest.cli.main import cli
from omnisupport_ingest.contracts.model import TargetPolicy
from omnisupport_ingest.targets import sync as module
from omnisupport_ingest.targets.columns import TargetRefused
from omnisupport_ingest.targets.note import prepare_notes
from omnisupport_ingest.targets.sync import _connect, _copy, _errors, sync_target, target_lag
from omnisupport_ingest_tests.layers.notes import CONTRACT
from omnisupport_ingest_tests.layers.story import SECOND, Story
from omnisupport_ingest_tests.layers.test_layers import run
from omnisupport_ingest_tests.targets.test_target import (
    ENV,
    UPDATE,
    Warehouse,
    counts,
    same_as_the_lake,
    story,
    sync,
    warehouse,
)
from omnisupport_ingest_tests.waiting import PATIENCE

__all__ = ["story", "warehouse"]


def test_the_first_syncs_of_two_targets_in_one_schema_do_not_wait_for_each_other(
    story: Story, warehouse: Warehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, go = threading.Event(), threading.Event()
    commit = module._Sync._commit

    def slow(self: Any, *arguments: Any) -> None:
        if self._policy.table == "slow":
            held.set()
            assert go.wait(PATIENCE)
        commit(self, *arguments)

    monkeypatch.setattr(module._Sync, "_commit", slow)
    policy = story.contract.target
    other = replace(story.contract, target=replace(policy, table="slow"))
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(sync_target, story.workspace, other)
        try:
            assert held.wait(PATIENCE)
            assert counts(sync(story)) == (40, 0, 0)
        finally:
            go.set()
        assert counts(first.result(PATIENCE)) == (40, 0, 0)
    assert len(warehouse.ask(f"SELECT table_name FROM {warehouse.schema}._omnisupport_targets")) == 2


def test_many_targets_may_begin_in_one_schema_at_the_same_moment(warehouse: Warehouse) -> None:
    policy = TargetPolicy(ENV, None, warehouse.schema, "notes")
    together = threading.Barrier(8)

    def begin(_: int) -> None:
        with closing(_connect(replace(CONTRACT, target=policy), policy)) as connection:
            together.wait(PATIENCE)
            prepare_notes(connection, policy)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(begin, range(8)))
    assert warehouse.ask(f"SELECT count(*) FROM {warehouse.schema}._omnisupport_targets") == [(0,)]


def test_a_target_that_was_emptied_is_filled_again(
    story: Story, warehouse: Warehouse, spark: SparkSession
) -> None:
    sync(story)
    warehouse.ask("TRUNCATE NOTES")
    assert target_lag(story.workspace, story.contract).rows == 40
    assert counts(sync(story)) == (40, 0, 0)
    warehouse.ask("TRUNCATE NOTES")
    story.land(UPDATE)
    run(story, spark, SECOND)
    assert target_lag(story.workspace, story.contract).rows == 40
    done = sync(story)
    assert done.whole and counts(done) == (40, 0, 0)
    same_as_the_lake(story, warehouse, spark)


def test_status_ends_with_1_while_a_target_lacks_rows(
    story: Story, warehouse: Warehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMNISUPPORT_HOME", str(story.workspace.home.path))
    monkeypatch.setenv("OMNISUPPORT_CONTRACTS_DIR", str(story.contracts))
    monkeypatch.setenv("OMNISUPPORT_WINDOW", "minutes:1")

    def status() -> tuple[int, str]:
        result = CliRunner().invoke(cli, ["target", "status"], standalone_mode=False)
        return result.return_value, result.output

    code, output = status()
    assert code == 1 and "never synced; 40 rows to write" in output
    sync(story)
    assert status()[0] == 0
    warehouse.ask("TRUNCATE NOTES")
    code, output = status()
    assert code == 1 and "40 rows" in output


@pytest.mark.parametrize(
    ("lines", "column"),
    [
        (b'1\t"a"\t987654321.5\n', "amount"),
        (b'secret\t"a"\t1\n', "id"),
        (b'1\t{"title": "secret\\\\u0000"}\t1\n', "title"),
        (b'1\t"a"\t1\tsecret, line 1, column amount: title\n', None),
    ],
)
def test_a_value_that_a_type_refuses_is_named_by_its_column_and_never_shown(
    story: Story, warehouse: Warehouse, lines: bytes, column: str | None
) -> None:
    policy = story.contract.target
    contract = replace(CONTRACT, target=policy)
    with closing(_connect(contract, policy)) as connection, connection.cursor() as cursor:
        cursor.execute("CREATE TEMP TABLE coming (id bigint, title jsonb, amount numeric(8,2))")
        with pytest.raises(TargetRefused) as refused, _errors(contract, policy):
            _copy(cursor, "COPY coming FROM STDIN", iter([lines]))
    told = str(refused.value)
    assert "secret" not in told and "987654321" not in told
    if column is None:
        assert "column" not in refused.value.problem
    else:
        assert f"column {column}" in refused.value.problem
        assert "at the source" in refused.value.fix
