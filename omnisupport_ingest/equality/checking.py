"""Check that source and dimensions are equal at one LSN, by checksums of key ranges, for every table of a
source.

What differs is compared a second time, at a later LSN, and only a key that differs both times counts. So a
change that is still on its way never raises an alarm, even in a form that ``standing`` does not know. What
has not changed at the source since an earlier check is not read there again (``known_ranges``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import duckdb
import psycopg2

from omnisupport_ingest import progress
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.contracts.row_checksum import EVERY_KEY, by_number
from omnisupport_ingest.equality.bisecting import Differing, Remaining, Unchanged, differing
from omnisupport_ingest.equality.known_ranges import (
    Budget,
    KnownRanges,
    Look,
    known_ranges,
    made_of,
    part_to_look_at,
    write_known_ranges,
)
from omnisupport_ingest.equality.standing import MOST_LEFT_OUT, NotComparable, comparable
from omnisupport_ingest.layers.events.quarantine_files import EventsGone
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.processes import remove_left_behind, scratch_folder
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
from omnisupport_ingest.sources.postgres.embedded.dsn import source_dsn
from omnisupport_ingest.sources.postgres.session.errors import (
    ColumnsNotSent,
    SourceUnavailable,
    TableUnreadable,
)
from omnisupport_ingest.sources.postgres.slot.slot import SlotNotMade
from omnisupport_ingest.sources.postgres.snapshot.source_ranges import SourceAt, SourceRanges, source_at
from omnisupport_ingest.wording import agreeing, counted

PATIENCE_SECONDS = 60.0
"""Default time to wait for transactions in progress, and then for the lake."""

_SCRATCH = "equality-"


@dataclass(frozen=True)
class Checked:
    """The result of a check of one table: its note, and the keys and ranges that differ."""

    contract: TableContract
    note: Verified
    differing: Differing | None = None


@dataclass(frozen=True)
class CheckOptions:
    """What to check: tables by name (all if empty).

    ``rows_at_once``: about how many rows the server may read, of all tables; None: every row, whether it has
    changed or not. ``patience``: in seconds. ``advance`` is called before the check waits for the lake;
    unless it advances the lake, capture and pipeline must be running.
    """

    tables: Sequence[str] = ()
    rows_at_once: int | None = None
    patience: float = PATIENCE_SECONDS
    advance: Callable[[], None] = lambda: None


def check_source(workspace: Workspace, options: CheckOptions) -> list[Checked]:
    """Check tables of the configured log source, and record what is known now.

    Raises ``SourceUnavailable`` and what connecting raises. Any other reason why a table cannot be compared
    is in its note.
    """
    remove_left_behind(workspace.home.run, _SCRATCH)
    source = workspace.settings.source
    contracts = [
        each
        for each in workspace.contracts.of_source(source)
        if not options.tables or each.name in options.tables
    ]
    # If the server may not read all tables, sort them by whose turn it is.
    in_turn = sorted(contracts, key=lambda each: turn(verified_of(workspace.home, each)))
    found = {each.contract.name: each for each in _Round(workspace, options, {}).run(in_turn)}
    first = [found[each.name] for each in contracts]
    suspects = {each.contract.name: each for each in first if each.note.state == DIFFERS}
    if suspects:
        again = _Round(workspace, options, suspects).run([each.contract for each in suspects.values()])
        second = {each.contract.name: each for each in again}
        first = [_confirmed(workspace, each, second.get(each.contract.name)) for each in first]
    for each in first:
        write_verified(workspace.home, each.contract, each.note)
    return first


def turn(note: Verified | None) -> tuple[bool, float]:
    """Return the key by which tables are sorted to use up the budget; ``note``: of the table.

    The table that was found equal the longest time ago comes first. Tables that differ or wait for a person
    come last: otherwise they would always be first, and the others would never be checked.
    """
    if note is None:
        return False, 0.0
    through = 0.0 if note.through is None else note.through.at.timestamp()
    return note.state in (DIFFERS, NOT_COMPARABLE), through


@dataclass(frozen=True)
class _Round:
    """One comparison with the source.

    ``suspects``: what differed in the previous round; only that is compared.
    """

    workspace: Workspace
    options: CheckOptions
    suspects: dict[str, Checked]

    def run(self, contracts: Sequence[TableContract]) -> list[Checked]:
        settings, done = self.workspace.settings, []
        budget = Budget(None if self.suspects else self.options.rows_at_once)
        dsn = source_dsn(settings, self.workspace.home)
        progress.reached("waiting for a moment of the source at which no transaction writes")
        try:
            with source_at(dsn, settings.publication, self.options.patience) as source:
                self.options.advance()
                deadline = time.monotonic() + self.options.patience
                for contract in progress.each(contracts, lambda each: f"comparing {each.name}"):
                    done.append(self._table(contract, source, budget, deadline))
        except SlotNotMade:
            why = f"transactions that may write are under way for more than {self.options.patience:.0f} s"
            done = [not_comparable(self.workspace, each, why) for each in contracts]
        return done

    def _table(self, contract: TableContract, source: SourceAt, budget: Budget, deadline: float) -> Checked:
        began = time.monotonic()
        try:
            with source.savepoint():
                return self._compared(contract, source, budget, deadline)
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

    def _compared(
        self, contract: TableContract, source: SourceAt, budget: Budget, deadline: float
    ) -> Checked:
        began = time.monotonic()
        compared = comparable(self.workspace, contract, source.lsn, deadline)
        moment = Moment(compared.epoch, source.lsn, source.at)
        with (
            scratch_folder(self.workspace.home.run, _SCRATCH) as scratch,
            DimensionRanges(contract, compared.version.files, scratch) as lake,
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
            look = self._look(contract, moment, rows, lake, budget.of_table(ROWS_BETWEEN_CUTS))
            unchanged = Unchanged(rows, look.unchanged, look.passed_over)
            remaining = Remaining(unchanged, rows.numbers_of(left_out), by_number(contract))
            differing_rows = differing(remaining, lake, look.span, look.cuts, look.passed_over)
            if differing_rows.keys:
                files = rows.write_rows(differing_rows.keys, scratch)
                differing_rows = differing_rows.without(
                    set().union(*(lake.same_rows(file) for file in files))
                )
        rows_equal = differing_rows.rows + look.settled_rows()
        read = sum(each.rows for each in unchanged.read.values())
        budget.spend(read, look.rows_looked_at())
        state = DIFFERS if differing_rows.spans else EQUAL if look.whole else PART_EQUAL
        why_not = nothing_shown(state, rows_equal, len(compared.moved), len(unresolved))
        whole_numbers, known = by_number(contract), look.known
        unjudged = known.holding(unresolved, whole_numbers=whole_numbers)
        if why_not is not None and not unresolved:
            unjudged = frozenset(look.part)
        known = look.after(
            unchanged.read,
            moment,
            differing=known.around(differing_rows.spans, whole_numbers=whole_numbers),
            unjudged=unjudged,
            left_out=known.holding(left_out, whole_numbers=whole_numbers),
        )
        if contract.name not in self.suspects:
            write_known_ranges(self.workspace.home, contract, known)
        if why_not is not None:
            note = not_comparable(self.workspace, contract, why_not).note
        else:
            note = self._note(contract, state, moment, known, differing_rows)
        note = replace(note, rows=rows_equal, left_out=len(compared.moved), read=read)
        note = replace(note, seconds=round(time.monotonic() - began, 2))
        return Checked(contract, note, differing_rows)

    def _look(
        self,
        contract: TableContract,
        moment: Moment,
        rows: SourceRanges,
        lake: DimensionRanges,
        most: int | None,
    ) -> Look:
        """Choose what to compare: what differed before, or what the server may read of the table."""
        if contract.name in self.suspects:
            differing_rows = self.suspects[contract.name].differing
            return Look.again(differing_rows.spans if differing_rows is not None else (EVERY_KEY,))
        depends_on = made_of(contract, moment.epoch, rows.definition())
        known = known_ranges(self.workspace.home, contract, depends_on).joined(ROWS_BETWEEN_CUTS)
        known = known.divided(lake.even_cuts(), ROWS_BETWEEN_CUTS, whole_numbers=by_number(contract))
        files = lake.files_between([each.start for each in known.ranges if each.start is not None])
        look = Look(known, part_to_look_at(known.ranges, most))
        versions = rows.versions(look.cuts, look.span)
        look = look.choosing(versions, [lake.names_of(each) for each in files], moment.at, most)
        compared = set(look.part) - look.settled - look.left
        lake.read_only(frozenset().union(*(files[number] for number in compared)))
        return look

    def _note(
        self,
        contract: TableContract,
        state: str,
        moment: Moment,
        known: KnownRanges,
        differing_rows: Differing,
    ) -> Verified:
        """Return the note of a table that was compared. ``known``: what is known of its ranges now."""
        before = verified_of(self.workspace.home, contract)
        through = before.through if before is not None else None
        since = before.first_known_to_differ if before is not None else None
        note = Verified(contract.name, state, datetime.now(UTC))
        if state == DIFFERS:
            why = f"{_differ(differing_rows)} from the source at LSN {moment.lsn}"
            note = replace(note, differs_since=since or note.checked_at, through=through)
            return replace(note, differing=len(differing_rows.keys), why=why)
        if state == EQUAL:
            return replace(note, why=f"equal to the source at LSN {moment.lsn}", through=moment)
        why = f"what was compared is equal to the source at LSN {moment.lsn}"
        whole_equal = known.equal
        if before is not None and since is not None and (whole_equal is None or known.differs):
            differs = "what differs" if known.differs else "all that may differ"
            why = f"{why}; {differs} was not compared again yet"
            return replace(note, why=why, through=through, differs_since=since, differing=before.differing)
        if whole_equal is not None:
            why = f"{why}, and the rest was at LSN {whole_equal.lsn} or later"
        return replace(note, why=why, through=whole_equal or through)


def not_comparable(workspace: Workspace, contract: TableContract, why: str, seconds: float = 0.0) -> Checked:
    """Return the result for a table that cannot be compared now because of ``why``.

    What was last known stays: when it was equal, and that it differs.
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
        differing=note.differing if note.differs else 0,
        differs_since=note.first_known_to_differ,
        read=0,
        why=why,
        seconds=round(seconds, 2),
    )
    return Checked(contract, note)


