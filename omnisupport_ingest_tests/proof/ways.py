"""The same random histories through every way in: each home must end in the dimension that the oracle says.

A way can be told less than landing can hold: Debezium has no word for a snapshot's end, an unreadable
image or two contents of one position, and none for ``NaN`` and infinity. So of a history the events are
taken that every way can tell (``tellable``), and all ways get the same ones: in several deliveries, with
copies, out of order. Windows that some of it comes too late for are replayed, as a platform does.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import cached_property, partial
from itertools import chain, islice
from pathlib import Path
from random import Random
from typing import Any

from pyspark.sql import SparkSession

from omnisupport_ingest.contracts.kafka_topics import KafkaTopics
from omnisupport_ingest.contracts.sources import SourceDefinition, SourceKind
from omnisupport_ingest.sources.debezium.land import Inlet, land
from omnisupport_ingest.sources.debezium.positions import packed
from omnisupport_ingest.sources.kafka.run import KafkaSource
from omnisupport_ingest.sources.manifests.events import land_events
from omnisupport_ingest.sources.manifests.seed_manifest import load_manifest
from omnisupport_ingest_tests.oracle.model import Event, Image, Key, Position, TableShape
from omnisupport_ingest_tests.proof import compare
from omnisupport_ingest_tests.proof.by_alters import WHOLE, Extent, prove_alters
from omnisupport_ingest_tests.proof.by_cursor import prove_by_cursor
from omnisupport_ingest_tests.proof.by_deliveries import prove_by_deliveries
from omnisupport_ingest_tests.proof.compare import Difference
from omnisupport_ingest_tests.proof.delivery import CHUNK, STREAM, Batch
from omnisupport_ingest_tests.proof.expected import Expected, is_whole
from omnisupport_ingest_tests.proof.history import SPAN, START, Told, lane, tx_id_of
from omnisupport_ingest_tests.proof.landed import Landed
from omnisupport_ingest_tests.proof.platform import Platform
from omnisupport_ingest_tests.proof.policies import PROTECTIONS
from omnisupport_ingest_tests.proof.privacy import Hidden, Sought, hidden_by
from omnisupport_ingest_tests.proof.run import ProofFailed
from omnisupport_ingest_tests.proof.subjects import Left
from omnisupport_ingest_tests.proof.tables import (
    KEY,
    LEARNABLE,
    NO_VALUE,
    SHAPES,
    SOURCE,
    TYPES,
    Terms,
    held,
    readable_at_rest,
    shapes_of,
)
from omnisupport_ingest_tests.proof.tally import Tally
from omnisupport_ingest_tests.sources.kafka.broker import Broker, running_broker

LANES = 20
"""Histories that go through every way in one home each, at most."""

TERMS = {shape.name: Terms((), 900, 1000) for shape in SHAPES}
"""Contracts that refuse nothing: what the ways differ in is not judging."""


@dataclass(frozen=True)
class Turn:
    """The contracts become other ones before the delivery number ``before``, from 0.

    They learn columns that some of the histories have, and of personal data they say what ``PROTECTIONS`` has
    under the number ``protecting``.
    """

    before: int
    protecting: int

    @classmethod
    def of(cls, way: str, seeds: range) -> Turn:
        """The one that is drawn for ``way`` and the histories of ``seeds``."""
        rng = Random(f"turn of {way} {seeds.start} {len(seeds)}")
        return cls(rng.randrange(3), rng.randrange(1, len(PROTECTIONS)))

    @property
    def terms(self) -> Mapping[str, Terms]:
        protecting = PROTECTIONS[self.protecting]
        return {table: each.under(protecting, table, LEARNABLE[table]) for table, each in TERMS.items()}

    def take(self, platform: Platform) -> None:
        """Have the contracts be these from now on."""
        for table, columns in LEARNABLE.items():
            for column in columns:
                platform.learn(table, column)
        platform.change_law(self.terms, {})


_SHOWN = 3
"""Differences that a failure names."""

_UNSENT = "__debezium_unavailable_value"
_OF_NO_WAY = frozenset(("NaN", "infinity", NO_VALUE))


class Known(Expected):
    """What the layers must hold of events that are all accepted."""

    def __init__(self, events: Sequence[Event], shapes: Sequence[TableShape], hidden: Hidden) -> None:
        self.shapes, self.hidden, self.copies, self.verdicts = shapes, hidden, {}, {}
        self._shown_since = {shape.name: None for shape in shapes}
        self._landed = Left(Landed(), (), {})
        self._states, self._versions = {}, {}
        self._accepted = [(event.source_ts.strftime("%Y-%m-%dT%H00"), event) for event in events]

    def events(self, table: str) -> list[tuple[str, Event]]:
        return [(window, event) for window, event in self._accepted if event.table == table]

    @cached_property
    def under_policies(self) -> dict[str, Sought]:
        return self.hidden.values((event, None) for _, event in self._accepted)


def tellable(seeds: range) -> list[Event]:
    """The events of the histories of ``seeds`` that every way can tell, in log order, one per position."""
    found: dict[Position, Event] = {}
    for seed in seeds:
        for told in lane(seed, epochs=1, sure_order=True):
            if _is_tellable(told):
                found.setdefault(told.event.at, _plain(told.event))
    events = sorted(found.values(), key=lambda event: event.at)
    # A key change whose delete cannot be told is a creation like any other.
    deletes = {(event.at, event.key) for event in events if event.op == "d"}
    return [
        event if (event.at.below(), event.moved_from) in deletes else replace(event, moved_from=None)
        for event in events
    ]


def _is_tellable(told: Told) -> bool:
    event = told.event
    in_time = START - timedelta(minutes=55) <= event.source_ts <= START + SPAN + timedelta(hours=2)
    of_a_row = event.op == "t" or (event.op in "crud" and is_whole(event.key))
    known = event.table in TERMS and event.identity is None and told.unreadable is None
    return in_time and of_a_row and known and (event.moved_from is None or is_whole(event.moved_from))


def _plain(event: Event) -> Event:
    """``event`` as every way carries it: no value of its type is NULL, and only updates have an old image."""

    def image(given: Image | None) -> Image | None:
        return given and {
            name: None
            if (name.removesuffix("_2") in TYPES and text in _OF_NO_WAY) or _is_nested(name, text)
            else text
            for name, text in given.items()
        }

    before = image(event.before) if event.op == "u" else None
    return replace(event, before=before, after=image(event.after))


def _is_nested(name: str, text: str | None) -> bool:
    return name == "tags" and text is not None and text.startswith("{{")


def by_debezium(events: Sequence[Event]) -> list[Event]:
    """``events`` at their positions as Debezium's, which ``source.lsn`` and ``total_order`` say."""
    places: dict[int, list[int]] = defaultdict(list)
    for event in events:
        places[event.at.commit_lsn].append(event.at.ordinal)
    ranks = {
        (lsn, ordinal): number
        for lsn, ordinals in places.items()
        for number, ordinal in enumerate(sorted(ordinals), start=1)
    }
    return [
        replace(
            event,
            at=event.at._replace(ordinal=packed(event.at.commit_lsn, ranks[event.at[1:]])),
        )
        for event in events
    ]


