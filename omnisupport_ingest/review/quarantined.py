"""Lists what is in quarantine for the people who review it: each event, the reason, and the decision.

Reads the quarantine files that the states of ``deduped_events`` name, so the two always agree; no Spark.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from omnisupport_ingest.cdc.envelope import QUARANTINE_TYPE
from omnisupport_ingest.cdc.images import read_image
from omnisupport_ingest.cdc.judging import DISCARD, DISCARDED, OPEN, RELEASE
from omnisupport_ingest.contracts.decision_table import DUPLICATE_POSITION
from omnisupport_ingest.lake.schema import arrow_schema
from omnisupport_ingest.layers.events.event_ref import EventRef
from omnisupport_ingest.layers.events.quarantine_files import QuarantineFiles
from omnisupport_ingest.layers.reviews import Review, ReviewLedger
from omnisupport_ingest.layers.withheld_numbers import judged_with, reason_of
from omnisupport_ingest.layers.workspace import Workspace

RELEASED = "released"
"""State of an event that was released, while its window is not judged again yet."""

_PARTITION = ("window", "reason")
_POSITION = ("epoch", "commit_lsn", "ordinal", "event_hash")
_FACTS = (
    *_POSITION,
    *("identity", "op", "source_ts", "source_schema", "source_table", "batch_id", "file_name", "file_row"),
    *("landed_at", "detector", "rules", "review_state"),
)
"""Columns of an event that may be shown: none has a value of its row."""


@dataclass(frozen=True, slots=True)
class Quarantined:
    """An event in quarantine, without the values of its row.

    ``state``: ``open``, ``discarded``, ``not_needed`` or ``released``. ``waits``: the decision is not in the
    lake yet, because the window was not judged since. ``review``: the decision that counts. ``rules``: the
    row rules that it breaks, whatever the ``reason``. ``first_seen``: when its first copy landed.
    ``batch_id``, ``file_name`` and ``file_row``: where it came from; the last two are None except for events
    of a file. Times are timezone-aware.
    """

    event: EventRef
    identity_hash: str | None
    window: str
    reason: str
    detector: str | None
    rules: tuple[str, ...]
    source_schema: str
    source_table: str
    op: str
    source_ts: datetime
    first_seen: datetime
    batch_id: str
    file_name: str | None
    file_row: int | None
    state: str
    waits: bool
    review: Review | None

    @property
    def table(self) -> str:
        return f"{self.source_schema}.{self.source_table}"


def same_position(one: Quarantined | Review, other: Quarantined | Review) -> bool:
    """Return whether both have one position in one window, so that at most one of them can be true."""
    own = (one.event.position, one.identity_hash, one.window)
    return own == (other.event.position, other.identity_hash, other.window)


@dataclass(frozen=True, slots=True)
class Filter:
    """Selects events; None selects all. ``table``: with or without its schema."""

    reason: str | None = None
    state: str | None = None
    table: str | None = None
    window: str | None = None

    def takes(self, row: Quarantined) -> bool:
        return (
            self.state in (None, row.state)
            and self.reason in (None, row.reason)
            and self.window in (None, row.window)
            and self.table in (None, row.table, row.source_table)
        )


EVERYTHING = Filter()


@dataclass(frozen=True, slots=True)
class _File:
    """A quarantine file. ``judged_with``: the digest of the reviews with which its window was judged."""

    path: str
    window: str
    reason: str
    judged_with: str | None


def quarantined(
    workspace: Workspace, source: str, ledger: ReviewLedger, where: Filter = EVERYTHING
) -> list[Quarantined]:
    """Return the events in quarantine that ``where`` selects, sorted by window, then position.

    ``ledger``: the reviews of ``source``, which determine the states.
    """
    rows = [
        row
        for file in _files(workspace, source, where.window)
        if where.reason in (None, file.reason)
        for row in _read(file, ledger)
        if where.takes(row)
    ]
    return sorted(rows, key=lambda row: (row.window, row.event))


def whole_events(
    workspace: Workspace, source: str, ledger: ReviewLedger, events: Sequence[EventRef]
) -> list[tuple[Quarantined, dict[str, Any]]]:
    """Return, with all columns, those of ``events`` that are in quarantine, and the other events at their
    positions."""
    positions = {event.position for event in events}
    lsns = pa.array(sorted({position.commit_lsn.value for position in positions}), pa.int64())
    whole = []
    for file in _files(workspace, source):
        for values in _rows(file, QUARANTINE_TYPE.names, pc.field("commit_lsn").isin(lsns)):
            row = _quarantined(file, values, ledger)
            if row.event.position in positions:
                whole.append((row, values))
    return sorted(whole, key=lambda pair: (pair[0].window, pair[0].event))


def is_malformed(values: Mapping[str, Any], *, hidden: bool) -> bool:
    """Return whether an event that must carry a row has no readable row, or no key.

    ``hidden``: the event's image was removed, because it has no contract and another table has a policy for
    personal data. Then only judging can tell whether the image was readable.
    """
    unreadable = not hidden and read_image(values["after"]) is None
    return values["op"] in ("c", "u", "r") and (unreadable or values["key"] is None)


def _files(workspace: Workspace, source: str, window: str | None = None) -> list[_File]:
    held = QuarantineFiles.newest(workspace, source)
    found: list[_File] = []
    for file, state in held.shown(window) if held is not None else ():
        found.append(_File(file.uri, file.window, reason_of(file), judged_with(state)))
    return found


def _read(file: _File, ledger: ReviewLedger) -> Iterator[Quarantined]:
    for values in _rows(file, _FACTS, None):
        yield _quarantined(file, values, ledger)


def _rows(file: _File, columns: Sequence[str], where: Any) -> Iterator[dict[str, Any]]:
    names = [name for name in columns if name not in _PARTITION]
    # Columns that an older program did not write are null.
    schema = arrow_schema(QUARANTINE_TYPE, without=_PARTITION)
    table = pq.read_table(file.path, schema=schema, columns=names, filters=where, partitioning=None)
    for batch in table.to_batches(max_chunksize=10_000):
        for values in batch.to_pylist():
            yield {**values, "window": file.window, "reason": file.reason}


def _quarantined(file: _File, values: Mapping[str, Any], ledger: ReviewLedger) -> Quarantined:
    event = EventRef.of(*(values[name] for name in _POSITION))
    review = ledger.latest(event)
    if review is not None and review.of_copies and file.reason != DUPLICATE_POSITION:
        review = None
    digest = ledger.digest(file.window)
    state, waits = _state(values["review_state"] or OPEN, review, applied=digest == file.judged_with)
    identity = values["identity"]
    return Quarantined(
        event=event,
        identity_hash=None if identity is None else hashlib.sha256(identity.encode()).hexdigest(),
        window=file.window,
        reason=file.reason,
        detector=values["detector"],
        rules=tuple(values["rules"] or ()),
        source_schema=values["source_schema"],
        source_table=values["source_table"],
        op=values["op"],
        source_ts=values["source_ts"],
        first_seen=values["landed_at"],
        batch_id=values["batch_id"],
        file_name=values["file_name"],
        file_row=values["file_row"],
        state=state,
        waits=waits,
        review=review,
    )


def _state(judged: str, review: Review | None, *, applied: bool) -> tuple[str, bool]:
    """Return the state, and whether it waits for a run. ``judged``: the state in the lake. ``applied``:
    whether the window was judged with all decisions on it."""
    if applied:
        return judged, False
    if review is None:
        # A decision that the lake has and the ledger lacks does not count.
        return (OPEN, True) if judged == DISCARDED else (judged, False)
    if review.decision == RELEASE:
        return RELEASED, True
    assert review.decision == DISCARD
    return DISCARDED, judged != DISCARDED
