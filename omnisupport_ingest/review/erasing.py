"""Erases a row: its values are removed from the events, the net changes, the dimension and the history.

Only a row that has ended at its source can be erased. So no current row loses a cell, and no later event
depends on the erased values. After the erasure is recorded, the events are read again: this finds events that
a run judged at the same time without knowing of the erasure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import pyarrow as pa

from omnisupport_ingest.cdc.erasing import Span, key_hash
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.json_values import compact
from omnisupport_ingest.lake.ledger import SEQUENCE
from omnisupport_ingest.lake.schema import arrow_schema
from omnisupport_ingest.layers.erasures import Erasure, ErasureLedger
from omnisupport_ingest.layers.events.event_files import EventFiles
from omnisupport_ingest.layers.ledgers import ERASURE_TYPE
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.read.former_rows import FormerKeys, of_this_key
from omnisupport_ingest.read.row_traces import (
    RowState,
    Trace,
    has_left,
    key_changes,
    spans_of,
    state_of,
    traces,
)

_POSITION = ("epoch", "commit_lsn", "ordinal")


class ErasureRefused(IngestError):
    """The row cannot be erased, or not yet: there is none of that key, it lives at its source, or whether it
    has ended is not known. Or its subject cannot: the contract names none. Nothing was recorded.

    Fix: Delete the row at the source and let the delete arrive, then erase; write the key as PostgreSQL
    prints it; name the subject in ``x-cdc.at_rest``.
    """


class ErasureIncomplete(IngestError):
    """The person who erases, or the reason, is missing.

    Fix: Give it: erasure ledger and certificate record both.
    """

    exit_code = 2


_KeySpan = tuple[str, Span]
"""A key of the row, and which of the key's events belong to the row. The key never leaves this process."""


@dataclass(frozen=True, slots=True)
class SpanEvents:
    """The events of one span in the lake: the number of ``events``, and the ``windows`` they are in.

    ``waiting``: windows with landed events of the table that are not judged yet and may belong to the row.
    """

    events: int
    windows: frozenset[str]
    waiting: frozenset[str]


@dataclass(frozen=True, slots=True)
class Erased:
    """The result of an erasure: the row's ``events`` and their ``windows``.

    ``spans``: by key (the last one of the row and former ones), which events belong to the row; they never
    leave this process. ``recorded``: what was recorded now; empty if everything was recorded ``before``.
    """

    spans: tuple[_KeySpan, ...]
    events: int
    windows: tuple[str, ...]
    recorded: tuple[Erasure, ...]
    before: tuple[Erasure, ...]

    @property
    def keys(self) -> int:
        """The number of keys that the row has had."""
        return len({name for name, _ in self.spans})

    @property
    def stale_windows(self) -> list[str]:
        """Return the windows that must be judged again because of the erasure, sorted."""
        return sorted({window for each in self.recorded for window in each.windows})


def key_text(values: Sequence[str]) -> str:
    """Return the text of a key as events have it: the texts of its columns as a JSON array."""
    return compact(list(values))


def look_up(workspace: Workspace, contract: TableContract, key: str) -> Erased:
    """Return what ``erase`` would erase, without recording it. Raises ``ErasureRefused`` where it would."""
    ledger = ErasureLedger.open(workspace, contract.source)
    events_by_span = _events_by_span(workspace, contract, _spans(workspace, contract, key))
    return _erased(events_by_span, (), _recorded(ledger, contract, events_by_span))


def erase(workspace: Workspace, contract: TableContract, key: str, *, erased_by: str, why: str) -> Erased:
    """Record the erasure of the row that ended under ``key``; a repeated call writes nothing.

    ``key``: as ``key_text`` writes it. ``erased_by`` and ``why`` are recorded as given. Raises
    ``ErasureRefused``, saying why the row must not be erased, and ``ErasureIncomplete`` if the person or the
    reason is missing.
    """
    erased_by, why = erased_by.strip(), why.strip()
    for value, missing in ((erased_by, "name of the person who erases"), (why, "reason")):
        if not value:
            raise ErasureIncomplete(
                f"The {missing} is missing.",
                fix="Give it: the ledger records person, time and reason of every erasure.",
            )
    return record(workspace, contract, _spans(workspace, contract, key), erased_by=erased_by, why=why)


