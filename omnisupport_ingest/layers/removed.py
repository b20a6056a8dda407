"""What retention removed, for the layers. The record of a removal is written before the removal.

The data files of a window leave **landing** once raw holds its events. Then raw is the record, and a replay
starts there. When the events leave **raw** too, the window is **sealed**: its accepted events and everything
made of them stay, but it is neither replayed nor stale, and events that still land in it go to quarantine.
Only an erasure or another policy for personal data rewrites its events, from themselves. The rules in this
module keep the layers from rebuilding such windows without their events. Versions that leave the **history**
of a table stay out of it when the history is made again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa

from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.lake.ledger import SEQUENCE, refuse_row, require_rows
from omnisupport_ingest.lake.state import WindowState
from omnisupport_ingest.landing.manifest import DataFile, Manifest
from omnisupport_ingest.landing.standing import LandedPart
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.layers.ledgers import retention_ledger
from omnisupport_ingest.layers.plan import Upstream, WindowPlan, Work
from omnisupport_ingest.layers.workspace import Workspace

LANDING, RAW, QUARANTINE, HISTORY = "landing", "raw", "quarantine", "history"
BEGUN, DONE, GIVEN_UP = "begun", "done", "given up"
"""Steps of a removal. ``GIVEN_UP``: nothing was removed, and the window is as before the removal began."""

_NAME = "retention_ledger"
_REQUIRED = frozenset(("layer", "window", "step", "files", "events", "bytes", SEQUENCE))
_COLUMNS_OF = {
    LANDING: ("landed_until",),
    RAW: ("landed_until",),
    QUARANTINE: ("landed_until", "table"),
    HISTORY: ("table", "ended_before"),
}
"""The layers, each with the further columns that a removal from it must have."""


class WindowSealed(IngestError):
    """The events of a window have left raw by retention: it is not replayed, and nothing in it is decided any
    more.

    Fix: Leave the window out. ``omnisupport-ingest source snapshot TABLE`` reads the rows that the source has
    now.
    """


class RecordLost(IngestError):
    """A table lost events of a window, and retention has removed what they could be made from.

    Fix: Restore the folder of the table, or ``retention_ledger``, from a backup of the lake. Nothing was
    changed.
    """

    exit_code = 3


Place = tuple[str, str, str | None, datetime | None]
"""What a removal is about: layer, window, table and a moment (``Removal.place``)."""


@dataclass(frozen=True, slots=True)
class Removal:
    """What was removed from one window: ``files`` with ``events`` and ``bytes``, by whom, when and why.

    ``landed_until`` (timezone-aware): files of batches that landed later stay. From quarantine, the values of
    events of ``table`` that landed until then are removed. From the history of ``table``, which has no
    windows, the versions that ended before ``ended_before`` (timezone-aware) are removed.
    """

    layer: str
    window: str
    landed_until: datetime | None
    files: int
    events: int
    bytes: int
    why: str
    removed_by: str
    removed_at: datetime
    table: str | None = None
    ended_before: datetime | None = None

    @property
    def place(self) -> Place:
        """What the removal is about. A second removal with an equal place changes nothing.

        A sealed window may withhold events again and again, so each removal of their values has another
        place.
        """
        which = self.removed_at if self.layer == QUARANTINE else self.ended_before
        return self.layer, self.window, self.table, which


@dataclass(frozen=True)
class Removed:
    """All that retention removed from one source. ``unfinished``: removals that were begun and not
    finished."""

    removals: tuple[Removal, ...] = ()
    unfinished: tuple[Removal, ...] = ()

    @classmethod
    def open(cls, workspace: Workspace, source: str) -> Removed:
        """Read the ledger; empty if nothing was removed. Raises ``LedgerUnreadable``."""
        return cls.of_entries(workspace.removals(source).entries())

    @classmethod
    def in_lake(cls, lake: Path, source: str) -> Removed:
        """Do as ``open``, given only the folder of the lake; always reads the newest version."""
        return cls.of_entries(retention_ledger(lake, source).entries())

    @classmethod
    def of_entries(cls, entries: pa.Table) -> Removed:
        """From rows of the ledger in the order of ``sequence``. Raises ``LedgerUnreadable``."""
        require_rows(entries, _NAME, _REQUIRED)
        begun: dict[Any, Removal] = {}
        done: set[Any] = set()
        for number, row in enumerate(entries.to_pylist()):
            if row["layer"] not in _COLUMNS_OF or row["step"] not in (BEGUN, DONE, GIVEN_UP):
                refuse_row(entries, _NAME, number, "its layer or step is none that this version knows")
            for name in _COLUMNS_OF[row["layer"]]:
                if row[name] is None:
                    refuse_row(entries, _NAME, number, f"{name} is missing")
            del row[SEQUENCE]
            step, removal = row.pop("step"), Removal(**row)
            if step == DONE:
                done.add(removal.place)
                continue
            # Of what begins again, or was given up, nothing is done.
            done.discard(removal.place)
            if step == BEGUN:
                begun[removal.place] = removal
            else:
                begun.pop(removal.place, None)
        removals = tuple(begun.values())
        return cls(removals, tuple(each for place, each in begun.items() if place not in done))

    def of(self, layer: str) -> Mapping[str, Removal]:
        """The removals from ``layer``, by window."""
        return {each.window: each for each in self.removals if each.layer == layer}

    def ended_before(self, table: str) -> datetime | None:
        """Return the moment before which ended versions have left the history of ``table`` (its name at the
        source), or are about to; None if none have."""
        moments = [
            each.ended_before for each in self.removals if each.layer == HISTORY and each.table == table
        ]
        return max((each for each in moments if each is not None), default=None)

    @cached_property
    def trimmed(self) -> frozenset[str]:
        """Windows whose data files were removed from landing: raw is their only copy."""
        return frozenset(each.window for each in self.removals if each.layer == LANDING)

    @cached_property
    def sealed(self) -> frozenset[str]:
        """Sealed windows: their events were removed from raw as well. Cached; read for each window."""
        return frozenset(each.window for each in self.removals if each.layer == RAW)

    @cached_property
    def finally_sealed(self) -> frozenset[str]:
        """The sealed windows whose removal from raw is finished; another one may still be given up."""
        return self.sealed - {each.window for each in self.unfinished if each.layer == RAW}


class Present:
    """Which data files retention has left in landing. If one of them is missing, that is damage."""

    def __init__(self, store: LandingStore, removed: Removed) -> None:
        self._store, self._removals = store, removed.of(LANDING)

    def has(self, part: LandedPart) -> bool:
        """Whether the file of ``part`` should exist."""
        return self._has(part, part.landed_at)

    def has_all(self, batch: Manifest) -> bool:
        """``has`` for every file of ``batch``."""
        return all(self._has(file, batch.arrival.landed_at) for file in batch.files)

    def _has(self, file: LandedPart | DataFile, landed_at: datetime) -> bool:
        removal = self._removals.get(file.window)
        # The record is written before a file is removed, so a file with a record is not missing by damage.
        if removal is None or removal.landed_until is None or landed_at > removal.landed_until:
            return True
        return self._store.path_of(file).exists()


def lasting(upstream: Upstream, state: WindowState | None, *, window: str, table: str) -> Upstream:
    """Return ``upstream`` for a window that must not be rebuilt: with all inputs it took, and never stale.
    Raises ``RecordLost`` if nothing says which inputs it took."""
    if state is None:
        raise RecordLost(
            f"{table} has no state of window {window}, and retention has removed what it was made from.",
            fix="Restore the folder of the table from a backup of the lake. Nothing was changed.",
        )
    units = upstream.units | frozenset(state.inputs)
    return replace(upstream, units=units, table_id=state.upstream_table_id, versions=state.versions)


def refuse_remake(plan: WindowPlan, table: str) -> None:
    """Raise ``RecordLost`` if ``plan`` rewrites a window that must not be rebuilt."""
    if plan.work is Work.REPLACE:
        raise RecordLost(
            f"Files of window {plan.window} of {table} were rewritten or its state is damaged, and retention "
            "has removed what it was made from.",
            fix="Restore the folder of the table from a backup of the lake. Nothing was changed.",
        )


def refuse_less(window: str, held: int, taken: int) -> None:
    """Raise ``RecordLost`` if raw holds fewer events of ``window`` (``held``) than it had ``taken`` in, and
    no record of a removal explains it. A rebuild would lose what was made of the missing ones."""
    if held < taken:
        raise RecordLost(
            f"Raw holds of window {window} {held} of {taken} events that it had taken in, and the retention "
            "ledger does not say that they were removed.",
            fix="Restore retention_ledger, or the folder of raw, from a backup of the lake. Nothing was "
            "changed.",
        )


def refuse_sealed(workspace: Workspace, source: str, windows: Collection[str]) -> None:
    """Raise ``WindowSealed`` if any of ``windows`` is sealed. It names the first, when and why."""
    removals = Removed.open(workspace, source).of(RAW)
    found = sorted(set(windows) & removals.keys())
    if found:
        raise sealed_error(removals[found[0]], source, len(found))


def sealed_error(removal: Removal, source: str, windows: int = 1) -> WindowSealed:
    """Return the error for the sealed window of ``removal``. ``windows``: how many were requested."""
    more = f" (and {windows - 1} more)" if windows > 1 else ""
    return WindowSealed(
        f"Window {removal.window} of {source}{more} is sealed: its events left raw on "
        f"{removal.removed_at:%Y-%m-%d} ({removal.why}), so it cannot be judged again.",
        fix="Leave it out. What the table should have by now is known to its source: "
        "`omnisupport-ingest source snapshot TABLE` reads it again.",
    )
