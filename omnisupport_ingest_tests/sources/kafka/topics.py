"""A home that topics land in, and what a test says of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from omnisupport_ingest.contracts.in_force import contracts_in_force
from omnisupport_ingest.contracts.kafka_topics import KafkaTopics
from omnisupport_ingest.contracts.sources import SourceDefinition, SourceKind
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.landing.manifest import OffsetSpan
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.sources.debezium.handling import Handling
from omnisupport_ingest.sources.kafka.client import Cluster
from omnisupport_ingest.sources.kafka.offsets import UNDECIDED, Held, Partition, Ways
from omnisupport_ingest.sources.kafka.run import KafkaSource
from omnisupport_ingest.sources.kafka.sync import KafkaReport
from omnisupport_ingest_tests.sources.debezium.recorded import SOURCE, TABLES, Recorder, contract
from omnisupport_ingest_tests.sources.debezium.told import customer, envelope


def holding(patch: pytest.MonkeyPatch, changed: Callable[[list[Held]], list[Held]]) -> None:
    """Have the cluster say that it holds what ``changed`` makes of what it holds, until ``patch`` is
    undone."""
    readable = Cluster.held_of_readable

    def answered(cluster: Cluster) -> tuple[list[Held], Mapping[Partition, IngestError]]:
        held, unread = readable(cluster)
        return changed(held), unread

    patch.setattr(Cluster, "held_of_readable", answered)


class Reader:
    """Syncs the topics whose names begin with ``prefix`` into a home of its own.

    ``secured``, ``secrets``: settings beside those that every client needs.
    """

    def __init__(
        self,
        folder: Path,
        address: str,
        prefix: str,
        handling: Handling | None = None,
        batch_rows: int = 50_000,
        secured: Mapping[str, str] | None = None,
        secrets: Mapping[str, tuple[str, str]] | None = None,
    ) -> None:
        self.recorder = Recorder(folder, "customers", "toasty", handling=handling)
        settings = {"bootstrap.servers": address, "fetch.wait.max.ms": "50", **(secured or {})}
        topics = KafkaTopics((f"^{prefix}",), settings, secrets or {}, batch_rows)
        definition = SourceDefinition(SOURCE, SourceKind.KAFKA, "Topics.", kafka=topics)
        (folder / "run").mkdir(exist_ok=True)
        self.source = KafkaSource(definition, self.recorder.inlet, folder / "run")
        self.store = self.recorder.inlet.store

    def give_key(self, key: str) -> None:
        """Give customers this key, in a contract that has no ``id`` unless that is it; and go on as a new
        process does."""
        write_key(self.recorder.folder / "contracts", key)
        contracts = contracts_in_force(self.recorder.workspace.settings)
        self.recorder.inlet = replace(self.recorder.inlet, contracts=contracts)
        old = self.recorder.workspace
        self.recorder.workspace = Workspace(old.settings, old.home, contracts)
        self.source = replace(self.source, inlet=self.recorder.inlet)

    def sync(self, ways: Ways = UNDECIDED, **how: Any) -> KafkaReport:
        return self.source.sync(ways=ways, **how)

    def spans(self) -> list[OffsetSpan]:
        """What every batch covers, in order, without the partitions of which it has nothing new."""
        found = [each.file.offsets or () for each in self.store.manifests() if each.file is not None]
        return [span for spans in found for span in spans if span.next > span.start]

    def rows(self) -> list[dict[str, Any]]:
        import pyarrow.parquet as pq

        files = [self.store.path_of(file) for each in self.store.manifests() for file in each.files]
        return [row for file in files for row in pq.ParquetFile(file).read().to_pylist()]

    def keys(self) -> list[int]:
        return sorted(int(json.loads(row["key"])[0]) for row in self.rows() if row["key"] is not None)


def write_key(contracts: Path, key: str) -> None:
    """Write the contract of customers into the folder ``contracts``, as ``Reader.give_key`` says."""
    columns = TABLES["customers"][1]
    columns = {name: pg_type for name, pg_type in columns.items() if name != "id" or key == "id"}
    (contracts / "customers.json").write_text(json.dumps(contract("customers", (key,), columns)))


def changes(first: int, count: int) -> Iterator[tuple[Any, Any]]:
    """``count`` creates of customers, keys from ``first`` on, each with a position of its own."""
    for number in range(first, first + count):
        yield {"id": number}, envelope("c", customer(number), lsn=1000 + number, order=1)


def others(first: int, count: int) -> Iterator[tuple[Any, Any]]:
    """``count`` creates of the other table, keys from ``first`` on, each with a position of its own."""
    for number in range(first, first + count):
        row = {"id": number, "small": "text"}
        yield {"id": number}, envelope("c", row, lsn=1000 + number, order=2, table="toasty")