def record(
    workspace: Workspace, contract: TableContract, spans: Sequence[_KeySpan], *, erased_by: str, why: str
) -> Erased:
    """Record the erasure of all events of the table in ``spans``; a repeated call writes nothing. An event
    of the table was judged before."""
    command = _Command(workspace, contract, spans, erased_by, why)
    table = workspace.erasures(contract.source)
    written = [table.append(command.rows)]
    events_by_span, before = command.events_by_span, command.before
    if written[0].num_rows:
        written.append(table.append(command.rows_missed))
    return _erased(events_by_span, ErasureLedger.of_entries(pa.concat_tables(written)).erasures, before)


class _Command:
    """The effect of an erasure on the present ledger. It is computed again when another command commits
    first."""

    def __init__(
        self,
        workspace: Workspace,
        contract: TableContract,
        spans: Sequence[_KeySpan],
        erased_by: str,
        why: str,
    ) -> None:
        self._workspace, self._contract, self._spans = workspace, contract, spans
        self._columns = {"erased_by": erased_by, "why": why, "erased_at": datetime.now(UTC)}
        self.events_by_span: Mapping[_KeySpan, SpanEvents] = {}
        self.before: tuple[Erasure, ...] = ()

    def rows(self, entries: pa.Table) -> pa.Table:
        """Return the rows to record; none if all spans are recorded with all windows of their events."""
        ledger = ErasureLedger.of_entries(entries)
        self.events_by_span = _events_by_span(self._workspace, self._contract, self._spans)
        self.before = _recorded(ledger, self._contract, self.events_by_span)
        complete = all(
            known is not None and span_events.windows <= known
            for span_events, known in (
                (span_events, _known(ledger, self._contract, span))
                for span, span_events in self.events_by_span.items()
            )
        )
        return self._table({}) if complete else self._missing(ledger, self.events_by_span)

    def rows_missed(self, entries: pa.Table) -> pa.Table:
        """Return the rows to record for windows that were judged, or got events, since the erasure."""
        ledger = ErasureLedger.of_entries(entries)
        return self._missing(ledger, _events_by_span(self._workspace, self._contract, self._spans))

    def _missing(self, ledger: ErasureLedger, events_by_span: Mapping[_KeySpan, SpanEvents]) -> pa.Table:
        new = {}
        for span, span_events in events_by_span.items():
            known = _known(ledger, self._contract, span)
            windows = (span_events.windows | span_events.waiting) - (known or frozenset())
            if windows or known is None:
                new[span] = sorted(windows)
        return self._table(new)

    def _table(self, new: Mapping[_KeySpan, list[str]]) -> pa.Table:
        rows = [
            {
                "source_schema": self._contract.schema,
                "source_table": self._contract.table,
                "key_hash": key_hash(name),
                "after": None if span.after is None else dict(zip(_POSITION, span.after, strict=True)),
                "through": dict(zip(_POSITION, span.through, strict=True)),
                "windows": windows,
                **self._columns,
            }
            for (name, span), windows in new.items()
        ]
        return pa.Table.from_pylist(rows, schema=arrow_schema(ERASURE_TYPE, without=(SEQUENCE,)))


def _spans(workspace: Workspace, contract: TableContract, key: str) -> list[_KeySpan]:
    """Return the spans of the row that ended under ``key``. Raises ``ErasureRefused`` if it must not be
    erased."""
    files, state = EventFiles.newest(workspace, contract.source), state_of(workspace, contract, key)
    if files is None or state is None:
        raise ErasureRefused(
            f"{contract.full_name} of {contract.source} has no row with that key, alive or deleted, in "
            f"dim_{contract.name}.",
            fix=f"Write the key ({', '.join(contract.key)}) as PostgreSQL prints it; what has landed and is "
            "not taken in yet is known after the next run (omnisupport-ingest status).",
        )
    changes = [each for each in key_changes(files, contract) if contract.has_key_at(each.began)]
    of_key = [each for each in traces(files, contract, [key]) if contract.has_key_at(each.position)]
    if state.through is None:
        raise _alive(contract, state, of_key)
    if has_left(key, state.through, of_key, changes):
        raise ErasureRefused(
            f"The row of {contract.full_name} did not end under that key: its key was changed, and it has "
            "another one since.",
            fix="Name the key that it has now, once it has ended under that; its former keys are erased with "
            f"it. The history knows it: look in history/dim_{contract.name}_history for the row whose "
            "_cdc_moved_from_key is this key.",
        )
    spans = of_this_key(contract, spans_of(key, state.through, changes))
    former = FormerKeys(workspace, files, contract).spans(spans) if contract.key_eras else []
    return [*spans, *former]


