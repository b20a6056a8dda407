"""Tables of a server that are changed by ALTERs in the middle of a workload, by the log or read by a cursor.

Each history is a table of its own, with a contract whose policies are drawn. In each round rows are written,
the table is changed, rows are written again, they are received, and the layers take them in. Contracts follow
by ``contracts propose`` or by a version that a person wrote anew from the table, at once or rounds later. Of
the log, dimension and history must after each round be what the oracle makes of the rows as the server had
them, by the contract that is in force. A cursor sees no event, so there only the end counts: all contracts
follow, tables that ask for it are read again, and the dimensions must be the tables.
"""

from __future__ import annotations

import json
import re
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import psycopg2
from pydantic import SecretStr
from pyspark.sql import SparkSession

from omnisupport_ingest.cli.contracts_changes import propose, write
from omnisupport_ingest.contracts.documents import document_text
from omnisupport_ingest.contracts.in_force import contracts_in_force
from omnisupport_ingest.contracts.model import Contracts, TableContract
from omnisupport_ingest.contracts.sources import sources_in_force
from omnisupport_ingest.home import Home
from omnisupport_ingest.layers.dimension import dimensions, net_changes
from omnisupport_ingest.layers.events import deduped, raw
from omnisupport_ingest.layers.histories import history
from omnisupport_ingest.layers.type_changes import ask_for, waits
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.read.lake_keys import dimension_keys
from omnisupport_ingest.read.schema_changes import judged_changes
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.sources.postgres.capture.capture import Capture
from omnisupport_ingest.sources.postgres.catalog.live_table import read_live_tables
from omnisupport_ingest.sources.postgres.catalog.new_contract import draft
from omnisupport_ingest.sources.postgres.embedded.server import EmbeddedPostgres
from omnisupport_ingest.sources.postgres.session.server import current_wal_lsn
from omnisupport_ingest.sources.postgres.snapshot.requests import SnapshotRequests
from omnisupport_ingest.sources.query.run import QuerySource
from omnisupport_ingest_tests.oracle.model import Event, Image
from omnisupport_ingest_tests.oracle.oracle import current_state
from omnisupport_ingest_tests.proof import compare
from omnisupport_ingest_tests.proof.altered import CHANGED, KEY, Altered
from omnisupport_ingest_tests.proof.compare import Difference
from omnisupport_ingest_tests.proof.tables import SOURCE, ContractShape, held
from omnisupport_ingest_tests.proof.tally import Tally
from omnisupport_ingest_tests.proof.versions import versions


@dataclass(frozen=True)
class Extent:
    """``tables``: histories that get a table each, at most. ``rounds``: how often each is changed."""

    tables: int = 3
    rounds: int = 4


WHOLE = Extent()


@dataclass(frozen=True)
class Law:
    """What a contract says of a table, read from its own words."""

    shape: ContractShape
    required: frozenset[str]
    values: Mapping[str, frozenset[str]]
    longest: Mapping[str, int]
    former: Mapping[str, tuple[str, ...]]

    @classmethod
    def of(cls, contract: TableContract) -> Law:
        columns = [each for each in contract.source_columns if each.name not in (KEY, CHANGED)]
        shape = ContractShape(
            contract.table,
            tuple(each.name for each in columns),
            defaults=tuple((each.name, each.default.text) for each in columns if each.default is not None),
            types=tuple((each.name, each.pg_type) for each in columns),
            changed_only=contract.changed_only,
        )
        return cls(
            shape,
            frozenset(each.name for each in columns if not each.nullable),
            {each.name: frozenset(each.enum) for each in columns if each.enum},
            {each.name: each.max_length for each in columns if each.max_length is not None},
            {each.name: each.former_types for each in columns},
        )

    def broken(self, image: Image) -> list[str]:
        """The rules that a row breaks."""
        found = []
        types = dict(self.shape.types)
        for name in self.shape.columns:
            if name not in image:
                continue
            text = image[name]
            if text is None:
                found += [f"{name}:not_null"] if name in self.required else []
                continue
            if not any(_is_of(kind, text) for kind in (types[name], *self.former[name])):
                found.append(f"{name}:type")
            if name in self.values and text not in self.values[name]:
                found.append(f"{name}:enum")
            if len(text) > self.longest.get(name, len(text)):
                found.append(f"{name}:max_length")
        return found

    def judged(self, events: Sequence[Event]) -> list[Event]:
        """``events`` with those withheld whose row breaks a rule."""
        return [
            replace(each, quarantined=True)
            if each.op in "cur" and each.after is not None and self.broken(each.after)
            else each
            for each in events
        ]


