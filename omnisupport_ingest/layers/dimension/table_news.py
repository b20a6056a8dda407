"""Which tables have news in a window: an ingest run visits only these.

A table awaits the landed batches that name it. If it does not exist, or must be rebuilt, it awaits all
batches. Without a new batch it has news if its events changed: because a window was judged again (after a
review, an erasure or a change of its contract), or because a withheld event may belong to it. When a window
closes, all tables are visited once, and from then on contain all its batches.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from omnisupport_ingest.contracts.decision_table import DecisionTable
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.lake.snapshot import TableSnapshot
from omnisupport_ingest.lake.state import WindowState
from omnisupport_ingest.landing.standing import LandedPart
from omnisupport_ingest.layers.dimension.net_changes import units_above
from omnisupport_ingest.layers.events.quarantine_files import WITHHELD, QuarantineFiles, named_by
from omnisupport_ingest.layers.lateness import LateArrival
from omnisupport_ingest.layers.versions import contracts_changed, is_current, of_contract


class Layer:
    """A table at its newest version (None before its first commit), and the versions its windows should have.

    Use it for one look, one window at a time: it reads the state of a window once, and keeps only the last
    one.
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
        """``lasting``: windows never rebuilt. ``sealed``: windows neither rebuilt nor closed again."""
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
        """Whether ``window`` was made with other versions and must be rebuilt."""
        if window in self._lasting:
            return False
        state = self.state(window)
        return state is not None and not is_current(state.versions, self._versions(window), self._decisions)

    def contracts_changed(self, window: str) -> frozenset[str] | None:
        """Return the names of the contracts that alone make ``window`` stale; None if anything else does."""
        state = self.state(window)
        return None if state is None else contracts_changed(state.versions, self._versions(window))

    def is_open(self, window: str) -> bool:
        """Whether the layer holds ``window`` and has not closed it since its last commit."""
        state = self.state(window)
        return state is not None and not state.closed and window not in self._sealed

    def may_close(self, window: str) -> bool:
        """Whether a run over ``window`` would close it in this layer, or leave it alone, and not rebuild
        it."""
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
        """Whether the table awaits every batch of ``window``, whatever tables the batch names."""
        if self.snapshot is None or self.is_stale(window):
            return True
        # Another program rewrote the window, so its inputs are unknown.
        return self.state(window) is None and self.has_files(window)


@dataclass(frozen=True)
class SourceLayers:
    """The layers of one source: raw and deduped ``events``, and the net changes of ``tables``.

    ``parked``: contracts whose tables wait for a person and take nothing in until then.
    """

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
        """Return those of ``parts`` of ``window`` that some layer awaits, and the tables with news by
        them."""
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
                # Visit a parked table too: the run then reports that it waits.
                names |= {parked[each] for each in parked.keys() & part.rows_per_table.keys()}
            elif not lack:
                continue
            found.append(part)
        return tuple(found), frozenset(names) | (self._judged_again(window) if found else frozenset())

    def _judged_again(self, window: str) -> frozenset[str]:
        """Return the tables that a run must visit because their events of ``window`` are judged again.

        Where nothing but contracts changed, these are the tables of those contracts. If the window has events
        in quarantine, it gets other quarantine files, and all tables note that.
        """
        found: set[str] = set()
        for layer in self.events:
            if layer.is_stale(window):
                changed, state = layer.contracts_changed(window), layer.state(window)
                if changed is None or named_by(state):
                    return self.names
                found |= changed
        return self.names & found

    def untaken(
        self, arrivals: Iterable[LateArrival], parts: Iterable[LandedPart]
    ) -> tuple[LateArrival, ...]:
        """Return those of ``arrivals``, which came with ``parts``, that some layer has not taken. If a window
        is only stale, its arrivals are not late."""
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
        """Return the tables that a run must still visit so that ``window`` is closed in every layer.

        While raw or deduped events have it open: all tables. Afterwards: those that have it open or lack it.
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
        """Return the tables that were folded from other events of ``window`` than ``files`` hold now.

        A run rebuilt the window and was interrupted, or visited only other tables. Then the table has the
        same batches as the layer above, but not the same content.
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
    """Whether one of ``units``, which a window gained or lost, may hold an event of the contract's table.

    Quarantine files hold the events of all tables, so most of them concern other tables.
    """
    withheld = [unit.removeprefix(WITHHELD) for unit in units if unit.startswith(WITHHELD)]
    return len(withheld) < len(units) or any(files.may_have(path, contract) for path in withheld)
