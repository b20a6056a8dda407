"""One source has one order. This module compares the order of a file's events with that of what has landed.

Positions of two orders cannot be compared. Neither can those of two lives of a connector: a connector that
lost its offsets starts without ``sequence[0]`` again, so its first events would stand below everything. That
can be detected: in one life, events without ``sequence[0]`` (the first snapshot, the first transaction) have
lower LSNs than any ``sequence[0]``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.sources.debezium.changes import Change
from omnisupport_ingest.sources.debezium.faults import AnotherLife, LineFault
from omnisupport_ingest.sources.debezium.positions import (
    ARRIVAL,
    BINLOG,
    CHANGE_LSN,
    LSN,
    TIME,
    TRANSACTION,
    lsn_in,
)

WORDS = {
    TRANSACTION: "the log position and transaction.total_order",
    LSN: "the log position alone (no transaction.total_order)",
    TIME: "the commit time alone (no source.lsn)",
    BINLOG: "the place in MySQL's binary log",
    CHANGE_LSN: "the place in SQL Server's log",
    ARRIVAL: "how they arrived, as the definition of the source says",
}
"""What orders the events, in words."""


@dataclass
class Orders:
    """The order of one source, as its events show it. ``landed``: the order of what has landed before.

    ``first_life``: the highest known LSN of an event without ``sequence[0]``. ``later``: the lowest known
    ``sequence[0]``. Both are of the epoch in which the file lands.
    """

    source: str
    landed: str | None
    first_life: int | None = None
    later: int | None = None
    _found: str | None = field(default=None, init=False)
    _with_lsn: bool = field(default=False, init=False)

    @classmethod
    def of(cls, store: LandingStore, epoch: int | None) -> Orders:
        """Return the order of what a source has landed. ``epoch``: the one in which the file lands; None: a
        new one."""
        standings = store.epoch_standings()
        orders = cls(store.source, next((each.order for each in standings if each.order is not None), None))
        for each in standings:
            # Lives of the connector can be told apart only if positions are LSNs.
            if each.epoch == epoch and each.order in (None, LSN, TRANSACTION):
                first_life = [lsn_in(top) for top in (each.read, each.changed) if top is not None]
                orders.first_life, orders.later = max(first_life, default=None), each.commit
        return orders

    def as_landed(self) -> Orders:
        """Return the order of the source as the next file finds it once this one has landed."""
        # As landing counts it: snapshot rows of the first life, heartbeats and odd lines show no order.
        order = self.known or (LSN if self.later is not None else None)
        return Orders(self.source, order, self.first_life, self.later)

    @property
    def order(self) -> str:
        """The order of the file, once all its events were taken.

        Snapshot rows alone do not show it. Then it is the order of what has landed, or else the weakest that
        their positions fit.
        """
        return self._found or self.landed or LSN

    @property
    def known(self) -> str | None:
        """The order of the events that were taken or have landed; None before the first change."""
        return self._found or self.landed

    def take_all(self, first_life: int | None, later: int | None) -> bool:
        """Take many changes of the order ``known`` that have log positions. Returns whether they are of the
        same life as the others; if not, nothing is recorded.

        ``first_life``: the highest LSN of those without ``sequence[0]``; ``later``: their lowest
        ``sequence[0]``.
        """
        highest = max((each for each in (self.first_life, first_life) if each is not None), default=None)
        lowest = min((each for each in (self.later, later) if each is not None), default=None)
        if highest is not None and lowest is not None and highest >= lowest:
            return False
        self.first_life, self.later = highest, lowest
        self._with_lsn, self._found = True, self.known
        return True

    def take(self, change: Change) -> None:
        """Take one change. Raises ``LineFault`` if its order, or its life of the connector, is another than
        that of the rest."""
        order = change.order
        neutral = change.op == "r" and order == LSN
        known = self._found or self.landed
        if neutral and known == TRANSACTION:
            order = TRANSACTION
        if known is None and order == TIME and self._with_lsn:
            known = LSN
        if known is not None and order != known:
            raise self._mixed(order, known)
        self._with_lsn = self._with_lsn or order != TIME
        if not neutral:
            self._found = order
        if change.lsn is not None:
            self._note_sequence(change.lsn, change.commit_before or None)

    def fits(self, change: Change) -> bool:
        """Whether ``change`` has the order of the others, so that their positions can be compared."""
        known = self._found or self.landed
        if known is None:
            return not (self._with_lsn and change.order == TIME)
        return change.order == known or (change.op == "r" and (change.order, known) == (LSN, TRANSACTION))

    def _note_sequence(self, lsn: int, commit_before: int | None) -> None:
        if commit_before is None:
            self.first_life = lsn if self.first_life is None else max(self.first_life, lsn)
        else:
            self.later = commit_before if self.later is None else min(self.later, commit_before)
        if self.first_life is not None and self.later is not None and self.first_life >= self.later:
            raise AnotherLife(
                f"it and other events of {self.source} are from two lives of the connector: one without "
                "source.sequence[0] lies at or above the sequence[0] of another",
                "If the connector was set up anew (its offsets were lost, a new first snapshot was taken), "
                'land what it wrote since then with --new-epoch "what happened". If only some events '
                "carry source.sequence, have all of them carry it.",
            )

    def _mixed(self, order: str, known: str) -> LineFault:
        of_file = self._found is not None or self.landed is None
        by_arrival = (
            " If lines come in the order of their changes, a source on which nothing has landed takes them "
            'all with "order": "arrival" among the events of its definition (events.order).'
        )
        where = "what stands above it" if of_file else f"what has landed of {self.source}"
        return LineFault(
            f"it is ordered by {WORDS[order]}, but {where} by {WORDS[known]}; such "
            "positions cannot be compared",
            "Land these events as a source of their own (another --source, with contracts that name it). A "
            "new epoch does not help: a source has one order for good. Or write the events again with the "
            "same connector settings as the others." + (by_arrival if self.landed is None else ""),
        )