def nothing_shown(state: str, rows: int, moved: int, unresolved: int) -> str | None:
    """Return why a comparison that found no difference does not prove the table equal; None if it does, or if
    it found a difference.

    ``rows``: rows compared. ``moved``: rows left out, because the lake has changes of them above the LSN.
    ``unresolved``: rows that lack columns.
    """
    if state == DIFFERS:
        return None
    if unresolved:
        held_back = f"{counted(unresolved, 'row')} {agreeing(unresolved, 'lacks', 'lack')}"
        return f"all other rows are equal, and {held_back} columns that no accepted event carries yet"
    if moved and not rows:
        return "every row has changed since, so none was compared"
    return None


def _differ(differing_rows: Differing) -> str:
    """Return the number of differing rows in words, with the verb."""
    if not differing_rows.keys:
        ranges = len(differing_rows.spans)
        return f"rows in {ranges:,} key range{'s' * (ranges != 1)} differ"
    rows = len(differing_rows.keys)
    verb = "differs" if rows == 1 and not differing_rows.more else "differ"
    return f"{'more than ' * differing_rows.more}{rows:,} row{'s' * (rows != 1)} {verb}"


def _confirmed(workspace: Workspace, first: Checked, second: Checked | None) -> Checked:
    """Return the result of a check, after ``second`` has compared again what differed in ``first``."""
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
