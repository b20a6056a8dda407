"""The key of a replay of late windows, and when its windows are replayed again after it failed.

One set of late arrivals is one replay. Its key is derived from them, so a second request is the same replay.
This holds even after a crash between requesting and recording it. Windows, not sets, wait after a failure: a
source that is steadily late makes another set with each batch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from omnisupport_ingest.contracts.decision_table import MANUAL_BACKFILL, OPERATOR, REFUSE, DecisionTable
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.layers.lateness import LateArrival
from omnisupport_ingest.layers.scheduling.run_requests import retry_at
from omnisupport_ingest.wording import counted

_BATCHES_NAMED = 5

AFTER_CANCEL = timedelta(hours=1)
"""How long a replay that a person cancelled is left alone. The windows still wait for it."""


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
class EndedReplay:
    """A replay of late windows that ended. ``cancelled``: by a person."""

    windows: frozenset[str]
    ended_at: datetime
    succeeded: bool
    cancelled: bool = False


_ONE_ROW = timedelta(days=1)
"""Failures further apart than this are not in a row."""


def waiting_windows(ended: Iterable[EndedReplay], now: datetime) -> dict[str, datetime]:
    """Return the windows that wait after a replay that failed, each with the time until which it waits.

    Whatever has landed in them since: the delay, from the end of the replay, doubles with each that fails in
    a row. It is an hour after one that a person cancelled.
    """
    failures: dict[str, int] = {}
    again: dict[str, datetime] = {}
    last: dict[str, datetime] = {}
    for replay in sorted(ended, key=lambda each: each.ended_at):
        for window in replay.windows:
            # The success between two that are far apart may not be among these.
            apart = window in last and replay.ended_at - last[window] > _ONE_ROW
            failures[window] = 0 if replay.succeeded else (0 if apart else failures.get(window, 0)) + 1
            last[window] = replay.ended_at
            again[window] = (
                replay.ended_at + AFTER_CANCEL
                if replay.cancelled
                else retry_at(failures[window], replay.ended_at)
            )
    return {window: until for window, until in again.items() if failures[window] and now < until}


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt that was requested. ``ended_at``: None while it waits or goes on. ``cancelled``: by a
    person."""

    ended_at: datetime | None
    cancelled: bool = False


def next_attempt(
    replay: LateReplay, find: Callable[[str], Attempt | None], now: datetime
) -> tuple[int | None, str]:
    """Return the number of the attempt to request now, and a reason in words; None for the number if none is
    due.

    ``find`` looks an attempt up by its id. An attempt has failed if it has ended and the windows still wait.
    The next one is requested after a delay, from its end, that doubles with every attempt; an hour after one
    that a person cancelled.
    """
    number = 1
    last: Attempt | None = None
    while (found := find(replay.name(number))) is not None:
        last, number = found, number + 1
    if last is None:
        return number, ""
    if last.ended_at is None:
        return None, f"Backfill {replay.name(number - 1)} replays {counted(len(replay.windows), 'window')}."
    again = last.ended_at + AFTER_CANCEL if last.cancelled else retry_at(number - 1, last.ended_at)
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
