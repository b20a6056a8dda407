"""Are source and dimensions the same at one LSN? By checksums of key ranges, for every table of a source.

What differs is looked at a second time, at a later LSN: only a key that differs both times counts. So what is
on its way, in any form that ``standing`` does not know, is never an alarm.
"""

from __future__ import annotations

import shutil
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

import duckdb
import psycopg2

from omnisupport_ingest import progress
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.contracts.row_checksum import EVERY_KEY, KeySpan, by_number
from omnisupport_ingest.equality.bisecting import Differing, Remaining, differing
from omnisupport_ingest.equality.standing import MOST_LEFT_OUT, NotComparable, comparable
from omnisupport_ingest.layers.quarantine_files import EventsGone
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.processes import ProcessIdentity
from omnisupport_ingest.read.as_of import TableIncomplete
from omnisupport_ingest.read.dimension_ranges import ROWS_BETWEEN_CUTS, DimensionRanges
from omnisupport_ingest.read.verified import (
    DIFFERS,
    EQUAL,
    NOT_COMPARABLE,
    PART_EQUAL,
    Moment,
    Verified,
    verified_of,
    write_verified,
)
from omnisupport_ingest.sources.postgres.session.dsn import source_dsn
from omnisupport_ingest.sources.postgres.session.errors import (
    ColumnsNotSent,
    SourceUnavailable,
    TableUnreadable,
)
from omnisupport_ingest.sources.postgres.slot.slot import SlotNotMade
from omnisupport_ingest.sources.postgres.snapshot.source_ranges import SourceAt, source_at

PATIENCE_SECONDS = 60.0
"""How long to wait for transactions under way, and then for the lake."""

_SCRATCH = "equality-"


@dataclass(frozen=True)
class Checked:
    """The result of a check of one table: its note, and the keys and ranges that differ."""

    contract: TableContract
    note: Verified
    differing: Differing | None = None


@dataclass(frozen=True)
class CheckOptions:
    """What to check: tables by name (all if empty), in parts of at most ``rows_at_once`` rows (None: whole).

    ``patience`` in seconds. ``advance`` is called before the lake is waited for: without it capture and
    pipeline must be running.
    """

    tables: Sequence[str] = ()
    rows_at_once: int | None = None
    patience: float = PATIENCE_SECONDS
    advance: Callable[[], None] = lambda: None


def check_source(workspace: Workspace, options: CheckOptions) -> list[Checked]:
    """Check tables of the configured log source, and write down what is known now.

    Raises ``SourceUnavailable`` and what connecting raises. Whatever else keeps a table from being compared
    is in its note.
    """
    _remove_left_behind(workspace.home.run)
    source = workspace.settings.source
    contracts = [
        each
        for each in workspace.contracts.of_source(source)
        if not options.tables or each.name in options.tables
    ]
    first = _Round(workspace, options, {}).run(contracts)
    suspects = {each.contract.name: each for each in first if each.note.state == DIFFERS}
    if suspects:
        again = _Round(workspace, options, suspects).run([each.contract for each in suspects.values()])
        second = {each.contract.name: each for each in again}
        first = [_confirmed(workspace, each, second.get(each.contract.name)) for each in first]
    for each in first:
        write_verified(workspace.home, each.contract, each.note)
    return first


def _remove_left_behind(folder: Path) -> None:
    """Remove the scratch folders of killed checks; they may hold rows of the source."""
    for scratch in folder.glob(f"{_SCRATCH}*"):
        process = ProcessIdentity.parse(scratch.name.removeprefix(_SCRATCH).partition("-")[0])
        if process is None or not process.lives():
            # No failpoint: scratch files, which the next command removes if this process is killed.
            shutil.rmtree(scratch, ignore_errors=True)


