"""Collect the facts of a report: manifests of landed batches, commits in the tables' own logs, and the notes
of comparisons with the source.

Nothing else is read: no row, no server, no event log of Dagster. The amount that is read is bounded, so a
report of a large home takes seconds; the report says what it left out.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from deltalake.exceptions import DeltaError

from omnisupport_ingest.lake import layout
from omnisupport_ingest.lake.commit import NOTE
from omnisupport_ingest.lake.snapshot import TableSnapshot
from omnisupport_ingest.lake.table import LakeTable
from omnisupport_ingest.landing.landed import Landed
from omnisupport_ingest.landing.manifest import Manifest
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.layers.lateness import Lateness
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.position import Position
from omnisupport_ingest.read.freshness import ServiceLevel, freshness, service_level, verified_in_words
from omnisupport_ingest.read.verified import verified_of
from omnisupport_ingest.storage import at_hand, has_landed
from omnisupport_ingest.windows import OUT_OF_RANGE

MOST_BATCHES = 2000
MOST_COMMITS = 500
"""Number of the newest batches of each source, and of the newest commits of each table, that are read."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A landed batch.

    ``first_commit``: its time, if the batch is a part of the stream with events; else None.
    ``last``: by table (schema and name), an upper bound of the positions of its events.
    """

    batch_id: str
    kind: str
    landed_at: datetime
    events: int
    bytes: int
    first_commit: datetime | None
    watermark: datetime | None
    windows: tuple[str, ...]
    tables: Mapping[str, int]
    last: Mapping[str, Position]


@dataclass(frozen=True, slots=True)
class TableCommit:
    """A commit in the log of a table.

    ``position``: the highest that it shows; None if its entry names none. ``size``: bytes of the table's
    files after it. ``written``: bytes of the files that it added.
    """

    version: int
    at: datetime
    run_id: str | None
    position: Position | None
    written: int
    size: int


@dataclass(frozen=True, slots=True)
class TableFacts:
    """A table of the lake, and its newest commits in order.

    ``name``: for people. ``source_table``: schema and name at the source; None if the lake's table holds
    several tables.
    """

    name: str
    source_table: str | None
    rows: int
    commits: tuple[TableCommit, ...]


@dataclass(frozen=True, slots=True)
class WindowCounts:
    """Counts of a window that has events: dropped copies, late events and withheld events."""

    window: str
    starts: datetime
    duplicates: int
    late: int
    withheld: int


@dataclass(frozen=True, slots=True)
class Promise:
    """What is promised of a dimension, and how it stood when the report was made.

    ``verified``: result of the last comparison with the source, in words; None if there was none.
    """

    table: str
    level: ServiceLevel
    verified: str | None


@dataclass(frozen=True, slots=True)
class SourceFacts:
    """All facts of one source. ``left_out``: the number of older batches that were not read.

    ``out_of_range``: events in quarantine that belong to no window.
    """

    source: str
    batches: tuple[Batch, ...]
    left_out: int
    tables: tuple[TableFacts, ...]
    windows: tuple[WindowCounts, ...]
    problem: str | None = field(default=None)
    promises: tuple[Promise, ...] = ()
    out_of_range: int = 0


def source_facts(workspace: Workspace, source: str, *, most: int = MOST_BATCHES) -> SourceFacts | None:
    """Return the facts of ``source``; None if nothing has landed. ``most``: how many of the newest batches
    to read."""
    if not has_landed(workspace.home.path, source):
        return None
    store = workspace.landing(source)
    landed = store.landed()
    names = store.batch_ids()
    if not names:
        return None
    newest = _newest(workspace, source, names, most)
    batches = sorted((_batch(store.read(name)) for name in newest), key=lambda each: each.landed_at)
    windows = {window for each in batches for window in each.windows}
    return SourceFacts(
        source=source,
        batches=tuple(batches),
        left_out=len(names) - len(batches),
        tables=tuple(_tables(workspace, source)),
        windows=tuple(_windows(workspace, source, windows)),
        problem=" ".join(_problems(workspace, source, landed)) or None,
        promises=tuple(_promises(workspace, source, store, landed)),
        out_of_range=_withheld(_look(workspace.deduped(source)), OUT_OF_RANGE),
    )


def _problems(workspace: Workspace, source: str, landed: Landed) -> Iterator[str]:
    if landed.gap is not None and not landed.gap.is_repaired:
        yield str(landed.gap)
    for table, _, _ in _tables_of(workspace, source):
        try:
            table.look()
        except DeltaError as error:
            # Its message may quote statistics, and so values of rows.
            problem = f"The log of {table.spec.path} cannot be read ({type(error).__name__})"
            yield f"{problem}: omnisupport-ingest doctor"


def _look(table: LakeTable) -> TableSnapshot | None:
    """Return the newest version; None without a table, or if its log cannot be read (``_problems``)."""
    try:
        return table.look()
    except DeltaError:
        return None


def _promises(workspace: Workspace, source: str, store: LandingStore, landed: Landed) -> Iterator[Promise]:
    now = datetime.now(UTC)
    for contract in workspace.contracts.of_source(source):
        net_changes, dimension = _look(workspace.net_changes(contract)), _look(workspace.dimension(contract))
        behind = freshness(contract, net_changes, dimension, store, landed)
        verified = verified_of(workspace.home, contract)
        level = service_level(contract, behind, verified, now)
        yield Promise(f"dim_{contract.name}", level, verified_in_words(verified, now))


def _newest(workspace: Workspace, source: str, names: list[str], most: int) -> list[str]:
    """Return the batches that landed last, by the times of their manifests."""
    folder = workspace.home.path / "landing" / source / "manifests"
    if len(names) <= most:
        return names
    times = {name: (folder / f"{name}.json").stat().st_mtime_ns for name in names}
    return sorted(names, key=times.__getitem__)[-most:]


def _batch(manifest: Manifest) -> Batch:
    tables: Counter[str] = Counter()
    last: dict[str, Position] = {}
    for file in manifest.files:
        tables.update(file.rows_per_table)
        for name in file.rows_per_table:
            last[name] = max(last.get(name, file.last), file.last)
    stream = manifest.stream
    kind = "stream" if stream is not None else "snapshot" if manifest.chunk is not None else "file"
    return Batch(
        batch_id=manifest.batch_id,
        kind=kind,
        landed_at=manifest.arrival.landed_at,
        events=manifest.rows,
        bytes=sum(file.bytes for file in manifest.files),
        first_commit=stream.first_commit_ts if stream is not None else None,
        watermark=manifest.arrival.watermark,
        windows=manifest.windows,
        tables=dict(tables),
        last=last,
    )


def _tables_of(workspace: Workspace, source: str) -> Iterator[tuple[LakeTable, str, str | None]]:
    """Yield each table of the lake, its name in the report, and the table of the source that it shows."""
    shared = (workspace.raw(source), workspace.deduped(source), workspace.quarantine(source))
    yield from ((table, table.spec.path.rpartition("/")[2], None) for table in shared)
    for contract in workspace.contracts.of_source(source):
        yield workspace.net_changes(contract), f"net_changes/{contract.name}", None
        yield workspace.dimension(contract), f"dim_{contract.name}", contract.full_name
        yield workspace.history(contract), f"dim_{contract.name}_history", None


def _tables(workspace: Workspace, source: str) -> Iterator[TableFacts]:
    for table, name, source_table in _tables_of(workspace, source):
        snapshot = _look(table)
        if snapshot is not None:
            files = snapshot.all_files()
            size = sum(file.bytes for file in files)
            commits = tuple(commits_of(table.folder, snapshot.version, size))
            yield TableFacts(name, source_table, sum(file.rows for file in files), commits)


def commits_of(folder: Path, version: int, size: int, *, most: int = MOST_COMMITS) -> Iterator[TableCommit]:
    """Yield the newest commits of the Delta table in ``folder``, in order, as far back as the log has
    entries.

    ``version``: the newest one, at which the data files have ``size`` bytes.
    """
    commits: list[TableCommit] = []
    for number in range(version, max(-1, version - most), -1):
        try:
            text = at_hand(folder / "_delta_log" / f"{number:020d}.json").read_text()
        except FileNotFoundError:
            break
        commit, grown = _commit(number, [json.loads(line) for line in text.splitlines() if line], size)
        if commit is not None:
            commits.append(commit)
        size -= grown
    yield from reversed(commits)


def _commit(version: int, actions: list[dict[str, Any]], size: int) -> tuple[TableCommit | None, int]:
    """Return the commit (None if this program did not make it), and by how many bytes the table grew."""
    gone = {each["remove"]["path"] for each in actions if "remove" in each}
    written = sum(_written(each["add"], gone) for each in actions if "add" in each)
    added = sum(_bytes(each["add"]) for each in actions if "add" in each)
    removed = sum(_bytes(each["remove"]) for each in actions if "remove" in each)
    info: Mapping[str, Any] = next((each["commitInfo"] for each in actions if "commitInfo" in each), {})
    note = info.get(NOTE)
    if not isinstance(note, dict):
        return None, added - removed
    positions = [each.get("position") for each in note.get("windows") or () if each.get("position")]
    commit = TableCommit(
        version=version,
        at=datetime.fromtimestamp(info.get("timestamp", 0) / 1000, UTC),
        run_id=note.get("run_id"),
        position=max((Position.parse(each) for each in positions), default=None),
        written=written,
        size=size,
    )
    return commit, added - removed


def _written(add: Mapping[str, Any], gone: Collection[str]) -> int:
    """Return the bytes that a commit wrote for the file that it adds. If the file was there before, only
    its deletion vector is new."""
    vector = add.get("deletionVector")
    return _bytes(add) if vector is None or add["path"] not in gone else int(vector["sizeInBytes"])


def _bytes(action: Mapping[str, Any]) -> int:
    return 0 if layout.is_state(action["path"]) else int(action.get("size") or 0)


def _windows(workspace: Workspace, source: str, windows: set[str]) -> Iterator[WindowCounts]:
    judged, landed = _look(workspace.deduped(source)), workspace.landing(source).landed()
    lateness = Lateness.of(workspace, source)
    for window in sorted(windows - {OUT_OF_RANGE}):
        state = judged.state(window) if judged is not None else None
        counts = state.checkpoint if state is not None else None
        yield WindowCounts(
            window=window,
            starts=workspace.grid.start_of(window),
            duplicates=counts.duplicates if counts is not None else 0,
            late=sum(each.events for each in lateness.late_parts(landed.parts(window))),
            withheld=_withheld(judged, window),
        )


def _withheld(judged: TableSnapshot | None, window: str) -> int:
    state = judged.state(window) if judged is not None else None
    return state.checkpoint.quarantined if state is not None else 0
