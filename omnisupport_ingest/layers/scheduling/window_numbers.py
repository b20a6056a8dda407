"""Numbers about each window of a source, and their totals.

The checks of a run read these. Their cost depends on the changed and the unsettled windows, not on all
windows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from omnisupport_ingest.lake.checkpoint import Checkpoint
from omnisupport_ingest.lake.state import WindowState
from omnisupport_ingest.layers.checkpoints import Counts
from omnisupport_ingest.layers.replay_reasons import UNEXPLAINED as OF_UNKNOWN_REASON
from omnisupport_ingest.layers.window_index import (
    DISCARDED_OF,
    HELD,
    TO_CLOSE,
    UNAPPLIED,
    UNEXPLAINED,
    WITHHELD,
    WRONG,
    WindowIndex,
)
from omnisupport_ingest.layers.withheld_numbers import LEFT
from omnisupport_ingest.windows import OUT_OF_RANGE

_AT_ONCE = 64

FORMER = "former "
"""Prefix of a table's column and a policy that is not in force; names the number of sealed windows with
values by it."""


@dataclass(frozen=True)
class Standing:
    """The totals of all windows of a source.

    ``judged``: number of judged windows; ``counts``: their events; ``wrong``: windows whose counts do not add
    up. ``changed``: how many windows, counted per layer, had another content after their last replay;
    ``unexplained``: those without a known reason. ``withheld``: windows with quarantine files. ``unsettled``:
    windows that wait, or may wait, for something.

    By the watermark: ``open``: how many windows it has not passed. ``closed``: how many it has passed and a
    run has closed. ``closing``: windows that wait for that run. ``late``: windows that wait for the replay of
    late events; they are in none of the former three. ``late_events``: in all windows, replayed or not.

    In quarantine: ``held``: events by reason; ``discarded``: those of them that were discarded. ``left``: by
    reason, windows with events that somebody may have to look at. ``unapplied``: windows that were judged
    without some of the decisions on their events; none of their events count as ``discarded``.

    ``former``: how many sealed windows have values by another policy than the one in force, by table, column
    and that policy (``customers.email mask:name``).
    """

    judged: int
    counts: Counts
    wrong: tuple[str, ...]
    changed: int
    unexplained: tuple[str, ...]
    withheld: tuple[str, ...]
    unsettled: tuple[str, ...]
    open: int
    closing: tuple[str, ...]
    closed: int
    late: tuple[str, ...]
    late_events: int
    held: Mapping[str, int]
    discarded: Mapping[str, int]
    left: Mapping[str, tuple[str, ...]]
    unapplied: tuple[str, ...]
    former: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class LayerStates:
    """The states of one window in raw, in deduped events and in every table's net changes; None: not made."""

    raw: WindowState | None
    judged: WindowState | None
    folded: Sequence[WindowState | None]


def numbers_of(
    states: LayerStates, *, listed: bool, withheld: bool, late_events: int, sealed: bool
) -> Mapping[str, int]:
    """Return the numbers of the window that has the ``states``.

    ``listed``: something landed in it, or raw holds events of it. ``withheld``: it has quarantine files.
    ``sealed``: its events have left raw, so its counts are not compared with raw.
    """
    raw, judged = states.raw, states.judged
    made = [state.checkpoint for state in (raw, judged, *states.folded) if state is not None]
    numbers = {
        "changed": sum(bool(each.changed_by) for each in made),
        UNEXPLAINED: sum(OF_UNKNOWN_REASON in each.changed_by for each in made),
        WITHHELD: int(withheld),
        "late": late_events,
    }
    closed = sealed or (judged is not None and judged.closed)
    if listed:
        numbers |= {"closed": int(closed), TO_CLOSE: int(not closed)}
    if judged is None:
        return numbers
    checkpoint, arrived = judged.checkpoint, raw.checkpoint if raw is not None else None
    return {
        **numbers,
        "judged": 1,
        "raw": checkpoint.raw,
        "deduped": checkpoint.deduped,
        "duplicates": checkpoint.duplicates,
        "quarantined": checkpoint.quarantined,
        WRONG: int(not (_is_whole(checkpoint) if sealed else _adds_up(checkpoint, arrived))),
    }


def standing_of(
    index: WindowIndex, is_passed: Callable[[str], bool], late: Collection[str], unsettled: Collection[str]
) -> Standing:
    """Return the totals by the numbers in ``index``. ``is_passed``: whether the watermark has closed a
    window."""
    totals, waits = index.totals, set(late)
    closing = [window for window in index.flagged(TO_CLOSE) if is_passed(window) and window not in waits]
    not_passed = [window for window in _not_passed(index, is_passed) if window not in waits]
    apart = [index.numbers(window) for window in {*waits, *not_passed}]
    return Standing(
        judged=totals["judged"],
        counts=Counts(*(totals[name] for name in ("raw", "deduped", "duplicates", "quarantined"))),
        wrong=tuple(index.flagged(WRONG)),
        changed=totals["changed"],
        unexplained=tuple(index.flagged(UNEXPLAINED)),
        withheld=tuple(index.flagged(WITHHELD)),
        unsettled=tuple(unsettled),
        open=sum(1 for window in not_passed if index.numbers(window).keys() & {"closed", TO_CLOSE}),
        closing=tuple(closing),
        closed=totals["closed"] - sum(numbers.get("closed", 0) for numbers in apart),
        late=tuple(sorted(waits)),
        late_events=totals["late"],
        held=_by_reason(totals, HELD),
        discarded=_by_reason(totals, DISCARDED_OF),
        left={reason: tuple(index.flagged(flag)) for reason, flag in LEFT.items()},
        unapplied=tuple(index.flagged(UNAPPLIED)),
        former=_by_reason(totals, FORMER),
    )


def _by_reason(totals: Mapping[str, int], what: str) -> dict[str, int]:
    return {name.removeprefix(what): n for name, n in totals.items() if name.startswith(what) and n}


def _not_passed(index: WindowIndex, is_passed: Callable[[str], bool]) -> Iterator[str]:
    """Yield the windows (without the sentinel) that the watermark has not passed, the latest first."""
    below: str | None = None
    while found := index.last(below, _AT_ONCE):
        for window in found:
            if window != OUT_OF_RANGE:
                if is_passed(window):
                    return
                yield window
        below = found[-1]


def _is_whole(judged: Checkpoint) -> bool:
    return judged.raw == judged.deduped + judged.duplicates + judged.quarantined


def _adds_up(judged: Checkpoint, raw: Checkpoint | None) -> bool:
    if not _is_whole(judged):
        return False
    # Raw may be further, but deduped events cannot have judged more than raw holds.
    if raw is None or judged.raw > raw.rows:
        return False
    same = judged.last_batch_id == raw.last_batch_id and judged.batches == raw.batches
    return judged.raw == raw.rows if same else True
