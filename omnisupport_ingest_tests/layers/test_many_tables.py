"""What a run over one table costs does not follow how many others a source has: counted, never timed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark import cloudpickle

from omnisupport_ingest.contracts.model import Subject, TableContract
from omnisupport_ingest.definitions import build_definitions
from omnisupport_ingest.defs import keys
from omnisupport_ingest.defs.jobs import JobContent
from omnisupport_ingest.lake import schema
from omnisupport_ingest.layers.events import deduped, raw
from omnisupport_ingest.layers.events.judging_rules import contracts_needed
from omnisupport_ingest.layers.scheduling.pending import pending_windows, standing_of_windows
from omnisupport_ingest_tests.layers.story import FIRST, SOURCE
from omnisupport_ingest_tests.layers.three_tables import ThreeTables

FEW, MANY = 20, 60
"""How many tables there are besides; a step of checks has fewer than either."""

Batches = Iterable[pa.RecordBatch]


class InProcess:
    """Runs Spark's tasks in this process, one after another, and counts the bytes that they are sent."""

    def __init__(self) -> None:
        self.sent = 0
        self._tasks = 0
        self._work: Callable[[Batches], Iterator[pa.RecordBatch]] | None = None

    def range(self, _start: int, end: int, _step: int, _tasks: int) -> InProcess:
        self._tasks = end
        return self

    def mapInArrow(self, work: object, _schema: str) -> InProcess:
        pickled = cloudpickle.dumps(work)  # type: ignore[no-untyped-call]
        self.sent += len(pickled)
        self._work = cloudpickle.loads(pickled)
        return self

    def collect(self) -> list[dict[str, Any]]:
        assert self._work is not None
        numbers = (pa.RecordBatch.from_pydict({"id": [number]}) for number in range(self._tasks))
        return [row for each in numbers for batch in self._work([each]) for row in batch.to_pylist()]


def desk_of(folder: Path, tables: int, **policies: object) -> ThreeTables:
    """A home with ``tables`` more tables, of which nothing lands."""
    desk = ThreeTables(folder)
    for number in range(tables):
        desk.put_contract(f"other_{number:02}", **policies)
    desk.reopen()
    return desk


def sent_to_judge(desk: ThreeTables) -> int:
    """The bytes that the tasks which judge one new event of ``notes`` are sent."""
    spark = InProcess()
    desk.land_of(1, "notes")
    raw.materialize(desk.workspace, spark, SOURCE, [FIRST], "run")  # type: ignore[arg-type]
    before = spark.sent
    [made] = deduped.materialize(desk.workspace, spark, SOURCE, [FIRST], "run")  # type: ignore[arg-type]
    assert made.deduped == 1
    return spark.sent - before


def test_a_task_that_judges_is_sent_the_contracts_of_the_tables_in_its_files_alone(tmp_path: Path) -> None:
    few, many = (
        sent_to_judge(desk_of(tmp_path / "few_", FEW)),
        sent_to_judge(desk_of(tmp_path / "many", MANY)),
    )
    # A number may take a byte more.
    assert 0 < many < few + 100


def test_a_protected_contract_is_sent_besides_as_it_protects_what_no_contract_describes(
    tmp_path: Path,
) -> None:
    contracts = desk_of(tmp_path, 2).workspace.contracts.of_source(SOURCE)
    plain = [each.name for each in contracts_needed(contracts, [frozenset({contracts[0].full_name})])]
    assert plain == [contracts[0].name]
    assert contracts_needed(contracts, [None]) == contracts
    protected = [*contracts[:2], *(replace(each, subject=Subject("id", "id")) for each in contracts[2:4])]
    names = [each.name for each in contracts_needed(protected, [frozenset({"public.unknown"})])]
    assert names == [contracts[2].name]


def planned(desk: ThreeTables) -> tuple[int, int]:
    """Steps and their outputs in Dagster's plan of a run over ``notes``."""
    job = build_definitions(desk.workspace).resolve_job_def(keys.ingest_job_name(SOURCE))
    content = JobContent.of_job(SOURCE, job).visiting(["notes"])
    run = job.get_subset(asset_selection=content.assets, asset_check_selection=content.checks)
    nodes = run.graph.nodes
    return len(nodes), sum(len(node.definition.output_defs) for node in nodes)


def test_dagster_plans_as_many_outputs_of_a_run_over_one_table_whatever_tables_there_are(
    tmp_path: Path,
) -> None:
    assert planned(desk_of(tmp_path / "few", FEW)) == planned(desk_of(tmp_path / "many", MANY))


def test_a_nested_type_of_a_system_column_is_worked_out_once_for_all_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contracts = desk_of(tmp_path, FEW).workspace
    found: list[object] = []
    nullable = schema._nullable

    def counted(of_type: object) -> object:
        if isinstance(of_type, dict):
            found.append(of_type)
        return nullable(of_type)

    monkeypatch.setattr(schema, "_nested_types", {})
    monkeypatch.setattr(schema, "_nullable", counted)
    first, *others = contracts.contracts.of_source(SOURCE)
    schema.retyped('{"fields": []}', contracts.net_changes(first).spec.schema)
    once = len(found)
    for each in others:
        schema.retyped('{"fields": []}', contracts.net_changes(each).spec.schema)
    assert len(found) == once > 0


def test_a_look_takes_the_hash_of_no_contract(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes through every column and rule, and a run looks nine times."""
    desk = desk_of(tmp_path, FEW)
    desk.land_of(1, "notes")
    hashed: list[str] = []
    original = TableContract.__hash__

    def counted(contract: TableContract) -> int:
        hashed.append(contract.name)
        return original(contract)

    monkeypatch.setattr(TableContract, "__hash__", counted)
    assert pending_windows(desk.workspace, SOURCE).tables
    standing_of_windows(desk.workspace, SOURCE)
    assert not hashed
