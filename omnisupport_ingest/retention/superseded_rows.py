"""Net changes of sealed windows that later rows supersede, and their removal: about one row per key stays.

The windows keep their names, their states and all other rows. The removed rows can be folded again from the
deduped events. That happens if such a window has to be rebuilt (``dimension.net_changes``), for a late event
that it withholds or for another contract. So no record is written before the removal; the commit itself says
who made it.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from omnisupport_ingest.cdc import columnar
from omnisupport_ingest.cdc.life import PositionTuple
from omnisupport_ingest.cdc.superseded import ASKED, POSITIONS, SUPERSEDED, find_superseded, taken_away_in
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.lake import layout
from omnisupport_ingest.lake.commit import WindowChange
from omnisupport_ingest.lake.file_rows import batches_of
from omnisupport_ingest.lake.layout import LakeFile, StagedFile
from omnisupport_ingest.lake.snapshot import TableSnapshot
from omnisupport_ingest.lake.staging import stage_folders
from omnisupport_ingest.lake.state import WindowState
from omnisupport_ingest.lake.table import retrying
from omnisupport_ingest.landing.standing import LandedPart
from omnisupport_ingest.layers.dimension.net_changes import LAYER, THINNED
from omnisupport_ingest.layers.dimension.tied_keys import files_with_ties
from omnisupport_ingest.layers.plan import idempotency_key
from omnisupport_ingest.layers.versions import of_contract
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.processes import scratch_folder
from omnisupport_ingest.retention.rules import Answer, Verdict
from omnisupport_ingest.windows import OUT_OF_RANGE

_WORTH = 2
"""A window is rewritten once one in this many of its rows is superseded. So rewriting is rare, and a window
never holds more than twice the rows it needs."""

_SCRATCH = "superseded-"

_FILE = "_cdc_file"
"""Column with the path of a row's file; no column of a contract may have this name."""

_NO_ROWS = pa.schema(
    [
        ("window", pa.string()),
        *((name, columnar.POSITION if name in POSITIONS else pa.string()) for name in ASKED),
    ]
).empty_table()

_MEMORY = "512MB"


@dataclass(frozen=True, slots=True)
class SupersededRows:
    """Superseded net changes of ``table`` to remove: ``rows`` in the sealed ``windows``.

    ``keep``: how long the contract keeps them. ``files``: how many are rewritten without them; ``bytes``:
    about the share of these files that the rows take.
    """

    table: str
    keep: timedelta
    windows: tuple[str, ...]
    files: int
    rows: int
    bytes: int


@dataclass(frozen=True)
class NeverJudgedAgain:
    """The ``sealed`` windows of a source; and the events that may still be judged otherwise.

    ``above``: by epoch, the lowest position of an event in the other windows. ``only_rises``: every event
    that still lands stands above all of its epoch that have landed. So it is of a log, and of whole
    deliveries of rows without a cursor.
    """

    sealed: frozenset[str]
    above: Mapping[int, PositionTuple]
    only_rises: bool = True


NOTHING_SETTLED = NeverJudgedAgain(frozenset(), {})


def lower(above: dict[int, PositionTuple], part: LandedPart) -> None:
    """Lower the positions in ``above``, by epoch, to include the events of ``part``."""
    first = (part.first.epoch, part.first.commit_lsn.value, part.first.ordinal)
    above[part.epoch] = min(first, above.get(part.epoch, first))


def superseded_rows(
    workspace: Workspace, contract: TableContract, settled: NeverJudgedAgain, watermark: datetime | None
) -> tuple[SupersededRows | None, tuple[Verdict, ...]]:
    """Return the net changes of ``contract`` that could be removed now; the old windows that keep all, and
    why."""
    keep, snapshot = contract.retention.net_changes, workspace.net_changes(contract).look()
    if keep is None or watermark is None or snapshot is None:
        return None, ()
    old = [
        window
        for window in snapshot.windows()
        if window != OUT_OF_RANGE and workspace.grid.end_of(window) + keep <= watermark
    ]
    refusals = {window: _why_whole(snapshot, contract, settled, window) for window in old}
    refused = tuple(
        Verdict(LAYER, window, Answer.REFUSED, f"{why} ({contract.full_name})")
        for window, why in refusals.items()
        if why is not None
    )
    going = [window for window, why in refusals.items() if why is None]
    if not going:
        return None, refused
    with _found(workspace, snapshot, contract, settled) as connection:
        rows = _worth_it(snapshot, connection, going)
    if not rows:
        return None, refused
    files = [file for window in rows for file in snapshot.files(window)]
    size = sum(
        file.bytes * rows[file.window] // max(1, sum(each.rows for each in snapshot.files(file.window)))
        for file in files
    )
    return SupersededRows(contract.name, keep, tuple(rows), len(files), sum(rows.values()), size), refused


