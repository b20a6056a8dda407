"""Personal values that land encrypted by cursor, as files, as deliveries of rows and from a topic; a subject
that is erased, and what comes again of it."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from pyspark.sql import SparkSession

from omnisupport_ingest.cli.land import inlet_of
from omnisupport_ingest.cli.main import cli
from omnisupport_ingest.contracts.kafka_topics import KafkaTopics
from omnisupport_ingest.contracts.load import load_contracts
from omnisupport_ingest.contracts.sources import SourceDefinition, SourceKind
from omnisupport_ingest.home import Home
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.layers.histories import history
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.sources.debezium.land import land as land_file
from omnisupport_ingest.sources.encrypting import encrypting_store
from omnisupport_ingest.sources.kafka.run import KafkaSource
from omnisupport_ingest.sources.manifests.land import Inlet, land
from omnisupport_ingest.sources.manifests.seed_manifest import load_manifest
from omnisupport_ingest.sources.postgres.embedded.server import EmbeddedPostgres
from omnisupport_ingest.sources.postgres.session.connection import connect
from omnisupport_ingest.sources.query.run import QuerySource
from omnisupport_ingest.windows import WindowSize, without_sentinel
from omnisupport_ingest_tests.recovery.pipeline import run_layers
from omnisupport_ingest_tests.sources.debezium.told import envelope
from omnisupport_ingest_tests.sources.kafka.broker import Broker, running_broker
from omnisupport_ingest_tests.sources.manifests.deliveries import document as manifest_document

SOURCE = "desk"
ADA, EVE, ODD = "zebrafinch", "bullfinch", "goldcrest"
"""In every personal value of one, of another, and of what cannot be read."""

ABOVE_RAW = {"deduped_events", "net_changes", "dim_people", "history"}
START = datetime(2026, 11, 20, 15, tzinfo=UTC)
MOMENT = START + timedelta(hours=1)

Row = dict[str, Any]


def row(number: int, who: str, note: str = "", minutes: int = 0) -> Row:
    return {
        "id": number,
        "plan": "gold",
        "email": f"{who}@x.org",
        "full_name": f"{who} {note}",
        "updated_at": (MOMENT + timedelta(minutes=minutes)).isoformat(sep=" "),
    }


FIRST = [row(1, ADA), row(2, EVE), *(row(number, f"c{number}") for number in range(3, 80))]
SECOND = [row(1, ADA, "again", 5), row(2, EVE, "again", 5)]


def contract(*, cursor: bool) -> dict[str, Any]:
    texts = {
        name: {"type": ["string", "null"], "x-pg-type": "text"} for name in ("plan", "email", "full_name")
    }
    time = {"type": ["string", "null"], "x-pg-type": "timestamp with time zone"}
    columns = {"id": {"type": "integer", "x-pg-type": "bigint"}, **texts, "updated_at": time}
    policy: dict[str, Any] = {
        "version": "1.0.0",
        "source": SOURCE,
        "schema": "public",
        "table": "people",
        "owner": "team:tests",
        "key": ["id"],
        "events": {"soft_delete_column": None},
        "lateness": {"allowed": "PT1H", "max": "P3650D"},
        "at_rest": {"pii": "encrypted"},
        "pii": {name: {"policy": "keep", "note": "A test."} for name in ("email", "full_name")},
    }
    if cursor:
        policy["cursor"] = {"field": "updated_at", "lookback": "P30D"}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "people",
        "description": "people",
        "type": "object",
        "required": ["id"],
        "additionalProperties": True,
        "properties": {name: {**each, "description": name} for name, each in columns.items()},
        "x-cdc": policy,
    }


class Way(ABC):
    """A home, its lake, and one way in of its source."""

    cursor = False

    def __init__(self, folder: Path, spark: SparkSession) -> None:
        self.folder, self.spark = folder, spark
        self.home_folder, self.contracts = folder / "home", folder / "contracts" / "data"
        self.contracts.mkdir(parents=True)
        (self.contracts / "people.json").write_text(json.dumps(contract(cursor=self.cursor)))
        self.settings = Settings(
            home=self.home_folder,
            contracts_dir=self.contracts,
            source="support_desk",
            window="minutes:60",
            _env_file=None,
        )
        Home.open(self.settings.home, WindowSize(60), now=START)
        self.contract = next(iter(load_contracts(self.contracts)))
        self.times = 0

    @abstractmethod
    def deliver(self, rows: list[Row]) -> None:
        """``rows`` come by this way."""

    @abstractmethod
    def again(self) -> None:
        """All of what was delivered comes again, some of it beside what was not."""

    @property
    def workspace(self) -> Workspace:
        return Workspace.open(self.settings)

    def fold(self, *, replay: bool = False) -> None:
        workspace = self.workspace
        batches = workspace.landing(SOURCE).manifests()
        windows = sorted({each for batch in batches for each in without_sentinel(batch.windows)})
        run_layers(workspace, self.spark, windows, SOURCE, replay=replay)
        for each in workspace.contracts:
            history.materialize(workspace, self.spark, each, "run", replay=replay)

    def rows(self) -> dict[int, Row]:
        """The rows of the dimension, without those of which nothing could be read."""
        snapshot = self.workspace.dimension(self.contract).open()
        found = snapshot.read(self.spark, snapshot.files("")).where("id < 90").collect()
        return {each["id"]: each.asDict() for each in found}

    def events(self, key: int) -> int:
        """Accepted events of a row."""
        snapshot = self.workspace.deduped(SOURCE).open()
        frame = snapshot.read(self.spark, snapshot.all_files())
        return frame.where(frame.key == f'["{key}"]').count()

    def quarantined(self) -> list[tuple[str, str | None]]:
        """Reason and delivered text of what waits."""
        quarantine = self.workspace.quarantine(SOURCE)
        if not quarantine.exists:
            return []
        snapshot = quarantine.open()
        files = snapshot.all_files()
        return [(each["reason"], each["envelope"]) for each in snapshot.read(self.spark, files).collect()]

    def landed(self) -> list[Row]:
        store = LandingStore(self.home_folder / "landing", SOURCE)
        files = [store.path_of(file) for each in store.manifests() for file in each.files]
        return [event for file in files for event in pq.ParquetFile(file).read().to_pylist()]

    def holding(self, text: str) -> set[str]:
        """The files of the home that have ``text``, as bytes or in a decoded value."""
        found = set()
        for file in (each for each in self.home_folder.rglob("*") if each.is_file()):
            content = file.read_bytes()
            if file.suffix == ".parquet":
                table = pq.read_table(file, partitioning=None)
                content += repr((table.to_pylist(), table.schema.metadata)).encode()
            if text.encode() in content:
                found.add(file.relative_to(self.home_folder).as_posix())
        return found

    def erase(self, key: str) -> dict[str, Any]:
        environment = {
            "OMNISUPPORT_HOME": str(self.home_folder),
            "OMNISUPPORT_WINDOW": "minutes:60",
            "OMNISUPPORT_SOURCE": "support_desk",
            "OMNISUPPORT_CONTRACTS_DIR": str(self.contracts),
        }
        arguments = ["erase", "people", key, "--subject", "--reason", "request 7", "--by", "ana", "--json"]
        arguments += ["--source", SOURCE]
        done = CliRunner().invoke(cli, arguments, env={**os.environ, **environment})
        assert done.exit_code == 0, f"{done.output} {done.exception}"
        assert ADA not in done.output
        return json.loads(done.stdout)  # type: ignore[no-any-return]


class ByCursor(Way):
    """A table that is read by its cursor; a lookback longer than the test meets every row again."""

    cursor = True

    def __init__(self, folder: Path, spark: SparkSession, dsn: str) -> None:
        super().__init__(folder, spark)
        self._connection = connect(dsn)
        self._run(
            "CREATE TABLE people (id bigint PRIMARY KEY, plan text, email text, full_name text, "
            "updated_at timestamptz)"
        )
        self._run("CREATE INDEX people_cursor ON people (updated_at, id)")
        connection = folder / "connection"
        connection.touch(mode=0o600)
        connection.write_text(dsn)
        self._definition = SourceDefinition(
            SOURCE, SourceKind.QUERY, "A table.", connection_file=str(connection)
        )

    def _run(self, sql: str, *values: Any) -> None:
        with self._connection.cursor() as cursor:
            cursor.execute(sql, values)

    def deliver(self, rows: list[Row]) -> None:
        for each in rows:
            self._run(
                "INSERT INTO people VALUES (%s, %s, %s, %s, %s) ON CONFLICT (id) DO UPDATE SET "
                "(plan, email, full_name, updated_at) = "
                "(excluded.plan, excluded.email, excluded.full_name, excluded.updated_at)",
                *each.values(),
            )
        self._sync()

    def again(self) -> None:
        # The lookback has it do so by itself.
        self._sync()

    def _sync(self) -> None:
        workspace = self.workspace
        source = QuerySource.of(self._definition, workspace.contracts, workspace.home)
        self.report = source.sync()

    def close(self) -> None:
        self._connection.close()


class AsFiles(Way):
    """Files of Debezium's events, without metadata of transactions: identities hold content where rows were
    read by its snapshot."""

    def __init__(self, folder: Path, spark: SparkSession) -> None:
        super().__init__(folder, spark)
        self._delivered: list[bytes] = []

    def deliver(self, rows: list[Row]) -> None:
        self._delivered += self._lines(rows)
        self._land(self._delivered[-len(rows) - 3 :])

    def again(self) -> None:
        # Another content of the file, as it says when it was written again.
        self._land([*self._delivered, json.dumps({"ts_ms": self.times}).encode()])

    def _lines(self, rows: list[Row]) -> list[bytes]:
        first = not self._delivered
        start = 1000 + len(self._delivered)
        ts = int(MOMENT.timestamp() * 1000) + (0 if first else 300_000)
        rows = [each | {"updated_at": each["updated_at"].replace(" ", "T")} for each in rows]
        told: list[dict[str, Any]] = []
        for number, each in enumerate(rows):
            op = "r" if first else "u"
            at = {"lsn": 900 if first else start + number, "before_lsn": None if first else 950}
            told.append(envelope(op, each, ts=ts, table="people", **at))
        # One of another table, one that cannot be read, one that is no line of JSON.
        other = envelope(
            "c", {"id": start, "who": ODD}, lsn=start + 500, before_lsn=950, ts=ts, table="others"
        )
        odd = envelope(
            "u", row(95, ODD) | {"updated_at": "no time at all"}, lsn=start + 501, before_lsn=950, ts=ts,
            table="people",
        )  # fmt: skip
        return [*(json.dumps(each).encode() for each in (*told, other, odd)), f"{ODD}, half a li".encode()]

    def _land(self, lines: list[bytes]) -> None:
        self.times += 1
        path = self.folder / f"events-{self.times}.jsonl"
        path.write_bytes(b"\n".join(lines) + b"\n")
        inlet = inlet_of(self.workspace, SOURCE, {"odd_lines": "quarantine"})
        land_file(path, inlet)


class AsDeliveries(Way):
    """Deliveries of rows, placed by their cursor; a row that the schema's gate withholds is kept whole."""

    cursor = True

    def __init__(self, folder: Path, spark: SparkSession) -> None:
        super().__init__(folder, spark)
        self._delivered: list[Row] = []

    def deliver(self, rows: list[Row]) -> None:
        withheld = row(90 + self.times, ODD) | {"updated_at": "no time at all"}
        self._delivered += [*rows, withheld]
        self._land([*rows, withheld])

    def again(self) -> None:
        # In another order, so it is another file.
        self._land([*reversed(self._delivered)])

    def _land(self, rows: list[Row]) -> None:
        self.times += 1
        path = self.folder / f"people-{self.times}.jsonl"
        path.write_text("".join(json.dumps(each) + "\n" for each in rows))
        told = manifest_document(
            "incremental_cursor",
            {path: len(rows)},
            contract={"source": SOURCE, "schema": "public", "table": "people", "version": "1.0.0"},
            gates={"schema": "quarantine", "row": "quarantine"},
        )
        manifest = self.folder / f"{path.name}.manifest.json"
        manifest.write_text(json.dumps(told))
        workspace = self.workspace
        seed = load_manifest(manifest, workspace.contracts)
        store = encrypting_store(workspace.home, SOURCE, workspace.contracts.of_source(SOURCE))
        land(seed, Inlet(store, workspace.grid))