@dataclass(frozen=True)
class Record:
    """An event as Debezium writes it to a topic."""

    key: Mapping[str, Any] | None
    value: Mapping[str, Any]
    headers: Mapping[str, str]

    @property
    def line(self) -> bytes:
        """The whole record as a line of a file."""
        whole = {"topic": "desk", "key": self.key, "value": self.value, "headers": self.headers}
        return json.dumps(whole).encode() + b"\n"


def record_of(event: Event) -> Record:
    """``event``, which stands where ``by_debezium`` has put it."""
    lsn, order = divmod(event.at.ordinal, 1 << 14)
    old = {} if event.moved_from is None else {"__debezium.oldkey": json.dumps(_key(event.moved_from))}
    key = None if event.key is None else _key(event.key)
    after = None
    if event.op in "cru":
        after = {**(key or {}), **dict.fromkeys(event.unchanged, _UNSENT), **_row(event.after)}
    before = {**(key or {}), **_row(event.before)} if event.op == "d" or event.before else None
    value = {
        "op": event.op,
        "before": before,
        "after": after,
        "source": {
            "ts_ms": int(event.source_ts.timestamp() * 1000),
            "schema": "public",
            "table": event.table,
            "txId": tx_id_of(event),
            "lsn": lsn,
            "sequence": json.dumps([str(event.at.commit_lsn), str(lsn)]),
        },
        "transaction": {"id": "1", "total_order": order},
    }
    return Record(key, value, old)


def _key(key: Key) -> dict[str, int]:
    return {name: int(text) for name, text in zip(KEY, key, strict=True)}


def _row(image: Image | None) -> dict[str, Any]:
    return {name: _value(name, text) for name, text in (image or {}).items()}


def _value(name: str, text: str | None) -> Any:
    """A value as Debezium's default modes write one of the column's type; decimals by their text."""
    if text is None or name not in TYPES or name == "cost":
        return text
    found = held(SHAPES[0], name, text)
    if isinstance(found, datetime):
        return found.astimezone(UTC).isoformat()
    return list(found) if isinstance(found, tuple) else found


Way = Callable[["Home", Sequence[Sequence[Event]]], Iterator[None]]
"""Lands the deliveries one after the other; after each the platform takes in what there is."""


