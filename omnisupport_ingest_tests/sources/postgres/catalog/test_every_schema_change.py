"""Each kind of schema change, by a real ALTER while capture follows a workload: what people see of it, and
what the tables come to once their contracts follow."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from omnisupport_ingest.checks.quality_checks import schemas_as_contracted
from omnisupport_ingest.cli.contracts_changes import propose, write
from omnisupport_ingest.contracts.documents import document_text
from omnisupport_ingest.contracts.in_force import contracts_in_force
from omnisupport_ingest.contracts.model import BLOCK, PINNED, TableContract
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.landing.schema_changes import SchemaChanges
from omnisupport_ingest.layers.dimension import dimensions, net_changes
from omnisupport_ingest.layers.events import deduped, raw
from omnisupport_ingest.layers.histories import history
from omnisupport_ingest.layers.type_changes import ask_for, waits
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.read.schema_changes import judged_changes
from omnisupport_ingest.sources.postgres.capture.parked import ParkedTables
from omnisupport_ingest.sources.postgres.catalog.live_table import read_live_tables
from omnisupport_ingest.sources.postgres.catalog.new_contract import draft
from omnisupport_ingest.sources.postgres.snapshot.requests import SnapshotRequests
from omnisupport_ingest.sources.postgres.stream import follower
from omnisupport_ingest_tests.cli.command import command, environment
from omnisupport_ingest_tests.sources.postgres.snapshot_facts import following
from omnisupport_ingest_tests.sources.postgres.source_under_test import SOURCE, SourceUnderTest
from omnisupport_ingest_tests.waiting import until

BESIDE = "beside"
"""A table that does not change, and whose rows must arrive whatever becomes of the others."""

AT_SOURCE = object()
"""In versions: the value that the source has by now."""

Versions = Sequence[tuple[Any, ...]]
"""Of the rows of a history, in order: key, the value that the change is about, what opened and closed it."""


@dataclass(frozen=True)
class Case:
    """One table and its change; ``{t}`` in a statement is its name.

    ``alters``: the change, between two writes. ``writes``: what is written by the new schema. ``shown``: each
    recorded kind with its compatibility, and whether it asks for something. ``steps``: the edits that are
    proposed, each with its compatibility. ``withheld``: rules that break till the contract follows.
    ``read_again``: whether the table has to be read once the contract follows. ``about``: the column that
    ``versions`` are about. ``repairs``: what somebody does at the source. ``evolution``: its policy.
    ``late``: whether the row 4 may land before the table is left out, at the next start at the latest.
    """

    alters: Sequence[str]
    writes: Sequence[str]
    shown: Sequence[tuple[str, str, bool]]
    steps: Sequence[tuple[str, str]] = ()
    withheld: Sequence[str] = ()
    read_again: bool = False
    about: str = "n"
    versions: Versions = ()
    repairs: Sequence[str] = ()
    evolution: str = PINNED
    late: bool = False


def kept(value: Any, *last: Any) -> Versions:
    """Versions of three rows that nothing changed, and of those that came after the change."""
    return [
        (1, 10 if value is None else value, "r", None),
        (2, 20 if value is None else value, "r", None),
        (3, 30 if value is None else value, "c", None),
        *((4, each, "c", None) for each in last),
    ]


def read_anew(before: Sequence[Any], after: Sequence[Any], *, landed: bool = True) -> Versions:
    """Versions of the rows 1 to 4 with the values ``before``, and ``after`` the table was read again.

    ``landed``: whether the row that came after the change landed before that.
    """
    opened = ("r", "r", "c", "c")
    found: list[tuple[Any, ...]] = []
    for number, value in enumerate(after, 1):
        if number < 4 or landed:
            found.append((number, before[number - 1], opened[number - 1], "b"))
        found.append((number, value, "r", None))
    return found


GOES_ON = {
    "added_plain": Case(
        ["ALTER TABLE {t} ADD size int"],
        ["INSERT INTO {t} VALUES (4, 'four', 40, 'ok', 8)"],
        [("column_added", "additive", True)],
        [("properties.size", "additive")],
        about="size",
        versions=[(1, None, "r", None), (2, None, "r", None), (3, None, "c", None), (4, 8, "c", None)],
    ),
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
        about="tag",
        versions=read_anew([None, None, None, "mine"], [AT_SOURCE] * 4),
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
        versions=read_anew([10, 20, 30, 44], [None, None, None, 44]),
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
    "cut": Case(
        ["ALTER TABLE {t} ALTER v TYPE varchar(2) USING left(v, 2)"],
        ["INSERT INTO {t} VALUES (4, 'fo', 40, 'ok')"],
        [("column_narrowed", "breaking", True)],
        read_again=True,
        about="v",
        versions=read_anew(["one", "two", "three", "fo"], ["on", "tw", "th", "fo"]),
    ),
    "converted": Case(
        ["ALTER TABLE {t} ALTER v TYPE varchar USING upper(v)"],
        ["INSERT INTO {t} VALUES (4, 'four', 40, 'ok')"],
        [("column_widened", "widening", False), ("column_converted", "breaking", True)],
        read_again=True,
        about="v",
        versions=read_anew(["one", "two", "three", "four"], ["ONE", "TWO", "THREE", "four"]),
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
        versions=read_anew(["10", "20", "30", True], [False, True, True, True]),
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
        [("enum_values_changed", "breaking", True)],
        [("properties.m.enum", "widening")],
        ["m:enum"],
        read_again=True,
        about="m",
        versions=read_anew(["ok", "ok", "ok", "fine"], ["fine"] * 4),
    ),
    "enum_value_removed": Case(
        [
            "CREATE TYPE other_of_{t} AS ENUM ('fine');"
            "ALTER TABLE {t} ALTER m TYPE other_of_{t} USING 'fine';"
            "DROP TYPE mood_of_{t}; ALTER TYPE other_of_{t} RENAME TO mood_of_{t}"
        ],
        ["INSERT INTO {t} VALUES (4, 'four', 40, 'fine')"],
        [("enum_values_changed", "breaking", True)],
        [("properties.m.enum", "widening")],
        ["m:enum"],
        read_again=True,
        about="m",
        versions=read_anew(["ok", "ok", "ok", "fine"], ["fine"] * 4),
    ),
    "other_key_too": Case(
        [
            "ALTER TABLE {t} REPLICA IDENTITY FULL",
            "ALTER TABLE {t} DROP CONSTRAINT {t}_pkey, ADD PRIMARY KEY (n, id), ADD UNIQUE (id)",
        ],
        ["INSERT INTO {t} VALUES (4, 'four', 40, 'ok')", "UPDATE {t} SET n = 21 WHERE id = 2"],
        [("column_not_null", "none", False), ("key_changed", "breaking", True)],
        versions=[
            (1, 10, "r", None),
            (2, 20, "r", "u"),
            (2, 21, "u", None),
            (3, 30, "c", None),
            (4, 40, "c", None),
        ],
        repairs=["ALTER TABLE {t} REPLICA IDENTITY USING INDEX {t}_id_key"],
    ),
}
"""Changes that a capture which runs goes on after."""

LEFT_OUT = {
    "other_key": Case(
        ["ALTER TABLE {t} DROP CONSTRAINT {t}_pkey, ADD PRIMARY KEY (id, n)"],
        ["INSERT INTO {t} VALUES (4, 'four', 40, 'ok')"],
        [("column_not_null", "none", False), ("key_changed", "breaking", True)],
        read_again=True,
        versions=read_anew([10, 20, 30], [10, 20, 30, 40], landed=False),
        repairs=["ALTER TABLE {t} DROP CONSTRAINT {t}_pkey, ADD PRIMARY KEY (id)"],
        late=True,
    ),
    "wider_key": Case(
        ["ALTER TABLE {t} DROP CONSTRAINT {t}_pkey, ADD PRIMARY KEY (id, n)"],
        ["INSERT INTO {t} VALUES (4, 'four', 40, 'ok'), (4, 'four, too', 41, 'ok')"],
        [("column_not_null", "none", False), ("key_changed", "breaking", True)],
        [("x-cdc.key", "breaking")],
        read_again=True,
        # Nothing that landed with the former key is of a row that this one names.
        versions=[(row, n, "r", None) for row, n in ((1, 10), (2, 20), (3, 30), (4, 40), (4, 41))],
    ),
    "key_renamed": Case(
        ["ALTER TABLE {t} RENAME id TO number"],
        ["INSERT INTO {t} VALUES (4, 'four', 40, 'ok')"],
        [("column_renamed", "breaking", True)],
        [("properties.number", "breaking")],
        read_again=True,
        # Its rows have the keys that they had.
        versions=read_anew([10, 20, 30], [10, 20, 30, 40], landed=False),
    ),
    "other_name": Case(
        ["ALTER TABLE {t} RENAME TO elsewhere"],
        ["INSERT INTO elsewhere VALUES (4, 'four', 40, 'ok')"],
        [("table_renamed", "breaking", True)],
        read_again=True,
        versions=read_anew([10, 20, 30], [10, 20, 30, 40], landed=False),
        repairs=["ALTER TABLE elsewhere RENAME TO {t}"],
    ),
    "made_anew": Case(
        ["DROP TABLE {t}; CREATE TABLE {t} (id int PRIMARY KEY, v text NOT NULL, n int, m mood_of_{t})"],
        ["INSERT INTO {t} VALUES (2, 'two', 22, 'ok'), (4, 'four', 40, 'ok')"],
        [("table_made_anew", "breaking", True)],
        read_again=True,
        # The rows 1 and 3 are gone with the former table.
        versions=[
            (1, 10, "r", "b"),
            (2, 20, "r", "b"),
            (2, 22, "r", None),
            (3, 30, "c", "b"),
            (4, 40, "r", None),
        ],
    ),
    "blocked": Case(
        ["ALTER TABLE {t} ADD size int DEFAULT 7"],
        ["INSERT INTO {t} VALUES (4, 'four', 40, 'ok', 8)"],
        [("column_added", "additive", True)],
        [("properties.size", "additive")],
        read_again=True,
        about="size",
        versions=read_anew([7, 7, 7], [7, 7, 7, 8], landed=False),
        evolution=BLOCK,
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
            made["x-cdc"]["evolution"] = cases[name].evolution if name in cases else PINNED
            (contracts / f"{name}.json").write_text(document_text(made))
        source.overrides["contracts_dir"] = contracts

    def sql(self, name: str, statements: Sequence[str]) -> None:
        self.source.sql(*(each.replace("{t}", name) for each in statements))

    def captured(self) -> None:
        """As a new process does it: with the contracts as they are in force by now."""
        self.source.tables[:] = contracts_in_force(self.source.settings)
        self.source.catch_up()

    def changes_while_capture_follows(self, *, landed: bool = False) -> None:
        """Change every table in the middle of its workload, until capture has seen all of it.

        ``landed``: what was written before a change lands before it. A table that is left out is left out
        from the first look on, which may come before these rows.
        """
        self.source.tables[:] = contracts_in_force(self.source.settings)
        with following(self.source):
            # A capture that has yet to start would find some of them changed, and leave them out.
            self.sql(BESIDE, ["INSERT INTO {t} VALUES (0, 'zero', 0, 'ok')"])
            until(lambda: self.source.events("c"))
            for name, case in self.cases.items():
                self.sql(name, ["INSERT INTO {t} VALUES (3, 'three', 30, 'ok')"])
                if landed:
                    until(lambda name=name: name in {each.source_table for each in self.source.events("c")})
                self.sql(name, [*case.alters, *case.writes])
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

    def _first(self, name: str) -> str:
        """The column ``id``, whatever it is called by now."""
        return self.contract(name).column_names[0]

    def rows(self, name: str, *, past: bool = False) -> list[dict[str, Any]]:
        contract = self.contract(name)
        table = self.workspace.history(contract) if past else self.workspace.dimension(contract)
        found = table.open().read(self._spark, table.open().all_files())
        order = [
            self._first(name),
            *(["_cdc_valid_from_position"] if past else []),
            *({"n"} & {*found.columns}),
        ]
        return [each.asDict(recursive=True) for each in found.orderBy(*order).collect()]

    def at_source(self, name: str) -> list[dict[str, Any]]:
        rows = [row for (row,) in self.source.query(f"SELECT row_to_json(t) FROM {name} t")]
        return sorted(rows, key=lambda row: (next(iter(row.values())), row.get("n")))

    def current(self, name: str) -> list[dict[str, Any]]:
        """The rows that live, with the columns of the contract."""
        rows = [each for each in self.rows(name) if not each["_cdc_is_deleted"]]
        assert not any(each["_cdc_unresolved"] or each["_cdc_exact"] for each in rows), rows
        return [{column: row[column] for column in self.contract(name).column_names} for row in rows]

    def require_versions(self) -> None:
        """The history of each table has the versions of its case."""
        found, expected = {}, {}
        for name, case in self.cases.items():
            now = {row[self._first(name)]: row.get(case.about) for row in self.at_source(name)}
            expected[name] = [
                tuple(now[version[0]] if each is AT_SOURCE else each for each in version)
                for version in case.versions
            ]
            versions = self._versions(name, case.about)
            found[name] = [each for each in versions if not case.late or (each[0], each[2]) != (4, "c")]
        assert found == expected

    def _versions(self, name: str, column: str) -> list[tuple[Any, ...]]:
        shown = (self._first(name), column, "_cdc_opened_by", "_cdc_closed_by")
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

    def shown(self) -> dict[str, list[tuple[str, str, bool]]]:
        """What people see of each table's changes: kind, compatibility, whether it asks."""
        found: dict[str, list[tuple[str, str, bool]]] = {}
        for each in judged_changes(self.workspace, SOURCE):
            assert bool(each.edit) == each.asks
            found.setdefault(each.change.table, []).append((each.change.kind, each.compatibility, each.asks))
        return found

    def require_checks(self) -> None:
        """What asks for something makes the check of its table red, and stands in status and alarms."""
        checks = schemas_as_contracted(self.workspace, SOURCE, [*self.cases, BESIDE])
        for name, changes in self.shown().items():
            assert checks[name].passed == (not any(asks for *_, asks in changes)), name
            if not checks[name].passed:
                assert f".{name}" in checks[name].summary
        assert checks[BESIDE].passed
        asking = sorted((name, kind) for name, each in self.shown().items() for kind, _, asks in each if asks)
        assert sorted((each["table"], each["kind"]) for each in self._in_status()) == asking
        named = [each["problem"].split(".", 1)[1].split(":")[0] for each in self._alarms()]
        assert sorted(named) == sorted(name for name, _ in asking)

    def _in_status(self) -> list[dict[str, Any]]:
        with self._as_settings():
            found: list[dict[str, Any]] = json.loads(command("status", "--json").out)["schema_changes"]
        return found

    def _alarms(self) -> list[dict[str, Any]]:
        """The alarms of schema changes: capture and platform do not run, which is one, too."""
        sent = self.source.home_folder.parent / "sent"
        with self._as_settings(alarm_command=f"cat > {sent}"):
            done = command("alarms")
        assert done.code == 0, done.output
        problems = json.loads(sent.read_text())["problems"]
        return [each for each in problems if each["kind"].startswith("schema ")]

    def _as_settings(self, **more: str) -> AbstractContextManager[None]:
        settings = self.source.settings
        return environment(
            home=str(settings.home),
            window="minutes:1",
            source=SOURCE,
            source_dsn=self.source.dsn,
            slot=self.source.slot,
            publication=self.source.slot,
            contracts_dir=str(settings.contracts_dir),
            **more,
        )

    def contracts_follow(self) -> dict[str, list[tuple[str, str]]]:
        """Write what is proposed for each table, and have those read that ask for it then."""
        workspace, proposed = self.workspace, {}
        for name, case in self.cases.items():
            self.sql(name, case.repairs)
            contract = self.contract(name)
            proposal = propose(self.source.settings, workspace, contract, every=False)
            proposed[name] = [(step.at, step.compatibility) for step in proposal.steps]
            write(workspace.home.path, contract, proposal)
        self.workspace = Workspace.open(self.source.settings)
        asking = {*ParkedTables(self.source.store.folder, 1).all()}
        for each in judged_changes(self.workspace, SOURCE):
            if each.edit == f"omnisupport-ingest source snapshot {each.change.table}":
                asking.add(each.change.table)
        assert asking == {name for name, case in self.cases.items() if case.read_again}
        for name in asking:
            SnapshotRequests(self.source.store.folder).write(name, "its schema changed")
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
    assert desk.shown() == {name: [*case.shown] for name, case in GOES_ON.items()}
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
    desk.require_versions()
    assert desk.withheld() == {}
    assert not any(asks for changes in desk.shown().values() for *_, asks in changes)
    desk.require_checks()


@pytest.mark.slow
def test_a_table_with_another_key_or_name_is_left_out_alone_and_right_again_once_it_is_read(
    source: SourceUnderTest, tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "IDLE_SECONDS", 0.5)
    desk = Desk(source, tmp_path, spark, LEFT_OUT)
    desk.captured()
    desk.changes_while_capture_follows(landed=True)
    with suppress(IngestError):
        desk.captured()
    assert set(ParkedTables(source.store.folder, 1).all()) == set(LEFT_OUT)
    desk.taken_in()
    assert desk.current(BESIDE) == desk.at_source(BESIDE), "the others go on"
    assert desk.shown() == {name: [*case.shown] for name, case in LEFT_OUT.items()}
    desk.require_checks()

    assert desk.contracts_follow() == {name: [*case.steps] for name, case in LEFT_OUT.items()}
    desk.captured()
    desk.taken_in()
    for name in (*LEFT_OUT, BESIDE):
        assert desk.current(name) == desk.at_source(name), name
    assert set(ParkedTables(source.store.folder, 1).all()) == set()
    desk.require_versions()
    assert not any(asks for changes in desk.shown().values() for *_, asks in changes)
    desk.require_checks()