def remove_superseded(
    workspace: Workspace,
    contract: TableContract,
    settled: NeverJudgedAgain,
    planned: SupersededRows,
    run_id: str,
) -> tuple[int, int]:
    """Rewrite the ``planned`` windows without their superseded rows, in one commit.

    Returns how many files were rewritten or left the table, and how many bytes that saves. A second call
    changes nothing. The replaced files stay on disk until they are swept as old files.
    """
    left = [0, 0]

    def attempt(snapshot: TableSnapshot) -> None:
        left[:] = [0, 0]
        going = [w for w in planned.windows if _why_whole(snapshot, contract, settled, w) is None]
        if not going:
            return
        with _found(workspace, snapshot, contract, settled) as connection:
            going = list(_worth_it(snapshot, connection, going))
            changes = _changes(snapshot, contract, connection, going) if going else []
        if changes:
            before = [file for window in going for file in snapshot.files(window)]
            after = [file for change in changes for file in change.add]
            snapshot.commit(changes, run_id=run_id)
            left[:] = [len(before), sum(f.bytes for f in before) - sum(f.bytes for f in after)]

    retrying(attempt, workspace.net_changes(contract))
    return left[0], left[1]


def _why_whole(
    snapshot: TableSnapshot, contract: TableContract, settled: NeverJudgedAgain, window: str
) -> str | None:
    """Return why ``window`` keeps all of its rows; None if superseded ones may be removed."""
    state = snapshot.state(window)
    if not settled.only_rises:
        return "an event may still land between two that have landed, and ask for a row that left"
    if window not in settled.sealed:
        return "raw has its events, and it may be judged again"
    if state is None or not state.closed:
        return "it is not closed"
    if not _is_of(snapshot, contract, state):
        return "it was made by another contract"
    if not _has_files(snapshot, window):
        return "a file of its net changes is gone from disk"
    return None


def _above(
    workspace: Workspace, snapshot: TableSnapshot, contract: TableContract, settled: NeverJudgedAgain
) -> Mapping[int, PositionTuple]:
    """Return ``settled.above``, lowered to events of sealed windows that the net changes do not show yet.

    These are events of the table in windows that wait to be folded, for the first time or by this contract,
    or that have lost a file. Any of them may turn out to be a key change that takes columns from just below
    itself.
    """
    above, store = dict(settled.above), workspace.landing(contract.source)
    for window in settled.sealed:
        state = snapshot.state(window)
        shown = state is not None and _is_of(snapshot, contract, state) and _has_files(snapshot, window)
        taken = frozenset(state.batches) if shown and state is not None else frozenset()
        for part in () if store.has_just(window, taken) else store.parts(window):
            if part.batch_id not in taken and contract.full_name in part.rows_per_table:
                lower(above, part)
    return above


def _is_of(snapshot: TableSnapshot, contract: TableContract, state: WindowState) -> bool:
    return state.versions == of_contract(contract) and not snapshot.retyped


def _has_files(snapshot: TableSnapshot, window: str) -> bool:
    return all(Path(file.stored).exists() for file in snapshot.files(window))


@contextmanager
def _found(
    workspace: Workspace, snapshot: TableSnapshot, contract: TableContract, settled: NeverJudgedAgain
) -> Iterator[duckdb.DuckDBPyConnection]:
    """Yield a connection with the table ``SUPERSEDED``, which lists the superseded rows of sealed windows."""
    windows = [w for w in snapshot.windows() if _why_whole(snapshot, contract, settled, w) is None]
    files = [file for window in windows for file in snapshot.files(window)]
    with (
        scratch_folder(workspace.home.run, _SCRATCH) as scratch,
        # No failpoint: scratch files, which leave with the folder.
        duckdb.connect(f"{scratch}/rows.duckdb", config={"threads": 1}) as connection,
    ):
        connection.execute(f"SET memory_limit = '{_MEMORY}'")
        window_of = pa.table(
            {"path": [each.uri for each in files], "window": [each.window for each in files]}
        )
        connection.register("window_of", window_of)
        columns = ", ".join(f"rows.{name}" for name in ASKED)
        named = f"JOIN window_of ON window_of.path = rows.{_FILE}"
        _view(connection, "net_rows", f"window_of.window, {columns}", files, named)
        # A key change in any window, however young, takes columns from rows of all windows.
        there = [file for file in snapshot.all_files() if Path(file.stored).exists()]
        _view(connection, "odd_rows", "_cdc_kind, _cdc_key", files_with_ties(there))
        connection.execute(f"CREATE TEMP TABLE taken_away AS {taken_away_in('odd_rows')}")
        find_superseded(connection, _above(workspace, snapshot, contract, settled))
        yield connection