def _alive(contract: TableContract, state: RowState, of_key: Sequence[Trace]) -> ErasureRefused:
    if state.doubtful or any(each.withheld and each.position == state.last for each in of_key):
        return ErasureRefused(
            f"Whether that row of {contract.full_name} has ended is not known: an event of it is in "
            "quarantine.",
            fix="Decide on it (omnisupport-ingest quarantine list --table "
            f"{contract.full_name}), let its window be judged again, then erase.",
        )
    if state.marked:
        return ErasureRefused(
            f"That row of {contract.full_name} is only marked as deleted ({contract.soft_delete_column}): "
            "it is still at its source, and would come back with its next update.",
            fix="Delete the row itself at the source, let the delete arrive, then erase.",
        )
    return ErasureRefused(
        f"That row of {contract.full_name} lives at its source, so it cannot be erased here.",
        fix="Delete the row at the source, let the delete arrive (omnisupport-ingest status shows what is "
        "pending), then erase.",
    )


def _events_by_span(
    workspace: Workspace, contract: TableContract, spans: Sequence[_KeySpan]
) -> dict[_KeySpan, SpanEvents]:
    """Return the events of each span in the lake, and the windows that wait to be judged."""
    files = EventFiles.newest(workspace, contract.source)
    assert files is not None, "a row that was found is in some table"
    of_keys = traces(files, contract, [name for name, _ in spans])
    # Read what has landed after the events: then whatever has landed is among the events, or waits.
    waiting = _waiting(workspace, contract, files)
    events_by_span = {}
    for name, span in spans:
        events = [each for each in of_keys if each.key == name and span.holds(each.position)]
        events_by_span[name, span] = SpanEvents(
            len(events),
            frozenset(each.window for each in events),
            frozenset(window for window, first in waiting if first <= span.through),
        )
    return events_by_span


def _waiting(
    workspace: Workspace, contract: TableContract, files: EventFiles
) -> list[tuple[str, tuple[int, int, int]]]:
    """Return windows with landed events of the table that ``files`` lacks, with their lowest position."""
    waiting = []
    landing = workspace.landing(contract.source)
    landed = landing.landed()
    for window in landing.windows():
        state = files.deduped.state(window)
        for part in landed.untaken(window, frozenset(state.batches if state is not None else ())):
            if contract.full_name in part.rows_per_table:
                first = part.first
                waiting.append((window, (first.epoch, first.commit_lsn.value, first.ordinal)))
    return waiting


def _known(ledger: ErasureLedger, contract: TableContract, span: _KeySpan) -> frozenset[str] | None:
    """Return the windows that the ledger names for a span; None if it does not have the span."""
    recorded = ledger.of((contract.schema, contract.table, key_hash(span[0])), span[1])
    return frozenset(window for each in recorded for window in each.windows) if recorded else None


def _recorded(
    ledger: ErasureLedger, contract: TableContract, events_by_span: Mapping[_KeySpan, SpanEvents]
) -> tuple[Erasure, ...]:
    return tuple(
        each
        for name, span in events_by_span
        for each in ledger.of((contract.schema, contract.table, key_hash(name)), span)
    )


def _erased(
    events_by_span: Mapping[_KeySpan, SpanEvents], recorded: tuple[Erasure, ...], before: tuple[Erasure, ...]
) -> Erased:
    return Erased(
        spans=tuple(events_by_span),
        events=sum(each.events for each in events_by_span.values()),
        windows=tuple(sorted({window for each in events_by_span.values() for window in each.windows})),
        recorded=recorded,
        before=before,
    )
