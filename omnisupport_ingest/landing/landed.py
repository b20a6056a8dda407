"""What has landed for one source and may be taken: every batch up to the first gap of its epoch."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Protocol

from omnisupport_ingest.landing.chain import Gap
from omnisupport_ingest.landing.manifest import Manifest
from omnisupport_ingest.landing.names import chunk_prefix
from omnisupport_ingest.landing.standing import BatchLine, EpochStanding, LandedPart
from omnisupport_ingest.position import Lsn

_WINDOWS_KEPT = 4


class Batches(Protocol):
    """All batches that have landed, of any epoch, including those behind a gap (``LandingStore``)."""

    def manifests(self) -> list[Manifest]: ...

    def read(self, batch_id: str) -> Manifest: ...

    def batch_ids(self, prefix: str = "") -> list[str]: ...

    def parts(self, window: str) -> list[LandedPart]: ...

    def has_just(self, window: str, batches: frozenset[str]) -> bool: ...


@dataclass(frozen=True)
class Landed:
    """What downstream may take, and the gap that holds back the rest of an epoch.

    If several epochs have a gap, ``gap`` is that of the newest of them, which may still be repaired.
    ``epochs``: how far each epoch with a batch has come, in order.
    """

    epochs: tuple[EpochStanding, ...]
    gap: Gap | None
    _store: Batches = field(repr=False, compare=False)
    _parts: dict[str, list[LandedPart]] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def batches(self) -> tuple[Manifest, ...]:
        """All batches in landing order. Parses every manifest: only for callers that need all of them."""
        epochs = {each.epoch: each for each in self.epochs}
        return tuple(
            each
            for each in self._store.manifests()
            if each.epoch in epochs
            and epochs[each.epoch].takes(each.stream.previous_end_lsn if each.stream else None)
        )

    @property
    def count(self) -> int:
        """The number of batches."""
        return sum(each.batches for each in self.epochs)

    @property
    def last(self) -> BatchLine | None:
        """The last batch in landing order."""
        return next((each.last for each in reversed(self.epochs) if each.last is not None), None)

    @property
    def stream_end(self) -> Lsn | None:
        """Up to where the stream has landed, the highest of all epochs."""
        return max((each.end for each in self.epochs if each.end is not None), default=None)

    @property
    def watermark(self) -> datetime | None:
        """The watermark of the source now: the highest of its newest epoch that has one."""
        return next((each.mark for each in reversed(self.epochs) if each.mark is not None), None)

    @property
    def captured(self) -> bool:
        """Whether the source is read by snapshot and stream, not by deliveries of files."""
        return any(each.chunks or each.streams for each in self.epochs)

    def parts(self, window: str) -> list[LandedPart]:
        """The data files in ``window``, by batch. Those of a few windows are kept in memory, because every
        table reads those of an open window."""
        if window not in self._parts:
            epochs = {each.epoch: each for each in self.epochs}
            while len(self._parts) >= _WINDOWS_KEPT:
                del self._parts[next(iter(self._parts))]
            self._parts[window] = [
                part
                for part in self._store.parts(window)
                if part.epoch in epochs and epochs[part.epoch].takes(part.begins)
            ]
        return self._parts[window]

    def untaken(self, window: str, taken: frozenset[str]) -> list[LandedPart]:
        """Return the data files in ``window`` of batches that are not in ``taken``.

        Reads nothing if all are taken.
        """
        if self._store.has_just(window, taken):
            return []
        return [part for part in self.parts(window) if part.batch_id not in taken]

    def around_snapshots(self, epoch: int) -> list[Manifest]:
        """Return the batches that show whether the snapshots of ``epoch`` are complete: chunks, and the last
        stream batch."""
        chunks = [self._store.read(name) for name in self._store.batch_ids(chunk_prefix(epoch))]
        ends = [each.end_of for each in self.epochs if each.epoch == epoch and each.end_of is not None]
        return chunks + [self._store.read(name) for name in ends]
