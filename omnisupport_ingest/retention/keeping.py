"""How long each layer of a source is kept, by its contracts and the defaults, and which contract decides.

Landing and raw hold the events of all tables of a source. So the table that keeps them longest decides; a
table that sets no limit keeps them without end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.layers.removed import HISTORY, LANDING, QUARANTINE, RAW

NET_CHANGES, OLD_FILES = "net_changes", "old_files"

DEFAULT_OLD_FILES = timedelta(days=1)
"""How long files that no version of their table holds stay, if no contract says it."""


@dataclass(frozen=True, slots=True)
class Kept:
    """How long a ``layer`` of ``table`` (None: of the source) is kept; None: without end. ``why``: in
    words."""

    layer: str
    table: str | None
    keep: timedelta | None
    why: str


_FOR_EVER = (("deduped_events", "history, as-of and net changes are made from it"),)


def kept_by(contracts: Sequence[TableContract]) -> list[Kept]:
    """Return how long every layer of the source with ``contracts`` is kept, in the order of the data flow."""
    found = [
        _longest(LANDING, {each.full_name: each.retention.landing for each in contracts}),
        _longest(RAW, {each.full_name: each.retention.raw for each in contracts}),
        *(Kept(layer, None, None, why) for layer, why in _FOR_EVER),
    ]
    for contract in contracts:
        keep = contract.retention.quarantine
        why = (
            "withheld events are of the fold, and may be released"
            if keep is None
            else "values of withheld events leave sealed windows; the events stay"
        )
        found.append(Kept(QUARANTINE, contract.full_name, keep, why))
        keep = contract.retention.net_changes
        why = (
            "a dimension is the fold of the net changes of all windows, tombstones included"
            if keep is None
            else "rows leave sealed windows that later rows supersede: about one per key stays"
        )
        found.append(Kept(NET_CHANGES, contract.full_name, keep, why))
        shown = contract.purge_deleted_after
        why = f"x-cdc.events.purge_deleted_after is {'' if shown else 'not '}set; in the dimension alone"
        found.append(Kept("tombstones", contract.full_name, shown, why))
        keep = contract.retention.history
        why = (
            "every version of every row is shown" if keep is None else "versions that ended longer ago leave"
        )
        found.append(Kept(HISTORY, contract.full_name, keep, why))
    found.append(Kept(OLD_FILES, None, old_files_of_source(contracts), "the longest that a contract says"))
    return found


def given_up(contracts: Sequence[TableContract]) -> list[str]:
    """Return the layers of the source from which the job ``retention`` removes something by age, each
    once."""
    of_job = (LANDING, RAW, QUARANTINE, NET_CHANGES, HISTORY)
    limited = {each.layer for each in kept_by(contracts) if each.keep is not None}
    return [layer for layer in of_job if layer in limited]


def keep_of(contracts: Sequence[TableContract], layer: str) -> timedelta | None:
    """Return how long ``layer`` (landing or raw) of the source is kept; None without end."""
    return next(each.keep for each in kept_by(contracts) if each.layer == layer)


def old_files_of(contract: TableContract) -> timedelta:
    """Return how long files that no version holds stay in the tables of ``contract``."""
    return contract.retention.old_files or DEFAULT_OLD_FILES


def old_files_of_source(contracts: Sequence[TableContract]) -> timedelta:
    """Return how long they stay in the tables that hold events of all ``contracts``."""
    return max(map(old_files_of, contracts), default=DEFAULT_OLD_FILES)


def _longest(layer: str, wanted: dict[str, timedelta | None]) -> Kept:
    silent = sorted(name for name, keep in wanted.items() if keep is None)
    if silent or not wanted:
        more = f" and {len(silent) - 1} more" if len(silent) > 1 else ""
        return Kept(layer, None, None, f"{silent[0]}{more} set no x-cdc.retention.{layer}" if silent else "")
    name, keep = max(((name, keep) for name, keep in wanted.items() if keep), key=lambda each: each[1])
    return Kept(layer, None, keep, f"{name} keeps it longest")