_UNCHANGING = (f"a column {KEY}", f"a column {CHANGED}")

_BITS = {"smallint": 15, "integer": 31, "bigint": 63}


def _is_of(kind: str, text: str) -> bool:
    if kind in _BITS:
        return re.fullmatch("-?[0-9]+", text) is not None and abs(int(text)) < 1 << _BITS[kind]
    if kind == "boolean":
        return text in ("true", "false", "t", "f")
    if kind.startswith("numeric"):
        return re.fullmatch("-?[0-9]+([.][0-9]+)?", text) is not None
    return True


def prove_alters(
    seeds: range,
    folder: Path,
    spark: SparkSession,
    tally: Tally,
    extent: Extent = WHOLE,
    *,
    by_cursor: bool = False,
) -> Iterator[Difference]:
    """Tell histories of the first ``seeds`` to a table each; what differs after a round.

    ``tally``: counts what happens. ``by_cursor``: the tables are read by a cursor, else through the log.
    """
    with ExitStack() as resources:
        server = EmbeddedPostgres(folder / "server")
        resources.callback(server.destroy)
        server.start()
        connection = resources.enter_context(closing(psycopg2.connect(server.dsn())))
        connection.autocommit = True
        kind = _DeskByCursor if by_cursor else _Desk
        desk = kind(seeds[: extent.tables], folder, spark, _Server(server.dsn(), connection), tally)
        desk.open()
        yield from desk.differences()
        for number in range(extent.rounds):
            desk.change()
            desk.take_in()
            yield from desk.differences()
            if number < extent.rounds - 1:
                desk.some_follow()
        desk.all_follow()
        yield from desk.differences()
        yield from desk.others_than_the_source()


@dataclass(frozen=True)
class _Server:
    """The source: where it is, and a connection to it by which its tables are written."""

    dsn: str
    connection: Any


