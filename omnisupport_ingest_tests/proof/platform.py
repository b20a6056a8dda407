"""A small home on real Spark and Delta: batches land in it, and the production layers take them on."""

from __future__ import annotations

import csv
import json
import shutil
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from hashlib import sha256
from itertools import chain
from pathlib import Path

import orjson
from pyspark.sql import SparkSession

from omnisupport_ingest.contracts.decision_table import COLUMNS, default_decision_table, load_decision_table
from omnisupport_ingest.contracts.learned import LearnedColumns, with_learned
from omnisupport_ingest.contracts.load import TableContract, load_contracts
from omnisupport_ingest.home import Home
from omnisupport_ingest.landing.manifest import ChunkSpan, FileSpan, Manifest, StreamSpan
from omnisupport_ingest.landing.names import chunk_batch_id, file_batch_id, stream_batch_id
from omnisupport_ingest.landing.rows import LandedEvent
from omnisupport_ingest.landing.writer import BatchWriter
from omnisupport_ingest.layers.dimension import dimensions, net_changes
from omnisupport_ingest.layers.dimension.dimensions import GateClosed
from omnisupport_ingest.layers.events import deduped, raw
from omnisupport_ingest.layers.events.event_ref import EventRef
from omnisupport_ingest.layers.histories import history
from omnisupport_ingest.layers.scheduling.pending import pending_windows
from omnisupport_ingest.layers.type_changes import ask_for, waits
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.review.deciding import decide
from omnisupport_ingest.review.erasing import Erased, erase
from omnisupport_ingest.review.subject_erasure import SubjectErased, erase_subject
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.sources.encrypting import encrypting_store
from omnisupport_ingest.storage import at_hand, create_exclusively, storage_of
from omnisupport_ingest.windows import WindowSize, without_sentinel
from omnisupport_ingest_tests.cdc.lanes import scope_text
from omnisupport_ingest_tests.oracle.model import Event, Image, Key
from omnisupport_ingest_tests.proof.delivery import CHUNK, FILE, Batch
from omnisupport_ingest_tests.proof.history import START, Told, tx_id_of
from omnisupport_ingest_tests.proof.policies import KEYS
from omnisupport_ingest_tests.proof.tables import (
    KEY,
    LATER_TYPES,
    LEARNABLE,
    SOURCE,
    Terms,
    column_document,
    write_contracts,
)
from omnisupport_ingest_tests.proof.watch import Watch

WINDOW = WindowSize(60)
_ROUNDS = 6


class NeverDone(AssertionError):
    """Windows stay pending however often they are run."""


