"""Which tables have news in a window: an ingest run visits only these.

A table awaits the landed batches that name it, and all batches where it does not exist or has to be made
again. Without a new batch it has news where its events changed: a window was judged again after a review, an
erasure or a change of contract, or a withheld event may belong to it. When a window closes, all tables are
visited once; from then on they contain all its batches.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from omnisupport_ingest.contracts.decision_table import DecisionTable
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.lake.snapshot import TableSnapshot
from omnisupport_ingest.lake.state import WindowState
from omnisupport_ingest.landing.standing import LandedPart
from omnisupport_ingest.layers.lateness import LateArrival
from omnisupport_ingest.layers.net_changes import units_above
from omnisupport_ingest.layers.quarantine_files import WITHHELD, QuarantineFiles
from omnisupport_ingest.layers.versions import is_current, of_contract


class Layer:
    """A table as it stands, None before its first commit, and the versions its windows should have.

    For one look, window by window: the state of a window is read once, and that of the last one is held.
    """

    def __init__(
        self,
        snapshot: TableSnapshot | None,
        versions: Callable[[str], tuple[str, ...]],
        decisions: DecisionTable,
        *,
        lasting: frozenset[str] = frozenset(),
        sealed: frozenset[str] = frozenset(),
    ) -> None:
        """``lasting`` windows are never made again, ``sealed`` ones never closed again either."""
        self.snapshot = snapshot
        self._lasting, self._sealed = lasting | sealed, sealed
        self._versions = versions
        self._decisions = decisions
        self._last: tuple[str, WindowState | None] | None = None

    def windows(self) -> Sequence[str]:
        return self.snapshot.windows() if self.snapshot is not None else ()

    def state(self, window: str) -> WindowState | None:
        if self.snapshot is None:
            return None
        if self._last is None or self._last[0] != window:
            self._last = window, self.snapshot.state(window)
        return self._last[1]

    def has_files(self, window: str) -> bool:
        return self.snapshot is not None and bool(self.snapshot.files(window))

    def taken(self, window: str) -> frozenset[str]:
        """The batches of ``window`` that the layer holds, even if the window is stale."""
        state = self.state(window)
        return frozenset(state.batches) if state is not None else frozenset()

    def held(self, window: str) -> frozenset[str]:
        """The batches of ``window`` that the layer holds; none if the window is stale."""
        return frozenset() if self.is_stale(window) else self.taken(window)

    def is_stale(self, window: str) -> bool:
        """Whether ``window`` was made with other versions, and must be made again."""
        if window in self._lasting:
            return False
        state = self.state(window)
        return state is not None and not is_current(state.versions, self._versions(window), self._decisions)

    def is_open(self, window: str) -> bool:
        """Whether the layer holds ``window`` and has not closed it since its last commit."""
        state = self.state(window)
        return state is not None and not state.closed and window not in self._sealed

    def may_close(self, window: str) -> bool:
        """Whether a run over ``window`` would close it here or leave it alone, not make it again."""
        state = self.state(window)
        if state is None:
            return not self.has_files(window)
        return window in self._lasting or state.versions == self._versions(window)


class TableLayer(Layer):
    """The net changes of one table."""

    def __init__(
        self, contract: TableContract, snapshot: TableSnapshot | None, decisions: DecisionTable
    ) -> None:
        versions = of_contract(contract)
        super().__init__(snapshot, lambda _window: versions, decisions)
        self.contract = contract

    def awaits_all(self, window: str) -> bool:
        """Whether every batch of ``window`` is awaited, whatever tables it names."""
        if self.snapshot is None or self.is_stale(window):
            return True
        # Another program rewrote the window: what it was made from is not known.
        return self.state(window) is None and self.has_files(window)


@dataclass(frozen=True)
class SourceLayers:
    """The layers of one source: raw and deduped ``events``, and the net changes of the ``tables`` that take
    something in. ``parked``: the contracts whose tables wait for a person."""

    events: tuple[Layer, Layer]
    tables: tuple[TableLayer, ...]
    parked: tuple[TableContract, ...]

    @property
    def all(self) -> tuple[Layer, ...]:
        return (*self.events, *self.tables)

    @property
    def names(self) -> frozenset[str]:
        """The names of all tables."""
        return frozenset(each.name for each in (*(each.contract for each in self.tables), *self.parked))

    def held(self, window: str) -> frozenset[str]:
        """The batches of ``window`` that every layer holds."""
        return frozenset.intersection(*(layer.held(window) for layer in self.all))

    def awaited(
        self, window: str, parts: Iterable[LandedPart]
    ) -> tuple[tuple[LandedPart, ...], frozenset[str]]:
        """Of landed ``parts`` of ``window`` those that some layer awaits, and the tables with news by it."""
        of_events = frozenset.intersection(*(layer.held(window) for layer in self.events))
        parked = {each.full_name: each.name for each in self.parked}
        held = {each.contract.full_name: each.held(window) for each in self.tables}
        all_of = [each.contract.full_name for each in self.tables if each.awaits_all(window)]
        name_of = {each.contract.full_name: each.contract.name for each in self.tables}
        found: list[LandedPart] = []
        names: set[str] = set()
        for part in parts:
            wanted = held.keys() & part.rows_per_table.keys()
            lack = {each for each in (*wanted, *all_of) if part.batch_id not in held[each]}
            names |= {name_of[each] for each in lack}
            if part.batch_id not in of_events:
                # A table that waits says so in each run that has something for it.
                names |= {parked[each] for each in parked.keys() & part.rows_per_table.keys()}
            elif not lack:
                continue
            found.append(part)
        if found and any(layer.is_stale(window) for layer in self.events):
            # Its events are judged again, and what becomes of them is not known before.
            return tuple(found), self.names
        return tuple(found), frozenset(names)

    def untaken(
        self, arrivals: Iterable[LateArrival], parts: Iterable[LandedPart]
    ) -> tuple[LateArrival, ...]:
        """Those of ``arrivals``, which came with ``parts``, that some layer has not taken: a stale window
        alone is not late."""
        tables: dict[str, set[str]] = {}
        for part in parts:
            tables.setdefault(part.batch_id, set()).update(part.rows_per_table)
        return tuple(
            each
            for each in arrivals
            if any(
                each.batch_id not in layer.taken(each.window)
                for layer in self.all
                if not isinstance(layer, TableLayer) or layer.contract.full_name in tables[each.batch_id]
            )
        )

    def unclosed(self, window: str) -> frozenset[str]:
        """The tables that have yet to be visited once for ``window`` to be closed in every layer.

        All of them while it is open in the events; then those that have it open, or do not have it.
        """
        judged = self.events[-1]
        if any(layer.is_open(window) for layer in self.events):
            return self.names
        if judged.state(window) is None:
            return frozenset(each.contract.name for each in self.tables if each.is_open(window))
        return frozenset(
            each.contract.name
            for each in self.tables
            if each.is_open(window) or (each.state(window) is None and not each.has_files(window))
        )

    def half_done(self, window: str, files: QuarantineFiles) -> frozenset[str]:
        """The tables that were folded from other events of ``window`` than ``files`` hold now.

        A run made the window again and not to the end, or visited other tables: what it left has the same
        batches, but not the same content.
        """
        above = files.state(window)
        if above is None or files.deduped is None:
            return frozenset()
        accepted: dict[str | None, list[str]] = {}
        for file in files.deduped.files(window):
            accepted.setdefault(dict(file.partition)["source_table"], []).append(file.path)
        found = set()
        for each in self.tables:
            state = each.state(window)
            if state is None:
                continue
            units = units_above(accepted.get(each.contract.table, ()), above)
            other = units.symmetric_difference(state.inputs)
            if state.upstream_table_id != files.deduped.table_id or concerns(each.contract, other, files):
                found.add(each.contract.name)
        return frozenset(found)


def concerns(contract: TableContract, units: Collection[str], files: QuarantineFiles) -> bool:
    """Whether one of ``units`` of a window, which come or went, may hold an event of the table.

    Those of the quarantine are of all tables, so most are of others.
    """
    withheld = [unit.removeprefix(WITHHELD) for unit in units if unit.startswith(WITHHELD)]
    return len(withheld) < len(units) or any(files.may_have(path, contract) for path in withheld)