class _Desk:
    """A captured database, and what is made of it."""

    policy: Mapping[str, Any] = {}
    """What its contracts say beside their columns."""
    with_cursor = False

    def __init__(
        self, seeds: range, folder: Path, spark: SparkSession, server: _Server, tally: Tally
    ) -> None:
        self._folder, self._spark, self._tally = folder, spark, tally
        self._dsn, self._connection = server.dsn, server.connection
        self._rng = Random(f"alters {seeds.start} {len(seeds)}")
        self.tables = [
            Altered(f"altered_{seed}", Random(f"alters of {seed}"), self._run, with_cursor=self.with_cursor)
            for seed in seeds
        ]
        self._waiting: dict[str, frozenset[int]] = defaultdict(frozenset)
        self._contracts = folder / "contracts" / "data"
        self.workspace: Workspace

    @property
    def _settings(self) -> Settings:
        return Settings(
            _env_file=None,
            home=self._folder / "home",
            window="minutes:1",
            source=SOURCE,
            source_dsn=SecretStr(self._dsn),
            slot="proof",
            publication="proof",
            batch_max_seconds=0.5,
            contracts_dir=self._contracts,
        )

    def _run(self, sql: str, values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        with self._connection.cursor() as cursor:
            cursor.execute(sql, values or None)
            return cursor.fetchall() if cursor.description else []

    def open(self) -> None:
        """Make tables and contracts, and have the tables read."""
        self._contracts.mkdir(parents=True)
        for table in self.tables:
            table.make()
            evolution = self._rng.choice(("pinned", "additive"))
            only = self._rng.random() < 0.5
            self._write(table, {"evolution": evolution, **({"history": "changed_only"} if only else {})})
            table.read()
        self.take_in()

    def _write(self, table: Altered, policy: Mapping[str, Any]) -> None:
        """The contract of ``table`` as a person writes it anew from what the table is now."""
        live = read_live_tables(self._connection)
        made = draft(live["public", table.name], source=SOURCE, name=table.name, owner="team:tests").document
        made["x-cdc"] |= {**self.policy, **policy}
        (self._contracts / f"{table.name}.json").write_text(document_text(made))

    def change(self) -> None:
        """A round of the workload: rows, an ALTER, rows."""
        for table in self.tables:
            table.write(self._rng.randint(1, 3))
            if self._rng.random() < 0.85:
                self._tally.did(table.alter())
            table.write(self._rng.randint(1, 3))

    def take_in(self) -> None:
        """Receive what has committed, as a new process does, and take it through every layer."""
        settings = self._settings
        home = Home.open(settings.home, settings.window_size, storage=settings.storage)
        self.receive(settings, home)
        self._run_layers()

    def receive(self, settings: Settings, home: Home) -> None:
        capture = Capture(settings, home, Contracts(tuple(contracts_in_force(settings))))
        capture.run(current_wal_lsn(self._dsn), threading.Event())
        capture.raise_left_out()

    def _run_layers(self) -> None:
        self.workspace = workspace = Workspace.open(self._settings)
        for contract in workspace.contracts:
            if waits(workspace, contract) is not None:
                ask_for(workspace, contract)
        windows = workspace.landing(SOURCE).windows()
        for layer in (raw, deduped):
            layer.materialize(workspace, self._spark, SOURCE, windows, "proof")
        for contract in workspace.contracts:
            net_changes.materialize(workspace, self._spark, contract, windows, "proof")
            dimensions.update(workspace, self._spark, contract, "proof")
            history.materialize(workspace, self._spark, contract, "proof")

    def request(self, table: Altered) -> None:
        """Have a table read again."""
        SnapshotRequests(self.workspace.landing(SOURCE).folder).write(table.name, "its schema changed")

    def some_follow(self) -> None:
        """Contracts of some tables follow, by lot."""
        for table in self.tables:
            if self._rng.random() < 0.4:
                self._follow(table)

    def all_follow(self) -> None:
        """All contracts follow, and what asks for it is read again."""
        for table in self.tables:
            if self._follow(table):
                # What the contract has learned beside its file, and what is gone since, is in no file.
                self.workspace = Workspace.open(self._settings)
                self._propose(table)
        self.take_in()
        self._read_again()
        self.take_in()

    def _follow(self, table: Altered) -> bool:
        """Whether a person wrote the next version, and it was not proposed."""
        contract, by_hand = self._contract(table), self._rng.random() < 0.3
        if by_hand:
            document = json.loads((self._contracts / f"{table.name}.json").read_text())["x-cdc"]
            major = int(contract.version.split(".")[0]) + 1
            kept = {name: document[name] for name in ("evolution", "history") if name in document}
            self._write(table, kept | {"version": f"{major}.0.0"})
            self._tally.did("contracts written anew")
        else:
            self._propose(table)
            self._tally.did("contracts proposed")
        return by_hand

    def _propose(self, table: Altered) -> None:
        contract = self._contract(table)
        proposed = propose(self._settings, self.workspace, contract, every=False)
        write(self.workspace.home.path, contract, proposed)

    def _read_again(self) -> None:
        """Have the tables read again that ask for it."""
        self.workspace = Workspace.open(self._settings)
        asking = {each.change.table for each in judged_changes(self.workspace, SOURCE) if each.asks}
        for table in self.tables:
            if table.name in asking:
                self.request(table)
                table.read()
                self._tally.did("tables read again")

    def _contract(self, table: Altered) -> TableContract:
        return next(each for each in self.workspace.contracts if each.table == table.name)

    def differences(self) -> Iterator[Difference]:
        """What dimensions and histories differ in from what the oracle makes of the rows."""
        for table in self.tables:
            law = Law.of(self._contract(table))
            events = law.judged(table.events)
            self._count(table, events)
            yield from self._dimension(table, law, events)
            yield from self._history(table, law, events)

    def _count(self, table: Altered, events: Sequence[Event]) -> None:
        """Count which rows wait for their contract that did not before, and which do not wait any more."""
        now = frozenset(number for number, event in enumerate(events) if event.quarantined)
        before, self._waiting[table.name] = self._waiting[table.name], now
        self._tally.did("rows that wait for their contract", len(now - before))
        self._tally.did("rows back by a contract that followed", len(before - now))

    def _dimension(self, table: Altered, law: Law, events: Sequence[Event]) -> Iterator[Difference]:
        due = {
            key: _sorted(law.shape, row.values)
            for key, row in current_state(events, law.shape).items()
            if not row.ended
        }
        yield from _unlike(f"dim_{table.name}", self._current(table, law), due)

    def _current(self, table: Altered, law: Law) -> Mapping[Any, Any]:
        """The rows of the dimension that live, with their known values."""
        return {
            compare._key(row): _values(row, law.shape)
            for row in compare._rows(self.workspace.dimension(self._contract(table)))
            if not row["_cdc_is_deleted"]
        }

    def _history(self, table: Altered, law: Law, events: Sequence[Event]) -> Iterator[Difference]:
        due: dict[Any, list[Any]] = defaultdict(list)
        for each in sorted(versions(events, law.shape), key=lambda version: version.opened_at):
            due[each.key].append((each.opened_by, each.closed_by, each.values))
        found: dict[Any, list[Any]] = defaultdict(list)
        rows = compare._rows(self.workspace.history(self._contract(table)))
        for row in sorted(rows, key=_begins):
            by = row["_cdc_opened_by"], row["_cdc_closed_by"]
            found[compare._key(row)].append((*by, _values(row, law.shape)))
        yield from _unlike(f"history of {table.name}", found, due)

    def others_than_the_source(self) -> Iterator[Difference]:
        """Where the dimensions are not the tables by now, and what a contract may not say of older rows."""
        for table in self.tables:
            law = Law.of(self._contract(table))
            rows = {key: _sorted(law.shape, row) for key, row in table.rows().items()}
            yield from _unlike(f"{table.name} at its source", self._current(table, law), rows)
            if set(law.shape.columns) != set(table.columns):
                columns = sorted(law.shape.columns), sorted(table.columns)
                yield Difference(table.name, "columns of the contract", *columns)
            said = dict(law.shape.defaults)
            if not said.items() <= table.defaults.items():
                yield Difference(table.name, "what older rows have", said, table.defaults)
        asks = [each for each in judged_changes(self.workspace, SOURCE) if each.asks]
        if asks:
            yield Difference(SOURCE, "what still asks", asks, [])


def _begins(row: Mapping[str, Any]) -> tuple[int, ...]:
    place = row["_cdc_valid_from_position"]
    return place["epoch"], place["commit_lsn"], place["ordinal"]


class _DeskByCursor(_Desk):
    """A database whose tables are read by a cursor."""

    with_cursor = True
    policy: Mapping[str, Any] = {"cursor": {"field": CHANGED, "lookback": "PT0S"}}

    def open(self) -> None:
        definition = {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "name": SOURCE,
            "kind": "query",
            "description": "Tables that change.",
            "connection": {"file": str(self._folder / "connection")},
        }
        sources = self._contracts.with_name("sources")
        sources.mkdir(parents=True)
        (sources / f"{SOURCE}.json").write_text(json.dumps(definition))
        self._anew: set[str] = set()
        connection = self._folder / "connection"
        connection.touch(mode=0o600)
        connection.write_text(self._dsn)
        super().open()

    def receive(self, settings: Settings, home: Home) -> None:
        contracts = contracts_in_force(settings)
        source = QuerySource.of(sources_in_force(settings, contracts).find(SOURCE), contracts, home)
        anew = [each for each in source.tables if each.table in self._anew]
        assert source.sync(anew=anew, reason="its schema changed").finished
        self._anew = set()

    def request(self, table: Altered) -> None:
        self._anew.add(table.name)

    def differences(self) -> Iterator[Difference]:
        """Nobody can say of rows in between which of them were read."""
        return iter(())

    def all_follow(self) -> None:
        super().all_follow()
        contracts = contracts_in_force(self._settings)
        definition = sources_in_force(self._settings, contracts).find(SOURCE)
        lake = dimension_keys(self.workspace, SOURCE)
        assert not QuerySource.of(definition, contracts, self.workspace.home).compare(lake).faults
        for each in lake.values():
            each.close()
        self._run_layers()


def _unlike(layer: str, found: Mapping[Any, Any], due: Mapping[Any, Any]) -> Iterator[Difference]:
    for key in sorted(found.keys() | due.keys()):
        if found.get(key) != due.get(key):
            yield Difference(layer, str(key), found.get(key), due.get(key))


def _sorted(shape: ContractShape, image: Image) -> tuple[tuple[str, Any], ...]:
    known = ((name, held(shape, name, text)) for name, text in image.items() if name in shape.columns)
    return tuple(sorted(known))


def _values(row: Mapping[str, Any], shape: ContractShape) -> tuple[tuple[str, Any], ...]:
    """The known values of a row of the lake that its table's changes may be about."""
    return tuple(each for each in compare._values(row, shape) if each[0] not in _UNCHANGING)
