"""The chain of stream batches: each one continues exactly where the one before it ended.

A batch records where it begins and ends (``previous_end_lsn → end_lsn``), so a lost event shows as a gap
between two batches. Downstream takes nothing after a gap; the gap is named by both of its ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from omnisupport_ingest.landing.manifest import Manifest, StreamSpan
from omnisupport_ingest.position import Lsn


@dataclass(frozen=True, slots=True)
class Gap:
    """A break in the chain of one epoch.

    Attributes:
        after: the last batch before the break; None if the break is at the start of the epoch.
        expected: where that batch ends, or the epoch starts.
        before: the next batch found.
        continued: where that batch starts. Below ``expected``, two writers overlap; above it, a batch is
            missing.
        later_epoch: the newest epoch, if it is a later one: then the gap has been repaired by a new epoch.
    """

    epoch: int
    after: str | None
    expected: Lsn
    before: str
    continued: Lsn
    later_epoch: int | None = None

    def __str__(self) -> str:
        end = "it starts" if self.after is None else f"{self.after} ends"
        return (
            f"The chain of epoch {self.epoch} is broken: {end} at {self.expected}, "
            f"but the next batch, {self.before}, continues {self.continued}."
        )

    @property
    def is_repaired(self) -> bool:
        """Whether a later epoch has begun, whose snapshot has what the gap lacks."""
        return self.later_epoch is not None

    @property
    def fix(self) -> str:
        """What a person can do about the gap."""
        if self.is_repaired:
            return (
                f"Nothing is left to do: epoch {self.later_epoch} has begun with a new snapshot, and this "
                "gap names what is not known event by event."
            )
        repair = (
            '`omnisupport-ingest capture --new-epoch "what happened"` begins a new epoch with a new '
            f"snapshot of every table. The batches of epoch {self.epoch} from {self.continued} on stay "
            "held back."
        )
        if self.continued < self.expected:
            return f"Two writers have landed the same part of the WAL: stop one of them. Then {repair}"
        return (
            "Restore the manifest and the data of the missing batch from a backup of the landing folder "
            f"(in a bucket: as objects). If there is none: {repair} Events between {self.expected} and "
            f"{self.continued} that the source no longer has are lost, and this gap names them."
        )


def unbroken(
    manifests: Iterable[Manifest], start: Lsn | None = None
) -> tuple[tuple[Manifest, ...], Gap | None]:
    """Return the stream batches of one epoch up to the first gap, and that gap.

    Args:
        manifests: stream batches of one epoch, in any order.
        start: where the epoch's stream starts. A first batch that starts elsewhere is a gap, because landed
            batches are not deleted. None: the batch with the lowest ``previous_end_lsn`` starts the chain.
    """
    accepted: list[Manifest] = []
    after, expected = None, start
    for manifest in sorted(manifests, key=lambda each: _span(each).previous_end_lsn):
        continued = _span(manifest).previous_end_lsn
        if expected is not None and continued != expected:
            return tuple(accepted), Gap(manifest.epoch, after, expected, manifest.batch_id, continued)
        accepted.append(manifest)
        after, expected = manifest.batch_id, _span(manifest).end_lsn
    return tuple(accepted), None


def _span(manifest: Manifest) -> StreamSpan:
    if manifest.stream is None:
        raise ValueError(f"{manifest.batch_id} is not a batch of the stream")
    return manifest.stream