class Platform:
    """One home and what runs on it. ``folder`` is made; the landing clock is what each batch says.

    Where ``OMNISUPPORT_STORAGE`` is set, the home keeps landing and lake at a place of its own below it.
    """

    def __init__(
        self, folder: Path, spark: SparkSession, terms: Mapping[str, Terms], actions: Mapping[str, str]
    ) -> None:
        self._folder, self._spark = folder, spark
        self._home = folder / "home"
        self._landed = 0
        self._ends: dict[int, Lsn] = {}
        self._last: dict[int, str] = {}
        self._lost: dict[str, bytes] = {}
        self._numbers = 0
        self._closed: GateClosed | None = None
        self.watch = Watch(SOURCE)
        self.replays = 0
        folder.mkdir(parents=True)
        shared = Settings(_env_file=None).storage
        self._place = None if shared is None else f"{shared.rstrip('/')}/{uuid.uuid4().hex}"
        self._write_secrets()
        self.change_law(terms, actions)

    def _write_secrets(self) -> None:
        for name, secret in KEYS.items():
            file = self._folder / f"{name}.secret"
            file.touch(mode=0o600)
            file.write_text(secret)

    def _opened(self, terms: Mapping[str, Terms], actions: Mapping[str, str]) -> Workspace:
        contracts, table = self._folder / "contracts", self._folder / "decisions.csv"
        current = next(iter(terms.values())).key
        keys = sorted(KEYS, key=lambda name: name != current)
        write_contracts(contracts, terms)
        _write_decisions(table, actions)
        self._law = terms, actions
        settings = Settings(
            home=self._home,
            window=str(WINDOW),
            contracts_dir=contracts,
            decision_table=table,
            source=SOURCE,
            storage=self._place,
            pii_keys=",".join(f"{name}=file:{self._folder / name}.secret" for name in keys),
            _env_file=None,
        )
        home = Home.open(settings.home, WINDOW, now=START, storage=self._place)
        known = load_contracts(contracts, partial(with_learned, home.path))
        return Workspace(settings, home, known, load_decision_table(table))

    def change_law(self, terms: Mapping[str, Terms], actions: Mapping[str, str]) -> None:
        """Other versions of the contracts, another decision table."""
        self.workspace = self._opened(terms, actions)
        self.decisions = self.workspace.decisions
        contracts = self.workspace.contracts.of_source(SOURCE)
        self.landing = encrypting_store(self.workspace.home, SOURCE, contracts)

    @property
    def tokens(self) -> Path:
        """The file of the home's map of tokens."""
        return self.workspace.tokens.path

    def learn(self, table: str, column: str) -> None:
        """Have the contract of ``table`` learn ``column``, as capture does; the next law has it."""
        kind = LATER_TYPES.get(column, "text")
        line = column_document(kind) | {"default": LEARNABLE[table][column]}
        LearnedColumns(self.workspace.home.path, SOURCE).learn(table, {column: line})

    @property
    def has_folders(self) -> bool:
        """Whether landing and lake are folders of this machine."""
        return self._place is None

    @property
    def windows(self) -> list[str]:
        """The windows that something has landed in, without the sentinel."""
        batches = self.workspace.landing(SOURCE).landed().batches
        return without_sentinel(sorted({window for batch in batches for window in batch.windows}))

    def land(self, batch: Batch) -> Manifest:
        """Land ``batch`` through the production writer; its copies are numbered on in ``lsn``.

        A batch that is lost and that nothing continues yet is there meanwhile, as if it went afterwards: who
        lands knows the end of the chain.
        """
        ends = self._lost.keys() & self._last.values()
        for batch_id in ends:
            self._put_back(batch_id)
        manifest = self._land(batch)
        for batch_id in ends:
            self._take_away(batch_id)
        if manifest.stream is not None:
            self._last[batch.epoch] = manifest.batch_id
        return manifest

    def lose(self, batch_id: str) -> None:
        """The manifest of a batch is gone."""
        self._lost[batch_id] = self._manifest(batch_id).read_bytes()
        self._take_away(batch_id)

    def find(self, batch_id: str) -> None:
        """The manifest of a batch that was lost is back, as from a backup."""
        self._put_back(batch_id)
        del self._lost[batch_id]

    def _take_away(self, batch_id: str) -> None:
        manifest = self._manifest(batch_id)
        storage_of(manifest).unlink(manifest)

    def _put_back(self, batch_id: str) -> None:
        manifest = self._manifest(batch_id)
        assert storage_of(manifest).create(manifest, self._lost[batch_id])

    def _manifest(self, batch_id: str) -> Path:
        return self.workspace.landing(SOURCE).folder / "manifests" / f"{batch_id}.json"

    def _land(self, batch: Batch) -> Manifest:
        self._landed += 1
        end = self._ends.get(batch.epoch, Lsn(0))
        text = "\n".join(repr(told) for told in batch.told) + str(self._landed)
        digest = sha256(text.encode()).hexdigest()
        snapshot, next_end = f"{self._landed:016x}", Lsn(end.value + 1)
        name = {
            CHUNK: chunk_batch_id(batch.epoch, snapshot, "any", 0, 1),
            FILE: file_batch_id(digest),
        }.get(batch.kind, stream_batch_id(batch.epoch, end))
        writer = BatchWriter(
            self.landing,
            self.workspace.grid,
            batch.epoch,
            name,
            clock=lambda: batch.landed_at,
        )
        for row, told in enumerate(batch.told, start=1):
            self._numbers += 1
            writer.add(_landed(told, self._numbers, row if batch.kind == FILE else None))
        if batch.kind == CHUNK:
            span = ChunkSpan(snapshot, "any", 0, 1, next_end, next_end, batch.landed_at)
            return writer.seal(chunk=span)
        if batch.kind == FILE:
            return writer.seal(file=FileSpan(digest, f"{name}.jsonl", "", batch.order))
        self._ends[batch.epoch] = next_end
        times = [told.event.source_ts for told in batch.told]
        span = StreamSpan(end, next_end, None, None, None, None, None)
        if times:
            span = StreamSpan(end, next_end, next_end, next_end, 1, times[0], times[-1])
        return writer.seal(stream=span, confirmed_clock=batch.clock)

    def run(
        self,
        windows: Sequence[str],
        *,
        replay: bool = False,
        layers: int = 4,
        tables: Collection[str] | None = None,
    ) -> None:
        """Run the first ``layers`` of raw, deduped, net changes and dimensions. ``tables``: those that are
        visited, None for all."""
        if replay:
            self.watch.replays(self.workspace, windows)
            self.replays += 1
        self._run(windows, replay=replay, layers=layers, tables=tables)
        self._look(replayed=replay)

    def _look(self, *, replayed: bool) -> None:
        # The decision table may say that whatever is asked for is made again.
        remade = self.decisions.decisions["duplicate_event"].action == "replay_window"
        self.watch.look(self.workspace, replayed=replayed or remade)

    def _run(
        self, windows: Sequence[str], *, replay: bool, layers: int = 4, tables: Collection[str] | None = None
    ) -> None:
        for layer in (raw, deduped)[:layers]:
            layer.materialize(self.workspace, self._spark, SOURCE, windows, "proof", replay=replay)
        if layers > 2:
            visited = [each for each in self._tables() if tables is None or each.name in tables]
            works = [partial(self._run_table, each, windows, replay, layers) for each in visited]
            if works:
                _at_once(works)

    def _run_table(self, contract: TableContract, windows: Sequence[str], replay: bool, layers: int) -> None:
        layer = dimensions if layers > 3 else net_changes
        try:
            layer.materialize(self.workspace, self._spark, contract, windows, "proof", replay=replay)
        except GateClosed as closed:
            # Right while some windows are still judged by the contract before; wrong when none is.
            self._closed = closed

    def run_together(self, runs: Sequence[tuple[Sequence[str], bool]]) -> None:
        """Several runs at once: of which windows, and whether to replay them."""
        replayed = [windows for windows, replay in runs if replay]
        self.watch.replays(self.workspace, chain.from_iterable(replayed))
        self.replays += len(replayed)
        _at_once([partial(self._run, windows, replay=replay) for windows, replay in runs])
        self._look(replayed=bool(replayed))

    def make_histories(self) -> int:
        """Make the history of each table; returns how many were written, not the same as before."""
        tables = [self.workspace.history(each) for each in self._tables()]
        before = [table.open().version for table in tables]
        _at_once(
            [
                partial(history.materialize, self.workspace, self._spark, each, "proof")
                for each in self._tables()
            ]
        )
        return sum(table.open().version > version for table, version in zip(tables, before, strict=True))

    def catch_up(self, *, backfill_late: bool = True) -> None:
        """Run what is pending, as sensor and late-arrival backfills would, until nothing is."""
        self._closed = None
        for _ in range(_ROUNDS):
            pending = pending_windows(self.workspace, SOURCE)
            if pending.nothing:
                return
            if pending.late_windows:
                self.run(without_sentinel(pending.late_windows), replay=backfill_late)
            if pending.windows:
                self.run(without_sentinel(pending.windows), tables=pending.tables)
        raise NeverDone(f"after {_ROUNDS} rounds still pending: {self._closed or pending}")

    def review(self, decision: str, events: Iterable[EventRef]) -> None:
        decide(self.workspace, SOURCE, decision, list(events), reviewer="proof", why="drawn by lot")

    def _tables(self) -> list[TableContract]:
        """The contracts whose tables are worked on: not those that wait for a person."""
        contracts = self.workspace.contracts.of_source(SOURCE)
        return [each for each in contracts if waits(self.workspace, each) is None]

    def waiting(self) -> list[TableContract]:
        """The contracts whose tables wait for a person to ask for their new types."""
        working = self._tables()
        return [each for each in self.workspace.contracts.of_source(SOURCE) if each not in working]

    def content_of(self, contract: TableContract) -> dict[tuple[str, str], str]:
        """As ``content``, of the tables of ``contract``."""
        paths = {table.spec.path for table in self.workspace.tables_of(contract)}
        return {place: found for place, found in self.content().items() if place[0] in paths}

    def ask_for_types(self) -> None:
        """A person asks for the tables that wait."""
        for each in self.waiting():
            ask_for(self.workspace, each)

    def erase(self, table: str, key: str) -> Erased:
        """Have the row that ended under ``key`` erased; ``ErasureRefused``."""
        contract = self.workspace.contracts.find(SOURCE, "public", table)
        assert contract is not None, f"{table} has a contract"
        return erase(self.workspace, contract, key, erased_by="proof", why="drawn by lot")

    def erase_subject(self, table: str, key: str) -> SubjectErased:
        """Have whom the row with ``key`` is of erased, or go on with it; ``ErasureRefused``."""
        contract = self.workspace.contracts.find(SOURCE, "public", table)
        assert contract is not None, f"{table} has a contract"
        return erase_subject(self.workspace, contract, key, erased_by="proof", why="drawn by lot")

    def like(self, other: Platform) -> None:
        """What nobody can work out from landing is here as in ``other``: what was erased, and tokens."""
        if other.tokens.exists():
            self.tokens.write_bytes(other.tokens.read_bytes())
        of_other, own = (each.workspace.erasures(SOURCE).folder for each in (other, self))
        for each in storage_of(of_other).listed(of_other):
            copy, content = own / each.path.relative_to(of_other), at_hand(each.path).read_bytes()
            copy.parent.mkdir(parents=True, exist_ok=True)
            create_exclusively(copy, content)

    def forget_the_lake(self) -> None:
        """Delete every table; what people decided stays, for nothing else knows it."""
        for table in self.workspace.tables():
            storage_of(table.folder).remove_folder(table.folder)
        self.watch.forget()

    def go_on_elsewhere(self) -> bool:
        """Have another machine go on where a bucket keeps landing and lake; False with folders.

        Its home has the rest of this one, as from a backup, and no copy of what is in the bucket.
        """
        if self._place is None:
            return False
        lost, self._home = self._home, self._folder / "another"
        shutil.copytree(lost, self._home, ignore=shutil.ignore_patterns("landing", "lake"))
        shutil.rmtree(lost)
        self.change_law(*self._law)
        return True

    def content(self) -> dict[tuple[str, str], str]:
        """The content hash of every window of every table but quarantine, by table and window."""
        found = {}
        for table in self.workspace.tables():
            if not table.exists or table.spec.path.endswith("/quarantine"):
                continue
            snapshot = table.open()
            for window in snapshot.windows():
                state = snapshot.state(window)
                if state is not None and state.checkpoint.rows:
                    found[table.spec.path, window] = state.checkpoint.content_hash
        return found


