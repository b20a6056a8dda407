"""Decides what retention may remove from a window, and why not: pure functions of facts about the window.

Age is counted by the watermark of the source, not by this machine's clock. So nothing grows old while a
source stands still or is not captured. Whatever the contracts say, a window keeps everything it may still
need while it is open, has work to do, or has events that a person has to decide on.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum

from omnisupport_ingest.layers.removed import LANDING, RAW


class Answer(Enum):
    """``YOUNG``: not old enough, or kept without end. ``GONE``: removed before."""

    YOUNG = "young"
    GONE = "gone"
    REFUSED = "refused"
    REMOVED = "removed"


@dataclass(frozen=True, slots=True)
class WindowFacts:
    """What is known of one window of time when retention looks at it.

    ``end`` (timezone-aware): its end. ``closed``: the watermark has passed it and a run has closed it in
    ``deduped_events``. ``settled``: every layer has all that landed in it, made by the rules in force.
    ``landed``: number of its events, by the manifests. ``held``: number of its events in files of raw that
    are on disk. ``all_held``: raw has taken every batch. ``taking``: in words, why events may always land in
    it; None if they may not. ``snapshot``: a table whose snapshot is not over; None if there is none.
    ``undecided``: number of events in quarantine that wait for a person. ``judged_whole``: all
    files of its deduped events and quarantine are on disk. ``trimmed``: its data files have left landing;
    ``sealed``: its events have left raw.
    """

    window: str
    end: datetime
    closed: bool
    settled: bool
    landed: int
    held: int
    all_held: bool
    taking: str | None = None
    snapshot: str | None = None
    undecided: int = 0
    judged_whole: bool = True
    trimmed: bool = False
    sealed: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """``answer`` for one ``layer`` of one window. ``why``: in words for people, if it is refused."""

    layer: str
    window: str
    answer: Answer
    why: str = ""


def judge_landing(facts: WindowFacts, keep: timedelta | None, watermark: datetime | None) -> Verdict:
    """Decide whether the data files of the window may be removed from landing, which keeps them for
    ``keep``."""
    if facts.trimmed:
        return Verdict(LANDING, facts.window, Answer.GONE)
    if not is_old(facts, keep, watermark):
        return Verdict(LANDING, facts.window, Answer.YOUNG)
    why = _needed(facts)
    if why is None and facts.snapshot is not None:
        why = f"the snapshot of {facts.snapshot} is not over: it may look into the stream again"
    return _verdict(LANDING, facts, why)


def judge_raw(facts: WindowFacts, keep: timedelta | None, watermark: datetime | None) -> Verdict:
    """Decide whether the events of the window may leave raw, which seals it. ``facts.trimmed`` must be true
    if the same plan removes the window from landing."""
    if facts.sealed:
        return Verdict(RAW, facts.window, Answer.GONE)
    if not is_old(facts, keep, watermark):
        return Verdict(RAW, facts.window, Answer.YOUNG)
    why = _needed(facts) or facts.taking
    if why is None and facts.undecided:
        why = f"{facts.undecided} of its events in quarantine wait for a decision"
    if why is None and not facts.judged_whole:
        why = "files of what was judged of it are gone from disk"
    if why is None and not facts.trimmed:
        why = "landing keeps its data files"
    return _verdict(RAW, facts, why)


def is_old(facts: WindowFacts, keep: timedelta | None, watermark: datetime | None) -> bool:
    """Whether the watermark is at least ``keep`` (None: without end) after the end of the window."""
    return keep is not None and watermark is not None and facts.end + keep <= watermark


def _needed(facts: WindowFacts) -> str | None:
    """Return why the window still needs its data; None if it does not."""
    if not facts.closed:
        return "it is not closed"
    if not facts.settled:
        return "work in it is pending, or it was made by other rules"
    if not facts.all_held:
        return "raw has not taken every batch of it"
    if facts.landed != facts.held:
        return f"raw holds {facts.held} of its {facts.landed} events"
    return None


def _verdict(layer: str, facts: WindowFacts, why: str | None) -> Verdict:
    if why is not None:
        return Verdict(layer, facts.window, Answer.REFUSED, why)
    return Verdict(layer, facts.window, Answer.REMOVED)
