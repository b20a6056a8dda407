"""The state of tables at one log position: the fold of the events below it.

A position is refused if a snapshot of the table was still being read there, or if its stream has not reached
it: the known events give no state that the source ever had. A position is also refused while events below it
have landed that the lake does not hold yet.

An LSN selects everything that was committed at or below it. A time selects all transactions, in log order,
before the first one with a later commit time. Log order decides, because PostgreSQL takes a commit's time
before it writes the commit: times may run against the log by a little, and after a clock was set back by
much. All transactions with an earlier time together would be a state that the source never had.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime

import duckdb
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from omnisupport_ingest.cdc.current import current_state
from omnisupport_ingest.cdc.fold import fold_events, partitions_for
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.landing.completeness import incomplete_at, is_captured
from omnisupport_ingest.landing.landed import Landed
from omnisupport_ingest.landing.lost_changes import LostChanges
from omnisupport_ingest.landing.manifest import ChunkSpan, Manifest
from omnisupport_ingest.layers.events.event_files import EventFiles
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.position import LOWEST_ORDINAL, Lsn, Position
from omnisupport_ingest.windows import OUT_OF_RANGE
from omnisupport_ingest.wording import counted

At = Position | Lsn | datetime
"""Where to read: at or below an event, at or below an LSN, or at or before a time (timezone-aware)."""

_HIGHEST_LSN = Lsn((1 << 63) - 1)
"""Above every LSN: the lake keeps LSNs as signed numbers."""

_NAMED = 5
"""Tables that a message names."""


class TableIncomplete(IngestError):
    """A table has no complete state at the position: its snapshot is not finished, changes of it are missing,
    or the stream has not come so far.

    Fix: Ask for an earlier position, or wait; have a table read that misses changes (``omnisupport-ingest
    source snapshot TABLE``).
    """


class NotTakenIn(IngestError):
    """Events below the position have landed, and the lake does not hold them yet.

    Fix: Let the pipeline run, by ``omnisupport-ingest up`` or ``materialize``; then read again.
    """


class CannotRead(IngestError):
    """The tables of ``as-of`` are of several sources, or its position does not fit them.

    Fix: Read the tables of each source by themselves; give a time with its zone, and an epoch with an LSN
    alone.
    """

    exit_code = 2


@dataclass(frozen=True)
class Reading:
    """Tables of one source at one position: every event below ``below`` is in, and no other."""

    contracts: tuple[TableContract, ...]
    below: Position
    files: EventFiles

    def table(self, spark: SparkSession, contract: TableContract) -> DataFrame:
        """Return the state of one table: ``current_type`` rows, softly deleted ones included."""
        return self._state(self._folded(spark, contract), contract)

    @contextmanager
    def table_folded_once(self, spark: SparkSession, contract: TableContract) -> Iterator[DataFrame]:
        """Return the state as ``table`` does, and have Spark cache the folded events until the context ends.

        The state is made in two jobs; without the cache each would fold the events again.
        """
        folded = self._folded(spark, contract).persist()
        try:
            yield self._state(folded, contract)
        finally:
            folded.unpersist()

    def _folded(self, spark: SparkSession, contract: TableContract) -> DataFrame:
        events = self.files.events(spark, contract).where(_below(self.below))
        return fold_events(events, contract, partitions=self._parts(contract))

    def _state(self, folded: DataFrame, contract: TableContract) -> DataFrame:
        return current_state(folded, contract, partitions=self._parts(contract))

    def _parts(self, contract: TableContract) -> int:
        return partitions_for(*self.files.size(contract))


def read_as_of(
    workspace: Workspace,
    spark: SparkSession,
    contracts: Sequence[TableContract],
    at: At,
    *,
    epoch: int | None = None,
) -> dict[str, DataFrame]:
    """Return the state of tables of one source at one position, by name: ``current_type`` rows.

    Arguments and errors are those of ``open_reading``.
    """
    reading = open_reading(workspace, contracts, at, epoch=epoch)
    return {contract.name: reading.table(spark, contract) for contract in reading.contracts}


def open_reading(
    workspace: Workspace, contracts: Sequence[TableContract], at: At, *, epoch: int | None = None
) -> Reading:
    """Find the position that ``at`` stands for. It is the same for all ``contracts``, which must be of one
    source.

    Args:
        epoch: of an LSN; None: the newest epoch whose stream reached it.

    Raises:
        CannotRead: the arguments do not fit each other.
        TableIncomplete: a table, which the message names, has no state at the position.
        NotTakenIn: the lake does not hold all events below the position yet.
    """
    sources = sorted({contract.source for contract in contracts})
    if len(sources) != 1:
        raise CannotRead(
            f"Tables of {len(sources)} sources ({', '.join(sources)}) have no position in common.",
            fix="Read the tables of each source by themselves.",
        )
    (source,) = sources
    if epoch is not None and not isinstance(at, Lsn):
        raise CannotRead("An epoch was named, but only an LSN needs one.", fix="Leave the epoch out.")
    # Landing first: the lake, opened afterwards, must hold what landing was seen to hold.
    landed = workspace.landing(source).landed()
    files = EventFiles.newest(workspace, source)
    if files is None or not landed.batches:
        raise NotTakenIn(
            f"Nothing of {source} is in the lake yet.",
            fix="Let the pipeline take in what has landed (omnisupport-ingest up, or materialize).",
        )
    below = _below_which(workspace, source, landed.batches, files, at, epoch)
    _refuse_incomplete(workspace, source, landed, contracts, below)
    _refuse_behind(source, landed.batches, files, below)
    return Reading(tuple(contracts), below, files)


def require_complete(
    workspace: Workspace, source: str, contracts: Sequence[TableContract], position: Position
) -> None:
    """Refuse (``TableIncomplete``), by name, tables of ``source`` without a state at ``position``."""
    _refuse_incomplete(workspace, source, workspace.landing(source).landed(), contracts, position)


def _refuse_incomplete(
    workspace: Workspace,
    source: str,
    landed: Landed,
    contracts: Sequence[TableContract],
    position: Position,
) -> None:
    if not landed.captured:
        return
    _refuse_former_keys(contracts, position)
    batches = landed.around_snapshots(position.epoch)
    lost = LostChanges(workspace.landing(source).folder, position.epoch).all()
    faults = [
        incomplete
        for contract in contracts
        if (incomplete := incomplete_at(batches, contract.name, position, lost)) is not None
    ]
    if not faults:
        return
    problems = " ".join(each.problem for each in faults)
    if landed.gap is not None and landed.gap.epoch == position.epoch:
        raise TableIncomplete(f"{problems} {landed.gap}", fix=landed.gap.fix)
    starts = [each.starts for each in faults if each.starts is not None]
    if len(starts) == len(faults) > 1:
        names = [each.table for each in faults]
        more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
        raise TableIncomplete(
            f"{', '.join(names[:_NAMED])}{more} have no state at {position.commit_lsn} in epoch "
            f"{position.epoch}: the last of their snapshots was read at {max(starts)}.",
            fix=f"Ask for {max(starts)} or later, or for a later time.",
        )
    raise TableIncomplete(problems, fix=" ".join(dict.fromkeys(each.fix for each in faults)))


def _refuse_former_keys(contracts: Sequence[TableContract], position: Position) -> None:
    """Refuse a position at which a table had another key than its contract has now."""
    for contract in contracts:
        since = contract.key_since
        if since is not None and (position.epoch, position.commit_lsn) < (since.epoch, since.commit_lsn):
            raise TableIncomplete(
                f"Below {since.commit_lsn} in epoch {since.epoch}, {contract.name} had another key than "
                f"({', '.join(contract.key)}): its events there name their rows differently.",
                fix=f"Ask for {since.commit_lsn} or later, or for a later time. What came before is in "
                "deduped_events and raw_cdc_staging.",
            )


def _below_which(
    workspace: Workspace,
    source: str,
    batches: Sequence[Manifest],
    files: EventFiles,
    at: At,
    epoch: int | None,
) -> Position:
    if isinstance(at, Position):
        return Position(at.epoch, at.commit_lsn, at.ordinal + 1)
    if isinstance(at, Lsn):
        if not is_captured(batches):
            raise CannotRead(
                f"{source} comes by files, whose events have no commit LSN of their own.",
                fix="Ask for a time, or for the position of an event.",
            )
        chosen = _epoch_at(batches, at) if epoch is None else epoch
        landed_epochs = sorted({batch.epoch for batch in batches})
        if chosen not in landed_epochs:
            raise CannotRead(
                f"Nothing has landed from {source} in epoch {chosen}.",
                fix=f"Name one that has landed ({', '.join(map(str, landed_epochs))}), or leave it out: "
                "the newest whose stream reached the LSN is taken.",
            )
        return Position(chosen, Lsn(min(at.value + 1, _HIGHEST_LSN.value)), 0)
    if at.tzinfo is None:
        raise CannotRead(f"{at.isoformat()} has no time zone.", fix="Add one: Z for UTC, or +02:00.")
    later = _first_later(workspace, files, at, _rows_read_again(batches))
    if not is_captured(batches):
        return later or _above_all(batches)
    if later is None:
        return _end_of_newest_stream(source, batches, at)
    # If the epoch begins with this event, the moment may belong to the one before it.
    of_epoch = [file.first for batch in batches if batch.epoch == later.epoch for file in batch.files]
    earlier = [batch for batch in batches if batch.epoch < later.epoch and batch.files]
    if earlier and later <= min(of_epoch, default=later):
        end = _end_of_stream(batches, max(batch.epoch for batch in earlier), at)
        if end is not None:
            return end
    # A transaction is atomic, and so are the rows of a snapshot at one LSN: no part of the first later one is
    # included.
    return Position(later.epoch, later.commit_lsn, 0 if later.ordinal >= 0 else LOWEST_ORDINAL)


def _rows_read_again(batches: Sequence[Manifest]) -> list[str]:
    """Return epoch and id of the chunks of rows that were read again (``KeyChangeReading``).

    They were added to a finished snapshot, at the LSN where it ended. In batches of earlier versions their
    clock is later than that of transactions above them.
    """
    snapshots: dict[tuple[int, str, str], list[ChunkSpan]] = {}
    for batch in batches:
        if (span := batch.chunk) is not None:
            snapshots.setdefault((batch.epoch, span.snapshot_id, span.table), []).append(span)
    found = []
    for (epoch, *_), chunks in snapshots.items():
        high, is_finished = Lsn(0), False
        # The number of the snapshot end is that of the first chunk that was added.
        for span in sorted(chunks, key=lambda each: (each.chunk, not each.boundary)):
            if is_finished and span.low == high:
                found.append(f"{epoch} {span.id}")
            is_finished = is_finished or span.boundary
            high = high if span.boundary else max(high, span.high)
    return found


def _first_later(
    workspace: Workspace, files: EventFiles, moment: datetime, read_again: Sequence[str]
) -> Position | None:
    """Return the lowest position of an event, of any table, that was committed after ``moment``.

    Events with a time that cannot be right are left out, and rows of the chunks ``read_again``.
    """
    # An event is in the window of its time, unless its position had landed in another window first. Then one
    # of the two events is in quarantine, so windows with quarantine files are read too.
    windows = [
        window
        for window in files.deduped.windows()
        if window != OUT_OF_RANGE and (workspace.grid.end_of(window) > moment or files.withheld_in(window))
    ]
    uris = [file.uri for window in windows for file in files.deduped.files(window)]
    uris += [file.uri for window in windows for file in files.withheld_in(window)]
    if not uris:
        return None
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        lowest = connection.execute(
            "SELECT epoch, commit_lsn, ordinal FROM read_parquet(?, hive_partitioning = false) "
            "WHERE source_ts > ?::TIMESTAMPTZ "
            "AND NOT (op = 'r' AND list_contains(?::VARCHAR[], concat(epoch, ' ', chunk_id))) "
            "ORDER BY ALL LIMIT 1",
            [uris, moment.isoformat(), read_again],
        ).fetchone()
    return None if lowest is None else Position(lowest[0], Lsn(lowest[1]), lowest[2])


def _end_of_newest_stream(source: str, batches: Sequence[Manifest], moment: datetime) -> Position:
    """Return the end of what has landed. Raises ``TableIncomplete`` if it does not reach to ``moment``."""
    newest = _newest_stream(batches)
    end = None if newest is None else _end_of_stream(batches, newest.epoch, moment)
    if end is None:
        mark = None if newest is None else newest.arrival.watermark
        reached = "has not begun" if mark is None else f"is known up to {_utc_text(mark)}"
        raise TableIncomplete(
            f"The stream of {source} {reached}; what was committed until {_utc_text(moment)} may still come.",
            fix=("" if mark is None else f"Ask for {_utc_text(mark)} or earlier, or wait. ")
            + "If capture is not running, start it (omnisupport-ingest up).",
        )
    return end


def _end_of_stream(batches: Sequence[Manifest], epoch: int, moment: datetime) -> Position | None:
    """Return the end of the landed stream of ``epoch``, if its watermark has reached ``moment``."""
    newest = _newest_stream([batch for batch in batches if batch.epoch == epoch])
    if newest is None or newest.stream is None:
        return None
    mark = newest.arrival.watermark
    return None if mark is None or mark < moment else Position(epoch, newest.stream.end_lsn, 0)


def _newest_stream(batches: Sequence[Manifest]) -> Manifest | None:
    streams = [batch for batch in batches if batch.stream is not None]
    return max(streams, key=lambda batch: (batch.epoch, batch.batch_id), default=None)


def _utc_text(moment: datetime) -> str:
    return moment.isoformat().replace("+00:00", "Z")


def _above_all(batches: Sequence[Manifest]) -> Position:
    last = max((file.last for batch in batches for file in batch.files), default=None)
    return Position(1, Lsn(0), 0) if last is None else Position(last.epoch, last.commit_lsn, last.ordinal + 1)


def _epoch_at(batches: Sequence[Manifest], lsn: Lsn) -> int:
    """Return the newest epoch whose stream has landed at ``lsn``; if there is none, the newest of all."""
    streams = [(batch.epoch, batch.stream) for batch in batches if batch.stream is not None]
    reached = [epoch for epoch, span in streams if span.previous_end_lsn <= lsn < span.end_lsn]
    return max(reached or [batch.epoch for batch in batches])


def _refuse_behind(source: str, batches: Sequence[Manifest], files: EventFiles, below: Position) -> None:
    states = {window: files.deduped.state(window) for window in files.deduped.windows()}
    taken_batches = {
        window: frozenset(state.batches) for window, state in states.items() if state is not None
    }
    missing = {
        batch.batch_id
        for batch in batches
        for file in batch.files
        if file.first < below and batch.batch_id not in taken_batches.get(file.window, ())
    }
    if missing:
        raise NotTakenIn(
            f"Not in the lake yet: {counted(len(missing), 'batch')} of {source} that landed below {below}.",
            fix="Wait for the pipeline (omnisupport-ingest up), or run `omnisupport-ingest materialize`; "
            "then read again.",
        )


def _below(position: Position) -> Column:
    event_position = F.struct(
        F.lit(position.epoch).alias("epoch"),
        F.lit(position.commit_lsn.value).cast("bigint").alias("commit_lsn"),
        F.lit(position.ordinal).cast("bigint").alias("ordinal"),
    )
    return F.struct("epoch", "commit_lsn", "ordinal") < event_position