@dataclass
class Home:
    """A home of its own for one way."""

    folder: Path
    platform: Platform
    resources: ExitStack

    @property
    def inlet(self) -> Inlet:
        """Where events of Debezium land; the landing clock is an hour further each time."""
        workspace = self.platform.workspace
        clock = iter(START + SPAN + timedelta(minutes=number) for number in range(10_000))
        return Inlet(
            self.platform.landing,
            workspace.grid,
            workspace.contracts,
            captured="another",
            clock=lambda: next(clock),
        )

    def file(self, number: int, events: Sequence[Event]) -> Path:
        path = self.folder / f"delivery_{number}.jsonl"
        path.write_bytes(b"".join(record_of(event).line for event in events))
        return path


def log(home: Home, deliveries: Sequence[Sequence[Event]]) -> Iterator[None]:
    """As capture lands: changes in a stream, rows of a snapshot in chunks."""
    for number, events in enumerate(deliveries):
        in_order = sorted(events, key=lambda event: event.at)
        for kind, ops in ((STREAM, "cudt"), (CHUNK, "r")):
            told = tuple(Told(event) for event in in_order if event.op in ops)
            if told:
                home.platform.land(Batch(kind, 1, START + SPAN + timedelta(minutes=number), told))
        yield


def files(home: Home, deliveries: Sequence[Sequence[Event]]) -> Iterator[None]:
    """As files of Debezium's events; the first one comes twice."""
    for number, events in enumerate(deliveries):
        path = home.file(number, events)
        landed = land(path, home.inlet)
        assert not landed.already_landed and landed.tally is not None and landed.tally.odd == 0
        assert land(path, home.inlet).already_landed
        yield


def manifests(home: Home, deliveries: Sequence[Sequence[Event]]) -> Iterator[None]:
    """As deliveries with a manifest each, in the mode ``cdc``, of two files."""
    for number, events in enumerate(deliveries):
        half = len(events) // 2
        paths = [
            home.file(10 * number + part, each) for part, each in enumerate((events[:half], events[half:]))
        ]
        described = home.folder / f"manifest_{number}.json"
        described.write_text(
            json.dumps(_manifest(home, described.stem, {path: path.read_bytes() for path in paths}))
        )
        seed = load_manifest(described, home.platform.workspace.contracts)
        assert land_events(seed, home.inlet).examined.faults == []
        yield


def _manifest(home: Home, name: str, held_by: Mapping[Path, bytes]) -> dict[str, Any]:
    contract = home.platform.workspace.contracts.find(SOURCE, "public", SHAPES[0].name)
    assert contract is not None, "the table has a contract"
    return {
        "name": name,
        "description": "Events of a random history.",
        "owner": "team:tests",
        "license": "CC0-1.0",
        "load_mode": "cdc",
        "contract": {
            "source": SOURCE,
            "schema": "public",
            "table": contract.table,
            "version": contract.version,
        },
        "files": [
            {"path": path.name, "sha256": hashlib.sha256(lines).hexdigest(), "rows": lines.count(b"\n")}
            for path, lines in held_by.items()
        ],
        "gates": {
            **dict.fromkeys(("checksum", "row_count", "schema", "license", "missing_file"), "reject"),
            **dict.fromkeys(("unknown_column", "duplicate_delivery"), "accept"),
            "row": "quarantine",
        },
    }


def topics(home: Home, deliveries: Sequence[Sequence[Event]]) -> Iterator[None]:
    """Through a Kafka-compatible broker, in two partitions of one topic."""
    broker: Broker = home.resources.enter_context(running_broker(home.folder / "broker.log"))
    topic = f"t{uuid.uuid4().hex[:8]}"
    broker.make_topic(topic, 2)
    settings = {"bootstrap.servers": broker.address, "fetch.wait.max.ms": "50"}
    definition = SourceDefinition(
        SOURCE, SourceKind.KAFKA, "Topics.", kafka=KafkaTopics((topic,), settings, batch_rows=500)
    )
    for events in deliveries:
        # By the contracts that are in force now, as a command takes them.
        source = KafkaSource(definition, home.inlet, home.platform.workspace.home.run)
        for partition in (0, 1):
            records = [record_of(event) for event in events[partition::2]]
            told = ((each.key, each.value, dict(each.headers)) for each in records)
            broker.produce_with_headers(topic, told, partition)
        report = source.sync()
        assert report.finished
        yield


OF_EVENTS: Mapping[str, Way] = {each.__name__: each for each in (log, files, manifests, topics)}

OF_ROWS = {"cursor": prove_by_cursor, "deliveries": prove_by_deliveries}
"""The ways that see rows and no events."""

