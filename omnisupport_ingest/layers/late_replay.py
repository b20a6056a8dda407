"""The key of a replay of late windows, and when a failed one is requested again.

One set of late arrivals is one replay. Its key is derived from them, so a second request is the same replay.
This holds even after a crash between requesting and recording it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime

from omnisupport_ingest.contracts.decision_table import MANUAL_BACKFILL, OPERATOR, REFUSE, DecisionTable
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.layers.lateness import LateArrival
from omnisupport_ingest.layers.run_requests import retry_at
from omnisupport_ingest.wording import counted

_BATCHES_NAMED = 5


class BackfillsRefused(IngestError):
    """The decision table refuses backfills that people ask for.

    Fix: Write ``replay_window`` in the row that the message names, start the code location again, and ask
    again.
    """


@dataclass(frozen=True, slots=True)
class LateReplay:
    """A replay of the windows that late events landed in."""

    source: str
    arrivals: tuple[LateArrival, ...]

    @property
    def windows(self) -> tuple[str, ...]:
        return tuple(sorted({each.window for each in self.arrivals}))

    @property
    def batches(self) -> tuple[str, ...]:
        return tuple(sorted({each.batch_id for each in self.arrivals}))

    @property
    def events(self) -> int:
        return sum(each.events for each in self.arrivals)

    @property
    def reason(self) -> str:
        """One line for people."""
        windows, batches = counted(len(self.windows), "closed window"), counted(len(self.batches), "batch")
        events = counted(self.events, "event")
        return f"late arrival: {events} of {batches} in {windows} of {self.source}"

    @property
    def named_batches(self) -> str:
        """The names of the first batches, and how many more there are."""
        more = len(self.batches) - _BATCHES_NAMED
        return ", ".join(self.batches[:_BATCHES_NAMED]) + (f" and {more} more" if more > 0 else "")

    def name(self, attempt: int) -> str:
        """The id of attempt number ``attempt`` (from 1) at this replay."""
        parts = [self.source, sorted({(each.window, each.batch_id) for each in self.arrivals})]
        digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
        # Dagster's pages show what stands before the first dash.
        return f"{digest[:16]}-late-a{attempt}"


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt that was requested."""

    finished: bool
    asked_at: datetime


def next_attempt(
    replay: LateReplay, find: Callable[[str], Attempt | None], now: datetime
) -> tuple[int | None, str]:
    """Return the number of the attempt to request now, and a reason in words; None for the number if none is
    due.

    ``find`` looks an attempt up by its id. An attempt has failed if it has ended and the windows still wait.
    The next one is requested after a delay that doubles with every attempt.
    """
    number = 1
    last: Attempt | None = None
    while (found := find(replay.name(number))) is not None:
        last, number = found, number + 1
    if last is None:
        return number, ""
    if not last.finished:
        return None, f"Backfill {replay.name(number - 1)} replays {counted(len(replay.windows), 'window')}."
    again = retry_at(number - 1, last.asked_at)
    if now < again:
        return None, f"Attempt {number - 1} at the replay ended early; the next is at {again:%H:%M:%S} UTC."
    return number, ""


def without_running(
    arrivals: Iterable[LateArrival], running: Callable[[str], bool]
) -> tuple[LateArrival, ...]:
    """Return the arrivals in windows that no run in progress covers. The others wait for the run to end."""
    return tuple(each for each in arrivals if not running(each.window))


BY_HAND = OPERATOR.found(MANUAL_BACKFILL)
"""The finding that a person has requested a backfill."""


def refuse_backfill(decisions: DecisionTable) -> None:
    """Raise ``BackfillsRefused`` if the decision table refuses backfills that people request."""
    if decisions.action(BY_HAND.scenario) == REFUSE:
        raise BackfillsRefused(
            f"Backfills by hand are refused: {decisions.path} says so in the row of {BY_HAND.scenario}.",
            fix="Write replay_window there, start the code location again, and ask again.",
        )
