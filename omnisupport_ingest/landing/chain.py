"""The chain of stream batches: each continues exactly where the one before it ended.

``previous_end_lsn → end_lsn`` makes "did we lose anything?" a look-up. Where a link is missing,
everything after it is held back, and the hole is named by both of its ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from omnisupport_ingest.landing.manifest import Manifest, StreamSpan
from omnisupport_ingest.position import Lsn


@dataclass(frozen=True, slots=True)
class Hole:
    """A break in the chain of one epoch.

    ``after`` is the last batch of the unbroken part, which ends at ``expected``; ``before`` is the
    next batch found, which continues ``found`` instead. ``found`` below ``expected`` is an overlap
    of two writers; above it, a batch is missing.
    """

    epoch: int
    after: str
    expected: Lsn
    before: str
    found: Lsn

    def __str__(self) -> str:
        return (
            f"The chain of epoch {self.epoch} is broken: {self.after} ends at {self.expected}, "
            f"but the next batch, {self.before}, continues {self.found}."
        )


def unbroken(manifests: Iterable[Manifest]) -> tuple[tuple[Manifest, ...], Hole | None]:
    """The stream batches of one epoch up to the first hole, and that hole.

    ``manifests``: stream batches of one epoch, in any order. The one with the lowest
    ``previous_end_lsn`` starts the chain: batches before it may be gone by retention.
    """
    accepted: list[Manifest] = []
    for manifest in sorted(manifests, key=lambda each: _span(each).previous_end_lsn):
        if accepted:
            last, expected = accepted[-1], _span(accepted[-1]).end_lsn
            found = _span(manifest).previous_end_lsn
            if found != expected:
                hole = Hole(manifest.epoch, last.batch_id, expected, manifest.batch_id, found)
                return tuple(accepted), hole
        accepted.append(manifest)
    return tuple(accepted), None


def _span(manifest: Manifest) -> StreamSpan:
    if manifest.stream is None:
        raise ValueError(f"{manifest.batch_id} is not a batch of the stream")
    return manifest.stream
