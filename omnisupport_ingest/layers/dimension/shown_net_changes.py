"""Which net changes a dimension shows: the batches it contains, by window, and which rows are purged."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from deltalake.exceptions import DeltaError

from omnisupport_ingest.contracts.load import TableContract
from omnisupport_ingest.lake.delta import open_delta
from omnisupport_ingest.lake.layout import WHOLE_TABLE
from omnisupport_ingest.lake.log import LogChanges, by_window, changes_since, is_same_again
from omnisupport_ingest.lake.snapshot import TableSnapshot
from omnisupport_ingest.lake.state import StateUnreadable, WindowState, read_state
from omnisupport_ingest.landing.manifest import Manifest
from omnisupport_ingest.layers.batch_facts import BatchFacts, facts_of
from omnisupport_ingest.layers.versions import of_contract

_PURGE = "purge:"
"""Prefix of the version that contains the time before which deleted rows are purged."""


@dataclass(frozen=True)
class Shown:
    """``newer``: windows with net changes that the dimension does not show as they are now."""

    net_changes: TableSnapshot | None
    newer: frozenset[str]
    then: TableSnapshot | None
    _held: dict[tuple[str, bool], frozenset[str]] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, net_changes: TableSnapshot | None, dimension: TableSnapshot | None) -> Shown:
        """``net_changes``, ``dimension``: None if the table does not exist."""
        if net_changes is None:
            return cls(None, frozenset(), None)
        state = dimension.state(WHOLE_TABLE) if dimension is not None else None
        newer = newer_windows(state, net_changes)
        return cls(net_changes, newer, made_from(net_changes, state) if newer else net_changes)

    def in_window(self, window: str) -> frozenset[str]:
        """The batches of ``window`` that the dimension contains."""
        held = self._batches(window, now=True)
        return held & self._batches(window, now=False) if window in self.newer else held

    def has(self, batch: Manifest, table: str) -> bool:
        """Whether the events of ``table`` (schema and name) in ``batch`` are shown."""
        windows = {file.window for file in batch.files if table in file.rows_per_table}
        return all(batch.batch_id in self.in_window(window) for window in windows)

    def _batches(self, window: str, *, now: bool) -> frozenset[str]:
        snapshot = self.net_changes if now else self.then
        if (window, now) not in self._held:
            state = snapshot.state(window) if snapshot is not None else None
            self._held[window, now] = frozenset(state.batches) if state is not None else frozenset()
        return self._held[window, now]


def made_from(net_changes: TableSnapshot, dimension: WindowState | None) -> TableSnapshot | None:
    """The version of the net changes that the dimension shows; None if there is none any more."""
    version = dimension.checkpoint.upstream_version if dimension is not None else None
    if dimension is None or version is None or dimension.upstream_table_id != net_changes.table_id:
        return None
    if version == net_changes.version:
        return net_changes
    try:
        return TableSnapshot(net_changes.table, open_delta(net_changes.table.folder, version=version))
    except DeltaError:
        return None


def versions_of(contract: TableContract, purged: datetime | None) -> tuple[str, ...]:
    """Return the versions a dimension should have: of logic and contract, and the time of the purge if
    any."""
    return (*of_contract(contract), *(() if purged is None else (f"{_PURGE}{purged.isoformat()}",)))


def judging_rules_of(versions: tuple[str, ...]) -> set[str]:
    return {each for each in versions if not each.startswith(_PURGE)}


def purged_of(state: WindowState | None) -> datetime | None:
    for each in state.versions if state is not None else ():
        if each.startswith(_PURGE):
            return datetime.fromisoformat(each.removeprefix(_PURGE))
    return None


def purged_before(contract: TableContract, watermark: datetime | None) -> datetime | None:
    """Return the time before which deleted rows are not shown; None: all are shown.

    It follows from the watermark in the states of the net changes, so a rebuild purges the same rows. No row
    is purged while an event that is older than its delete may still arrive in time to be judged. The time
    moves in whole hours, because each step makes another version of the table.
    """
    if contract.purge_deleted_after is None or watermark is None:
        return None
    kept = max(contract.purge_deleted_after, contract.max_lateness + contract.allowed_lateness)
    try:
        return (watermark - kept).replace(minute=0, second=0, microsecond=0)
    except OverflowError:
        return None


def shown_since(state: WindowState | None, net_changes: TableSnapshot) -> LogChanges | None:
    """Return the net changes that a dimension with ``state`` does not show; None if unknown: it may be any.

    A window that was rebuilt with the same rows is no change.
    """
    if state is None or state.upstream_table_id != net_changes.table_id or not state.carried:
        return None
    version = state.checkpoint.upstream_version
    changes = None if version is None else changes_since(net_changes, version)
    return None if changes is None else changes.without(_same_again(changes, net_changes))


def _same_again(changes: LogChanges, net_changes: TableSnapshot) -> frozenset[str]:
    """The windows that were replaced by the same rows."""
    found, gone = set(), by_window(changes.gone)
    for file in changes.states:
        if file.window in gone:
            with suppress(StateUnreadable):
                before = read_state(Path(file.uri))
                # Without it, nothing is known of the events that the rows were folded from.
                if before.made_from and is_same_again(net_changes, file.window, before, gone[file.window]):
                    found.add(file.window)
    return frozenset(found)


def net_facts(
    state: WindowState | None, net_changes: TableSnapshot, changes: LogChanges | None
) -> BatchFacts:
    """Return how far the net changes are: the facts of a dimension with ``state``, advanced by the windows
    with another state since; or the facts of all windows, if ``state`` or ``changes`` is None."""
    if state is None or changes is None:
        known, windows = [], net_changes.windows()
    else:
        known, windows = [state.checkpoint], sorted(changes.new_states)
    states = (net_changes.state(window) for window in windows)
    return facts_of([*known, *(each.checkpoint for each in states if each is not None)])


def newer_windows(state: WindowState | None, net_changes: TableSnapshot) -> frozenset[str]:
    """Return the windows whose rows a dimension with ``state`` does not show as they are now."""
    changes = shown_since(state, net_changes)
    return frozenset(net_changes.windows()) if changes is None else changes.windows


def shows(state: WindowState, net_changes: TableSnapshot, contract: TableContract) -> bool:
    """Whether a dimension with ``state`` shows all net changes and leaves out the rows to purge.

    A mere change of contract does not count: then the windows are rebuilt first, or wait.
    """
    changes = shown_since(state, net_changes)
    # Windows rebuilt with the same rows must be noted too: the proof is in files that are swept later.
    if changes is None or changes.windows or changes.same:
        return False
    return purged_of(state) == purged_before(contract, net_facts(state, net_changes, changes).watermark)
