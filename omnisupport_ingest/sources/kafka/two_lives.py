"""Where two lives of a connector meet, the source waits for a person: a note in its landing folder says so.

Records of the second life may be in any partition, and one alone does not always show it. Their positions
may be below those of the first life. So nothing more lands in the epoch, also in later syncs: there is one
note for each epoch, and a new epoch has none.
"""

from __future__ import annotations

from dataclasses import dataclass

from omnisupport_ingest.durable import create_exclusively
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.foreign import Unreadable
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.records import encode, read_note
from omnisupport_ingest.sources.kafka.errors import RecordRefused


@dataclass(frozen=True, slots=True)
class _Note:
    problem: str


class TwoLives:
    """The note of one epoch of the source that lands in ``store``."""

    def __init__(self, store: LandingStore, epoch: int) -> None:
        self._path, self._source = store.folder / f"two-lives-e{epoch:06d}.json", store.source

    def write(self, problem: str) -> RecordRefused:
        """Have the source wait because of ``problem``. Durable on return; a note that is there stays."""
        problem = (
            f"{problem}. The other partitions of {self._source} wait too: their records may be of either"
        )
        with failpoint("kafka.two_lives"):
            create_exclusively(self._path, encode(_Note(problem)))
        return self._refused(problem)

    def read(self) -> RecordRefused | None:
        """Return why the source waits; None if it does not. A note that cannot be read still counts."""
        try:
            return self._refused(read_note(_Note, self._path).problem)
        except FileNotFoundError:
            return None
        except (OSError, Unreadable):
            return self._refused(
                f"Records of {self._source} are from two lives of its connector; {self._path}, which says "
                "where, cannot be read"
            )

    def _refused(self, problem: str) -> RecordRefused:
        return RecordRefused(
            f"{problem}.",
            fix="If the connector was set up anew (its offsets were lost, a new first snapshot was taken), "
            f"go on with what it wrote since then: omnisupport-ingest sync {self._source} --new-epoch "
            '"what happened". If only some records carry source.sequence, have all of them carry it first.',
        )


def waits(store: LandingStore) -> RecordRefused | None:
    """Return why nothing lands in the current epoch of ``store``; None if that is not so."""
    current = store.current_epoch()
    return None if current is None else TwoLives(store, current.number).read()