def _at_once(works: Sequence[Callable[[], object]]) -> None:
    with ThreadPoolExecutor(len(works)) as pool:
        for running in [pool.submit(work) for work in works]:
            running.result()


def _write_decisions(path: Path, actions: Mapping[str, str]) -> None:
    table = load_decision_table(default_decision_table())
    decided = [
        replace(each, action=actions.get(each.scenario, each.action)) for each in table.decisions.values()
    ]
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for each in decided:
            review = str(each.needs_manual_review).lower()
            writer.writerow([each.scenario, each.detected_by, each.action, review, each.notes])


def _landed(told: Told, number: int, file_row: int | None) -> LandedEvent:
    event = told.event
    after = _image(event.after, event) if told.unreadable is None else told.unreadable
    if event.scope is not None:
        after = scope_text(event.scope)
    return LandedEvent(
        epoch=event.at.epoch,
        commit_lsn=event.at.commit_lsn,
        ordinal=event.at.ordinal,
        op=event.op,
        source_ts=event.source_ts,
        tx_id=tx_id_of(event),
        lsn=number,
        source_schema="public",
        source_table=event.table,
        key=_key(event.key),
        before=_image(event.before, event, event.moved_from),
        after=after,
        unchanged=sorted(event.unchanged) or None,
        moved_from_key=_key(event.moved_from),
        chunk_id=None,
        identity=event.identity,
        misplaced=told.misplaced or None,
        file_row=file_row,
        envelope=f"line {number}" if file_row is not None else None,
    )


def _key(key: Key | None) -> str | None:
    return None if key is None else json.dumps(list(key), separators=(",", ":"))


def _image(image: Image | None, event: Event, key: Key | None = None) -> str | None:
    """A row image as capture writes it: with the key's columns in it, and no blank."""
    if image is None:
        return None
    return orjson.dumps({**dict(zip(KEY, key or event.key or (), strict=False)), **image}).decode()
