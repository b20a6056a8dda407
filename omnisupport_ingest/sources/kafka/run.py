"""A sync of a defined Kafka source: its definition, its lease against other processes, and the pause."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Self

from omnisupport_ingest.contracts.landed_keys import LandedKeys
from omnisupport_ingest.contracts.learned import LearnedColumns
from omnisupport_ingest.contracts.model import Contracts
from omnisupport_ingest.contracts.sources import SourceDefinition
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.home import Home
from omnisupport_ingest.landing.manifest import Manifest, OffsetSpan
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.sources.debezium.handling import handling_of
from omnisupport_ingest.sources.debezium.land import Inlet, refuse_other_deliveries
from omnisupport_ingest.sources.encrypting import encrypting_store
from omnisupport_ingest.sources.kafka.client import Cluster
from omnisupport_ingest.sources.kafka.errors import KafkaPaused, KafkaRefused
from omnisupport_ingest.sources.kafka.offsets import (
    UNDECIDED,
    Held,
    Partition,
    Ways,
    all_going_on,
    landed_times,
)
from omnisupport_ingest.sources.kafka.parked import ParkedTables, noted_partitions, standing_offsets
from omnisupport_ingest.sources.kafka.sync import KafkaInlet, KafkaReport, sync_topics
from omnisupport_ingest.sources.kafka.two_lives import waits
from omnisupport_ingest.sources.postgres.capture.requests import PauseRequest
from omnisupport_ingest.sources.postgres.preflight.findings import Finding, Severity
from omnisupport_ingest.sources.postgres.session.lease import take_lease


@dataclass(frozen=True, slots=True)
class Lag:
    """How far a partition has landed. ``landed``: the next offset to read; None before the first record.

    ``landed_at``: when its newest record landed; None if the newest batches have none (``landed_times``).
    ``parked``: full name of the parked table before whose row it waits; empty if it does not.
    """

    held: Held
    landed: int | None
    landed_at: datetime | None = None
    parked: str = ""

    @property
    def behind(self) -> int:
        """Number of offsets that have not landed yet; not each of them holds a record."""
        return max(0, self.held.end - max(self.held.low, self.landed or 0))

    @property
    def gone(self) -> int:
        """Number of offsets that were deleted before they landed."""
        return 0 if self.landed is None else max(0, self.held.low - self.landed)


@dataclass(frozen=True)
class KafkaSource:
    """A source of the kind ``kafka`` in a home. ``run``: the home's folder of locks."""

    definition: SourceDefinition
    inlet: Inlet
    run: Path

    @classmethod
    def of(cls, definition: SourceDefinition, contracts: Contracts, home: Home, settings: Settings) -> Self:
        """Return the source of ``definition`` in ``home``; ``KafkaRefused`` if no contract names it."""
        _require_contract(definition, contracts)
        store = encrypting_store(home, definition.name, contracts.of_source(definition.name))
        skew = timedelta(seconds=settings.max_clock_skew_seconds)
        handling = handling_of(definition.events)
        learned = LearnedColumns(home.path, definition.name)
        inlet = Inlet(store, home.grid, contracts, settings.source, handling, skew, learned=learned)
        return cls(definition, inlet, home.run)

    def sync(
        self,
        *,
        seconds: float | None = None,
        ways: Ways = UNDECIDED,
        landed: Callable[[Manifest], None] = lambda _batch: None,
    ) -> KafkaReport:
        """Land what is new, for about ``seconds`` (None: to the end of every partition).

        The seconds count from when every partition is known, so a tick always reads something.

        Raises ``CaptureRunning`` if another process reads the source, ``KafkaPaused``, and the errors of
        ``sync_topics``.
        """
        name, topics = self.definition.name, self.definition.kafka
        assert topics is not None
        pause = PauseRequest(self.inlet.store.folder)
        found = pause.read()
        if found is not None:
            raise KafkaPaused(
                f"The source {name} is paused {found}.", fix=f"omnisupport-ingest source resume {name}"
            )
        until: float | None = None

        def over() -> bool:
            nonlocal until
            if seconds is not None and until is None:
                until = time.monotonic() + seconds
            return pause.present or (until is not None and time.monotonic() > until)

        with take_lease(self.run, name), Cluster(name, topics) as cluster:
            refuse_other_deliveries(self.inlet.store)
            return sync_topics(cluster, KafkaInlet(self.inlet, topics.batch_rows, ways, over, landed))

    def lags(self) -> list[Lag]:
        """Return the lag of every partition of this source."""
        return lags(self.definition, self.inlet.contracts, self.inlet.store.folder.parent)


def preflight(definition: SourceDefinition, contracts: Contracts, landing: Path) -> tuple[Finding, ...]:
    """Return what prevents reading the topics of ``definition``, and further findings. Changes nothing.

    ``landing``: as in ``lags``. If the cluster cannot be reached, or has none of the topics, that is the only
    finding.
    """
    assert definition.kafka is not None
    try:
        _require_contract(definition, contracts)
        with Cluster(definition.name, definition.kafka) as cluster:
            held = cluster.held()
    except IngestError as error:
        return (Finding("connection", error.problem, error.fix),)
    landed: dict[Partition, OffsetSpan] = {}
    waiting = None
    if (landing / definition.name).is_dir():
        store = LandingStore(landing, definition.name)
        landed, waiting = standing_offsets(store), waits(store)
    faults = all_going_on(definition.name, held, landed, UNDECIDED).faults
    found = [Finding("offsets", fault.problem, fault.fix) for fault in faults]
    found += [
        Finding("landed_key", fault.problem, fault.fix, table=name)
        for name, fault in LandedKeys(landing / definition.name).changed(definition.tables(contracts)).items()
    ]
    if waiting is not None:
        found.append(Finding("two_lives", waiting.problem, waiting.fix))
    if any(each.topic_id is None for each in held):
        problem = (
            "The cluster does not tell ids of topics: one that is deleted and made anew is known only "
            "by offsets that the cluster has not got any more."
        )
        found.append(Finding("topic_ids", problem, "", Severity.NOTES))
    return tuple(dict.fromkeys(found))


def lags(definition: SourceDefinition, contracts: Contracts, landing: Path) -> list[Lag]:
    """Return how far every partition of ``definition`` has landed, and what the cluster holds.

    ``landing``: the home's landing folder, which is only read. Raises ``KafkaRefused`` if no contract names
    the source, and ``KafkaUnreachable``.
    """
    assert definition.kafka is not None
    _require_contract(definition, contracts)
    landed: dict[Partition, OffsetSpan] = {}
    times: dict[Partition, datetime] = {}
    waiting: dict[Partition, str] = {}
    if (landing / definition.name).is_dir():
        store = LandingStore(landing, definition.name)
        landed, times = standing_offsets(store), landed_times(store)
        parked = ParkedTables.of(store, definition.tables(contracts))
        waiting = parked.waiting(
            noted_partitions(store), {place: span.next for place, span in landed.items()}
        )
    with Cluster(definition.name, definition.kafka) as cluster:
        found = []
        for held in cluster.held():
            place, span = held.place, landed.get(held.place)
            landed_to = None if span is None else span.next
            found.append(Lag(held, landed_to, times.get(place), waiting.get(place, "")))
        return found


def _require_contract(definition: SourceDefinition, contracts: Contracts) -> None:
    if not definition.tables(contracts):
        raise KafkaRefused(
            f"No contract names the source {definition.name}, so nothing says what its tables are.",
            fix=f"Write contracts with that x-cdc.source {definition.name} (contracts/data).",
        )