CAPTURE, CURSOR = "capture", "cursor"
"""The ways whose tables are changed by drawn ALTERs: the first has no other histories."""

WAYS = (*OF_EVENTS, *OF_ROWS, CAPTURE)


def prove_ways(
    seeds: range,
    folder: Path,
    spark: SparkSession,
    ways: Sequence[str] = WAYS,
    *,
    tally: Tally,
    extent: Extent = WHOLE,
) -> None:
    """Bring the histories of ``seeds`` in by each of ``ways``; ``ProofFailed`` says what differs.

    ``tally``: counts what happens, up to a failure too. ``extent``: of the tables that ALTERs change.
    """
    events = tellable(seeds)
    for name in ways:
        turn = Turn.of(name, seeds)
        told = events if name in (*OF_ROWS, log.__name__) else by_debezium(events)
        if name == CAPTURE:
            differs = prove_alters(seeds, folder / name, spark, tally, extent)
        elif name in OF_ROWS:
            differs = OF_ROWS[name](told, folder / name, spark, (turn.before, turn.protecting))
            if name == CURSOR:
                altered = prove_alters(seeds, folder / "altered", spark, tally, extent, by_cursor=True)
                differs = chain(differs, altered)
        else:
            brought = brought_in(OF_EVENTS[name], delivered(seeds, told), turn, folder / name, spark)
            differs = differing(brought, told)
        found = list(islice(differs, _SHOWN))
        if found:
            lanes = sorted({each.lane for each in found if each.lane is not None})[:1]
            raise ProofFailed(f"By the way {name}", found, [line for n in lanes for line in _of(told, n)])
        tally.did(f"events by {name}", len(events))


@dataclass(frozen=True)
class BroughtIn:
    """The home that events were brought into. ``before``: the batches that landed before the turn."""

    platform: Platform
    turn: Turn
    before: frozenset[str]


def brought_in(
    way: Way, deliveries: Sequence[Sequence[Event]], turn: Turn, folder: Path, spark: SparkSession
) -> BroughtIn:
    """Bring ``deliveries`` in by ``way``; the home in which they are in every layer."""
    landed_before = frozenset[str]()
    with ExitStack() as resources:
        platform = Platform(folder, spark, TERMS, {})
        landed = way(Home(folder, platform, resources), deliveries)
        for number in range(len(deliveries)):
            if number == turn.before:
                batches = platform.workspace.landing(SOURCE).landed().batches
                landed_before = frozenset(each.batch_id for each in batches)
                turn.take(platform)
            next(landed)
            platform.catch_up()
        assert next(landed, "nothing more") == "nothing more"
        platform.make_histories()
    return BroughtIn(platform, turn, landed_before)


def differing(brought: BroughtIn, told: Sequence[Event]) -> Iterator[Difference]:
    """What net changes, dimensions and histories differ in from what the oracle makes of ``told``, and what
    any layer shows that a policy hides."""
    terms, workspace = brought.turn.terms, brought.platform.workspace
    shapes = shapes_of(terms, brought.platform.tokens)
    expected = Known(told, shapes, hidden_by(terms, shapes))
    of_layers = {
        "landing": compare.landed_rows(workspace),
        "raw_cdc_staging": compare._rows(workspace.raw(SOURCE)),
    }
    for layer, rows in of_layers.items():
        # What landed before stays as it was.
        later = (row for row in rows if row["batch_id"] not in brought.before)
        yield from compare.at_rest(layer, later, partial(_readable, terms))
    yield from compare._exposed(workspace, expected)
    for shape in expected.shapes:
        yield from compare._net_changes(workspace, expected, shape)
        yield from compare._dimension(workspace, expected, shape)
        yield from compare._history(workspace, expected, shape)


def _readable(terms: Mapping[str, Terms], row: Mapping[str, Any]) -> frozenset[str] | None:
    return readable_at_rest(terms, row["source_table"])


def _of(events: Sequence[Event], seed: int) -> Iterator[str]:
    yield from (repr(event) for event in events if event.key is None or event.key[0] == str(seed))


def delivered(seeds: range, events: Sequence[Event]) -> list[list[Event]]:
    """Three or four parts: mostly in log order, some of each again in a later one, some after its turn."""
    rng = Random(f"ways {seeds.start} {len(seeds)}")
    count = rng.randint(3, 4)
    parts: list[list[Event]] = [[] for _ in range(count)]
    for number, event in enumerate(events):
        part = number * count // len(events)
        if rng.random() < 0.1:
            part = rng.randrange(part, count)
        parts[part].append(event)
        if rng.random() < 0.1:
            parts[rng.randrange(part, count)].append(event)
    if rng.random() < 0.7:
        for each in parts:
            rng.shuffle(each)
    return parts