class FromTopic(AsFiles):
    """A topic of a real broker; what comes again stands at later offsets of it."""

    def __init__(self, folder: Path, spark: SparkSession, broker: Broker) -> None:
        super().__init__(folder, spark)
        self._broker, self._topic = broker, f"t{uuid.uuid4().hex[:8]}.people"
        broker.make_topic(self._topic)
        settings = {"bootstrap.servers": broker.address, "fetch.wait.max.ms": "50"}
        self._definition = SourceDefinition(
            SOURCE,
            SourceKind.KAFKA,
            "A topic.",
            kafka=KafkaTopics((self._topic,), settings),
            events={"odd_lines": "quarantine"},
        )

    def _land(self, lines: list[bytes]) -> None:
        self._broker.produce(self._topic, ((None, each) for each in lines))
        workspace = self.workspace
        source = KafkaSource.of(self._definition, workspace.contracts, workspace.home, self.settings)
        assert source.sync().finished


@pytest.fixture(params=["cursor", "files", "deliveries", "topic"])
def way(request: pytest.FixtureRequest, tmp_path: Path, spark: SparkSession) -> Iterator[Way]:
    if request.param == "cursor":
        postgres: EmbeddedPostgres = request.getfixturevalue("postgres")
        name = f"ways_{uuid.uuid4().hex[:8]}"
        with closing(connect(postgres.dsn())) as admin, admin.cursor() as cursor:
            cursor.execute(f"CREATE DATABASE {name} STRATEGY file_copy")
            by_cursor = ByCursor(tmp_path, spark, postgres.dsn(name))
            yield by_cursor
            by_cursor.close()
            cursor.execute(f"DROP DATABASE {name} WITH (FORCE)")
    elif request.param == "topic":
        with running_broker(tmp_path / "log") as broker:
            yield FromTopic(tmp_path, spark, broker)
    else:
        yield (AsFiles if request.param == "files" else AsDeliveries)(tmp_path, spark)


