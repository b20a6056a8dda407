"""Each kind of schema change, by a real ALTER while capture follows a workload: what people see of it, and
what the tables come to once their contracts follow."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from omnisupport_ingest.checks.quality_checks import schemas_as_contracted
from omnisupport_ingest.cli.contracts_changes import propose, write
from omnisupport_ingest.contracts.documents import document_text
from omnisupport_ingest.contracts.in_force import contracts_in_force
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.landing.schema_changes import SchemaChanges
from omnisupport_ingest.layers import deduped, dimensions, history, net_changes, raw
from omnisupport_ingest.layers.retyping import ask_for, waits
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.read.schema_changes import judged_changes
from omnisupport_ingest.sources.postgres.capture.parked import ParkedTables
from omnisupport_ingest.sources.postgres.catalog.live_table import read_live_tables
from omnisupport_ingest.sources.postgres.catalog.new_contract import draft
from omnisupport_ingest.sources.postgres.snapshot.requests import SnapshotRequests
from omnisupport_ingest.sources.postgres.stream import follower
from omnisupport_ingest_tests.sources.postgres.snapshot_facts import following
from omnisupport_ingest_tests.sources.postgres.source_under_test import SOURCE, SourceUnderTest
from omnisupport_ingest_tests.waiting import until

BESIDE = "beside"
"""A table that does not change, and whose rows must arrive whatever becomes of the others."""

Versions = list[tuple[Any, ...]]
"""Of the rows of a history, in order: key, the value that the change is about, what opened and closed it."""


@dataclass(frozen=True)
class Case:
    """One table and its change; ``{t}`` in a statement is its name.

    ``alters``: the change, between two writes. ``writes``: what is written by the new schema. ``told``: each
    recorded kind with its compatibility, and whether it asks for something. ``steps``: the edits that are
    proposed, each with its compatibility. ``withheld``: rules that break till the contract follows.
    ``read_again``: whether somebody has the table read. ``about``: the column that ``versions`` are about.
    ``repairs``: what somebody does at the source.
    """

    alters: Sequence[str]
    writes: Sequence[str]
    told: Sequence[tuple[str, str, bool]]
    steps: Sequence[tuple[str, str]] = ()
    withheld: Sequence[str] = ()
    read_again: bool = False
    about: str = "n"
    versions: Versions | None = None
    repairs: Sequence[str] = ()


def kept(value: Any, *last: Any, opened: str = "r") -> Versions:
    """Versions of three rows that nothing changed, and of those that came after the change."""
    return [
        (1, 10 if value is None else value, "r", None),
        (2, 20 if value is None else value, "r", None),
        (3, 30 if value is None else value, "c", None),
        *((4, each, "c", None) for each in last),
    ]


GOES_ON = {
    "added": Case(
        ["ALTER TABLE {t} ADD size int DEFAULT 7"],
        ["INSERT INTO {t} VALUES (4, 'four', 40, 'ok', 8)"],
        [("column_added", "additive", True)],
        [("properties.size", "additive")],
        about="size",
        versions=kept(7, 8),
    ),
    "added_by_row": Case(
        ["ALTER TABLE {t} ADD tag text DEFAULT md5(random()::text)"],
        ["INSERT INTO {t} VALUES (4, 'four', 40, 'ok', 'mine')"],
        [("column_added", "additive", True)],
        [("properties.tag", "additive")],
        read_again=True,
    ),
    "dropped": Case(
        ["ALTER TABLE {t} DROP m"],
        ["INSERT INTO {t} VALUES (4, 'four', 40)"],
        [("column_dropped", "breaking", True)],
        [("properties.m", "breaking")],
        versions=kept(None, 40),
    ),
    "renamed": Case(
        ["ALTER TABLE {t} RENAME n TO size"],
        ["INSERT INTO {t} VALUES (4, 'four', 40, 'ok')", "UPDATE {t} SET size = 21 WHERE id = 2"],
        [("column_renamed", "breaking", True)],
        [("properties.size", "breaking")],
        read_again=True,
        about="size",
        versions=[
            (1, None, "r", "b"),
            (1, 10, "r", None),
            (2, None, "r", "u"),
            (2, 21, "u", "b"),
            (2, 21, "r", None),
            (3, None, "c", "b"),
            (3, 30, "r", None),
            (4, 40, "c", "b"),
            (4, 40, "r", None),
        ],
    ),
    "added_again": Case(
        ["ALTER TABLE {t} DROP n, ADD n int"],
        ["INSERT INTO {t} VALUES (4, 'four', 'ok', 44)"],
        [("column_added_again", "breaking", True)],
        read_again=True,
        versions=[
            (1, 10, "r", "b"),
            (1, None, "r", None),
            (2, 20, "r", "b"),
            (2, None, "r", None),
            (3, 30, "c", "b"),
            (3, None, "r", None),
            (4, 44, "c", "b"),
            (4, 44, "r", None),
        ],
    ),
    "widened": Case(
        ["ALTER TABLE {t} ALTER n TYPE bigint"],
        ["INSERT INTO {t} VALUES (4, 'four', 5000000000, 'ok')"],
        [("column_widened", "widening", True)],
        [("properties.n.x-pg-type", "widening")],
        ["n:type"],
        versions=kept(None, 5_000_000_000),
    ),
    "narrowed": Case(
        ["ALTER TABLE {t} ALTER n TYPE smallint"],
        ["INSERT INTO {t} VALUES (4, 'four', 4, 'ok')"],
        [("column_narrowed", "none", False)],
        versions=kept(None, 4),
    ),
    "retyped": Case(
        ["ALTER TABLE {t} ALTER n TYPE text"],
        ["INSERT INTO {t} VALUES (4, 'four', 'forty', 'ok')"],
        [("column_retyped", "breaking", True)],
        [("properties.n.x-pg-type", "breaking")],
        ["n:type"],
        versions=[(1, "10", "r", None), (2, "20", "r", None), (3, "30", "c", None), (4, "forty", "c", None)],
    ),
    "retyped_by_words": Case(
        ["ALTER TABLE {t} ALTER n TYPE boolean USING n > 15"],
        ["INSERT INTO {t} VALUES (4, 'four', true, 'ok')"],
        [("column_retyped", "breaking", True)],
        [("properties.n.x-pg-type", "breaking")],
        ["n:type"],
        read_again=True,
        versions=[
            (1, "10", "r", "b"),
            (1, False, "r", None),
            (2, "20", "r", "b"),
            (2, True, "r", None),
            (3, "30", "c", "b"),
            (3, True, "r", None),
            (4, True, "c", "b"),
            (4, True, "r", None),
        ],
    ),
    "nullable": Case(
        ["ALTER TABLE {t} ALTER v DROP NOT NULL"],
        ["INSERT INTO {t} VALUES (4, NULL, 40, 'ok')"],
        [("column_nullable", "widening", True)],
        [("required", "widening")],
        ["v:not_null"],
        versions=kept(None, 40),
    ),
    "not_null": Case(
        ["ALTER TABLE {t} ALTER n SET NOT NULL"],
        ["INSERT INTO {t} VALUES (4, 'four', 40, 'ok')"],
        [("column_not_null", "none", False)],
        versions=kept(None, 40),
    ),
    "enum_added": Case(
        ["ALTER TYPE mood_of_{t} ADD VALUE 'sad'"],
        ["INSERT INTO {t} VALUES (4, 'four', 40, 'sad')"],
        [("enum_value_added", "widening", True)],
        [("properties.m.enum", "widening")],
        ["m:enum"],
        about="m",
        versions=kept("ok", "sad"),
    ),
    "enum_renamed": Case(
        ["ALTER TYPE mood_of_{t} RENAME VALUE 'ok' TO 'fine'"],
        ["INSERT INTO {t} VALUES (4, 'four', 40, 'fine')"],
        [("enum_values_changed", "widening", True)],
        [("properties.m.enum", "widening")],
        ["m:enum"],
        read_again=True,
        about="m",
        versions=[
            (1, "ok", "r", "b"),
            (1, "fine", "r", None),
            (2, "ok", "r", "b"),
            (2, "fine", "r", None),
            (3, "ok", "c", "b"),
            (3, "fine", "r", None),
            (4, "fine", "c", "b"),
            (4, "fine", "r", None),
        ],
    ),
}
"""Changes that a capture which runs goes on after."""

LEFT_OUT = {
    "other_key": Case(
        ["ALTER TABLE {t} DROP CONSTRAINT {t}_pkey, ADD PRIMARY KEY (id, n)"],
        ["INSERT INTO {t} VALUES (4, 'four', 40, 'ok')"],
        [("column_not_null", "none", False), ("key_changed", "breaking", True)],
        read_again=True,
        repairs=["ALTER TABLE {t} DROP CONSTRAINT {t}_pkey, ADD PRIMARY KEY (id)"],
    ),
    "other_name": Case(
        ["ALTER TABLE {t} RENAME TO elsewhere"],
        ["INSERT INTO elsewhere VALUES (4, 'four', 40, 'ok')"],
        [("table_renamed", "breaking", True)],
        read_again=True,
        repairs=["ALTER TABLE elsewhere RENAME TO {t}"],
    ),
    "made_anew": Case(
        ["DROP TABLE {t}; CREATE TABLE {t} (id int PRIMARY KEY, v text NOT NULL, n int, m mood_of_{t})"],
        ["INSERT INTO {t} VALUES (2, 'two', 22, 'ok'), (4, 'four', 40, 'ok')"],
        [("table_made_anew", "breaking", True)],
        read_again=True,
    ),
}
"""Changes after which capture leaves the table out, and goes on with the others."""


class Desk:
    """A captured database with one table for each case, and what is made of it."""

    def __init__(self, source: SourceUnderTest, folder: Path, spark: SparkSession, cases: dict[str, Case]):
        self.source, self.cases, self._spark = source, cases, spark
        self.workspace: Workspace
        contracts = folder / "contracts"
        contracts.mkdir()
        for name in (*cases, BESIDE):
            source.sql(
                f"CREATE TYPE mood_of_{name} AS ENUM ('ok')",
                f"CREATE TABLE {name} (id int PRIMARY KEY, v text NOT NULL, n int, m mood_of_{name})",
                f"INSERT INTO {name} VALUES (1, 'one', 10, 'ok'), (2, 'two', 20, 'ok')",
                f"ANALYZE {name}",
            )
        with source.connected() as connection:
            live = read_live_tables(connection)
        for name in (*cases, BESIDE):
            made = draft(live["public", name], source=SOURCE, name=name, owner="team:tests").document
            (contracts / f"{name}.json").write_text(document_text(made))
        source.overrides["contracts_dir"] = contracts

    def sql(self, name: str, statements: Sequence[str]) -> None:
        self.source.sql(*(each.replace("{t}", name) for each in statements))

    def captured(self) -> None:
        """As a new process does it: with the contracts as they are in force by now."""
        self.source.tables[:] = contracts_in_force(self.source.settings)
        self.source.catch_up()

    def changes_while_capture_follows(self) -> None:
        """Change every table in the middle of its workload, until capture has seen all of it."""
        self.source.tables[:] = contracts_in_force(self.source.settings)
        with following(self.source):
            # A capture that has yet to start would find some of them changed, and leave them out.
            self.sql(BESIDE, ["INSERT INTO {t} VALUES (0, 'zero', 0, 'ok')"])
            until(lambda: self.source.events("c"))
            for name, case in self.cases.items():
                self.sql(name, ["INSERT INTO {t} VALUES (3, 'three', 30, 'ok')", *case.alters, *case.writes])
            self.sql(BESIDE, ["INSERT INTO {t} VALUES (3, 'three', 30, 'ok')"])
            until(lambda: sum(each.source_table == BESIDE for each in self.source.events("c")) == 2)
            until(lambda: {each.table for each in self.recorded()} == set(self.cases), every=0.5)

    def recorded(self) -> Sequence[Any]:
        return SchemaChanges(self.source.store.folder).all()

    def taken_in(self) -> None:
        """What has landed, taken through every layer by the contracts in force."""
        self.workspace = workspace = Workspace.open(self.source.settings)
        windows = self.source.store.windows()
        for layer in (raw, deduped):
            layer.materialize(workspace, self._spark, SOURCE, windows, "run")
        for contract in workspace.contracts:
            net_changes.materialize(workspace, self._spark, contract, windows, "run")
            dimensions.update(workspace, self._spark, contract, "run")
            history.materialize(workspace, self._spark, contract, "run")

    def contract(self, name: str) -> TableContract:
        return next(each for each in self.workspace.contracts if each.name == name)

    def rows(self, name: str, *, past: bool = False) -> list[dict[str, Any]]:
        contract = self.contract(name)
        table = self.workspace.history(contract) if past else self.workspace.dimension(contract)
        found = table.open().read(self._spark, table.open().all_files())
        order = ["id", "_cdc_valid_from_position"] if past else ["id"]
        return [each.asDict(recursive=True) for each in found.orderBy(*order).collect()]

    def at_source(self, name: str) -> list[dict[str, Any]]:
        return [row for (row,) in self.source.query(f"SELECT row_to_json(t) FROM {name} t ORDER BY id")]

    def current(self, name: str) -> list[dict[str, Any]]:
        """The rows that live, with the columns of the contract."""
        rows = [each for each in self.rows(name) if not each["_cdc_is_deleted"]]
        assert not any(each["_cdc_unresolved"] or each["_cdc_exact"] for each in rows), rows
        return [{column: row[column] for column in self.contract(name).column_names} for row in rows]

    def versions(self, name: str, column: str) -> Versions:
        shown = ("id", column, "_cdc_opened_by", "_cdc_closed_by")
        rows = self.rows(name, past=True)
        # A value that the type cannot hold stands beside its column, as text.
        return [tuple((row["_cdc_exact"] or {}).get(each, row[each]) for each in shown) for row in rows]

    def withheld(self) -> dict[str, list[str]]:
        """The rules that events in quarantine break, by table."""
        table = self.workspace.quarantine(SOURCE).open()
        named = set()
        deduped_events = self.workspace.deduped(SOURCE).open()
        for window in deduped_events.windows():
            state = deduped_events.state(window)
            named |= set(state.companions) if state is not None else set()
        files = [each for each in table.all_files() if each.path in named]
        rows = table.read(self._spark, files).collect() if files else []
        found: dict[str, list[str]] = {}
        for row in rows:
            found.setdefault(row["source_table"], []).extend(row["rules"])
        return found

    def told(self) -> dict[str, list[tuple[str, str, bool]]]:
        """What people are told of each table: kind, compatibility, whether it asks."""
        found: dict[str, list[tuple[str, str, bool]]] = {}
        for each in judged_changes(self.workspace, SOURCE):
            assert bool(each.edit) == each.asks
            found.setdefault(each.change.table, []).append((each.change.kind, each.compatibility, each.asks))
        return found

    def require_checks(self) -> None:
        """The check of a table is red as long as one of its changes asks for something, and names it."""
        checks = schemas_as_contracted(self.workspace, SOURCE, [*self.cases, BESIDE])
        for name, changes in self.told().items():
            assert checks[name].passed == (not any(asks for *_, asks in changes)), name
            if not checks[name].passed:
                assert f".{name}" in checks[name].summary
        assert checks[BESIDE].passed

    def contracts_follow(self) -> dict[str, list[tuple[str, str]]]:
        """Write what is proposed for each table, and do what the documentation says beside it."""
        workspace, proposed = self.workspace, {}
        for name, case in self.cases.items():
            contract = self.contract(name)
            proposal = propose(self.source.settings, workspace, contract, every=False)
            proposed[name] = [(step.at, step.compatibility) for step in proposal.steps]
            write(contract, proposal)
            if case.read_again:
                SnapshotRequests(self.source.store.folder).write(name, "its schema changed")
        self.workspace = Workspace.open(self.source.settings)
        return proposed


@pytest.mark.slow
def test_a_capture_that_runs_goes_on_and_the_tables_are_right_once_the_contracts_follow(
    source: SourceUnderTest, tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "IDLE_SECONDS", 0.5)
    desk = Desk(source, tmp_path, spark, GOES_ON)
    desk.captured()
    desk.changes_while_capture_follows()
    desk.taken_in()
    assert desk.told() == {name: [*case.told] for name, case in GOES_ON.items()}
    assert desk.withheld() == {name: [*case.withheld] for name, case in GOES_ON.items() if case.withheld}
    desk.require_checks()
    desk.captured()
    assert ParkedTables(source.store.folder, 1).all() == {}, "a new start goes on, too"
    assert all(each.above < each.below and each.rows is not None for each in desk.recorded())

    assert desk.contracts_follow() == {name: [*case.steps] for name, case in GOES_ON.items()}
    for contract in desk.workspace.contracts:
        if waits(desk.workspace, contract) is not None:
            assert contract.name.startswith("retyped"), "readers of others need not decide"
            ask_for(desk.workspace, contract)
    desk.sql(BESIDE, ["INSERT INTO {t} VALUES (4, 'four', 40, 'ok')"])
    desk.captured()
    desk.taken_in()
    for name in (*GOES_ON, BESIDE):
        assert desk.current(name) == desk.at_source(name), name
    found = {name: desk.versions(name, case.about) for name, case in GOES_ON.items() if case.versions}
    assert found == {name: case.versions for name, case in GOES_ON.items() if case.versions}
    assert desk.withheld() == {}
    assert not any(asks for changes in desk.told().values() for *_, asks in changes)
    desk.require_checks()


@pytest.mark.slow
def test_a_table_with_another_key_or_name_is_left_out_alone_and_right_again_once_it_is_read(
    source: SourceUnderTest, tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "IDLE_SECONDS", 0.5)
    desk = Desk(source, tmp_path, spark, LEFT_OUT)
    desk.captured()
    desk.changes_while_capture_follows()
    with suppress(IngestError):
        desk.captured()
    assert set(ParkedTables(source.store.folder, 1).all()) == set(LEFT_OUT)
    desk.taken_in()
    assert desk.current(BESIDE) == desk.at_source(BESIDE), "the others go on"
    assert desk.told() == {name: [*case.told] for name, case in LEFT_OUT.items()}
    desk.require_checks()

    for name, case in LEFT_OUT.items():
        desk.sql(name, case.repairs)
    assert not any(desk.contracts_follow().values()), "no contract can say it"
    desk.captured()
    desk.taken_in()
    for name in (*LEFT_OUT, BESIDE):
        assert desk.current(name) == desk.at_source(name), name
    assert set(ParkedTables(source.store.folder, 1).all()) == set()
    anew = desk.versions("made_anew", "n")
    assert [each for each in anew if each[0] == 2] == [(2, 20, "r", "b"), (2, 22, "r", None)]
    assert [each for each in anew if each[0] == 1] == [(1, 10, "r", "b")], "it is gone"
