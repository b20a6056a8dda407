"""The loss account: what landing proves about losses of a source, since its first slot was created.

Landing records every loss: the chain of the stream names its gaps, an epoch the reason for its beginning, an
accepted loss the person who accepted it, missed changes the time when they were noticed, and quarantine what
is withheld. The account lists them and gives a verdict in one sentence. It reads only manifests and records
of landing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.landing.accepted_losses import AcceptedLoss, AcceptedLosses
from omnisupport_ingest.landing.chain import Gap
from omnisupport_ingest.landing.completeness import Incomplete, incomplete_now
from omnisupport_ingest.landing.epochs import EpochRecord
from omnisupport_ingest.landing.lost_changes import LostChanges, LostStretch
from omnisupport_ingest.landing.standing import EpochStanding
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.storage import has_landed
from omnisupport_ingest.wording import counted


class Verdict(StrEnum):
    """The result of the account, from best to worst."""

    NOTHING_LANDED = "nothing_landed"
    NOTHING_LOST = "nothing_lost"
    NAMED = "named"
    WITHHELD = "withheld"
    UNKNOWN = "unknown"
    MISSING = "missing"

    @property
    def is_finding(self) -> bool:
        """Whether a person has to act on it."""
        return self in (Verdict.WITHHELD, Verdict.UNKNOWN, Verdict.MISSING)


@dataclass(frozen=True, slots=True)
class EpochAccount:
    """One epoch: the part of the log that landed without a gap, and what is known to be missing.

    ``start`` and ``end`` are None if the source has no log, or if nothing of it has landed. ``gap`` holds
    back what landed behind it. ``accepted``: what a person accepted as lost before the epoch. ``proved``: how
    often, after a crash, batches that were durable but not confirmed were sent again and recognized.
    """

    number: int
    reason: str
    began_at: datetime | None
    slot: str | None
    start: Lsn | None
    end: Lsn | None
    batches: int
    events: int
    gap: Gap | None
    accepted: AcceptedLoss | None
    missed: tuple[LostStretch, ...]
    proved: int


@dataclass(frozen=True, slots=True)
class OffsetsGone:
    """Kafka offsets that were deleted before they were read; ``accepted`` is why a person went on."""

    topic: str
    partition: int
    start: int
    gone: int
    accepted: str


@dataclass(frozen=True, slots=True)
class LossAccount:
    """The account of one source.

    ``incomplete``: tables whose state never existed at the source. ``withheld``: events in quarantine by the
    state of their review. ``slot_problem``: why the server cannot send what comes next; None if it can, or if
    nobody checked. ``slot_unknown``: why somebody checked and got no answer.
    """

    source: str
    epochs: tuple[EpochAccount, ...]
    incomplete: tuple[Incomplete, ...]
    offsets_gone: tuple[OffsetsGone, ...]
    withheld: Mapping[str, int]
    slot_problem: str | None
    slot_unknown: str | None = None

    @property
    def open_gaps(self) -> list[Gap]:
        return [each.gap for each in self.epochs if each.gap is not None and not each.gap.is_repaired]

    @property
    def named_losses(self) -> int:
        """Stretches whose single events are not known, and whose tables were read again since."""
        repaired = sum(each.gap is not None and each.gap.is_repaired for each in self.epochs)
        accepted = sum(each.accepted is not None for each in self.epochs)
        read_again = sum(not stretch.open for each in self.epochs for stretch in each.missed)
        begun_again = max(0, len(self.epochs) - 1 - repaired - accepted)
        return repaired + accepted + read_again + begun_again + len(self.offsets_gone)

    @property
    def _named(self) -> str:
        """Return the known losses as the beginning of a sentence."""
        gone = len(self.offsets_gone)
        if gone:
            # Unlike tables, a topic cannot be read again.
            return (
                f"Messages of {self.source} were deleted before they were read, and that was accepted: of "
                f"{_stretches(gone)} named below nothing is known"
            )
        return (
            f"Nothing of {self.source} is missing now; of {_stretches(self.named_losses)} named below single "
            "changes are not known, only what the tables were afterwards"
        )

    @property
    def waiting(self) -> int:
        """Withheld events that nobody has decided on."""
        return self.withheld.get("open", 0)

    @property
    def verdict(self) -> Verdict:
        if not self.epochs:
            return Verdict.NOTHING_LANDED
        if self.open_gaps or self.incomplete or self.slot_problem:
            return Verdict.MISSING
        if any(stretch.open for each in self.epochs for stretch in each.missed):
            return Verdict.MISSING
        if self.slot_unknown:
            return Verdict.UNKNOWN
        if self.waiting:
            return Verdict.WITHHELD
        return Verdict.NAMED if self.named_losses else Verdict.NOTHING_LOST

    @property
    def sentence(self) -> str:
        """The verdict in one sentence."""
        events, batches = (sum(getattr(each, name) for each in self.epochs) for name in ("events", "batches"))
        all_of_it = f"all is there, {counted(events, 'event')} of {counted(batches, 'batch')}"
        match self.verdict:
            case Verdict.NOTHING_LANDED:
                return f"Nothing of {self.source} has landed yet, so nothing can be lost."
            case Verdict.NOTHING_LOST:
                return f"Nothing of {self.source} was lost: {all_of_it}, without a gap."
            case Verdict.NAMED:
                return f"{self._named}."
            case Verdict.WITHHELD:
                losses = self._named if self.named_losses else f"Nothing of {self.source} was lost"
                events, wait = ("event", "waits") if self.waiting == 1 else ("events", "wait")
                return f"{losses}, and {self.waiting:,} {events} in quarantine {wait} for a decision."
            case Verdict.UNKNOWN:
                landed = self._named if self.named_losses else f"Of {self.source}, {all_of_it}, without a gap"
                return f"{landed}; whether the server still has what comes next is not known."
            case Verdict.MISSING:
                return f"Changes of {self.source} may be missing: see what is marked below."


def _stretches(count: int) -> str:
    return "1 stretch" if count == 1 else f"{count:,} stretches"


def loss_account(
    workspace: Workspace,
    source: str,
    *,
    withheld: Mapping[str, int],
    slot_problem: str | None = None,
    slot_unknown: str | None = None,
) -> LossAccount:
    """Return the account of ``source``. Raises the errors of reading landing.

    ``withheld``, ``slot_problem``, ``slot_unknown``: as in the account.
    """
    if not has_landed(workspace.home.path, source):
        return LossAccount(source, (), (), (), withheld, None)
    store = workspace.landing(source)
    landed = store.landed()
    records = {each.number: each for each in store.epochs()}
    contracts = workspace.contracts.of_source(source)
    names = {each.name for each in contracts}
    newest = max([*records, *(each.epoch for each in landed.epochs)], default=0)
    return LossAccount(
        source=source,
        epochs=tuple(_epoch(store, each, records, newest, names) for each in landed.epochs),
        incomplete=tuple(_incomplete(contracts, store, newest)),
        offsets_gone=() if landed.captured else tuple(_offsets_gone(store)),
        withheld=withheld,
        slot_problem=slot_problem,
        slot_unknown=slot_unknown,
    )


def _epoch(
    store: LandingStore,
    standing: EpochStanding,
    records: Mapping[int, EpochRecord],
    newest: int,
    names: Collection[str],
) -> EpochAccount:
    """``names``: of the contracts. A table without one is read by nobody, so nothing can be missing of it."""
    record = records.get(standing.epoch)
    return EpochAccount(
        number=standing.epoch,
        reason=record.reason if record is not None else "not recorded",
        began_at=record.began_at if record is not None else None,
        slot=record.facts.slot if record is not None and record.facts is not None else None,
        start=standing.start,
        end=standing.end,
        batches=standing.batches,
        events=standing.events,
        gap=standing.gap(newest),
        accepted=AcceptedLosses(store.folder).of(standing.epoch),
        missed=tuple(
            each
            for each in LostChanges(store.folder, standing.epoch).all()
            if not each.open or each.table in names
        ),
        proved=standing.recoveries,
    )


def _incomplete(contracts: Sequence[TableContract], store: LandingStore, epoch: int) -> Iterator[Incomplete]:
    """Yield the tables of a captured source whose newest state is incomplete."""
    landed = store.landed()
    if not landed.captured:
        return
    batches, lost = landed.around_snapshots(epoch), LostChanges(store.folder, epoch).all()
    for contract in contracts:
        incomplete = incomplete_now(batches, contract.name, epoch, lost)
        if incomplete is not None:
            yield incomplete


def _offsets_gone(store: LandingStore) -> Iterator[OffsetsGone]:
    for batch in store.manifests():
        for span in batch.file.offsets or () if batch.file is not None else ():
            if span.gone:
                yield OffsetsGone(span.topic, span.partition, span.start, span.gone, span.accepted)