@dataclass(frozen=True)
class _Round:
    """One comparison with the source.

    ``suspects``: what differed in the round before; only that is compared.
    """

    workspace: Workspace
    options: CheckOptions
    suspects: dict[str, Checked]

    def run(self, contracts: Sequence[TableContract]) -> list[Checked]:
        settings, done = self.workspace.settings, []
        dsn = source_dsn(settings, self.workspace.home)
        progress.reached("waiting for a moment of the source at which no transaction writes")
        try:
            with source_at(dsn, settings.publication, self.options.patience) as source:
                self.options.advance()
                deadline = time.monotonic() + self.options.patience
                for contract in progress.each(contracts, lambda each: f"comparing {each.name}"):
                    done.append(self._table(contract, source, deadline))
        except SlotNotMade:
            why = f"transactions that may write are under way for more than {self.options.patience:.0f} s"
            done = [not_comparable(self.workspace, each, why) for each in contracts]
        return done

    def _table(self, contract: TableContract, source: SourceAt, deadline: float) -> Checked:
        began = time.monotonic()
        try:
            with source.savepoint():
                return self._compared(contract, source, deadline, began)
        except (NotComparable, TableIncomplete, EventsGone, ColumnsNotSent, TableUnreadable) as error:
            why = error.problem
        except SourceUnavailable as error:
            if not isinstance(error.__cause__, psycopg2.errors.LockNotAvailable):
                raise
            why = "it is locked at the source, by a change of its columns, say"
        except psycopg2.Error as error:
            # The message of a data error may quote a value.
            why = f"the source refuses to work it out ({type(error).__name__}): see `preflight`"
        except duckdb.Error as error:
            why = f"the files of the dimension could not be read as they were ({type(error).__name__})"
        return not_comparable(self.workspace, contract, why, time.monotonic() - began)

    def _compared(self, contract: TableContract, source: SourceAt, deadline: float, began: float) -> Checked:
        compared = comparable(self.workspace, contract, source.lsn, deadline)
        moment = Moment(compared.epoch, source.lsn, source.at)
        run = self.workspace.home.run
        # No failpoint: scratch files, which the next command removes if this process is killed.
        with (
            TemporaryDirectory(prefix=f"{_SCRATCH}{ProcessIdentity.current().text}-", dir=run) as scratch,
            DimensionRanges(contract, compared.version.files, Path(scratch)) as lake,
        ):
            unresolved = lake.unresolved_keys(MOST_LEFT_OUT + 1)
            if len(unresolved) > MOST_LEFT_OUT:
                raise NotComparable(
                    f"more than {MOST_LEFT_OUT:,} rows have columns that no accepted event carries",
                    fix="omnisupport-ingest quarantine list",
                )
            left_out = {*compared.moved, *unresolved}
            lake.leave_out(compared.moved)
            rows = source.table(contract)
            remaining = Remaining(rows, rows.numbers_of(left_out), by_number(contract))
            cuts = lake.even_cuts()
            span = self._span(contract, cuts)
            inner = [cut for cut in cuts[1:] if _inside(span, cut, by_number(contract))]
            differing_rows = differing(remaining, lake, span, inner)
            if differing_rows.keys:
                files = rows.write_rows(differing_rows.keys, Path(scratch))
                differing_rows = differing_rows.without(
                    set().union(*(lake.same_rows(file) for file in files))
                )
        note = self._note(contract, moment, span, differing_rows)
        note = replace(note, left_out=len(compared.moved), seconds=round(time.monotonic() - began, 2))
        why_not = nothing_shown(note, differing_rows.rows, len(compared.moved), len(unresolved))
        if why_not is not None:
            unknown = not_comparable(self.workspace, contract, why_not, note.seconds).note
            note = replace(unknown, rows=differing_rows.rows, left_out=len(compared.moved))
        return Checked(contract, note, differing_rows)

    def _span(self, contract: TableContract, cuts: Sequence[str]) -> KeySpan:
        """Return the keys to compare: all, those that differed before, or the next part."""
        if contract.name in self.suspects:
            differing_rows = self.suspects[contract.name].differing
            spans = differing_rows.spans if differing_rows is not None else ()
            return KeySpan(spans[0].start, spans[-1].end) if spans else EVERY_KEY
        most = self.options.rows_at_once
        if most is None or len(cuts) * ROWS_BETWEEN_CUTS <= most:
            return EVERY_KEY
        before = verified_of(self.workspace.home, contract)
        start = before.resume_at if before is not None else None
        order = int if by_number(contract) else str
        first = 0 if start is None else bisect_left([order(cut) for cut in cuts], order(start))
        end = first + max(1, most // ROWS_BETWEEN_CUTS)
        return KeySpan(start, cuts[end] if end < len(cuts) else None)

    def _note(
        self, contract: TableContract, moment: Moment, span: KeySpan, differing_rows: Differing
    ) -> Verified:
        before = verified_of(self.workspace.home, contract)
        through, began = (before.through, before.round) if before is not None else (None, None)
        note = Verified(contract.name, EQUAL, datetime.now(UTC), differing_rows.rows, through=through)
        if differing_rows.spans:
            why = f"{_differ(differing_rows)} from the source at LSN {moment.lsn}"
            return replace(
                note,
                state=DIFFERS,
                differing=len(differing_rows.keys),
                why=why,
                round=began,
                resume_at=before.resume_at if before is not None else None,
            )
        if span == EVERY_KEY:
            return replace(note, through=moment, why=f"equal to the source at LSN {moment.lsn}")
        began = moment if span.start is None or began is None else began
        if span.end is None:
            # Each part was equal at this LSN or a later one.
            return replace(note, through=began, why=f"equal to the source at LSN {began.lsn}, by parts")
        why = f"the part that was compared is equal to the source at LSN {moment.lsn}"
        return replace(note, state=PART_EQUAL, why=why, round=began, resume_at=span.end)


def not_comparable(workspace: Workspace, contract: TableContract, why: str, seconds: float = 0.0) -> Checked:
    """Return the result for a table that cannot be compared now because of ``why``.

    The last verdict stays.
    """
    before = verified_of(workspace.home, contract)
    now = datetime.now(UTC)
    note = before or Verified(contract.name, NOT_COMPARABLE, now)
    note = replace(
        note,
        waits_since=note.waits_since or now,
        state=NOT_COMPARABLE,
        checked_at=now,
        rows=0,
        left_out=0,
        differing=0,
        why=why,
        seconds=round(seconds, 2),
    )
    return Checked(contract, note)


def nothing_shown(note: Verified, rows: int, moved: int, unresolved: int) -> str | None:
    """Why a comparison of ``rows`` that found no difference does not show the table to be equal; None if it
    does, or if it found one.

    ``moved``: rows left out, as the lake has changes of them above the LSN. ``unresolved``: rows that lack
    columns.
    """
    if note.state not in (EQUAL, PART_EQUAL):
        return None
    if unresolved:
        held_back = f"{unresolved:,} row{'s lack' if unresolved != 1 else ' lacks'}"
        return f"all other rows are equal, and {held_back} columns that no accepted event carries yet"
    if moved and not rows:
        return "every row has changed since, so none was compared"
    return None


def _inside(span: KeySpan, cut: str, whole_numbers: bool) -> bool:
    order: Callable[[str], int | str] = int if whole_numbers else str
    above = span.start is None or order(cut) > order(span.start)  # type: ignore[operator]
    return above and (span.end is None or order(cut) < order(span.end))  # type: ignore[operator]


def _differ(differing_rows: Differing) -> str:
    """Return the number of differing rows in words, with the verb."""
    if not differing_rows.keys:
        ranges = len(differing_rows.spans)
        return f"rows in {ranges:,} key range{'s' * (ranges != 1)} differ"
    rows = len(differing_rows.keys)
    verb = "differs" if rows == 1 and not differing_rows.more else "differ"
    return f"{'more than ' * differing_rows.more}{rows:,} row{'s' * (rows != 1)} {verb}"


def _confirmed(workspace: Workspace, first: Checked, second: Checked | None) -> Checked:
    """Return the result after ``second`` compared again what differed in ``first``."""
    if second is None or first.differing is None:
        return first
    if second.differing is not None and second.note.state == DIFFERS:
        keys = tuple(key for key in first.differing.keys if key in set(second.differing.keys))
        more = first.differing.more and second.differing.more
        if keys or more:
            differing_rows = replace(second.differing, keys=keys, more=more)
            why = f"{_differ(differing_rows)} from the source, at two LSNs after one another"
            return Checked(first.contract, replace(first.note, why=why, differing=len(keys)), differing_rows)
    why = "what differed did not do so when it was looked at again; it was on its way"
    if second.note.state == NOT_COMPARABLE:
        why = f"what differed cannot be looked at again yet: {second.note.why}"
    return not_comparable(workspace, first.contract, why, first.note.seconds)
