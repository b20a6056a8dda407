"""What the home itself records about its slot: whether it has made one, and how far the chain has landed.

After a crash between a durable batch and its confirmation, the decision table says whether capture continues.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from omnisupport_ingest.contracts.decision_table import CRASH_AFTER_EMIT, RECOVERY_LSN, STOP
from omnisupport_ingest.contracts.in_force import decisions_in_force
from omnisupport_ingest.durable import replace, sync_folder
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.foreign import Unreadable, read_file
from omnisupport_ingest.landing.epochs import EpochRecord
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.sources.postgres.slot.continuity import LandedChain, LandedTransaction
from omnisupport_ingest.storage import storage_of

_log = logging.getLogger(__name__)


_NAME_BYTES = 1024
"""Longer than the name of any slot, in bytes."""


class SlotIntent:
    """Records that this home is about to make a slot; the record is durable before the slot is made.

    So a slot without an epoch can be recognised as this home's own.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "slot-being-made"

    def record(self, slot: str) -> None:
        with failpoint("source.slot_intent"):
            replace(self._path, slot.encode())

    def covers(self, slot: str) -> bool:
        try:
            return read_file(self._path, limit=_NAME_BYTES) == slot.encode()
        except (OSError, Unreadable):
            return False

    @property
    def exists(self) -> bool:
        """Whether any such record exists."""
        return self._path.exists()

    def clear(self) -> None:
        with failpoint("source.slot_intent_clear"):
            self._path.unlink(missing_ok=True)
            sync_folder(self._path.parent)


class Presence(Enum):
    """Whether a slot of the expected name may exist on the server when capture starts."""

    FREE = "free"
    """It must not exist: this home has made no slot, so a slot of that name is somebody else's."""
    EITHER = "either"
    """It may exist; then it is the home's own. If it does not exist, capture makes it."""


@dataclass(frozen=True, slots=True)
class ExpectedSlot:
    """The slot that capture uses. ``read_by_us``: a capture of this home is running and reads the slot."""

    name: str
    presence: Presence
    read_by_us: bool = False


def expected_slot(store: LandingStore, configured: str) -> ExpectedSlot:
    """Return the slot of the current epoch; without one, the ``configured`` slot for the first epoch."""
    epoch = store.current_epoch()
    if epoch is not None and epoch.facts is not None:
        # The proof of continuity decides later whether it is the right slot, and intact.
        return ExpectedSlot(epoch.facts.slot, Presence.EITHER)
    ours = SlotIntent(store.folder).covers(configured)
    return ExpectedSlot(configured, Presence.EITHER if ours else Presence.FREE)


def may_have_slot(landing: Path, source: str) -> bool:
    """Return whether this home has made a slot for the log ``source``, or was about to. Makes no folder.

    ``landing``: the folder of the home that has the landing of every source.
    """
    folder = landing / source
    if not folder.is_dir() and not any(True for _ in storage_of(folder).listed(folder)):
        return False
    return SlotIntent(folder).exists or LandingStore(landing, source).current_epoch() is not None


def end_of_chain(store: LandingStore, epoch: EpochRecord) -> LandedChain:
    """Return where the landed stream of ``epoch`` ends; if it is empty, the slot's consistent point."""
    prefix = f"e{epoch.number:06d}-s-"
    stops: list[Lsn] = []
    last: LandedTransaction | None = None
    for batch_id in store.newest_first(prefix):
        span = store.read(batch_id).stream
        if span is None:
            continue
        stops.append(span.end_lsn)
        last = LandedTransaction.last_of(span)
        if last is not None:
            break
    else:
        stops.append(epoch.facts.consistent_point if epoch.facts else Lsn(0))
    return LandedChain(stops[0], last, frozenset(stops))


FOUND = RECOVERY_LSN.found(CRASH_AFTER_EMIT)
"""The scenario in which the slot is confirmed below the end of landing. Batches that record it
(``stream.recovered_from``) are counted."""


class RecoveryStopped(IngestError):
    """Capture or the source ended before what had landed was confirmed, and the decision table says stop for
    that. Nothing is lost.

    Fix: See why it ended, write ``replay_and_dedupe`` in that row, and start capture again.
    """


def require_recovery(settings: Settings, confirmed: Lsn, landed: Lsn) -> None:
    """Log that the source sends ``confirmed`` to ``landed`` again, and that the duplicates are dropped.

    Raises ``RecoveryStopped`` if the decision table says stop for this scenario.
    """
    decisions = decisions_in_force(settings)
    if decisions.action(FOUND.scenario) == STOP:
        raise RecoveryStopped(
            f"The slot is confirmed up to {confirmed}, and batches have landed up to {landed}: capture or "
            f"the source ended before that was confirmed. {decisions.path} says stop for "
            f"{FOUND.scenario}. Nothing is lost.",
            fix="See why it ended. Then write replay_and_dedupe in that row and start capture again: what "
            "the source sends a second time is dropped.",
        )
    _log.info("the source sends %s to %s again; what has landed of it is dropped", confirmed, landed)