@pytest.mark.drawn(2)
@pytest.mark.slow
def test_a_subject_is_erased_and_nothing_that_comes_again_brings_it_back(way: Way) -> None:
    way.deliver(FIRST)
    way.deliver(SECOND)
    before_it_came_again = len(way.landed())
    way.again()
    if isinstance(way, ByCursor):
        assert len(way.landed()) == before_it_came_again, "the lookback knows what landed encrypted"
    way.fold()
    # Landing and raw never had the values; nor have quarantine, notes and cursors.
    assert {each.split("/")[2] for each in way.holding(ADA)} == ABOVE_RAW
    assert {each.split("/")[2] for each in way.holding(EVE)} == ABOVE_RAW
    assert {each.split("/")[2] for each in way.holding(ODD)} <= {*ABOVE_RAW, "quarantine"}
    rows = way.rows()
    assert (rows[1]["email"], rows[1]["full_name"]) == (f"{ADA}@x.org", f"{ADA} again")
    assert len(rows) == len(FIRST)
    accepted, waiting = way.events(1), sorted(reason for reason, _ in way.quarantined())
    assert accepted == 2 and "collision" not in waiting
    assert all(text is None for _, text in way.quarantined())
    envelopes = [each["envelope"] for each in way.landed()]
    assert all(each is None or each.startswith('{"encrypted:1":"') for each in envelopes)
    assert any(envelopes) == (not isinstance(way, ByCursor))

    first = way.erase("1")
    assert not first["complete"] and first["images_encrypted"] >= 2
    # Lines that could not be read and say of nobody: who erases has to know of them.
    of_nobody = [
        each["where"] for each in first["remains"] if each["what"].startswith("lines that could not")
    ]
    assert bool(of_nobody) == isinstance(way, AsFiles)
    # Before what was made of it is gone, and after.
    way.again()
    way.fold()
    second = way.erase("1")
    assert second["cells_readable"] == 0, second
    assert way.holding(ADA) == set()
    for again in range(2):
        way.again()
        way.fold(replay=again == 1)
    way.deliver([row(1, ADA, "later", 7), row(2, EVE, "later", 7)])
    way.fold()
    assert way.holding(ADA) == set()

    # What came again is no other event, and nothing of it waits for anybody.
    assert way.events(1) == accepted + 1
    assert way.events(2) == accepted + 1
    assert "collision" not in {reason for reason, _ in way.quarantined()}
    after = way.rows()
    assert [after[1][name] for name in ("plan", "email", "full_name")] == ["gold", None, None]
    assert not after[1]["_cdc_unresolved"] and not after[1]["_cdc_is_deleted"]
    assert after[2]["full_name"] == f"{EVE} later"
    assert {key: each["email"] for key, each in after.items() if key != 1} == {
        key: each["email"] for key, each in rows.items() if key != 1
    }

    # Made anew from landing alone, it is the same.
    shutil.rmtree(way.home_folder / "lake")
    way.fold()
    rebuilt = way.rows()
    assert {key: (each["email"], each["full_name"]) for key, each in rebuilt.items()} == {
        key: (each["email"], each["full_name"]) for key, each in after.items()
    }
    assert way.holding(ADA) == set()
    assert "collision" not in {reason for reason, _ in way.quarantined()}