def _view(
    connection: duckdb.DuckDBPyConnection, name: str, columns: str, files: Sequence[LakeFile], more: str = ""
) -> None:
    """Make the view ``name`` of ``columns`` of ``files``; without files it has no rows."""
    if not files:
        connection.register(name, _NO_ROWS)
        return
    # No failpoint: a view of a scratch database.
    paths = ", ".join("'" + each.uri.replace("'", "''") + "'" for each in files)
    connection.execute(
        f"CREATE TEMP VIEW {name} AS SELECT {columns} FROM "
        f"read_parquet([{paths}], filename = '{_FILE}', hive_partitioning = false, union_by_name = true) "
        f"AS rows {more}"
    )


def _worth_it(
    snapshot: TableSnapshot, connection: duckdb.DuckDBPyConnection, windows: Collection[str]
) -> dict[str, int]:
    """Return those of ``windows`` that are worth rewriting, in order, each with the number of rows to
    remove."""
    counted = connection.execute(
        f'SELECT rows."window", count(*) FROM net_rows AS rows JOIN {SUPERSEDED} AS gone '
        'ON gone."window" = rows."window" AND gone.key = rows._cdc_key GROUP BY 1 ORDER BY 1'
    ).fetchall()
    return {
        window: rows
        for window, rows in counted
        if window in windows and rows * _WORTH >= sum(file.rows for file in snapshot.files(window))
    }


def _changes(
    snapshot: TableSnapshot,
    contract: TableContract,
    connection: duckdb.DuckDBPyConnection,
    windows: Sequence[str],
) -> list[WindowChange]:
    changes = []
    for window in windows:
        state = snapshot.state(window)
        assert state is not None, "a window without a state keeps its rows"
        query = f'SELECT key FROM {SUPERSEDED} WHERE "window" = ?'
        gone = connection.sql(query, params=[window])
        assert gone is not None, "a SELECT has a result"
        add = _staged(snapshot, contract, window, gone.to_arrow_table()["key"].combine_chunks())
        checkpoint = replace(state.checkpoint, rows=sum(file.rows for file in add))
        thinned = replace(state, checkpoint=checkpoint, compacted_units={}, carried=THINNED)
        # The fold does not change, so whoever has read the old files need not read the new ones.
        changes.append(WindowChange(window, add, (), thinned, replaces=True, same_rows=True))
    return changes


def _staged(
    snapshot: TableSnapshot, contract: TableContract, window: str, keys: pa.Array
) -> tuple[StagedFile, ...]:
    """Return the files of ``window`` without the rows of ``keys``, at their final paths."""
    table, state, files = snapshot.table, snapshot.state(window), snapshot.files(window)
    assert state is not None, "a window without a state keeps its rows"
    unit = idempotency_key(
        layer=LAYER,
        table=contract.full_name,
        window=window,
        inputs=["thinned", *(file.path for file in files)],
        versions=state.versions,
    )
    draft = table.folder / layout.STAGING / uuid.uuid4().hex
    # No failpoint: a draft that no table names yet.
    try:
        for file in files:
            _write(draft, file, keys)
        return stage_folders(table, [str(draft)], unit=unit, generation={window: state.generation}).of(window)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _write(draft: Path, file: LakeFile, keys: pa.Array) -> None:
    """Write ``file`` below ``draft`` without the rows of ``keys``; write nothing if no row is left."""
    folder = draft.joinpath(*(f"{name}={value}" for name, value in file.partition))
    # No failpoint: a draft that no table names yet.
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    target = folder / f"part-{uuid.uuid4().hex}.parquet"
    written = 0
    schema = pq.read_schema(file.uri)
    with pq.ParquetWriter(target, schema, compression="snappy") as writer:
        for batch in batches_of(file.uri, schema, {}):
            gone = pc.fill_null(pc.is_in(batch["_cdc_key"], value_set=keys), False)
            stay = batch.filter(pc.invert(gone))
            if stay.num_rows:
                writer.write_batch(stay)
                written += stay.num_rows
    if not written:
        target.unlink()
