"""Record gaps that a person accepted with ``accept-loss``: a new epoch starts without reading its tables
again.

Landing lacks what committed between the end of the previous epoch and the start of the new one. The record
names this gap. The tables stay incomplete until a snapshot reads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.landing.encoding import content_of, decode
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.records import Format, encode
from omnisupport_ingest.storage import create_exclusively

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class AcceptedLoss:
    """What may be missing before ``epoch``: commits from ``lost_from`` (None: nothing had landed) to
    ``lost_to``.

    ``of_another_history``: the source is another server, is on another timeline, or was restored to an
    earlier state. Then it may also lack what landed up to ``lost_from``, and the two LSNs cannot be compared.
    """

    epoch: int
    at: datetime
    by: str
    reason: str
    lost_from: Lsn | None
    lost_to: Lsn | None
    of_another_history: bool = False
    format_version: int = FORMAT_VERSION


_FORMAT = Format(AcceptedLoss, FORMAT_VERSION)


class AcceptedLosses:
    """The records of one source, in its landing folder."""

    def __init__(self, folder: Path) -> None:
        """``folder``: the landing folder of the source."""
        self._folder = folder

    def accept(
        self,
        epoch: int,
        by: str,
        reason: str,
        lost_from: Lsn | None,
        lost_to: Lsn | None,
        *,
        of_another_history: bool,
    ) -> AcceptedLoss:
        """Write the record of ``epoch``, before its first capture. Durable when this returns."""
        loss = AcceptedLoss(epoch, datetime.now(UTC), by, reason, lost_from, lost_to, of_another_history)
        with failpoint("landing.accepted_loss"):
            create_exclusively(self._file(epoch), encode(loss))
        return loss

    def of(self, epoch: int) -> AcceptedLoss | None:
        """Return the loss that was accepted before ``epoch``, or None. Raises the errors of a manifest."""
        file = self._file(epoch)
        try:
            content = content_of(file)
        except FileNotFoundError:
            return None
        return decode(_FORMAT, content, file)

    def _file(self, epoch: int) -> Path:
        return self._folder / f"accepted-loss-e{epoch:06d}.json"
