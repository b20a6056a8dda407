"""Facts about landed batches that a checkpoint repeats: cursor, watermark and LSN range."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from omnisupport_ingest.lake.checkpoint import Checkpoint
from omnisupport_ingest.landing.manifest import DataFile
from omnisupport_ingest.landing.standing import LandedPart
from omnisupport_ingest.position import Position


@dataclass(frozen=True, slots=True)
class BatchFacts:
    """Facts about the batches of one window, together.

    ``first`` and ``last``: the lowest and highest position among their events of that window. ``watermark``:
    the highest that any of them set. ``last_batch_id``: the batch of the highest event.
    """

    first: Position | None
    last: Position | None
    last_batch_id: str | None
    watermark: datetime | None


def facts_of(checkpoints: Sequence[Checkpoint]) -> BatchFacts:
    """Return the highest position of ``checkpoints``, its batch, and the highest watermark; each None if no
    checkpoint has one."""
    mark = max((each.watermark for each in checkpoints if each.watermark is not None), default=None)
    newest = max(
        (each for each in checkpoints if each.cursor),
        key=lambda each: Position.parse(each.cursor),
        default=None,
    )
    if newest is None:
        return BatchFacts(None, None, None, mark)
    last = Position.parse(newest.cursor)
    return BatchFacts(last, last, newest.last_batch_id, mark)


def facts_of_parts(parts: Iterable[LandedPart]) -> BatchFacts:
    """Return the facts of landed files of one window; all None without files."""
    held = list(parts)
    if not held:
        return BatchFacts(None, None, None, None)
    # Copies of one event may be in several batches; the result must not depend on the order of ``parts``.
    newest = max(held, key=lambda part: (part.last, part.batch_id))
    marks = [part.mark for part in held if part.mark is not None]
    return BatchFacts(
        first=min(part.first for part in held),
        last=newest.last,
        last_batch_id=newest.batch_id,
        watermark=max(marks, default=None),
    )


def rise_from(last: Position | None, files: Iterable[DataFile | LandedPart]) -> bool:
    """Whether the positions in ``files`` are distinct and all above ``last``.

    Landing's records prove it: each file's positions rise strictly, and the files' ranges follow one another.
    Then nothing has to be deduplicated, and no shuffle is needed.
    """
    for file in sorted(files, key=lambda each: each.first):
        if not file.ordered or (last is not None and file.first <= last):
            return False
        last = file.last
    return True
